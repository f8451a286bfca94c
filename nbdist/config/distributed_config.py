"""transformers' DistributedConfig as a file: what can be wrong with it, and a strategy as one.

As `from_pretrained(distributed_config=DistributedConfig(**json.load(...)))` takes it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping

from nbdist.config import keys
from nbdist.config.emit import Refusal, Setting, run_line
from nbdist.config.fsdp import check_product
from nbdist.config.report import CheckContext, Report, check_keys, is_count
from nbdist.config.tree import REMOVE, Document, Fix
from nbdist.core.finding import WARN

# Their product is the number of ranks; the ranks of experts are among them.
_SIZES = ("pp_size", "dp_replicate_size", "fsdp_size", "tp_size")


def matches(document: Document) -> bool:
    """Whether it has a size of transformers' mesh."""
    return bool({*_SIZES, "ep_size"} & {entry.key for entry in document.entries()})


def check(notes: Report, around: CheckContext) -> None:
    """Check the keys, the sizes against the ranks, and which settings exclude each other."""
    document = notes.document
    check_keys(notes, (), keys.DISTRIBUTED, WARN, "transformers silently ignores it")
    if document.value("enable_expert_parallel") is True:
        why = "transformers has replaced it by ep_size"
        fix = Fix(REMOVE, ("enable_expert_parallel",))
        notes.warn(("enable_expert_parallel",), why, "write ep_size, and take it out", fix)
    sizes = {key: document.value(key) or 1 for key in (*_SIZES, "ep_size")}
    if not all(is_count(size) for size in sizes.values()):
        return
    ep = sizes.pop("ep_size")
    if document.value("tp_size") is None and document.value("tp_plan") is not None:
        # transformers gives tp what the other sizes leave.
        others = sizes["pp_size"] * sizes["dp_replicate_size"] * sizes["fsdp_size"]
        sizes["tp_size"] = max(1, (around.ranks or others) // others)
    spare = "fsdp_size" if sizes["pp_size"] == 1 else "tp_size"
    check_product(notes, around, {(key,): size for key, size in sizes.items()}, (spare,))
    _check_together(notes, sizes, ep)


def _check_together(notes: Report, sizes: Mapping[str, int], ep: int) -> None:
    pp, replicate, fsdp, tp = (sizes[key] for key in _SIZES)
    if pp > 1 and replicate * fsdp > 1:
        why = f"transformers cannot combine a pipeline (pp {pp}) with FSDP or replicas"
        notes.bad(("pp_size",), why, "change pp_size to 1, or fsdp_size and dp_replicate_size")
    if ep == 1:
        return
    if ep % tp:
        why = f"it must be a multiple of tp_size, {tp}"
        notes.bad(("ep_size",), why, f"change it to {tp} or a multiple of that")
    elif fsdp * tp % ep:
        why = f"it must divide fsdp_size x tp_size = {fsdp} x {tp} = {fsdp * tp}"
        notes.bad(("ep_size",), why, "change it to a divisor of that")


def text(setting: Setting) -> str | Refusal:
    """The strategy as the text of a DistributedConfig; a Refusal where transformers has none."""
    choice, degrees = setting.choice, setting.choice.degrees
    options = choice.options
    reasons = {
        "transformers has no such strategy": choice.name not in ("fsdp", "tp", "pp"),
        "transformers shares experts among ranks that have the same tokens": degrees.ep > 1,
        "transformers has pipelines, and no FSDP or copies beside them": degrees.pp > 1
        and degrees.dp > 1,
        "transformers keeps gathered parameters by a model's own plan alone": options.shard
        == "grad-op",
        "transformers does not split sequences yet": options.has_sequence_parallel,
        "transformers has FSDP's mixed precision in bf16 alone": options.precision == "fp16",
    }
    why = next((reason for reason, is_so in reasons.items() if is_so), "")
    if why:
        return Refusal(f"{why}; run it with nbdist instead: {run_line(choice)}")
    config = {
        "tp_size": degrees.tp,
        "fsdp_size": degrees.dp_shard,
        "dp_replicate_size": degrees.dp_replicate,
        "pp_size": degrees.pp,
    }
    if options.offload == "cpu":
        config["fsdp_cpu_offload"] = True
    if options.precision == "bf16" and degrees.dp_shard > 1:
        config["fsdp_mixed_precision"] = True
    return json.dumps(config, indent=2) + "\n"
