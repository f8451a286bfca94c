"""What is saved of a training, and loaded: tied weights, buffers, an object of the user's own."""

import torch
from accelerate.utils import DataLoaderConfiguration
from torch.utils.data import DataLoader

from nbdist.parallel.accelerator.accelerator import Accelerator
from tests.programs.training import BATCH, Net, data, make

accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))


class Counter:
    def __init__(self):
        self.n = 0

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


class Tied(Net):
    """The head is the embedding, and a buffer is not saved."""

    def __init__(self):
        super().__init__()
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.ones(2) * 3)
        self.register_buffer("spare", torch.ones(2), persistent=False)


def made(seed, kind):
    net, optimizer, scheduler = make(seed, kind)
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(data, batch_size=BATCH, shuffle=True, generator=generator)
    counter = Counter()
    accelerator.register_for_checkpointing(counter)
    return (*accelerator.prepare(net, optimizer, scheduler, loader), counter)


def run(parts, batches):
    model, optimizer, scheduler, _, counter = parts
    losses = []
    for x, y in batches:
        loss = model(x, labels=y)
        accelerator.backward(loss)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        counter.n += 1
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
    return losses
