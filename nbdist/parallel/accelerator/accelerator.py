"""The ranks' Accelerator: Accelerate's, for every strategy, and made when it is first used."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.state import GradientState, is_initialized
from accelerate.utils import AutocastKwargs, GradientAccumulationPlugin
from accelerate.utils import reduce as reduce_on_all_ranks

from nbdist.errors import OptionError
from nbdist.parallel.accelerator import (
    clip_grad,
    deepspeed_engine,
    gather,
    iterable_loader,
    lazy,
    model_state,
    prepare,
    save_state,
)
from nbdist.parallel.accelerator.batch_sampler import SamplerSettings, current_share, share_of
from nbdist.parallel.accelerator.grad_scaler import Scaler
from nbdist.parallel.accelerator.loader_state import Position
from nbdist.parallel.accelerator.optimizer import OptimizerWrapper, Scheduler
from nbdist.parallel.accelerator.torch_clip import list_parameters
from nbdist.parallel.base import events, guard, options, precision
from nbdist.parallel.base.precision import DTYPES
from nbdist.parallel.base.tensors import local_parts
from nbdist.parallel.base.weak_list import WeakList
from nbdist.parallel.dp import deepspeed, fsdp
from nbdist.parallel.live import registry
from nbdist.strategy.choice import Strategy


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]  # untyped
    """Accelerate's Accelerator under whatever strategy is current, also after a switch.

    `num_processes`, `gather`, `reduce`, data loaders and schedulers go by the ranks that see
    different data: all of them under ddp, zero1 and fsdp, one for each copy of the model under tp,
    pp and cp. `process_index` and `is_main_process` are the rank's. Only public methods are
    overridden; Accelerate itself believes in its plain multi-process mode.
    """

    flag_tensor: torch.Tensor | None
    scaler: Scaler | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Set up as Accelerate does. Precision and accumulation of the strategy's options count.

        Raises:
            OptionError: fp8, or a plugin of Accelerate's for a strategy: strategies are chosen
                with %dist_strategy.
        """
        guard.refuse_strategies(kwargs)
        super().__init__(*args, **kwargs)
        if self.state.mixed_precision not in ("no", "bf16", "fp16"):
            raise OptionError(
                f"mixed_precision={self.state.mixed_precision!r} does not work here. Use 'no', "
                "'bf16' or 'fp16'."
            )
        # Of those that the user gives, not of the strategy's option.
        self._own_steps: int = self.gradient_accumulation_steps
        self._own_scaler: Scaler | None = None
        self._hold_weakly()
        self._custom_objects = WeakList()
        precision.note(self.state.mixed_precision)
        registry.set_choice(precision.with_accelerator_precision(registry.current()))
        registry.watch(self)
        self._follow(registry.current())

    # What was prepared

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as Accelerate does, models first whatever the order. Collective: every rank."""
        if registry.current().name == "deepspeed":
            args = deepspeed_engine.prepare_engine(args)
        elif any(isinstance(argument, torch.nn.Module) for argument in args):
            deepspeed_engine.drop()  # of another strategy's time
        order = sorted(range(len(args)), key=lambda i: not isinstance(args[i], torch.nn.Module))
        if device_placement is not None and len(device_placement) == len(args):
            device_placement = [device_placement[i] for i in order]
        prepared = super().prepare(*(args[i] for i in order), device_placement=device_placement)
        if len(args) == 1:
            return prepared
        placed = dict(zip(order, prepared, strict=True))
        return tuple(placed[i] for i in range(len(args)))

    def prepare_model(
        self,
        model: torch.nn.Module,
        device_placement: bool | None = None,
        evaluation_mode: bool = False,
    ) -> torch.nn.Module:
        """Put a model under the current strategy. Collective: every rank.

        A model that is prepared already stays as it is. Optimizers that were prepared before it
        get its new parameters.

        Raises:
            OptionError: The strategy does not go with the model.
        """
        if deepspeed_engine.is_engine(model):
            self._models.append(model)
            return model
        outer = prepare.prepare_model(model, self)
        prepared = registry.prepared_of(outer)
        assert prepared is not None
        self._models.append(prepared.base)
        for optimizer in self._optimizers:
            prepare.bind(optimizer.optimizer)
        return outer

    def prepare_optimizer(
        self,
        optimizer: torch.optim.Optimizer,
        device_placement: bool | None = None,
    ) -> OptimizerWrapper:
        """Wrap an optimizer. Its groups get the parameters of prepared models in place.

        Twice the same optimizer is the same wrapper.
        """
        if isinstance(optimizer, deepspeed_engine.EngineOptimizer):
            self._optimizers.append(optimizer)
            return optimizer
        wrapper = optimizer if isinstance(optimizer, OptimizerWrapper) else None
        raw = optimizer if wrapper is None else wrapper.optimizer
        prepare.bind(raw)
        if registry.current().options.is_fused:
            options.set_fused(raw, is_on=True)
        existing = next((o for o in self._optimizers if o.optimizer is raw), None)
        prepared: OptimizerWrapper = existing or wrapper or OptimizerWrapper(raw)
        prepared.scaler = self.scaler
        self._optimizers.append(prepared)
        return prepared

    def prepare_data_loader(
        self,
        data_loader: Any,
        device_placement: bool | None = None,
        slice_fn_for_dispatch: Any = None,
    ) -> Any:
        """Share a loader's batches out between the ranks that see different data.

        The loader and loops over it go on at the next sample after a switch. Collective under
        `single`; each epoch is, elsewhere.

        Raises:
            OptionError: Its batches do not divide as asked.
        """
        if getattr(data_loader, "_is_accelerate_prepared", False):
            self._dataloaders.append(data_loader)
            return data_loader
        is_placed = self.device_placement if device_placement is None else device_placement
        settings = SamplerSettings(
            self.device if is_placed else None,
            dataclasses.replace(self.dataloader_config),
            tuple(str(getattr(kind, "value", kind)) for kind in self.rng_types),
            slice_fn_for_dispatch,
        )
        loader = iterable_loader.prepare(data_loader, settings, is_dispatched=self.dispatch_batches)
        self._dataloaders.append(loader)
        return loader

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Let a scheduler step once for each batch that was used (`Scheduler.step`)."""
        wrappers = [scheduler] if isinstance(scheduler, Scheduler) else self._schedulers
        prepared = next(
            (wrapper for wrapper in wrappers if scheduler in (wrapper, wrapper.scheduler)), None
        )
        if prepared is None:
            prepared = Scheduler(
                scheduler,
                self._optimizers,
                is_linked=self.step_scheduler_with_optimizer,
                is_split=self.split_batches,
            )
        self._schedulers.append(prepared)
        return prepared

    def free_memory(self, *objects: Any) -> Any:
        """Free memory as Accelerate does; what is prepared afterwards is held weakly too."""
        released = super().free_memory(*objects)
        self._hold_weakly()
        return released

    def unwrap_model(
        self,
        model: torch.nn.Module,
        keep_fp32_wrapper: bool = True,
        keep_torch_compile: bool = True,
    ) -> torch.nn.Module:
        """The user's own module. Its parameters are this rank's parts: `get_state_dict` for all."""
        prepared = registry.prepared_of(model)
        if prepared is not None:
            return prepared.base
        unwrapped: torch.nn.Module = super().unwrap_model(
            model, keep_fp32_wrapper, keep_torch_compile
        )
        return unwrapped

    # Who sees which data

    @property
    def num_processes(self) -> int:
        """How many ranks see different data: the factor of the effective batch."""
        return current_share().count

    def gather(self, tensor: Any) -> Any:
        """Values of all data, each once, on every rank. Collective (`gather.gather`)."""
        return gather.gather(tensor)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather without the samples that fill up the last batch. Collective."""
        is_tensors = not use_gather_object and gather.is_tensors(input_data)
        gathered = (gather.gather if is_tensors else gather.gather_objects)(input_data)
        state = self.gradient_state
        is_filled = state.end_of_dataloader and state.remainder > 0
        return gather.first_of(gathered, state.remainder) if is_filled else gathered

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Values of all data combined, on every rank. Collective (`gather.reduce`)."""
        return gather.reduce(tensor, reduction)

    def pad_across_processes(
        self,
        tensor: Any,
        dim: int = 0,
        pad_index: int = 0,
        pad_first: bool = False,
    ) -> Any:
        """Pad as Accelerate does; ranks that share a copy of the model have equal shapes anyway."""
        if self.num_processes == 1:
            return tensor
        return super().pad_across_processes(tensor, dim, pad_index, pad_first)

    def split_between_processes(
        self, inputs: Any, apply_padding: bool = False
    ) -> AbstractContextManager[Any]:
        """Split as Accelerate does, between the ranks that see different data."""
        return gather.part_of(inputs, self.state, is_padded=apply_padding)

    def check_trigger(self) -> bool:
        """Whether any rank at all has called `set_trigger`. Collective: every rank."""
        unset = torch.tensor(0, device=self.device)
        flag = unset if self.flag_tensor is None else self.flag_tensor
        is_set = bool(reduce_on_all_ranks(flag, "sum").item() >= 1)
        self.flag_tensor = unset if is_set else flag
        return is_set

    def skip_first_batches(self, dataloader: Any, num_batches: int = 0) -> Any:
        """A loader without the first batches; it too goes on after a switch."""
        if isinstance(dataloader, Position):
            return dataloader.skip(num_batches)
        return super().skip_first_batches(dataloader, num_batches)

    # Gradients, and what computes them

    def no_sync(self, model: torch.nn.Module) -> AbstractContextManager[None]:
        """Backwards in here add gradients up on each rank; the next one outside combines them."""
        outer = deepspeed_engine.outer_of(model) or model
        if deepspeed_engine.is_engine(outer):
            return deepspeed.no_sync(outer)
        inner: Any = next((m for m in outer.modules() if hasattr(m, "no_sync")), None)
        context: AbstractContextManager[None] = (
            fsdp.no_sync(outer) if inner is None else inner.no_sync()
        )
        return context

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
        """Run backward as Accelerate does: divided by a step's backwards, and scaled for fp16."""
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
        tensors = list_parameters(parameters, "clip_grad_norm_")
        self._unscale(tensors)
        return clip_grad.clip_grad_norm(
            tensors, max_norm, norm_type, registry.layout_of, degrees=registry.current().degrees
        )

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Limit each element of gradients, where it lies. Collective with fp16."""
        if deepspeed_engine.only(self._models) is not None:
            raise OptionError("DeepSpeed has no clip_grad_value_. Use clip_grad_norm_, or fsdp.")
        tensors = list_parameters(parameters, "clip_grad_value_")
        self._unscale(tensors)
        torch.nn.utils.clip_grad_value_(local_parts(tensors), clip_value)

    @property
    def mixed_precision(self) -> str:
        """no, bf16 or fp16: the current strategy's option."""
        precision = registry.current().options.precision
        return precision if precision in DTYPES else "no"

    @contextmanager
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

    # States

    def get_state_dict(self, model: torch.nn.Module, unwrap: bool = True) -> dict[str, Any]:
        """A model's whole state, by the names of the user's module. Collective: every rank.

        `unwrap` is of no effect: names are the same under every strategy.

        Returns:
            Whole tensors, tied ones under each of their names; not those that the module does
            not save. On every rank; of a prepared model, while `save_state` runs, on rank 0 alone.
        """
        state: dict[str, Any]
        if deepspeed_engine.is_engine(model) or registry.prepared_of(model) is not None:
            state = model_state.portable(model).state_dict()
            model_state.warn_of_own_buffers(model)
            return {} if save_state.is_saving() and dist.get_rank() != 0 else state
        state = super().get_state_dict(model, unwrap)
        return state

    def save_state(
        self, output_dir: Any = None, safe_serialization: bool = True, **kwargs: Any
    ) -> Any:
        """Write the whole state, for any strategy and number of ranks. Collective: every rank."""
        with save_state.saving(self):
            folder = super().save_state(output_dir, safe_serialization, **kwargs)
        save_state.save_loaders(self, folder)
        self.wait_for_everyone()
        return folder

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """Read what `save_state` wrote under any strategy. Collective: every rank.

        `strict=False` leaves out what does not fit by name.

        Raises:
            NbdistError: It does not fit the models, before anything changes.
        """
        # Parts are taken from the files as they lie on disk.
        kwargs.setdefault("map_location", "cpu")
        with save_state.loading(self, is_strict=kwargs.pop("strict", True)):
            super().load_state(input_dir, {"mmap": True, **(load_kwargs or {})}, **kwargs)

    # Switches

    def before_switch(self, old: Strategy, new: Strategy) -> None:
        """Refuse a strategy that optimizers or loaders cannot follow. This rank alone.

        Notes which accumulation the code has asked for: `after_switch` returns to it.

        Raises:
            OptionError: No fused step for an optimizer, batches that do not divide, DeepSpeed.
        """
        deepspeed_engine.refuse_switch(new)
        if old.options.accumulate <= 1:
            self._own_steps = self.gradient_accumulation_steps
        share = share_of(new, self.process_index)
        for loader in self._dataloaders:
            if hasattr(loader, "check"):
                loader.check(share)
        for optimizer in self._optimizers if new.options.is_fused else ():
            options.refuse_fused(optimizer.optimizer, self.device)

    def after_switch(self, old: Strategy, new: Strategy) -> None:
        """Take over the new strategy's precision and accumulation. This rank alone."""
        if old.options.accumulate != new.options.accumulate:
            self.gradient_accumulation_steps = max(new.options.accumulate, 1)
            if new.options.accumulate == 1:
                self.gradient_accumulation_steps = self._own_steps
        # The switch has cleared gradients: the next backward is the first of a step.
        self.step = 0
        self.sync_gradients = True
        for optimizer in self._optimizers:
            if old.options.is_fused or new.options.is_fused:
                options.set_fused(optimizer.optimizer, is_on=new.options.is_fused)
        self._follow(new)

    def batch_and_rate(self) -> tuple[int | None, float | None]:
        """(the size of a loader's batches that each rank has whole, the learning rate), if any."""
        all_settings = [getattr(loader, "_settings", None) for loader in self._dataloaders]
        is_whole = [
            settings is not None and not settings.config.split_batches for settings in all_settings
        ]
        # With several loaders nobody knows which one is trained with.
        samplers = [getattr(loader, "batch_sampler", None) for loader in self._dataloaders]
        sizes = {getattr(sampler, "batch_size", None) for sampler in samplers}
        rates = [optimizer.param_groups[0]["lr"] for optimizer in self._optimizers]
        is_known = bool(is_whole) and all(is_whole) and len(sizes) == 1 and bool(rates)
        return (sizes.pop(), float(rates[0])) if is_known else (None, None)

    def _follow(self, choice: Strategy) -> None:
        precision = choice.options.precision
        self.native_amp = precision in DTYPES
        if choice.options.accumulate > 1:
            self.gradient_accumulation_steps = choice.options.accumulate
        if precision == "fp16" and self._own_scaler is None:
            kwargs = {} if self.scaler_handler is None else self.scaler_handler.to_kwargs()
            self._own_scaler = Scaler(self.device.type, **kwargs)
        is_scaled = precision == "fp16" and choice.name != "deepspeed"  # which has its own
        self.scaler = self._own_scaler if is_scaled else None
        for optimizer in self._optimizers:
            optimizer.scaler = self.scaler

    def _unscale(self, parameters: list[torch.Tensor]) -> None:
        """Unscale optimizers with one of these parameters; all where none has: ranks must agree."""
        wanted = {id(p) for p in parameters}
        optimizers = [
            optimizer
            for optimizer in self._optimizers
            if any(id(p) in wanted for group in optimizer.param_groups for p in group["params"])
        ]
        self.unscale_gradients(optimizers or None)

    def _hold_weakly(self) -> None:
        """Replace Accelerate's private lists, which keep everything that was ever prepared."""
        self._models = WeakList(deepspeed_engine.outer_of)
        self._optimizers = WeakList()
        self._schedulers = WeakList()
        self._dataloaders = WeakList()


class LazyAccelerator(Accelerator):
    """An Accelerator without options that sets itself up at the first use, and is one from then on.

    Accelerate keeps one state per process. One that is set up at the start would refuse
    the user's own `Accelerator(mixed_precision="bf16")`, the usual first line of a script. One
    that is set up after the user's takes over what both share, as it has no options of its own.
    """

    def __init__(self) -> None:
        """Nothing is set up before the first use."""

    def __getattribute__(self, name: str) -> Any:
        """Any attribute is a use, methods too; what Python itself asks for, `__class__`, is none.

        Methods must not run before the set-up: `wait_for_everyone` would find no state, make one
        for a single process, and wait for nobody.
        """
        if name.startswith("__"):
            return super().__getattribute__(name)
        self.__class__ = Accelerator
        own_steps = _steps_of_last()
        try:
            Accelerator.__init__(self, gradient_accumulation_plugin=_shared_plugin())
        except BaseException:  # the next use tries again, and shows the reason again
            self.__dict__.clear()
            self.__class__ = LazyAccelerator
            raise
        self._own_steps = own_steps or self._own_steps
        return getattr(self, name)


def _shared_plugin() -> GradientAccumulationPlugin | None:
    """The accumulation of the Accelerator that this process has already; None without one.

    Any class of Accelerate's shares it; a further Accelerator() would put it back to 1.
    """
    if not is_initialized():
        return None
    return GradientAccumulationPlugin(**GradientState().plugin_kwargs)


def _steps_of_last() -> int | None:
    """The accumulation that the user gave the last Accelerator of ours, if there is one.

    What all share may be the strategy's option at the moment.
    """
    ours = [watcher for watcher in registry.watchers() if isinstance(watcher, Accelerator)]
    return ours[-1]._own_steps if ours else None  # noqa: SLF001  # of the class above


# By whatever this was loaded: from now on the stand-ins' type is what it will be.
lazy.become(LazyAccelerator)
