"""Plain Accelerate code trains as one process does: any strategy, order of preparing, switch."""

import json
from pathlib import Path

import pytest

from tests.support.torch_ranks import run_ranks
from tests.support.training import MODEL

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
    results = run_ranks(tmp_path, 2, MODEL + ORDERS, ROWS=json.dumps(rows), BLOCKS="2")

    for result in results:
        assert len(result["found"]) == len(rows) * 7
        assert max(result["found"].values()) < 2e-6, result["found"]
        # fully_shard makes the class FSDPNet.
        assert {name for name, _ in result["named"].values()} <= {"Net", "FSDPNet"}
        assert all(is_same for _, is_same in result["named"].values())


GOES_ON = """
    from nbdist.switch.rank.switch import switch

    accelerator = Accelerator(
        gradient_accumulation_steps=2,
        dataloader_config=DataLoaderConfiguration(split_batches=True))

    def cell(path):
        "One loop over the data; each step but the first begins with a switch."
        global model
        torch.manual_seed(rank + 1)
        loader = DataLoader(
            data, batch_size=BATCH, shuffle=True, generator=torch.Generator().manual_seed(5))
        net, optimizer, scheduler = make(0)
        model, optimizer, scheduler, loader = accelerator.prepare(
            net, optimizer, scheduler, loader)
        same = [id(item) for item in (optimizer, optimizer.optimizer, scheduler, loader)]
        losses, loop, drawn = [], iter(loader), torch.get_rng_state()
        for at, (x, y) in enumerate(loop):
            with accelerator.accumulate(model):
                loss = model(x, labels=y)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
            losses.append(accelerator.reduce(loss.detach(), "mean").item())
            if at % 2 and path:
                name, options = path.pop(0)
                done_ = switch(choose(name, options, n))
                # A variable of a cell is rebound by the switch; this one is a function's.
                model = registry.prepared_of(net).outer
                del done_
        assert same == [id(item) for item in (optimizer, optimizer.optimizer, scheduler, loader)]
        assert torch.equal(drawn, torch.get_rng_state())
        return losses + scheduler.get_last_lr()

    curves = {}
    for path in ([], *json.loads(os.environ["PATHS"])):
        use("ddp")
        curves[" ".join(["ddp", *(name for name, _ in path)])] = tried(cell, list(path))
        model = None
    done(curves=curves)
"""
# The scaler is kept while fp16 is, and accumulation follows the option.
SCALES = """
    from nbdist.errors import OptionError
    from nbdist.switch.rank.switch import switch

    use("ddp", precision="fp16", accumulate=4)
    other = Accelerator(kwargs_handlers=[GradScalerKwargs(init_scale=64.0, growth_interval=1)])
    net = make(0)[0]
    model = other.prepare(net)
    optimizer = other.prepare(torch.optim.SGD(net.parameters(), lr=0.1))
    facts = [[other.mixed_precision, other.gradient_accumulation_steps]]
    scaler = other.scaler
    def backwards(count):
        "Four are a step; which of them ended one."
        synced = []
        for _ in range(count):
            with other.accumulate(model):
                other.backward(model(tokens[:4], labels=labels[:4]))
                optimizer.step()
                optimizer.zero_grad()
            synced.append(other.sync_gradients)
        return synced
    backwards(4)
    scales = [scaler.get_scale()]
    ways = {"precision": "fp16", "accumulate": 4}, {"precision": "bf16"}, {"precision": "fp16"}
    begun = []
    for options in ways:
        if other.gradient_accumulation_steps > 1:
            backwards(1)  # of an accumulation that the switch ends
        switch(choose("fsdp", options, n))
        begun.append(other.sync_gradients)
        model = registry.prepared_of(net).outer
        facts.append([other.mixed_precision, other.gradient_accumulation_steps,
                      other.scaler is scaler, optimizer.scaler is other.scaler])
        begun.append(backwards(4))
        scales.append(scaler.get_scale())
    # What an optimizer has no implementation of is refused while nothing has changed.
    rprop = other.prepare(torch.optim.Rprop(net.parameters(), lr=0.1))
    before_ids = [id(p) for p in rprop.param_groups[0]["params"]]
    refused = refusal(lambda: switch(choose("ddp", {"fused": True}, n)), OptionError)
    after = [id(p) for p in rprop.param_groups[0]["params"]]
    is_kept = registry.current().name == "fsdp" and after == before_ids
    done(facts=facts, scales=scales, begun=begun, refused=refused, kept=is_kept)
"""


SHORT = [[("fsdp", {}), ("zero1", {})], [("pp", {}), ("tp", {})]]
LONG = [
    [("fsdp", {}), ("ddp", {})],
    [("zero1", {}), ("pp", {})],
    [("tp", {}), ("fsdp", {"shard": "grad-op"})],
]


@pytest.mark.parametrize("paths", [SHORT, pytest.param(LONG, marks=pytest.mark.parity)])
def test_a_loop_goes_on_with_all_that_belongs_to_it(tmp_path: Path, paths: list[object]) -> None:
    """Each path's losses and rates are those of the loop without a switch; so is the generator."""
    results = run_ranks(tmp_path, 2, MODEL + GOES_ON, PATHS=json.dumps(paths), BLOCKS="2")

    for result in results:
        for path, curve in result["curves"].items():
            assert not isinstance(curve, str), f"{path}\n{curve}"
            assert curve == pytest.approx(result["curves"]["ddp"], abs=2e-6), path


def test_scaler_and_accumulation_follow_the_options(tmp_path: Path) -> None:
    """fp16's scale is kept, also while another precision counts; it doubles with each step."""
    results = run_ranks(tmp_path, 2, MODEL + SCALES, BLOCKS="2")

    for result in results:
        assert result["facts"] == [
            ["fp16", 4],
            ["fp16", 4, True, True],
            ["bf16", 1, False, True],
            ["fp16", 1, True, True],
        ]
        assert result["scales"] == [128.0, 256.0, 256.0, 4096.0]
        assert "Rprop" in result["refused"]
        assert result["kept"]
        # Gradients were cleared, so an accumulation begins anew, with its first backward.
        assert result["begun"] == [True, [False, False, False, True], *[True, [True] * 4] * 2]


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
        ("ddp", {}, "clip"),
        ("zero1", {}, ""),
        ("fsdp", {}, "value"),
        ("pp", {}, ""),
    ]
    results = run_ranks(tmp_path, 2, MODEL + OVERFLOW, ROWS=json.dumps(rows), BLOCKS="2")

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


SEARCHES = """
    def trained(strategy):
        "The weights after a step of LBFGS, whose line search goes by the loss; each rank's data."
        torch.manual_seed(0)
        net = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        net = net.double()
        x = torch.randn(8, 4, dtype=torch.float64)
        optimizer = torch.optim.LBFGS(net.parameters(), 0.5, 5, line_search_fn="strong_wolfe")
        if strategy:
            registry.set_choice(choose(strategy, {}, n))
            net, optimizer = Accelerator().prepare(net, optimizer)
            x = x.chunk(n)[rank]
        def closure():
            optimizer.zero_grad()
            loss = (net(x) - x.sum(1, keepdim=True).sin()).square().mean()
            loss.backward()
            return loss
        for _ in range(2):
            loss = optimizer.step(closure)
        return loss.item(), torch.cat([p.detach().flatten() for p in net.parameters()])

    alone, weights = trained("")
    loss, others = trained("ddp")
    done(apart=[abs(loss - alone), (weights - others).abs().max().item()])
"""


def test_an_optimizer_that_goes_by_the_loss_gets_that_of_all_data(tmp_path: Path) -> None:
    """LBFGS with a line search takes the same steps on all ranks: those of one process."""
    for end in run_ranks(tmp_path, 2, MODEL + SEARCHES):
        assert max(end["apart"]) < 1e-9, end
