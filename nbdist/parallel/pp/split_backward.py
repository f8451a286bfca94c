"""Whether torch can run a stage's backward in two halves: gradients of inputs, then of weights.

The zero bubble schedule puts the second halves where a rank would wait. torch runs one backward
for each group of parameters and frees what it has gone through; a parameter whose gradient
has several sources among the results of the inputs takes away what another one's needs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.autograd.graph import Node, get_gradient_edge


def params_with_shared_grad(
    outputs: Iterable[torch.Tensor],
    inputs: Iterable[torch.Tensor],
    parameters: Mapping[str, torch.Tensor],
) -> list[str]:
    """The parameters whose gradient has several sources. This rank alone.

    Args:
        outputs: Of a stage, with their graph.
        inputs: Leaves that they come from.
        parameters: By name; those that need no gradient do not count.
    """
    users = _users(tensor.grad_fn for tensor in outputs if tensor.grad_fn is not None)
    on_the_way: set[Any] = set()
    for leaf in inputs:
        on_the_way |= _above(_leaf(leaf), users, set())
    return [
        name
        for name, parameter in parameters.items()
        if parameter.requires_grad
        and len(_above(_leaf(parameter), users, on_the_way) & on_the_way) > 1
    ]


def _leaf(tensor: torch.Tensor) -> Any:
    return get_gradient_edge(tensor).node


def _users(roots: Iterable[Node]) -> dict[Any, list[Any]]:
    """Each node of the graph -> the nodes that have used its result."""
    users: dict[Any, list[Any]] = defaultdict(list)
    todo: list[Any] = list(roots)
    visited = set(todo)
    while todo:
        node = todo.pop()
        for source, _ in node.next_functions:
            if source is None:
                continue
            users[source].append(node)
            if source not in visited:
                visited.add(source)
                todo.append(source)
    return users


def _above(node: Any, users: Mapping[Any, list[Any]], ends: set[Any]) -> set[Any]:
    """What depends on a node; nothing beyond the ends."""
    dependents: set[Any] = set()
    todo = [node]
    while todo:
        for user in users.get(todo.pop(), ()):
            if user not in dependents:
                dependents.add(user)
                if user not in ends:
                    todo.append(user)
    return dependents
