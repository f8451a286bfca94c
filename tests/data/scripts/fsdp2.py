"""FSDP2 as torch's tutorials write it: made on meta, fully_shard, and a checkpoint by DCP."""

import shutil

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

CHECKPOINT_DIR = "checkpoint"


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 4 * dim)
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocab=32, dim=16, layers=3):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(layers))
        self.head = nn.Linear(dim, vocab)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class AppState(Stateful):
    def __init__(self, model, optimizer):
        self.model = model
        self.optimizer = optimizer

    def state_dict(self):
        model_state, optimizer_state = get_state_dict(self.model, self.optimizer)
        return {"model": model_state, "optim": optimizer_state}

    def load_state_dict(self, state_dict):
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=state_dict["model"],
            optim_state_dict=state_dict["optim"],
        )


def sharded_model(mesh):
    with torch.device("meta"):
        model = Model()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=policy)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    for block, following in zip(model.blocks, model.blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([following])
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert isinstance(model, FSDPModule)
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    return model, torch.optim.Adam(model.parameters(), lr=1e-2)


def train(model, optimizer, tokens, steps):
    losses = []
    for _ in range(steps):
        logits = model(tokens[:, :-1])
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append((round(loss.item(), 5), round(norm.full_tensor().item(), 4)))
    return losses


def main():
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size,), mesh_dim_names=("dp",))
    tokens = torch.randint(32, (4, 9), generator=torch.Generator().manual_seed(rank))

    model, optimizer = sharded_model(mesh)
    begin = train(model, optimizer, tokens, 2)
    dcp.save({"app": AppState(model, optimizer)}, checkpoint_id=CHECKPOINT_DIR)
    wanted = train(model, optimizer, tokens, 2)

    model, optimizer = sharded_model(mesh)
    dcp.load({"app": AppState(model, optimizer)}, checkpoint_id=CHECKPOINT_DIR)
    resumed = train(model, optimizer, tokens, 2)
    dist.barrier()
    if rank == 0:
        shutil.rmtree(CHECKPOINT_DIR)
    print(f"fsdp2 rank {rank}:", begin, wanted, "resumed", resumed == wanted)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
