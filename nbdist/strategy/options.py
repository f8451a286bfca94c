"""Every option and degree of a strategy: how it is typed, what it may be, where it belongs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from nbdist.errors import OptionError, did_you_mean, no_such
from nbdist.strategy.table import ROWS


@dataclass(frozen=True, slots=True)
class OptionRow:
    """One option of a strategy.

    Attributes:
        name: Of its field in strategy.choice.Options.
        flag: As typed; its word, with _ for -, is its name from Python.
        kind: choice, count (1 or more), number (above 0), switch, text or blocks (see checkpoint).
        help: One line.
        steps: It belongs where one of these steps runs; empty for everywhere.
        never: Names of strategies that it does not go with all the same.
        why: The reason why it belongs nowhere else.
        choices: Of a choice; of blocks what is mostly typed.
        default: What counts without it, in words; empty where nothing happens.
        is_whole: A choice of whole numbers.
        title: In words, where the flag's own are none.
    """

    name: str
    flag: str
    kind: str
    help: str
    steps: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    why: str = ""
    choices: tuple[str, ...] = ()
    default: str = ""
    is_whole: bool = False
    title: str = ""

    @property
    def label(self) -> str:
        """The option in words, as a form has it."""
        return self.title or self.word.replace("_", " ")

    @property
    def word(self) -> str:
        """The option's name as a Python keyword."""
        return self.flag.removeprefix("--").replace("-", "_")


_DDP_ONLY = "it is an option of torch's DistributedDataParallel"

_OPTIONS = (
    OptionRow(
        "precision", "--precision", "choice", "what forward and backward compute in",
        steps=("precision", "deepspeed"), choices=("fp32", "bf16", "fp16"), default="fp32",
    ),
    OptionRow(
        "checkpoint", "--checkpoint", "blocks",
        "compute activations again in backward: full, selective, or every K-th block",
        steps=("options",), choices=("full", "selective", "2", "4"), title="recompute activations",
    ),
    OptionRow(
        "accumulate", "--accumulate", "count", "backwards per step of the optimizer", default="1",
        title="accumulate gradients",
    ),
    OptionRow(
        "is_fused", "--fused", "switch", "the optimizer's fused implementation",
        title="fused optimizer",
    ),
    OptionRow("is_compiled", "--compile", "switch", "torch.compile, block by block",
              steps=("options",), title="torch.compile"),
    OptionRow(
        "sdpa", "--sdpa", "choice", "backend of scaled_dot_product_attention",
        steps=("options",), never=("cp", "ulysses"),
        why="it computes attention over all ranks itself",
        choices=("flash", "efficient", "math", "cudnn"), default="torch's",
        title="attention backend",
    ),
    OptionRow(
        "blocks", "--blocks", "text", "name of the model's list of blocks, such as model.layers",
        default="automatic",
        title="list of blocks",
    ),
    OptionRow(
        "bucket_mb", "--bucket", "number", "MiB of gradients that are reduced at once",
        steps=("ddp",), why="only DDP has buckets", default="25",
        title="bucket (MiB)",
    ),
    OptionRow(
        "has_static_graph", "--static-graph", "switch", "the same parameters in every step",
        steps=("ddp",), why=_DDP_ONLY,
    ),
    OptionRow(
        "finds_unused", "--find-unused", "switch", "look for parameters without gradient each step",
        steps=("ddp",), why=_DDP_ONLY,
        title="find unused parameters",
    ),
    OptionRow(
        "hook", "--hook", "choice", "compress gradients on the wire",
        steps=("ddp",), why="it hooks into DDP's all-reduce", choices=("fp16", "bf16", "powersgd"),
        title="compress gradients",
    ),
    OptionRow(
        "shard", "--shard", "choice",
        "what is split: all (full), all outside of a step (grad-op), within copies (hybrid)",
        steps=("fsdp", "fsdp1"), why="only fsdp splits what data-parallel ranks hold alike",
        choices=("full", "grad-op", "hybrid"), default="full",
        title="what is sharded",
    ),
    OptionRow(
        "offload", "--offload", "choice", "keep parameters and optimizer in CPU memory, or on NVMe",
        steps=("fsdp", "deepspeed"), why="only sharded parameters are brought in block by block",
        choices=("cpu", "nvme"),
        title="offload to",
    ),
    OptionRow(
        "has_sequence_parallel", "--sequence-parallel", "switch",
        "norms and dropout are split too, along the sequence",
        steps=("tp",), why="it splits what tensor parallelism leaves whole; cp is the strategy "
        "for long sequences",
    ),
    OptionRow(
        "schedule", "--schedule", "choice", "order of forwards and backwards",
        steps=("pp",), why="only a pipeline has a schedule",
        choices=("gpipe", "1f1b", "interleaved", "zb"), default="1f1b",
    ),
    OptionRow(
        "microbatches", "--microbatches", "count", "pieces of a batch",
        steps=("pp",), why="only a pipeline cuts a batch into pieces; the others --accumulate",
        title="micro-batches",
    ),
    OptionRow(
        "stage", "--stage", "choice", "what is split: 1 optimizer, 2 gradients too, 3 all",
        steps=("deepspeed",), why="it is DeepSpeed's; zero1 is stage 1, fsdp stage 3",
        choices=("1", "2", "3"), default="2", is_whole=True,
        title="ZeRO stage",
    ),
)  # fmt: skip
OPTIONS: Mapping[str, OptionRow] = {row.name: row for row in _OPTIONS}

# Typed word -> (option, value), for what is too long to type.
SHORTHANDS: Mapping[str, tuple[str, object]] = {
    "bf16": ("precision", "bf16"),
    "fp16": ("precision", "fp16"),
}

# Typed word -> what it says.
DEGREES: Mapping[str, str] = {
    "dp": "ranks, or groups of ranks, that see different data",
    "tp": "ranks that share each layer",
    "pp": "stages",
    "cp": "ranks that share each sequence",
    "ep": "ranks, of those that see different data, that share the experts",
    "replicas": "copies of the model under --shard hybrid",
}

# Typed word -> the same as a form has it.
DEGREE_LABELS: Mapping[str, str] = {
    "dp": "data parallel",
    "tp": "tensor parallel",
    "pp": "pipeline stages",
    "cp": "context parallel",
    "ep": "expert parallel",
    "replicas": "replicas",
}

_BY_WORD: Mapping[str, OptionRow] = {**{row.word: row for row in _OPTIONS}, **OPTIONS}


def read(settings: Mapping[str, object]) -> tuple[dict[str, int], dict[str, object]]:
    """Read typed settings by name: a word of DEGREES, SHORTHANDS, or an option's word or field.

    None and False stand for what was not typed. Returns degrees by word, in the order of DEGREES,
    and values by field of strategy.choice.Options.

    Raises:
        OptionError: If there is no such option, or a value is none of its choices.
    """
    degrees: dict[str, int] = {}
    options: dict[str, object] = {}
    for word, value in settings.items():
        if value is None or value is False:
            continue
        if word in DEGREES:
            degrees[word] = _count(f"--{word}", value, DEGREES[word])
            continue
        name, meant = SHORTHANDS.get(word, (word, value))
        row = _BY_WORD.get(name)
        if row is None:
            words = [*DEGREES, *SHORTHANDS, *(option.word for option in _OPTIONS)]
            raise OptionError(
                f"There is no option {name!r} of a strategy.{did_you_mean(name, words)} "
                f"Choose from: {', '.join(words)}."
            )
        parsed = _READ[row.kind](row, meant)
        if options.setdefault(row.name, parsed) != parsed:
            raise OptionError(f"{row.name} is typed twice: {options[row.name]} and {parsed}.")
    return {word: degrees[word] for word in DEGREES if word in degrees}, options


def _text(row: OptionRow, value: object) -> str:
    if not isinstance(value, str) or not value:
        raise OptionError(f"{row.flag} takes a name, not {value!r}.")
    return value


def _choice(row: OptionRow, value: object) -> object:
    if str(value) not in row.choices:
        raise no_such(row.flag, value, row.choices)
    return int(str(value)) if row.is_whole else str(value)


def _count(flag: str, value: object, what: str) -> int:
    text = str(value)
    if isinstance(value, bool) or not (text.isascii() and text.isdigit()) or int(text) < 1:
        raise OptionError(f"{flag} {value} is not a valid number of {what}. Use 1 or more.")
    return int(text)


def _number(row: OptionRow, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e9:
        raise OptionError(
            f"{row.flag} {value} is not a valid number of {row.help}. Use more than 0."
        )
    return float(value)


def _switch(row: OptionRow, value: object) -> bool:
    if value is not True:
        raise OptionError(f"{row.word} is on or off: True or False, not {value!r}.")
    return True


def _blocks(row: OptionRow, value: object) -> str:
    text = "full" if value is True else str(value)
    if text in row.choices or (text.isascii() and text.isdigit() and int(text) > 0):
        return text
    raise no_such(row.flag, value, row.choices, ", or another K of every K-th block")


_READ: Mapping[str, Callable[[OptionRow, object], object]] = {
    "choice": _choice,
    "count": lambda row, value: _count(row.flag, value, row.help),
    "number": _number,
    "switch": _switch,
    "blocks": _blocks,
    "text": _text,
}


def takers(row: OptionRow) -> list[str]:
    """The names of the strategies that take an option."""
    return [
        strategy.name
        for strategy in ROWS.values()
        if strategy.name not in row.never
        and (not row.steps or {*strategy.steps, *strategy.common}.intersection(row.steps))
    ]


def spell(row: OptionRow, value: object) -> str:
    """An option with a value, as it is typed: `--checkpoint full`, `--bf16`."""
    for word, meant in SHORTHANDS.items():
        if meant == (row.name, value):
            return f"--{word}"
    number = f"{value:g}" if isinstance(value, float) else str(value)
    return row.flag if row.kind == "switch" else f"{row.flag} {number}"


def listed(words: Iterable[object], last: str = "and") -> str:
    """Words joined as in a sentence: `fsdp, tp and pp`."""
    texts = [str(word) for word in words]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} {last} {texts[-1]}"
