"""The file that a notebook is exported to: what ranks begin with, the cells, the end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Self

from nbdist.exporter import source as text
from nbdist.exporter.cell import CellPart
from nbdist.strategy.choice import Options, Strategy, described

# Where ranks of several hosts meet, on the first.
_PORT = 29500


@dataclass(frozen=True, slots=True)
class Names:
    """What the script calls its own things.

    Attributes:
        rank: The rank, whatever the user assigns to `rank`.
        show: The function that shows a cell's last expression.
        join: The function that forms the process group.
        loop: The event loop of cells that await.
        cell: With a number, the function of such a cell.
    """

    rank: str
    show: str
    join: str
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

        return cls(free("RANK"), free("show_result"), free("join_ranks"), free("event_loop"), cell)


@dataclass(frozen=True, slots=True)
class Piece:
    """Something that stands in the script.

    Attributes:
        number, title: The cell's, and its magic; 0 for comments.
        part: What the cell has become; None for comments.
        ranks: Where it runs; None for everywhere.
        text: The comments, or the cell as typed.
    """

    number: int
    title: str
    part: CellPart | None = None
    ranks: tuple[int, ...] | None = None
    text: str = ""


@dataclass(frozen=True, slots=True)
class ScriptSettings:
    """What the notebook was started with.

    Attributes:
        hosts: Of each rank, as it runs in the notebook; empty where that is not known.
        seed: Set on every rank; None where it is not.
        choice: The strategy under which models are first prepared; None for the default.
        remarks: What else to say in the head.
    """

    world_size: int
    hosts: tuple[str, ...]
    seed: int | None
    choice: Strategy | None
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Written:
    """The script as written.

    Attributes:
        refused: Cells that Python accepts by themselves, but not in a script: number -> why.
        remark: What to say of the strategy; "" for nothing.
    """

    text: str
    refused: Mapping[int, str]
    remark: str


def write(title: str, pieces: Sequence[Piece], names: Names, settings: ScriptSettings) -> Written:
    """The script; a cell that Python does not accept among the others stands in comments."""
    refused: dict[int, str] = {}
    while True:
        checked_pieces = [
            _refusal(p, refused[p.number]) if p.number in refused else p for p in pieces
        ]
        blocks: list[str] = []
        try:
            for piece in checked_pieces:
                blocks.append(_block(piece, names))  # noqa: PERF401  # its length says where it failed
            head = _head(title, checked_pieces, names, settings)
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
            is_ours = _uses(checked_pieces, "accelerator")
            return Written(whole, refused, _accelerator(settings.choice, is_ours=is_ours)[1])


def _at(line: int, head: str, blocks: Sequence[str]) -> int:
    first = head.count("\n") + 3
    for number, block in enumerate(blocks):
        if line < first + block.count("\n") + 2:
            return number
        first += block.count("\n") + 2
    raise AssertionError(f"line {line} is behind all cells")


def _refusal(piece: Piece, why: str) -> Piece:
    head = f"# %% cell {piece.number}, left out, {why}"
    return Piece(0, "", text=f"{head}\n{text.comment(piece.text)}")


def _block(piece: Piece, names: Names) -> str:
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


def _uses(pieces: Sequence[Piece], name: str) -> bool:
    """Whether a cell reads a name before any cell has given it a value."""
    for piece in pieces:
        if piece.part is None:
            continue
        if name in text.given_names(piece.part.tree):
            return False
        if name in text.read_names(piece.part.tree):
            return True
    return False


def _head(title: str, pieces: Sequence[Piece], names: Names, settings: ScriptSettings) -> str:
    parts = [piece.part for piece in pieces if piece.part is not None]
    futures = sorted({name for part in parts for name in part.futures})
    is_async = any(part.is_async for part in parts)
    has_accelerator = _uses(pieces, "accelerator")
    has_display = _uses(pieces, "display")
    shows = has_display or any(f"{names.show}(" in part.source for part in parts)
    arguments, remark = _accelerator(settings.choice, is_ours=has_accelerator)
    lines = [
        *_first_lines(title, settings, remark),
        *(["", f"from __future__ import {', '.join(futures)}"] if futures else []),
        "",
        *(["import asyncio"] if is_async else []),
        "import os",
        "",
        "import torch",
        "import torch.distributed as dist",
        *(["from accelerate import Accelerator"] if has_accelerator else []),
        *(["from accelerate.utils import set_seed"] if settings.seed is not None else []),
        "",
        _SET_UP.format(rank=names.rank, join=names.join, show=names.show),
    ]
    if shows:
        lines += ["", "", _SHOW.format(rank=names.rank, show=names.show)]
    if has_display:
        lines += ["", "", _DISPLAY.format(show=names.show)]
    lines += ["", "", f"device = {names.join}()"]
    lines += [_GPU_ID] if _uses(pieces, "gpu_id") else []
    lines += [f"set_seed({settings.seed})"] if settings.seed is not None else []
    lines += [f"accelerator = Accelerator({arguments})"] if has_accelerator else []
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
        f"--rdzv-endpoint {hosts[0]}:{_PORT}"
    )


def _ranks_of_hosts(world_size: int, hosts: Sequence[str]) -> Counter[str]:
    """How many ranks each of several hosts has; empty on one, or where that is not known."""
    counts = Counter(hosts)
    return counts if len(counts) > 1 and len(hosts) == world_size else Counter()


def _first_lines(title: str, settings: ScriptSettings, remark: str) -> list[str]:
    shown = text.drop_unprintable(title).replace("\n", "?")
    size = settings.world_size
    several = "--multi_gpu " if size > 1 else ""  # refused for one; elsewhere for CPUs as well
    machines = ""
    if n_hosts := len(_ranks_of_hosts(size, settings.hosts)):
        machines = (
            f"--num_machines {n_hosts} --machine_rank NUMBER_OF_THE_HOST "
            f"--main_process_ip {settings.hosts[0]} --main_process_port {_PORT} "
        )
    lines = [
        f"# The distributed cells of {shown}, exported by nbdist. It runs without nbdist:",
        "#",
        f"#     {torchrun(size, settings.hosts)} THIS_FILE",
        f"#     accelerate launch {several}--num_processes {size} {machines}THIS_FILE",
        "#     python THIS_FILE        one rank",
    ]
    remarks = [text.comment(f"- {line}") for line in (remark, *settings.remarks) if line]
    return [*lines, "#", "# Not as in the notebook:", *remarks] if remarks else lines


def _accelerator(choice: Strategy | None, *, is_ours: bool) -> tuple[str, str]:
    """The arguments of the script's Accelerator, and what to say in the head; "" for nothing."""
    arguments = "" if choice is None else _arguments(choice)
    if choice is not None and arguments is None:
        return "", (
            f"models are trained under {described(choice)} there, and under ddp here: without a "
            "configuration of its own (`accelerate config`) Accelerate has no other"
        )
    if arguments and not is_ours:
        return "", f"give your Accelerator what the notebook's strategy gave it: {arguments}"
    return arguments or "", ""


def _arguments(choice: Strategy) -> str | None:
    """The strategy as arguments of Accelerate's Accelerator; None where it has none for it."""
    bare = replace(choice.options, precision="fp32", accumulate=1)
    if choice.name != "ddp" or bare != Options():
        return None
    arguments = []
    if choice.options.precision != "fp32":
        arguments.append(f"mixed_precision={choice.options.precision!r}")
    if choice.options.accumulate > 1:
        arguments.append(f"gradient_accumulation_steps={choice.options.accumulate}")
    return ", ".join(arguments).replace("'", '"')


def _end(pieces: Sequence[Piece], names: Names) -> str:
    is_async = any(piece.part is not None and piece.part.is_async for piece in pieces)
    lines = ["# %% the end"]
    lines += [f"{names.loop}.close()"] if is_async else []
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
_GPU_ID = "gpu_id = device.index"
_LOOP = "{loop} = asyncio.new_event_loop()\nasyncio.set_event_loop({loop})"
