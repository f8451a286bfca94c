"""The methods of an Accelerator that have to do with gradients, and with what computes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import accelerate
import torch
from accelerate.utils import AutocastKwargs

from nbdist.parallel import events, registry
from nbdist.parallel.accelerator import clip_grad
from nbdist.parallel.accelerator.grad_scaler import Scaler
from nbdist.parallel.dp import deepspeed, deepspeed_engine
from nbdist.parallel.precision import DTYPES
from nbdist.parallel.tensors import local_parts


class Gradients(accelerate.Accelerator):  # type: ignore[misc]  # untyped
    """Accelerate's methods around backward, for gradients that lie as the strategy says."""

    scaler: Scaler | None

    @contextlib.contextmanager
    def no_sync(self, model: torch.nn.Module) -> Iterator[None]:
        """Backwards in here add gradients up on each rank; the next one outside combines them."""
        with deepspeed_engine.syncs_saved(model):
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Divide gradients by fp16's scale, those of each optimizer once. Collective with fp16."""
        if self.scaler is None:
            return
        several = optimizer if isinstance(optimizer, list | tuple) else [optimizer]
        for wrapper in self._optimizers if optimizer is None else several:
            raw = getattr(wrapper, "optimizer", wrapper)
            if not self.scaler.has_unscaled(raw):
                self.scaler.unscale_(raw)

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """As Accelerate's: divided by the backwards of a step, and scaled for fp16."""
        engine = deepspeed_engine.only(self._models)
        if engine is None:
            with events.backward(loss, self.gradient_accumulation_steps):
                super().backward(loss, **kwargs)
        else:
            deepspeed.backward(engine, loss / self.gradient_accumulation_steps)

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2.0
    ) -> torch.Tensor:
        """Limit the norm of gradients over the whole model, and return it, plain.

        Collective under fsdp, tp and pp, and with fp16: every rank (`clip_grad.clip_grad_norm`).
        """
        engine = deepspeed_engine.only(self._models)
        if engine is not None:
            return deepspeed.clip(engine, max_norm, norm_type)
        tensors = _as_list(parameters)
        self._unscale(tensors)
        return clip_grad.clip_grad_norm(
            tensors, max_norm, norm_type, registry.layout_of, degrees=registry.current().degrees
        )

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit each element of gradients, where it lies. Collective with fp16."""
        deepspeed_engine.refuse_values(self._models)
        tensors = _as_list(parameters)
        self._unscale(tensors)
        torch.nn.utils.clip_grad_value_(local_parts(tensors), clip_value)

    @property
    def mixed_precision(self) -> str:
        """no, bf16 or fp16: the current strategy's option."""
        precision = registry.current().options.precision
        return precision if precision in DTYPES else "no"

    @contextlib.contextmanager
    def autocast(self, autocast_handler: AutocastKwargs | None = None) -> Iterator[None]:
        """Compute in the strategy's precision; nothing in fp32."""
        handler = autocast_handler or self.autocast_handler
        dtype = DTYPES.get(registry.current().options.precision)
        if dtype is None or deepspeed_engine.only(self._models) is not None:
            yield
            return
        kwargs = {} if handler is None else handler.to_kwargs()
        with torch.autocast(self.device.type, dtype=dtype, **kwargs):
            yield

    def _unscale(self, parameters: list[torch.Tensor]) -> None:
        """Of the optimizers that have one of these. Of all where none has: ranks must agree."""
        wanted = {id(p) for p in parameters}
        optimizers = [
            optimizer
            for optimizer in self._optimizers
            if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"])
        ]
        self.unscale_gradients(optimizers or None)


def _as_list(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
