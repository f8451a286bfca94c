"""Models that ranks train beside one process, their data, and what is gathered to be compared."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.utils.data import TensorDataset

from nbdist.core.rank import this_rank
from nbdist.parallel.base.tensors import local_as
from nbdist.parallel.live import fsdp1_state, registry
from nbdist.parallel.reshard import full_state
from nbdist.parallel.reshard.redistribute import Reshard, redistribute
from nbdist.strategy.choice import Strategy
from nbdist.strategy.choose import choose
from tests.programs.experts import Mixture
from tests.programs.optimizers import Muon
from tests.programs.rank import n
from tests.programs.training import Net, groups

LENGTH, GLOBAL, LIMIT = 16, 16, 0.5
Named = Mapping[str, torch.Tensor]


def plain(n_blocks: int = max(4, min(2 * n, 8))) -> Any:
    net = Net(n_blocks=n_blocks, n_heads=8)
    net.norm = nn.LayerNorm(16)
    return net


# Of Llama and of Mixtral.
_SIZES = {
    "vocab_size": 24, "hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 8,
    "max_position_embeddings": 32,
}  # fmt: skip


def llama(n_blocks: int = max(4, n)) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    heads = max(2, n)
    return LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=n_blocks, num_key_value_heads=heads, **_SIZES)
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=24, n_embd=16, n_layer=max(4, n), n_head=8, n_positions=32,
            attn_pdrop=0.0, embd_pdrop=0.0, resid_pdrop=0.0,
        )
    )  # fmt: skip


def mixtral(n_blocks: int = max(4, n), n_heads: int = max(2, n)) -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(
        MixtralConfig(
            num_hidden_layers=n_blocks, num_key_value_heads=n_heads, num_local_experts=8,
            num_experts_per_tok=2, **_SIZES,
        )
    )  # fmt: skip


def adapted(net: nn.Module, *layers: str, **options: Any) -> nn.Module:
    """Its adapters alone are trained; B is no zero, so that A has gradients at once."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=4, target_modules=list(layers), init_lora_weights=False, **options)
    return get_peft_model(net, config)


# Layers that tp splits by outputs and by inputs, the vocabulary's too.
_EVERYWHERE = "q_proj v_proj o_proj gate_proj down_proj lm_head embed_tokens".split()  # noqa: SIM905


def experts() -> nn.Module:
    net = plain()
    for block in net.blocks:
        block.mlp = Mixture(16)
    net.ep_plan = {"blocks.*.mlp.experts": "experts"}
    return net


MODELS: dict[str, Callable[[], nn.Module]] = {
    "plain": plain,
    "llama": llama,
    "gpt2": gpt2,
    "lora": lambda: adapted(llama(), "q_proj", "v_proj"),
    "experts": experts,
    "mixtral": mixtral,
    "lora everywhere": lambda: adapted(llama(2), *_EVERYWHERE, task_type="CAUSAL_LM"),
    "lora of gpt2": lambda: adapted(gpt2(), "c_attn", "c_proj", fan_in_fan_out=True),
}


def made(
    model: str,
    seed: int,
    rate: Callable[[int], float] = lambda step: 0.9**step,
    *,
    is_alone: bool = False,
) -> tuple[Any, Any, Any]:
    """A model, or `a model by Muon`, with its optimizer and schedule."""
    torch.manual_seed(seed)
    kind, _, by = model.partition(" by ")
    net = MODELS[kind]()
    if is_alone:
        net.to(registry.device())
    # Adam makes whole steps of rounding errors where a gradient is 0, as that of a key's bias
    # always is. A larger eps lets them be as small in the parameters as they are.
    adamw = functools.partial(torch.optim.AdamW, eps=1e-4)
    optimizer = (Muon if by == "Muon" else adamw)(groups(net), lr=2e-3)
    return net, optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, rate)


def rate(step: int) -> float:
    """Always another one, and never small: a lost step of a moment or a rate is to be seen."""
    return 0.75 + 0.25 * (-1) ** step / (1 + step % 5)


def step_alone(net: Any, optimizer: Any, scheduler: Any, batches: Iterator[Any]) -> tuple[Any, Any]:
    """A step of one process; its loss, and the rates after it."""
    x, y = (tensor.to(registry.device()) for tensor in next(batches))
    loss = loss_of(net(x, labels=y))
    loss.backward()
    nn.utils.clip_grad_norm_(net.parameters(), LIMIT)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    return loss.item(), scheduler.get_last_lr()


def moments_of(net: nn.Module, optimizer: Any) -> dict[str, Any]:
    """One process's, by name."""
    return {name: optimizer.state[p] for name, p in net.named_parameters() if p.requires_grad}


def moments_off(optimizer: Any, moments: Mapping[str, Any]) -> float:
    """The largest difference of each kind of state, by its largest value; steps are equal."""
    state = full_state.full_optimizer_state(optimizer.optimizer)["state"]

    def worst(kind: str) -> float:
        pairs = [
            (torch.as_tensor(state[name][kind]).cpu(), torch.as_tensor(wanted[kind]).cpu())
            for name, wanted in moments.items()
            if kind in wanted
        ]
        size = max(wanted.abs().max().item() for _, wanted in pairs)
        return max((value - wanted).abs().max().item() for value, wanted in pairs) / size

    kinds = {kind for wanted in moments.values() for kind in wanted}
    assert worst("step") == 0
    return max(worst(kind) for kind in kinds - {"step"})


def samples(count: int) -> TensorDataset:
    """A label for each word, other ones every 12 batches: there is always much to be learned."""
    drawn = torch.Generator().manual_seed(11)
    words = torch.randint(24, (count, GLOBAL, LENGTH), generator=drawn)
    labels = [torch.randperm(24, generator=drawn)[part] for part in words.split(12)]
    return TensorDataset(words.flatten(0, 1), torch.cat(labels).flatten(0, 1))


def loss_of(output: Any) -> torch.Tensor:
    return output if isinstance(output, torch.Tensor) else output.loss


def read(text: str) -> Strategy:
    """What stands behind %dist_strategy, as a Choice."""
    name, *flags = text.split(" --")
    given: dict[str, object] = {}
    for flag in flags:
        word, _, value = flag.partition(" ")
        given[word.replace("-", "_")] = (float(value) if word == "bucket" else value) or True
    backend = this_rank().topology.backend
    return choose(name, given, n, device_type=registry.device().type, backend=backend)


def whole_gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    """By first name, on every rank. Collective."""
    prepared = registry.prepared_of(model)
    if prepared is None:
        return {}  # DeepSpeed has them in buffers of its own
    trained = {name: p for name, p in prepared.parameters.items() if p.requires_grad}
    if fsdp1_state.is_flat(prepared):
        with FullyShardedDataParallel.summon_full_params(
            prepared.outer, writeback=False, with_grads=True
        ):
            return {name: p.grad.clone() for name, p in trained.items()}
    held = {
        name: local_as(p.grad, p)
        for name, p in prepared.parameters.items()
        if p.grad is not None
    }  # fmt: skip
    moves = [
        Reshard(name, torch.float32, prepared.side(name), prepared.whole(name)) for name in trained
    ]
    # The host's if offloaded.
    home = next((grad.device for grad in held.values()), registry.device())
    return {name: g.clone() for name, g in redistribute(moves, held, home).items()}


def far(tensors: Named, wanted: Named) -> float:
    """The largest difference of tensors by name; the first name of a tied one is enough."""
    device = registry.device()
    return max(
        (tensors[name].to(device) - wanted[name].to(device)).abs().max().item() for name in tensors
    )
