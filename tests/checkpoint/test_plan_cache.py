"""What the last save agreed on counts for the next one as long as nothing of it has changed."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nbdist.checkpoint.rank import jobs, plain_state, plan_cache, staging, write
from nbdist.checkpoint.rank import save as checkpoints
from nbdist.checkpoint.rank.live_objects import find
from nbdist.checkpoint.rank.load import load
from nbdist.checkpoint.rank.tensors import tensors_of
from nbdist.parallel.accelerator.accelerator import Accelerator
from nbdist.strategy.choose import choose
from nbdist.switch.rank import switch
from tests.programs.rank import everyone, n, rank, refusal, run_dir
from tests.programs.saving import CLOSE, KINDS, Counter, Tied, accelerator, made, run, save
from tests.programs.training import Net, use
from tests.support.torch_ranks import on_ranks


def as_values(live: Any, contents: Any) -> tuple[Any, ...]:
    """All that comes of it, as values that can be compared."""
    boxes = {spot: (t.dtype, t.tolist()) for spot, t in contents.boxes_of(rank)}
    return (
        boxes, contents.parts, contents.shapes, contents.dtypes, contents.paths, contents.aliases,
        [model.record() for model in live.models],
        [optimizer.record() for optimizer in live.optimizers],
        plain_state.as_bytes(plain_state.states(live), []),
        plain_state.steps_made(plain_state.states(live)),
        [item.name for item in (*live.models, *live.optimizers)],
        [optimizer.others for optimizer in live.optimizers],
    )  # fmt: skip


def recalls_what_a_look_finds(name: str, kind: type[nn.Module]) -> None:
    """After a save and two more steps; the second save takes the plan, and what is there then."""
    parts = made(0, kind)
    loop = iter(parts[3])
    run(parts, [next(loop)])
    save(f"{run_dir}/{name}")
    token = plan_cache._plans[0].token
    run(parts, [next(loop), next(loop)])
    recalled = plan_cache.lookup()
    assert plan_cache.is_agreed(recalled, everyone(recalled and recalled.key))
    live = find("looking")
    looked = as_values(live, tensors_of(live))
    assert as_values(recalled.live, recalled.contents) == looked
    assert plain_state.steps_made(plain_state.states(live)) == 3
    save(f"{run_dir}/{name} 2", is_async=True)
    assert plan_cache._plans[0].token == token
    wanted = run(parts, [next(loop)])
    load(f"{run_dir}/{name} 2")
    assert run(parts, [next(loop)]) == pytest.approx(wanted, abs=CLOSE)


@pytest.mark.parametrize(
    "cases",
    [
        {"fsdp": "Tied", "pp": "Tied"},
        # Whole on each rank, its moments split, and its matrices split.
        pytest.param({"ddp": "Tied", "zero1": "Net", "tp": "Net"}, marks=pytest.mark.parity),
    ],
)
@on_ranks(2, BLOCKS="2")
def test_what_is_recalled_is_what_a_look_finds(cases: dict[str, str]) -> None:
    """Local parts, who writes what, groups, numbers; saved and loaded, training goes on."""
    for name, kind in cases.items():
        use(name)
        recalls_what_a_look_finds(name, KINDS[kind])
        gc.collect()


class Short(Tied):
    """One block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = self.blocks[:1]


def first_state(parts: Any) -> dict[str, torch.Tensor]:
    return next(iter(parts[1].optimizer.state.values()))


def another_dtype(parts: Any) -> None:
    state = first_state(parts)
    state["exp_avg"] = state["exp_avg"].double()


def a_longer_buffer(parts: Any) -> None:
    accelerator().unwrap_model(parts[0]).scale = torch.ones(5)


def another_object(parts: Any) -> Counter:
    counter = Counter()
    accelerator().register_for_checkpointing(counter)
    return counter


def other_names(parts: Any) -> None:
    plan_cache.live_objects.variable_names = lambda *_: (["other"], ["names"])


def nothing(parts: Any) -> None:
    first_state(parts)["exp_avg"].add_(1)
    first_state(parts)["step"].add_(0)
    parts[1].optimizer.param_groups[0]["lr"] = 0.5


CHANGES: dict[str, Callable[[Any], object]] = {
    "steps apart": lambda parts: first_state(parts)["step"].add_(1),
    "another key": lambda parts: first_state(parts).update(more=torch.zeros(2)),
    "a key less": lambda parts: first_state(parts).pop("exp_avg"),
    "another dtype": another_dtype,
    "forgotten": lambda parts: parts[1].optimizer.state.clear(),
    "a longer buffer": a_longer_buffer,
    "another model": lambda parts: accelerator().prepare(nn.Linear(2, 2)),
    "another optimizer": lambda parts: accelerator().prepare(
        torch.optim.SGD(parts[0].parameters(), lr=0.1)
    ),
    "another object": another_object,
    "another accelerator": lambda parts: Accelerator(),
    "a parameter less": lambda parts: parts[1].optimizer.param_groups[0]["params"].pop(),
    "other names": other_names,
    "another strategy": lambda parts: switch.switch(choose("fsdp", {}, n)),
    "nothing": nothing,
}


def changed(what: str) -> weakref.ref[nn.Module]:
    """A saved model whose plan counts until something has changed."""
    use("ddp")
    parts = made(0, Short)
    run(parts, [next(iter(parts[3]))])
    save(f"{run_dir}/changed")
    assert plan_cache.lookup() is not None, what
    names = plan_cache.live_objects.variable_names
    made_by_it = CHANGES[what](parts)
    # What variables are called is rank 0's to say.
    is_recalled = what == "nothing" or (what == "other names" and rank == 1)
    assert (plan_cache.lookup() is not None) == is_recalled, (what, made_by_it)
    plan_cache.live_objects.variable_names = names
    return weakref.ref(accelerator().unwrap_model(parts[0]))


@on_ranks(2, BLOCKS="2")
def test_what_has_changed_is_found() -> None:
    """Each change in turn; of what is gone nothing is held."""
    for what in CHANGES:
        model = changed(what)
        gc.collect()
    assert model() is None
    assert plan_cache.lookup() is None


def changes_on_one_rank(folder: str, parts: Any) -> None:
    """Forgotten there, or another number."""
    loop = iter(parts[3])
    run(parts, [next(loop)])
    save(f"{folder}/one")
    if rank == 1:
        plan_cache.forget()
    run(parts, [next(loop)])
    save(f"{folder}/two")
    first_state(parts)["step"].add_(rank)
    text = refusal(lambda: save(f"{folder}/three"))
    assert "'step' of" in text
    assert "differs" in text
    first_state(parts)["step"].sub_(rank)


def is_refused_after_all_was_recalled(folder: str, parts: Any) -> None:
    """By its path, or an object; no trace of it is left."""
    if rank == 0:
        (run_dir / "states" / "file").write_text("text")
    dist.barrier()
    assert "is a file of 4 bytes" in refusal(lambda: save(f"{folder}/file"))
    parts[4].n = object() if rank == 0 else 0
    assert "(builtins.object) cannot be saved" in refusal(lambda: save(f"{folder}/four"))
    parts[4].n = 2
    save(f"{folder}/five", is_async=True)
    left = sorted(path.name for path in (run_dir / "states").iterdir())
    assert rank == 1 or left == ["file", "five", "one", "two"]


def is_refused_while_another_is_written(folder: str, gate: threading.Event) -> None:
    checkpoints.begin(f"{folder}/six", "six", True)
    text = refusal(lambda: checkpoints.begin(f"{folder}/seven", "seven", True))
    assert "six is still being saved" in text
    dist.barrier()
    gate.set()
    assert jobs.wait("six").state == "done"
    dist.barrier()


def is_interrupted_after_all_have_agreed(folder: str) -> None:
    """The path is free again."""
    with (
        mock.patch.object(checkpoints, "_notes", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        checkpoints.begin(f"{folder}/eight", "eight", True)
    dist.barrier()
    save(f"{folder}/eight", is_async=True)
    assert [path.name for path in (run_dir / "states").glob("*eight*")] == ["eight"]


@on_ranks(2, BLOCKS="2")
def test_ranks_agree_anew_and_a_save_that_fails_leaves_the_others_alone() -> None:
    """A change on one rank alone; failures after all was recalled, and while another is written."""
    folder = f"{run_dir}/states"
    use("fsdp")
    parts = made(0, Net)
    changes_on_one_rank(folder, parts)
    is_refused_after_all_was_recalled(folder, parts)
    gate, is_open = threading.Event(), []
    wrote, gave_back = write.write, staging.give_back

    def give_back() -> None:
        is_open.append(gate.is_set())
        gave_back()

    with (
        mock.patch.object(write, "write", lambda *args: (gate.wait(), wrote(*args))[1]),
        mock.patch.object(staging, "give_back", give_back),
    ):
        is_refused_while_another_is_written(folder, gate)
        is_interrupted_after_all_have_agreed(folder)
    assert is_open == [True, True, True]  # the copies of the one that was written stayed
