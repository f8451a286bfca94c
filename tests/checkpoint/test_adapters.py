"""Adapters alone, saved under one strategy and loaded under another; 4-bit weights beside them."""

import importlib.util
import json
from typing import Any

import pytest

from tests.support.torch_ranks import NEEDS_PEFT, TorchRanks
from tests.support.training import MODEL

pytestmark = [NEEDS_PEFT, pytest.mark.timeout(300)]

# Behind MODEL. The base is the same for each seed, as a pretrained one is.
ADAPTED = (
    MODEL
    + """
    from nbdist.checkpoint.rank import export_weights, jobs, load, save
    from nbdist.parallel.libraries import quantized
    from nbdist.switch.rank import switch
    from peft import LoraConfig, get_peft_model
    folder = os.environ["FOLDER"]
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))

    class Packed(nn.Linear):
        "A layer of which bytes and constants are apart, as bitsandbytes' 4-bit layers are."
        class Constants:
            def __init__(self, scale):
                self.scale = scale
            def as_dict(self, packed):
                return {"scale": self.scale}
        def pack(self):
            scale = self.weight.detach().abs().max() / 127
            packed = (self.weight.detach() / scale).round().to(torch.int8).view(torch.uint8)
            self.weight = nn.Parameter(packed.view(-1, 1), requires_grad=False)
            self.weight.quant_state = self.Constants(scale)
            self.shape = self.out_features, self.in_features
        def forward(self, x):
            # As bitsandbytes does: what is in the layer stands in where the parameter has none.
            state = getattr(self.weight, "quant_state", None) or self.quant_state
            whole = self.weight.view(-1).view(torch.int8).view(self.shape)
            return F.linear(x, whole * state.scale, self.bias)

    class FourBit(Net):
        def __init__(self, seed=0):
            torch.manual_seed(seed)
            super().__init__()
            for block in self.blocks:
                old = block.mlp.up_proj
                new = block.mlp.up_proj = quantize(old)

    def quantize(old):
        if os.environ["WITH"] == "bitsandbytes":
            import bitsandbytes as bnb
            new = bnb.nn.Linear4bit(old.in_features, old.out_features,
                                    compute_dtype=torch.float32, quant_type="nf4")
            new.load_state_dict(old.state_dict())
            return new.to("cpu")
        new = Packed(old.in_features, old.out_features)
        new.load_state_dict(old.state_dict())
        new.pack()
        new.quant_state = new.weight.quant_state
        return new

    LAYERS = ["q_proj", "v_proj", "o_proj", "down_proj"]
    def adapted(seed, kind=Net, r=2):
        torch.manual_seed(0)
        net = kind()
        torch.manual_seed(seed)
        return get_peft_model(net, LoraConfig(
            r=r, target_modules=LAYERS, init_lora_weights=False))

    def made(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        return accelerator.prepare(model, optimizer)

    def losses(parts, first, count=2):
        model, optimizer = parts
        found = []
        for at in range(first, first + count):
            batch = slice(BATCH * at, BATCH * (at + 1))
            with accelerator.split_between_processes(tokens[batch]) as x:
                with accelerator.split_between_processes(labels[batch]) as y:
                    loss = model(x, labels=y)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            found.append(accelerator.reduce(loss.detach(), "mean").item())
        return found

    def alone(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
        return steps_alone(model, optimizer, STEPS)

    def steps_alone(model, optimizer, count):
        found = []
        for x, y in list(zip(tokens.split(BATCH), labels.split(BATCH)))[:count]:
            loss = model(x, labels=y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    def save_adapters(name):
        begun = save.begin(f"{folder}/{name}", name, False, True)
        saved = jobs.wait(name)
        assert not saved.failure, saved
        dist.barrier()
        return begun.copied_bytes

    def message(call):
        try:
            call()
        except NbdistError as error:
            return str(error)
        return "done"
"""
)

ADAPTERS = """
    wanted, off, sizes = alone(adapted(0)), {}, {}
    saved, moves, alternating = json.loads(os.environ["CASES"])
    for source in saved:
        use(source)
        parts = made(adapted(rank and 7))
        before = losses(parts, 0)
        sizes[source] = save_adapters(source)
        after = losses(parts, 2)
        off[source] = max(abs(a - b) for a, b in zip(before + after, wanted))
        del parts
        gc.collect()
    for source, after in moves:
        use(after)
        parts = made(adapted(5))
        load.load(f"{folder}/{source}")
        found = losses(parts, 2)
        off[f"{source} {after}"] = max(abs(a - b) for a, b in zip(found, wanted[2:]))
        del parts
        gc.collect()

    # What does not fit.
    use("fsdp")
    texts = []
    parts = made(adapted(5, r=4))
    texts.append(message(lambda: load.load(f"{folder}/pp")))
    del parts
    gc.collect()
    parts = made(Net())
    texts.append(message(lambda: load.load(f"{folder}/pp")))
    texts.append(message(lambda: save.begin(f"{folder}/none", "none", False, True)))
    del parts
    gc.collect()

    # Two adapters, of which one is trained at a time.
    def with_two(seed=0):
        two = adapted(seed)
        two.add_adapter(
            "other", LoraConfig(r=1, target_modules=["q_proj"], init_lora_weights=False))
        return two
    def turns(model, step):
        found = []
        for name in ("default", "other", "default"):
            model.set_adapter(name)
            found += step()
        return found
    two = with_two()
    optimizer = torch.optim.AdamW(two.parameters(), lr=1e-2, eps=1e-4)
    wanted = turns(two, lambda: steps_alone(two, optimizer, 2))
    for name in alternating:
        use(name)
        model, optimizer = made(with_two())
        found = turns(accelerator.unwrap_model(model), lambda: losses((model, optimizer), 0))
        off[f"two {name}"] = max(abs(a - b) for a, b in zip(found, wanted))
        del model, optimizer
        gc.collect()
    use("tp")
    parts = made(with_two())
    def values():
        state = accelerator.get_state_dict(parts[0])
        return {name: {key: value.clone() for key, value in state.items() if f".{name}." in key}
                for name in ("default", "other")}
    def moved(before):
        now = values()
        return [name for name in now if any(
            not torch.equal(now[name][key], before[name][key]) for key in now[name])]
    trained = []
    for name in ("default", "other"):
        parts[0].set_adapter(name)
        before = values()
        losses(parts, 0)
        trained.append(moved(before))
    save_adapters("two")
    kept = values()
    losses(parts, 2)
    load.load(f"{folder}/two")
    trained.append(moved(kept))
    exported = [
        export_weights.export_model(parts[0], Path(folder, name), adapter=name).path
        for name in ("default", "other")]
    texts.append(message(lambda: export_weights.export_model(
        parts[0], Path(folder, "third"), adapter="third")))
    from safetensors.torch import load_file
    names = [sorted(load_file(path)) for path in exported]
    shapes = [len(each) for each in names]
    done(off=off, sizes=sizes, texts=texts, trained=trained, shapes=shapes)
"""


# Saved under; saved under and loaded under; under which two adapters take turns.
_SHORT = (("fsdp", "pp"), (("fsdp", "tp"), ("pp", "ddp")), ("fsdp",))
_LONG = (
    ("fsdp", "tp", "pp", "zero1"),
    (("tp", "pp"), ("pp", "fsdp1"), ("zero1", "cp"), ("pp", "zero1"), ("tp", "ulysses")),
    ("ddp", "zero1", "pp"),
)
_CASES = [_SHORT, pytest.param(_LONG, marks=pytest.mark.parity)]


@pytest.fixture(scope="module", name="told", params=_CASES, ids=["some", "others"])
def _told(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[dict[str, Any]]:
    folder = tmp_path_factory.mktemp("adapters")
    env = {"FOLDER": str(folder / "states"), "WITH": "", "BLOCKS": "2"}
    env["CASES"] = json.dumps(request.param)
    (folder / "states").mkdir()
    with TorchRanks(folder / "run", 2, ADAPTED + ADAPTERS, 280, **env) as ranks:
        return ranks.results()


def test_adapters_are_saved_and_loaded_under_each_strategy(told: list[dict[str, Any]]) -> None:
    """Training goes on as that of one process; the files hold adapters and their moments alone."""
    for result in told:
        assert max(result["off"].values()) < 2e-6, result["off"]
    # Of each of 2 blocks: q, v and o from 16 to 16, down from 32 to 16, of rank 2: 8 matrices, each
    # with two moments and a count of steps.
    n_adapters = 2 * (3 * 2 * (16 + 16) + 2 * (32 + 16))
    for name in told[0]["sizes"]:
        size_bytes = sum(result["sizes"][name] for result in told)
        assert size_bytes == 4 * (3 * n_adapters + 2 * 8)


def test_what_has_other_adapters_is_refused(told: list[dict[str, Any]]) -> None:
    """Another rank of the matrices, a model without any, a name that there is not."""
    other, none, unsaved, third = told[0]["texts"]
    assert "q_proj.lora_A.default.weight is (2, 16) in the checkpoint and (4, 16) here" in other
    assert "Net has no adapters of PEFT" in none
    assert "Net has no adapters of PEFT. Leave --adapters out" in unsaved
    assert "There is no adapter third. There are: default, other" in third


def test_of_two_adapters_the_active_one_is_trained(told: list[dict[str, Any]]) -> None:
    """Under tp, and switched after prepare; both are saved, and each is exported by its name."""
    for result in told:
        assert result["trained"] == [["default"], ["other"], []]
        assert result["shapes"] == [16, 4]


FOUR_BIT = """
    wanted, off, texts = alone(adapted(0, FourBit)), {}, {}
    use("single")
    model, optimizer = made(adapted(rank and 7, FourBit))
    packed = {name: (p.clone(), quantized.constants(p)) for name, p in
              accelerator.unwrap_model(model).named_parameters() if quantized.is_quantized(p)}
    at = 0
    for name in ("ddp", "fsdp", "pp", "cp"):
        switch.switch(choose(name, {}, n, device_type="cpu", backend="gloo"))
        found = losses((model, optimizer), at, 1)
        off[name] = abs(found[0] - wanted[at])
        at += 1
    net = accelerator.unwrap_model(model)
    now = dict(net.named_parameters())
    is_same = all(torch.equal(now[name], value) and quantized.constants(now[name]) == key
                  for name, (value, key) in packed.items())
    kinds = sorted({type(now[name]).__name__ for name in packed})
    texts["tp"] = message(lambda: switch.switch(
        choose("tp", {}, n, device_type="cpu", backend="gloo")))
    texts["save"] = message(lambda: save.begin(f"{folder}/whole", "whole", False))
    texts["merged"] = message(lambda: export_weights.export_model(
        model, Path(folder, "merged"), is_merged=True))
    save_adapters("packed")
    before = losses((model, optimizer), 0)
    load.load(f"{folder}/packed")
    same = before == losses((model, optimizer), 0)
    del model, optimizer, net, now
    gc.collect()
    use("ddp")
    texts["apart"] = message(lambda: made(adapted(0, lambda: FourBit(rank))))
    for name in ("tp", "fsdp1"):
        use(name)
        texts[f"prepare {name}"] = message(lambda: made(adapted(0, FourBit)))
    done(off=off, texts=texts, is_same=is_same, kinds=kinds, n=len(packed), same=same)
"""

needs_bitsandbytes = pytest.mark.skipif(
    importlib.util.find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"
)


@pytest.mark.parametrize("library", ["", pytest.param("bitsandbytes", marks=needs_bitsandbytes)])
def test_four_bit_weights_stay_as_they_are(tmp_path: Any, library: str) -> None:
    """Under each strategy that takes them, through switches; the others say what to take."""
    env = {"FOLDER": str(tmp_path / "states"), "WITH": library, "BLOCKS": "2"}
    (tmp_path / "states").mkdir()
    with TorchRanks(tmp_path / "run", 2, ADAPTED + FOUR_BIT, 280, **env) as ranks:
        told = ranks.results()

    for result in told:
        assert result["n"] == 2
        assert max(result["off"].values()) < 2e-6, result["off"]
        assert result["is_same"]
        assert result["same"]
        assert result["kinds"] == ["Params4bit" if library else "Parameter"]
        texts = result["texts"]
        assert "tp does not split 4-bit weights, such as base_model" in texts["tp"]
        for name in ("tp", "fsdp1"):
            assert f"{name} does not split 4-bit weights" in texts[f"prepare {name}"]
            assert "Use fsdp, ddp, zero1, pp, cp or ulysses" in texts[f"prepare {name}"]
        assert "Save the adapters alone: %dist_save PATH --adapters" in texts["save"]
        assert "is quantized, so nothing is merged into it" in texts["merged"]
        assert "up_proj.weight was quantized from other weights" in texts["apart"]
