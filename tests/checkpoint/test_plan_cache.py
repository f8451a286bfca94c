"""What the last save agreed on counts for the next one as long as nothing of it has changed."""

import json
from typing import Any

import pytest

from tests.checkpoint.test_checkpoint import PARTS
from tests.support.torch_ranks import TorchRanks
from tests.support.training import MODEL

pytestmark = pytest.mark.engine
LIMIT_S = 200.0

# What a save finds by the last one's plan, beside what it finds without one.
SAME = """
    from nbdist.checkpoint.rank import plan_cache as known, plain_state
    from nbdist.checkpoint.rank.tensors import tensors_of
    from nbdist.checkpoint.rank.live_objects import find

    def as_found(found, all_):
        "All that comes of it, as values that can be compared."
        held = {spot: (t.dtype, t.tolist()) for spot, t in all_.own(rank)}
        tensors = all_.tensors
        return (
            held, all_.parts, tensors.shapes, tensors.dtypes, tensors.paths, tensors.aliases,
            [one.saved() for one in found.models], [one.saved() for one in found.optimizers],
            plain_state.as_bytes(plain_state.states(found), []),
            plain_state.steps_made(plain_state.states(found)),
            [one.name for one in (*found.models, *found.optimizers)],
            [one.others for one in found.optimizers],
        )

    def differing():
        "Which of it differs, after a save and another step."
        recalled = known.lookup()
        everyone = [None] * n
        dist.all_gather_object(everyone, recalled and recalled.told)
        if not known.agreed(recalled, everyone):
            return "not recalled"
        found = find("looking")
        wanted = as_found(found, tensors_of(found))
        got = as_found(recalled.found, recalled.contents)
        return [at for at, (a, b) in enumerate(zip(wanted, got, strict=True)) if a != b]

    def compared(name, given, kind):
        use(name, **given)
        parts = made(0, kind)
        loop = iter(parts[3])
        run(parts, [next(loop)])
        save(f"{folder}/{name}")
        first = known._plans[0].token if known._plans else None
        run(parts, [next(loop), next(loop)])
        told = [differing(), plain_state.steps_made(plain_state.states(find("looking")))]
        # The second takes the plan, and what it saves is what is there by then.
        begun, _ = save(f"{folder}/{name} 2", True)
        told.append((known._plans[0].token if known._plans else None) == first)
        wanted = run(parts, [next(loop)])
        load(f"{folder}/{name} 2")
        told.append(abs(run(parts, [next(iter(parts[3]))])[0] - wanted[0]))
        return told
"""
ALL = """
    same = {}
    for name, given, kind in json.loads(os.environ["CASES"]):
        same[name] = tried(compared, name, given, globals()[kind])
        gc.collect()
"""
CASES: list[tuple[str, dict[str, Any], str]] = [
    ("ddp", {}, "Tied"),
    ("zero1", {}, "Net"),
    ("fsdp", {}, "Tied"),
    ("pp", {}, "Tied"),
    ("tp", {}, "Net"),
]


CHANGES = """
    folder = f"{folder}/changes"

    def steps_of(parts):
        return parts[1].optimizer.state

    def first_state(parts):
        return next(iter(steps_of(parts).values()))

    def steps_apart(parts):
        first_state(parts)["step"].add_(1)

    def another_key(parts):
        first_state(parts)["more"] = torch.zeros(2)

    def a_key_less(parts):
        del first_state(parts)["exp_avg"]

    def another_dtype(parts):
        state = first_state(parts)
        state["exp_avg"] = state["exp_avg"].double()

    def forgotten(parts):
        steps_of(parts).clear()

    def a_longer_buffer(parts):
        accelerator.unwrap_model(parts[0]).scale = torch.ones(5)

    def another_model(parts):
        return accelerator.prepare(nn.Linear(2, 2))

    def another_optimizer(parts):
        return accelerator.prepare(torch.optim.SGD(parts[0].parameters(), lr=0.1))

    def another_object(parts):
        counter = Counter()
        accelerator.register_for_checkpointing(counter)
        return counter

    def another_accelerator(parts):
        return Accelerator()

    def a_parameter_less(parts):
        parts[1].optimizer.param_groups[0]["params"].pop()

    def other_names(parts):
        known.finding.variable_names = lambda *_: (["other"], ["names"])

    def another_strategy(parts):
        from nbdist.switch.rank import switch
        switch.switch(choose("fsdp", {}, n))

    def nothing(parts):
        first_state(parts)["exp_avg"].add_(1)
        first_state(parts)["step"].add_(0)
        parts[1].optimizer.param_groups[0]["lr"] = 0.5

    found = {}
    kept = known.finding.variable_names
    changes = [
        steps_apart, another_key, a_key_less, another_dtype, forgotten, a_longer_buffer,
        another_model, another_optimizer, another_object, another_accelerator, a_parameter_less,
        other_names, another_strategy, nothing,
    ]
    for change in changes:
        use("ddp")
        parts = made(0, Tied)
        run(parts, [next(iter(parts[3]))])
        save(f"{folder}/changed")
        before = known.lookup() is not None
        held = change(parts)
        found[change.__name__] = [before, known.lookup() is not None]
        known.finding.variable_names = kept
        if rank == 0 or change is not nothing:
            last = weakref.ref(accelerator.unwrap_model(parts[0]))
        del parts, held
        gc.collect()

    # Of what is gone nothing is held.
    freed = last() is None and known.lookup() is None

    # On one rank alone: forgotten, or another number.
    use("fsdp")
    parts = made(0, Net)
    loop = iter(parts[3])
    run(parts, [next(loop)])
    save(f"{folder}/one")
    if rank == 1:
        known.forget()
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
    left = sorted(one.name for one in Path(folder).iterdir())

    # One that is refused leaves the copies of the one that is still being written alone.
    from nbdist.checkpoint.rank import save_thread, staging, write as checkpoint_write
    gate, write, given, give_back = threading.Event(), checkpoint_write.write, [], staging.give_back
    checkpoint_write.write = lambda *given: (gate.wait(), write(*given))[1]
    staging.give_back = lambda: (given.append(gate.is_set()), give_back())
    saving.begin(f"{folder}/six", "six", True)
    attempt(lambda: saving.begin(f"{folder}/seven", "seven", True))
    dist.barrier()
    gate.set()
    texts.append(jobs.wait("six").state)
    dist.barrier()

    # An interrupt after all have agreed: the path is free again.
    notes = saving._notes
    def interrupted(found):
        raise KeyboardInterrupt
    saving._notes = interrupted
    try:
        saving.begin(f"{folder}/eight", "eight", True)
    except KeyboardInterrupt:
        texts.append("interrupted")
    saving._notes = notes
    dist.barrier()
    attempt(lambda: save(f"{folder}/eight", True))
    texts.append(sorted(one.name for one in Path(folder).glob("*eight*")))
    done(same=same, found=found, freed=freed, texts=texts, left=left, given=given)
"""


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks find."""
    folder = tmp_path_factory.mktemp("known")
    env = {"FOLDER": str(folder / "states"), "CASES": json.dumps(CASES)}
    text = MODEL + PARTS + SAME + ALL + CHANGES
    with TorchRanks(folder / "run", 2, text, LIMIT_S, **env) as ranks:
        return ranks.results()


def test_what_is_recalled_is_what_a_look_finds(told: list[dict[str, Any]]) -> None:
    """Local parts, who writes what, groups, numbers; saved and loaded, training goes on."""
    for one in told:
        assert one["same"].keys() == {name for name, _, _ in CASES}
        for name, same in one["same"].items():
            assert same[:3] == [[], 3, True], (name, same)
            assert same[3] <= 2e-6, (name, same)


def test_what_has_changed_is_found_and_agreed_on_anew(told: list[dict[str, Any]]) -> None:
    """Each change in turn; on one rank alone; and a failure after all was recalled."""
    first, second = told
    expected = {name: [True, False] for name in first["found"]} | {"nothing": [True, True]}
    assert len(expected) == 14
    assert first["found"] == expected
    # What variables are called is rank 0's to say.
    assert second["found"] == expected | {"other_names": [True, True]}
    assert first["freed"]
    assert second["freed"]
    for one in (first, second):
        assert "'step' of" in one["texts"][0]
        assert "differs" in one["texts"][0]
        assert "is a file of 4 bytes" in one["texts"][1]
        assert "(builtins.object) cannot be saved" in one["texts"][2]
        assert one["texts"][3] == "done"
        assert "six is still being saved" in one["texts"][4]
        assert one["texts"][5] == "done"
        assert one["given"] == [True, True, True]
        assert one["texts"][6:] == ["interrupted", "done", ["eight"]]
    assert first["left"] == ["changed", "file", "five", "one", "two"]
