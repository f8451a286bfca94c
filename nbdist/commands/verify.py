"""The verb that compares a step under a strategy with the same step of one process."""

from __future__ import annotations

from argparse import Namespace

from nbdist.core.option import of_values, options_of
from nbdist.core.view import View
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.verb import Verb
from nbdist.verification.verdict import StepRequest
from nbdist.verification.view import verification_result


def dist_verify(values: Namespace) -> View:
    """Verify the step that was typed, or one of our own."""
    request = of_values(StepRequest, values, code=values.rest)
    return verification_result(NOTEBOOK.session.verify(request))


VERBS = (
    Verb(
        "dist_verify",
        "Compare a training step, module by module, with the same step of one process.",
        "%dist_verify -- train_step(batch)",
        dist_verify,
        options_of(StepRequest),
        takes_code=True,
    ),
)
