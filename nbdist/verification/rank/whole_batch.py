"""A model that computes with the batches of all data-parallel ranks, as one process would.

Each rank calls it with its own batch and gets its own share of what it returns, so the user's
loss is computed where and as it was. Backward puts the gradients of all shares together, with
the weight that the mean over data-parallel ranks gives them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch

from nbdist.errors import OptionError
from nbdist.parallel.base.tensors import digest
from nbdist.parallel.sequence.split_sequence import map_tensors, tensors
from nbdist.verification.rank.capture import Capture
from nbdist.verification.rank.exchange import Exchange

Samples = tuple[int, int, int]
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Peers:
    """The ranks whose batches make up the whole one, in order, and how they meet."""

    ranks: Sequence[int]
    exchange: Exchange

    def gather(self, value: T) -> list[T]:
        """Gather a value from these ranks. Collective: every rank, of all peers alike."""
        shown = self.exchange.gather(value)
        return [shown[rank] for rank in self.ranks]


class WholeBatch:
    """The forward of one model while the reference runs. Every rank, alike.

    Attributes:
        samples: Of each rank that saw data of its own: (first, behind the last, all).
        digests: Of this rank's arguments, call by call.
        are_equal: Call by call, whether all data-parallel ranks were given the same batch.
    """

    def __init__(self, base: torch.nn.Module, index: int, peers: Peers, capture: Capture) -> None:
        """Give one model whole batches; `index` is this rank's position among its peers."""
        self.samples: Samples = (0, 1, 1)
        self.digests: list[str] = []
        self.are_equal: list[bool] = []
        self._base = base
        self._run: Callable[..., Any] = base.forward
        self._peers = peers
        self._index = index
        self._capture = capture

    @contextlib.contextmanager
    def attached(self) -> Iterator[None]:
        """It stands in for the model's forward in here."""
        attributes = vars(self._base)
        patched = attributes.get("forward")  # autocast's, for one
        attributes["forward"] = self
        self._capture.is_root_whole = True
        try:
            yield
        finally:
            del attributes["forward"]
            if patched is not None:
                attributes["forward"] = patched

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the model's result for this rank's batch with all batches. Collective.

        Raises:
            OptionError: The ranks' batches cannot be put together.
        """
        batch = list(tensors((args, kwargs)))
        self.digests.append(digest(batch))
        if len(self._peers.ranks) == 1:
            output = self._run(*self._moved(args), **self._moved(kwargs))
            self._capture.note_whole(output)
            return output
        args, kwargs = self._whole((args, kwargs), batch)
        output = self._run(*self._moved(args), **self._moved(kwargs))
        self._capture.note_whole(output)
        first, last, total = self.samples
        return map_tensors(lambda t: self._share(t, first, last, total), output)

    def _moved(self, value: Any) -> Any:
        if not self._capture.is_moving:
            return value
        return map_tensors(lambda t: self._capture.move(t) if t.is_floating_point() else t, value)

    def _whole(self, call: Any, batch: Sequence[torch.Tensor]) -> Any:
        if not batch:
            return call
        shares = self._peers.gather([tensor.detach().cpu() for tensor in batch])
        self.are_equal.append(len({digest(share) for share in shares}) == 1)
        sizes = [_n_samples(share) for share in shares]
        first = sum(sizes[: self._index])
        self.samples = (first, first + sizes[self._index], sum(sizes))
        number = iter(range(len(batch)))

        def joined(tensor: torch.Tensor) -> torch.Tensor:
            here = next(number)
            parts = [share[here] for share in shares]
            if not tensor.ndim or any(
                part.shape[0] != size for part, size in zip(parts, sizes, strict=True)
            ):
                return tensor  # no batch: a mask or positions of all samples
            try:
                return torch.cat(parts).to(tensor.device)
            except RuntimeError as error:
                shapes = ", ".join(str(tuple(part.shape)) for part in parts)
                raise OptionError(
                    f"The ranks' batches have the shapes {shapes} and cannot be put together for "
                    "the reference. Pad them to one length, or verify a step whose batches have "
                    "equal shapes."
                ) from error

        return map_tensors(joined, call)

    def _share(self, whole: torch.Tensor, first: int, last: int, total: int) -> torch.Tensor:
        is_batch = whole.ndim > 0 and whole.shape[0] % total == 0
        if not is_batch:
            part: torch.Tensor = _Averaged.apply(whole, self._peers)  # type: ignore[no-untyped-call]
            return part
        per = whole.shape[0] // total
        rows: torch.Tensor = _Share.apply(  # type: ignore[no-untyped-call]
            whole, first * per, last * per, self._peers
        )
        return rows


def _n_samples(batch: Sequence[torch.Tensor]) -> int:
    return next((tensor.shape[0] for tensor in batch if tensor.ndim), 1)


class _Share(torch.autograd.Function):
    """A rank's rows; backward has the gradients of all ranks' rows, over their number."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, first: int, last: int, peers: Peers) -> torch.Tensor:
        ctx.peers = peers
        return whole[first:last].clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        parts = ctx.peers.gather(gradient.cpu())
        whole = torch.cat(parts) / len(parts)
        return whole.to(gradient.device), None, None, None


class _Averaged(torch.autograd.Function):
    """The whole, as a loss is; backward has the mean of the ranks' gradients."""

    @staticmethod
    def forward(ctx: Any, whole: torch.Tensor, peers: Sequence[int]) -> torch.Tensor:
        ctx.peers = peers
        return whole.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        mean = torch.stack(ctx.peers.gather(gradient.cpu())).mean(0)
        return mean.to(gradient.device), None
