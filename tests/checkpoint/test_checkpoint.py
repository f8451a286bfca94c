"""A checkpoint that any number of ranks has saved is loaded by any other, under any strategy."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.kernel import run_python
from tests.support.torch_ranks import TorchRanks
from tests.support.training import MODEL, SAVED

CLOSE = 2e-6
# Many saves in one cluster, each on the disk.
LIMIT_S = 160.0
SHALLOW = {"BLOCKS": "2"}

PARTS = (
    SAVED
    + """
    import functools
    from nbdist.checkpoint.rank import jobs, load as loading, save as saving
    folder = os.environ["FOLDER"]
    gc.collect(); gc.freeze()  # what torch brings is not looked at again and again

    def save(path, is_async=False):
        "Saves, and waits on all ranks until rank 0 has put it in its place."
        begun = saving.begin(path, path, is_async)
        state = jobs.wait(path)
        dist.barrier()
        assert state.state == "done", state
        return begun, state

    load = loading.load

    def tell(texts, what):
        "Does it, and adds that it is done, or what it has raised."
        try:
            what()
            texts.append("done")
        except NbdistError as error:
            texts.append(f"{type(error).__name__}: {error}")

    def values_of(parts):
        return {k: v.clone() for k, v in accelerator.get_state_dict(parts[0]).items()}

    def is_same(parts, before):
        return all(torch.equal(v, before[k]) for k, v in values_of(parts).items())

    def first(name, options, kind):
        "Three steps, a checkpoint, and three more, with the random numbers that come after it."
        use(name, **options)
        parts = made(0, kind)
        loop = iter(parts[3])
        run(parts, (next(loop) for _ in range(3)))
        save(f"{folder}/{name}{kind.__name__}")
        drawn = torch.rand(3).tolist()
        return run(parts, loop), drawn

    def second(name, options, kind, source):
        "Other weights, then the checkpoint, and the three steps that came after it."
        use(name, **options)
        parts = made(rank + 5, kind)
        ids = [id(group) for group in parts[1].optimizer.param_groups]
        parameters = [id(p) for p in parts[0].parameters()]
        loaded = load(f"{folder}/{source}{kind.__name__}")
        drawn = torch.rand(3).tolist()
        assert ids == [id(group) for group in parts[1].optimizer.param_groups]
        assert parameters == [id(p) for p in parts[0].parameters()]
        assert parts[4].n == 3
        return run(parts, parts[3]), drawn, loaded.notes

    def pairs():
        results = {}
        for name, options, kind in json.loads(os.environ["SAVED"]):
            results[f"{name}{kind}"] = tried(first, name, options, globals()[kind])
        return results
"""
)
# No nbdist: what anybody with torch can do.
PLAIN = """
import json, sys, torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
folder, out = sys.argv[1:]
dcp_to_torch_save(folder, out)
whole = torch.load(out, weights_only=True)
name = "model.tied.blocks.0.mlp.up_proj.weight"
part = {name: torch.empty(32, 16)}
dcp.load(part, checkpoint_id=folder)
model = whole["model"]["tied"]
steps = whole["optimizer"]["adamw"]["tied"]
assert "nbdist" not in sys.modules
print(json.dumps({
    "names": sorted(model), "tied": torch.equal(model["embed.weight"], model["head.weight"]),
    "same": torch.equal(part[name], model["blocks.0.mlp.up_proj.weight"]),
    "moments": sorted(steps["head.bias"]), "step": steps["head.bias"]["step"].item(),
}))
"""


TWO = """
    saved, loaded = pairs(), {}
    for name, options, kind, source in json.loads(os.environ["LOADED"]):
        result = tried(second, name, options, globals()[kind], source)
        loaded[f"{name}{kind} {source}{kind}"] = result
    done(saved=saved, loaded=loaded)
"""


def check(saved: dict[str, Any], loaded: dict[str, Any], *, is_same_size: bool) -> None:
    """What was loaded goes on as what was saved did: losses, data, rates, random numbers."""
    for row, result in loaded.items():
        assert not isinstance(result, str), f"{row}\n{result}"
        source = saved[row.split()[1]]
        assert not isinstance(source, str), source
        losses, drawn, notes = result
        assert losses == pytest.approx(source[0], abs=CLOSE), row
        if is_same_size:
            assert drawn == source[1], row
            assert notes == []
        else:
            assert notes[0].startswith("random generators are unchanged: saved on 2 ranks")


_LOADED = [("ddp", "Net", "fsdp"), ("fsdp", "Tied", "pp"), ("tp", "Net", "zero1")]
_MORE = [("zero1", "Net", "fsdp"), ("pp", "Net", "fsdp"), ("fsdp", "Net", "zero1")]


@pytest.mark.parametrize("pairs", [_LOADED, pytest.param(_MORE, marks=pytest.mark.parity)])
def test_a_checkpoint_goes_on_under_another_strategy(
    tmp_path: Path, pairs: list[tuple[str, str, str]]
) -> None:
    """Weights, moments, groups, rate, position in the data, own objects, generators; tied ones."""
    saved = [("fsdp", {}, "Net"), ("pp", {}, "Tied"), ("zero1", {}, "Net")]
    loaded = [(name, {}, kind, source) for name, kind, source in pairs]
    env = {"FOLDER": str(tmp_path / "states"), **SHALLOW}
    cases = {"SAVED": json.dumps(saved), "LOADED": json.dumps(loaded)}
    with TorchRanks(tmp_path / "run", 2, MODEL + PARTS + TWO, LIMIT_S, **env, **cases) as ranks:
        for result in ranks.results():
            check(result["saved"], result["loaded"], is_same_size=True)
    _plain_torch_reads(tmp_path / "states" / "ppTied", tmp_path / "whole.pt")


def _plain_torch_reads(folder: Path, out: Path) -> None:
    """Without nbdist a process makes one file of it, and loads a tensor; tied names are there."""
    ended = run_python("-W", "ignore", "-c", PLAIN, str(folder), str(out))

    assert ended.returncode == 0, ended.stderr
    printed = json.loads(ended.stdout.splitlines()[-1])
    assert printed["tied"]
    assert printed["same"]
    assert "spare" not in printed["names"]
    assert {"scale", "embed.weight", "head.weight", "blocks.1.attention.k_proj.bias"} <= set(
        printed["names"]
    )
    assert printed["moments"] == ["exp_avg", "exp_avg_sq", "step"]
    assert printed["step"] == 3


@pytest.mark.parity
def test_another_number_of_ranks_loads_it_and_plain_torch_too(tmp_path: Path) -> None:
    """Saved on two ranks, loaded on four and on one; read whole without nbdist."""
    env = {"FOLDER": str(tmp_path / "states"), "SAVED": "[]"}
    saved = [("fsdp", {}, "Net"), ("pp", {}, "Tied"), ("fsdp1", {}, "Net"), ("tp", {}, "Net")]
    text = MODEL + PARTS + "\n    done(saved=pairs())"
    cases = env | {"SAVED": json.dumps(saved)}
    with TorchRanks(tmp_path / "two", 2, text, LIMIT_S, **cases) as ranks:
        first = ranks.results()[0]["saved"]
    plans = {
        4: [
            ("fsdp", {"tp": 2}, "Net", "fsdp"),
            ("fsdp", {"pp": 2}, "Tied", "pp"),
            ("fsdp1", {}, "Net", "tp"),
            ("zero1", {}, "Net", "fsdp1"),
        ],
        1: [("single", {}, "Net", "fsdp1"), ("single", {}, "Tied", "pp")],
    }
    for size, loaded in plans.items():
        env["LOADED"] = json.dumps(loaded)
        with TorchRanks(
            tmp_path / f"run{size}", size, MODEL + PARTS + TWO, LIMIT_S, **env
        ) as ranks:
            for result in ranks.results():
                check(first, result["loaded"], is_same_size=False)


BESIDE = """
    use("fsdp")
    parts = made(0, Net)
    run(parts, list(parts[3])[:2])
    before = values_of(parts)
    saving.begin(f"{folder}/beside", "one", True)
    texts = []
    attempt = functools.partial(tell, texts)
    attempt(lambda: load(f"{folder}/beside"))
    run(parts, list(parts[3])[:2])
    saved = jobs.wait("one")
    dist.barrier()
    run(parts, [list(parts[3])[0]])
    load(f"{folder}/beside")
    same = is_same(parts, before)

    # What was there before stays whole where a save fails.
    class Odd:
        def state_dict(self):
            return {"f": {"g": [1, Counter()]}}
        def load_state_dict(self, state):
            pass
    odd = Odd()
    accelerator.register_for_checkpointing(odd)
    attempt(lambda: saving.begin(f"{folder}/beside", "two", False))
    del odd
    gc.collect()
    # A rank that is told to stop, and one that writes something else than it was given.
    saving.begin(f"{folder}/beside", "three", False)
    jobs.stop("three", "somebody asked for it") if rank == 1 else None
    jobs.wait("three")
    state = jobs.state("three")
    dist.barrier()
    from nbdist.checkpoint.rank import write as checkpoint_write
    is_equal = checkpoint_write._is_equal
    if rank == 1:
        checkpoint_write._is_equal = lambda data, wanted: False
    saving.begin(f"{folder}/beside", "four", False)
    torn = jobs.wait("four")
    checkpoint_write._is_equal = is_equal
    dist.barrier()
    attempt(lambda: load(f"{folder}/beside"))
    left = sorted(path.name for path in Path(folder).iterdir())
    beside = dict(texts=texts, state_beside=saved.state, same=same,
                  state=[state.state, state.failure],
                  torn=torn.failure, left=left)
    del parts
    gc.collect()
"""


def test_a_save_beside_training_and_saves_that_fail(broken: list[dict[str, Any]]) -> None:
    """It holds what was there when it began; what fails leaves the earlier one whole."""
    first, second = (result["beside"] for result in broken)

    assert (first["state_beside"], second["state_beside"]) == ("done", "done")
    assert first["same"]
    assert second["same"]
    assert first["left"] == ["beside"]
    assert "objects.1.1.f.g.1 (__main__.Counter) cannot be saved" in first["texts"][1]
    assert first["texts"][2] == "done"
    if first["state"][0] == "failed":  # it may have been faster
        assert "somebody asked for it" in first["state"][1]
    assert "differs in" in first["torn"]
    assert first["torn"] == second["torn"]
    assert first["torn"].startswith("rank 1: ")


OPTIMIZERS = """
    O = torch.optim
    kinds = {
        "sgd": lambda p: O.SGD(p, lr=0.05, momentum=0.9),
        "amsgrad": lambda p: O.Adam(p, lr=torch.tensor(0.01), amsgrad=True),
        "adafactor": lambda p: O.Adafactor(p, lr=0.01),
        "lbfgs": lambda p: O.LBFGS(p, lr=0.01),
    }
    def prepared(seed, kind):
        torch.manual_seed(seed)
        net = Net()
        return accelerator.prepare(net, kinds[kind](net.parameters()))
    def steps(parts, n=2):
        model, optimizer = parts
        def closure():
            optimizer.zero_grad()
            loss = model(tokens[:8], labels=labels[:8])
            accelerator.backward(loss)
            return loss
        return [optimizer.step(closure).item() for _ in range(n)]
    texts, same = {}, {}
    for kind in kinds:
        use("ddp")
        parts = prepared(0, kind)
        steps(parts)
        try:
            save(f"{folder}/{kind}")
        except NbdistError as error:
            texts[kind] = str(error)
            continue
        after = steps(parts)
        for name in ("ddp", "zero1", "fsdp"):
            del parts
            gc.collect()
            use(name)
            parts = prepared(3, kind)
            try:
                load(f"{folder}/{kind}")
                same[kind + name] = max(abs(a - b) for a, b in zip(after, steps(parts)))
            except NbdistError as error:
                texts[kind + name] = str(error)
    del parts
    gc.collect()
"""


SEVERAL = """
    class Judge(Net):
        pass
    def several(seed, kinds):
        torch.manual_seed(seed)
        prepared = {}
        for kind in kinds:
            net = kind()
            prepared[kind.__name__] = accelerator.prepare(net, O.AdamW(net.parameters(), lr=0.01))
        bases = [accelerator.unwrap_model(model) for model, _ in prepared.values()]
        both = [p for base in bases for p in base.parameters()]
        prepared["both"] = accelerator.prepare(O.SGD(both, lr=0.01, momentum=0.9))
        return prepared
    def rounds(prepared):
        losses = []
        for kind in ("Net", "Judge"):
            model, optimizer = prepared[kind]
            loss = model(tokens[:8], labels=labels[:8])
            accelerator.backward(loss)
            optimizer.step()
            losses.append(loss.item())
        prepared["both"].step()
        for kind in ("Net", "Judge"):
            prepared[kind][1].zero_grad()
        return losses
    use("fsdp")
    parts = several(0, (Net, Judge))
    rounds(parts)
    save(folder + "/several")
    wanted = [rounds(parts), rounds(parts)]
    del parts
    gc.collect()
    use("zero1")
    parts = several(5, (Net, Judge))
    load(folder + "/several")
    got = [rounds(parts), rounds(parts)]
    names = {saved["kind"]: saved["names"][0][0] for saved in
             json.loads((Path(folder) / "several/nbdist.json").read_text())["optimizers"]}
    done(texts=texts, same=same, wanted=wanted, got=got, names=names)
"""


@pytest.fixture(scope="module")
def forms(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What rank 0 of two tells of optimizers of every form, and of several models."""
    folder = tmp_path_factory.mktemp("forms")
    text = MODEL + PARTS + OPTIMIZERS + SEVERAL
    with TorchRanks(folder / "run", 2, text, LIMIT_S, FOLDER=str(folder / "states")) as ranks:
        return ranks.results()[0]


@pytest.mark.parity
def test_several_models_and_an_optimizer_of_both(forms: dict[str, Any]) -> None:
    """Each finds its own, by the names of models."""
    assert forms["names"] == {"AdamW": "judge.embed.weight", "SGD": "net.embed.weight"}
    for wanted, got in zip(forms["wanted"], forms["got"], strict=True):
        assert got == pytest.approx(wanted, abs=CLOSE)


@pytest.mark.parity
def test_optimizers_of_every_form(forms: dict[str, Any]) -> None:
    """SGD's momentum, a rate that is a tensor; factors go where they can, a history nowhere."""
    assert set(forms["same"]) == {
        *(kind + name for kind in ("sgd", "amsgrad") for name in ("ddp", "zero1", "fsdp")),
        "adafactorddp", "adafactorzero1",
    }  # fmt: skip
    assert max(forms["same"].values()) <= CLOSE
    assert set(forms["texts"]) == {"lbfgs", "adafactorfsdp"}
    assert "LBFGS keeps" in forms["texts"]["lbfgs"]
    assert "cannot be saved in parts" in forms["texts"]["lbfgs"]
    assert "which cannot be sharded as the strategy requires" in forms["texts"]["adafactorfsdp"]


WRONG = """
    texts = []
    attempt = functools.partial(tell, texts)
    use("fsdp")
    attempt(lambda: load(f"{folder}/nothing"))
    parts = made(0, Net)
    run(parts, list(parts[3])[:1])
    where = f"{folder}/one"
    save(where)
    del parts
    gc.collect()

    def wide():
        return Net(width=32)
    parts = made(0, wide)
    before = values_of(parts)
    attempt(lambda: load(where))
    is_unchanged = [is_same(parts, before)]
    del parts
    gc.collect()
    parts = made(0, Tied)
    attempt(lambda: load(where))
    del parts
    gc.collect()
    net = Net()
    parts = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    attempt(lambda: load(where))
    attempt(lambda: loading.load(where, True))
    attempt(lambda: load(f"{folder}/nothing"))
    # What fails on one rank alone.
    del parts, net
    gc.collect()
    parts = made(4, Net)
    run(parts, list(parts[3])[:1])
    before = values_of(parts)
    moments = accelerator.unwrap_model(parts[0]).head.weight
    moments = parts[1].optimizer.state[moments]["exp_avg"].to_local().clone()
    fill = loading._fill
    def broken(*args):
        fill(*args)
        raise NbdistError("the cable is out")
    if rank == 1:
        loading._fill = broken
    attempt(lambda: load(where))
    loading._fill = fill
    is_unchanged.append(is_same(parts, before))
    state = parts[1].optimizer.state[accelerator.unwrap_model(parts[0]).head.weight]
    is_unchanged.append(torch.equal(moments, state["exp_avg"].to_local()))
    file = Path(where) / "__1_0.distcp"
    data = file.read_bytes()
    dist.barrier()
    if rank == 0:
        file.write_bytes(data[:-5] + b"abcde")
    dist.barrier()
    attempt(lambda: load(where))
    if rank == 0:
        file.write_bytes(data)
        import pickle, zlib
        class Bad:
            def __reduce__(self):
                return os.system, ("touch " + folder + "/ran",)
        bad = pickle.dumps(Bad())
        (Path(where) / ".metadata").write_bytes(bad)
        manifest = json.loads((Path(where) / "nbdist.json").read_text())
        for entry in manifest["files"]:
            if entry["name"] == ".metadata":
                entry |= {"size_bytes": len(bad), "checksum": f"crc32:{zlib.crc32(bad):08x}"}
        (Path(where) / "nbdist.json").write_text(json.dumps(manifest))
    dist.barrier()
    attempt(lambda: loading.load(where, True))
    ran = os.path.exists(folder + "/ran")
    done(beside=beside, texts=texts, ran=ran, is_unchanged=is_unchanged)
"""


@pytest.fixture(scope="module")
def broken(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What two ranks tell of saves and loads that fail."""
    folder = tmp_path_factory.mktemp("broken")
    env = {"FOLDER": str(folder / "states"), **SHALLOW}
    with TorchRanks(folder / "run", 2, MODEL + PARTS + BESIDE + WRONG, LIMIT_S, **env) as ranks:
        return ranks.results()


def test_what_does_not_fit_is_refused_with_the_reason(broken: list[dict[str, Any]]) -> None:
    """Shapes, names, classes, damage, a pickle that would run something: nothing is changed."""
    first, second = broken
    texts = first["texts"]
    assert texts[0].startswith("CheckpointError: ")
    assert "does not exist" in texts[0] or "No model is prepared" in texts[0]
    assert "embed.weight is (24, 16) in the checkpoint and (24, 32) here" in texts[1]
    assert "Nothing was changed" in texts[1]
    assert "scale is not in the checkpoint" in texts[2]
    assert "AdamW in the checkpoint, SGD here" in texts[3]
    assert texts[4] == "done"
    assert "does not exist" in texts[5]
    assert "the cable is out" in texts[6]
    assert "failed on rank 1, so no rank went on" in texts[6]
    assert "__1_0.distcp has changed" in texts[7]
    assert "posix.system" in texts[8]
    assert first["is_unchanged"] == second["is_unchanged"] == [True, True, True]
    assert not first["ran"]
    assert "NbdistError: the cable is out" in second["texts"][6]
