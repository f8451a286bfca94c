"""Tensor parallelism: loss and every gradient as in one process, random numbers, errors."""

import pytest

from tests.support import tp_models
from tests.support.torch_ranks import run_ranks

TOLERANCE = 2e-6

# A model under a choice beside the same one in this process; both see the same global batch.
COMPARE = """
    import copy, zlib
    from torch import nn
    from torch.distributed.tensor import DTensor
    from nbdist.strategy.choose import choose
    from nbdist.parallel import build as building, mesh as grids, module_patches as undo
    from nbdist.parallel.transform import ModelBuild
    from tests.support import tp_models
    from tests.support.tp_models import BATCH, MODELS, Block, Coder, Model, NanoAttention, Plain
    from tests.support.tp_models import batch

    cpu = torch.device("cpu")

    def put(model, name, options):
        choice = choose(name, options, n)
        job = ModelBuild(model, choice, grids.build_mesh(choice, "cpu"), cpu)
        built = building.plan(job)
        whole = {key: value.detach() for key, value in building.tensors_of(model).items()}
        local = {}
        for key, layout in built.layouts.items():
            part = building.part_of(whole[key], layout, job.grid.degrees, rank)
            if part is not None:
                local[key] = part.clone()
        building.commit(built, local)
        return built

    def worst(built, reference):
        "The largest difference of a gradient, absolute and by its largest number."
        absolute = relative = 0.0
        wanted = {name: p.grad for name, p in reference.named_parameters()}
        place = (built.job.grid.degrees, rank)
        for name, p in built.job.base.named_parameters():
            part = building.part_of(wanted[name], built.layouts[name], *place)
            if part is None or not part.numel():
                continue
            g = p.grad
            if isinstance(p, DTensor):
                assert g.placements == p.placements, (name, g.placements, p.placements)
                g = g.to_local()
            off = (part - g).abs().max().item()
            absolute = max(absolute, off)
            # Some are nothing but rounding: a bias of keys moves all of a query's scores alike.
            relative = max(relative, off / max(wanted[name].abs().max().item(), 1e-3))
        return absolute, relative

    def compare(make, name="tp", optimizer=None, steps=1, **options):
        "Differences of losses, of gradients, and of the loss in evaluation."
        torch.manual_seed(0)
        reference = make()
        torch.manual_seed(0)
        built = put(make(), name, options)
        outer, grid = built.outer, built.job.grid
        dp = grid.degrees.dp
        index = grid.coordinate.dp_replicate * grid.degrees.dp_shard + grid.coordinate.dp_shard
        rows = slice(index * BATCH // dp, (index + 1) * BATCH // dp)
        pair = []
        if optimizer is not None:
            kind, more = optimizer
            pair = [kind(reference.parameters(), lr=1e-2)]
            pair.append(kind(outer.parameters(), lr=1e-2, **more))
        off = []
        for step in range(steps):
            words, labels = batch(step)
            expected = reference(words, labels)
            expected.backward()
            loss = outer(words[rows], labels[rows])
            loss.backward()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            off.append(abs(expected.item() - mean.item() / n))
            gradients = worst(built, reference)
            for stepped in pair:
                stepped.step()
                stepped.zero_grad()
        reference.eval(), outer.eval()
        with torch.no_grad():
            words, labels = batch(9)
            value = outer(words[rows], labels[rows]).detach().clone()
            dist.all_reduce(value)
            off.append(abs(reference(words, labels).item() - value.item() / n))
        return [max(off), *gradients]
"""


def check(results, least=1, most=TOLERANCE):
    """Every case on every rank within the tolerance; a gradient's small numbers, too."""
    assert len(results[0]["cases"]) >= least
    for rank, result in enumerate(results):
        for case, (loss, gradient, relative) in result["cases"].items():
            assert loss <= TOLERANCE, (case, rank, loss)
            assert gradient <= most, (case, rank, gradient)
            assert relative <= 1e-4, (case, rank, relative)


LATER = ("biases", "length first", "qwen3", "bert")
SOON = tuple(name for name in tp_models.MODELS if name not in LATER)


@pytest.mark.parametrize(
    ("names", "split"),
    [
        (SOON, ("decoder", "llama")),
        pytest.param(LATER, ("grouped", "nano", "length first", "gpt2"), marks=pytest.mark.parity),
    ],
    ids=["some", "others"],
)
def test_models_train_as_in_one_process(tmp_path, names, split):
    """All shipped plans, some with sequence parallelism, in training and evaluation."""
    text = (
        COMPARE
        + """
    cases = {name: compare(MODELS[name]) for name in os.environ["NAMES"].split(", ")}
    for name in os.environ["SPLIT"].split(", "):
        cases[f"{name}, sequence"] = compare(MODELS[name], sequence_parallel=True)
    done(cases=cases)
    """
    )
    results = run_ranks(tmp_path, 2, text, NAMES=", ".join(names), SPLIT=", ".join(split))
    check(results, len(names) + len(split))


def test_optimizers_random_numbers_and_errors(tmp_path):
    """What a loop needs beside gradients, in one start of two ranks."""
    text = (
        COMPARE
        + """
    nano = MODELS["nano"]
    adamw, sgd = torch.optim.AdamW, torch.optim.SGD
    cases = {
        "foreach": compare(nano, optimizer=(adamw, {"foreach": True}), steps=2),
        "fused, sequence": compare(
            nano, optimizer=(adamw, {"fused": True}), steps=2, sequence_parallel=True
        ),
        "checkpoint": compare(nano, checkpoint="full"),
    }

    def dropped(make, **options):
        "Which dropouts drop alike on the ranks; the losses; the seeds differ."
        torch.manual_seed(0)
        model = make()
        torch.manual_seed(100 + rank)
        outer = put(model, "tp", options).outer.train()
        masks = []
        for name, module in model.named_modules():
            if isinstance(module, nn.Dropout):
                def see(_module, _args, out, name=name):
                    masks.append((name, zlib.crc32(out.detach().ne(0).numpy().tobytes())))
                module.register_forward_hook(see)
        optimizer = sgd(outer.parameters(), 0.1)
        losses = []
        before = torch.get_rng_state()
        for step in range(2):
            loss = outer(*batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        stream = (not torch.equal(before, torch.get_rng_state()), torch.rand(()).item())
        everybody = [None] * n
        dist.all_gather_object(everybody, (masks, losses, stream))
        (a, losses, stream), (b, others, other) = everybody
        n_own = len({mask for _, mask in masks})
        return {
            "alike": sorted({x[0] for x, y in zip(a, b) if x == y}),
            "own": sorted({x[0] for x, y in zip(a, b) if x != y}),
            "losses": losses == others and losses,
            "fresh": n_own,
            "streams differ": stream != other,
        }

    def dropping():
        block = lambda: Block(NanoAttention(0.2), Plain(0.2), nn.LayerNorm)
        return Model(block, dropout=0.2)

    drops = {
        "nano": dropped(dropping),
        "again": dropped(dropping, checkpoint="full"),
        "sequence": dropped(dropping, sequence_parallel=True),
        "encoder": dropped(lambda: Coder(0.2)),
    }

    torch.manual_seed(0)
    plain = nano()
    built = put(plain, "tp", {})
    heads = plain.layers[0].attn.n_head
    twin = copy.deepcopy(built.outer)
    words, labels = batch()
    same = (twin(words, labels) - built.outer(words, labels)).item()
    frozen = [p.requires_grad for p in plain.parameters()]
    tied = plain.head.weight is plain.emb.weight
    # Planned again from what the model is without it.
    with building.bare(built):
        again = building.plan(ModelBuild(plain, built.job.choice, built.job.grid, cpu))
    outside = refusal(lambda: built.outer(words + 257, labels), IndexError)
    undo.revert(built.changes)
    long = put(nano(), "tp", {"sequence_parallel": True}).outer
    uneven = refusal(lambda: long(*batch(0, 7)))
    long(*batch(0, 6))

    class Noisy(Plain):
        is_noisy = False
        def forward(self, x):
            x = super().forward(x)
            return x + torch.randn_like(x) if Noisy.is_noisy else x
    torch.manual_seed(rank)
    noisy = put(Model(lambda: Block(NanoAttention(), Noisy())), "tp", {}).outer
    quiet = noisy(words, labels).item()
    Noisy.is_noisy = True
    surprise = refusal(lambda: noisy(words, labels))
    alike = [None] * n
    dist.all_gather_object(alike, noisy(words, labels).item())

    done(
        cases=cases, drops=drops, heads=(heads, plain.layers[0].attn.n_head), same=same, tied=tied,
        frozen=all(frozen), again=again.layouts == built.layouts, outside=outside, uneven=uneven,
        surprise=surprise, alike=alike,
    )
    """
    )
    results = run_ranks(tmp_path, 2, text)

    check(results, 3)
    on_rank_0 = results[0]
    layers = [f"layers.{n}.{name}" for n in (0, 1) for name in ("attn.resid_dropout", "mlp.4")]
    between = ["layers.0.mlp.2", "layers.1.mlp.2"]
    for case in ("nano", "again"):
        assert on_rank_0["drops"][case]["alike"] == ["drop", *layers]
        assert on_rank_0["drops"][case]["own"] == between
    assert on_rank_0["drops"]["sequence"]["alike"] == ["drop"]
    assert on_rank_0["drops"]["sequence"]["own"] == sorted([*layers, *between])
    assert on_rank_0["drops"]["encoder"]["own"] == [f"encoder.layers.{n}.dropout" for n in (0, 1)]
    for case in on_rank_0["drops"].values():
        assert case["losses"]
        assert case["streams differ"]
    # Activations that are computed again drop what they dropped: the same losses, step by step.
    assert on_rank_0["drops"]["again"]["losses"] == on_rank_0["drops"]["nano"]["losses"]
    assert on_rank_0["drops"]["nano"]["fresh"] == 2 * 7  # a mask of its own for each call
    for result in results:
        assert (result["heads"], result["same"]) == ([2, 4], 0.0)
        assert all(result[name] for name in ("tied", "frozen", "again"))
        assert "out of range" in result["outside"]
        assert "a sequence of 7 cannot be split over tp=2" in result["uneven"]
        assert "Run it again" in result["surprise"]
        assert result["alike"][0] == result["alike"][1]


def test_torchs_attention_is_the_same_on_own_heads(tmp_path):
    """Weights told, masks of each kind, other widths of keys, without batch; no fast path."""
    text = (
        COMPARE
        + """
    W, H = 32, 4
    def compared(inputs, call, **more):
        torch.manual_seed(0)
        class Only(nn.Module):
            def __init__(self):
                super().__init__()
                self.mha = nn.MultiheadAttention(W, H, **more)
            def forward(self, *arguments):
                return call(self.mha, *arguments)
        whole = Only()
        torch.manual_seed(0)
        split = put(Only(), "tp", {})
        off = []
        for is_training in (True, False):
            whole.train(is_training), split.outer.train(is_training)
            outcomes = []
            for model in (whole, split.outer):
                leaves = [x.clone().requires_grad_(is_training) for x in inputs]
                with torch.set_grad_enabled(is_training):
                    result, weights = model(*leaves)
                if is_training:
                    weights_sum = 0 if weights is None else weights[..., 0].sum()
                    (result.pow(2).sum() + weights_sum).backward()
                tensors = [result, weights, *(x.grad for x in leaves)]
                outcomes.append([x.detach() for x in tensors if x is not None])
            off += [(a - b).abs().max().item() for a, b in zip(*outcomes, strict=True)]
        return [max(off), *worst(split, whole)]

    torch.manual_seed(1)
    x, y = torch.randn(3, 5, W), torch.randn(3, 7, W)
    narrow = torch.randn(3, 7, 12)
    causal = torch.triu(torch.ones(5, 5, dtype=torch.bool), 1)
    padding = torch.zeros(3, 7, dtype=torch.bool)
    padding[1, 4:] = True
    each = torch.randn(3 * H, 5, 7)
    first, bare = {"batch_first": True}, {"need_weights": False}
    cases = {
        "weights": compared([x], lambda m, x: m(x, x, x), **first),
        "all weights": compared([x], lambda m, x: m(x, x, x, average_attn_weights=False), **first),
        "causal": compared(
            [x], lambda m, x: m(x, x, x, attn_mask=causal, is_causal=True, **bare), **first
        ),
        "cross, padded": compared(
            [x, y], lambda m, x, y: m(x, y, y, key_padding_mask=padding, **bare), **first
        ),
        "mask of each head": compared([x, y], lambda m, x, y: m(x, y, y, attn_mask=each), **first),
        "other widths": compared(
            [x, narrow], lambda m, x, y: m(x, y, y), kdim=12, vdim=12, bias=False, **first
        ),
        "length first": compared([x], lambda m, x: m(x, x, x)),
        "no batch": compared([x[0]], lambda m, x: m(x, x, x)),
    }
    # The encoder's own fast path in C++ would take the ranks' parts for the whole.
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(W, H, 64, batch_first=True, dropout=0.0)
    whole = nn.TransformerEncoder(layer, 2).eval()
    split = put(copy.deepcopy(whole), "tp", {}).outer.eval()
    with torch.no_grad():
        a, b = (m(y, src_key_padding_mask=padding)[~padding] for m in (whole, split))
    done(cases=cases, fast=(a - b).abs().max().item())
    """
    )
    results = run_ranks(tmp_path, 2, text)

    check(results, 8, most=5e-6)  # of sums, not of means: larger numbers
    assert all(result["fast"] <= TOLERANCE for result in results)


FOUR_RANKS = {
    "tp": """
    for name in ("biases", "nano", "flat", "encoder", "length first", "decoder"):
        cases[name] = compare(MODELS[name])
    """,
    "tp, sequence": """
    for name in ("biases", "nano", "encoder", "length first", "decoder"):
        cases[name] = compare(MODELS[name], sequence_parallel=True)
    """,
    "fsdp x tp": """
    for name in ("grouped", "nano", "encoder"):
        cases[name] = compare(MODELS[name], "fsdp", tp=2)
    for more in ({"foreach": True}, {"fused": True}):
        cases[str(more)] = compare(MODELS["nano"], "fsdp", tp=2, optimizer=(adamw, more), steps=3)
    """,
    "fsdp x tp, sequence": """
    for name in ("grouped", "nano", "encoder", "length first"):
        cases[name] = compare(MODELS[name], "fsdp", tp=2, sequence_parallel=True)
    """,
    "pp x tp": """
    for name, split in (("grouped", True), ("nano", False), ("encoder", False), ("encoder", True)):
        options = {"pp": 2, "tp": 2, "microbatches": 2, "sequence_parallel": split}
        cases[f"{name} {split}"] = compare(MODELS[name], None, **options)
    """,
    "Hugging Face": """
    cases["gpt2"] = compare(MODELS["gpt2"])
    cases["gpt2, sequence"] = compare(MODELS["gpt2"], sequence_parallel=True)
    cases["llama, fsdp"] = compare(MODELS["llama"], "fsdp", tp=2)
    cases["qwen3, fsdp, sequence"] = compare(
        MODELS["qwen3"], "fsdp", tp=2, sequence_parallel=True
    )
    """,
}


@pytest.mark.parity
@pytest.mark.parametrize("case", FOUR_RANKS)
def test_four_ranks(tmp_path, case):
    """tp at four, with FSDP and in a pipeline, sequence parallelism in each; uneven vocabulary."""
    begin, end = "\n    cases, adamw = {}, torch.optim.AdamW\n", "\n    done(cases=cases)"
    check(run_ranks(tmp_path, 4, COMPARE + begin + FOUR_RANKS[case] + end), 4)
