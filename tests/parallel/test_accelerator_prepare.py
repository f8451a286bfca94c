"""Models, optimizers and schedulers are prepared in any order, twice, and leave nothing behind."""

import json
from pathlib import Path

import pytest

from tests.support.torch_ranks import run_ranks
from tests.support.training import MODEL

pytestmark = pytest.mark.engine

ORDERS = """
    accelerator = Accelerator()

    def step(model, optimizer):
        x, y = tokens[:BATCH], labels[:BATCH]
        loss = model(x, labels=y)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        return loss.item()

    def before():
        net, optimizer, _ = make(0)
        group = optimizer.param_groups[0]
        optimizer = accelerator.prepare(optimizer)
        model = accelerator.prepare(net)
        assert group is optimizer.optimizer.param_groups[0]
        return model, optimizer
    def after():
        net, optimizer, _ = make(0)
        model = accelerator.prepare(net)
        return model, accelerator.prepare(optimizer)
    def made_after():
        net, _, _ = make(0)
        model = accelerator.prepare(net)
        return model, accelerator.prepare(torch.optim.AdamW(groups(model), lr=1e-2))
    def without():
        net, _, _ = make(0)
        model = accelerator.prepare(net)
        return model, torch.optim.AdamW(groups(model), lr=1e-2)
    def twice():
        net, optimizer, _ = make(0)
        model, first = accelerator.prepare(net, optimizer)
        again, two = accelerator.prepare(net, optimizer)
        third, three = accelerator.prepare(model, first)
        assert model is again is third and first is two is three
        return model, first
    def group_added():
        net, _, _ = make(0)
        halves = groups(net)
        optimizer = torch.optim.AdamW([halves[0]], lr=1e-2)
        model, optimizer = accelerator.prepare(net, optimizer)
        optimizer.add_param_group(halves[1])
        return model, optimizer
    def several():
        "Two models with an optimizer each; and one optimizer for both."
        nets = [make(0)[0] for _ in range(2)]
        both = torch.optim.AdamW([g for net in nets for g in groups(net)], lr=1e-2)
        model, two, optimizer = accelerator.prepare(*nets, both)
        step(model, optimizer)
        assert [p.grad for p in two.parameters()].count(None) == len(list(two.parameters()))
        return two, optimizer

    use("ddp")
    model, optimizer = after()
    losses = torch.tensor([step(model, optimizer) for _ in range(3)])
    reference = accelerator.reduce(losses, "mean").tolist()
    del model, optimizer
    differences, named = {}, {}
    for name in json.loads(os.environ["ROWS"]):
        use(name)
        for way in (before, after, made_after, without, twice, group_added, several):
            model, optimizer = way()
            losses = [step(model, optimizer) for _ in range(3)]
            mean = accelerator.reduce(torch.tensor(losses), "mean").tolist()
            differences[f"{name} {way.__name__}"] = max(
                abs(a - b) for a, b in zip(mean, reference, strict=True))
            base = accelerator.unwrap_model(model)
            named[f"{name} {way.__name__}"] = (
                type(base).__name__, base is accelerator.unwrap_model(base))
            alive = weakref.ref(base)
            del model, optimizer, base
            gc.collect()
            assert alive() is None, (name, way.__name__)
            assert not [*accelerator._models, *accelerator._optimizers]
    done(found=differences, named=named)
"""


@pytest.mark.parametrize(
    "rows", [["ddp", "fsdp"], pytest.param(["zero1", "pp", "tp"], marks=pytest.mark.parity)]
)
def test_any_order_gives_the_same_training(tmp_path: Path, rows: list[str]) -> None:
    """And the same object for what is prepared already; nothing of it stays once it is dropped."""
    results = run_ranks(tmp_path, 2, MODEL + ORDERS, ROWS=json.dumps(rows))

    for result in results:
        assert len(result["found"]) == len(rows) * 7
        assert max(result["found"].values()) < 2e-6, result["found"]
        # fully_shard makes the class FSDPNet.
        assert {name for name, _ in result["named"].values()} <= {"Net", "FSDPNet"}
        assert all(is_same for _, is_same in result["named"].values())
