"""%dist_compare, typed in a real kernel with two real ranks."""

import ast
import re
from collections.abc import Iterator

import pytest

from tests.support.cells import Cell
from tests.support.kernel import Kernel

# A model whose layers can be split, with what trains it; data that depends on random numbers.
_MODEL = """%%distributed
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()
def prepared():
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
    return accelerator.prepare(model, optimizer, scheduler)
def step(apart=0):
    loss = model(torch.randn(4, 8) + apart * dist.get_rank())
    accelerator.backward(loss)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return round(loss.item(), 5)
"""
_LIVE = """%%distributed
torch.manual_seed(0)
model, optimizer, scheduler = prepared()
for _ in range(3): step()
"""
_FRESH = "%%distributed\ntorch.manual_seed(0)\nmodel, optimizer, scheduler = prepared()"
_GONE = "%%distributed\nimport gc\ndel model, optimizer, scheduler\ngc.collect(); None"
# All that a step changes, as numbers that any difference changes.
_STATE = """%%rank [0]
from nbdist.parallel.live import registry
from nbdist.rpc.rank import namespace
def here(t): return float((t.to_local() if hasattr(t, "to_local") else t).detach().double().sum())
print(repr((
    [here(p) for p in model.parameters()],
    [here(v) for s in optimizer.state.values() for v in s.values()],
    scheduler.get_last_lr(), optimizer.param_groups[0]["lr"], model.training,
    int(torch.random.get_rng_state().sum()), registry.current().name,
    id(optimizer.optimizer), id(optimizer.param_groups[0]), sorted(namespace.names()),
)))
"""
_RUN = """
import nbdist
from nbdist.comparison.kernel import Comparing
from nbdist.commands.strategy import strategy_spec
def comparing(texts, code):
    asked = [(text, strategy_spec(text)) for text in texts]
    return nbdist.session().comparing(code).run(asked)
"""
_ROWS = """
found = comparing({texts!r}, {code!r})
[(r.asked, r.problem, r.strategy, r.dp, r.has_steps, r.held.parameters_bytes,
  r.held.gradients_bytes, r.held.optimizer_bytes, r.held_formula_bytes, r.sent_bytes,
  r.sent_formula_bytes, r.step_ns > 0, round(sum(r.parts), 6)) for r in found.rows]
"""
# Batches from a loop that a function leaves early, from one that is held, and from a generator.
_BATCHES = """%%distributed
import itertools
torch.manual_seed(0)
model, optimizer, scheduler = prepared()
noise = torch.Generator().manual_seed(rank)
numbers = torch.utils.data.TensorDataset(torch.arange(512.0).reshape(64, 8) / 512)
loader = accelerator.prepare(torch.utils.data.DataLoader(numbers, batch_size=4, shuffle=True))
held = iter(loader)
def train(batches=None, count=2):
    losses = []
    for (x,) in itertools.islice(batches or iter(loader), count):
        loss = model(x + torch.rand(4, 8, generator=noise))
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses
train(), train(held)
"""
_TRAIN = "train(), train(held, 3)"
_BATCHES_GONE = _GONE.replace("del model", "del held, loader, numbers, noise, train, model")
N_PARAMETERS = 2 * (8 * 16 + 16 + 16 * 8 + 8)


@pytest.fixture(scope="module")
def ready(_shared_kernel: Kernel) -> Kernel:
    """The shared kernel; its ranks know a model, and have none."""
    for code in (_MODEL, _RUN):
        ran(_shared_kernel, code)
    return _shared_kernel


@pytest.fixture
def trained(ready: Kernel) -> Iterator[Kernel]:
    """A live model with three steps behind it."""
    ran(ready, _LIVE)
    yield ready
    ran(ready, _GONE)


def ran(kernel: Kernel, code: str) -> Cell:
    cell = kernel.run(code)

    assert cell.status == "ok", cell.visible
    return cell


def rows(kernel: Kernel, texts: list[str], code: str) -> list[tuple[object, ...]]:
    cell = ran(kernel, _ROWS.format(texts=texts, code=code))
    printed: list[tuple[object, ...]] = ast.literal_eval(cell.plain[-1])
    return printed


@pytest.mark.usefixtures("drawn")
def test_each_begins_with_the_same_state_which_is_back_afterwards(trained: Kernel) -> None:
    """Also one that sees other batches: weights, moments, rates, random numbers, names."""
    before = ran(trained, _STATE).text
    cell = ran(trained, "%%dist_compare ddp fsdp tp\nmade = [step() for n in range(2)]\nmade")
    after = ran(trained, _STATE).text

    assert after == before
    assert "'ddp'" in before
    text = cell.visible.partition("strategy ")[0]
    first = text.partition("fsdp:")[0].replace("ddp:", "").strip()
    assert text.count(first) == 2  # ddp and fsdp train the same
    assert "under ddp, dp 2" in cell.visible
    assert cell.data("image/png") != []
    assert "data:image/png" in cell.data("text/html")[-1]


_BETWEEN = {
    "compare": [f"%dist_compare fsdp ddp -- print({_TRAIN})"],
    # A checkpoint has no generator of the user's.
    "load": [
        "%dist_save here",
        f"%%distributed\nkept = noise.get_state(); {_TRAIN}; noise.set_state(kept)",
        "%dist_load here",
    ],
    "switch": ["%dist_strategy fsdp", "%dist_strategy ddp"],
}


def test_training_goes_on_with_the_same_batches(ready: Kernel) -> None:
    """Bit for bit, after a comparison, a load and a switch; and each row has the same batches."""
    losses, rows = {}, ""
    for name, codes in {"nothing": [], **_BETWEEN}.items():
        ran(ready, _BATCHES)
        texts = [ran(ready, code).visible for code in codes]
        rows = rows or "".join(texts)
        losses[name] = ran(ready, f"%%distributed\nprint({_TRAIN})").text
    ran(ready, _BATCHES_GONE)

    assert losses == dict.fromkeys(losses, losses["nothing"])
    for rank in (0, 1):
        lines = re.findall(rf"^\[{rank}\] (\[.*)", rows, re.MULTILINE)
        numbers = [[float(number) for number in re.findall(r"\d\.\d+", line)] for line in lines]
        # Each strategy runs twice, and the second run goes on where the first one ended.
        assert [len(row) for row in numbers] == [5] * 4, rows
        for row, wanted in zip(numbers, numbers[:2] * 2, strict=True):
            assert row == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(
    "base", ["fsdp", *(pytest.param(name, marks=pytest.mark.parity) for name in ("zero1", "tp"))]
)
def test_the_state_is_back_under_any_strategy(ready: Kernel, base: str) -> None:
    """In parts as well; and an optimizer that has no state has none afterwards."""
    ran(ready, _FRESH)
    for steps in (0, 2):
        ran(ready, f"%dist_strategy {base}")
        ran(ready, f"%%distributed\nfor _ in range({steps}): step()")
        before = ran(ready, _STATE).text
        ran(ready, "%dist_compare single -- step()")

        assert ran(ready, _STATE).text == before
        assert f"'{base}'" in before
    ran(ready, "%dist_strategy ddp")
    ran(ready, _GONE)


def test_rows_have_what_the_ranks_hold_and_send(trained: Kernel) -> None:
    """Counted by hand: 4 bytes for a parameter and its gradient, 8 for Adam, split or not.

    ddp sends an all-reduce of the gradients, of which a rank of two sends all; fsdp gathers
    parameters twice and reduces gradients once, of each a half.
    """
    ddp, fsdp, tp = rows(trained, ["ddp", "fsdp", "tp"], "for _ in range(2): step()")
    n = N_PARAMETERS
    biases = 2 * 8  # of `down`, which tp does not split

    assert ddp[:9] == ("ddp", "", "ddp, dp 2", 2, True, 4 * n, 4 * n, 8 * n, 16 * n)
    assert fsdp[:9] == ("fsdp", "", "fsdp, dp 2", 2, True, 2 * n, 2 * n, 4 * n, 8 * n)
    assert tp[5:8] == tuple(each * (n + biases) for each in (2, 2, 4))
    assert (ddp[3], tp[3]) == (2, 1)
    assert ddp[10] == 4 * n
    assert ddp[9] == pytest.approx(4 * n, rel=0.1)  # with what DDP agrees on
    assert fsdp[9:11] == (6 * n, 6 * n)
    assert all(row[11:] == (True, 1.0) for row in (ddp, fsdp, tp))


def test_the_line_takes_python_as_it_is(trained: Kernel) -> None:
    """Braces, quotation marks and dashes; options of a strategy stand in quotation marks."""
    code = """print(f"{1 + 1}", {'a': "b"}['a'], 5 --1); step()"""
    cell = ran(trained, f'%dist_compare "fsdp --bf16" ddp -- {code}')

    assert cell.visible.count("2 b 6") == 4
    assert "fsdp --bf16  " in cell.plain[-1]


def test_a_strategy_that_refuses_is_a_row_and_the_others_run(trained: Kernel) -> None:
    """Before anything changes, or where the cell meets it."""
    table = rows(trained, ["deepspeed", "tp --tp 3", "pp", "ddp"], "step(apart=1)")

    assert "Live models cannot be switched" in str(table[0][1])
    assert "2 ranks cannot form tp=3" in str(table[1][1])
    assert "were given different inputs" in str(table[2][1])
    assert table[3][1] == ""
    assert ran(trained, "%dist_strategy").plain[0].startswith("strategy: ddp, dp 2")


def test_a_cell_that_fails_leaves_all_as_it_was(trained: Kernel) -> None:
    """What had run is shown, and that the strategy of before is back."""
    before = ran(trained, _STATE).text
    code = "step()\nassert 'FSDP' not in type(model).__name__, 'mine'"
    cell = trained.run(f"%%dist_compare ddp fsdp zero1\n{code}")

    cell.check_failure("DistributedError")
    assert ran(trained, _STATE).text == before
    assert "mine" in cell.visible
    assert (
        "The strategy is ddp, dp 2 again, with the state from before the comparison."
        in cell.visible
    )
    assert "zero1:" not in cell.visible
    assert any(text.startswith("strategy ") and "ddp " in text for text in cell.plain)


def test_an_interrupt_leaves_all_as_it_was(trained: Kernel) -> None:
    """While one rank waits in a collective for the other."""
    before = ran(trained, _STATE).text
    code = "import time\nstep()\nprint('waiting')\ndist.barrier() if rank else time.sleep(60)"
    handle = trained.start(f"%%dist_compare fsdp ddp\n{code}")
    trained.wait_output(handle, "waiting")
    trained.interrupt()
    cell = trained.finish(handle)

    assert cell.failure.ename in {"KeyboardInterrupt", "Interrupted"}
    assert "The strategy is ddp, dp 2 again" in cell.visible
    assert ran(trained, _STATE).text == before
    ran(trained, "%%distributed\nstep()")


def test_a_cell_makes_its_own_model_under_each(ready: Kernel) -> None:
    """Where none is live any strategy can be had; what the cell made is gone afterwards."""
    ran(ready, "%%distributed\nmodel = 'mine'; print(sorted(set(globals())))")
    code = "model, optimizer, scheduler = prepared()\nfor _ in range(2): step()"
    table = rows(ready, ["fsdp1", "ddp"], code)
    left = ran(ready, "%%distributed\nprint(model, 'optimizer' in globals())")

    assert [row[1] for row in table] == ["", ""]
    assert table[1][5:8] == tuple(each * N_PARAMETERS for each in (4, 4, 8))
    assert "mine False" in left.text
    assert ran(ready, "%dist_strategy").plain[0].startswith("strategy: ddp, dp 2")


_MISTAKES = {
    "%dist_compare": "no strategy was given",
    "%dist_compare ddp": "There is nothing to compare",
    "%%dist_compare ddp\n": "There is nothing to compare",
    "%dist_compare ddp fdsp -- 1": "There is no strategy 'fdsp'. Did you mean fsdp?",
    "%dist_compare ddp 'fsdp --nope' -- 1": "unrecognized arguments: --nope",
    "%dist_compare ddp 'fsdp tp' -- 1": "quotation marks",
    "%dist_compare ddp '--bf16' -- 1": "unrecognized arguments: --bf16",
    "%%dist_compare ddp -- 1\n2": "Remove one of them",
    "x = 1\n%%dist_compare ddp\nrank": "has to be the first line of its cell",
}


@pytest.mark.parametrize("code", _MISTAKES)
def test_a_mistake_runs_nothing(ready: Kernel, code: str) -> None:
    """It says what is wrong."""
    ready.run(code).check_failure("OptionError", re.escape(_MISTAKES[code]))


def test_it_works_from_python_and_has_help(ready: Kernel) -> None:
    """The same view; Tab in its cell knows the ranks' names."""
    cell = ran(ready, "import nbdist\nprint(nbdist.compare(['single'], 'torch.ones(9).sum()'))")
    text = ran(ready, "%dist_compare --help")
    typed = ready.complete("%%dist_compare ddp\nprep")

    assert "single" in cell.visible
    assert "(of the cell where it has no steps)" in cell.visible
    assert text.plain[0].startswith("usage: %dist_compare")
    assert "prepared" in typed["matches"]
