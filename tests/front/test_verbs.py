"""Every verb and every option, typed in a real kernel with real ranks."""

import re

import pytest

from nbdist.commands import VERBS
from nbdist.core.ranks import parse_ranks
from tests.support.kernel import Kernel

_OPTION_MISTAKES = {
    "%dist_init --nope": "unrecognized arguments: --nope",
    "%dist_init 4": "unrecognized arguments: 4. Did you mean -n 4?",
    "%%rank\n1": "%%rank: no rank is named",
    "%%local --ranks 0\n1": "%%local takes no options",
    "%dist_init -n 0": "'0' is not a valid number of ranks",
    "%dist_init -n two": "'two' is not a valid number of ranks",
    "%dist_init --timeout x": "'x' is not a number",
    "%dist_init --timeout -1": "--timeout",
    "%dist_init --seed x": "invalid int value: 'x'",
    "%dist_init -n": "expected one argument",
    "%dist_init --hosts n1:0": "'n1:0' is not a host with its number of ranks",
    "%dist_init --profile local --hosts n1:1": "The profile local starts ranks on this machine",
    "%dist_init 'a": "Close the quotation",
    "%dist_mode 5": "rank 5 does not exist: 2 ranks run, 0-1",
    "%dist_mode somewhere": "Write them as 0, 0,2-3 or all",
    "%dist_mode -e -d": "choose one of all, local",
    "%dist_mode all -d": "choose one of all, local",
    "%dist_pull x --ranks 5": "rank 5 does not exist: 2 ranks run, 0-1",
    "%dist_sync --timeout 0": "0 is not above 0",
    "%dist_restart 1 --timeout x": "'x' is not a number",
    "%dist_restart --timeout 5 7": "rank 7 does not exist: 2 ranks run, 0-1",
    "%dist_export": "name one file, for example %dist_export train.py",
    "%dist_export a.py b.py": "name one file",
    "%dist_export a.txt": "a.txt is not a script name",
    "%dist_export a.py --slurm a.txt": "a.txt is no name for the sbatch form. Use one that ends",
    "%dist_export a.py --accelerate a.json": "Use one that ends with .yaml or .yml",
    "%dist_export a.py --slurm no/a.sbatch": "There is no folder",
    "%dist_export a.py --device tpu": "no --device tpu. Did you mean gpu? Choose one of gpu, cpu.",
    "%%distributed --nope\n1": "unrecognized arguments: --nope",
    "%%distributed --ranks 7\n1": "rank 7 does not exist: 2 ranks run, 0-1",
    "%%distributed --ranks 1-0\n1": "Write 0-1",
    "%%distributed --timeout 0\n1": "0 is not above 0",
    "%%distributed extra\n1": "unrecognized arguments: extra",
    "%%rank[5]\n1": "rank 5 does not exist: 2 ranks run, 0-1",
    "%%rank[-1]\n1": "Write them as 0, 0,2-3 or all",
    "%%rank []\n1": "Write them as 0, 0,2-3 or all",
    "%%rank [0] --ranks 1\n1": "Ranks are given twice",
    "%%rank[0] print(1)": "does not name ranks",
    "x = 1\n%%distributed\nrank": "%%distributed has to be the first line of its cell",
    "%dist_stratgy fsdp": "no magic %dist_stratgy. Did you mean %dist_strategy? %dist_help",
    "if True:\n    %dist_stats": "no magic %dist_stats. Did you mean %dist_status?",
    "%%distribued\n1": "no magic %%distribued. Did you mean %%distributed?",
    "%%distributed --rank 0\n1": "unrecognized arguments: --rank 0. Did you mean --ranks?",
    "%dist_strategy fsdp --shard ful": "no --shard ful. Did you mean full? Choose one of",
    "%dist_config --as acelerate --write a": "no --as acelerate. Did you mean accelerate?",
}
_RANKS = {
    "%%distributed\nrank": "[0] 0\n[1] 1\n",
    "%%distributed --ranks 1\nrank": "[1] 1\n",
    "%%distributed --ranks 0-1\nrank": "[0] 0\n[1] 1\n",
    "%%distributed --ranks=all\nrank": "[0] 0\n[1] 1\n",
    "%%rank[0]\nrank": "[0] 0\n",
    "%%rank[0,1]\nrank": "[0] 0\n[1] 1\n",
    "%%rank [1]\nrank": "[1] 1\n",
    "%%rank [0, 1]\nrank": "[0] 0\n[1] 1\n",
    "%%rank 1\nrank": "[1] 1\n",
    "%%rank --ranks 1\nrank": "[1] 1\n",
    "# a comment\n\n%%rank[1]\nrank": "[1] 1\n",
    "\n\n%%rank[1]\nrank": "[1] 1\n",
}
_NEEDS_RANKS = ["%%distributed\n1", "%%rank[0]\n1", "%dist_status", "%dist_mode all", "%sync",
                "%dist_push x", "%dist_pull x", "%dist_bench", "%dist_monitor",
                "%dist_check", "%dist_shutdown"]  # fmt: skip


def test_the_help_has_every_verb_once(kernel: Kernel) -> None:
    """By subject, with the line that its own help begins with."""
    lines = kernel.run("%dist_help").visible.splitlines()

    for verb in VERBS.values():
        assert [line.split(None, 1)[1] for line in lines if line.split()[:1] == [verb.typed]] == [
            verb.help
        ]
    assert "Ranks" in lines


@pytest.mark.parametrize("code", _RANKS)
def test_a_cell_runs_on_the_ranks_that_are_named(kernel: Kernel, code: str) -> None:
    """Each spelling of ranks runs the cell there and nowhere else."""
    cell = kernel.run(code)

    assert (cell.status, cell.visible) == ("ok", _RANKS[code])


@pytest.mark.parametrize("code", _OPTION_MISTAKES)
def test_a_wrong_option_is_an_ordinary_error(kernel: Kernel, code: str) -> None:
    """A mistake fails the cell with an OptionError that says what is wrong, and an error output."""
    cell = kernel.run(code)

    assert cell.status == "error"
    assert cell.failure.ename == "OptionError"
    assert _OPTION_MISTAKES[code] in cell.failure.evalue
    assert cell.failure.traceback.startswith("OptionError: ")


@pytest.mark.parametrize(
    "verb",
    ["%dist_init", "%dist_reset", "%dist_shutdown", "%dist_status", "%dist_doctor", "%dist_mode",
     "%dist_sync", "%dist_push", "%dist_pull", "%dist_bench", "%dist_monitor", "%dist_check",
     "%dist_plan", "%dist_export",
     "%%distributed", "%%rank"],
)  # fmt: skip
def test_help_shows_the_options_and_does_nothing(kernel: Kernel, verb: str) -> None:
    """--help shows usage and an example, and runs nothing, of a cell below it neither."""
    body = "\n1 / 0" if verb.startswith("%%") else ""
    cell = kernel.run(f"{verb} --help{body}")
    after = kernel.run("%%distributed\nrank")

    assert cell.status == "ok"
    assert cell.plain[0].startswith(f"usage: {verb}")
    assert "example: %" in cell.plain[0]
    assert after.text == "[0] 0\n[1] 1\n"


@pytest.mark.parametrize("code", ["%%distributed?", "%%rank?", "%dist_init?", "%%distributed??"])
def test_a_question_mark_asks_ipython_for_help(kernel: Kernel, code: str) -> None:
    """IPython's own help on a magic works for ours, cell magics included."""
    cell = kernel.run(code)

    assert (cell.status, cell.visible) == ("ok", "")


def test_mode_sets_where_plain_cells_run(kernel: Kernel) -> None:
    """all, ranks, local, -e and -d each route the next plain cell; without one nothing changes."""
    where = "import os; 'RANK' in os.environ and os.environ['RANK']"
    seen = {}
    for mode in ("all", "1", "-d", "-e", "local", "0", ""):
        shown = kernel.run(f"%dist_mode {mode}")
        seen[mode] = (shown.plain[0], kernel.run(where).visible)

    assert seen == {
        "all": ("plain cells run on ranks 0-1", "[0] '0'\n[1] '1'\n"),
        "1": ("plain cells run on rank 1", "[1] '1'\n"),
        "-d": ("plain cells run in the notebook", "False\n"),
        "-e": ("plain cells run on ranks 0-1", "[0] '0'\n[1] '1'\n"),
        "local": ("plain cells run in the notebook", "False\n"),
        "0": ("plain cells run on rank 0", "[0] '0'\n"),
        "": ("plain cells run on rank 0", "[0] '0'\n"),
    }


def test_our_magics_run_in_the_kernel_in_automatic_mode(kernel: Kernel) -> None:
    """A cell that begins with an nbdist magic is not sent to the ranks, comments above or not."""
    kernel.run("%dist_mode all")
    codes = ["%dist_status", "# first\n%sync", "%dist_mode", "%dist_debug", "%load_ext nbdist",
             "%reload_ext nbdist", "%%rank[0]\nrank"]  # fmt: skip
    cells = [kernel.run(code) for code in codes]
    plain = kernel.run("rank")

    assert [cell.status for cell in cells] == ["ok"] * len(codes)
    assert not any("[0-1]" in cell.visible for cell in cells)
    assert plain.text == "[0] 0\n[1] 1\n"


def test_magics_and_shell_commands_go_along_in_automatic_mode(kernel: Kernel) -> None:
    """%pwd, !echo and %%bash run where plain cells run."""
    kernel.run("%dist_mode all")

    assert kernel.run("!echo $RANK").text == "[0] 0\n[1] 1\n"
    assert kernel.run("%%bash\necho $RANK").text == "[0] 0\n[1] 1\n"
    assert kernel.run("%env RANK").text == "[0] '0'\n[1] '1'\n"


def test_pip_runs_once_per_host(kernel: Kernel) -> None:
    """On one rank, which says so, each time that it is called; the others wait for its end."""
    cell = kernel.run("%%distributed\nfor n in range(2):\n    %pip --version\nprint('after', rank)")
    alone = kernel.run("%%rank[1]\n%pip --version").text
    said = re.findall(r"\[\d\] %pip ran once for the 2 ranks of this host, on rank \d", cell.text)
    # Where each rank ran it once, equal lines are one with the label of both.
    versions = re.findall(r"^\[(.+)\] pip \d+\.\d+", cell.text, re.MULTILINE)

    assert cell.status == "ok"
    assert len(said) == sum(len(parse_ranks(label, 2)) for label in versions) == 2
    assert "restart the kernel" not in cell.visible
    assert {"[0] after 0", "[1] after 1"} <= set(cell.text.splitlines())
    assert alone.count("[1] pip ") == alone.count("on rank 1. A package that a rank has ") == 1


def test_local_runs_in_the_kernel_in_automatic_mode(kernel: Kernel) -> None:
    """%%local reaches the notebook's own variables, whatever the mode."""
    kernel.run("mine = 'notebook'")
    kernel.run("%dist_mode all")
    kernel.run("mine = 'rank'")
    cell = kernel.run("%%local\nmine")
    failed = kernel.run("%%local\n\nnope")

    assert cell.plain == ["'notebook'"]
    assert failed.failure.ename == "NameError"
    assert f"Cell In[{failed.execution_count}], line 3" in failed.failure.traceback


def test_an_error_of_a_local_cell_inside_a_magic_fails_the_cell(kernel: Kernel) -> None:
    """%%time above %%local does not turn an error into success."""
    cell = kernel.run("%%time\n%%local\n1 / 0")

    assert cell.status == "error"


def test_silent_requests_never_go_to_ranks(kernel: Kernel) -> None:
    """What a front end asks for itself runs in the kernel, in automatic mode too."""
    kernel.run("%dist_mode all")
    kernel.run("only_here = 1", silent=True)
    on_ranks = kernel.run("'only_here' in dir()")
    in_kernel = kernel.run("%%local\n'only_here' in dir()")

    assert on_ranks.text == "[0-1] False\n"
    assert in_kernel.plain == ["True"]


def test_cells_without_history_do_go_to_ranks(kernel: Kernel) -> None:
    """nbval runs every cell with store_history off; those are the user's."""
    kernel.run("%dist_mode all")
    cell = kernel.run("rank", store_history=False)

    assert cell.text == "[0] 0\n[1] 1\n"


def test_automatic_mode_holds_without_autoawait(kernel: Kernel) -> None:
    """With %autoawait off plain cells still run on the ranks, and errors name their lines."""
    kernel.run("%autoawait off")
    kernel.run("%dist_mode all")
    cell = kernel.run("rank")
    failed = kernel.run("x = 1\n1 / 0")
    kernel.run("%dist_mode local")
    magic = kernel.run("%%rank[1]\nrank")
    kernel.run("%autoawait on")

    assert cell.text == "[0] 0\n[1] 1\n"
    assert f"Cell In[{failed.execution_count}], line 2" in failed.failure.traceback
    assert magic.text == "[1] 1\n"


def test_a_timeout_interrupts_the_ranks_and_keeps_their_variables(kernel: Kernel) -> None:
    """%%distributed --timeout ends a cell that is still running, and says so."""
    kernel.run("%%distributed\nkept = rank")
    cell = kernel.run("%%distributed --timeout 0.3\nimport time; time.sleep(60)")
    after = kernel.run("%%distributed\nkept")

    assert cell.failure.ename == "CellTimeout"
    assert "longer than --timeout 0.3" in cell.failure.evalue
    assert "ranks 0-1 are back, variables kept" in cell.failure.evalue
    assert "\n[0-1] at line 2 of cell [" in cell.failure.evalue
    assert after.text == "[0] 0\n[1] 1\n"


def test_a_second_init_says_what_runs(kernel: Kernel) -> None:
    """%dist_init again, with the same options, shows the running ranks and starts none."""
    before = kernel.run("%%distributed\nimport os; os.getpid()")
    cells = [kernel.run(code) for code in ("%dist_init -n 2", "%dist_init")]
    after = kernel.run("%%distributed\nos.getpid()")

    assert all("ranks 0-1 are already running" in cell.plain[0] for cell in cells)
    assert "%dist_reset starts afresh" in cells[0].plain[0]
    assert after.text == before.text


@pytest.mark.parametrize(
    "code",
    [
        "%dist_init -n 3",
        "%dist_init --seed 7",
        "%dist_init --gpus none",
        "%dist_init --profile other",
        "import nbdist; nbdist.start(2)",
    ],
)
def test_a_second_start_with_other_options_is_refused(kernel: Kernel, code: str) -> None:
    """Other ranks than the running ones are not silently left out; from Python never."""
    cell = kernel.run(code)

    assert cell.failure.ename == "AlreadyRunning"
    assert "ranks 0-1 are already running" in cell.failure.evalue


def test_loading_twice_is_harmless(kernel: Kernel) -> None:
    """%load_ext and %reload_ext again change neither ranks nor routing."""
    for code in ("%load_ext nbdist", "%reload_ext nbdist", "%unload_ext nbdist",
                 "%load_ext nbdist"):  # fmt: skip
        assert kernel.run(code).status == "ok"
    routes = kernel.run(
        "[t.__module__ for t in get_ipython().input_transformers_cleanup]"
        ".count('nbdist.frontend.input_transformer')"
    )
    cell = kernel.run("%%distributed\nrank")

    assert routes.plain == ["1"]
    assert cell.text == "[0] 0\n[1] 1\n"


def test_a_string_with_our_magic_in_it_is_left_alone(kernel: Kernel) -> None:
    """Only a cell magic below code is refused, not text that looks like one."""
    cell = kernel.run('text = """\n%%distributed\n"""\ntext')

    assert cell.plain == ["'\\n%%distributed\\n'"]


def test_verbs_before_a_start_name_it(bare_kernel: Kernel) -> None:
    bare_kernel.run("%load_ext nbdist")
    for code in (*_NEEDS_RANKS, "%dist_plan net --check"):
        bare_kernel.run(code).check_failure("NotRunning", "%dist_init -n 2")


def test_a_whole_session_from_nothing_to_nothing(without_ranks: Kernel) -> None:
    """--auto, --seed, reset and shutdown do what they say; then verbs name %dist_init again."""
    kernel = without_ranks
    started = kernel.run("%dist_init --num-processes 2 --seed 3 --auto", 120)
    first = kernel.run("torch.rand(1).item()")
    kernel.run("left = 1")
    reset = kernel.run("%dist_reset --timeout 110", 120)
    gone = kernel.run("'left' in dir()")
    again = kernel.run("torch.rand(1).item()")
    smaller = kernel.run("%dist_reset -n 1", 120)
    alone = kernel.run("rank, world_size")
    stopped = kernel.run("%dist_shutdown")
    local = kernel.run("'rank' in dir()")
    late = [kernel.run(code) for code in _NEEDS_RANKS]

    for cell in late:
        cell.check_failure("NotRunning", "%dist_init -n 2")
    assert re.match(r"2 ranks on 1 host, ready in \d", started.plain[0])
    assert "Gloo on the CPU" in started.plain[0]
    assert first.text.startswith("[0-1] 0.")
    assert reset.plain[0].startswith("2 ranks")
    assert gone.text == "[0-1] False\n"
    assert again.text == first.text
    assert smaller.plain[0].startswith("1 rank on 1 host")
    assert alone.text == "[0] (0, 1)\n"
    assert stopped.plain == ["rank 0 stopped"]
    assert local.plain == ["False"]
