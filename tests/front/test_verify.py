"""%dist_verify, typed in a real kernel with two real ranks."""

import pytest

from tests.support.kernel import Kernel

_MODEL = """%%distributed
class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
    def forward(self, x):
        x = x + self.down(torch.tanh(self.up(x)))
        return x * 2 if is_wrong and dist.get_rank() == 1 else x
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(2))
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return x
torch.manual_seed(0)
is_wrong = False
model = Net()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
model, optimizer = accelerator.prepare(model, optimizer)
torch.manual_seed(rank)
def step():
    loss = model(torch.randn(4, 8)).square().mean()
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    print("a step")
step()
"""
_STATE = """%%distributed
print([float(p.detach().double().sum()) for p in model.parameters()],
      [float(v.double().sum()) for s in optimizer.state.values() for v in s.values()],
      int(torch.random.get_rng_state().sum()), sorted(n for n in globals() if n[0] != "_"))
"""
_GONE = "%%distributed\nimport gc; del model, optimizer, Net, Layer, step; gc.collect(); None"


_FLIPPED = """%%distributed
def flipped():
    x = torch.randn(4, 8)
    x = x.flip(0) if dist.get_rank() == 1 else x
    accelerator.backward(model(x).square().mean())
"""


@pytest.mark.parity
def test_fsdp_is_the_reference_on_request(kernel: Kernel) -> None:
    """And what is none is refused; of a step with inputs of its own a finding has its line."""
    assert kernel.run(_MODEL).status == "ok"
    before = kernel.run(_STATE).visible
    beside_fsdp = kernel.run("%dist_verify --against fsdp -- step()").visible
    refused = kernel.run("%dist_verify --against pp -- step()").visible
    after = kernel.run(_STATE).visible
    assert kernel.run(_FLIPPED).status == "ok"
    flipped = kernel.run("%dist_verify -- flipped()").visible
    kernel.run(_GONE)

    assert "right: a step under ddp, dp 2 computes the same as under fsdp, dp 2" in beside_fsdp
    assert "There is no reference 'pp'; there are single, fsdp" in refused
    assert after == before
    assert "NOT right under ddp, dp 2" in flipped
    assert "bad code by rank: rank 1 alone calls flip, on what goes into the model" in flipped
    assert "line 4 of cell [" in flipped


@pytest.mark.usefixtures("drawn")
def test_a_step_is_right_or_its_line_is_named(
    _shared_kernel: Kernel,  # noqa: PT019  # it is used
) -> None:
    """The verb, its picture, the user's line; everything is put back, and nothing is printed."""

    def ran(code: str) -> str:
        cell = _shared_kernel.run(code)
        assert cell.status == "ok", cell.visible
        return cell.visible

    assert "no prepared model" in _shared_kernel.run("%dist_verify -- step()").visible
    ran(_MODEL)
    before = ran(_STATE)
    right = _shared_kernel.run("%dist_verify -- step()")

    assert "right: a step under ddp, dp 2 computes what one process computes" in right.visible
    assert "NOT" not in right.visible
    assert "a step\n" not in right.visible
    assert len(right.visible.splitlines()) == 1
    (html,) = right.data("text/html")
    assert html.index("<details><summary>") < html.index("<img")
    assert "On the host the copies took" in html
    assert ran(_STATE) == before

    ran("%%distributed\nx = torch.randn(4, 8)")
    assert "right: a step" in ran("%dist_verify --inputs x --steps 2")

    ran("%dist_strategy tp")
    ran("%%distributed\ntorch.manual_seed(3)")
    wrong = ran("%%dist_verify\nis_wrong = hasattr(model.layers[0].up.weight, 'to_local')\nstep()")

    assert "NOT right: under tp" in wrong
    assert "reference: single, with the batches of all data-parallel ranks" in wrong
    assert "the tolerance first at the output of layers.0 (forward)" in wrong
    assert "where: layers.0, line 6 of cell [" in wrong
    assert "on rank 1" in wrong
    assert "looks like: on some ranks only: rank 0 is right; elsewhere it is 2 times that" in wrong
    ran(_GONE)
