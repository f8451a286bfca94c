"""Tensors that autograd keeps for backward: memory that no Python object owns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

_RAW = "_raw_saved_"
# Nodes of graphs that are looked at: so many take a second.
MOST_NODES = 200_000


def saved_by_graphs(tensors: Iterable[torch.Tensor]) -> Iterator[tuple[torch.Tensor, str]]:
    """Tensors that the graphs of these keep, with the name of the operation that needs each.

    What hooks have put elsewhere (checkpoints, offload) is left out: to look at it is to compute
    or to copy it again.
    """
    nodes: list[Any] = [node for tensor in tensors if (node := _node(tensor)) is not None]
    visited: set[Any] = set()
    while nodes and len(visited) < MOST_NODES:
        node = nodes.pop()
        if node in visited:
            continue
        visited.add(node)
        nodes.extend(following for following, _ in node.next_functions if following is not None)
        for tensor in _saved_by(node):
            yield tensor, node.name()


def _node(tensor: torch.Tensor) -> Any:
    try:
        return tensor.grad_fn
    except Exception:  # noqa: BLE001  # half made, or of a library's own kind
        return None


def _saved_by(node: Any) -> Iterator[torch.Tensor]:
    """Tensors that one operation keeps.

    Private: `SavedTensor.data` and `unpack_hook` are not documented; the documented `_saved_*` run
    hooks. Without them nothing is found here.
    """
    for name in dir(node):
        if not name.startswith(_RAW):
            continue
        try:
            value = getattr(node, name)
        except RuntimeError:  # freed by a backward
            continue
        for item in value if isinstance(value, tuple | list) else (value,):
            if getattr(item, "unpack_hook", item) is not None:
                continue
            try:
                tensor = item.data
            except (RuntimeError, AttributeError):  # freed by a backward
                continue
            if isinstance(tensor, torch.Tensor):
                yield tensor
