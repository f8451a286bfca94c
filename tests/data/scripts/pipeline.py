"""Pipeline parallelism as torch's tutorials write it: each rank its stage, and GPipe's schedule."""

import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

rank = int(os.environ["RANK"])
world_size = int(os.environ["WORLD_SIZE"])
device = torch.device("cpu")


class Transformer(nn.Module):
    def __init__(self, vocab=40, dim=16, layers=4):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleDict(
            {
                str(i): nn.TransformerEncoderLayer(dim, 2, 32, 0.0, batch_first=True)
                for i in range(layers)
            }
        )
        self.norm = nn.LayerNorm(dim)
        self.output = nn.Linear(dim, vocab)

    def forward(self, tokens):
        # Parts that another stage has are None here.
        h = self.tok_embeddings(tokens) if self.tok_embeddings else tokens
        for layer in self.layers.values():
            h = layer(h)
        h = self.norm(h) if self.norm else h
        return self.output(h) if self.output else h


def manual_model_split(model, stage_index, num_stages):
    per_stage = len(model.layers) // num_stages
    here = range(stage_index * per_stage, (stage_index + 1) * per_stage)
    for name in list(model.layers):
        if int(name) not in here:
            del model.layers[name]
    if stage_index > 0:
        model.tok_embeddings = None
    if stage_index < num_stages - 1:
        model.norm = None
        model.output = None
    return PipelineStage(model, stage_index, num_stages, device)


def tokenwise_loss_fn(outputs, targets):
    return nn.functional.cross_entropy(outputs.flatten(0, 1), targets.flatten())


if __name__ == "__main__":
    dist.init_process_group()
    torch.manual_seed(0)
    stage = manual_model_split(Transformer(), rank, world_size)
    optimizer = torch.optim.AdamW(stage.submod.parameters(), lr=1e-2)
    x = torch.randint(40, (16, 8))
    y = torch.randint(40, (16, 8))
    schedule = ScheduleGPipe(stage, n_microbatches=4, loss_fn=tokenwise_loss_fn)

    history = []
    for _ in range(3):
        losses = []
        if rank == 0:
            schedule.step(x)
        elif rank == world_size - 1:
            schedule.step(target=y, losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
        history += [round(loss.item(), 5) for loss in losses]
    print(f"pipeline rank {rank} losses:", history)
    dist.destroy_process_group()
