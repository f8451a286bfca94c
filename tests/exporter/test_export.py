"""Which cells a script takes, in what form, and what is said of the others."""

import ast
import base64
import json
import shlex

import pytest
from IPython.core.inputtransformer2 import TransformerManager

from nbdist.errors import OptionError
from nbdist.exporter.export import ExportedScript, Magic, NotebookCell, Reader, Target, export
from nbdist.exporter.script import RankCall
from nbdist.strategy.choose import StrategySpec

_MAGICS = {
    "dist_init": Magic(world_size=4),
    "dist_mode all": Magic(mode="all"),
    "dist_mode 0": Magic(mode="0"),
    "dist_mode local": Magic(mode="local"),
    "dist_shutdown": Magic(mode="local"),
    "dist_reset": Magic(note="%dist_reset starts anew"),
    "dist_init --seed 3": Magic(world_size=2, seed=3),
    "dist_init --auto": Magic(world_size=2, mode="all"),
    "distributed": Magic(ranks="all"),
    "distributed --timeout 5": Magic(ranks="all", timeout_s=5),
    "distributed --ranks 9-1": Magic(ranks="9-1"),
    "rank [0,2-3]": Magic(ranks="[0,2-3]"),
    "rank [0]": Magic(ranks="[0]"),
    "rank [1]": Magic(ranks="[1]"),
    "rank": Magic(problem="%%rank: no rank is named\nusage: ..."),
}
_CALLS = {"dist_save": "save", "dist_load": "load"}
# A cell with a comment, a string over lines and a tab.
_LINES = "# why\nx = '''a\n  b'''  # c\n\n\ndef f():\n\treturn x"


def exported(
    *cells: str | NotebookCell, title: str = "a.ipynb", target: Target | None = None
) -> ExportedScript:
    """The export of cells; strategies and checkpoints as they are typed."""
    numbered = [
        NotebookCell(number, cell) if isinstance(cell, str) else cell
        for number, cell in enumerate(cells, 1)
    ]
    return export(numbered, title, Reader(TransformerManager().transform_cell, _magic), target)


def body(*cells: str) -> str:
    """The cells as they stand in the script."""
    script = exported(*cells).text
    return script[script.index("# %% cell") : script.index("# %% the end")].strip()


def _magic(name: str, line: str) -> Magic | None:
    if name == "dist_strategy":
        words = line.split()
        spec = StrategySpec(words[0], tuple((word.lstrip("-"), True) for word in words[1:]))
        return Magic(choice=spec.choose(2), spec=spec)
    if name in _CALLS and "{" in line:
        return Magic(problem=f"%{name}: {line} is a variable")
    if name in _CALLS:
        words = shlex.split(line)
        [path] = [word for word in words if not word.startswith("--")]
        method = "export_weights" if "--export" in words else _CALLS[name]
        beside = (("asynchronous", True),) if "--async" in words else ()
        return Magic(call=RankCall(method, path, beside))
    magic = _MAGICS.get(f"{name} {line}".strip())
    return Magic() if magic is None and name.startswith("dist_") else magic


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        # Lines, comments and strings are the user's, at the module's level.
        ("%%distributed\n" + _LINES, f"%%distributed\n{_LINES}"),
        # %%rank, glued or not, is a condition on the rank that no cell can assign.
        ("%%rank[0,2-3]\nx = 1\nx",
         "%%rank[0,2-3]\nif RANK in (0, 2, 3):\n    x = 1\n    show_result(x)"),
        ("%%rank [1]\n# nothing", "%%rank [1]\nif RANK in (1,):\n    # nothing\n    pass"),
        # %time and %%time time Python that runs once: it stays.
        ("%%distributed\n%%time\nx = 1\n%time y = x + 1\ny",
         "%%distributed\nx = 1\ny = x + 1  # %time\nshow_result(y)"),
        ("%%distributed\n%time f(2)", "%%distributed\nshow_result(f(2))  # %time"),
        ("%%distributed\nx\n%pwd", "%%distributed\nx\n# %pwd"),
        ("%%time\n%%rank [1]\nx = 1", "%%time\nif RANK in (1,):\n    x = 1"),
    ],
)  # fmt: skip
def test_a_cell_stands_under_its_first_magic(cell: str, expected: str) -> None:
    """As it was typed, in a block of its ranks, without what only measures its time."""
    assert body(cell) == f"# %% cell 1: {expected}"


def test_names_that_cells_use_are_left_to_them() -> None:
    """Where cells have names that the script would use, it takes others; `rank` can be assigned."""
    text = body("%%distributed\nRANK = rank = 7\nshow_result = print", "%%rank [1]\nrank")

    assert "if RANK_ in (1,):\n    show_result_(rank)" in text


def test_plain_cells_count_where_the_notebook_says_so() -> None:
    """The mode holds from the cell after its magic on, and until the next."""
    script = exported(
        "a = 1", "%dist_init --auto", "b = 1", "%dist_mode local", "c = 1", "%dist_mode 0",
        "d = 1", "%%local\ne = 1", "%dist_mode", "%%distributed\nf = 1", "%dist_shutdown", "g = 1",
    )  # fmt: skip

    assert script.cells == (3, 7, 10)
    assert "if RANK in (0,):\n    d = 1" in script.text
    assert script.notes == (
        "left out, magics of nbdist that only a notebook needs: cells 2,4,6,9,11",
        "left out, they run in the notebook and not on the ranks: cells 1,5,8,12",
    )


def test_python_calls_of_nbdist_are_told() -> None:
    """Cells that start ranks or run code from Python are named as that."""
    script = exported(
        "import nbdist\nsession = nbdist.start(2)",
        "%%distributed\nimport nbdist\nx = 1",
        "%%distributed\nfrom nbdist.core import units",
        "%%distributed\n1",
    )

    assert script.cells == (4,)
    assert "\n".join(script.notes) == (
        "left out, Python calls of nbdist: cells 1, 2 (import nbdist), "
        "3 (from nbdist.core import units)"
    )


def test_names_of_nbdist_have_counterparts() -> None:
    """`shown` shows, `step` does nothing, `Accelerator` is Accelerate's; no import of nbdist."""
    script = exported(
        "%%distributed\nfrom nbdist import shown, Accelerator\nfrom nbdist import shown as s\n"
        "from nbdist import Accelerator as A, step\nx = shown(1)"
    )

    imports = [n for n in ast.walk(ast.parse(script.text)) if isinstance(n, ast.ImportFrom)]
    assert "nbdist" not in {node.module for node in imports}
    assert "\nshown = str  # from nbdist in the notebook\n" in script.text
    assert "\ndef step(): pass  # from nbdist in the notebook\n" in script.text
    assert "\ns = str  #" in script.text
    assert "\nfrom accelerate import Accelerator as A  #" in script.text
    assert script.notes == ()


@pytest.mark.parametrize(
    ("cell", "expected", "note"),
    [
        (
            "%matplotlib inline\nif rank:\n    !ls -l {x}\nfor i in x:\n    %pwd\n    i?",
            ("\n# %matplotlib inline\nif rank:\n    # !ls -l {x}\n    pass\n"
             "for i in x:\n    # %pwd\n    pass\n    # %pinfo i\n    pass\n"),
            ("kept as comments, a script has no magics and shell commands: "
             "cells 1 (%matplotlib inline), 1 (!ls -l {x}), 1 (%pwd), 1 (%pinfo i)"),
        ),
        (  # What it does inside Python code cannot be known before it runs.
            "for k in range(2):\n    get_ipython().run_cell_magic(\n        'rank', str(k), 'x')",
            "    # get_ipython().run_cell_magic(\n    # 'rank', str(k), 'x')\n    pass",
            ("kept as comments: a cell magic inside Python code. Write it as a cell of its own: "
             "cell 1 (%%rank str(k) x)"),
        ),
    ],
)  # fmt: skip
def test_magics_and_commands_become_comments(cell: str, expected: str, note: str) -> None:
    """A line that is no Python is a comment, told, and an empty block stays valid."""
    script = exported(f"%%distributed\n{cell}")

    assert expected in script.text
    assert script.notes == (note,)


def test_a_magic_that_gives_a_value_stops_the_script() -> None:
    """What needs the value would compute something else without it."""
    cell = "%%distributed\nfiles = !ls\nprint(files)"
    script = exported(cell)
    namespace: dict[str, object] = {}

    assert "\n".join(script.notes) == (
        "the script stops there: a magic or shell command gives a value. Write it in Python: "
        "cell 1 (files = !ls)"
    )
    with pytest.raises(NotImplementedError, match="files = !ls: a script has no magics"):
        exec(body(cell), namespace)
    assert "files" not in namespace


@pytest.mark.parametrize(
    ("cell", "expected"),
    [
        ("%%distributed\n%%bash\necho '''\n", "comments: not Python: cell 1 (%%bash)"),
        ("%%distributed\nx = = 1", "Python does not accept them: cell 1 (line 1: invalid syntax)"),
        ("%%distributed\nreturn 1", "cell 1 (line 1: 'return' outside function)"),
        ("%%distributed\nx = '''", "cell 1 (line 1: unterminated triple-quoted string"),
        ("%%rank\nx = 1", "their options cannot be read: cell 1 (%%rank: no rank is named)"),
        ("%%distributed --ranks 9-1\nx", "cell 1 (9-1 in '9-1' runs backwards. Write 1-9.)"),
        ("%%distributed\n%%rank [1]\nx", "cell 1 (%%rank below %%distributed)"),
        ("%%distributed\nx = 1; from nbdist import shown", "a statement that cannot stay shares"),
        ("%%distributed\nif x: get_ipython().run_line_magic('pwd', '')", "cannot stay shares"),
        ("%%distributed\nfrom os import *\nawait f()", "import * only allowed at module level"),
        ("%%distributed\nx: int = await f()", "annotated name 'x' can't be global"),
    ],
)  # fmt: skip
def test_a_cell_that_cannot_stay_is_kept_as_comments(cell: str, expected: str) -> None:
    """Nothing of it is lost, the others are taken, and the reason is told once."""
    script = exported(cell, "%%distributed\nok = 1")

    assert script.cells == (2,)
    assert len(script.notes) == 1
    assert expected in script.notes[0]
    commented = [line.removeprefix("# ") for line in script.text.split("\n")]
    assert all(line in commented for line in cell.split("\n")[1:] if line)


def test_a_cell_that_fails_among_others_is_a_comment() -> None:
    """`global` of a name that an earlier cell has assigned is valid in a notebook alone."""
    script = exported("%%distributed\nx = 1", "%%distributed\nglobal x\nx = 2", "%%distributed\nx")

    assert script.cells == (1, 3)
    assert "cell 2 (name 'x' is assigned to before global declaration)" in script.notes[0]
    assert "\n# global x\n# x = 2\n" in script.text


@pytest.mark.parametrize("sign", ["\0", "\ud800", "\u2028"])
@pytest.mark.parametrize("cell", ["# {}", "!ls {}", "x = !ls {}", "x = = '{}'", "%%bash\n{}"])
def test_signs_that_no_file_can_hold_do_no_harm(cell: str, sign: str) -> None:
    """A cell that has one may stay or not; the script is a file that Python reads."""
    script = exported(
        f"%%distributed\n{cell.format(sign)}", f"%dist_mode {sign}", "%%distributed\n1"
    )

    assert 3 in script.cells
    compile(script.text.encode(), "script", "exec")
    assert all(line.encode() for line in script.notes)


def test_what_will_not_work_in_a_script_is_told() -> None:
    """Names of a notebook, typed input and --timeout; names that cells define are theirs."""
    script = exported(
        "%%distributed\n_ + In[1]; x = get_ipython()",
        "%%distributed\ninput('?'); breakpoint()",
        "%%distributed --timeout 5\nfor _ in range(2): print(_)",
        "%%distributed\nimport getpass\ngetpass.getpass()",
    )

    assert script.cells == (1, 2, 3, 4)
    assert script.notes == (
        "names that only a notebook has: cells 1 (_), 1 (In), 1 (get_ipython)",
        "they ask for typed input, which ranks do not have: cells 2 (input()), 2 (breakpoint())",
        "--timeout has no effect in a script: cell 3",
    )


def test_future_imports_come_first() -> None:
    """They hold for the file, wherever the cell stands, under ranks too."""
    script = exported(
        "%%distributed\nx = 1", "%%rank [0]\nfrom __future__ import annotations\ndef f(a: B): ..."
    )

    assert ast.parse(script.text).body[0].__class__ is ast.ImportFrom
    assert "    # from __future__ import annotations\n    def f(a: B): ..." in script.text


def test_a_cell_that_awaits_is_a_function_of_the_loop() -> None:
    """Its variables are the module's, and the tasks of one loop go on from cell to cell."""
    script = exported("%%distributed\nx = await f()\nx", "%%rank [1]\nasync for y in g(): z = y")

    assert (
        "\nasync def cell_1():\n    global x\n    x = await f()\n    show_result(x)\n"
        in script.text
    )
    assert "\nif RANK in (1,):\n    event_loop.run_until_complete(cell_2())\n" in script.text
    assert "\n    global y, z\n" in script.text


def test_display_is_there_where_it_is_used() -> None:
    """It is no name of Python's; who imports it from IPython has that one."""
    script = exported("%%distributed\ndisplay(1, 2)").text
    imported = exported("%%distributed\nfrom IPython.display import display\ndisplay(1)").text

    assert "\ndef display(*values):" in script
    assert "\ndisplay(1, 2)\n" in script
    assert "def display" not in imported


@pytest.mark.parametrize(
    ("cells", "is_made"),
    [
        (["accelerator.prepare(1)"], True),
        (["def f(accelerator):\n  pass", "f(accelerator)"], True),
        (["def f():\n  return accelerator.device"], True),
        (["from accelerate import Accelerator\naccelerator = Accelerator()\naccelerator"], False),
        (["accelerator = 1", "accelerator"], False),
        (["x = 1"], False),
    ],
)
def test_an_accelerator_is_made_if_cells_need_one(cells: list[str], *, is_made: bool) -> None:
    """A second one with other settings is refused by Accelerate, so none is made in vain."""
    script = exported(*(f"%%distributed\n{cell}" for cell in cells)).text

    head = script[: script.index("# %% cell")]
    assert ("\naccelerator = Accelerator()\n" in head) == is_made


@pytest.mark.parametrize(
    ("line", "device", "variables", "needs"),
    [
        ("ddp", "cpu", {}, ""),
        ("ddp --bf16", "cpu", {"ACCELERATE_MIXED_PRECISION": "bf16"}, ""),
        ("fsdp", "cuda", {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, ""),
        ("deepspeed", "cuda", {"ACCELERATE_USE_DEEPSPEED": "true"}, ""),
        ("fsdp", "cpu", {}, "fsdp, dp 2: Accelerate has no fsdp on the CPU"),
        ("ddp --fp16", "cpu", {}, "ddp, dp 2, --fp16: Accelerate ignores fp16 on the CPU"),
        ("ddp --fused", "cuda", {}, "no configuration of Accelerate has all of --fused"),
        ("tp", "cuda", {}, "tp, tp 2: Accelerate splits the layers of models of transformers only"),
        ("pp", "cuda", {}, "Accelerate does not support torch's pipelines"),
        ("zero1", "cuda", {}, "Accelerate has ZeRO stage 1 only through DeepSpeed"),
        ("single", "cuda", {}, "single: Accelerate lets no rank train by itself"),
    ],
)
def test_a_strategy_is_accelerates_or_nbdists(
    line: str, device: str, variables: dict[str, str], needs: str
) -> None:
    """Accelerate reads it from the environment; what it cannot do, the script has from nbdist."""
    script = exported(
        f"%dist_strategy {line}",
        "%%distributed\nfrom nbdist import Accelerator\nmodel = accelerator.prepare(1)",
        target=Target(device=device),
    )

    head = script.text[: script.text.index("import os")].replace("\n# ", " ")
    assert [needs in reason for reason in script.needs] == [True] * bool(needs)
    assert (needs in head) or not needs
    assert (head.count("needs nbdist"), head.count("runs without nbdist")) == (
        (1, 0) if needs else (0, 1)
    )
    assert {**settings_of(script.text), **variables} == settings_of(script.text)
    assert bool(settings_of(script.text)) == bool(variables)
    assert ("\naccelerator = Accelerator()\n" in script.text) == (not needs)
    assert ("\naccelerator = this_rank.accelerator\n" in script.text) == bool(needs)
    package = "nbdist" if needs else "accelerate"
    assert f"\nfrom {package} import Accelerator  # from nbdist in the notebook\n" in script.text
    assert ("without GPUs" in script.text) == (line in {"fsdp", "deepspeed"} and not needs)


def settings_of(script: str) -> dict[str, str]:
    """What a script sets in the environment for Accelerate."""
    for node in ast.walk(ast.parse(script)):
        if isinstance(node, ast.AugAssign):
            code = compile(ast.Expression(node.value), "script", "eval")
            settings: dict[str, str] = eval(code, {"base64": base64})
            return settings
    return {}


def test_deepspeeds_settings_are_in_the_script() -> None:
    """The variable is what Accelerate decodes where it is no file; clipping needs nbdist."""
    cells = ["%dist_strategy deepspeed", "%%distributed\naccelerator.prepare(1)"]
    script = exported(*cells)
    clipped = exported(*cells, "%%distributed\naccelerator.clip_grad_norm_([], 1.0)")

    encoded = settings_of(script.text)["ACCELERATE_DEEPSPEED_CONFIG_FILE"]
    assert json.loads(base64.urlsafe_b64decode(encoded))["zero_optimization"] == {"stage": 2}
    assert "clips nothing under DeepSpeed" in clipped.needs[0]


def test_a_strategy_without_models_needs_nothing() -> None:
    """Cells that use no Accelerator train under none."""
    script = exported("%dist_strategy tp", "%%distributed\nx = 1")

    assert script.needs == ()
    assert "nbdist.join" not in script.text


def test_a_switch_is_made_where_it_stands() -> None:
    """Once cells have an accelerator; one to the same strategy is none."""
    script = exported(
        "%%distributed\nmodel = accelerator.prepare(1)",
        "%dist_strategy ddp",
        "%dist_strategy fsdp --bf16",
        "%%distributed\nx = 1",
    )

    assert script.needs == ("%dist_strategy fsdp --bf16 (cell 3)",)
    assert script.cells == (1, 3, 4)
    assert '\nthis_rank = nbdist.join("ddp")\n' in script.text
    assert script.text.index('\nthis_rank.switch("fsdp", bf16=True)\n') < script.text.index("x = 1")
    assert script.text.count("switch(") == 1
    assert script.setting.choice.name == "ddp"
    assert script.last is not None
    assert script.last.name == "fsdp"


def test_checkpoints_are_saved_and_loaded_where_they_were() -> None:
    """--async is waited for at the end; --resume takes the place of the load that came first."""
    script = exported(
        "%%distributed\nmodel = accelerator.prepare(1)",
        '%dist_load "old ones"',
        "%%distributed\naccelerator.backward(1)",
        "%dist_save new --async\n%dist_save --export weights\nx = 1",
        "%dist_load new",
    )

    code = script.text[script.text.index("# %% cell 1") :]
    calls = [line for line in code.split("\n") if "this_rank" in line]
    assert calls == [
        'this_rank.load(arguments.resume or "old ones")',
        'this_rank.save("new", asynchronous=True)',
        'this_rank.export_weights("weights")',
        'this_rank.load("new")',
        "this_rank.wait()",
    ]
    assert script.notes == ("left out, they run in the notebook and not on the ranks: cell 4",)
    assert [reason.rpartition(" (")[2] for reason in script.needs] == [
        "cell 2)", "cell 4)", "cell 4)", "cell 5)",
    ]  # fmt: skip


_PREPARE = "m = accelerator.prepare(1)"
_MAKE = "def make():\n  return accelerator.prepare(1)"
_TRAIN = "def train():\n  accelerator.backward(1)"


@pytest.mark.parametrize(
    ("cells", "before"),
    [
        (["a = 1\nm = accelerator.prepare(1); b = (\n2)\nc = 3", "m.backward()"], "c = 3"),
        ([_PREPARE, _PREPARE, "m.backward()"], "# %% cell 4"),
        ([_PREPARE, "m.backward()", _PREPARE], "# %% cell 3"),
        ([_MAKE, "m = make()\nx = 1", _TRAIN, "train()"], "x = 1"),
        (["m = await accelerator.prepare(1)\nx = 1", "m.backward()"], "    x = 1"),
        (["for k in (1, 2):\n  m = accelerator.prepare(1)\n  m.backward()"], ""),
        ([_MAKE, _TRAIN, "def main():\n  make()\n  train()", "main()"], ""),
        (["accelerator.device"], ""),
    ],
)  # fmt: skip
def test_resume_loads_behind_what_prepares(cells: list[str], before: str) -> None:
    """Behind the last statement that prepares, before the first that trains; else it is told."""
    script = exported("%dist_strategy tp", *(f"%%distributed\n{cell}" for cell in cells))

    lines = [line for line in script.text.split("\n") if line]
    places = [n for n, line in enumerate(lines) if "this_rank.load(arguments.resume)" in line]
    notes = [note for note in script.notes if note.startswith("--resume loads nothing by itself")]
    if before:
        assert lines[places[0] - 1].strip() == "if arguments.resume:"
        assert lines[places[0] + 1].startswith(before)
    assert (len(notes), f"# - {notes[0]}" in lines if notes else True) == (0 if before else 1, True)


@pytest.mark.parametrize(
    ("cell", "note"),
    [
        ("if x:\n    %dist_save new", "cell 1: %dist_save new stands inside Python code"),
        ("%dist_save {x}", "cell 1: %dist_save: {x} is a variable"),
    ],
)
def test_a_save_that_a_script_cannot_make_is_told(cell: str, note: str) -> None:
    """In the head and where it stood; what the notebook's own Python decides is not known."""
    script = exported(cell, "%%distributed\nx = 1")

    assert script.needs == ()
    assert script.notes[-1].startswith(note)
    assert f"\n# - {note}" in script.text


def test_ranks_and_hosts_that_are_typed_count() -> None:
    """For the command, and for the strategy's own degrees; what does not fit is refused."""
    cells = ("%dist_init", "%dist_strategy tp", "%%distributed\naccelerator.prepare(1)")
    script = exported(*cells, target=Target(ranks=16, nodes=2))

    assert script.setting.choice.degrees.tp == 16
    assert script.command.startswith("torchrun --nnodes 2 --nproc-per-node 8 ")
    assert script.command.endswith("--rdzv-endpoint FIRST_HOST:29500")
    with pytest.raises(OptionError, match="16 ranks cannot be spread evenly over 3 hosts"):
        exported(*cells, target=Target(ranks=16, nodes=3))


def test_seed_and_number_of_ranks_are_those_of_the_start() -> None:
    """The seed is set once the ranks have met; another one after cells have run is told."""
    script = exported("%dist_init --seed 3", "%%distributed\n1", "%dist_init --seed 3")

    assert "\ndevice = join_ranks()\nset_seed(3)\n" in script.text
    assert "torchrun --nproc-per-node 2 " in script.text
    assert script.notes[-1] == "cell 3: --seed 3 comes later; left out"
    assert exported("%dist_init", "%%distributed\n1").command == "torchrun --nproc-per-node 4"


@pytest.mark.parametrize(
    ("hosts", "command"),
    [
        ("ab", "torchrun --nnodes 2 --nproc-per-node 1 "),
        ("aaab", "torchrun --nnodes 2 --nproc-per-node RANKS_OF_THE_HOST "),
        ("aaaa", "torchrun --nproc-per-node 4"),
    ],
)
def test_ranks_of_several_hosts_are_started_on_each(hosts: str, command: str) -> None:
    """As many as run there; they meet on the first host."""
    cells = [NotebookCell(1, "%%distributed\n1")]
    reader = Reader(TransformerManager().transform_cell, _magic)

    script = export(cells, "a.ipynb", reader, Target(tuple(hosts)))

    assert script.command.startswith(command)
    assert f"#     {script.command} THIS_FILE\n" in script.text
    if len(set(hosts)) > 1:
        assert script.command.endswith("--rdzv-backend c10d --rdzv-endpoint a:29500")
        assert "--num_machines 2 --machine_rank NUMBER_OF_THE_HOST --main_proc" in script.text


def test_headings_go_along() -> None:
    """Text of the notebook is left in it, but for its headings."""
    text = "# One\n\ntext\n```\n# no heading\n```\n## Two"
    script = exported(NotebookCell(0, text, is_code=False), NotebookCell(1, "%%distributed\nx = 1"))

    assert "\n\n# # One\n\n# ## Two\n\n# %% cell 1: %%distributed\nx = 1\n" in script.text
    assert "no heading" not in script.text


def test_cells_that_failed_or_repeat_are_left_out() -> None:
    """Whoever read the cells knows; they are told."""
    failed = NotebookCell(2, "%%distributed\nx = 2", problem="failed")
    script = exported("%%distributed\nx = 1", failed)

    assert script.cells == (1,)
    assert script.notes == ("left out, they failed when they ran: cell 2",)


@pytest.mark.parametrize("cells", [[], ["x = 1", "%dist_init"], ["%%distributed\nx = = 1"], [""]])
def test_nothing_to_export_is_an_error(cells: list[str]) -> None:
    """It says what would be taken, and why each cell is not."""
    with pytest.raises(OptionError, match="There is nothing to export") as failed:
        exported(*cells)

    assert "%%distributed or %%rank" in str(failed.value)
    assert str(failed.value).count("\n") == (2 if len(cells) == 2 else int(cells not in ([], [""])))


def test_the_first_line_names_the_notebook_safely() -> None:
    """A file name with a line end in it stays inside the comment."""
    script = exported("%%distributed\n1", title="a\nimport os")

    assert script.text.split("\n")[0].startswith("# The distributed cells of a?import os, ")
