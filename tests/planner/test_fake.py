"""What a run with fake tensors is made of: the count, the world, models as bytes, the optimizer."""

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from nbdist.errors import OptionError
from nbdist.parallel.live import training_step
from nbdist.planner.fake import pickle_by_value, process_group
from nbdist.planner.fake.models import PickledModel
from nbdist.planner.fake.optimizers import stepped_bytes
from nbdist.planner.fake.storage_counter import StorageCounter, resizes_seen
from nbdist.planner.workload import OPTIMIZERS, Workload
from nbdist.strategy.choose import choose
from tests.programs.rank import run_dir
from tests.support.torch_ranks import run_ranks

# The count


def test_a_storage_counts_once_and_while_it_lives() -> None:
    """Views are the same memory; what nothing holds is none."""
    counter = StorageCounter()
    with FakeTensorMode(), counter:
        tensor = torch.empty(100, 10)
        views = [tensor.view(-1), tensor.t(), tensor[3]]
        assert counter.live_bytes == 4000
        second = tensor + 1
        assert counter.live_bytes == 8000
        del second
        assert counter.live_bytes == 4000
        assert counter.peak_bytes == 8000
        counter.begin()
        assert counter.peak_bytes == 4000
        del tensor
        assert counter.live_bytes == 4000, "views keep it"
        del views
    assert counter.live_bytes == 0


def test_what_is_given_back_by_resizing() -> None:
    """FSDP keeps the tensor, and its memory goes: no op says so."""
    counter = StorageCounter()
    with resizes_seen(counter), FakeTensorMode(), counter:
        gathered = torch.empty(1000)
        other = torch.empty(10)
        gathered.untyped_storage().resize_(0)
        assert counter.live_bytes == 40
        gathered.untyped_storage().resize_(4000)
        assert (counter.gathered_bytes, counter.gathered_peak_bytes) == (4000, 4000)
        del gathered
        assert (counter.gathered_bytes, counter.live_bytes) == (0, 40)
        del other


def test_a_step_by_hand() -> None:
    """Of y = relu(x W) the product and relu's result: forward keeps one, backward needs both."""
    counter = StorageCounter()
    with FakeTensorMode(), counter:
        weight = nn.Parameter(torch.empty(20, 30))
        x = torch.empty(10, 20)
        base = counter.live_bytes
        loss = torch.relu(x @ weight).sum()
        kept_bytes = counter.live_bytes - base
        loss.backward()  # type: ignore[no-untyped-call]
        assert weight.grad is not None
        del loss
        assert base == 4 * (600 + 200)
        assert kept_bytes == 4 * (10 * 30 + 1)  # relu keeps its result, and the sum is a number
        assert counter.live_bytes == base + 4 * 600


# The world


def test_transformers_looks_for_packed_samples_where_it_did() -> None:
    masks = importlib.import_module("transformers.masking_utils")

    assert callable(masks.find_packed_sequence_indices)


def test_without_the_group_nothing_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process_group, "_FAKE_GROUP", "torch.no_such_module")

    with (
        pytest.raises(process_group.CannotRun, match="no fake process group"),
        process_group.fake_world(2),
    ):
        pass


# Models as bytes


_CELL = """
from dataclasses import dataclass
import torch
from torch import nn

WIDTH = 7

def gelu(x):
    return torch.nn.functional.gelu(x) * scale()

def scale():
    return WIDTH / 7

@dataclass
class Settings:
    depth: int = 2

class Block(nn.Module):
    def __init__(self, width, act=lambda x: gelu(x)):
        super().__init__()
        self.inner = nn.Linear(width, width)
        self.act = act
    def forward(self, x):
        return x + self.act(self.inner(x))

class Deep(Block):
    kinds = {"block": Block}
    def __init__(self, settings):
        super().__init__(WIDTH)
        self.settings = settings
        self.blocks = nn.ModuleList(self.kinds["block"](WIDTH) for _ in range(settings.depth))
        self.head = nn.Linear(WIDTH, WIDTH, bias=False)
        self.head.weight = self.inner.weight
        self.inner.bias.requires_grad_(False)
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool))
    @property
    def depth(self):
        return len(self.blocks)
    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return super().forward(self.head(x))

made = Deep(Settings())
"""


def reads() -> None:
    model = pickle_by_value.loads((run_dir / "model").read_bytes())
    out = model(torch.empty(5, 7, device="meta"))
    assert type(model).__name__ == "Deep"
    assert (model.depth, model.settings.depth) == (2, 2)
    assert (out.shape, out.device.type) == ((5, 7), "meta")
    assert model.head.weight is model.inner.weight
    assert not model.inner.bias.requires_grad
    assert model.mask.dtype is torch.bool


def test_a_model_of_a_cell_is_made_in_another_process(tmp_path: Path) -> None:
    """Classes that no import finds, what they inherit and call; ties, frozen parameters."""
    cell: dict[str, object] = {"__name__": "__main__"}
    exec(_CELL, cell)  # as a cell runs
    (tmp_path / "model").write_bytes(pickle_by_value.dumps(cell["made"]))
    run_ranks(tmp_path, 1, reads)


def test_no_values_travel() -> None:
    """A model's bytes do not depend on its size."""
    small, large = (len(pickle_by_value.dumps(nn.Linear(10, n))) for n in (10, 100_000))

    assert large - small < 50


def test_inputs_are_made_anew() -> None:
    given = PickledModel(nn.Linear(2, 2), (torch.ones(3, 2), 1.5), {"mask": torch.ones(3)})
    sent = pickle_by_value.loads(pickle_by_value.dumps(given))
    with FakeTensorMode():
        args, kwargs = pickle_by_value.as_real((sent.args, sent.kwargs))

    assert (tuple(args[0].shape), args[0].device.type, args[1]) == ((3, 2), "cpu", 1.5)
    assert tuple(kwargs["mask"].shape) == (3,)


# The optimizer

_SHAPES = (((512, 512), torch.float32), ((64,), torch.float32))
_NUMBERS = 512 * 512 + 64


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_each_optimizer(name: str) -> None:
    """Bytes for each number, as the table of formulas has them: 8 bits too."""
    state, _ = stepped_bytes(_SHAPES, None, Workload(optimizer=name), choose("single", {}, 1))

    assert state / _NUMBERS == pytest.approx(OPTIMIZERS[name].state_bytes, abs=0.1)


def test_a_live_muon_counts_by_the_table() -> None:
    """It refuses the vectors of a model, which another optimizer steps."""
    live = torch.optim.Muon, {"lr": 0.02}
    state, _ = stepped_bytes(_SHAPES, live, Workload(optimizer="muon"), choose("single", {}, 1))
    assert any(len(shape) != 2 for shape, _ in _SHAPES)
    assert state == 4 * _NUMBERS


def test_lists_are_a_gpus() -> None:
    """foreach makes a list of all; on a CPU one parameter's worth at a time."""
    choice = choose("single", {}, 1)
    on_gpu, on_cpu = (
        stepped_bytes(_SHAPES, None, Workload(has_gpu=has), choice)[1] for has in (True, False)
    )
    fused = stepped_bytes(_SHAPES, None, Workload(), choose("single", {"fused": True}, 1))[1]

    assert on_gpu == 4 * _NUMBERS
    assert 4 * 512 * 512 <= on_cpu <= 4 * _NUMBERS * 2
    assert fused == 0


class _Two(torch.optim.SGD):
    """One that keeps two numbers for each parameter's number, of types of its own."""

    def step(self, closure: object = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["a"] = torch.zeros_like(parameter)
                self.state[parameter]["b"] = torch.zeros_like(parameter, dtype=torch.int8)


def test_state_of_an_optimizer_that_nobody_knows() -> None:
    """It is run: 4 and 1 bytes for each number."""
    live = _Two, {"lr": 0.1}
    state, _ = stepped_bytes(_SHAPES, live, Workload(), choose("single", {}, 1))

    assert state == 5 * _NUMBERS


def test_a_loss_is_found() -> None:
    class Output(dict[str, torch.Tensor]):
        loss = torch.ones(())

    tensor = torch.ones(2, 3)

    assert training_step.loss_of(Output()) is Output.loss
    assert training_step.loss_of((None, {"x": tensor})).item() == 1.0
    with pytest.raises(OptionError, match="returned a dict without a tensor"):
        training_step.loss_of({"text": "a"})
