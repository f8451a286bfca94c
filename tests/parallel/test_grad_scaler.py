"""fp16: an overflow on one rank leaves out the step on all, and the scale is one for all."""

import json
from pathlib import Path

import pytest

from tests.support.torch_ranks import run_ranks
from tests.support.training import MODEL

pytestmark = pytest.mark.engine

OVERFLOW = """
    accelerator = Accelerator(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(init_scale=1024.0)],
        dataloader_config=DataLoaderConfiguration(split_batches=True))

    def local(tensor):
        return tensor.to_local() if hasattr(tensor, "to_local") else tensor

    def values(optimizer):
        return [local(p).detach().clone() for g in optimizer.param_groups for p in g["params"]
                if not p.is_meta]

    def row(k):
        "Three steps; in the second one a gradient of the last rank is infinite."
        net, optimizer, scheduler = make(0)
        loader = DataLoader(data, batch_size=BATCH)
        model, optimizer, scheduler, loader = accelerator.prepare(net, optimizer, scheduler, loader)
        moved, scales, skipped, losses = [], [], [], []
        for at, (x, y) in enumerate(loader):
            with accelerator.autocast():
                loss = model(x, labels=y)
            accelerator.backward(loss)
            if at == 1 and rank == n - 1:
                next(p for p in model.parameters() if p.grad is not None).grad.mul_(float("inf"))
            if k == "clip":
                accelerator.clip_grad_norm_(model.parameters(), 1e9)
            elif k == "value":
                accelerator.clip_grad_value_(model.parameters(), 1e9)
            old = values(optimizer)
            optimizer.step()
            scheduler.step()
            skipped.append(accelerator.optimizer_step_was_skipped)
            optimizer.zero_grad()
            moved.append(any(not torch.equal(a, b) for a, b in zip(old, values(optimizer))))
            scales.append(accelerator.scaler.get_scale())
            losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
        return dict(moved=moved, scales=scales, skipped=skipped, losses=losses,
                    rate=scheduler.scheduler.last_epoch, precision=accelerator.mixed_precision)

    outcomes = {}
    for name, options, k in json.loads(os.environ["ROWS"]):
        accelerator._own_scaler = None
        use(name, precision="fp16", **options)
        accelerator._follow(registry.current())
        outcomes[f"{name} {k}"] = tried(row, k)
        if isinstance(outcomes[f"{name} {k}"], str):
            print(outcomes[f"{name} {k}"])

    use("ddp", precision="fp16")
    nets = [make(0)[0] for _ in range(2)]
    models = accelerator.prepare(*nets)
    pair = accelerator.prepare(*[torch.optim.SGD(net.parameters(), lr=0.1) for net in models])
    before = [values(twin) for twin in pair]
    total = sum(model(tokens[:BATCH], labels=labels[:BATCH]) for model in models)
    accelerator.backward(total)
    for model in models:  # twice, as the seeds do; Accelerate's own raises
        accelerator.clip_grad_norm_(model.parameters(), 1e9)
    for twin in pair:
        twin.step()
    steps = [[(a - b).abs().max().item() for a, b in zip(old, values(twin), strict=True)]
             for old, twin in zip(before, pair)]
    fused = torch.optim.AdamW(nets[0].parameters(), lr=0.1, fused=True)
    fused = accelerator.prepare(fused)
    accelerator.backward(models[0](tokens[:BATCH], labels=labels[:BATCH]))
    if rank == 1:
        nets[0].head.bias.grad.fill_(float("nan"))
    old = values(fused)
    fused.step()
    closure = refusal(lambda: pair[0].step(lambda: 1))
    is_same = steps[0] == steps[1] and min(map(max, [steps[0]])) > 0
    done(found=outcomes, twins=is_same, closure=closure,
         fused=[fused.step_was_skipped, all(map(torch.equal, old, values(fused)))])
"""
# fp32 losses of the first steps, which an fp16 run must come near to.
TOLERANCE = 5e-3


def test_an_overflow_on_one_rank_is_one_on_all(tmp_path: Path) -> None:
    """The step and the rate's step are left out, the scale halves; clipping may come before."""
    rows = [
        ("ddp", {}, ""),
        ("ddp", {}, "clip"),
        ("zero1", {}, ""),
        ("fsdp", {}, "clip"),
        ("fsdp", {}, "value"),
        ("pp", {}, ""),
    ]
    results = run_ranks(tmp_path, 2, MODEL + OVERFLOW, ROWS=json.dumps(rows))

    for result in results:
        for row, outcome in result["found"].items():
            assert isinstance(outcome, dict), f"{row}\n{outcome}"
            assert outcome["precision"] == "fp16"
            assert outcome["skipped"] == [False, True, False, False, False, False], row
            assert outcome["moved"] == [True, False, True, True, True, True], row
            assert outcome["scales"] == [1024.0, *[512.0] * 5], row
            assert outcome["rate"] == 5, row
            first = next(iter(result["found"].values()))
            assert outcome["losses"] == pytest.approx(first["losses"], abs=TOLERANCE), row
        assert result["twins"]
        assert result["fused"] == [True, True]
        assert "closure" in result["closure"]
