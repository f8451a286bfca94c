"""What a plan predicts beside what ranks measure: states exactly, the peak closely."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from nbdist.errors import OptionError
from nbdist.planner.check import MeasuredMemory, largest
from nbdist.planner.fake_protocol import NAME, Source
from nbdist.planner.kernel.fake_process import FakeEngine
from nbdist.planner.memory import Memory, memory_of
from nbdist.planner.models import of_config, of_count
from nbdist.planner.workload import Workload
from nbdist.strategy.choose import choose
from tests.accuracy.case import LONG, MODELS, SHORT, Case, Result, record
from tests.accuracy.ranks import measure
from tests.support.torch_ranks import LIMIT_S, run_ranks


@pytest.fixture(scope="module", name="engine")
def _engine() -> Iterator[FakeEngine]:
    with FakeEngine(Source()) as engine:
        yield engine


def test_states_and_peaks_of_some(tmp_path: Path, engine: FakeEngine) -> None:
    """A transformer in parts, and an MLP that is whole on each rank and has no config."""
    _compare(tmp_path, 2, SHORT, engine)


@pytest.mark.accuracy
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("n", [2, 4])
def test_states_and_peaks_of_all(tmp_path: Path, engine: FakeEngine, n: int) -> None:
    _compare(tmp_path, n, [case for case in LONG if case.n == n], engine, limit_s=880)


def _compare(
    folder: Path, n: int, cases: list[Case], engine: FakeEngine, limit_s: float = LIMIT_S
) -> None:
    given = [
        {"model": c.model, "config": MODELS[c.model], "name": c.name, "given": c.given,
         "batch": c.batch, "sequence": c.sequence}
        for c in cases
    ]  # fmt: skip
    ranks = run_ranks(folder, n, measure, limit_s, arguments={"cases": given})
    results = [result["found"] for result in ranks]
    problems: list[str] = []
    for number, case in enumerate(cases):
        measurements = [result[number] for result in results]
        for measured in measurements:
            assert isinstance(measured, dict), f"{case}\n{measured}"
        problems += _problems(case, measurements, engine)
    assert problems == []


def _problems(case: Case, measurements: list[dict[str, Any]], engine: FakeEngine) -> list[str]:
    """What is off; the case is recorded in any way."""
    sent = measurements[0]["sent"]
    memories = [
        MeasuredMemory(**{k: v for k, v in measured.items() if k not in {"sent", "load"}})
        for measured in measurements
    ]
    measured = largest(memories)
    # Rows of experts on the rank that is compared, by those that it has sent; a plan has the most.
    imbalance = max(1.0, measurements[memories.index(measured)]["load"])
    config = MODELS[case.model]
    engine._source = Source(config=config or {}, pickled=bytes.fromhex(sent))
    engine._otherwise = memory_of if config else _nothing
    choice = choose(case.name, case.given, case.n)
    load = Workload(case.batch, case.sequence, has_gpu=False, imbalance=imbalance)
    shape = of_config(config) if config else of_count(1e6, case.model)
    formulas = memory_of(shape, choice, load).peak if config else None
    run = engine(
        shape if config else replace(shape, is_assumed=False, has_shape=False), choice, load
    )
    states = _states_of(run, memories)
    result = Result(
        case.typed, case.model, case.n, case.batch, case.sequence, measured.peak,
        run.peak if run.engine == NAME and not run.is_partial else None, formulas, states, run.note,
    )  # fmt: skip
    record(result)
    off = [] if states else [f"{case}: states of {run}, measured {memories}"]
    if result.run is not None and not _is_close(case, run, measured):
        off.append(f"{case}: {run}, measured {measured}")
    return off


def _is_close(case: Case, run: Memory, measured: MeasuredMemory) -> bool:
    """Within 1 %; where messages are under way while the ranks compute, more.

    Gloo copies what it reduces, in threads of its own: of all gradients at most, and as chance
    has it (docs/accuracy.md).
    """
    if not {"fsdp", "fsdp1", "tp"} & {case.name}:
        return abs(run.peak / measured.peak - 1) < 0.01
    copies = run.gradients * case.n
    return 0.94 * run.peak < measured.peak < 1.02 * run.peak + copies


def _nothing(*_: object) -> Memory:
    raise OptionError("nobody counts this")


def _states_of(memory: Memory, memories: list[MeasuredMemory]) -> bool:
    """Whether one rank has just these, and none has more."""
    wanted = (memory.parameters, memory.gradients, memory.optimizer)
    seen = [
        (memory_of_rank.parameters, memory_of_rank.gradients, memory_of_rank.optimizer)
        for memory_of_rank in memories
    ]
    return wanted in seen and all(sum(states) <= sum(wanted) for states in seen)
