"""A training step whose loss is computed outside of the model, from what forward returns.

Forward runs all micro-batches through the stages and returns the outputs on every rank; their
backward, which every rank begins with its loss, runs all micro-batches back: the order of GPipe.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from nbdist.parallel.pp.loss_node import retains_graph
from nbdist.parallel.pp.pytree import (
    broadcast,
    pack,
    receive_tensors,
    send_tensors,
    unpack,
)
from nbdist.parallel.pp.shape_inference import Route
from nbdist.parallel.pp.stage import StageModule
from nbdist.parallel.pp.tied_gradients import GradientShare, all_reduce_tied


@dataclass(frozen=True, slots=True)
class StageGraph:
    """One micro-batch in one stage, kept for its backward.

    Attributes:
        wires: What came in: leaves, whose gradients go back. None in the first stage.
        results: What went out, or of the last stage the tensors of its output.
    """

    part: StageModule
    wires: tuple[torch.Tensor, ...]
    results: tuple[torch.Tensor, ...]


class OuterLossStep:
    """One step. Forward and backward are collective: the ranks of a pipeline, in the same order."""

    def __init__(
        self, parts: Sequence[StageModule], route: Route, shares: Sequence[GradientShare]
    ) -> None:
        """Take stages whose micro-batches are set; `shares` are of all that is trained here."""
        self._parts, self._route, self._shares = parts, route, shares
        self._graphs: list[list[StageGraph]] = []

    def run(self, count: int) -> None:
        """Run so many micro-batches forward; a failure of the model goes on as NaN."""
        for number in range(count):
            self._graphs.append([self._forward(part, number) for part in self._parts])

    def outputs(self, anchor: torch.Tensor) -> Any:
        """The output of the whole batch, on every rank; its backward is that of the model.

        `anchor` is a leaf that needs a gradient: so the outputs have one on every rank.
        """
        last = self._route.rank_of(self._route.stages - 1)
        value: Any = None
        if self._route.here == last:
            part = self._parts[-1]
            pieces = zip(*(graphs[-1].results for graphs in self._graphs), strict=True)
            leaves = [torch.cat(piece) if len(piece) > 1 else piece[0] for piece in pieces]
            value = unpack(part.current.skeleton, leaves)
        packed = pack(broadcast(value, last, self._route.group, self._route.device))
        places = [n for n, leaf in enumerate(packed.leaves) if _is_differentiable(leaf)]
        parameters = [share.parameter for share in self._shares]
        wanted = [packed.leaves[n] for n in places]
        nodes = OutputNode.apply(self._backward_of(places), wanted, anchor, *parameters)  # type: ignore[no-untyped-call]
        leaves = list(packed.leaves)
        for n, node in zip(places, nodes, strict=True):
            leaves[n] = node
        return unpack(packed.skeleton, leaves)

    def _forward(self, part: StageModule, number: int) -> StageGraph:
        wires: tuple[torch.Tensor, ...] = ()
        if part.incoming is not None:
            wires = self._receive(part.index - 1, part.incoming.examples())
            for wire in wires:
                wire.requires_grad_()
        made = part(*wires, number=torch.tensor(number))
        results = made if isinstance(made, tuple) else (made,)
        if part.outgoing is not None:
            self._send(part.index + 1, results)
        return StageGraph(part, wires, results)

    def _backward_of(self, places: Sequence[int]) -> Callable[..., list[torch.Tensor | None]]:
        def backward(gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
            by_place = dict(zip(places, gradients, strict=True))
            with self._collected():
                for number, graphs in enumerate(self._graphs):
                    for graph in reversed(graphs):
                        self._backward(graph, number, by_place)
            all_reduce_tied(self._shares, self._route.group)
            collected = [share.gradient for share in self._shares]
            for share in self._shares:
                share.gradient = None  # autograd takes it for .grad, if nobody else holds it
            return collected

        return backward

    def _backward(
        self, graph: StageGraph, number: int, gradients: dict[int, torch.Tensor | None]
    ) -> None:
        part = graph.part
        received: Sequence[torch.Tensor | None]
        if part.is_last:
            received = [
                None if (whole := gradients.get(place)) is None else self._piece(whole, number)
                for place in range(len(graph.results))
            ]
        else:
            received = self._receive(part.index + 1, graph.results)
        pairs = [
            (result, gradient)
            for result, gradient in zip(graph.results, received, strict=True)
            if result.requires_grad and gradient is not None
        ]
        for wire in graph.wires:
            wire.grad = None
        if pairs:
            results, incoming = zip(*pairs, strict=True)
            torch.autograd.backward(results, incoming, retain_graph=retains_graph())
        if graph.wires:
            wires = [torch.zeros_like(w) if w.grad is None else w.grad for w in graph.wires]
            self._send(part.index - 1, wires)

    def _piece(self, whole: torch.Tensor, number: int) -> torch.Tensor:
        return whole if len(self._graphs) == 1 else whole.chunk(len(self._graphs))[number]

    @contextmanager
    def _collected(self) -> Iterator[None]:
        """Move the gradients that the block adds into the shares, and restore those from before."""
        before = [share.parameter.grad for share in self._shares]
        for share in self._shares:
            share.parameter.grad = None
        try:
            yield
            for share in self._shares:
                share.gradient = share.parameter.grad
        finally:
            for share, gradient in zip(self._shares, before, strict=True):
                share.parameter.grad = gradient

    def _send(self, stage: int, tensors: Sequence[torch.Tensor]) -> None:
        send_tensors(tensors, self._route.rank_of(stage), self._route.group)

    def _receive(self, stage: int, alike: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        source = self._route.rank_of(stage)
        return receive_tensors(alike, source, self._route.group, self._route.device)


class OutputNode(torch.autograd.Function):
    """The outputs, whose backward runs the pipeline's and gives each parameter its gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        backward: Callable[..., list[torch.Tensor | None]],
        outputs: Sequence[torch.Tensor],
        anchor: torch.Tensor,
        *_parameters: torch.Tensor,
    ) -> tuple[torch.Tensor, ...]:
        """Args: what runs backward, the outputs, a leaf that needs a gradient, parameters."""
        # An output that the loss does not use has no gradient, rather than zeros.
        ctx.set_materialize_grads(False)
        ctx.run = backward
        # For torch's own refusal of a second backward; it does not look at an attribute.
        ctx.save_for_backward(anchor)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        """The gradients of all parameters that are trained here."""
        [anchor] = ctx.saved_tensors  # raises where the graph has been let go
        collected = ctx.run(gradients)
        if not retains_graph():
            ctx.run = None
        return None, None, torch.zeros_like(anchor), *collected


def _is_differentiable(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and (leaf.is_floating_point() or leaf.is_complex())
