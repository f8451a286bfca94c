"""The verb that compares a step under a strategy with the same step of one process."""

from __future__ import annotations

from argparse import Namespace

from nbdist.core.option import Option, whole_number
from nbdist.core.view import View
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.verb import Verb
from nbdist.verification.verdict import REFERENCES, StepRequest
from nbdist.verification.view import verification_result

_count = whole_number("a whole number from 1 to 10^6", most=10**6)


def dist_verify(values: Namespace) -> View:
    """Verify the step that was typed, or one of our own."""
    request = StepRequest(
        values.rest,
        values.inputs or "",
        values.batch,
        values.sequence,
        values.steps,
        values.against or "",
    )
    return verification_result(NOTEBOOK.session.verify(request))


VERBS = (
    Verb(
        "dist_verify",
        "Compare a training step, module by module, with the same step of one process.",
        "%dist_verify -- train_step(batch)",
        dist_verify,
        (
            Option(
                ("--steps",),
                "how often the step is made; modules are compared in the first (default: 1)",
                kind=_count,
                default=1,
                metavar="N",
            ),
            Option(
                ("--against",),
                "what the step is compared with: single (one process), or fsdp, of which one block "
                "at a time is whole (default: single, and fsdp where that has no room)",
                choices=REFERENCES,
                metavar="NAME",
            ),
            Option(
                ("--inputs",),
                "without a step: a variable on the ranks that the model is called with: a tensor, "
                "a tuple, or a dict of keyword arguments",
                metavar="NAME",
            ),
            Option(
                ("--batch",),
                "without a step and inputs: samples per rank of random tokens, for a language "
                "model (default: 4)",
                kind=_count,
                default=4,
                metavar="N",
            ),
            Option(
                ("--seq",),
                "their length (default: 32)",
                kind=_count,
                default=32,
                metavar="N",
                name="sequence",
            ),
        ),
        takes_code=True,
    ),
)
