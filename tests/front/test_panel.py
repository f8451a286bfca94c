"""The panel in a real kernel with two real ranks: its buttons pressed from other threads."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.cells import Cell
from tests.support.kernel import Kernel, notebook_env

_HELP = """
import dataclasses, threading, time, nbdist
from nbdist.commands import VERBS
from nbdist.commands.panel import PANEL
def run_instead(doing):
    of_apply = dataclasses.replace(VERBS['dist_strategy'], run=doing)
    PANEL.verbs = {**VERBS, 'dist_strategy': of_apply}
def press(name, **chosen):
    for word, value in chosen.items(): getattr(PANEL._widgets, word).value = value
    pressing = threading.Thread(target=PANEL.press, args=(name,))
    pressing.start(); pressing.join()
def log(): return [entry.text for entry in PANEL.job_queue.log]
def until(is_true, limit_s=30):
    end_s = time.monotonic() + limit_s
    while not is_true():
        if time.monotonic() > end_s: raise TimeoutError("\\n".join(log()))
        time.sleep(0.02)
"""
_PREPARED = """%%distributed
torch.manual_seed(0)
panel_net = torch.nn.Linear(8, 8)
panel_optimizer = torch.optim.AdamW(panel_net.parameters())
panel_net, panel_optimizer = accelerator.prepare(panel_net, panel_optimizer)
"""
_GONE = "%%distributed\nimport gc\ndel panel_net, panel_optimizer\ngc.collect(); None"
# As somebody at the panel would, who sees what runs: at no time, but when that does. A cell sleeps
# inside a function: an interrupt between two statements of a cell hits IPython, which may lose it.
_LATER = """
def later(*names, when, **chosen):
    def pressing():
        until(when)
        for name in names: press(name, **chosen)
    threading.Thread(target=pressing).start()
asleep = threading.Event()
def sleep():
    asleep.set()
    try: time.sleep(600)
    finally: asleep.clear()
def submitted(): return bool(nbdist.session().busy.running())
def between_cells(): return not PANEL.scheduler.cell
"""
# A rank that a signal has stopped begins no cell, and takes no interrupt.
_STOPPED = """
import os, signal
def stop_ranks(number):
    for pid in panel_pids: os.kill(pid, number)
said = nbdist.session().run('import os; print(os.getpid())').ranks
panel_pids = [int(one.text.split()[-1]) for one in said]
"""


@pytest.fixture(scope="module")
def _helped(_shared_kernel: Kernel) -> Iterator[None]:
    """A panel for all tests here, which is closed at the end."""
    _shared_kernel.run(f"{_HELP}{_LATER}")
    yield
    _shared_kernel.run("PANEL.close()")


@pytest.fixture
def panel(kernel: Kernel, _helped: None) -> Iterator[Kernel]:
    """The shared kernel with a panel that says nothing yet."""
    shown = kernel.run("if PANEL._widgets is None: PANEL.show()")
    assert shown.status == "ok", shown.visible
    yield kernel
    kernel.run("PANEL.job_queue._log.clear(); PANEL._question = None")
    kernel.run("%dist_strategy ddp")


@pytest.fixture
def prepared(panel: Kernel) -> Iterator[Kernel]:
    """The same with a prepared model."""
    panel.run(_PREPARED)
    yield panel
    panel.run(_GONE)


def said(kernel: Kernel) -> str:
    """The log."""
    return kernel.run("print(*log(), sep='\\n')").text


def wait_for(path: Path) -> None:
    """Until a cell has made this file."""
    end_s = time.monotonic() + 30
    while not path.exists():
        assert time.monotonic() < end_s
        time.sleep(0.02)


def run_until(look: Callable[[], str], text: str) -> str:
    """What a look shows once the text is in it: the panel asks and acts between two cells."""
    for _ in range(100):
        shown = look()
        if text in shown:
            break
    return shown


def is_interrupted(cell: Cell) -> bool:
    return cell.error is not None and cell.error.ename == "KeyboardInterrupt"


def test_widgets_stand_over_a_picture_of_the_same(panel: Kernel) -> None:
    """The first output has nothing but the widget and a fixed text; the second has no widget."""
    outputs = panel.run("%dist_panel").outputs
    bundles = [data["data"] for data in outputs if data["output_type"] == "display_data"]
    assert [sorted(data) for data in bundles] == [
        ["application/vnd.jupyter.widget-view+json", "text/plain"],
        ["text/html", "text/plain"],
    ]
    assert bundles[0]["text/plain"] == "nbdist panel"
    assert bundles[1]["text/plain"].startswith("2 ranks on 1 host, gloo; strategy ddp, dp 2\n")


def test_it_is_displayed_by_its_python_call(panel: Kernel) -> None:
    """`session.panel()` as the last expression of a cell."""
    cell = panel.run("nbdist.session().panel()")

    assert "nbdist panel" in cell.visible
    assert "2 ranks on 1 host" in cell.visible


def test_apply_switches_the_live_model_between_cells(prepared: Kernel) -> None:
    """Asked for in a cell, done at its end, before the next one begins."""
    pressing, after = prepared.run_all(
        [
            "press('apply', strategy='fsdp'); print(*log(), sep='\\n')",
            "%%distributed\nprint(type(panel_net.weight).__name__)",
        ]
    )
    log = said(prepared)
    models = prepared.run(
        "until(lambda: PANEL._prepared.models); print(PANEL._prepared.models)"
    ).text

    assert "%dist_strategy fsdp is queued until cell [" in pressing.text
    assert "begins" not in pressing.text
    assert after.text == "[0-1] DTensor\n"
    assert "ddp, dp 2 -> fsdp, dp 2" in log
    assert "PreparedModel(name='panel_net', n_parameters=72, parameter_bytes=288)" in models


_LANGUAGE = """%%distributed
from transformers import AutoModelForCausalLM, LlamaConfig
panel_lm = AutoModelForCausalLM.from_config(LlamaConfig(
    hidden_size=128, num_attention_heads=4, num_key_value_heads=2, intermediate_size=320,
    vocab_size=200, num_hidden_layers=3))
panel_opt = torch.optim.AdamW(panel_lm.parameters(), lr=1e-3)
panel_tokens = torch.utils.data.DataLoader(torch.arange(1024).view(32, 32) % 200, batch_size=8)
panel_lm, panel_opt, panel_tokens = accelerator.prepare(panel_lm, panel_opt, panel_tokens)
"""
_BOTH = """
from nbdist.panel.plan import Limit, planned_memory
from nbdist.strategy.choose import choose
def both(name, **batch):
    row = nbdist.plan('panel_lm', engine='formulas', strategy=name, **batch).plan.rows[0]
    return row.memory, planned_memory(choose(name, {}, 2), PANEL._prepared.sketches, Limit(80e9))
"""


def test_the_picker_shows_what_dist_plan_counts(panel: Kernel) -> None:
    """Of a live transformer, with the batch that is assumed there too, then with the one seen."""
    shown = "PANEL._widgets._plan.value"
    panel.run(_LANGUAGE, 120)
    assumed = panel.run(
        f"{_BOTH}until(lambda: 'in a step up to' in {shown})\n"
        f"print([m == c for m, c in map(both, ('ddp', 'fsdp'))], both('fsdp')[1].activations)\n"
        f"print({shown})"
    ).text
    panel.run("%%distributed\nfor tokens in panel_tokens: pass")
    seen = panel.run(
        f"until(lambda: 'from the data loader' in {shown})\n"
        f"m, c = both('fsdp', batch=8, seq=32); print(m == c); print({shown})"
    ).text
    panel.run("%%distributed\nimport gc\ndel panel_lm, panel_opt, panel_tokens; gc.collect(); None")

    assert assumed.startswith("[True, True] "), assumed
    assert "assumed: batch 1 x 2,048 tokens" in assumed
    assert "np-verdict" in assumed
    assert seen.startswith("True\n"), seen
    assert "batch 8 x 32 tokens, from the data loader" in seen


def test_apply_between_cells_happens_at_once(panel: Kernel) -> None:
    """Nothing is prepared: the choice is for models to come."""
    panel.run("later('apply', when=between_cells, strategy='zero1')")
    look = "time.sleep(0.05); print(PANEL.state().strategy)"

    assert run_until(lambda: panel.run(look).text, "zero1") == "zero1, dp 2\n"
    assert "No model is prepared yet" in said(panel)


def test_the_effective_batch_is_shown(prepared: Kernel) -> None:
    """Of the loop that ran last, on all ranks and over the accumulated backwards."""
    prepared.run(
        "%%distributed\npanel_loader = accelerator.prepare(\n"
        "    torch.utils.data.DataLoader(torch.zeros(24, 8), batch_size=3))\n"
        "for batch in panel_loader: pass"
    )
    switched = prepared.run("%dist_strategy ddp --accumulate 2")
    look = "time.sleep(0.05); print(PANEL.state().batch)"
    shown = run_until(lambda: prepared.run(look).text, "accumulated")
    prepared.run("%%distributed\ndel panel_loader, batch")

    assert switched.status == "ok", switched.visible
    assert shown == "effective batch 12: 3 samples x dp 2 x 2 accumulated\n"


def test_apply_that_ranks_refuse_is_told_and_changes_nothing(prepared: Kernel) -> None:
    """A strategy that the model cannot have: the error of %dist_strategy stands in the log."""
    prepared.run("press('apply', strategy='pp')")
    log = said(prepared)
    current = prepared.run("print(nbdist.session().strategy.current().name)").text

    shown = prepared.run(
        "until(lambda: not PANEL._plan().is_possible); print(PANEL._plan().text)\n"
        "PANEL.press('apply'); print(log()[-1]); press('status', strategy='fsdp')\n"
        "print(PANEL._plan().is_possible)"
    ).text

    assert "%dist_strategy pp (" in log
    assert "OptionError: " in log
    assert current == "ddp\n"
    # By now a rank has said so itself, and Apply is not offered.
    assert "has no list of blocks" in shown
    assert "Apply: the chosen strategy is not possible with these ranks and models" in shown
    assert shown.endswith("True\n")


def test_a_stop_while_something_is_queued_takes_it_back(panel: Kernel) -> None:
    """The ranks that it was for are gone; the panel goes on with new ones."""
    panel.run("press('apply', strategy='fsdp'); get_ipython().run_line_magic('dist_shutdown', '')")
    log = said(panel)
    gone = panel.run("print(PANEL.state().title); press('status'); print(log()[-1])").text
    panel.run("press('start')", 120)
    back = panel.run("print(PANEL.state().title)")

    assert "%dist_strategy fsdp is removed from the queue: its ranks were stopped" in log
    assert gone == ("no ranks are running: %dist_init starts some\nStatus: no ranks are running\n")
    assert back.text == "2 ranks on 1 host, gloo\n"


def test_interrupt_ends_a_cell_on_ranks_also_from_the_blocking_magic(panel: Kernel) -> None:
    """Inside another magic a cell blocks the kernel's main thread; not begun on ranks, or just."""
    sleeping = "%%distributed\nimport time\ntime.sleep(600)"
    panel.run("later('interrupt', when=submitted)")
    blocked = panel.run(f"get_ipython().run_cell({sleeping!r}).raise_error()")
    panel.run("later('interrupt', when=submitted)")
    typed = panel.run(sleeping)

    for cell in (blocked, typed):
        assert is_interrupted(cell)
    assert said(panel).count("interrupting cell [") == 2


def test_interrupt_is_not_lost_on_ranks_that_have_not_begun_the_cell(panel: Kernel) -> None:
    """The notebook is given back, and the cell ends when a rank begins it, late as that may be."""
    panel.run(
        f"{_STOPPED}stop_ranks(signal.SIGSTOP); later('interrupt', 'interrupt', when=submitted)"
    )
    given_back = panel.run("%%distributed\nimport time\ntime.sleep(600)")
    running = panel.run("later('interrupt', when=asleep.is_set); sleep()")
    left = panel.run("stop_ranks(signal.SIGCONT); until(lambda: not nbdist.session().busy_ranks)")
    log = said(panel)

    assert is_interrupted(given_back)
    assert is_interrupted(running)
    assert left.status == "ok", left.visible
    assert re.search(r"interrupting cell \[\d+\]; ranks 0-1 have not come back from cell \[", log)


def test_an_interrupt_takes_back_what_waits_for_the_cell(
    panel: Kernel, shared_folder: Path
) -> None:
    """The panel's and the notebook's own; what is asked for afterwards is done, and a restart."""
    by_panel = panel.run("press('apply', strategy='fsdp'); press('checkpoint'); press('interrupt')")
    waiting = shared_folder / "waiting"
    running = panel.start(
        f"def wait():\n    open({str(waiting)!r}, 'w').close(); time.sleep(600)\n"
        "press('apply', strategy='zero1'); press('restart')\n"
        "wait()"
    )
    wait_for(waiting)
    panel.interrupt()
    by_notebook = panel.finish(running)
    waiting.unlink()
    log = said(panel)
    strategy = panel.run("print(nbdist.session().strategy.current().name)").text

    assert is_interrupted(by_panel)
    assert is_interrupted(by_notebook)
    for typed in ("%dist_strategy fsdp", "%dist_save checkpoints/TIME", "%dist_strategy zero1"):
        assert f"{typed} is removed from the queue: what it waited for was interrupted" in log
    assert "%dist_restart begins" in log
    assert strategy == "ddp\n"


def test_an_interrupt_between_two_statements_takes_back_as_well(panel: Kernel) -> None:
    """IPython notes it as an error before the cell's execution."""
    between = (
        "shell = get_ipython(); run = shell.run_code\n"
        "async def interrupted(*args, **given):\n"
        "    shell.run_code = run\n"
        "    raise KeyboardInterrupt\n"
        "press('apply', strategy='fsdp'); shell.run_code = interrupted\n"
        "print('not reached')"
    )
    cell = panel.run(between)

    assert is_interrupted(cell)
    assert "not reached" not in cell.visible
    log = said(panel)
    assert "%dist_strategy fsdp is removed from the queue: what it waited for" in log, log


def test_interrupt_is_not_lost_when_a_job_has_just_begun(panel: Kernel) -> None:
    """Between two cells the kernel ignores SIGINT; what was pressed counts once the job acts."""
    panel.run(
        "take = PANEL.job_queue.take; run_instead(lambda _: time.sleep(600))\n"
        "def taking():\n"
        "    job = take()\n"
        "    if job is not None: press('interrupt')\n"
        "    return job\n"
        "PANEL.job_queue.take = taking; later('apply', when=between_cells, strategy='fsdp')"
    )
    log = run_until(lambda: said(panel), ": interrupted")
    panel.run("PANEL.verbs, PANEL.job_queue.take = VERBS, take")

    assert "interrupting %dist_strategy fsdp" in log
    assert log.splitlines()[-1].endswith(": interrupted")


def test_the_notebooks_stop_button_ends_what_the_panel_does(
    panel: Kernel, shared_folder: Path
) -> None:
    """Between cells, where the kernel would ignore SIGINT, or at a cell's very end."""
    asking = panel.start(
        "import pathlib\n"
        "def sleeping(_): pathlib.Path('acting').touch(); time.sleep(600)\n"
        "run_instead(sleeping)\n"
        "later('apply', when=between_cells, strategy='fsdp')"
    )
    wait_for(shared_folder / "acting")
    panel.interrupt()
    asked = panel.finish(asking)
    panel.run("PANEL.verbs = VERBS; pathlib.Path('acting').unlink()")

    assert asked.status == "ok", asked.visible
    assert said(panel).splitlines()[-1].endswith(": interrupted")


def test_the_cell_that_shows_the_panel_counts_as_running(panel: Kernel) -> None:
    """What is asked for in it waits for its end, and Interrupt ends it."""
    panel.run("PANEL.close(); PANEL.job_queue._log.clear()")
    cell = panel.run(
        "PANEL.show(); press('apply', strategy='fsdp'); later('interrupt', when=asleep.is_set)\n"
        "sleep()"
    )
    log = said(panel)

    assert is_interrupted(cell)
    assert "%dist_strategy fsdp is queued until cell [" in log
    assert "interrupting cell [" in log


def test_an_error_of_a_button_stands_in_the_log(panel: Kernel) -> None:
    """With its traceback; the panel goes on."""
    panel.run(
        "PANEL.scheduler.ask, ask = None, PANEL.scheduler.ask\npress('apply', strategy='fsdp')"
    )
    panel.run("PANEL.scheduler.ask = ask")
    log = said(panel)

    assert "TypeError: 'NoneType' object is not callable" in log
    assert "panel.py" in log


def test_the_next_cell_is_profiled_and_no_other(panel: Kernel) -> None:
    """As %%dist_profile would; its trace can be saved then."""
    panel.run("press('save'); press('profile')")
    recorded = panel.run("%%distributed\n(torch.ones(64, 64) @ torch.ones(64, 64)).sum().item()")
    plain = panel.run("%%distributed\n1 + 1")
    panel.run("press('save')")
    log = said(panel)

    assert "Save trace: nothing has been recorded" in log
    assert "trace of ranks 0-1" in recorded.visible
    assert "trace of" not in plain.visible
    assert "written: traces/rank0.json.gz" in log


def test_a_checkpoint_is_saved(prepared: Kernel, shared_folder: Path) -> None:
    """Into a folder of its own, which loads."""
    prepared.run("press('checkpoint')", 60)
    log = said(prepared)
    [path] = (shared_folder / "checkpoints").iterdir()
    loaded = prepared.run(f"%dist_load checkpoints/{path.name}")

    assert f"checkpoints/{path.name} saved at step 0" in log
    assert loaded.status == "ok", loaded.visible


def test_compare_runs_the_last_cell_under_both_strategies(prepared: Kernel) -> None:
    """It says before what it costs, and puts the state of before back."""
    prepared.run(
        "%%distributed\nloss = panel_net(torch.ones(4, 8)).sum()\naccelerator.backward(loss)\n"
        "panel_optimizer.step()\npanel_optimizer.zero_grad()"
    )
    asked = prepared.run("press('compare', strategy='fsdp'); print(PANEL._question)")
    prepared.run("press('confirm')", 120)
    details = prepared.run("print(PANEL._widgets._detail.value)").text
    log = said(prepared)
    current = prepared.run("print(nbdist.session().strategy.current().name)").text

    assert re.search(r"It took [\d.]+ m?s: expect [\d.]+ m?s or more for each", asked.text)
    assert "preset=('fsdp',)" in asked.text
    assert "%dist_compare ddp fsdp -- (the last cell)" in log
    assert "done, see below" in log
    assert "<td" in details
    assert "fsdp" in details
    assert current == "ddp\n"


def test_compare_knows_cells_of_before_the_panel_and_offers_what_fits(panel: Kernel) -> None:
    """The current strategy is chosen: the others that fit are, of which one is left."""
    panel.run("PANEL.close()")
    panel.run("%%distributed\ntorch.ones(4).sum()")
    panel.run("%dist_panel")
    asked = panel.run(
        "press('compare', strategy='ddp'); q = PANEL._question; print(q.preset == q.choices, q)\n"
        "print(PANEL._widgets.compared.value == q.choices)"
    )
    none = panel.run(
        "PANEL._widgets.compared.value = (); press('confirm'); print(log()[-1])\n"
        "press('dismiss'); print(PANEL._question, PANEL._widgets._ask.layout.display)"
    )

    assert asked.text.startswith("True Question(name='compare', text='Compare runs cell ["), asked
    assert "choices=('fsdp', 'zero1', " in asked.text
    assert "'ddp'" not in asked.text
    assert asked.text.endswith("True\n")
    assert none.text == "Compare: choose at least one strategy to compare with\nNone none\n"


def test_a_rank_that_lives_is_restarted_only_if_that_is_confirmed(panel: Kernel) -> None:
    """Its variables would be lost; one that has ended has none."""
    panel.run(
        "from nbdist.core.view import View\n"
        "restart = dataclasses.replace(VERBS['dist_restart'], run=lambda _: View('restarted'))\n"
        "PANEL.verbs = {**VERBS, 'dist_restart': restart}"
    )
    asked = panel.run("press('restart', rank=1); print(PANEL._question.text); print(log())")
    panel.run("press('confirm', rank=0)")  # the question was about rank 1
    log = said(panel)
    panel.run("PANEL.verbs = VERBS")

    assert "Rank 1 is alive (idle). A restart ends its process" in asked.text
    assert "%dist_restart" not in asked.text
    assert "%dist_restart 1 begins" in log
    assert log.splitlines()[-1].endswith(": restarted")


def test_a_progress_bar_of_the_running_cell_is_on_the_panel(panel: Kernel) -> None:
    """With its rank, while it is drawn, and no longer; a slower rank's is told beside it."""
    panel.run(
        "import re; seen = []\n"
        "def watch():\n"
        "    until(lambda: re.search('50%.*rank 1: 25%', PANEL.state().bar))\n"
        "    seen.append(PANEL.state().bar); PANEL.press('interrupt')\n"
        "threading.Thread(target=watch).start()"
    )
    panel.run(
        "%%distributed\nimport time\nfrom tqdm import tqdm\n"
        "for k in tqdm(range(4)): time.sleep(600 if k == 2 - rank else 0.3)"
    )
    text = panel.run("print(seen, [PANEL.state().bar])").text

    assert re.match(r"\['\[0\]  50%\|.*\(rank 1: 25%\)'\]", text)
    assert text.endswith("] ['']\n")


def test_a_closed_panel_does_nothing_and_comes_back(panel: Kernel) -> None:
    """A click that was under way finds no widgets; %dist_panel shows a new panel."""
    panel.run("press('apply', strategy='fsdp'); PANEL.close(); PANEL.press('apply')")
    log = said(panel)
    strategy = panel.run("print(nbdist.session().strategy.current().name)").text
    again = panel.run("%dist_panel")

    assert "%dist_strategy fsdp is removed from the queue: the panel was closed" in log
    assert strategy == "ddp\n"
    assert "nbdist panel" in again.visible


def test_without_ipywidgets_it_is_a_picture_that_says_so(bare_kernel: Kernel) -> None:
    """With the reason; it needs no ranks to be shown."""
    cell = bare_kernel.run("import sys\nsys.modules['ipywidgets'] = None\n%load_ext nbdist")
    cell = bare_kernel.run("%dist_panel")

    assert cell.status == "ok"
    assert "no ranks are running: %dist_init starts some" in cell.visible
    assert "ipywidgets cannot be imported" in cell.visible


def test_in_a_terminal_it_is_text() -> None:
    """IPython's, which has no widgets; a button can be pressed there as well."""
    code = (
        "%load_ext nbdist\n%dist_panel\n"
        "from nbdist.commands.panel import PANEL\nPANEL.press('profile')\n%dist_panel"
    )
    command = [sys.executable, "-m", "IPython", "--colors=NoColor", "--no-banner", "-c", code]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=60, check=False, env=notebook_env()
    )

    assert done.stdout.count("no ranks are running: %dist_init starts some") == 2, done.stderr
    assert done.stdout.count("Profile next cell: no ranks are running") == 1
    assert "widget" not in done.stdout


def test_a_page_made_of_it_shows_the_picture(panel: Kernel) -> None:
    """nbconvert's, of what a notebook stores; nothing in it hides the picture there."""
    import nbformat  # each worker collects this file, and one needs these three seconds
    from nbconvert import HTMLExporter

    outputs = panel.run("%dist_panel").outputs
    cell = nbformat.v4.new_code_cell(
        "%dist_panel", outputs=[nbformat.from_dict(output) for output in outputs]
    )
    page, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))

    assert page.count("2 ranks on 1 host, gloo") == 1
    assert "display: none }\n</style>" not in page


def test_the_next_cell_is_recorded_as_memory(panel: Kernel) -> None:
    """As %%dist_memory would; a press after the one of Profile takes its place."""
    panel.run("press('profile'); press('memory')")
    recorded = panel.run("%%distributed\nkept = torch.ones(1000, 1000)")
    plain = panel.run("%%distributed\ndel kept")

    assert recorded.visible.startswith("memory of ranks 0-1")
    assert plain.visible == ""
    assert "the next cell on ranks will run as %%dist_memory" in said(panel)
