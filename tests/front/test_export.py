"""Scripts that %dist_export writes run under torchrun, accelerate and plain python."""

import json
import os
import re
from collections.abc import Sequence
from pathlib import Path

import pytest

import nbdist
from nbdist.commands.export import meaning
from nbdist.core.view import View
from nbdist.errors import OptionError
from nbdist.exporter.export import Magic
from nbdist.exporter.script import RankCall
from tests.support.kernel import Kernel, run_python
from tests.support.scripts import ABORTED, lines_of, started, unlabelled

_ROOT = Path(__file__).resolve().parents[2]
_TIMEOUT_S = 100.0
_START = ["%load_ext nbdist", "%dist_init -n 2"]
_TRAINING = [
    (
        "%%distributed\nfrom nbdist import shown\ntorch.manual_seed(3)\n"
        "x = torch.randn(32, 4)\ny = x.sum(1, keepdim=True)\n"
        "model = torch.nn.Linear(4, 1)\noptimizer = torch.optim.SGD(model.parameters(), lr=0.1)\n"
        "data = torch.utils.data.TensorDataset(x, y)\n"
        "loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True)"
    ),
    "%dist_mode all",
    "model, optimizer, loader = accelerator.prepare(model, optimizer, loader)",
    (
        "for a, b in loader:\n"
        "    loss = torch.nn.functional.mse_loss(model(a), b)\n"
        "    optimizer.zero_grad()\n"
        "    accelerator.backward(loss)\n"
        "    optimizer.step()\n"
        "    print('loss', shown(f'{loss.item():.7f}'))\n"
        "\n"
        "accelerator.reduce(loss.detach(), 'mean').item()"
    ),
    "%%local\nx = 1",
    "%%rank[1]\ntext = '''one\n  two'''\nif rank:\n\ttext += '\\tthree'\ntext, RANK if 0 else rank",
    (
        "import asyncio\nasync def twice(n):\n    await asyncio.sleep(0)\n    return 2 * n\n"
        "four = await twice(2)\nfour + rank"
    ),
    "t = torch.ones(1, device=device) * (rank + four)\ndist.all_reduce(t)\nt",
    "%%rank[0]\n(four,\n world_size)",
    "rank = 10 + rank",
    "%%rank[1]\nrank",
    "rank = dist.get_rank()",
    "%dist_mode local",
]
_ACCUMULATED = [
    "%dist_strategy ddp --bf16 --accumulate 2",
    """%%distributed
torch.manual_seed(rank)
x = torch.randn(16, 8)
torch.manual_seed(5)
model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
for k in range(8):
    with accelerator.accumulate(model):
        loss = (model(x) - x.sum(1, keepdim=True)).pow(2).mean()
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    print(f"{loss.item():.6f}")""",
]

# A model with blocks, for every strategy; losses of all data, which all ranks know.
_MODEL = """%%distributed
torch.manual_seed(3)
x = torch.randn(32, 8)
y = x.sin().sum(1, keepdim=True)

class Block(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up = torch.nn.Linear(8, 16)
        self.down = torch.nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))

class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = torch.nn.ModuleList([Block(), Block()])
        self.head = torch.nn.Linear(8, 1)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
data = torch.utils.data.TensorDataset(x, y)
loader = torch.utils.data.DataLoader(data, batch_size=8)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

def epoch():
    for a, b in loader:
        loss = torch.nn.functional.mse_loss(model(a), b)
        optimizer.zero_grad()
        accelerator.backward(loss)
        optimizer.step()
        print("loss", f"{accelerator.reduce(loss.detach(), 'mean').item():.7f}")"""
_EPOCH = "%%distributed\nepoch()"
_WEIGHTS = """%%distributed
values = accelerator.get_state_dict(model).values()
print("weights", float(sum(value.double().abs().sum() for value in values)))"""
# Under fsdp first, where it is saved.
_BEGIN = ["%dist_strategy fsdp", _MODEL, _EPOCH, "%dist_save first"]


@pytest.fixture(scope="module")
def ranks(_shared_kernel: Kernel) -> Kernel:
    """The shared kernel, for cells that run once for several tests."""
    return _shared_kernel


@pytest.fixture
def notebook(kernel: Kernel) -> Kernel:
    """The shared kernel as if no cell had run in it: with a history that begins here."""
    begins = (
        "shell = get_ipython()\nshell.history_manager.reset()\n"
        "getattr(shell.history_manager, 'exceptions', {}).clear()\nshell.execution_count = 0"
    )
    assert kernel.run(begins).status == "ok"
    return kernel


@pytest.fixture(scope="module")
def trained(ranks: Kernel) -> list[list[str]]:
    """What each rank printed when the training cells ran in the notebook."""
    return printed(ranks, _TRAINING)


def printed(kernel: Kernel, cells: Sequence[str]) -> list[list[str]]:
    """Each rank's own lines of cells run in a notebook."""
    lines: list[list[str]] = [[], []]
    for code in cells:
        cell = kernel.run(code, _TIMEOUT_S)
        assert cell.status == "ok", cell.visible
        for line in cell.text.splitlines():
            if line.startswith("elapsed: "):  # told below a cell, and no script's own
                continue
            label, _, text = line.partition("]")
            for rank in {"[0": (0,), "[1": (1,), "[0-1": (0, 1)}[label]:
                lines[rank].append(text.removeprefix(" "))
    return lines


def write(path: Path, cells: Sequence[str]) -> Path:
    """A notebook's file with these code cells."""
    code_cells = [{"cell_type": "code", "source": cell.splitlines(keepends=True)} for cell in cells]
    path.write_text(json.dumps({"nbformat": 4, "nbformat_minor": 5, "cells": code_cells}))
    return path


def exported(folder: Path, cells: Sequence[str]) -> View:
    """The script a.py of a notebook with these cells."""
    path = write(folder / "a.ipynb", cells)
    return nbdist.export(path, folder / "a.py", device="cpu", is_forced=True)


def launch(script: Path, *command: str) -> None:
    """Run a script where nbdist cannot be imported; its output is in files of the folder logs."""
    guard = script.parent / "without"
    guard.mkdir()
    (guard / "nbdist.py").write_text("raise ImportError('a script does without nbdist')")
    done = run_python(
        *command, str(script), cwd=script.parent, PYTHONPATH=str(guard), CUDA_VISIBLE_DEVICES="",
        TMPDIR=str(script.parent),  # its logs' folder would stay in the temporary one
    )  # fmt: skip

    has_ended = done.returncode == 0 or f"exitcode: {ABORTED})" in done.stderr
    assert has_ended, done.stderr[-4000:]


def torchrun(script: Path) -> list[list[str]]:
    """Each rank's lines of a script under torchrun."""
    logs = script.parent / "logs"
    launch(
        script, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2",
        "--redirects", "3", "--log-dir", str(logs),
    )  # fmt: skip
    return logged(logs)


def losses(lines: Sequence[str]) -> list[float]:
    """Those of a rank's lines that are losses."""
    return [float(line.split()[1]) for line in lines if line.startswith("loss ")]


def trained_through(kernel: Kernel, cells: Sequence[str]) -> list[list[float]]:
    """Each rank's losses of cells and verbs run in a notebook."""
    both: list[list[float]] = [[], []]
    for cell in cells:
        if cell.startswith("%%"):
            for rank, lines in enumerate(printed(kernel, [cell])):
                both[rank] += losses(lines)
        else:
            done = kernel.run(cell, _TIMEOUT_S)
            assert done.status == "ok", done.visible
    return both


@pytest.mark.parametrize(
    "others", [["pp"], pytest.param(["tp", "pp", "zero1"], marks=pytest.mark.parity)]
)
def test_a_script_trains_under_every_strategy_and_its_checkpoint_comes_back(
    ranks: Kernel, tmp_path: Path, others: list[str]
) -> None:
    """With nbdist, without IPython: the notebook's losses through switches and a load.

    What it saved under fsdp loads here under another; what was saved here, in a script on one rank.
    """
    ranks.run("%%distributed\nmodel = optimizer = loader = None")
    switches = [cell for name in others for cell in (f"%dist_strategy {name}", _EPOCH)]
    cells = [*_BEGIN, *switches, "%dist_load first", _EPOCH]
    wanted = trained_through(ranks, cells)
    shown = exported(tmp_path, [*_START, *cells])
    lines = lines_of(tmp_path / "a.py", without="IPython")

    # tp and pp share no batches out
    epochs = [2 if name == "zero1" else 4 for name in (*others, others[-1])]
    assert len(wanted[0]) == 2 + sum(epochs)
    for rank in (0, 1):
        assert losses(lines[rank]) == pytest.approx(wanted[rank], abs=1e-6)
    assert "fsdp, dp 2: Accelerate has no fsdp on the CPU" in shown.text
    assert [line for line in lines[0] if line.startswith("switched to")] == [
        f"switched to {name}, {'dp' if name == 'zero1' else name} 2" for name in others
    ]
    [again] = {tuple(each[-epochs[-1] :]) for each in wanted}
    back = trained_through(ranks, [f"%dist_load {tmp_path}/first", _EPOCH])
    assert back[0] == pytest.approx(again, abs=1e-6)

    # The script in a cell: the ranks that there are keep their group and their place.
    pasted = trained_through(ranks, [f"%%distributed\n{(tmp_path / 'a.py').read_text()}"])
    assert pasted[0] == pytest.approx(wanted[0], abs=1e-6)

    ranks.run(f"%dist_save {tmp_path}/here")
    [weights, _] = printed(ranks, [_WEIGHTS])
    exported(tmp_path, [*_START, _MODEL, _WEIGHTS, "%dist_save there"])
    [alone] = lines_of(tmp_path / "a.py", 1, "IPython", ("--resume", "here"))
    [loaded] = [line for line in alone if line.startswith("weights ")]
    assert float(loaded.split()[1]) == pytest.approx(float(weights[0].split()[1]))
    assert any("there saved at step" in line for line in alone)
    for cell in ("%%distributed\nmodel = optimizer = loader = None", "%dist_strategy ddp"):
        ranks.run(cell)


@pytest.mark.parity
@pytest.mark.parametrize(
    "strategy",
    ["fsdp --bf16", "tp", "pp", "zero1", "single", "fsdp1", "ddp --accumulate 2 --fused"],
)
def test_a_script_begins_under_the_strategy(ranks: Kernel, tmp_path: Path, strategy: str) -> None:
    """What nbdist.join is given trains as the notebook does under it."""
    cells = [f"%dist_strategy {strategy}", _MODEL, _EPOCH]
    ranks.run("%%distributed\nmodel = optimizer = loader = None")  # fsdp1 takes no live model
    wanted = trained_through(ranks, cells)
    exported(tmp_path, [*_START, *cells])
    lines = lines_of(tmp_path / "a.py", without="IPython")

    assert len(set(wanted[0])) == len(wanted[0])
    for rank in (0, 1):
        assert losses(lines[rank]) == pytest.approx(wanted[rank], abs=1e-6)


def logged(logs: Path) -> list[list[str]]:
    """Each rank's lines from torch's log files; in one stream two ranks' lines can mix.

    Without the rank that a shown value begins with.
    """
    paths = [next(logs.glob(f"*/attempt_0/{rank}/stdout.log")) for rank in (0, 1)]
    return [unlabelled(path.read_text()) for path in paths]


def test_a_script_prints_what_the_notebook_printed(
    trained: list[list[str]], tmp_path: Path
) -> None:
    """Two ranks give the same losses and values as the notebook's, in the same order."""
    exported(tmp_path, [*_START, *_TRAINING])

    assert lines_of(tmp_path / "a.py") == trained
    assert len(trained[0]) == 4 + len(["reduced", "four", "t", "(four, world_size)"])
    assert trained[1][-1] == "11"


@pytest.mark.parity
def test_torchrun_prints_what_the_notebook_printed(
    trained: list[list[str]], tmp_path: Path
) -> None:
    """The same under torchrun itself, which starts the two ranks."""
    exported(tmp_path, [*_START, *_TRAINING])

    assert torchrun(tmp_path / "a.py") == trained


@pytest.mark.parity
def test_precision_and_accumulation_are_the_strategys(ranks: Kernel, tmp_path: Path) -> None:
    """ddp --bf16 --accumulate 2 gives the script's Accelerator arguments, and the same losses."""
    try:
        wanted = printed(ranks, _ACCUMULATED)
    finally:
        ranks.run("%dist_strategy ddp")
    exported(tmp_path, [*_START, *_ACCUMULATED])

    assert len(set(wanted[0])) == 4  # a step after every second backward
    assert lines_of(tmp_path / "a.py") == wanted


@pytest.mark.parity
def test_accelerate_launch_prints_what_the_notebook_printed(
    trained: list[list[str]], tmp_path: Path
) -> None:
    """The same under accelerate launch, which starts two ranks on the CPU with --multi_gpu."""
    exported(tmp_path, [*_START, *_TRAINING])
    launch(
        tmp_path / "a.py", "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes",
        "2", "--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no",
        "--main_process_port", "0", "--tee", "3", "--log_dir", str(tmp_path / "logs"),
    )  # fmt: skip

    assert logged(tmp_path / "logs") == trained


def test_what_starts_the_script_is_written_with_it(ranks: Kernel, tmp_path: Path) -> None:
    """A batch script and a YAML by the writers of %dist_config; all files or none."""
    notebook = write(tmp_path / "n.ipynb", [*_START, *_TRAINING])
    line = f"%dist_export {tmp_path}/a.py --from {notebook} --slurm {tmp_path}/a.sbatch"
    shown = ranks.run(f"{line} --accelerate {tmp_path}/a.yaml").plain[0].splitlines()
    job = (tmp_path / "a.sbatch").read_text()

    assert shown[-2:] == [
        f"or: sbatch {tmp_path}/a.sbatch",
        f"or: accelerate launch --config_file {tmp_path}/a.yaml {tmp_path}/a.py",
    ]
    assert "--nproc-per-node 2 \\\n" in job
    assert f'\n  {tmp_path}/a.py "$@"\n' in job
    assert "num_processes: 2\n" in (tmp_path / "a.yaml").read_text()

    (tmp_path / "a.py").unlink()
    exists = ranks.run(line).failure.evalue
    write(notebook, [*_START, *_TRAINING, "%dist_save here"])
    refused = ranks.run(f"{line} --accelerate {tmp_path}/a.yaml --force").failure.evalue
    assert exists == f"{tmp_path}/a.sbatch exists. --force replaces it; or name another file."
    assert "which needs nbdist: %dist_save here (cell " in refused
    assert not (tmp_path / "a.py").exists()


def test_a_strategy_that_stands_in_no_cell_is_told(notebook: Kernel, tmp_path: Path) -> None:
    """One that was chosen on the panel, or from Python."""
    notebook.run("%%distributed\nx = 1")
    notebook.run("%dist_strategy zero1\n%dist_strategy ddp")
    notebook.run("import nbdist\nnbdist.session().strategy.switch('zero1')")
    shown = notebook.run(f"%dist_export {tmp_path}/a.py --from history").plain[0]
    notebook.run("%dist_strategy ddp")
    equal = notebook.run(f"%dist_export {tmp_path}/b.py --from history").plain[0]

    assert "the ranks train under zero1, dp 2 now; the script ends under ddp, dp 2, as " in shown
    assert "the ranks train under" not in equal


def test_without_a_launcher_it_is_one_rank(tmp_path: Path) -> None:
    """The script runs as the only rank, and its losses are one process's."""
    exported(tmp_path, [*_START, *_TRAINING])
    [printed] = lines_of(tmp_path / "a.py", ranks=1)

    assert len(losses(printed)) == 8  # 32 pieces in batches of 4
    assert printed[-3:] == ["4", "tensor([4.])", "(4, 1)"]


def test_the_first_notebook_runs_as_a_script(ranks: Kernel, tmp_path: Path) -> None:
    """notebooks/01_first_steps, with a fiftieth of its text, trains to the same losses."""
    cells = json.loads((_ROOT / "notebooks" / "01_first_steps.ipynb").read_text())["cells"]
    codes = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    codes = [
        code.replace("1_000_000", "20_000").replace("length=200", "length=20") for code in codes
    ]
    shown = exported(tmp_path, codes)
    wanted = printed(ranks, [code for code in codes if code.startswith("%%distributed")])

    def timeless(lines: Sequence[str]) -> list[str]:
        return [line for line in lines if "bytes a second" not in line]

    assert "9 of 12 code cells of a.ipynb" in shown.text
    assert "only a notebook needs: cells 1-2,12" in shown.text
    assert [timeless(lines) for lines in lines_of(tmp_path / "a.py")] == [
        timeless(lines) for lines in wanted
    ]


def test_a_script_that_fails_says_where(tmp_path: Path) -> None:
    """An error is an ordinary one of the script, with the user's line."""
    exported(tmp_path, ["%%distributed\nx = 1\nx / 0"])
    failed = started(tmp_path / "a.py", ranks=1)

    assert failed.codes == [1]
    assert re.search(r"show_result\(x / 0\)(.|\n)*ZeroDivisionError", failed.errors[0])


def test_the_notebooks_own_file_is_taken(notebook: Kernel, tmp_path: Path) -> None:
    """Where the front end says which file it is, cells come from there, and the rest is told."""
    for code in ("%%distributed\nsaved = 0", "%%distributed\nsaved = 1"):
        notebook.run(code)
    saved = write(tmp_path / "own.ipynb", ["%load_ext nbdist", "%%distributed\nsaved = 1"])
    notebook.run(f"__vsc_ipynb_file__ = {str(saved)!r}")
    shown = notebook.run(f"%dist_export {tmp_path}/own.py").plain[0]
    other = write(tmp_path / "other.ipynb", ["%load_ext nbdist", "%%distributed\nnever_ran = 1"])
    notebook.run(f"__vsc_ipynb_file__ = {str(other)!r}")
    aside = notebook.run(f"%dist_export {tmp_path}/history.py").plain[0]
    notebook.run("del __vsc_ipynb_file__")

    lines = shown.splitlines()
    assert lines[0] == f"{tmp_path}/own.py: 1 of 2 code cells of own.ipynb"
    assert lines[1] == f"read from {saved} as last saved"
    assert lines[2].startswith("1 that ran here are not in the file: older versions, or not")
    assert lines[-1] == f"run it: torchrun --nproc-per-node 2 {tmp_path}/own.py"
    assert "\nsaved = 1\n" in (tmp_path / "own.py").read_text()
    assert f"{other} was ignored: none of its cells ran here" in aside
    assert "never_ran" not in (tmp_path / "history.py").read_text()


def test_the_server_says_which_file_it_is(notebook: Kernel, tmp_path: Path) -> None:
    """JPY_SESSION_NAME names the file."""
    saved = write(tmp_path / "own.ipynb", ["%load_ext nbdist", "%%distributed\nserved = 1"])
    notebook.run("%%distributed\nserved = 1")
    notebook.run(f"import os; os.environ['JPY_SESSION_NAME'] = {str(saved)!r}")
    exported = notebook.run(f"%dist_export {tmp_path}/own.py")
    notebook.run("del os.environ['JPY_SESSION_NAME']")

    begin = f"{tmp_path}/own.py: 1 of 2 code cells of own.ipynb\nread from "
    assert exported.plain[0].startswith(begin)


def test_the_history_has_each_text_once(notebook: Kernel, tmp_path: Path) -> None:
    """Cells that ran again stand where they ran first; those that only failed are left out."""
    for code in ("%%distributed\nonce = 1", "%%distributed\nmore = once", "%%distributed\nonce = 1",
                 "%%distributed\nonce / 0", "%%distributed\nonce = = 1"):  # fmt: skip
        notebook.run(code)
    shown = notebook.run(f"%dist_export {tmp_path}/a.py --from history").plain[0]

    script = (tmp_path / "a.py").read_text()
    assert script.count("\nonce = 1\n") == 1
    assert script.index("\nonce = 1\n") < script.index("\nmore = once\n")
    assert "once / 0" not in script
    assert "left out, they failed when they ran: cell" in shown
    assert "left out, the same text as an earlier cell: cell" in shown


def test_a_file_is_not_replaced_unasked(ranks: Kernel, tmp_path: Path) -> None:
    """An existing file stays as it is without --force, and when the export fails with it."""
    path = tmp_path / "a.py"
    path.write_text("mine")
    notebook = write(tmp_path / "a.ipynb", ["%%distributed\nx = 1"])
    nothing = write(tmp_path / "b.ipynb", ["x = 1"])
    refused = ranks.run(f"%dist_export {path} --from {notebook}")
    failed = ranks.run(f"%dist_export {path} --from {nothing} --force")

    assert refused.failure.evalue == f"{path} exists. --force replaces it; or name another file."
    assert failed.error is not None
    assert path.read_text() == "mine"
    assert ranks.run(f"%dist_export {path} --from {notebook} --force").status == "ok"
    assert "x = 1" in path.read_text()
    assert {path.name for path in tmp_path.iterdir()} == {"a.py", "a.ipynb", "b.ipynb"}


@pytest.mark.parametrize(
    ("notebook", "script", "message"),
    [
        ("n.ipynb", "a.ipynb", "is not a script name"),
        ("n.ipynb", "missing/a.py", "There is no folder "),
        ("n.ipynb", "folder.py", "is a folder"),
        ("none.ipynb", "a.py", "none.ipynb cannot be read as a notebook"),
        ("folder.py", "a.py", "folder.py cannot be read as a notebook"),
        ("{", "a.py", "cannot be read as a notebook"),
        ("[]", "a.py", "is not a notebook of format 4"),
        ('{"nbformat": 3, "worksheets": []}', "a.py", "is not a notebook of format 4"),
        ('{"nbformat": 4, "cells": []}', "a.py", "export from the 0 code cells of n.ipynb"),
    ],
)
def test_what_cannot_be_written_or_read_is_told(
    tmp_path: Path, notebook: str, script: str, message: str
) -> None:
    """The message names the file, and nothing is written. A notebook by its name or content."""
    (tmp_path / "folder.py").mkdir()
    path = write(tmp_path / "n.ipynb", ["%%distributed\nx = 1"])
    if notebook[0] in "{[":
        path.write_text(notebook)
    else:
        path = tmp_path / notebook

    with pytest.raises(OptionError, match=re.escape(message)):
        nbdist.export(path, tmp_path / script, is_forced=True)
    assert {entry.name for entry in tmp_path.iterdir()} == {"folder.py", "n.ipynb"}


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_without_permission_is_told(tmp_path: Path) -> None:
    """The system's reason is part of the message."""
    notebook = write(tmp_path / "n.ipynb", ["%%distributed\nx = 1"])
    (tmp_path / "closed").mkdir(mode=0o500)

    with pytest.raises(OptionError, match=r"cannot be written: .*Permission denied"):
        nbdist.export(notebook, tmp_path / "closed" / "a.py")


def test_outside_of_a_notebook_one_has_to_be_named(tmp_path: Path) -> None:
    """Plain Python has no cells of its own."""
    with pytest.raises(OptionError, match=r"--from NOTEBOOK\.ipynb"):
        nbdist.export(None, tmp_path / "a.py")


def meaning_of(typed: str) -> Magic | None:
    name, _, line = typed.partition(" ")
    return meaning(name, line)


@pytest.mark.parametrize(
    ("typed", "wanted"),
    [
        ("dist_init -n 4 --seed 7 --auto", Magic(mode="all", world_size=4, seed=7)),
        ("dist_init", Magic()),
        ("dist_mode -e", Magic(mode="all")),
        ("dist_mode -d", Magic(mode="local")),
        ("dist_mode 0,1", Magic(mode="0,1")),
        ("dist_mode", Magic()),
        ("dist_shutdown", Magic(mode="local")),
        ("dist_detach 2h", Magic(mode="local")),
        ("dist_push x", Magic()),
        ("dist_panel", Magic()),
        ("dist_help", Magic()),
        ("dist_save a --async", Magic(call=RankCall("save", "a", (("asynchronous", True),)))),
        ("dist_load a --models-only", Magic(call=RankCall("load", "a", (("models_only", True),)))),
        (
            "dist_save a --adapters",
            Magic(call=RankCall("save", "a", (("adapters_only", True),))),
        ),
        (
            "dist_save w --export --adapter poet",
            Magic(call=RankCall("export_weights", "w", (("adapter", "poet"),))),
        ),
        (
            "dist_save w --export --model gpt",
            Magic(call=RankCall("export_weights", "w", (("model", "gpt"),))),
        ),
        ("dist_status --stacks", Magic()),
        ("dist_init --help", Magic()),
        ("distributed --ranks 0 --tabs --timeout 3", Magic(ranks="0", timeout_s=3)),
        ("distributed", Magic(ranks="all")),
        ("rank [0,2-3]", Magic(ranks="[0,2-3]")),
        ("matplotlib inline", None),
    ],
)
def test_magics_mean_what_they_do(typed: str, wanted: Magic | None) -> None:
    """Each line is read by the verb's own table of options."""
    assert meaning_of(typed) == wanted


@pytest.mark.parametrize(
    ("typed", "name"),
    [("dist_strategy fsdp --tp 2 --bf16", "tp"), ("dist_init -n 4 --strategy zero1", "zero1"),
     ("dist_strategy --dp 2 --pp 2", "pp"), ("dist_reset --strategy single", "single")],
)  # fmt: skip
def test_strategies_are_read_as_typed(typed: str, name: str) -> None:
    """Degrees need a number of ranks; it is the one typed, or the fewest that they fit."""
    read = meaning_of(typed)

    assert read is not None
    assert read.choice is not None
    assert read.choice.name == name


def test_a_file_that_is_applied_is_its_strategy(tmp_path: Path) -> None:
    """As the file has it at the export; one that is only checked is of the notebook alone."""
    file = tmp_path / "a.yaml"
    file.write_text(
        "distributed_type: FSDP\nmixed_precision: bf16\nfsdp_config: {fsdp_version: 2}\n"
    )
    applied, checked = (meaning_of(f"dist_config {file}{word}") for word in (" --apply", ""))
    file.unlink()
    gone = meaning_of(f"dist_config {file} --apply")

    assert applied is not None
    assert applied.choice is not None
    assert (applied.choice.name, applied.choice.options.precision) == ("fsdp", "bf16")
    assert checked == Magic()
    assert gone is not None
    assert "a.yaml" in gone.problem


@pytest.mark.parametrize("typed", ["dist_init --nope", "rank", "dist_strategy nope"])
def test_a_line_that_cannot_be_read_is_a_problem(typed: str) -> None:
    """The message is the one of the verb, in one line."""
    read = meaning_of(typed)

    assert read is not None
    assert read.problem
    assert "\n" not in read.problem
