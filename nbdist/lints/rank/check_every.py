"""A look at parameters and gradients every so many steps, as cheap as can be left on.

Before each Nth step of an optimizer: is the norm of a gradient not finite? That goes to stderr.
And a sum over the bits of each parameter, whose digests the notebook compares at the end of the
cell. No rank is met, and on a GPU nobody waits: numbers are read when the next look is due.
"""

from __future__ import annotations

import hashlib
import itertools
import sys
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from nbdist.lints.rank import ddp, watch
from nbdist.rpc.rank import namespace
from nbdist.strategy.tensor_layout import local_runs

# Looks of one optimizer in one cell that are kept; then every second of them.
MOST_LOOKS = 512
_WORD_BYTES = 8

Peers = tuple[int, ...]


@dataclass(slots=True)
class _Watched:
    """State of one optimizer between two checks.

    Attributes:
        count: Its steps since this was switched on.
        is_reported: Gradients that are not finite were reported; reset once they are finite.
        peers: id of a parameter -> the ranks that hold the same part of it, as of which version.
        version: Of what is known of DDP models and the strategy.
        pending: The last look, of which numbers may still be computed.
        sums: Peers -> (step, digest), of this cell.
        stride: Of this cell, one look in so many is kept.
        n_looks: Of this cell.
    """

    count: int = 0
    is_reported: bool = False
    peers: dict[int, Peers] = field(default_factory=dict)
    version: tuple[object, ...] = ()
    pending: _Pending | None = None
    sums: dict[Peers, list[tuple[int, str]]] = field(default_factory=dict)
    stride: int = 1
    n_looks: int = 0


@dataclass(slots=True)
class _Pending:
    """A look whose numbers have not been read: step, gradients' norms, parameters' sums."""

    step: int
    names: list[int]
    norms: torch.Tensor | None
    sums: dict[Peers, torch.Tensor]


@dataclass(slots=True)
class _State:
    every: int = 0
    handle: Any = None
    watched: weakref.WeakKeyDictionary[Optimizer, _Watched] = field(
        default_factory=weakref.WeakKeyDictionary
    )


_state = _State()


def set_every(every: int) -> None:
    """Look before every Nth step of each optimizer from now on; 0 ends it."""
    watch.add(__name__)
    _state.every = every
    _state.watched.clear()
    if every and _state.handle is None:
        _state.handle = register_optimizer_step_pre_hook(_before_step)
        watch.undo.append(lambda: set_every(0))
    elif not every and _state.handle is not None:
        _state.handle.remove()
        _state.handle = None


def begin() -> None:
    """Forget the looks of the cell before."""
    for watched in _state.watched.values():
        watched.sums, watched.stride, watched.n_looks = {}, 1, 0


def end() -> None:
    """Note this cell's digests."""
    for optimizer, watched in list(_state.watched.items()):
        _note_looks(optimizer, watched)


@watch.guarded("apart-since")
def _note_looks(optimizer: Optimizer, watched: _Watched) -> None:
    _settle(optimizer, watched)
    for number, (peers, looks) in enumerate(watched.sums.items()):
        first = next(iter(watch.parameters_by_id(optimizer)))
        model = names().get(first, "an optimizer").partition(".")[0]
        subject = model + (f" ({number + 1})" if number else "")
        steps, digests = [list(column) for column in zip(*looks, strict=True)]
        watch.note(
            "apart-since", subject, ranks=list(peers), steps=steps, digests=digests,
            every=_state.every,
        )  # fmt: skip


@watch.guarded("apart-since, gradients that are not finite")
def _before_step(optimizer: Optimizer, _args: object, _kwargs: object) -> None:
    if torch.compiler.is_compiling():  # a step that is compiled is not looked at
        return
    watched = _state.watched.setdefault(optimizer, _Watched())
    watched.count += 1
    if watched.count % _state.every == 0:
        _settle(optimizer, watched)
        _look(optimizer, watched)
        pending = watched.pending
        tensors = () if pending is None else (pending.norms, *pending.sums.values())
        # On a GPU the numbers are read when the next look is due.
        if all(tensor is None or tensor.device.type == "cpu" for tensor in tensors):
            _settle(optimizer, watched)


def _look(optimizer: Optimizer, watched: _Watched) -> None:
    parameters = [p for group in optimizer.param_groups for p in group["params"] if not p.is_meta]
    with torch.no_grad():
        graded = [p for p in parameters if p.grad is not None]
        # A fused step of fp16 is given its overflows, and leaves itself out.
        is_scaled = getattr(optimizer, "found_inf", None) is not None
        norms = None if is_scaled else _norms([watch.local(p.grad) for p in graded])
        sums: dict[Peers, list[torch.Tensor]] = {}
        for parameter, peers in zip(parameters, _peers(parameters, watched), strict=True):
            if len(peers) > 1:
                sums.setdefault(peers, []).append(bits(watch.local(parameter)))
        joined = {peers: torch.stack(numbers) for peers, numbers in sums.items()}
    watched.pending = _Pending(watched.count, [id(p) for p in graded], norms, joined)


def _settle(optimizer: Optimizer, watched: _Watched) -> None:
    pending, watched.pending = watched.pending, None
    if pending is None:
        return
    if pending.norms is not None:
        _judge(optimizer, watched, pending, pending.norms.cpu())
    for peers, sums in pending.sums.items():
        text = hashlib.blake2b(sums.cpu().numpy().tobytes(), digest_size=8).hexdigest()
        _keep(watched, peers, pending.step, text)
    watched.n_looks += 1


def _keep(watched: _Watched, peers: Peers, step: int, text: str) -> None:
    if watched.n_looks % watched.stride:
        return
    looks = watched.sums.setdefault(peers, [])
    looks.append((step, text))
    if len(looks) >= MOST_LOOKS and peers == next(reversed(watched.sums)):
        # The same ones on every rank: all have taken as many.
        watched.stride *= 2
        for other in watched.sums.values():
            del other[1::2]


def _judge(optimizer: Optimizer, watched: _Watched, pending: _Pending, norms: torch.Tensor) -> None:
    is_bad = ~torch.isfinite(norms)
    if not bool(is_bad.any()):
        watched.is_reported = False
        return
    if watched.is_reported:
        return
    parameters = watch.parameters_by_id(optimizer)
    bad = [parameters[key] for key in itertools.compress(pending.names, is_bad.tolist())]
    # A norm of large numbers can be inf where none of them is. Later they may be gone.
    if all(p.grad is not None and bool(torch.isfinite(watch.local(p.grad)).all()) for p in bad):
        return
    watched.is_reported = True
    names_by_id = names()
    # A backward hands NaN on to all that comes before: the last one had it first.
    first = names_by_id.get(id(bad[-1]), "a parameter that no model has")
    sys.stderr.write(
        f"step {pending.step}: gradients are not finite in {len(bad)} of {len(pending.names)} "
        f"parameters, last in the model's order: {first} (checked every "
        f"{_state.every} step{'s' * (_state.every > 1)}; %dist_check counts them, "
        "%dist_check --trace-nan finds the first module)\n"
    )
    sys.stderr.flush()


def names() -> dict[int, str]:
    """By id of a parameter its name, model.name, of all models of this rank."""
    from nbdist.parallel.live import live_models

    names_by_id: dict[int, str] = {}
    for variable, module in live_models.user_modules().items():
        for name, parameter in namespace.unwrapped(module).named_parameters():
            names_by_id.setdefault(id(parameter), f"{variable}.{name}")
    return names_by_id


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """A number that depends on every bit of a tensor, where it lies: 0-dim, int64.

    As fast as memory: words are only added, so two that have changed places are not seen.
    """
    flat = tensor.contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % _WORD_BYTES:
        flat = flat.clone()
    whole_bytes = flat.numel() // _WORD_BYTES * _WORD_BYTES
    total = flat[:whole_bytes].view(torch.int64).sum()
    rest = flat[whole_bytes:]
    return total + rest.sum(dtype=torch.int64) if rest.numel() else total


def _norms(gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """Norms in the order given; NaN or inf where a number is. None without gradients."""
    if not gradients:
        return None
    home = gradients[0].device
    narrow = torch.float32.itemsize
    norms = [
        torch.linalg.vector_norm(
            gradient, dtype=torch.float32 if gradient.itemsize < narrow else None
        )
        for gradient in gradients
    ]
    return torch.stack([norm.to(home, torch.float32) for norm in norms])


def _peers(parameters: Sequence[torch.Tensor], watched: _Watched) -> list[Peers]:
    """Return the ranks that hold the same part of each parameter; this rank where unknown."""
    registry: Any = sys.modules.get("nbdist.parallel.live.registry")
    choice = registry.current() if registry is not None and dist.is_initialized() else None
    version = (choice, ddp.count(), len(parameters))
    if version == watched.version and all(id(p) in watched.peers for p in parameters):
        return [watched.peers[id(p)] for p in parameters]
    peers_of = {id(p): ddp.ranks_of({id(p)}) for p in parameters}
    for prepared in registry.prepared() if registry is not None else ():
        if prepared.built.job.choice.name in ("single", "deepspeed", "fsdp1"):
            continue
        rank = prepared.built.job.mesh.rank
        for name, parameter in prepared.parameters.items():
            layout, degrees = prepared.layouts[name], prepared.degrees
            runs = local_runs(layout, degrees, rank)
            peers_of[id(parameter)] = tuple(
                other
                for other in range(degrees.product)
                if local_runs(layout, degrees, other) == runs
            )
    watched.version, watched.peers = version, peers_of
    return [peers_of[id(p)] for p in parameters]
