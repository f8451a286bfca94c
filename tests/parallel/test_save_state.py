"""A state saved under one strategy is loaded under another, on other numbers of ranks too."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.support.torch_ranks import run_ranks
from tests.support.training import MODEL, SAVED

SAVE = (
    SAVED
    + """
    folder = os.environ["FOLDER"]

    def first(name, options, kind):
        "Three steps, a state, and three more."
        use(name, **options)
        parts = made(0, kind)
        loop = iter(parts[3])
        run(parts, (next(loop) for _ in range(3)))
        accelerator.save_state(f"{folder}/{name}{kind.__name__}")
        return run(parts, loop), parts

    def second(name, options, kind, source):
        "Other weights, then the state, and the three steps that came after it."
        use(name, **options)
        parts = made(rank + 5, kind)
        ids = [id(group) for group in parts[1].optimizer.param_groups]
        accelerator.load_state(f"{folder}/{source}{kind.__name__}")
        assert ids == [id(group) for group in parts[1].optimizer.param_groups]
        assert parts[4].n == 3
        loader = accelerator.skip_first_batches(parts[3], 3)
        return run(parts, loader)

    saved, loaded = {}, {}
    for name, options, kind in json.loads(os.environ["SAVED"]):
        losses, parts = first(name, options, globals()[kind])
        saved[name + kind] = losses
        del parts
    for name, options, kind, source in json.loads(os.environ["LOADED"]):
        key = f"{name}{kind} {source}{kind}"
        loaded[key] = tried(second, name, options, globals()[kind], source)
"""
)
DONE = "    done(saved=saved, loaded=loaded)\n"
MISFITS = """
    use("ddp")
    model = accelerator.prepare(Net(width=32))
    head = {k: v.clone() for k, v in accelerator.get_state_dict(model).items()}
    texts = [refusal(lambda: accelerator.load_state(f"{folder}/{source}"), NbdistError, ValueError)
             for source in ("fsdpNet", "nowhere")]
    same = all(torch.equal(v, head[k]) for k, v in accelerator.get_state_dict(model).items())
    done(saved=saved, loaded=loaded, texts=texts, same=same)
"""


def save_and_load(
    folder: Path,
    size: int,
    saved: list[Any],
    loaded: list[Any],
    end: str = DONE,
    blocks: str = "2",
) -> list[dict[str, Any]]:
    """What was saved under one strategy, and loaded under another."""
    rows = {"SAVED": json.dumps(saved), "LOADED": json.dumps(loaded)}
    text = MODEL + SAVE + end
    rows |= {"FOLDER": str(folder), "BLOCKS": blocks}
    return run_ranks(folder / f"run{size}", size, text, **rows)


def check(saved: dict[str, list[float]], loaded: dict[str, list[float] | str]) -> None:
    """What was loaded goes on as what was saved did."""
    for row, losses in loaded.items():
        assert not isinstance(losses, str), f"{row}\n{losses}"
        assert losses == pytest.approx(saved[row.split()[1]], abs=2e-6), row


def test_a_state_goes_on_under_another_strategy(tmp_path: Path) -> None:
    """Weights, moments, groups, rate, order of the data, own objects; tied weights."""
    saved = [("fsdp", {}, "Net"), ("pp", {}, "Tied")]
    loaded = [
        ("zero1", {}, "Net", "fsdp"),
        ("pp", {}, "Net", "fsdp"),
        ("fsdp", {}, "Tied", "pp"),
    ]
    results = save_and_load(tmp_path, 2, saved, loaded, MISFITS)

    for result in results:
        check(result["saved"], result["loaded"])
        misfit, missing = result["texts"]
        assert "does not fit Net: embed.weight has shape (24, 16) there and (24, 32) here" in misfit
        assert "and 29 more" in misfit
        assert "nowhere" in missing
        assert result["same"]
    tensors = load_file(tmp_path / "ppTied" / "model.safetensors")
    assert ("embed.weight" in tensors) != ("head.weight" in tensors)
    assert "scale" in tensors
    assert "spare" not in tensors
    optimizer = torch.load(tmp_path / "fsdpNet" / "optimizer.bin")
    assert optimizer["state"]["embed.weight"]["exp_avg"].shape == (24, 16)


def test_a_state_goes_from_fsdp1_and_to_it(tmp_path: Path) -> None:
    """The way round that a refused switch names; FSDP1 keeps all values in flat parameters."""
    saved = [("fsdp1", {"shard": "grad-op"}, "Tied"), ("zero1", {}, "Net")]
    loaded = [
        ("ddp", {}, "Tied", "fsdp1"),
        ("fsdp1", {}, "Net", "zero1"),
    ]
    results = save_and_load(tmp_path, 2, saved, loaded)

    for result in results:
        check(result["saved"], result["loaded"])
    tensors = load_file(tmp_path / "fsdp1Tied" / "model.safetensors")
    assert tensors["blocks.0.mlp.up_proj.weight"].shape == (32, 16)
    assert "spare" not in tensors


@pytest.mark.parity
def test_a_state_goes_on_on_another_number_of_ranks(tmp_path: Path) -> None:
    """Saved on 4 ranks, by fsdp x tp and by 4 stages; loaded there otherwise, on 2 and on 1."""
    saved = [("fsdp", {"tp": 2}, "Net"), ("pp", {}, "Tied")]
    loaded = [("pp", {"tp": 2}, "Net", "fsdp"), ("zero1", {}, "Tied", "pp")]
    runs = [
        (4, saved, loaded),
        (2, [], [("ddp", {}, "Net", "fsdp"), ("fsdp", {}, "Tied", "pp")]),
        (1, [], [("single", {}, "Net", "fsdp"), ("ddp", {}, "Tied", "pp")]),
    ]
    curves: dict[str, list[float]] = {}
    for size, first, second in runs:
        for result in save_and_load(tmp_path, size, first, second, blocks="4"):
            curves |= result["saved"]
            check(curves, result["loaded"])


PLAIN = """
    import accelerate
    torch.manual_seed(0)
    plain = accelerate.Accelerator()
    net = Net()
    model, optimizer = plain.prepare(net, torch.optim.AdamW(groups(net), lr=1e-2))
    def steps(model, optimizer, accelerator):
        losses = []
        for _ in range(2):
            loss = model(tokens[:BATCH], labels=labels[:BATCH])
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        return losses
    steps(model, optimizer, plain)
    for is_safe in (True, False):
        plain.save_state(f"{os.environ['FOLDER']}/{is_safe}", safe_serialization=is_safe)
    dist.barrier()
    curve = steps(model, optimizer, plain)
    outcomes = {}
    for name, is_safe in (("fsdp", True), ("zero1", False)):
        use(name)
        accelerator = Accelerator()
        net = Net()
        parts = accelerator.prepare(net, torch.optim.AdamW(groups(net), lr=1e-2))
        accelerator.load_state(f"{os.environ['FOLDER']}/{is_safe}")
        outcomes[f"{name} {is_safe}"] = steps(*parts, accelerator)
    done(curve=curve, found=outcomes)
"""


def test_a_state_of_accelerates_own_is_read(tmp_path: Path) -> None:
    """Saved by plain Accelerate under DDP, in both of its formats, gone on with here."""
    results = run_ranks(tmp_path / "run", 2, MODEL + PLAIN, FOLDER=str(tmp_path), BLOCKS="2")

    for result in results:
        for row, losses in result["found"].items():
            assert losses == pytest.approx(result["curve"], abs=2e-6), row
