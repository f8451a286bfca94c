"""What the last save agreed on counts for the next one as long as nothing of it has changed."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.test_checkpoint import PARTS, SHALLOW
from tests.support.torch_ranks import TorchRanks
from tests.support.training import MODEL

LIMIT_S = 200.0

# What a save finds by the last one's plan, beside what it finds without one.
SAME = """
    from nbdist.checkpoint.rank import plan_cache, plain_state
    from nbdist.checkpoint.rank.tensors import tensors_of
    from nbdist.checkpoint.rank.live_objects import find

    def as_values(live, contents):
        "All that comes of it, as values that can be compared."
        boxes = {spot: (t.dtype, t.tolist()) for spot, t in contents.boxes_of(rank)}
        return (
            boxes, contents.parts, contents.shapes, contents.dtypes, contents.paths,
            contents.aliases,
            [model.record() for model in live.models],
            [optimizer.record() for optimizer in live.optimizers],
            plain_state.as_bytes(plain_state.states(live), []),
            plain_state.steps_made(plain_state.states(live)),
            [item.name for item in (*live.models, *live.optimizers)],
            [optimizer.others for optimizer in live.optimizers],
        )

    def differing():
        "Which of it differs, after a save and another step."
        recalled = plan_cache.lookup()
        everyone = [None] * n
        dist.all_gather_object(everyone, recalled and recalled.key)
        if not plan_cache.is_agreed(recalled, everyone):
            return "not recalled"
        live = find("looking")
        wanted = as_values(live, tensors_of(live))
        got = as_values(recalled.live, recalled.contents)
        return [at for at, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b]

    def compared(name, options, kind):
        use(name, **options)
        parts = made(0, kind)
        loop = iter(parts[3])
        run(parts, [next(loop)])
        save(f"{folder}/{name}")
        first = plan_cache._plans[0].token if plan_cache._plans else None
        run(parts, [next(loop), next(loop)])
        results = [differing(), plain_state.steps_made(plain_state.states(find("looking")))]
        # The second takes the plan, and what it saves is what is there by then.
        begun, _ = save(f"{folder}/{name} 2", True)
        results.append((plan_cache._plans[0].token if plan_cache._plans else None) == first)
        wanted = run(parts, [next(loop)])
        load(f"{folder}/{name} 2")
        results.append(abs(run(parts, [next(loop)])[0] - wanted[0]))
        return results
"""
ALL = """
    same = {}
    for name, options, kind in json.loads(os.environ["CASES"]):
        same[name] = tried(compared, name, options, globals()[kind])
        gc.collect()
"""
SOME = [("fsdp", {}, "Tied"), ("pp", {}, "Tied")]
OTHERS = [("ddp", {}, "Tied"), ("zero1", {}, "Net"), ("tp", {}, "Net")]


CHANGES = """
    folder = f"{folder}/changes"

    class Short(Tied):
        def __init__(self):
            super().__init__()
            self.blocks = self.blocks[:1]

    from nbdist.switch.rank import switch

    def first_state(parts):
        return next(iter(parts[1].optimizer.state.values()))

    def another_dtype(parts):
        state = first_state(parts)
        state["exp_avg"] = state["exp_avg"].double()

    def a_longer_buffer(parts):
        accelerator.unwrap_model(parts[0]).scale = torch.ones(5)

    def another_object(parts):
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        return counter

    def other_names(parts):
        plan_cache.live_objects.variable_names = lambda *_: (["other"], ["names"])

    def nothing(parts):
        first_state(parts)["exp_avg"].add_(1)
        first_state(parts)["step"].add_(0)
        parts[1].optimizer.param_groups[0]["lr"] = 0.5

    is_recalled = {}
    variable_names = plan_cache.live_objects.variable_names
    changes = {
        "steps apart": lambda parts: first_state(parts)["step"].add_(1),
        "another key": lambda parts: first_state(parts).update(more=torch.zeros(2)),
        "a key less": lambda parts: first_state(parts).pop("exp_avg"),
        "another dtype": another_dtype,
        "forgotten": lambda parts: parts[1].optimizer.state.clear(),
        "a longer buffer": a_longer_buffer,
        "another model": lambda parts: accelerator.prepare(nn.Linear(2, 2)),
        "another optimizer": lambda parts: accelerator.prepare(
            torch.optim.SGD(parts[0].parameters(), lr=0.1)
        ),
        "another object": another_object,
        "another accelerator": lambda parts: Accelerator(),
        "a parameter less": lambda parts: parts[1].optimizer.param_groups[0]["params"].pop(),
        "other names": other_names,
        "another strategy": lambda parts: switch.switch(choose("fsdp", {}, n)),
        "nothing": nothing,
    }
    for what, change in changes.items():
        use("ddp")
        parts = made(0, Short)
        run(parts, [next(iter(parts[3]))])
        save(f"{folder}/changed")
        before = plan_cache.lookup() is not None
        changed = change(parts)
        is_recalled[what] = [before, plan_cache.lookup() is not None]
        plan_cache.live_objects.variable_names = variable_names
        if rank == 0 or what != "nothing":
            last = weakref.ref(accelerator.unwrap_model(parts[0]))
        del parts, changed
        gc.collect()

    # Of what is gone nothing is held.
    freed = last() is None and plan_cache.lookup() is None

    # On one rank alone: forgotten, or another number.
    use("fsdp")
    parts = made(0, Net)
    loop = iter(parts[3])
    run(parts, [next(loop)])
    save(f"{folder}/one")
    if rank == 1:
        plan_cache.forget()
    run(parts, [next(loop)])
    save(f"{folder}/two")
    texts = []
    attempt = functools.partial(tell, texts)
    if rank == 1:
        first_state(parts)["step"].add_(1)
    attempt(lambda: save(f"{folder}/three"))
    if rank == 1:
        first_state(parts)["step"].sub_(1)
    # Refused by its path, after all else was recalled: no trace of it is left.
    if rank == 0:
        (Path(folder) / "file").write_text("text")
    dist.barrier()
    attempt(lambda: save(f"{folder}/file"))
    odd = Counter()
    odd.n = object()
    parts[4].n = object() if rank == 0 else 0
    attempt(lambda: save(f"{folder}/four"))
    parts[4].n = 2
    attempt(lambda: save(f"{folder}/five", True))
    left = sorted(path.name for path in Path(folder).iterdir())

    # One that is refused leaves the copies of the one that is still being written alone.
    from nbdist.checkpoint.rank import save_thread, staging, write as checkpoint_write
    gate, is_open = threading.Event(), []
    write, give_back = checkpoint_write.write, staging.give_back
    checkpoint_write.write = lambda *args: (gate.wait(), write(*args))[1]
    staging.give_back = lambda: (is_open.append(gate.is_set()), give_back())
    saving.begin(f"{folder}/six", "six", True)
    attempt(lambda: saving.begin(f"{folder}/seven", "seven", True))
    dist.barrier()
    gate.set()
    texts.append(jobs.wait("six").state)
    dist.barrier()

    # An interrupt after all have agreed: the path is free again.
    notes = saving._notes
    def interrupted(live):
        raise KeyboardInterrupt
    saving._notes = interrupted
    try:
        saving.begin(f"{folder}/eight", "eight", True)
    except KeyboardInterrupt:
        texts.append("interrupted")
    saving._notes = notes
    dist.barrier()
    attempt(lambda: save(f"{folder}/eight", True))
    texts.append(sorted(path.name for path in Path(folder).glob("*eight*")))
    done(
        same=same, is_recalled=is_recalled, freed=freed, texts=texts, left=left, is_open=is_open,
    )
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks find."""
    return _found(tmp_path_factory.mktemp("cached"), SOME, CHANGES)


def _found(folder: Path, cases: Sequence[object], more: str) -> list[dict[str, Any]]:
    env = {"FOLDER": str(folder / "states"), "CASES": json.dumps(cases), **SHALLOW}
    with TorchRanks(folder / "run", 2, MODEL + PARTS + SAME + ALL + more, LIMIT_S, **env) as ranks:
        return ranks.results()


@pytest.mark.parity
def test_so_it_is_under_the_other_strategies(tmp_path: Path) -> None:
    """Whole on each rank, its moments split, and its matrices split."""
    _check(_found(tmp_path, OTHERS, "\n    done(same=same)\n"), OTHERS)


def test_what_is_recalled_is_what_a_look_finds(results: list[dict[str, Any]]) -> None:
    """Local parts, who writes what, groups, numbers; saved and loaded, training goes on."""
    _check(results, SOME)


def _check(results: list[dict[str, Any]], cases: Sequence[tuple[str, object, str]]) -> None:
    for result in results:
        assert result["same"].keys() == {name for name, _, _ in cases}
        for name, same in result["same"].items():
            assert same[:3] == [[], 3, True], (name, same)
            assert same[3] <= 2e-6, (name, same)


def test_what_has_changed_is_found_and_agreed_on_anew(results: list[dict[str, Any]]) -> None:
    """Each change in turn; on one rank alone; and a failure after all was recalled."""
    first, second = results
    expected = {name: [True, False] for name in first["is_recalled"]} | {"nothing": [True, True]}
    assert len(expected) == 14
    assert first["is_recalled"] == expected
    # What variables are called is rank 0's to say.
    assert second["is_recalled"] == expected | {"other names": [True, True]}
    for result in (first, second):
        assert result["freed"]
        assert "'step' of" in result["texts"][0]
        assert "differs" in result["texts"][0]
        assert "is a file of 4 bytes" in result["texts"][1]
        assert "(builtins.object) cannot be saved" in result["texts"][2]
        assert result["texts"][3] == "done"
        assert "six is still being saved" in result["texts"][4]
        assert result["texts"][5] == "done"
        assert result["is_open"] == [True, True, True]
        assert result["texts"][6:] == ["interrupted", "done", ["eight"]]
    assert first["left"] == ["changed", "file", "five", "one", "two"]
