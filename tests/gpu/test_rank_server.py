"""Ranks on GPUs are forks of one process, which itself never touches a GPU."""

from __future__ import annotations

import json

from nbdist.cluster.kernel import rank_server
from nbdist.notebook.session import Session
from tests.gpu.places import device_type, on

TRAIN = """
import json, os
from pathlib import Path
torch.manual_seed(rank)
net = torch.nn.Linear(8, 8, device=device)
ddp = torch.nn.parallel.DistributedDataParallel(net)
ddp(torch.ones(4, 8, device=device)).sum().backward()
mean = net.weight.grad.clone()
dist.all_reduce(mean)
parent = Path(f"/proc/{os.getppid()}/fd")
print(json.dumps({
    "parent": os.getppid(),
    "of_parent": [p for p in map(os.readlink, parent.iterdir()) if p.startswith("/dev/nvidia")],
    "is_equal": torch.allclose(mean, net.weight.grad * world_size),
    "device": net.weight.device.type,
    "visible": os.environ.get("CUDA_VISIBLE_DEVICES"),
}))
"""


@on("cpu", "shared", "own", "all")
def test_forks_of_one_process_train_on_their_gpus(ranks: Session) -> None:
    """Each rank has a context of its own; the process that has forked them has none."""
    seen = [json.loads(answer.text) for answer in ranks.run(TRAIN).ranks]
    server = rank_server._server

    assert rank_server.why_not() == ""
    assert server is not None
    assert {rank["parent"] for rank in seen} == {server.pid}
    assert {tuple(rank["of_parent"]) for rank in seen} == {()}
    assert {rank["is_equal"] for rank in seen} == {True}
    assert {rank["device"] for rank in seen} == {device_type(ranks)}
