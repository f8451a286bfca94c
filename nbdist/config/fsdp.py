"""Rules for FSDP, a mesh or Megatron-LM in a configuration of Accelerate."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from nbdist.config.batch import check_ranks
from nbdist.config.report import CheckContext, Report, is_count, is_true
from nbdist.config.tree import REMOVE, SET, Document, Fix

_FSDP = "fsdp_config"
_MESH = "parallelism_config"
_MEGATRON = "megatron_lm_config"
# Of version 1; version 2 has no such thing -> what it does instead.
_OF_VERSION_1 = {
    "fsdp_sharding_strategy": "fsdp_reshard_after_forward: true is FULL_SHARD, false SHARD_GRAD_OP",
    "fsdp_backward_prefetch": "it prefetches by itself",
    "fsdp_use_orig_params": "parameters stay as they are",
    "fsdp_sync_module_states": "Accelerate hands rank 0's values out",
    "fsdp_forward_prefetch": "Accelerate does not have it there yet",
}
_SIZES = ("dp_replicate_size", "dp_shard_size", "tp_size", "cp_size", "sp_size")


def check_fsdp(notes: Report, _around: CheckContext) -> None:
    """FSDP: which keys belong to which version, and what they need."""
    document = notes.document
    if document.value("distributed_type") != "FSDP":
        return
    version = str(_of(document, "fsdp_version") or 1)
    if version == "2":
        _version_2(notes)
    else:
        if not document.has(_FSDP, "fsdp_version") and not document.has(_FSDP, "version"):
            why = "without it this is FSDP1, which torch has replaced"
            what = "write fsdp_version: 2 (with fsdp_reshard_after_forward), or 1 to keep it"
            notes.warn((_FSDP, "fsdp_version"), why, what)
        if isinstance(_of(document, "fsdp_reshard_after_forward"), bool):
            why = "FSDP1 goes by fsdp_sharding_strategy (FULL_SHARD where none is named)"
            path = _path(document, "fsdp_reshard_after_forward")
            notes.warn(path, why, "write fsdp_version: 2, or take it out", Fix(REMOVE, path))
    _wrapping(notes)
    if is_true(_of(document, "fsdp_activation_checkpointing_offload")):
        _needs_checkpointing(notes, version)
    loads = _of(document, "fsdp_cpu_ram_efficient_loading")
    syncs = _of(document, "fsdp_sync_module_states")
    if (loads is None or is_true(loads)) and str(syncs).lower() == "false":
        path = _path(document, "fsdp_sync_module_states")
        why = "with fsdp_cpu_ram_efficient_loading (true where none is named) it has to be true"
        fix = Fix(SET, (_FSDP, "fsdp_cpu_ram_efficient_loading"), False)
        notes.bad(path, why, "change it to true, or fsdp_cpu_ram_efficient_loading to false", fix)


def _version_2(notes: Report) -> None:
    document = notes.document
    for key, instead in _OF_VERSION_1.items():
        path = _path(document, key)
        if document.has(*path):
            why = f"FSDP2 has no {key}: {instead}"
            notes.warn(path, why, "take it out", Fix(REMOVE, path))
    reshard = _of(document, "fsdp_reshard_after_forward")
    if reshard is not None and str(reshard).lower() not in ("true", "false"):
        meant = "SHARD_GRAD_OP" not in str(reshard).upper()
        path = _path(document, "fsdp_reshard_after_forward")
        why = f"FSDP2 wants true or false, and not {reshard}"
        notes.bad(path, why, f"write {str(meant).lower()}", Fix(SET, path, meant))
    if _of(document, "fsdp_state_dict_type") == "LOCAL_STATE_DICT":
        path = _path(document, "fsdp_state_dict_type")
        why = "FSDP2 saves SHARDED_STATE_DICT or FULL_STATE_DICT"
        notes.bad(path, why, "write SHARDED_STATE_DICT", Fix(SET, path, "SHARDED_STATE_DICT"))


def _wrapping(notes: Report) -> None:
    document = notes.document
    policy = _of(document, "fsdp_auto_wrap_policy")
    blocks = "fsdp_transformer_layer_cls_to_wrap"
    if policy == "TRANSFORMER_BASED_WRAP" and not _of(document, blocks):
        why = "without it only a model of transformers says which of its classes is a block"
        what = "write the class of your model's blocks, such as LlamaDecoderLayer"
        notes.warn((_FSDP, blocks), why, what)
    if policy in (None, "NO_WRAP"):
        why = "without blocks of its own the whole model is gathered at once"
        what = f"write TRANSFORMER_BASED_WRAP with {blocks}"
        notes.warn((_FSDP, "fsdp_auto_wrap_policy"), why, what)
    path = _path(document, "fsdp_min_num_params")
    if document.has(*path) and policy != "SIZE_BASED_WRAP":
        why = "it only counts with SIZE_BASED_WRAP"
        notes.warn(path, why, "take it out", Fix(REMOVE, path))


def _needs_checkpointing(notes: Report, version: str) -> None:
    path = _path(notes.document, "fsdp_activation_checkpointing_offload")
    if not is_true(_of(notes.document, "fsdp_activation_checkpointing")):
        fix = Fix(SET, (_FSDP, "fsdp_activation_checkpointing"), True)
        notes.bad(path, "it needs fsdp_activation_checkpointing: true", "write that, too", fix)
    if version != "2":
        fix = Fix(SET, path, False)
        notes.bad(path, "FSDP1 does not have it", "write fsdp_version: 2, or false here", fix)


def check_mesh(notes: Report, around: CheckContext) -> None:
    """parallelism_config: its degrees against the ranks, and what goes together."""
    document = notes.document
    names = {entry.key for entry in document.entries(_MESH)}
    if not names or names & set(_SIZES):  # a name without its beginning is told; then it counts
        return
    sizes = {key: document.value(_MESH, f"{_MESH}_{key}") or 1 for key in _SIZES}
    if not all(is_count(size) for size in sizes.values()):
        return
    by_path: dict[tuple[str, ...], int] = {
        (_MESH, f"{_MESH}_{key}"): size for key, size in sizes.items()
    }
    check_product(notes, around, by_path, (_MESH, f"{_MESH}_dp_shard_size"))
    replicate, shard, tp, cp, sp = sizes.values()
    kind = document.value("distributed_type")
    is_2 = kind == "FSDP" and str(_of(document, "fsdp_version") or 1) == "2"
    if kind == "FSDP" and not is_2:
        why = "Accelerate has meshes only with FSDP2, and this is FSDP1"
        fix = Fix(SET, (_FSDP, "fsdp_version"), 2)
        notes.bad((_MESH,), why, "write fsdp_version: 2", fix)
    if (tp > 1 or cp > 1) and replicate > 1 and shard == 1:
        notes.bad(
            (_MESH, f"{_MESH}_dp_replicate_size"),
            f"Accelerate cannot combine replicas (dp_replicate {replicate}, dp_shard 1) with tp or "
            "cp",
            f"swap them: dp_replicate 1, dp_shard {replicate}",
            Fix(SET, (_MESH, f"{_MESH}_dp_shard_size"), replicate),
            Fix(SET, (_MESH, f"{_MESH}_dp_replicate_size"), 1),
        )
    elif is_2 and shard == 1 and cp == 1:
        why = "FSDP has nothing to split over: dp_shard and cp are 1"
        what = "change dp_shard_size to 2 or more, or distributed_type to MULTI_GPU"
        notes.bad((_MESH,), why, what)
    if cp > 1 and sp > 1:
        notes.bad((_MESH,), "cp and sp exclude each other", "change one of them to 1")


def check_product(
    notes: Report,
    around: CheckContext,
    sizes: Mapping[tuple[str, ...], int],
    spare: tuple[str, ...],
) -> None:
    """A mesh's sizes, by path, against the ranks; the size at the spare path can be changed."""
    ranks, product = around.ranks, math.prod(sizes.values())
    names = {path: path[-1].removeprefix(f"{_MESH}_") for path in sizes}
    words = [
        f"{names[path].removesuffix('_size')} {size}" for path, size in sizes.items() if size > 1
    ]
    axes_text = " x ".join(words) or "1"
    line = notes.document.line(*spare[:-1])
    if ranks is None:
        notes.good("ranks", f"not known; the mesh wants {product} ({axes_text})", line)
        return
    if ranks == product:
        notes.good("ranks", f"{ranks}, {around.source}: {axes_text}", line)
        return
    others = product // sizes[spare]
    why = f"{axes_text} are {product} ranks, and there are {ranks} ({around.source})"
    if ranks % others == 0:
        new = ranks // others
        what = f"change {names[spare]} to {new}, or the ranks to {product}"
        notes.bad(spare, why, what, Fix(SET, spare, new))
        return
    whole = spare[:-1] or spare
    notes.bad(whole, why, f"change the ranks to {product}, or a degree to a divisor of {ranks}")


def check_megatron(notes: Report, around: CheckContext) -> None:
    """Megatron-LM: TP x PP (x CP) against the ranks, and what a pipeline needs."""
    document = notes.document
    if document.value("distributed_type") != "MEGATRON_LM":
        return
    names = {"tp": "tp_degree", "pp": "pp_degree", "cp": "context_parallel_size"}
    degrees = {
        axis: document.value(_MEGATRON, f"megatron_lm_{name}") or 1 for axis, name in names.items()
    }
    if not all(is_count(degree) for degree in degrees.values()):
        return
    product = math.prod(degrees.values())
    axes_text = " x ".join(f"{name} {size}" for name, size in degrees.items() if size > 1) or "tp 1"
    if around.ranks is None:
        check_ranks(notes, around)
    elif around.ranks % product:
        near = max(around.ranks // product, 1) * product
        why = f"{axes_text} = {product} does not divide {around.ranks} ranks ({around.source})"
        is_own = document.value("num_processes") == around.ranks
        fixes = (Fix(SET, ("num_processes",), near),) if is_own else ()
        notes.bad((_MEGATRON,), why, f"change num_processes to {near}, or a degree", *fixes)
    else:
        sentence = f"{around.ranks}, {around.source}: {axes_text} x dp {around.ranks // product}"
        notes.good("ranks", sentence, document.line(_MEGATRON))
    if degrees["pp"] > 1 and not document.has(_MEGATRON, "megatron_lm_num_micro_batches"):
        micro = (_MEGATRON, "megatron_lm_num_micro_batches")
        why = f"a pipeline of {degrees['pp']} stages idles without micro-batches that fill it"
        notes.warn(micro, why, f"write {2 * degrees['pp']}", Fix(SET, micro, 2 * degrees["pp"]))
    path = (_MEGATRON, "megatron_lm_sequence_parallelism")
    if is_true(document.value(*path)) and degrees["tp"] == 1:
        why = "it splits across tp, and tp is 1"
        notes.bad(path, why, "change it to false", Fix(SET, path, False))


def _path(document: Document, key: str) -> tuple[str, str]:
    """A key of fsdp_config as it is written there: Accelerate takes it without fsdp_ as well."""
    short = key.removeprefix("fsdp_")
    return (_FSDP, short) if document.has(_FSDP, short) else (_FSDP, key)


def _of(document: Document, key: str) -> Any:
    return document.value(*_path(document, key))
