"""One rank's part of a pipeline: the model's own forward, with its own blocks and no others.

Every stage runs the user's forward from its start, on the real arguments, so masks and
positions are there. In the list of blocks stand-ins take the foreign blocks' places:

    unknown ... unknown, what was received, own block, ..., own block that ends the forward

What the last own block returns goes to the next stage, where the stand-in of that block returns
it: code between blocks (`h = block(h)[0]`) runs there. What a stage cannot know is NaN (results
of earlier blocks, the rows of an embedding that another stage holds), so that a model that
uses it after all is found out at the first step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from nbdist.errors import NbdistError
from nbdist.parallel.base.blocks import BlockList
from nbdist.parallel.base.tensors import like, local_of
from nbdist.parallel.pp.outputs import has_nan, loss_of, without_cache
from nbdist.parallel.pp.p2p_tensors import (
    StageBoundary,
    nan_like,
    pack_activations,
    unpack_activations,
)
from nbdist.parallel.pp.pytree import FlatValue, pack, unpack

_NAN = float("nan")
# The model's attribute with the names of what every stage is to hold; `partition` reads it.
EVERYWHERE = "pp_everywhere"


class Cut(BaseException):
    """Ends the model's forward after the last own block. No error: nothing is to catch it."""

    def __init__(self, value: Any) -> None:
        super().__init__()
        self.value = value


class StandIn(torch.nn.Module):
    """Takes a block's place in the list, with its attributes, which loops look at."""

    def __init__(self, block: torch.nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        # Not registered: the block is no part of it.
        self.__dict__["_block"] = block
        self.__dict__["_call"] = call

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the value in place of the block's own result."""
        return self.__dict__["_call"](*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        """Look an attribute up in the block itself: models ask their blocks for settings."""
        return getattr(self.__dict__["_block"], name)


@dataclass(slots=True)
class Missing:
    """A parameter outside of the blocks that this rank does not hold.

    Attributes:
        table: Of its module, where the parameter stands.
        key: Its name there.
        number: What it is full of while the model runs.
        value: Of its shape, in that one number's memory.
    """

    name: str
    table: dict[str, Any]
    key: str
    number: torch.Tensor
    value: torch.Tensor


@dataclass(slots=True)
class Wiring:
    """The code that a stage runs. Not its children: the model has the other stages' blocks too.

    Attributes:
        model: The user's.
        root: The `Stages` that it is part of.
        modules: The list of blocks, with stand-ins.
        missing: Parameters that are elsewhere.
    """

    model: torch.nn.Module
    root: torch.nn.Module
    modules: dict[str, Any]
    missing: tuple[Missing, ...]
    device: torch.device


@dataclass(slots=True)
class StageStep:
    """One stage's share of one step.

    Attributes:
        factor: By what each micro-batch's loss is multiplied before its backward.
        has_loss: The model computes its loss. Otherwise the last stage returns its outputs.
        losses: Of the micro-batches, without factor or gradient; of the last stage.
        skeleton: Of the last stage's outputs.
        failure: The first error of the model's code.
    """

    batches: Sequence[FlatValue] = ()
    factor: float = 1.0
    has_loss: bool = True
    skeleton: bytes = b""
    losses: list[torch.Tensor] = field(default_factory=list)
    failure: Exception | None = None


class StageModule(torch.nn.Module):
    """One stage. torch's schedule calls it, or its `Stages` where that has no other.

    Attributes:
        span: Its blocks, as positions in the list.
        is_first, is_last: Whether it begins, whether it computes the loss.
        tree: What it holds of the model.
        incoming, outgoing: What goes in and out; None at the ends, and before the first step.
        current: The step that runs.
        before_blocks: Is called in each forward before the first own block, if it is there.
    """

    def __init__(self, blocks: BlockList, span: range, index: int, tree: torch.nn.Module) -> None:
        super().__init__()
        self.blocks = blocks
        self.span = span
        self.index = index
        self.is_first = span.start == 0
        self.is_last = span.stop == len(blocks.modules)
        self.tree = tree
        self.incoming: StageBoundary | None = None
        self.outgoing: StageBoundary | None = None
        self.current = StageStep()
        self._wiring: Wiring | None = None
        self.before_blocks: Callable[[], None] | None = None
        self._received: Any = None
        self._nothing: FlatValue | None = None
        self._unknown_number = _NAN

    def forward(self, *wires: torch.Tensor, number: torch.Tensor) -> Any:
        """One micro-batch: wires to the next stage; of the last one the scaled loss, or outputs."""
        assert self._wiring is not None
        return self._wiring.root(*wires, number=number, part=self)

    def step(self, wires: Sequence[torch.Tensor], number: int) -> Any:
        """Run forward on one micro-batch, and return what goes to the next stage.

        An error of the model's code is kept, and NaN goes on in place of a result: so every
        stage ends the step, and none waits for the one that has failed.
        """
        current = self.current
        if current.failure is None:
            try:
                value = None if self.incoming is None else unpack_activations(wires, self.incoming)
                return self._result(self.run(current.batches[number], value))
            except Exception as error:  # noqa: BLE001  # the model's code raises what it likes
                current.failure = error
        assert self._wiring is not None
        if self.outgoing is not None:
            return nan_like(self.outgoing.examples(), wires, self._wiring.device)
        return nan_like((torch.empty((), device="meta"),), wires, self._wiring.device)[0]

    def run(self, batch: FlatValue, received: Any = None) -> Any:
        """The model's own forward: what the last own block, or at the end the model, returns.

        Raises:
            NbdistError: The forward has not come to this stage's last block.
        """
        assert self._wiring is not None
        args, kwargs = unpack(batch.skeleton, batch.leaves)
        self._received = received
        if self.is_first:
            self._arrive()
        try:
            with self._standing_in(self._wiring):
                value = self._wiring.model(*args, **kwargs)
        except Cut as cut:
            return cut.value
        finally:
            self._received = self._nothing = None
        if self.is_last:
            return value
        raise NbdistError(
            f"forward returned before {self.last_name}: in a pipeline every block of the list "
            "runs in each forward, in order"
        )

    @property
    def last_name(self) -> str:
        """The last own block's name in the model."""
        return self.blocks.block_name(self.span[-1])

    def finish(self, model: torch.nn.Module, root: torch.nn.Module, device: torch.device) -> None:
        """Make the stand-ins. Once modules and parameters are what they will be."""
        inside = {module for block in self.blocks.modules for module in block.modules()}
        # Keyed, as a Sequential of names is.
        table = self.blocks.container._modules  # noqa: SLF001  # as torch's own tools
        modules = {key: self._stand_in(n, block) for n, (key, block) in enumerate(table.items())}
        self._wiring = Wiring(model, root, modules, tuple(_missing(model, inside, device)), device)

    def find_wrong_guess(self, batch: FlatValue, received: Any) -> str:
        """Find a parameter, or the first block for all blocks, that this stage uses but lacks.

        Empty if the result depends on nothing such. Called where the result has NaN: the model
        runs once more for each thing that is missing, with zero in place of the others.
        """
        assert self._wiring is not None
        missing = self._wiring.missing

        def depends() -> bool:
            return has_nan(self.run(batch, received))

        self._unknown_number = 0.0
        for parameter in missing:
            parameter.number.zero_()
        try:
            if depends():
                return ""
            self._unknown_number = _NAN
            if depends():
                return self.blocks.block_name(0)
            self._unknown_number = 0.0
            for parameter in missing:
                parameter.number.fill_(_NAN)
                if depends():
                    return parameter.name
                parameter.number.zero_()
        finally:
            self._unknown_number = _NAN
            for parameter in missing:
                parameter.number.fill_(_NAN)
        return ""

    def _stand_in(self, position: int, block: Any) -> torch.nn.Module:
        if position == self.span.start - 1:
            return StandIn(block, self._arrive)
        if position < self.span.start:
            return StandIn(block, self._unknown)
        if position >= self.span.stop:
            return StandIn(block, _out_of_order)
        if position == self.span[-1] and not self.is_last:
            return StandIn(block, _ending(block))
        module: torch.nn.Module = block
        return module

    @contextmanager
    def _standing_in(self, wiring: Wiring) -> Iterator[None]:
        """While the model runs: its list of stand-ins, and NaN in place of missing parameters."""
        attributes = self.blocks.container.__dict__
        modules = attributes["_modules"]
        parameters = [missing.table[missing.key] for missing in wiring.missing]
        # torch's encoder makes nested tensors of padded ones in evaluation, but for a list of its
        # own layers only, and they cannot be sent.
        is_fast = torch.backends.mha.get_fastpath_enabled()
        torch.backends.mha.set_fastpath_enabled(False)
        attributes["_modules"] = wiring.modules
        for missing in wiring.missing:
            missing.table[missing.key] = missing.value
        try:
            yield
        finally:
            attributes["_modules"] = modules
            torch.backends.mha.set_fastpath_enabled(is_fast)
            for missing, parameter in zip(wiring.missing, parameters, strict=True):
                missing.table[missing.key] = parameter

    def _arrive(self, *_: Any, **__: Any) -> Any:
        if self.before_blocks is not None:
            self.before_blocks()
        return self._received

    def _unknown(self, *_: Any, **__: Any) -> Any:
        """Return tensors of the form that blocks return, in one memory for all blocks."""
        if self._nothing is None:
            packed = pack(self._received)
            self._nothing = FlatValue(
                packed.skeleton,
                tuple(
                    torch.full_like(tensor, self._unknown_number, requires_grad=False)
                    if tensor.is_floating_point() or tensor.is_complex()
                    else torch.zeros_like(tensor)
                    for tensor in packed.tensors
                ),
            )
        return unpack(self._nothing.skeleton, self._nothing.leaves)

    def _result(self, value: Any) -> Any:
        if self.outgoing is None and not self.current.has_loss:
            packed = pack(without_cache(value))
            self.current.skeleton = packed.skeleton
            return packed.tensors
        if self.outgoing is None:
            loss = loss_of(value)
            self.current.losses.append(loss.detach())
            # A scaled loss does not fit into fp16.
            return loss.to(torch.promote_types(loss.dtype, torch.float32)) * self.current.factor
        border = StageBoundary.of(value)
        if border.form != self.outgoing.form:
            raise NbdistError(
                f"{self.last_name} returned {border}, but {self.outgoing} before, for a batch of "
                "the same shape: in a pipeline the form of results must depend on the batch's "
                "shape alone"
            )
        return pack_activations(value)


class Stages(torch.nn.Module):
    """All stages of this rank: one, or two that are far from each other.

    Further steps take it for the model: it holds what this rank holds, and is what is called.
    """

    def __init__(self, parts: Sequence[StageModule]) -> None:
        super().__init__()
        self.parts = torch.nn.ModuleList(parts)

    def forward(
        self,
        *received: Any,
        number: torch.Tensor | None = None,
        part: StageModule | None = None,
        batch: FlatValue | None = None,
    ) -> Any:
        """One stage's result of a micro-batch, as wires; of a whole batch, as it is.

        Args:
            received: From the stage before: wires, or a value.
            number: Which micro-batch, as torch's schedule hands it on.
            part: Which stage; the only one by itself.
            batch: Instead of a micro-batch.
        """
        chosen: Any = self.parts[0] if part is None else part
        if batch is not None:
            return chosen.run(batch, *received)
        assert number is not None
        return chosen.step(received, int(number))


def _missing(
    model: torch.nn.Module, inside: set[torch.nn.Module], device: torch.device
) -> Iterator[Missing]:
    for path, module in model.named_modules():
        if module in inside:
            continue
        table: dict[str, Any] = module._parameters  # noqa: SLF001  # as torch's own tools
        for key, parameter in table.items():
            if parameter is not None and parameter.is_meta:
                local = local_of(parameter)
                number = torch.full((), _NAN, dtype=local.dtype, device=device)
                value = like(parameter, number.expand(local.shape))
                yield Missing(f"{path}.{key}" if path else key, table, key, number, value)


def _out_of_order(*_: Any, **__: Any) -> Any:
    raise NbdistError(
        "forward does not call its blocks in the order of the list: a pipeline's stages are "
        "consecutive blocks"
    )


def _ending(block: torch.nn.Module) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        raise Cut(block(*args, **kwargs))

    return run
