"""A plan beside a real step of the model: %dist_plan MODEL --check."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace

from nbdist.core.view import View
from nbdist.errors import OptionError
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.planner.check import checks
from nbdist.planner.kernel.describe_model import checked_step, live_model
from nbdist.planner.kernel.fake_process import FakeEngine
from nbdist.planner.live_model import by_kinds, load_of, shape_of
from nbdist.planner.plan import accumulating
from nbdist.planner.view.check_view import shown_check
from nbdist.planner.workload import Workload
from nbdist.strategy.choice import described
from nbdist.strategy.choose import choose


def checked(
    name: str,
    inputs: str,
    load: Workload,
    progress: Callable[[str], None] = lambda _text: None,
) -> View:
    """Predict a step's memory under the strategy that counts, and measure it on the ranks.

    Four steps are run with the user's model and optimizer, and all is put back bit by bit.

    Args:
        name: A variable on the ranks that is a model.
        inputs: A variable that it is called with; empty for random tokens of a language model.
        load: Batch and sequence of these tokens.
        progress: Told what is done now.

    Raises:
        OptionError: There is no such model, or nobody knows what it is called with.
        NotRunning, RankBusy, RankGone, Interrupted, NbdistError: As for a cell.
    """
    session = NOTEBOOK.session
    if not all(part.isidentifier() for part in name.split(".")):
        raise OptionError(
            f"--check measures a model on the ranks, and {name} is not a variable name."
        )
    live = live_model(session, name, inputs)
    choice = session.strategy.current()
    # One backward for each step, as it is measured.
    choice = replace(choice, options=replace(choice.options, accumulate=1))
    if not live.is_prepared:  # every rank has it by itself
        choice = choose("single", {}, session.topology.world_size)
    has_gpu = session.topology.ranks[0].device != "cpu"
    # Without an optimizer of its own no step of one is measured: SGD keeps nothing.
    load = replace(load_of(live, load, None if live.optimizer else "sgd"), has_gpu=has_gpu)
    progress("a step on the ranks")
    measured = checked_step(session, name, inputs, load.batch, load.sequence)
    otherwise = functools.partial(by_kinds, live)
    shape = shape_of(live)
    with FakeEngine(
        live.source, otherwise=otherwise, problem=live.problem, progress=progress
    ) as engine:
        memory = engine(shape, accumulating(choice, load), load)
    # What CUDA's context and libraries take is not in the allocator's count.
    memory = replace(memory, overhead=0.0)
    results = checks(memory, measured, has_forward=choice.degrees.pp == 1)
    return shown_check(live, described(choice), load, memory, results, measured)
