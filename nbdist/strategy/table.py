"""Every strategy as a row of a table: what is split over which axis, its needs, when to use it.

Nothing here runs anything. `strategy.choice` reads the rows to make a choice, `strategy.footprint`
to count bytes, `switch.view` to show them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

# What one rank does to a model, in this order; nbdist/parallel/base/transform.py has a function
# for each.
STEPS = (
    "pp", "tp", "ep", "options", "fsdp", "fsdp1", "precision", "ddp", "zero1", "cp", "pipeline",
    "deepspeed",
)  # fmt: skip

# What a rank holds of a model between two steps of the optimizer.
HELD = ("parameters", "gradients", "optimizer")


@dataclass(frozen=True, slots=True)
class SentBytes:
    """Bytes that every rank sends along axes of the mesh.

    Attributes:
        axes: The ranks that differ in these alone take part.
        call: The collective, a key of strategy.footprint.CALLS.
        what: parameters or gradients (of the model), activations or keys-values (of a block),
            tokens (the activations of one layer, once for each expert of a token), boundary
            (activations between stages), matrices (of an optimizer that takes them whole).
        times: How often.
    """

    axes: tuple[str, ...]
    call: str
    what: str
    times: int = 1


@dataclass(frozen=True, slots=True)
class StrategyRow:
    """A strategy's axes, needs, communication and description.

    Attributes:
        axis: What the name alone spans: the axis on which all ranks lie; "" for `single`.
        takes: Degrees that can be typed beside it, besides its own.
        splits: Axis -> what is split over it: HELD's words, experts, batch, sequence.
        steps: Its own steps, of STEPS.
        common: Steps that its options may add.
        sends: In a step of the optimizer.
        gathered: What a rank has whole for a time in a step, besides what it holds; may be "".
        needs: What model and machine have to bring.
        fixed: Why a live model can be switched neither to it nor from it; "" where it can.
        sets: Options that the name decides.
    """

    name: str
    title: str
    axis: str
    needs: str
    when: str
    source: str
    takes: tuple[str, ...] = ()
    splits: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    steps: tuple[str, ...] = ()
    sends: tuple[SentBytes, ...] = ()
    gathered: str = ""
    common: tuple[str, ...] = ("options", "precision")
    fixed: str = ""
    sets: Mapping[str, str] = field(default_factory=dict)


_BLOCKS = "a list of blocks (found automatically, or --blocks)"
# With --shard grad-op parameters are gathered once; strategy.footprint knows it.
_SHARDED = (
    SentBytes(("dp_shard",), "all-gather", "parameters", 2),
    SentBytes(("dp_shard",), "reduce-scatter", "gradients"),
    SentBytes(("dp_replicate",), "all-reduce", "gradients"),
)
_OVER_CP = SentBytes(("dp_replicate", "cp"), "all-reduce", "gradients")

_ROWS = (
    StrategyRow(
        name="single",
        title="no parallelism: every rank trains the same by itself",
        axis="",
        needs="nothing",
        when="the model fits and one device is fast enough; the reference for all others",
        source="https://docs.pytorch.org/tutorials/beginner/basics/optimization_tutorial.html",
    ),
    StrategyRow(
        name="ddp",
        title="distributed data parallel: a copy of the model on every rank",
        axis="dp_replicate",
        splits={"dp_replicate": ("batch",)},
        steps=("ddp",),
        sends=(SentBytes(("dp_replicate",), "all-reduce", "gradients"),),
        needs="a batch that can be divided by the ranks",
        when="the model with its optimizer fits on one device",
        source="https://arxiv.org/abs/2006.15704",
    ),
    StrategyRow(
        name="fsdp",
        title="fully sharded data parallel (FSDP2, torch's fully_shard)",
        axis="dp_shard",
        takes=("tp", "pp", "ep"),
        splits={"dp_shard": (*HELD, "batch"), "dp_replicate": ("batch",)},
        steps=("fsdp",),
        sends=_SHARDED,
        gathered="the parameters of one block; with --shard grad-op all parameters, from the "
        "forward to the end of the backward",
        needs=_BLOCKS,
        when="the model with its optimizer does not fit on one device; the first thing to try",
        source="https://arxiv.org/abs/2304.11277",
    ),
    StrategyRow(
        name="fsdp1",
        title="the older FSDP, with flat parameters",
        axis="dp_shard",
        splits={"dp_shard": (*HELD, "batch"), "dp_replicate": ("batch",)},
        steps=("fsdp1",),
        sends=_SHARDED,
        gathered="the parameters of one block; with --shard grad-op all parameters",
        needs=_BLOCKS,
        when="to see what older code does; fsdp replaces it",
        source="https://docs.pytorch.org/docs/stable/fsdp.html",
        fixed="FSDP1 copies all parameters of a block into one flat one and keeps none of them",
    ),
    StrategyRow(
        name="zero1",
        title="ZeRO stage 1: ddp, with the optimizer's state split",
        axis="dp_replicate",
        splits={"dp_replicate": ("optimizer", "batch")},
        steps=("ddp", "zero1"),
        # DDP's all-reduce stays, so this is more than the 2 (n - 1) / n of the paper.
        sends=(
            SentBytes(("dp_replicate",), "all-reduce", "gradients"),
            SentBytes(("dp_replicate",), "broadcast", "parameters"),
        ),
        needs="an optimizer that treats each parameter by itself (AdamW, SGD)",
        when="the model fits, the optimizer's state does not",
        source="https://arxiv.org/abs/1910.02054",
    ),
    StrategyRow(
        name="deepspeed",
        title="DeepSpeed's ZeRO: stage 1, 2 or 3, with offload to CPU or NVMe",
        axis="dp_replicate",
        # By the stage; see strategy.footprint.
        splits={"dp_replicate": (*HELD, "batch")},
        steps=("deepspeed",),
        sends=(
            SentBytes(("dp_replicate",), "reduce-scatter", "gradients"),
            SentBytes(("dp_replicate",), "all-gather", "parameters", 2),
        ),
        gathered="stage 3: the parameters of one module",
        needs="the extra `deepspeed` and a C++ compiler; libaio for NVMe",
        when="parameters or the optimizer's state have to go to CPU memory or disk",
        source="https://arxiv.org/abs/2104.07857",
        common=("options",),
        fixed="DeepSpeed takes model and optimizer over into buffers of its own",
    ),
    StrategyRow(
        name="tp",
        title="tensor parallel: each layer is split",
        axis="tp",
        takes=("dp", "pp", "ep"),
        splits={"tp": HELD},
        steps=("tp",),
        sends=(SentBytes(("tp",), "all-reduce", "activations", 4),),
        needs="heads that can be divided by the degree; a plan for a model that nbdist does not "
        "know",
        when="one layer is too large or too slow for a device, and the link is fast (one host)",
        source="https://arxiv.org/abs/1909.08053",
    ),
    StrategyRow(
        name="ep",
        title="expert parallel: each rank has some experts of each layer, and gets their tokens",
        axis="dp_replicate",
        takes=("ep",),
        splits={"dp_replicate": ("batch",), "ep": ("experts",)},
        steps=("ep",),
        sends=(SentBytes(("ep",), "all-to-all", "tokens", 4),),
        needs="a mixture of experts whose number can be divided by the degree",
        when="most parameters are experts, and each token needs few of them",
        source="https://arxiv.org/abs/2006.16668",
    ),
    StrategyRow(
        name="pp",
        title="pipeline parallel: each stage has some of the blocks",
        axis="pp",
        takes=("dp", "tp"),
        splits={"pp": HELD},
        steps=("pp", "pipeline"),
        sends=(SentBytes(("pp",), "send", "boundary", 2),),
        needs="a list of blocks, as many as stages or more; a batch that can be divided by the "
        "micro-batches",
        when="the model is deep and the link is slow (between hosts)",
        source="https://arxiv.org/abs/2104.04473",
    ),
    StrategyRow(
        name="cp",
        title="context parallel: each rank has a part of the sequence (ring attention)",
        axis="cp",
        takes=("dp",),
        splits={"cp": ("sequence",), "dp_replicate": ("batch",)},
        steps=("ddp", "cp"),
        sends=(SentBytes(("cp",), "ring", "keys-values", 3), _OVER_CP),
        needs="attention by scaled_dot_product_attention, without masks and dropout",
        when="activations of one long sequence do not fit",
        source="https://arxiv.org/abs/2310.01889",
        sets={"context": "ring"},
    ),
    StrategyRow(
        name="ulysses",
        title="context parallel by all-to-all: sequence outside, heads inside attention",
        axis="cp",
        takes=("dp",),
        splits={"cp": ("sequence",), "dp_replicate": ("batch",)},
        steps=("ddp", "cp"),
        sends=(SentBytes(("cp",), "all-to-all", "activations", 8), _OVER_CP),
        needs="attention by scaled_dot_product_attention; heads that can be divided by the degree",
        when="as cp, with enough heads and a fast link",
        source="https://arxiv.org/abs/2309.14509",
        sets={"context": "ulysses"},
    ),
)
ROWS: Mapping[str, StrategyRow] = {row.name: row for row in _ROWS}

# Names from elsewhere -> what to type here.
OTHER_NAMES: Mapping[str, str] = {
    "none": "single",
    "dp": "ddp",
    "dataparallel": "ddp",
    "fsdp2": "fsdp",
    "hsdp": "fsdp --shard hybrid",
    "zero": "zero1, deepspeed --stage 2 or fsdp",
    "zero2": "deepspeed --stage 2, or fsdp --shard grad-op",
    "zero3": "deepspeed --stage 3, or fsdp",
    "sp": "tp --sequence-parallel, or cp",
    "moe": "ep, or fsdp --ep 2",
    "expert": "ep, or fsdp --ep 2",
    "ring": "cp",
    "2d": "fsdp --tp 2",
    "3d": "pp --dp 2 --tp 2",
}
