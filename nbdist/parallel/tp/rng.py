"""Random numbers under tensor parallelism: alike where activations are whole, own where split.

A dropout on whole activations has to drop the same elements on all ranks that share a layer,
whatever their seeds are; one between a colwise and a rowwise layer is to drop others on each.
Every forward of the model therefore draws from a stream of its own, whose seed comes from the
first of these ranks; between split layers each rank draws from a stream of its own.
"""

from __future__ import annotations

import functools
from typing import Any, Self

import torch
import torch.distributed as dist

from nbdist.errors import NbdistError
from nbdist.parallel.base.mesh import ParallelMesh

_DROPOUTS = torch.nn.modules.dropout._DropoutNd  # noqa: SLF001  # what all dropouts derive from
_SEEDS = 1 << 62
# Where models keep what they were made with.
_SETTINGS = ("config", "cfg", "args", "params", "hparams")


class Streams:
    """The random numbers of one model's forwards on this rank.

    They depend on torch's generators alone: a forward that is computed again in backward, with
    the generators set back as torch.utils.checkpoint does, draws the same numbers.
    """

    def __init__(self, mesh: ParallelMesh, device: torch.device, model: torch.nn.Module) -> None:
        self._group = mesh.group("tp")
        self._index = mesh.coordinate.tp
        self._generators = _generators(device)
        # The host where the group can send from there: then nobody waits for the device.
        has_host = "cpu:" in str(dist.get_backend_config(self._group))
        seed_device = torch.device("cpu") if has_host else device
        self._seed = torch.zeros((), dtype=torch.int64, device=seed_device)
        self._dropouts = [module for module in model.modules() if isinstance(module, _DROPOUTS)]
        # Whether the last forward in training drew any numbers; before the first one, whether
        # an attribute says that it will: not every dropout is a module.
        self._draws = any(map(_mentions_dropout, model.modules()))
        # Whether ranks draw alike now, or did in the forward that backward computes again.
        self._is_alike = False
        self._owner: int | None = None
        self._states: list[torch.Tensor] = []

    def __deepcopy__(self, _memo: object) -> Self:
        """Itself: a copy of the model draws from the same streams."""
        return self

    def attach(self, root: torch.nn.Module) -> None:
        """Let every forward of a module draw alike on the ranks that share its layers."""
        run = root.forward
        # A partial, no closure: copy.deepcopy makes its bound method one of the copy.
        root.forward = functools.update_wrapper(functools.partial(self._forward, root, run), run)

    def enter(self, owner: int) -> None:
        """From here on draw numbers of this rank's own, until `leave`. No rank is met.

        Again for the same owner, the id of a module, it does nothing.
        """
        if self._is_alike and self._owner != owner:
            self._enter(owner)

    def leave(self) -> None:
        """Draw again what all ranks draw."""
        if self._owner is not None:
            self._leave()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _enter(self, owner: int) -> None:
        # A forward that is computed again ends as soon as it has what it needs: then the
        # states of an earlier owner are left over.
        self._owner = owner
        seed = int(torch.randint(_SEEDS, (), dtype=torch.int64))
        self._states = [generator.get_state() for generator in self._generators]
        for generator in self._generators:
            generator.manual_seed(seed + 1 + self._index)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _leave(self) -> None:
        self._owner = None
        self._set(self._states)

    def _forward(self, root: torch.nn.Module, run: Any, *args: Any, **kwargs: Any) -> Any:
        is_training = root.training or any(module.training for module in self._dropouts)
        if not is_training:
            return run(*args, **kwargs)
        has_dropout = any(module.training and module.p > 0 for module in self._dropouts)
        self._is_alike = self._draws or has_dropout
        self._owner = None
        before = self._begin()
        try:
            result = run(*args, **kwargs)
        finally:
            drew = self._end(*before)
        if drew and not self._is_alike:
            self._draws = True
            raise NbdistError(
                "this forward drew random numbers and the one before it did not, so ranks that "
                "share the model's layers drew different ones. Run it again: from now on they "
                "draw the same ones."
            )
        self._draws = drew
        return result

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _begin(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The generators' states for after the forward, and those that it begins with."""
        if not self._is_alike:
            states = [generator.get_state() for generator in self._generators]
            return states, states
        # Drawn on all ranks, so that the generators go on alike where they have been alike.
        self._seed.fill_(int(torch.randint(_SEEDS, (), dtype=torch.int64)))
        states = [generator.get_state() for generator in self._generators]
        dist.broadcast(self._seed, group=self._group, group_src=0)
        seed = int(self._seed)
        for generator in self._generators:
            generator.manual_seed(seed)
        return states, [generator.get_state() for generator in self._generators]

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def _end(self, after: list[torch.Tensor], begun: list[torch.Tensor]) -> bool:
        """Whether the forward drew any numbers; the generators are set back to what they were."""
        now = [generator.get_state() for generator in self._generators]
        drew = not all(map(torch.equal, now, begun))
        if self._is_alike:
            self._owner = None
            self._set(after)
        return drew

    def _set(self, states: list[torch.Tensor]) -> None:
        for generator, state in zip(self._generators, states, strict=True):
            generator.set_state(state)


def _mentions_dropout(module: torch.nn.Module) -> bool:
    attributes = vars(module)
    settings = [
        vars(attributes[key]) for key in _SETTINGS if hasattr(attributes.get(key), "__dict__")
    ]
    return any(
        "drop" in str(key) and isinstance(value, int | float) and 0 < value < 1
        for table in (attributes, *settings)
        for key, value in table.items()
    )


def _generators(device: torch.device) -> list[torch.Generator]:
    generators = [torch.default_generator]
    if device.type == "cuda":
        generators.append(torch.cuda.default_generators[device.index or 0])
    return generators
