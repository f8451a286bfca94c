"""A notebook's distributed cells as one script, without nbdist where Accelerate does the same.

`exporter.cell` makes a part of one cell, `exporter.script` writes parts as a file; here is decided
which cells run on ranks, and what is said of the others.
"""

from __future__ import annotations

import contextlib
import re
import tokenize
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from nbdist.config import emit, launch
from nbdist.config.emit import FIRST_HOST, Setting
from nbdist.core.ranks import is_all, parse_numbers, rank_label
from nbdist.errors import OptionError
from nbdist.exporter import cell as exporter_cell
from nbdist.exporter import script
from nbdist.exporter import source as text
from nbdist.exporter.cell import (
    ACCELERATE,
    CHANGED,
    LEFT_OUT,
    NBDIST,
    CellPart,
    LeftOutError,
    LineMagic,
    Note,
)
from nbdist.exporter.script import Names, RankCall, ScriptPart, ScriptSettings
from nbdist.strategy.choice import Strategy, described
from nbdist.strategy.choose import StrategySpec, default_choice
from nbdist.strategy.hosts import ranks_of_host

LOCAL = "local"
RECORDING_VERBS = frozenset({"dist_profile", "dist_memory"})
CELL_VERBS = frozenset({"distributed", "rank", *RECORDING_VERBS, LOCAL})
_FIRST_MAGIC = re.compile(r"^%(\w+)(.*)$")
_EXITS = {"exit", "exit()", "quit", "quit()"}


@dataclass(frozen=True, slots=True)
class NotebookCell:
    """A cell of a notebook.

    Attributes:
        number: Among its code cells, or in the history; 0 for text.
        problem: "failed" or "repeated" where it is known to be of no use.
    """

    number: int
    text: str
    is_code: bool = True
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Magic:
    """Meaning of a magic of nbdist for a script; None and "" where it says nothing.

    Attributes:
        mode: Where plain cells run from now on: "all", "local" or ranks.
        ranks: Where the cell below it runs.
        choice: A strategy, for some number of ranks.
        spec: The same as typed.
        call: What a script does in its place.
        problem: Why it cannot be read.
    """

    mode: str | None = None
    ranks: str | None = None
    timeout_s: float | None = None
    world_size: int | None = None
    seed: int | None = None
    choice: Strategy | None = None
    spec: StrategySpec | None = None
    call: RankCall | None = None
    note: str = ""
    problem: str = ""


@dataclass(frozen=True, slots=True)
class Reader:
    """Functions that read a notebook's cells and magics, known outside of core.

    Attributes:
        transform: IPython's: from the text of a cell to Python. Raises SyntaxError.
        magic: What a magic (name, line) of nbdist means; None for one of somebody else's.
    """

    transform: Callable[[str], str]
    magic: Callable[[str, str], Magic | None]


@dataclass(frozen=True, slots=True)
class Target:
    """Ranks, hosts and device on which the script is to run.

    Attributes:
        hosts: Of each rank, as it runs in the notebook; empty where that is not known.
        ranks, nodes: How many ranks and hosts, where typed; None for as in the notebook.
        device: "cuda" or "cpu".
        blocks: Class names of the blocks of the notebook's models.
    """

    hosts: tuple[str, ...] = ()
    ranks: int | None = None
    nodes: int | None = None
    device: str = "cuda"
    blocks: tuple[str, ...] = ()

    def hosts_of(self, world_size: int) -> tuple[str, ...]:
        """The host of each of so many ranks; empty where that is not known.

        Raises:
            OptionError: They cannot be shared out evenly over the hosts that were typed.
        """
        if self.nodes is None:
            return self.hosts if len(self.hosts) == world_size else ()
        each = ranks_of_host(world_size, self.nodes)
        return tuple(
            f"HOST_{rank // each}" if rank >= each else FIRST_HOST for rank in range(world_size)
        )


@dataclass(frozen=True, slots=True)
class ExportedScript:
    """A script and what to say of it.

    Attributes:
        cells: Numbers of the cells that are in it.
        total: How many code cells there were.
        notes: One line of each kind about cells that were left out or changed, and strategies.
        command: Starts it with as many ranks, up to its name.
        needs: Why it needs nbdist; () where it does not.
        setting: Its strategy and ranks, for configurations of what starts it.
        last: The strategy that counts behind the last cell; None for the default.
    """

    text: str
    cells: tuple[int, ...]
    total: int
    notes: tuple[str, ...]
    command: str
    needs: tuple[str, ...]
    setting: Setting
    last: Strategy | None


def export(
    cells: Sequence[NotebookCell], title: str, reader: Reader, target: Target | None = None
) -> ExportedScript:
    """The distributed cells of a whole notebook, in their order, as one script.

    The title, for the script's first line, says what it was made of.

    Raises:
        OptionError: If no cell can be taken, or the ranks cannot lie as the target says.
    """
    target = target or Target()
    names = _names(cells, reader)
    walk = _walk(cells, _Walk(reader, names))
    setting = _setting(walk, target)
    needs = _needs(walk, setting)
    if needs:  # then cells have their Accelerator from nbdist
        walk = _walk(cells, _Walk(reader, names, accelerators=NBDIST))
    world_size, hosts = setting.choice.world_size, target.hosts_of(setting.choice.world_size)
    settings = ScriptSettings(
        world_size, hosts, walk.start.seed, walk.start.spec, needs, remarks=tuple(walk.remarks)
    )
    if walk.is_training and not needs:
        settings = _with_accelerate(settings, setting)
    written = script.write(title, walk.pieces, walk.names, settings)
    refusals = [Note("syntax", number, what) for number, what in written.refused.items()]
    notes = [note for note in walk.notes if note.number not in written.refused] + refusals
    numbers = dict.fromkeys(piece.number for piece in walk.pieces if piece.number)
    exported_cells = tuple(number for number in numbers if number not in written.refused)
    said = [*_note_lines(notes), written.remark, *walk.remarks]
    lines = tuple(text.drop_unprintable(line) for line in said if line)
    total = sum(cell.is_code and bool(cell.text.strip()) for cell in cells)
    if not exported_cells:
        raise OptionError(
            f"There is nothing to export from the {total} code cells of {title}. Cells with "
            "%%distributed or %%rank are exported, and plain ones below %dist_mode all or "
            + "\n  ".join(["%dist_init --auto.", *lines])
        )
    return ExportedScript(
        written.text, exported_cells, total, lines, script.torchrun(world_size, hosts), needs,
        replace(setting, is_in_script=True), walk.choice,
    )  # fmt: skip


def _setting(walk: _Walk, target: Target) -> Setting:
    """The strategy under which models are first prepared, for the ranks that the script is for."""
    start = walk.start
    # 2 is what a start without -n gives on CPUs.
    here = start.world_size or len(target.hosts) or (start.choice.world_size if start.choice else 2)
    choice = start.choice or default_choice(here)
    if start.spec is not None and (target.ranks or choice.world_size != here):
        try:
            choice = start.spec.choose(target.ranks or here)
        except OptionError:
            if target.ranks:
                raise
    elif target.ranks:
        choice = default_choice(target.ranks)
    hosts = target.hosts_of(choice.world_size)
    first = hosts[0] if len(set(hosts)) > 1 and target.nodes is None else ""
    count = target.nodes or len(set(hosts)) or 1
    return Setting(choice, count, target.device, target.blocks, first_host=first)


def _needs(walk: _Walk, setting: Setting) -> tuple[str, ...]:
    """Why the script needs nbdist; () where Accelerate does all of it."""
    reasons = [f"{typed} (cell {number})" for number, typed in walk.calls]
    why = emit.obstacle(setting) if walk.is_training else ""
    clips = any(part.calls("clip_grad_norm_") for part in walk.taken_parts)
    if not why and setting.choice.name == "deepspeed" and clips:
        why = "Accelerate's clip_grad_norm_ clips nothing under DeepSpeed"
    if why:
        reasons.insert(0, f"{described(setting.choice)}: {why}")
    return tuple(map(text.drop_unprintable, reasons))


def _with_accelerate(settings: ScriptSettings, setting: Setting) -> ScriptSettings:
    """With what Accelerate reads of the strategy, that of a launcher's configuration."""
    variables, name = launch.environment(setting), setting.choice.name
    assert isinstance(variables, dict), variables
    config = emit.deepspeed_text(setting) if name == "deepspeed" else ""
    assert isinstance(config, str), config
    return replace(
        settings,
        # The script looks for GPUs itself.
        variables={k: v for k, v in variables.items() if k != "ACCELERATE_USE_CPU"},
        deepspeed=config.rstrip(),
        only_on_gpus=name
        if setting.choice.world_size > 1 and name not in ("single", "ddp")
        else "",
    )


def _note_lines(notes: Sequence[Note]) -> list[str]:
    lines = []
    for kind, phrase in {**LEFT_OUT, **CHANGED}.items():
        of_kind = [note for note in notes if note.kind == kind]
        bare = [note.number for note in of_kind if not note.what]
        named = [f"{note.number} ({note.what})" for note in of_kind if note.what]
        if of_kind:
            numbers = [rank_label(bare)] if bare else []
            word = "cell" if len(of_kind) == 1 else "cells"
            lines.append(f"{phrase}: {word} {', '.join([*numbers, *named])}")
    return lines


def _names(cells: Sequence[NotebookCell], reader: Reader) -> Names:
    """Names for the script's own things that no cell uses."""
    used: set[str] = set()
    for cell in cells:
        if cell.is_code:
            _, body = exporter_cell.split_magics(cell.text)
            # What is no Python will not be in the script.
            with contextlib.suppress(SyntaxError, tokenize.TokenError):
                used |= text.words(exporter_cell.python_of(body, reader.transform))
    return Names.free(used)


def _walk(cells: Sequence[NotebookCell], walk: _Walk) -> _Walk:
    for cell in cells:
        walk.take(replace(cell, text=cell.text.replace("\r\n", "\n").replace("\r", "\n")))
    return walk


@dataclass(slots=True)
class _Walk:
    """State of the walk at a place in the notebook, from its top on.

    Attributes:
        names: Of the script's own things.
        accelerators: The package that cells have their Accelerator from.
        mode: Where plain cells run.
        pieces: What stands in the script so far.
        notes, remarks: What is to be said of cells, and besides.
        calls: (number of the cell, magic) of what only nbdist does in a script.
        start: What ranks and models started with.
        choice: The strategy that counts; None for the default.
    """

    reader: Reader
    names: Names
    accelerators: str = ACCELERATE
    mode: str = LOCAL
    pieces: list[ScriptPart] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    calls: list[tuple[int, str]] = field(default_factory=list)
    start: Magic = field(default_factory=Magic)
    choice: Strategy | None = None

    @property
    def taken_parts(self) -> list[CellPart]:
        """The cells so far."""
        return [piece.part for piece in self.pieces if piece.part is not None]

    @property
    def is_training(self) -> bool:
        """Whether a cell so far uses an Accelerator: a strategy that comes after it is a switch."""
        used = {"accelerator", "Accelerator", ACCELERATE}
        return any(text.read_names(part.tree) & used for part in self.taken_parts)

    def take(self, cell: NotebookCell) -> None:
        """Go one cell further."""
        if not cell.is_code:
            # Its headings, as comments.
            bare = re.sub(r"^```.*?(^```|\Z)", "", cell.text, flags=re.MULTILINE | re.DOTALL)
            headings = [line for line in bare.split("\n") if re.match(r"#{1,6} ", line)]
            self.pieces += [ScriptPart(0, "", text=f"# {line}") for line in headings]
        elif cell.problem:
            self._leave(cell, cell.problem)
        elif cell.text.strip():
            self._code(cell)

    def _code(self, cell: NotebookCell) -> None:
        magics, body = exporter_cell.split_magics(cell.text)
        verbs = [magic for magic in magics if magic[0] in CELL_VERBS]
        # One that records says nothing for a script where another says on which ranks.
        verbs = [magic for magic in verbs if magic[0] not in RECORDING_VERBS] or verbs[:1]
        where = self._where(verbs, body)
        foreign = exporter_cell.foreign_magic(magics, CELL_VERBS)
        if len(verbs) > 1:
            where = Magic(problem=f"%%{verbs[1][0]} below %%{verbs[0][0]}")
        if where.problem:
            self._leave(cell, "options", where.problem)
        elif where.ranks is None:
            self._local(cell, body)
        elif foreign:
            self._leave(cell, "magic", foreign)
        elif not body.strip():
            self._leave(cell, "control")
        else:
            self._distributed(cell, body, where)

    def _where(self, verbs: Sequence[tuple[str, str]], body: str) -> Magic:
        """Ranks on which a cell runs; without ranks in the notebook."""
        if not verbs:
            is_local = self.mode == LOCAL or self._begins_with_own(body)
            return Magic() if is_local else _check_ranks(Magic(ranks=self.mode))
        name, line = verbs[0]
        if name == LOCAL:
            return Magic()
        magic = self.reader.magic(name, line)
        assert magic is not None, name
        return _check_ranks(magic)

    def _begins_with_own(self, body: str) -> bool:
        """Whether a cell runs in the notebook whatever the mode."""
        lines = [line for line in body.split("\n") if line.strip() and not line.startswith("#")]
        match = _FIRST_MAGIC.match(lines[0]) if lines else None
        if match is None:
            return body.strip() in _EXITS
        name, line = match.group(1), match.group(2).strip()
        is_loading = name.endswith("load_ext") and line.split()[:1] == ["nbdist"]
        return is_loading or self.reader.magic(name, line) is not None

    def _local(self, cell: NotebookCell, body: str) -> None:
        magics = exporter_cell.line_magics(body, self.reader.transform)
        read = [(m, self.reader.magic(m.name, m.line)) for m in magics]
        nbdist_magics = [(typed, magic) for typed, magic in read if magic is not None]
        before = len(self.calls)
        for typed, magic in nbdist_magics:
            self._obey(cell, typed, magic)
        if len(self.calls) > before:
            if exporter_cell.has_python(body, self.reader.transform):
                self._leave(cell, "local")
        elif nbdist_magics or self._begins_with_own(body):
            self._leave(cell, "control")
        else:
            uses_api = re.search(r"\bnbdist\b", body) is not None
            self._leave(cell, "python" if uses_api else "local")

    def _obey(self, cell: NotebookCell, typed: LineMagic, magic: Magic) -> None:
        self.mode = magic.mode or self.mode
        if magic.problem or magic.note:
            self.remarks.append(f"cell {cell.number}: {magic.problem or magic.note}")
        start = self.start
        if magic.seed is not None and self.taken_parts:
            self.remarks.append(f"cell {cell.number}: --seed {magic.seed} comes later; left out")
        elif magic.seed is not None:
            start = replace(start, seed=magic.seed)
        call = magic.call
        if magic.spec is not None and not self.is_training:
            start = replace(start, choice=magic.choice, spec=magic.spec)
        elif magic.spec is not None and magic.choice != (
            self.choice or default_choice(magic.choice.world_size if magic.choice else 1)
        ):
            call = RankCall("switch", magic.spec.name, magic.spec.settings)
        self.choice = magic.choice or self.choice
        self.start = replace(start, world_size=start.world_size or magic.world_size)
        if call is not None:
            self._call(cell, typed, call)

    def _call(self, cell: NotebookCell, typed: LineMagic, call: RankCall) -> None:
        """Put a call of nbdist's where the magic stands."""
        if typed.is_inside:
            remark = (
                f"cell {cell.number}: {typed.typed} stands inside Python code of the notebook; "
                "the script does not do it. Write it as a line of its own"
            )
            self.remarks.append(remark)
            self.pieces.append(ScriptPart(0, "", text=text.comment(remark)))
            return
        self.calls.append((cell.number, typed.typed))
        self.pieces.append(ScriptPart(cell.number, typed.typed, call=call))

    def _distributed(self, cell: NotebookCell, body: str, where: Magic) -> None:
        try:
            part = exporter_cell.part(
                body, self.reader.transform, self.names.show, self.accelerators
            )
        except LeftOutError as error:
            kind, what = error.args
            self._leave(cell, kind, what)
            return
        assert where.ranks is not None
        ranks = None
        if not is_all(where.ranks):
            ranks = tuple(sorted(set(parse_numbers(where.ranks, "ranks"))))
        typed = cell.text.strip("\n")
        title = next((line.strip() for line in typed.split("\n") if line.startswith("%%")), "")
        self.pieces.append(ScriptPart(cell.number, title, part, ranks, typed))
        self.notes += [Note(kind, cell.number, what) for kind, what in part.notes]
        if where.timeout_s is not None:
            self.notes.append(Note("timeout", cell.number))

    def _leave(self, cell: NotebookCell, kind: str, what: str = "") -> None:
        what = what.partition("\n")[0]  # a usage follows
        self.notes.append(Note(kind, cell.number, what))
        if what:  # of a cell that runs on ranks
            why = LEFT_OUT[kind].removeprefix("left out, ").removeprefix("there as comments: ")
            head = text.drop_unprintable(f"# %% cell {cell.number}, left out, {why}: {what}")
            body = text.comment(cell.text.strip("\n"))
            self.pieces.append(ScriptPart(0, "", text=f"{head}\n{body}"))


def _check_ranks(where: Magic) -> Magic:
    """The same, or with the problem that its ranks cannot be read."""
    try:
        if where.ranks is not None and not is_all(where.ranks):
            parse_numbers(where.ranks, "ranks")
    except OptionError as error:
        return Magic(problem=str(error))
    return where
