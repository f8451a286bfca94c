"""The strategies that a step can be compared with, and whole tensors under them.

single   every rank has the whole model
fsdp     every rank computes with the whole batch as well, and one block at a time is whole
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from nbdist.core.units import size
from nbdist.errors import OptionError
from nbdist.parallel.base.consensus import all_gather_object, rank
from nbdist.parallel.base.tensors import digest, local_of
from nbdist.parallel.dp import fsdp
from nbdist.parallel.live import registry
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.reshard.full_state import local_state
from nbdist.parallel.reshard.redistribute import Reshard, redistribute
from nbdist.planner.rank import shortage
from nbdist.rpc.rank import progress
from nbdist.strategy.choice import Degrees, Options, Strategy
from nbdist.strategy.table import ROWS
from nbdist.strategy.tensor_layout import Placement, local_runs
from nbdist.switch.rank.switch import refusal
from nbdist.verification.optimizers import StateApart
from nbdist.verification.verdict import FSDP, REFERENCES, SINGLE

# Of a value: the number of its model and its name, or its place in an optimizer.
_Key = tuple[int | str, ...]
_OPTIMIZER = "optimizer"
_INNER = "module"  # as wrappers name what they are around
_BLOCKS = "the reference is fsdp, one block at a time"


def reference_of(before: Strategy, name: str) -> Strategy:
    """The reference of this name, with what changes numbers and not where they are computed.

    Raises:
        OptionError: There is no such reference, or the live models cannot be switched to it.
    """
    if name not in REFERENCES:
        raise OptionError(
            f"There is no reference {name!r}; there are {', '.join(REFERENCES)}. Other strategies "
            "split activations, or say nothing that single does not. Verify such a one by itself: "
            f"%dist_strategy {name if name in ROWS else 'NAME'}, then %dist_verify."
        )
    options = before.options
    same = Options(
        precision=options.precision, accumulate=options.accumulate, sdpa=options.sdpa,
        is_fused=options.is_fused, shard="full" if name == FSDP else Options().shard,
        blocks=options.blocks if name == FSDP else "",
    )  # fmt: skip
    degrees = Degrees(dp_shard=before.world_size) if name == FSDP else Degrees()
    reference = Strategy(name, degrees, before.world_size, same)
    if why := refusal(reference):
        how = "as one process" if name == SINGLE else "under fsdp"
        raise OptionError(f"The step cannot be run {how} for comparison. {why}")
    return reference


def methods_of(outer: torch.nn.Module) -> frozenset[str]:
    """Methods that a user can call on a wrapped model, as DDP's no_sync, and its inner module."""
    names = (name for name in dir(outer) if not name.startswith("_"))
    return frozenset(n for n in names if n == _INNER or callable(getattr(outer, n)))


@contextlib.contextmanager
def answering(base: torch.nn.Module, names: frozenset[str]) -> Iterator[None]:
    """In here a module has these methods too: those that it lacks do nothing, in a `with` too.

    A step may well call its strategy's, and a reference has nothing that they could change.
    """
    missing = {
        name: base if name == _INNER else lambda *_, **__: contextlib.nullcontext()
        for name in names
        if not hasattr(base, name)
    }
    vars(base).update(missing)
    try:
        yield
    finally:
        for name in missing:
            del vars(base)[name]


def memory_note(single: Strategy) -> str:
    """Why the model has no room as one process; "" where it has. Collective: every rank."""
    of_ranks = all_gather_object(shortage.of_prepared(single))
    every = [facts for of_rank in of_ranks for facts in of_rank]
    shortages = [facts for facts in every if facts["needed"] > facts["free"]]
    if not shortages:
        return ""
    worst = max(shortages, key=lambda facts: facts["needed"] - facts["free"])
    return (
        f"as one process the model would need {size(worst['needed'])}, "
        f"{size(worst['free'])} is free: {_BLOCKS}"
    )


def failure_note(error: BaseException) -> str:
    """Say that the step ran out of memory as one process."""
    return f"as one process the step ran out of memory ({error}): {_BLOCKS}"


def take_rank_0s(models: list[Prepared]) -> list[StateApart]:
    """Let ranks that hold the same part of a value have the first one's: one process has one copy.

    Collective: every rank. Costs a digest of every value, and more only for those that differ.

    Returns:
        What optimizers remember, where it differed.
    """
    held = dict(_held(models))
    places = {
        key: (repr(local_runs(side.layout, side.degrees, rank())), digest([tensor]))
        for key, (side, tensor) in held.items()
    }
    gathered = all_gather_object(places)
    states = []
    for key in dict.fromkeys(key for rank_places in gathered for key in rank_places):
        holders = {number: p[key] for number, p in enumerate(gathered) if key in p}
        firsts: dict[str, int] = {}
        for number, (runs, _) in holders.items():
            firsts.setdefault(runs, number)
        odd = [n for n, (runs, value) in holders.items() if value != holders[firsts[runs]][1]]
        if not odd:
            continue
        if key[0] == _OPTIMIZER:
            states.append(StateApart(str(key[2]), str(key[3]), tuple(odd)))
        values = all_gather_object(held[key][1].detach().cpu() if key in held else None)
        if rank() in odd and (value := values[firsts[places[key][0]]]) is not None:
            with torch.no_grad():
                held[key][1].copy_(value)
    return states


def _held(
    models: list[Prepared],
) -> Iterator[tuple[_Key, tuple[Placement, torch.Tensor]]]:
    """Yield this rank's values of models, and what optimizers hold of each parameter."""
    for number, model in enumerate(models):
        fsdp.settle(model.built.job.root)
        for name, tensor in local_state(model).items():
            yield (number, name), (model.side(name), tensor)
    for number, optimizer in enumerate(registry.bound_optimizers()):
        for key, (model, name, parameter) in registry.names_in(optimizer).items():
            for kind, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, torch.Tensor):
                    side = registry.state_side(model.built, name)
                    yield (_OPTIMIZER, number, key, kind), (side, local_of(value))


def gathered(model: Prepared, parts: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Whole tensors on the host, by first name, of every rank's parts of them.

    Collective: every rank. One at a time is whole on the device.
    """
    device = model.built.job.device
    dtypes: dict[str, torch.dtype] = {}
    for rank_dtypes in all_gather_object({name: part.dtype for name, part in parts.items()}):
        dtypes |= rank_dtypes
    whole_tensors = {}
    for name in [name for name in model.layouts if name in dtypes]:
        reshard = Reshard(name, dtypes[name], model.side(name), model.whole(name))
        local = {name: parts[name].to(device)} if name in parts else {}
        with progress.during("gathering"):  # is no word for who has asked for a verification
            whole_tensors[name] = redistribute([reshard], local, device)[name].cpu()
    return whole_tensors
