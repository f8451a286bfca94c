"""What people write for GPUs, each beside plain torch on the same GPU. Runs on ranks.

A program takes nothing, or the user's `accelerator`, and returns checks by name: True, or what is
wrong; the last two return losses.
"""

from __future__ import annotations

import copy
import gc
import json
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils import DataLoaderConfiguration, GradScalerKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from nbdist.parallel.accelerator.accelerator import Accelerator
from tests.programs import training

Checks = dict[str, Any]
STEPS, BATCH, WORDS, LENGTH = 6, 8, 96, 32


def device() -> torch.device:
    """The rank's: cells have it as `device`."""
    if torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def llama(dropout: float = 0.0) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS, hidden_size=64, intermediate_size=128, num_hidden_layers=4,
            num_attention_heads=8, num_key_value_heads=4, max_position_embeddings=64,
            attention_dropout=dropout,
        )
    )  # fmt: skip


def samples() -> TensorDataset:
    drawn = torch.Generator().manual_seed(3)
    words = torch.randint(WORDS, (STEPS * BATCH, LENGTH), generator=drawn)
    return TensorDataset(words, (words * 5 + 1) % WORDS)


def split(**options: Any) -> Accelerator:
    """An Accelerator that splits each batch over the ranks."""
    return Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True), **options)


def far(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference of tensors by name."""
    return max((a[name].float().cpu() - b[name].float().cpu()).abs().max().item() for name in b)


def close(value: float, limit: float) -> bool | str:
    return value <= limit or f"{value:.1e} > {limit:.1e}"


def equal(a: object, b: object) -> bool | str:
    return a == b or f"{a} != {b}"


def fused_overflow() -> Checks:
    """The same with the optimizer's fused kernel, which is given the scale."""
    return overflow(fused=device().type == "cuda")


def overflow(*, fused: bool = False) -> Checks:
    """fp16, and a loss that overflows on one rank in the third step: all leave that step out."""
    options: dict[str, Any] = {"init_scale": 1024.0, "growth_interval": 2}
    net = llama().to(device())
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, eps=1e-4, fused=fused)
    scaler = torch.amp.GradScaler(device().type, **options)
    losses, scales = [], []
    for step, (x, y) in enumerate(DataLoader(samples(), batch_size=BATCH)):
        with torch.autocast(device().type, torch.float16):
            loss = net(input_ids=x.to(device()), labels=y.to(device())).loss
        scaler.scale(loss * (torch.inf if step == 2 else 1)).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        losses.append(loss.item())
        scales.append(scaler.get_scale())

    accelerator = split(kwargs_handlers=[GradScalerKwargs(**options)])
    model = llama()
    adam = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-4, fused=fused)
    model, adam, loader = accelerator.prepare(model, adam, DataLoader(samples(), batch_size=BATCH))
    losses_here, scales_here = [], []
    for step, (x, y) in enumerate(loader):
        loss = model(input_ids=x, labels=y).loss
        accelerator.backward(loss * (torch.inf if step == 2 and dist.get_rank() == 1 else 1))
        adam.step()
        adam.zero_grad()
        losses_here.append(accelerator.reduce(loss.detach(), "mean").item())
        scales_here.append(accelerator.scaler.get_scale())
    off = max(abs(a - b) for a, b in zip(losses, losses_here, strict=True))
    return {
        "a step is left out": scales[2] < scales[1] or scales,
        "scales": equal(scales_here, scales),
        "losses": close(off, 5e-3),
        "parameters": close(far(accelerator.get_state_dict(model), net.state_dict()), 2e-3),
    }


def recomputation() -> Checks:
    """A user's own checkpointing, reentrant and not, under what splits activations."""
    checks: Checks = {}
    x, y = (part[:BATCH].to(device()) for part in samples().tensors)
    alone = llama().to(device())
    alone(input_ids=x, labels=y).loss.backward()
    torch.optim.SGD(alone.parameters(), lr=0.1).step()
    accelerator = split()
    for is_reentrant in (False, True):
        net = llama()
        net.gradient_checkpointing_enable({"use_reentrant": is_reentrant})
        model, sgd = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        accelerator.backward(model(input_ids=x, labels=y).loss)
        sgd.step()
        off = far(accelerator.get_state_dict(model), alone.state_dict())
        checks[f"reentrant {is_reentrant}"] = close(off, 1e-6)
        accelerator.free_memory()
    return checks


def dropout_of_recomputation() -> Checks:
    """Layers that are computed again drop the same values: gradients with and without agree."""
    accelerator = split()
    gradients = []
    for checkpoints in (False, True):
        net = llama(dropout=0.3)
        if checkpoints:
            net.gradient_checkpointing_enable({"use_reentrant": False})
        net.train()
        model, _ = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        x, y = (part[:BATCH].to(device()) for part in samples().tensors)
        torch.manual_seed(5 + dist.get_rank())
        accelerator.backward(model(input_ids=x, labels=y).loss)
        gradients.append(
            [g.full_tensor() if hasattr(g, "full_tensor") else g.clone()
             for p in model.parameters() if (g := p.grad) is not None]
        )  # fmt: skip
        accelerator.free_memory()
    off = max((a - b).abs().max().item() for a, b in zip(*gradients, strict=True))
    return {"gradients": close(off, 1e-6), "there are some": bool(gradients[0])}


def random_state() -> Checks:
    """save_state and load_state put the device's generator back, a rank's own."""
    accelerator = split()
    net = nn.Linear(8, 8)
    accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
    folder = [tempfile.mkdtemp()]
    dist.broadcast_object_list(folder, 0)
    torch.manual_seed(7 + dist.get_rank())
    accelerator.save_state(folder[0])
    first = torch.rand(4, device=device())
    torch.rand(100, device=device())
    accelerator.load_state(folder[0])
    again = torch.rand(4, device=device())
    return {"same": equal(again.tolist(), first.tolist())}


def batch_norm() -> Checks:
    """SyncBatchNorm over the ranks' parts is BatchNorm over the batch; channels_last, pinned."""
    if device().type != "cuda":  # DDP takes no SyncBatchNorm on the CPU
        return {}
    torch.backends.cudnn.allow_tf32 = False  # it is on by default, and rounds to three digits
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(8, 5),
    )  # fmt: skip
    alone = copy.deepcopy(net).to(device())
    data = TensorDataset(torch.randn(32, 3, 16, 16), torch.arange(32) % 5)

    def first(model: nn.Module) -> dict[str, torch.Tensor]:
        """Gradients and statistics after the first batch."""
        gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
        return gradients | {name: b.clone() for name, b in model.named_buffers()}

    sgd = torch.optim.SGD(alone.parameters(), lr=0.1)
    wanted = None
    for x, y in DataLoader(data, batch_size=BATCH):
        nn.functional.cross_entropy(alone(x.to(device())), y.to(device())).backward()
        wanted = wanted or first(alone)
        sgd.step()
        sgd.zero_grad()
    assert wanted is not None

    accelerator = split()
    inner = nn.SyncBatchNorm.convert_sync_batchnorm(net).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(inner.parameters(), lr=0.1)
    loader = DataLoader(
        data, batch_size=BATCH, num_workers=2, pin_memory=True, persistent_workers=True
    )
    model, optimizer, loader = accelerator.prepare(inner, optimizer, loader)
    checks: Checks = {}
    for x, y in loader:
        accelerator.backward(nn.functional.cross_entropy(model(x), y))
        here = first(inner)
        checks = checks or {
            name: close(far({name: here[name]}, {name: wanted[name]}), 1e-5) for name in wanted
        }
        optimizer.step()
        optimizer.zero_grad()
    trained = far(accelerator.get_state_dict(model), alone.state_dict())
    return {**checks, "parameters": close(trained, 1e-5)}


def whole_half() -> Checks:
    """A model that is bf16 itself, with losses of the same in one process."""

    def losses(model: Any, optimizer: Any, batches: Any, backward: Any) -> Iterator[torch.Tensor]:
        for x, y in batches:
            loss = model(input_ids=x.to(device()), labels=y.to(device())).loss
            backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            yield loss.detach()

    alone = llama().to(device(), torch.bfloat16)
    adam = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    batches = DataLoader(samples(), batch_size=BATCH)
    wanted = [loss.item() for loss in losses(alone, adam, batches, torch.Tensor.backward)]
    accelerator = split()
    net = llama().to(torch.bfloat16)
    model, optimizer, loader = accelerator.prepare(
        net, torch.optim.AdamW(net.parameters(), lr=1e-3), batches
    )
    trained = losses(model, optimizer, loader, accelerator.backward)
    here = [accelerator.reduce(loss.float(), "mean").item() for loss in trained]
    off = max(abs(a - b) for a, b in zip(wanted, here, strict=True))
    kinds = {str(p.dtype) for p in model.parameters()}
    return {"losses": close(off, 0.05), "still bf16": equal(kinds, {"torch.bfloat16"})}


def side_stream() -> Checks:
    """Batches that are copied on a stream of the user's own, one ahead of the step."""
    if device().type != "cuda":
        return {}
    torch.manual_seed(0)
    net, data = nn.Linear(1024, 1024), torch.randn(8, 512, 1024)
    alone = copy.deepcopy(net).to(device())
    for part in data:
        alone(part.to(device())).square().mean().backward()
    accelerator = split()
    model = accelerator.prepare(net)
    stream, pinned = torch.cuda.Stream(), data.pin_memory()

    def ahead() -> Iterator[torch.Tensor]:
        for part in pinned:
            with torch.cuda.stream(stream):
                moved = part.to(device(), non_blocking=True)
            torch.cuda.current_stream().wait_stream(stream)
            moved.record_stream(torch.cuda.current_stream())
            yield moved

    for moved in ahead():
        with accelerator.no_sync(model):
            accelerator.backward(model(moved).square().mean())
    gradient = next(p.grad for p in model.parameters() if p.ndim == 2)
    wanted = alone.weight.grad
    assert gradient is not None
    assert wanted is not None
    off = (gradient - wanted).abs().max().item()
    return {"gradient": close(off, 1e-6 * wanted.abs().max().item() + 1e-7)}


def captured_graph() -> Checks:
    """Steps that are captured as a CUDA graph and replayed, as torch's documentation has it."""
    if device().type != "cuda":
        return {}
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1)).to(device())
    alone = copy.deepcopy(net)
    inputs = torch.randn(20, 32, 64, device=device())

    def step(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        return loss

    plain = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, capturable=True)
    static = inputs[0].clone()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(net, optimizer, static)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step(net, optimizer, static)
    for _ in range(3):
        step(alone, plain, inputs[0])
    off = 0.0
    for x in inputs:
        static.copy_(x)
        graph.replay()
        off = max(off, abs(loss.item() - step(alone, plain, x).item()))
    return {"losses": close(off, 1e-5)}


def compiled() -> Checks:
    """torch.compile around what prepare returned, as Accelerate's pages have it."""
    if device().type != "cuda":  # a compiler of C++ takes minutes
        return {}
    accelerator = split()
    net = llama()
    alone = copy.deepcopy(net).to(device())
    x, y = (part[:BATCH].to(device()) for part in samples().tensors)
    wanted = alone(input_ids=x, labels=y).loss
    wanted.backward()
    model = torch.compile(accelerator.prepare(net))
    loss = model(input_ids=x, labels=y).loss
    accelerator.backward(loss)
    wanted_by_name = {name: p.grad for name, p in alone.named_parameters()}
    gradients = [p.grad for p in model.parameters()]
    pairs = zip(gradients, wanted_by_name.values(), strict=True)
    off = max((a - b).abs().max().item() for a, b in pairs)
    return {"loss": close(abs(loss.item() - wanted.item()), 1e-5), "gradients": close(off, 1e-5)}


def by_hand() -> Checks:
    """FSDP2 by hand with half precision and offloaded parameters; a mesh of the user's own."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    wanted = None
    checks: Checks = {}
    x, y = (part[:BATCH].to(device()) for part in samples().tensors)
    alone = llama().to(device())
    alone(input_ids=x, labels=y).loss.backward()
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    mesh = init_device_mesh(device().type, (dist.get_world_size(),))
    policies = {
        "plain": ({}, 1e-6),
        "bf16": ({"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)}, 5e-3),
        "offloaded": (
            {"offload_policy": CPUOffloadPolicy(pin_memory=device().type == "cuda")},
            1e-6,
        ),
    }
    for name, (options, limit) in policies.items():
        net = llama().to("cpu" if name == "offloaded" else device())
        for layer in net.model.layers:
            fully_shard(layer, mesh=mesh, **options)
        fully_shard(net, mesh=mesh, **options)
        net(input_ids=x, labels=y).loss.backward()
        whole = {}
        for key, p in net.named_parameters():
            assert p.grad is not None
            whole[key] = p.grad.to(device()).full_tensor()
        checks[name] = close(far(whole, wanted), limit)
    return checks


def trained_by_trainer() -> Checks:
    """transformers' Trainer in a cell: losses fall, and all ranks have the same parameters."""
    from transformers import Trainer, TrainingArguments

    words, labels = samples().tensors
    pairs = zip(words[:BATCH], labels[:BATCH], strict=True)
    rows = 4 * [{"input_ids": x, "labels": y} for x, y in pairs]
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(
            llama(),
            TrainingArguments(
                folder, per_device_train_batch_size=BATCH, max_steps=8, learning_rate=5e-3,
                logging_steps=1, save_strategy="no", report_to=[], disable_tqdm=True,
                bf16=device().type == "cuda", use_cpu=device().type == "cpu", seed=1,
            ),
            train_dataset=rows,
        )  # fmt: skip
        trainer.train()
    losses = [line["loss"] for line in trainer.state.log_history if "loss" in line]
    total = torch.stack([p.detach().double().sum().cpu() for p in trainer.model.parameters()])
    totals: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(totals, total.tolist())
    return {
        "falls": float(losses[-1]) < float(losses[0]) or losses,
        "all alike": all(each == totals[0] for each in totals),
        "where": equal({p.device for p in trainer.model.parameters()}, {device()}),
    }


def metrics() -> Checks:
    """What Accelerate collects of a device's tensors."""
    accelerator = split()
    n, rank = dist.get_world_size(), dist.get_rank()
    loader = accelerator.prepare(DataLoader(TensorDataset(torch.arange(11)), batch_size=4))
    gathered = [accelerator.gather_for_metrics(x) for (x,) in loader]
    padded = accelerator.pad_across_processes(torch.ones(rank + 1, device=device()), dim=0)
    halves = accelerator.gather(torch.full((2,), rank + 0.5, device=device(), dtype=torch.bfloat16))
    flags = accelerator.gather(torch.tensor([rank == 0], device=device()))
    total = accelerator.reduce(torch.ones(2, device=device()), "sum")
    return {
        "gathered": equal(torch.cat(gathered).sort().values.tolist(), list(range(11))),
        "padded": equal(padded.numel(), n),
        "halves": equal(halves.tolist(), [r + 0.5 for r in range(n) for _ in range(2)]),
        "flags": equal(flags.tolist(), [r == 0 for r in range(n)]),
        "reduced": equal(total.tolist(), [n] * 2),
    }


def trained_alone() -> list[float]:
    """Losses of plain torch on all of each batch."""
    net, optimizer, scheduler = training.make(0)
    net.to(device())
    losses = []
    for x, y in DataLoader(training.data, batch_size=training.BATCH):
        loss = net(x.to(device()), labels=y.to(device()))
        loss.backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def trained_under() -> tuple[list[float], float]:
    """Losses of the same steps under the strategy, and the median of a step's seconds."""
    accelerator, loader = split(), DataLoader(training.data, batch_size=training.BATCH)
    model, optimizer, scheduler, loader = accelerator.prepare(*training.make(0), loader)
    losses, times = [], []
    for x, y in loader:
        began_s = time.perf_counter()
        loss = model(x, labels=y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
        times.append(time.perf_counter() - began_s)
    return losses, sorted(times)[len(times) // 2]


def run(name: str) -> None:
    """Print the checks of a program as JSON, and leave nothing behind."""
    checks = globals()[name]()
    gc.collect()
    print(json.dumps(checks))
