"""The file that a notebook is exported to: what ranks begin with, the cells, the end."""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from nbdist.config.emit import PORT
from nbdist.exporter import source as text
from nbdist.exporter.cell import CellPart
from nbdist.strategy.choose import StrategySpec

# The variable in which Accelerate finds DeepSpeed's settings: the path of a file, or the text.
DEEPSPEED_VARIABLE = "ACCELERATE_DEEPSPEED_CONFIG_FILE"


@dataclass(frozen=True, slots=True)
class Names:
    """Names that the script gives its own things.

    Attributes:
        rank: The rank, whatever the user assigns to `rank`.
        show: The function that shows a cell's last expression.
        join: The function that forms the process group.
        this: What nbdist.join returns.
        arguments: What was typed behind the script's name.
        loop: The event loop of cells that await.
        cell: With a number, the function of such a cell.
    """

    rank: str
    show: str
    join: str
    this: str
    arguments: str
    loop: str
    cell: str

    @classmethod
    def free(cls, used: Collection[str]) -> Self:
        """Names that are not in use."""
        cell = "cell_"
        while any(name.startswith(cell) for name in used):
            cell = f"_{cell}"

        def free(word: str) -> str:
            while word in used:
                word += "_"
            return word

        return cls(
            free("RANK"), free("show_result"), free("join_ranks"), free("this_rank"),
            free("arguments"), free("event_loop"), cell,
        )  # fmt: skip


def literal(value: object) -> str:
    """A value that was typed, as Python."""
    return json.dumps(value) if isinstance(value, str) else repr(value)


@dataclass(frozen=True, slots=True)
class RankCall:
    """A method of nbdist's ScriptRank that a script calls where a magic stands in the notebook.

    Attributes:
        method: save, load, export_weights, switch; join of nbdist itself.
        argument: The path, or the strategy's name.
    """

    method: str
    argument: object
    options: tuple[tuple[str, object], ...] = ()

    def text(self, argument: str = "") -> str:
        """The call as Python, with another argument than its own where one is given."""
        first = argument or literal(self.argument)
        words = [first, *(f"{name}={literal(value)}" for name, value in self.options)]
        return f"{self.method}({', '.join(words)})"


@dataclass(frozen=True, slots=True)
class ScriptPart:
    """Something that stands in the script.

    Attributes:
        number, title: The cell's, and its magic; 0 for comments.
        part: What the cell has become; None for comments and calls.
        ranks: Where it runs; None for everywhere.
        text: The comments, or the cell as typed.
        call: What stands in the place of a line magic.
    """

    number: int
    title: str
    part: CellPart | None = None
    ranks: tuple[int, ...] | None = None
    text: str = ""
    call: RankCall | None = None


@dataclass(frozen=True, slots=True)
class ScriptSettings:
    """Settings that the notebook was started with.

    Attributes:
        hosts: Of each rank, as it runs in the notebook; empty where that is not known.
        seed: Set on every rank; None where it is not.
        strategy: Under which models are first prepared, as typed; None for the default.
        needs: Why it needs nbdist; () where Accelerate does all of it.
        variables: What Accelerate reads of the strategy, without nbdist.
        deepspeed: DeepSpeed's settings as JSON, likewise; "" for another strategy.
        only_on_gpus: The strategy that Accelerate has on GPUs alone, likewise; "" for another.
        remarks: What else to say in the head.
    """

    world_size: int
    hosts: tuple[str, ...]
    seed: int | None
    strategy: StrategySpec | None
    needs: tuple[str, ...] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    deepspeed: str = ""
    only_on_gpus: str = ""
    remarks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Written:
    """The script as written.

    Attributes:
        refused: Cells that Python accepts by themselves, but not in a script: number -> why.
        remark: What to say of --resume; "" for nothing.
    """

    text: str
    refused: Mapping[int, str]
    remark: str


def write(
    title: str, pieces: Sequence[ScriptPart], names: Names, settings: ScriptSettings
) -> Written:
    """The script; a cell that Python does not accept among the others stands in comments."""
    refused: dict[int, str] = {}
    while True:
        checked_pieces = [
            _refusal(p, refused[p.number]) if p.number in refused else p for p in pieces
        ]
        remark = ""
        if settings.needs:
            checked_pieces, remark = _resumed(checked_pieces, names)
        blocks: list[str] = []
        try:
            for piece in checked_pieces:
                blocks.append(_block(piece, names))  # noqa: PERF401  # its length says where it failed
            said = replace(settings, remarks=(*filter(None, [remark]), *settings.remarks))
            head = _head(title, checked_pieces, names, said)
            whole = "\n\n".join([head, *blocks, _end(checked_pieces, names)]) + "\n"
            with text.quiet():
                compile(whole, "script", "exec", dont_inherit=True)
        except SyntaxError as error:
            is_whole = len(blocks) == len(checked_pieces)
            guilty = _at(error.lineno or 0, head, blocks) if is_whole else len(blocks)
            if checked_pieces[guilty].number == 0:  # comments, the head or the end: our mistake
                raise
            refused[checked_pieces[guilty].number] = str(error.msg)
        else:
            return Written(whole, refused, remark)


def _at(line: int, head: str, blocks: Sequence[str]) -> int:
    first = head.count("\n") + 3
    for number, block in enumerate(blocks):
        if line < first + block.count("\n") + 2:
            return number
        first += block.count("\n") + 2
    raise AssertionError(f"line {line} is behind all cells")


def _refusal(piece: ScriptPart, why: str) -> ScriptPart:
    head = f"# %% cell {piece.number}, left out, {why}"
    return ScriptPart(0, "", text=f"{head}\n{text.comment(piece.text)}")


def _block(piece: ScriptPart, names: Names) -> str:
    if piece.call is not None:
        call, title = piece.text or piece.call.text(), text.drop_unprintable(piece.title)
        return f"# %% cell {piece.number}: {title}\n{names.this}.{call}"
    if piece.part is None:
        return piece.text
    title = f": {text.drop_unprintable(piece.title)}" if piece.title else ""
    border = f"# %% cell {piece.number}{title}"
    source = piece.part.source.strip("\n")
    above = ""
    if piece.part.is_async:
        function = f"{names.cell}{piece.number}"
        above = text.wrap_async(function, source) + "\n\n\n"
        source = f"{names.loop}.run_until_complete({function}())"
    if piece.ranks is not None:
        inside = f"({', '.join(map(str, piece.ranks))}{',' if len(piece.ranks) == 1 else ''})"
        source = text.block(f"if {names.rank} in {inside}:", source)
    return f"{border}\n{above}{source}"


def _uses(pieces: Sequence[ScriptPart], name: str) -> bool:
    """Whether a cell reads a name before any cell has given it a value."""
    for piece in pieces:
        if piece.part is None:
            continue
        if name in text.given_names(piece.part.tree):
            return False
        if name in text.read_names(piece.part.tree):
            return True
    return False


def _head(title: str, pieces: Sequence[ScriptPart], names: Names, settings: ScriptSettings) -> str:
    parts = [piece.part for piece in pieces if piece.part is not None]
    futures = sorted({name for part in parts for name in part.futures})
    is_async = any(part.is_async for part in parts)
    has_accelerator = _uses(pieces, "accelerator")
    has_display = _uses(pieces, "display")
    shows = has_display or any(f"{names.show}(" in part.source for part in parts)
    made = "Accelerator()"
    if settings.needs:
        made = f"{names.this}.accelerator"
    lines = [
        *_first_lines(title, settings),
        *(["", f"from __future__ import {', '.join(futures)}"] if futures else []),
        "",
        *(["import argparse"] if settings.needs else []),
        *(["import asyncio"] if is_async else []),
        *(["import base64"] if settings.deepspeed else []),
        "import os",
        *(["import sys"] if settings.needs else []),
        "",
        "import torch",
        "import torch.distributed as dist",
        *(["from accelerate import Accelerator"] if has_accelerator and not settings.needs else []),
        *(["from accelerate.utils import set_seed"] if settings.seed is not None else []),
        *(["", "import nbdist"] if settings.needs else []),
        "",
        *([*_variables(settings), ""] if settings.variables else []),
        _SET_UP.format(rank=names.rank, join=names.join, show=names.show),
    ]
    if shows:
        lines += ["", "", _SHOW.format(rank=names.rank, show=names.show)]
    if has_display:
        lines += ["", "", _DISPLAY.format(show=names.show)]
    lines += ["", ""]
    lines += [_RESUME.format(arguments=names.arguments)] if settings.needs else []
    lines += [f"device = {names.join}()"]
    if settings.only_on_gpus:
        lines += [_NEEDS_GPUS.format(strategy=settings.only_on_gpus)]
    if settings.needs:
        spec = settings.strategy or StrategySpec("ddp")
        lines += [f"{names.this} = nbdist.{RankCall('join', spec.name, spec.settings).text()}"]
    lines += [_GPU_ID] if _uses(pieces, "gpu_id") else []
    lines += [f"set_seed({settings.seed})"] if settings.seed is not None else []
    lines += [f"accelerator = {made}"] if has_accelerator else []
    lines += [_LOOP.format(loop=names.loop)] if is_async else []
    return "\n".join(lines)


def torchrun(world_size: int, hosts: Sequence[str]) -> str:
    """The command that starts so many ranks, up to the script's name: the same on each host."""
    counts = _ranks_of_hosts(world_size, hosts)
    if not counts:
        return f"torchrun --nproc-per-node {world_size}"
    is_even = len(set(counts.values())) == 1
    each = counts[hosts[0]] if is_even else "RANKS_OF_THE_HOST"
    return (
        f"torchrun --nnodes {len(counts)} --nproc-per-node {each} --rdzv-backend c10d "
        f"--rdzv-endpoint {hosts[0]}:{PORT}"
    )


def _ranks_of_hosts(world_size: int, hosts: Sequence[str]) -> Counter[str]:
    """How many ranks each of several hosts has; empty on one, or where that is not known."""
    counts = Counter(hosts)
    return counts if len(counts) > 1 and len(hosts) == world_size else Counter()


def _first_lines(title: str, settings: ScriptSettings) -> list[str]:
    shown = text.drop_unprintable(title).replace("\n", "?")
    size = settings.world_size
    begin = f"# The distributed cells of {shown}, exported by nbdist. It "
    remarks = [text.comment(f"- {line}") for line in settings.remarks]
    rest = ["#", "# Not as in the notebook:", *remarks] if remarks else []
    if settings.needs:
        return [
            f"{begin}needs nbdist (pip install nbdist):",
            *(text.comment(f"- {line}") for line in settings.needs),
            "#",
            f"#     {torchrun(size, settings.hosts)} THIS_FILE [--resume CHECKPOINT]",
            *rest,
        ]
    several = "--multi_gpu " if size > 1 else ""  # refused for one; elsewhere for CPUs as well
    machines = ""
    if n_hosts := len(_ranks_of_hosts(size, settings.hosts)):
        machines = (
            f"--num_machines {n_hosts} --machine_rank NUMBER_OF_THE_HOST "
            f"--main_process_ip {settings.hosts[0]} --main_process_port {PORT} "
        )
    return [
        f"{begin}runs without nbdist:",
        "#",
        f"#     {torchrun(size, settings.hosts)} THIS_FILE",
        f"#     accelerate launch {several}--num_processes {size} {machines}THIS_FILE",
        "#     python THIS_FILE        one rank",
        *rest,
    ]


def _variables(settings: ScriptSettings) -> list[str]:
    """Python that sets what Accelerate reads of the strategy, also in an Accelerator of the user's.

    It replaces what `accelerate launch` sets without a configuration, such as fp32.
    """
    values = {name: json.dumps(value) for name, value in settings.variables.items()}
    if settings.deepspeed:
        # Accelerate reads it encoded too, so that no file has to lie beside the script.
        encoded = f'base64.urlsafe_b64encode(b"""{settings.deepspeed}""").decode()'
        values[DEEPSPEED_VARIABLE] = encoded
    return [
        "# The notebook's strategy, as Accelerate reads it.",
        "os.environ |= {",
        *(f"{text.INDENT}{json.dumps(name)}: {value}," for name, value in sorted(values.items())),
        "}",
    ]


def _resumed(pieces: Sequence[ScriptPart], names: Names) -> tuple[list[ScriptPart], str]:
    """The pieces with the place at which --resume loads, and what to say where there is none.

    A load that stands before the first save is where the notebook itself began. Otherwise it is
    behind the last statement that prepares, before the first that trains.
    """
    resumed = list(pieces)
    calls = [piece.call.method if piece.call else "" for piece in pieces]
    first = calls.index("load") if "load" in calls else len(calls)
    if first < len(calls) and "save" not in calls[:first]:
        call = pieces[first].call
        assert call is not None
        path = f"{names.arguments}.resume or {literal(call.argument)}"
        resumed[first] = replace(pieces[first], text=call.text(path))
        return resumed, ""
    place = _last_prepare(pieces)
    if place is None:
        return resumed, (
            "--resume loads nothing by itself: no cell prepares models before it trains, other "
            f"than in one statement with it. Call {names.this}.load({names.arguments}.resume) "
            "where all is prepared"
        )
    number, line = place
    part = resumed[number].part
    assert part is not None
    lines = part.source.split("\n")
    lines[line:line] = [
        f"if {names.arguments}.resume:",
        f"{text.INDENT}{names.this}.load({names.arguments}.resume)",
    ]
    resumed[number] = replace(resumed[number], part=replace(part, source="\n".join(lines)))
    return resumed, ""


def _last_prepare(pieces: Sequence[ScriptPart]) -> tuple[int, int] | None:
    """(Index of a piece, line) behind which all is prepared and nothing has trained, if any."""
    place = None
    # Functions and classes that prepare, and that train, when they are called.
    preparing, training = set[str](), set[str]()
    for number, piece in enumerate(pieces):
        if piece.part is None or piece.ranks is not None:
            continue
        statements = piece.part.tree.body
        for node in statements:
            prepares = _calls(node, preparing, ("prepare", "prepare_model"))
            trains = _calls(node, training, ("backward",))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                preparing |= {node.name} if prepares else set()
                training |= {node.name} if trains else set()
            elif trains:
                return place
            elif prepares:
                same_line = [n for n in statements if n.lineno <= text.last_line(node)]
                place = number, max(map(text.last_line, same_line))
    return place


def _calls(node: ast.stmt, functions: Collection[str], methods: Collection[str]) -> bool:
    """Whether a statement uses one of these functions, or has a call of one of these methods."""
    return bool(text.read_names(node) & set(functions)) or text.calls_method(node, methods)


def _end(pieces: Sequence[ScriptPart], names: Names) -> str:
    is_async = any(piece.part is not None and piece.part.is_async for piece in pieces)
    lines = ["# %% the end"]
    lines += [f"{names.loop}.close()"] if is_async else []
    saves_beside = any(
        piece.call and ("asynchronous", True) in piece.call.options for piece in pieces
    )
    lines += [f"{names.this}.wait()"] if saves_beside else []
    lines += [
        "if dist.is_initialized():",
        "    dist.barrier()  # torch often aborts on a rank that another one leaves behind",
        "    dist.destroy_process_group()",
    ]
    return "\n".join(lines)


_SET_UP = '''
# What every rank of the notebook has from the start. torchrun and accelerate launch set RANK and
# the others; without them this process is the only rank.
{rank} = int(os.environ.get("RANK", "0"))
rank = {rank}
world_size = int(os.environ.get("WORLD_SIZE", "1"))
local_rank = int(os.environ.get("LOCAL_RANK", "0"))


def {join}():
    """Form the process group of all ranks and return this rank's device."""
    wants_cpu = os.environ.get("ACCELERATE_USE_CPU", "").lower() in {{"1", "true"}}
    gpus = 0 if wants_cpu else torch.cuda.device_count()
    device = torch.device("cuda", local_rank % gpus) if gpus else torch.device("cpu")
    backend = "gloo"
    if not gpus:
        os.environ["ACCELERATE_USE_CPU"] = "true"  # else Accelerate takes each rank as alone
    else:
        torch.cuda.set_device(device)
        if gpus >= int(os.environ.get("LOCAL_WORLD_SIZE", "1")):  # NCCL wants a GPU for each rank
            backend = "cpu:gloo,cuda:nccl"
    if "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device
'''.strip()
_SHOW = '''
def {show}(value):
    """Print the value of a cell's last expression, as the notebook shows it."""
    if value is not None:
        print(f"[{{{rank}}}] {{value!r}}")
'''.strip()
_DISPLAY = '''
def display(*values):
    """Print values; only a notebook can do more."""
    for value in values:
        {show}(value)
'''.strip()
_RESUME = """
parser = argparse.ArgumentParser()
parser.add_argument("--resume", metavar="CHECKPOINT", help="load what %%dist_save or a job wrote")
{arguments}, sys.argv[1:] = parser.parse_known_args()  # the rest is the cells' own
""".strip()
_NEEDS_GPUS = """
if device.type == "cpu":
    raise SystemExit(
        "Accelerate has no {strategy} without GPUs. For the CPU, export with --device cpu: then "
        "nbdist does it."
    )
""".strip()
_GPU_ID = "gpu_id = device.index"
_LOOP = "{loop} = asyncio.new_event_loop()\nasyncio.set_event_loop({loop})"
