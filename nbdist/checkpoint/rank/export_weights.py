"""A model's weights in one file that transformers and other programs read.

 every rank: its parts of a batch of tensors --> rank 0: whole tensors, written one by one
 rank 0: the file is on disk, is read back, and compared with the model, which is gathered again
 rank 0: configs come beside it, then the file gets its name

What rank 0 does with files is in checkpoint/rank/safetensors_file.py.
"""

from __future__ import annotations

import functools
import gc
import itertools
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar, cast

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from nbdist.checkpoint import safetensors
from nbdist.checkpoint.manifest import SavedTensor
from nbdist.checkpoint.rank import peft_adapters
from nbdist.checkpoint.rank.safetensors_file import WeightsFile, configs_of
from nbdist.checkpoint.safetensors import ADAPTER_FILE, FILE, ExportedWeights
from nbdist.errors import CheckpointError, OptionError
from nbdist.parallel.accelerator import deepspeed_engine
from nbdist.parallel.accelerator.model_state import portable
from nbdist.parallel.base.consensus import all_or_none, rank
from nbdist.parallel.dp import fsdp
from nbdist.parallel.libraries import quantized
from nbdist.parallel.libraries.peft_layers import inner_model
from nbdist.parallel.live import build, fsdp1_state, registry
from nbdist.parallel.live.prepared import Prepared
from nbdist.parallel.reshard import full_state, own_buffers
from nbdist.parallel.reshard.own_buffers import RANK_0
from nbdist.parallel.reshard.redistribute import Reshard, redistribute
from nbdist.rpc.rank import namespace, progress

# Rank 0 has this much of the model at once, beside its own part; or the largest tensor.
BATCH_BYTES = 64 << 20

T = TypeVar("T")
Gather = Callable[[Collection[str]], Mapping[str, torch.Tensor]]


@dataclass(frozen=True, slots=True)
class ExportContents:
    """Contents of the file to be written; the same on every rank.

    Attributes:
        weights: In the order of the file, each tensor once.
        tied: Further names -> the name in the file.
        left_out: Names in its state that are not tensors.
    """

    model: str
    weights: tuple[SavedTensor, ...]
    tied: Mapping[str, str]
    left_out: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Source:
    """A model whose weights are asked for, as this rank sees it.

    Attributes:
        base: The module whose weights go into the file.
        names: Of what is in its state: name -> the first name of that tensor; None of no tensor.
        values: Gives whole tensors on rank 0, by names in the state. Collective: every rank.
        like: Gives shape and dtype of a whole tensor, by first name.
        made_of: Name in the file -> names in the state, the first of which it is like; of those
            that are not called the same.
        make: Name in the file -> what makes it of these values, where they are several.
        adapter: Of PEFT, to be stored alone, as it is stored by PEFT: without tied names.
    """

    base: torch.nn.Module
    names: Mapping[str, str | None]
    values: Gather
    like: Callable[[str], tuple[tuple[int, ...], torch.dtype]]
    made_of: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    make: Mapping[str, peft_adapters.Make] = field(default_factory=dict)
    adapter: str = ""

    @property
    def title(self) -> str:
        base = _title(inner_model(self.base) if self.adapter else self.base)
        return f"adapter {self.adapter} of {base}" if self.adapter else base

    def configs(self) -> Mapping[str, str]:
        """Files to write beside the weights: name -> text."""
        if self.adapter:
            return peft_adapters.config_texts(self.base, self.adapter)
        return configs_of(self.base)

    def batch(self, names: Sequence[str]) -> Mapping[str, torch.Tensor]:
        """Some tensors of the file, whole on rank 0. Collective: every rank."""
        parts = {name: self.made_of.get(name, (name,)) for name in names}
        values = self.values(dict.fromkeys(itertools.chain.from_iterable(parts.values())))
        made = {name: values[first] for name, (first, *_) in parts.items() if first in values}

        def merge() -> None:
            made.update({name: self.make[name](values) for name in made if name in self.make})

        if self.make:
            all_or_none("Merging the adapter", merge)
        return made


def export_weights(
    name: str, path: str, is_merged: bool = False, adapter: str = ""
) -> ExportedWeights:
    """Write a model's weights into one safetensors file. Collective: every rank.

    Args:
        name: A variable that is a model, or a path from one; empty for the only one.
        path: The same as for `export_model`.
        is_merged: As for `export_model`.
        adapter: As for `export_model`.

    Returns:
        The record of the written file; the same on every rank.

    Raises:
        OptionError: There is no such model, or there are several; lists them.
        CheckpointError, NbdistError: As `export_model`.
    """
    gc.collect()  # models of cells that were run again are not meant
    models: list[torch.nn.Module] = []
    all_or_none("Finding the model", lambda: models.append(_model(name)))
    return export_model(models[0], Path(path), is_merged=is_merged, adapter=adapter)


def export_model(
    model: torch.nn.Module, path: Path, *, is_merged: bool = False, adapter: str = ""
) -> ExportedWeights:
    """Write the weights of a model object. Collective: every rank.

    Rank 0 writes, tensor by tensor, and has no more than a batch of them beside its own part;
    under fsdp1 and DeepSpeed every rank has all of them for a time. The file gets its name once
    it was read back and every value is the model's.

    Args:
        model: A model that `prepare` returned, the user's module, or one that no strategy knows.
        path: Absolute. A file that ends in .safetensors, or the folder of a `model.safetensors`;
            of an `adapter_model.safetensors` for a model with adapters of PEFT.
        is_merged: Write the base model of these, with the adapter merged into its weights.
        adapter: The one that is meant; empty for the active one.

    Raises:
        OptionError: It is only a part of a prepared model, or its adapter cannot be written so.
        CheckpointError: It cannot be written, or what was read back differs; what was at the
            path stays.
        NbdistError: It failed on another rank.
    """
    began_s = time.monotonic()
    sources = [_source(model)]
    what = f"Exporting {sources[0].title}"
    all_or_none(what, lambda: sources.append(_adapted(sources[0], is_merged, adapter)))
    source = sources[-1]
    target = safetensors.file_of(path, ADAPTER_FILE if source.adapter else FILE)
    what = f"Writing {target}"
    per_rank = all_or_none(what, lambda: _contents(source))
    for number, contents in enumerate(per_rank):
        if contents != per_rank[0]:
            odd = set(per_rank[0].weights) ^ set(contents.weights)
            detail = f": {min(weight.name for weight in odd)}" if odd else ""
            raise CheckpointError(
                f"{what}: rank {number}'s model differs from rank 0's{detail}. "
                "Name a variable that is the same model on all ranks."
            )
    contents = per_rank[0]
    notes = own_buffers.notes_on(_own_buffers(model, contents), RANK_0)
    file = WeightsFile(target, contents.weights, contents.tied, source.configs)
    try:
        with progress.during("exporting"):
            _on_rank_0(what, file.begin)
            for batch, values in _passing(source, contents, "writing"):
                _on_rank_0(what, functools.partial(file.write, batch, values))
            _on_rank_0(what, file.end)
            for batch, values in _passing(source, contents, "comparing"):
                _on_rank_0(what, functools.partial(file.compare, batch, values))
            size_bytes, configs = _on_rank_0(what, file.commit)
    finally:
        file.abandon()
    return ExportedWeights(
        str(target), contents.model, len(contents.weights), size_bytes, tuple(contents.tied),
        contents.left_out, configs, notes, time.monotonic() - began_s,
    )  # fmt: skip


def _own_buffers(model: torch.nn.Module, contents: ExportContents) -> dict[str, Prepared]:
    prepared = registry.prepared_of(model)
    return {} if prepared is None else {contents.model: prepared}


def _on_rank_0(what: str, function: Callable[[], T]) -> T:
    """Run a function on rank 0; its result on every rank. Collective: every rank."""
    result = all_or_none(what, lambda: function() if rank() == 0 else None)[0]
    return cast(T, result)


def _passing(
    source: _Source, contents: ExportContents, doing: str
) -> Iterator[tuple[Sequence[SavedTensor], Mapping[str, torch.Tensor]]]:
    """All tensors in the order of the file, a batch at a time, whole on rank 0. Collective."""
    done = 0
    for batch in safetensors.batches(contents.weights, BATCH_BYTES):
        values = source.batch([weight.name for weight in batch])
        progress.tell(doing, done, len(contents.weights), "tensors")
        yield batch, values
        done += len(batch)


def _model(name: str) -> torch.nn.Module:
    """A variable's model; without a name the only one, prepared ones first. This rank alone."""
    if name:
        return namespace.model_of(name)
    modules = namespace.values_of(torch.nn.Module)
    ours = {
        key: model
        for key, model in modules.items()
        if registry.prepared_of(model) is not None or deepspeed_engine.is_engine(model)
    } or modules
    bases = {id(_base(model)): model for model in ours.values()}
    if len(bases) == 1:
        return next(iter(bases.values()))
    prepared = registry.prepared()
    if not bases and len(prepared) == 1:  # no variable of its own: in an object, such as a trainer
        return prepared[0].outer
    choices = ", ".join(f"{key} ({type(model).__name__})" for key, model in ours.items())
    raise OptionError(
        f"Which model? There are {len(bases)}: {choices}. Name one of these variables."
        if bases
        else "No variable on the ranks is a model. Name one, or a path from one: trainer.model."
    )


def _base(model: torch.nn.Module) -> torch.nn.Module:
    """The user's module inside its wrapper."""
    prepared = registry.prepared_of(model)
    if prepared is not None:
        return prepared.base
    is_wrapper = isinstance(model, DistributedDataParallel) or deepspeed_engine.is_engine(model)
    return cast(torch.nn.Module, model.module) if is_wrapper else model


def _source(model: torch.nn.Module) -> _Source:
    """Collective under fsdp1 and DeepSpeed, which gather the whole model on every rank."""
    prepared = registry.prepared_of(model)
    if prepared is None and not deepspeed_engine.is_engine(model):
        return _plain(_base(model))
    state = portable(model)
    names = {name: state.firsts.get(name) for name in state.listed()}
    if prepared is not None and not fsdp1_state.is_flat(prepared):
        dtypes = full_state.dtypes_of(prepared)
        return _Source(
            state.base,
            names,
            functools.partial(_gather, prepared),
            lambda first: (prepared.layouts[first].shape, dtypes[first]),
        )
    whole = state.values()
    return _Source(
        state.base,
        names,
        lambda names: {name: whole[state.firsts[name]] for name in names},
        lambda first: (tuple(whole[first].shape), whole[first].dtype),
    )


def _adapted(source: _Source, is_merged: bool, name: str) -> _Source:
    """The same of an adapter, or of the model with it merged. This rank alone."""
    adapter = peft_adapters.chosen_adapter(source.base, name)
    if not adapter:
        if is_merged:
            raise OptionError(
                f"{source.title} has no adapters of PEFT to merge. Leave --merged out."
            )
        return source
    firsts = {name: first for name, first in source.names.items() if first is not None}
    if not is_merged:
        state = {name: _empty(*source.like(first)) for name, first in firsts.items()}
        stored = peft_adapters.stored_names(source.base, adapter, state)
        return replace(
            source,
            names={name: firsts[full_name] for name, full_name in stored.items()},
            made_of={name: (full_name,) for name, full_name in stored.items()},
            adapter=adapter,
        )
    made_of, make = peft_adapters.merged_names(source.base, adapter, firsts)
    if packed := quantized.quantized_names(source.base):
        raise OptionError(f"{packed[0]} is quantized, so nothing is merged into it.")
    return replace(
        source,
        base=inner_model(source.base),
        names={name: firsts[full_name] for name, (full_name, *_) in made_of.items()},
        made_of=made_of,
        make=make,
    )


def _empty(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _gather(prepared: Prepared, names: Collection[str]) -> Mapping[str, torch.Tensor]:
    """Some tensors of a prepared model, whole on rank 0. Collective: every rank."""
    fsdp.settle(prepared.built.job.root)
    first_of = build.firsts_of(prepared.base)
    local, dtypes = full_state.local_state(prepared), full_state.dtypes_of(prepared)
    firsts = {name: first_of[name] for name in names}
    moves = [
        Reshard(f, dtypes[f], prepared.side(f), prepared.whole(f, frozenset({0})))
        for f in dict.fromkeys(firsts.values())
    ]
    brought = redistribute(moves, local, prepared.built.job.device)
    return {name: brought[first] for name, first in firsts.items() if first in brought}


def _plain(base: torch.nn.Module) -> _Source:
    """A model that no strategy knows: rank 0's, or sharded by the user's own code."""
    tensors = build.tensors_of(base)
    parts = [name for name, tensor in tensors.items() if registry.layout_of(tensor) is not None]
    if parts:
        raise OptionError(
            f"{type(base).__name__} is a part of a prepared model ({parts[0]} belongs to it). "
            "Name the whole model."
        )
    first_of = build.firsts_of(base)

    def values(names: Collection[str]) -> Mapping[str, torch.Tensor]:
        local = {name: tensors[name].detach() for name in names}
        return {n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in local.items()}

    return _Source(
        base,
        {name: first_of.get(name) for name in base.state_dict(keep_vars=True)},
        values,
        lambda first: (tuple(tensors[first].shape), tensors[first].dtype),
    )


def _contents(source: _Source) -> ExportContents:
    """Collect the contents of the file to be written. This rank alone."""
    weights: dict[str, SavedTensor] = {}
    tied = {}
    for name, first in source.names.items():
        if first is None:
            continue
        key = name if source.adapter else first
        if key in weights:
            tied[name] = weights[key].name
            continue
        shape, dtype = source.like(first)
        weights[key] = SavedTensor(name, shape, str(dtype).removeprefix("torch."))
    safetensors.check(weights.values())
    if not weights:
        raise OptionError(f"{source.title} has no parameters and no buffers to save.")
    return ExportContents(
        source.title,
        tuple(safetensors.in_file_order(weights.values())),
        tied,
        tuple(name for name, first in source.names.items() if first is None),
    )


def _title(base: torch.nn.Module) -> str:
    return peft_adapters.user_class(base).__name__
