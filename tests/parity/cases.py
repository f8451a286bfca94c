"""Every row and option of the strategies, as typed, by number of ranks."""

from collections.abc import Sequence

from nbdist.strategy.options import OPTIONS
from nbdist.strategy.table import ROWS
from tests.parity.case import Case

# `--compile` waits for a C++ compiler, and has a test of its own in tests/parallel/test_options.py.
LEFT_OUT = frozenset({"is_compiled", "blocks", "stage"})
# A package of its own, which need not be there; the process is its own from then on.
DEEPSPEED = tuple(
    Case(f"deepspeed --stage {stage}")
    for stage in (
        "1",
        "1 --sdpa math",
        "2 --accumulate 2",
        "2 --checkpoint full",
        "3",
        "3 --checkpoint selective",
        "3 --offload cpu",
    )
)
# A row that needs experts has cases of its own.
NAMES = tuple(name for name in ROWS if name not in {"deepspeed", "ep"})

_PRECISIONS = tuple(Case(f"{name} --{half}") for name in NAMES for half in ("bf16", "fp16"))
_KERNELS = ("--checkpoint 2 --sdpa math", "--fused --sdpa flash")
_COMMON = tuple(
    Case(f"{name} {option}")
    for name in NAMES
    for option in (
        "--checkpoint full",
        "--checkpoint selective --accumulate 2",
        *(("--checkpoint 2", "--fused") if name in OPTIONS["sdpa"].never else _KERNELS),
    )
)
_OWN = tuple(
    Case(typed)
    for typed in (
        "ddp --hook fp16",
        "ddp --hook bf16",
        "ddp --hook powersgd",
        "ddp --bucket 0.01",
        "ddp --static-graph",
        "ddp --find-unused --accumulate 2",
        "fsdp --shard grad-op",
        "fsdp --shard grad-op --accumulate 2",
        "fsdp --offload cpu",
        "fsdp --offload cpu --bf16 --checkpoint full",
        "fsdp1 --shard grad-op",
        "tp --sequence-parallel",
        "tp --sequence-parallel --bf16",
        "tp --sequence-parallel --checkpoint full",
        "pp --schedule gpipe",
        "pp --schedule gpipe --microbatches 4 --accumulate 2",
        "pp --schedule 1f1b --microbatches 8",
        "pp --schedule interleaved",
        "pp --schedule interleaved --fp16",
        "pp --schedule zb",
        "pp --schedule zb --bf16 --accumulate 2",
    )
)
# Meshes of more than one axis, on four ranks and on eight.
_FOUR = (
    "fsdp --shard hybrid",
    "fsdp --tp 2",
    "pp --dp 2",
    "pp --tp 2",
    "cp --dp 2",
    "ulysses --dp 2",
)
_EIGHT = (
    "fsdp --shard hybrid --replicas 4",
    "fsdp --tp 2 --shard hybrid",
    "fsdp --tp 4",
    "pp --dp 4",
    "pp --dp 2 --tp 2",
    "pp --dp 2 --tp 2 --schedule gpipe --accumulate 2",
    "pp --tp 2 --schedule interleaved --accumulate 2",
    "pp --dp 2 --tp 2 --bf16 --checkpoint full",
    "cp --dp 2",
    "ulysses --dp 2",
)
_MORE_AT_FOUR = tuple(
    Case(typed)
    for typed in (
        *(
            f"{mesh}{option}"
            for mesh in _FOUR
            for option in ("", " --bf16", " --accumulate 2", " --checkpoint full")
        ),
        "fsdp1 --shard hybrid",
        "fsdp --tp 2 --shard grad-op",
        "fsdp --tp 2 --sequence-parallel --fp16",
        "fsdp --tp 2 --offload cpu",
        "pp --dp 2 --schedule gpipe",
        "pp --tp 2 --schedule zb --fp16",
        "pp --tp 2 --sequence-parallel",
        "pp --schedule interleaved",
        "pp --schedule zb",
    )
)
# Models as people have them: Llama's, alone and with adapters that are trained in its place; and
# GPT-2, whose head is tied to its embedding.
_NAMES = ("llama", "gpt2", "lora")
_MODELS = tuple(
    Case(typed, model)
    for model in _NAMES
    for typed in (
        *(name for name in NAMES if name != "single"),
        "fsdp --shard grad-op --checkpoint full",
        "fsdp --bf16",
        "tp --sequence-parallel",
        "pp --schedule zb --accumulate 2",
    )
)
_MODELS_AT_FOUR = tuple(
    Case(typed, model) for model in _NAMES for typed in (*_FOUR, "tp", "pp", "cp")
)

# A mixture of experts of one's own, and one of transformers.
_EXPERTS = tuple(
    Case(typed, model)
    for model in ("experts", "mixtral")
    for typed in (
        "ep",
        "ep --accumulate 2 --checkpoint full",
        "ep --bf16",
        "fsdp --ep 2",
        "fsdp --ep 2 --shard grad-op --accumulate 2",
        *("ddp", "zero1", "fsdp", "fsdp1", "tp", "pp", "cp"),
    )
    if (typed, model) != ("tp", "experts")  # tp knows none of its names
)

# Muon, which looks at whole matrices, on those of experts too.
_MUON = tuple(
    Case(typed, f"{model} by Muon")
    for model, names in {
        "plain": ("ddp", "zero1", "fsdp", "fsdp --shard grad-op --accumulate 2", "tp", "pp", "cp"),
        "experts": ("ep", "ep --accumulate 2", "fsdp --ep 2", "fsdp", "pp"),
    }.items()
    for typed in names
)
_MUON_AT_FOUR = tuple(
    Case(typed, f"{model} by Muon")
    for model, names in {
        "plain": ("fsdp --tp 2", "fsdp --shard hybrid", "pp --dp 2"),
        "experts": ("ep", "ep --ep 2", "fsdp --ep 2"),
    }.items()
    for typed in names
)

_ACCUMULATED = ("ddp", "fsdp", "pp")
SHORT = {
    2: tuple(Case(f"{name} --accumulate 2" if name in _ACCUMULATED else name) for name in NAMES),
    4: tuple(map(Case, ("fsdp --shard hybrid", "pp --dp 2", "pp --tp 2", "cp --dp 2"))),
}
"""Each strategy once, and products: what `make test` compares, by number of ranks."""

LONG = {
    (2, "rows"): tuple(
        Case(f"{name}{option}") for name in NAMES for option in ("", " --accumulate 2")
    ),
    (2, "precisions"): _PRECISIONS,
    (2, "options"): _COMMON,
    (2, "own options"): _OWN,
    (2, "models"): _MODELS,
    (2, "experts"): _EXPERTS,
    (2, "Muon"): _MUON,
    (4, "Muon"): _MUON_AT_FOUR,
    (4, "experts"): (
        *_EXPERTS,
        Case("ep --ep 2", "experts"),
        Case("fsdp --ep 4", "mixtral"),
        Case("fsdp --tp 2 --ep 2", "mixtral"),
    ),
    (4, "rows"): tuple(map(Case, NAMES)),
    (4, "products"): _MORE_AT_FOUR,
    (4, "models"): _MODELS_AT_FOUR,
    (8, "rows"): tuple(map(Case, (*NAMES, *_EIGHT))),
}
"""What `make parity` compares, by number of ranks and a word for the test's name."""

_ONE_AXIS = (
    "ddp",
    "fsdp",
    "fsdp --shard grad-op",
    "zero1",
    "tp",
    "pp",
    "cp",
    "ulysses",
    "single",
)
SWITCHED = {
    2: _ONE_AXIS,
    4: (*_ONE_AXIS, "fsdp --shard hybrid", "fsdp --tp 2", "pp --dp 2"),
}
"""Strategies between which a live model is switched, each to each, by number of ranks."""

WALKS = ((2, "plain"), (4, "plain"), (2, "lora"))
"""Number of ranks and model of each such walk."""

SAVED = {
    1: ("ddp", "fsdp"),
    2: ("ddp", "fsdp", "tp", "pp"),
    4: ("ddp", "fsdp", "tp", "pp", "fsdp --tp 2", "pp --dp 2"),
}
"""Strategies under which a checkpoint is saved, and loaded from each, by number of ranks."""


def circuit(names: Sequence[str]) -> list[str]:
    """A walk that takes every ordered pair of names exactly once, back to the first."""
    left = {name: [other for other in names if other != name] for name in names}
    path, stack = [], [names[0]]
    while stack:
        if left[stack[-1]]:
            stack.append(left[stack[-1]].pop())
        else:
            path.append(stack.pop())
    return path[::-1]
