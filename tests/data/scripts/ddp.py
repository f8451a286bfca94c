"""DistributedDataParallel as torch's tutorials write it: setup, a trainer, snapshots, cleanup."""

import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler


def setup():
    dist.init_process_group(backend=dist.get_default_backend_for_device("cpu"))


def cleanup():
    dist.destroy_process_group()


class Trainer:
    def __init__(self, model, data, optimizer, snapshot_path):
        self.rank = int(os.environ["RANK"])
        self.epochs_run = 0
        self.snapshot_path = snapshot_path
        self.model = DDP(model)
        self.data = data
        self.optimizer = optimizer
        self.losses = []
        if os.path.exists(snapshot_path):
            self._load_snapshot()

    def _load_snapshot(self):
        snapshot = torch.load(self.snapshot_path, map_location="cpu")
        self.model.module.load_state_dict(snapshot["model"])
        self.epochs_run = snapshot["epochs"]

    def _save_snapshot(self, epoch):
        snapshot = {"model": self.model.module.state_dict(), "epochs": epoch + 1}
        torch.save(snapshot, self.snapshot_path)

    def _run_batch(self, source, targets):
        self.optimizer.zero_grad()
        loss = nn.functional.cross_entropy(self.model(source), targets)
        loss.backward()
        self.optimizer.step()
        return loss.detach()

    def train(self, max_epochs):
        for epoch in range(self.epochs_run, max_epochs):
            self.data.sampler.set_epoch(epoch)
            total = sum(self._run_batch(source, targets) for source, targets in self.data)
            dist.all_reduce(total)
            self.losses.append(total.item() / len(self.data) / dist.get_world_size())
            if self.rank == 0:
                self._save_snapshot(epoch)
            dist.barrier()


def main(epochs, batch_size):
    setup()
    torch.manual_seed(0)
    dataset = TensorDataset(torch.randn(64, 20), torch.randint(4, (64,)))
    data = DataLoader(dataset, batch_size=batch_size, sampler=DistributedSampler(dataset))
    losses = []
    for more in (epochs, 2 * epochs):  # the second goes on from the first one's snapshot
        torch.manual_seed(more)
        model = nn.Sequential(nn.Linear(20, 32), nn.ReLU(), nn.Linear(32, 4))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        trainer = Trainer(model, data, optimizer, "snapshot.pt")
        trainer.train(more)
        losses += trainer.losses
    if dist.get_rank() == 0:
        os.remove("snapshot.pt")
        print("ddp losses", [round(loss, 6) for loss in losses])
    cleanup()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="simple distributed training job")
    parser.add_argument("--epochs", default=2, type=int)
    parser.add_argument("--batch_size", default=8, type=int)
    args = parser.parse_args()
    main(args.epochs, args.batch_size)
