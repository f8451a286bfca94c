"""Expert parallelism against one process: models of transformers, one's own, uneven routing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import nn
from torch.distributed.tensor import DTensor

from nbdist.errors import OptionError
from nbdist.parallel.ep.experts import find_experts
from tests.programs import parity
from tests.programs.experts import Experts
from tests.programs.parity import WORDS, batch, build_alone, choose, close, compare, put
from tests.programs.rank import n, rank, refusal
from tests.support.torch_ranks import on_ranks

WIDTH, EXPERTS, CHOSEN = 12, 8, 2
HALF = {"bf16": 4e-3, "fp16": 4e-4}


class Block(nn.Module):
    """A router, its experts, and one that is shared; `skew` sends nearly all tokens to two."""

    def __init__(self, skew: float) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS)
        self.experts = Experts(WIDTH, 20, EXPERTS)
        self.shared = nn.Linear(WIDTH, WIDTH)
        nn.init.zeros_(self.router.bias[2:])
        nn.init.constant_(self.router.bias[:2], skew)

    def forward(self, h):
        x = h.flatten(0, 1)
        weights, which = self.router(x).softmax(-1).topk(CHOSEN)
        return h + self.shared(h) + self.experts(x, which, weights).view_as(h)


class LM(nn.Module):
    """A mixture of experts that returns its loss."""

    def __init__(self, skew: float = 0.0) -> None:
        super().__init__()
        self.ep_plan = {"blocks.*.experts": "experts"}
        self.words = nn.Embedding(WORDS, WIDTH)
        self.blocks = nn.ModuleList(Block(skew) for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, tokens):
        h = self.words(tokens[:, :-1])
        for block in self.blocks:
            h = block(h)
        return F.cross_entropy(self.head(h).flatten(0, 1), tokens[:, 1:].flatten())


def make(skew: float = 0.0) -> LM:
    torch.manual_seed(0)
    return LM(skew)


def over(kind: str, ep: int) -> tuple[str, dict[str, int]]:
    """All ranks under ddp (`ep`) or fsdp, with experts over so many."""
    return kind, {"dp_shard" if kind == "fsdp" else "dp_replicate": n, "ep": ep}


@on_ranks(4, 2)
def test_it_trains_as_one_process() -> None:
    """Loss, gradients and AdamW; experts on all ranks and on half; some get no token at all."""

    def uneven() -> LM:
        return make(skew=100.0)

    close(
        {
            "all, recomputed": compare(*over("ep", n), build=make, steps=2, checkpoint="full"),
            "half, uneven": compare(*over("ep", 2), build=uneven, steps=2, accumulate=2),
            "fsdp, all, uneven": compare(*over("fsdp", n), build=uneven, steps=2, accumulate=2),
            "fsdp, half": compare(*over("fsdp", 2), build=make, steps=2, shard="grad-op"),
        }
    )


@pytest.mark.parity
@on_ranks(2, 4)
def test_every_combination_trains_as_one_process() -> None:
    """And with every way of recomputing; even and uneven, under all that share experts."""
    for kind in ("ep", "fsdp"):
        for precision, limit in HALF.items():
            for ep in {2, n}:
                loss, *_ = compare(*over(kind, ep), build=make, precision=precision)
                assert loss < limit, (kind, ep, precision)
        for checkpoint, ep in (("full", 2), ("selective", n), ("2", 2)):
            close({checkpoint: compare(*over(kind, ep), build=make, checkpoint=checkpoint)})
        for ep in {2, n}:
            close({f"{kind} {ep}": compare(*over(kind, ep), build=make, accumulate=2)})
            close({"uneven": compare(*over(kind, ep), build=lambda: make(skew=100.0))})


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(num_local_experts=EXPERTS, num_key_value_heads=2, **_SMALL)
    )


def qwen() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    more = {"num_experts": EXPERTS, "moe_intermediate_size": 20, "num_key_value_heads": 2}
    return Qwen3MoeForCausalLM(Qwen3MoeConfig(head_dim=4, **more, **_SMALL))


def gpt_oss() -> nn.Module:
    from transformers import GptOssConfig, GptOssForCausalLM

    more = {"num_local_experts": EXPERTS, "num_key_value_heads": 2, "head_dim": 4}
    rope = {"rope_type": "default", "rope_theta": 10000.0}
    layers = ["full_attention", "full_attention"]
    return GptOssForCausalLM(
        GptOssConfig(rope_parameters=rope, layer_types=layers, **more, **_SMALL)
    )


def deepseek() -> nn.Module:
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    experts = {"n_routed_experts": EXPERTS, "n_shared_experts": 1, "n_group": 4, "topk_group": 2}
    ranks = {"kv_lora_rank": 8, "q_lora_rank": 8, "first_k_dense_replace": 1}
    heads = {"qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4}
    return DeepseekV3ForCausalLM(
        DeepseekV3Config(
            moe_intermediate_size=12, num_key_value_heads=4, **experts, **ranks, **heads, **_SMALL
        )
    )


_SMALL: dict[str, Any] = {
    "vocab_size": WORDS, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_experts_per_tok": CHOSEN, "max_position_embeddings": 32,
    "use_cache": False,
}  # fmt: skip


def _seeded(model: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
    def build() -> nn.Module:
        torch.manual_seed(0)
        return model()

    return build


def steady(model: nn.Module) -> torch.optim.Optimizer:
    """Adam makes whole steps of rounding errors where a gradient is 0, as a key's bias has it."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """For more steps: after five of AdamW a Qwen3-MoE is 4e-6 off under ddp as well."""
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def loss_of(model: Any, step: int, cut: parity.Cut) -> torch.Tensor:
    tokens = cut(batch(step))
    return model(input_ids=tokens, labels=tokens).loss


# Each its own form: gated, normed weights, with biases and a gate of its own, groups of experts.
@pytest.mark.parametrize(
    "model",
    [
        mixtral,
        pytest.param(qwen, marks=pytest.mark.parity),
        gpt_oss,
        pytest.param(deepseek, marks=pytest.mark.parity),
    ],
)
@on_ranks(2)
def test_models_of_transformers_train_as_one_process(model: Callable[[], nn.Module]) -> None:
    """Five steps; their experts are found without a plan, shared experts and routers count too."""
    for kind in ("ep", "fsdp"):
        under = over(kind, 2)
        off = compare(*under, build=_seeded(model), loss_of=loss_of, optimizer=sgd, steps=5)
        close({f"{under}": off})


@pytest.mark.parity
@pytest.mark.parametrize("products", ["eager", "batched_mm"])
@on_ranks(2)
def test_any_product_of_experts_may_be_chosen(products: str) -> None:
    """Those of transformers; grouped_mm, which it takes by itself, is in the test above."""

    def build() -> Any:
        torch.manual_seed(0)
        model: Any = mixtral()
        assert model.config._experts_implementation == "grouped_mm"
        model.set_experts_implementation(products)
        return model

    close({products: compare(*over("ep", 2), build=build, loss_of=loss_of, optimizer=sgd)})


@on_ranks(4)
def test_attention_is_split_beside_experts() -> None:
    """By tp, along which ranks have the same tokens and the same experts; for five steps."""
    degrees = {"dp_shard": 2, "tp": 2, "ep": 2}
    build = _seeded(mixtral)
    close({"tp": compare("tp", degrees, build=build, loss_of=loss_of, optimizer=sgd, steps=5)})


@on_ranks(4)
def test_each_rank_holds_its_share() -> None:
    """Neighbours share the experts; under fsdp ranks with the same ones split each of them."""
    base = make()
    put(base, *over("ep", 2))
    up = base.blocks[0].experts.up
    assert isinstance(up, DTensor)
    assert torch.equal(up.to_local(), make().blocks[0].experts.up[[0, 4][rank % 2] :][:4])
    assert not isinstance(base.head.weight, DTensor)

    base = make()
    put(base, *over("fsdp", 2))
    up = base.blocks[0].experts.up
    whole = make().blocks[0].experts.up[[0, 4][rank % 2] :][:4]
    assert torch.equal(up.to_local(), whole[:, [0, 6][rank // 2] :][:, :6])
    assert list(base.head.weight.to_local().shape) == [10 if rank < 3 else 7, WIDTH]


@on_ranks(2)
def test_what_is_sent_is_what_is_routed() -> None:
    """Every (token, expert) travels once there and back; none is dropped or doubled."""
    base = make()
    seen = []
    inner = Experts.forward

    def count(self, x, which, weights):
        seen.append((len(x), int(which.max())))
        return inner(self, x, which, weights)

    Experts.forward = count  # type: ignore[method-assign]
    outer = put(base, *over("ep", n)).outer
    tokens = parity.own_part(batch(0))
    with torch.no_grad():
        outer(tokens)
    rows = torch.tensor([sum(length for length, _ in seen)])
    torch.distributed.all_reduce(rows)
    assert rows.item() == 2 * CHOSEN * batch(0)[:, :-1].numel()
    assert all(highest < EXPERTS // n for _, highest in seen)


@on_ranks(2)
def test_experts_compute_in_what_the_rest_does() -> None:
    """Under fsdp with bf16 in bf16, also those that FSDP2 leaves alone; gradients stay fp32."""
    seen = []
    inner = Experts.forward

    def note(self, x, which, weights):
        seen.append((x.dtype, self.up.dtype, self.down.dtype))
        return inner(self, x, which, weights)

    Experts.forward = note  # type: ignore[method-assign]
    base = make()
    put(base, *over("fsdp", n), precision="bf16").outer(parity.own_part(batch(0))).backward()
    up = base.blocks[0].experts.up
    assert set(seen) == {(torch.bfloat16,) * 3}
    assert up.grad is not None
    assert (up.dtype, up.grad.dtype) == (torch.float32, torch.float32)


@on_ranks(2)
def test_a_wrong_shape_is_told() -> None:
    """By the experts, with all three shapes."""
    base = make()
    put(base, *over("ep", 2))
    x, which = torch.zeros(6, WIDTH), torch.zeros(5, 2, dtype=torch.long)
    message = refusal(lambda: base.blocks[0].experts(x, which, torch.zeros(5, 2)))
    assert "hidden states (6, 12), experts of tokens (5, 2) and weights (5, 2)" in message


def test_what_has_no_experts_is_refused() -> None:
    """Before anything changes, with what to do."""
    from transformers import LlamaConfig, LlamaForCausalLM

    dense = nn.Sequential(nn.Linear(4, 4))
    listed = nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(4, 4) for _ in range(4))})
    listed.ep_plan = {"experts": "experts"}
    unknown, misspelt = make(), make()
    unknown.ep_plan = {"blocks.*.moe": "experts"}
    misspelt.ep_plan = {"blocks.*.experts": "expert"}

    with pytest.raises(OptionError, match=r"Sequential has no experts .* Use ddp or fsdp") as told:
        find_experts(dense)
    assert "model.ep_plan = {" in str(told.value)
    small = LlamaConfig(
        vocab_size=8, hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8
    )
    with pytest.raises(OptionError, match=r'vars\(model\)\["ep_plan"\] = \{'):
        find_experts(LlamaForCausalLM(small))  # whose property of that name has other styles
    with pytest.raises(
        OptionError, match=r"experts is no stack of experts: its parameters are 0.w"
    ):
        find_experts(listed)
    with pytest.raises(OptionError, match=r"blocks.\*.moe matches no module of LM"):
        find_experts(unknown)
    with pytest.raises(OptionError, match=r"the style 'expert'. There is 'experts'"):
        find_experts(misspelt)


def test_experts_that_do_not_divide_are_refused() -> None:
    """With the degrees that do, of these ranks; more ranks than experts, too."""
    from nbdist.parallel.live import build

    one, two = make(), choose("ep", {"dp_replicate": 2, "ep": 2})
    for block in one.blocks:
        block.experts = Experts(WIDTH, 20, 1)
    with pytest.raises(OptionError, match=r"2 ranks cannot share the 1 experts .* Use fsdp"):
        build.plan(build_alone(one, two))
    for ranks, ways in ((3, "fsdp"), (6, "--ep 2, or fsdp"), (16, "--ep 2, 4 or 8, or fsdp")):
        choice = choose("ep", {"dp_replicate": ranks, "ep": ranks})
        refused = rf"{ranks} ranks cannot share the 8 experts .* Use {ways}\."
        with pytest.raises(OptionError, match=refused):
            build.plan(build_alone(make(), choice))
