"""%dist_strategy and --strategy, typed in a real kernel with real ranks."""

import re

import pytest

from tests.support.cells import Cell
from tests.support.kernel import Kernel

_REFUSED = {
    "%dist_strategy fdsp": "There is no strategy 'fdsp'. Did you mean fsdp?",
    "%dist_strategy fsdp ddp": "choose one of fsdp, ddp",
    "%dist_strategy ddp --sdpa cudnn": "There is no --sdpa cudnn on the CPU",
    "%dist_strategy ddp --nope": "unrecognized arguments: --nope",
    "%dist_strategy ddp --tp x": "'x' is not a valid number of ranks",
}
_MODEL = """%%distributed
torch.manual_seed(rank)
layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2)]
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(layers)
        self.head = torch.nn.Linear(8, 1)
    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.mse_loss(self.head(x), y)
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
torch.manual_seed(0)
data = [(torch.randn(4, 8), torch.randn(4, 1)) for _ in range(2)]
def step():
    x, y = data[rank]
    loss = model(x, y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    return accelerator.reduce(loss.detach(), "mean").item()
"""
_STEPS = "%%distributed\n[round(step(), 5) for _ in range(3)]"
_CURRENT = (
    "%%distributed\nfrom nbdist.parallel.live import registry\n"
    "registry.current().name, registry.current().options.precision"
)


@pytest.mark.parametrize("code", _REFUSED)
def test_a_wrong_strategy_is_an_ordinary_error(kernel: Kernel, code: str) -> None:
    """A mistake fails the cell with what is wrong and what works; nothing changes."""
    kernel.run(code).check_failure("OptionError", re.escape(_REFUSED[code]))


def test_the_current_strategy_is_shown_with_all_rows(kernel: Kernel) -> None:
    """Without a name %dist_strategy shows degrees, the effective batch and the table."""
    cell = kernel.run("%dist_strategy")

    lines = cell.plain[0].splitlines()
    assert lines[:2] == [
        "strategy: ddp, dp 2",
        "effective batch: 2 x the loader's batch (data-parallel degree 2 on 2 ranks)",
    ]
    assert [line for line in lines if line.startswith(">  ddp ")] != []
    assert "<table>" in cell.data("text/html")[0]


def test_another_strategy_at_a_second_init_names_the_verb(kernel: Kernel) -> None:
    """%dist_init does not switch, and says what does."""
    says = ("with a different --strategy", "%dist_strategy switches")
    kernel.run("%dist_init --strategy fsdp").check_failure("AlreadyRunning", *says)


def test_help_of_the_verb(kernel: Kernel) -> None:
    """--help has the degrees and the options with the strategies that take them."""
    text = kernel.run("%dist_strategy --help").plain[0]

    assert text.startswith("usage: %dist_strategy")
    assert "--tp N" in text
    assert re.search(r"--schedule gpipe\|1f1b\|interleaved\|zb\s+pp: order", text)


def test_a_live_model_is_switched_and_trains_on(fresh: Kernel) -> None:
    """Losses go on as without a switch; a replaced rank has the current strategy."""
    kernel = fresh
    kernel.run(_MODEL)
    first = kernel.run(_STEPS)
    printed = kernel.run("%%distributed\nids = id(optimizer.optimizer), id(optimizer.param_groups)")
    switched = kernel.run("%dist_strategy fsdp")
    again = kernel.run("%dist_strategy fsdp")
    shown = kernel.run("%dist_strategy")
    second = kernel.run(_STEPS)
    refused = kernel.run("%dist_strategy deepspeed")
    back = kernel.run("%dist_strategy ddp")
    third = kernel.run(_STEPS)
    same = kernel.run("%%distributed\nids == (id(optimizer.optimizer), id(optimizer.param_groups))")
    kernel.run("%dist_strategy fsdp --bf16")
    kernel.run("%dist_restart 1", 120)
    replaced = kernel.run(_CURRENT)
    reference = kernel.run(_REFERENCE, 120)

    assert printed.status == "ok", printed.visible
    assert switched.status == "ok", switched.visible
    assert switched.plain[0].startswith("ddp, dp 2 -> fsdp, dp 2 in "), switched.visible
    assert "model" in switched.plain[0]
    assert again.plain == ["The strategy is already fsdp, dp 2. Nothing was changed."]
    assert shown.plain[0].startswith("strategy: fsdp, dp 2\n")
    assert "OptionError: Live models cannot be switched" in refused.visible
    assert "%dist_reset --strategy deepspeed" in refused.visible
    assert back.plain[0].startswith("fsdp, dp 2 -> ddp, dp 2 in ")
    losses = number(first.text + second.text + third.text)
    assert losses == pytest.approx(number(reference.text), abs=2e-5)
    assert told(same) == {"True"}
    assert told(replaced) == {"('fsdp', 'bf16')"}


# The same nine steps at the same global batch on rank 0 alone.
_REFERENCE = """%%rank [0]
torch.manual_seed(0)
layers = [torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh()) for _ in range(2)]
alone = Net()
stepper = torch.optim.AdamW(alone.parameters(), lr=0.01)
losses = []
for _ in range(9):
    loss = sum(alone(x, y) for x, y in data) / 2
    loss.backward()
    stepper.step()
    stepper.zero_grad()
    losses.append(round(loss.item(), 5))
losses
"""


def told(cell: Cell) -> set[str]:
    """What ranks printed, without their numbers and times."""
    lines = re.findall(r"^\[[\d-]+\] (.*)$", cell.text, re.MULTILINE)
    return set(lines)


def number(text: str) -> list[float]:
    """The numbers of a list that all ranks printed alike."""
    return [float(number) for number in re.findall(r"-?\d+\.\d+", text)]


def test_ranks_start_with_a_strategy(without_ranks: Kernel) -> None:
    """--strategy is checked before anything starts, counts at once, and can be reset alone."""
    kernel = without_ranks
    refused = kernel.run("%dist_init -n 2 --strategy tp --tp 3")
    nothing = kernel.run("%dist_status")
    started = kernel.run("%dist_init -n 2 --strategy fsdp --bf16", 120)
    chosen = kernel.run(_CURRENT)
    same = kernel.run("%dist_init -n 2 --strategy fsdp --bf16")
    later = kernel.run("%dist_strategy tp")
    then = kernel.run(_CURRENT)
    ours = kernel.run(
        "%%distributed\nfrom nbdist import Accelerator\nissubclass(type(accelerator), Accelerator)"
    )
    reset = kernel.run("%dist_reset --strategy zero1", 120)
    python = kernel.run("import nbdist; nbdist.session().strategy.current().name")

    assert "2 ranks cannot form tp=3" in refused.failure.evalue
    nothing.check_failure("NotRunning")
    assert "strategy: fsdp, dp 2, --bf16" in started.plain[0].splitlines()
    assert told(chosen) == {"('fsdp', 'bf16')"}
    assert "already running" in same.plain[0]
    assert later.plain == [
        "tp, tp 2 from now on (before: fsdp, dp 2, --bf16). No model is prepared yet."
    ]
    assert told(then) == {"('tp', 'fp32')"}
    assert told(ours) == {"True"}
    assert reset.plain[0].startswith("2 ranks on 1 host")
    assert "strategy: zero1, dp 2" in reset.plain[0]
    assert python.plain == ["'zero1'"]


def test_after_a_restart_a_switch_builds_on_all_ranks(fresh: Kernel) -> None:
    """Where the cells were run again on all ranks; a model that one built alone is refused."""
    assert fresh.run("%dist_restart 1", 60).status == "ok"
    pid = fresh.run("%%rank [1]\nimport os\nprint(os.getpid())").text.split()[-1]
    status = fresh.run("%dist_status")
    fresh.run(_MODEL)
    steps = [fresh.run(_STEPS)]
    for name in ("fsdp", "ddp"):
        assert fresh.run(f"%dist_strategy {name}").status == "ok"
        steps.append(fresh.run(_STEPS))

    assert all(cell.status == "ok" for cell in steps), steps[-1].visible
    assert len({cell.text for cell in steps}) == 3
    assert pid in status.plain[0]

    fresh.run("%dist_restart 1", 60)
    alone = fresh.run(_MODEL.replace("%%distributed", "%%rank [1]"))
    refused = fresh.run("%dist_strategy fsdp")
    fresh.run(_MODEL)  # on all ranks: its own is gone
    switched = fresh.run("%dist_strategy single")
    fresh.run("%dist_strategy ddp")

    assert alone.status == "ok", alone.visible
    assert "built its model alone" in refused.visible
    assert switched.status == "ok", switched.visible
