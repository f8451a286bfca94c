"""Tensor and sequence parallelism as torch's tutorials write it: a mesh, and a plan for a model."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


class ToyModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj = nn.Linear(10, 32)
        self.relu = nn.ReLU()
        self.out_proj = nn.Linear(32, 5)

    def forward(self, x):
        return self.out_proj(self.relu(self.in_proj(x)))


def main():
    device_mesh = init_device_mesh("cpu", (int(os.environ["WORLD_SIZE"]),))
    rank = device_mesh.get_rank()
    torch.manual_seed(0)
    sp_model = parallelize_module(
        module=ToyModel(),
        device_mesh=device_mesh,
        parallelize_plan={
            "in_proj": ColwiseParallel(input_layouts=Shard(0)),
            "out_proj": RowwiseParallel(output_layouts=Shard(0)),
        },
    )
    optimizer = torch.optim.AdamW(sp_model.parameters(), lr=0.25, foreach=False)
    losses = []
    for step in range(4):
        torch.manual_seed(10 * step + rank)  # each rank has a part of the sequence
        loss = sp_model(torch.rand(4, 10)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(round(loss.item(), 5))
    print(f"tensor_parallel rank {rank} losses:", losses)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
