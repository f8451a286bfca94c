"""%dist_config: what it writes starts the same training elsewhere; what it checks is told."""

import json
import os
import shlex
import stat
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.cells import Cell
from tests.support.kernel import Kernel, notebook_env

_TIMEOUT_S = 110.0
_DATA = Path(__file__).resolve().parents[1] / "data" / "configs"
# The same text runs in a cell, where `accelerator` is there, and in a script that makes one.
_TRAINING = """
import json
import torch
from torch import nn
class ConfigBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, x):
        return x + self.narrow(torch.tanh(self.wide(self.norm(x))))
class ConfigNet(nn.Module):
    _no_split_modules = ["ConfigBlock"]
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(ConfigBlock() for _ in range(3))
        self.head = nn.Linear(16, 1)
    def forward(self, x, y):
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.head(x), y)
torch.manual_seed(3)
net = ConfigNet()
data = torch.utils.data.TensorDataset(torch.randn(48, 16), torch.randn(48, 1))
loader = torch.utils.data.DataLoader(data, batch_size=4)
steps = torch.optim.AdamW(net.parameters(), lr=0.01)
net, steps, loader = accelerator.prepare(net, steps, loader)
losses = []
for x, y in loader:
    with accelerator.accumulate(net):
        loss = net(x, y)
        accelerator.backward(loss)
        steps.step()
        steps.zero_grad()
    losses.append(accelerator.reduce(loss.detach().float(), "mean").item())
"""
_CELL = f"%%distributed\n{_TRAINING}\nprint(json.dumps(losses))"
_FORGET = "%%distributed\ndel net, steps, loader, losses, loss, x, y, data"
_PLAIN = "from accelerate import Accelerator\naccelerator = Accelerator()\n"
# Accelerate has FSDP2 on GPUs alone: told that this is one it runs on Gloo as well.
_AS_ON_GPUS = """
from accelerate import Accelerator, PartialState
from accelerate.utils import DistributedType
PartialState(cpu=True)
PartialState._shared_state["distributed_type"] = DistributedType.MULTI_GPU
accelerator = Accelerator(cpu=True)
"""
_END = """
kinds = sorted({c.__name__ for m in net.modules() for c in type(m).__mro__})
if accelerator.is_main_process:
    told = {"losses": losses, "type": accelerator.distributed_type.value, "kinds": kinds}
    print("TOLD", json.dumps(told), flush=True)
if torch.distributed.is_initialized():
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()
"""


@pytest.fixture
def ranks(kernel: Kernel) -> Iterator[Kernel]:
    """The shared ranks; back under ddp, without this test's model, afterwards."""
    yield kernel
    kernel.run(_FORGET)
    ended = kernel.run("%dist_strategy ddp")

    assert ended.status == "ok", ended.visible


def trained(kernel: Kernel, strategy: str) -> list[float]:
    """The losses under a strategy in the notebook."""
    good(kernel, f"%dist_strategy {strategy}")
    text = good(kernel, _CELL).text
    found: list[float] = json.loads(text[text.index("] [") + 2 : text.index("]\n", 5) + 1])
    return found


def good(kernel: Kernel, code: str) -> Cell:
    cell = kernel.run(code, _TIMEOUT_S)

    assert cell.status == "ok", cell.visible
    return cell


def script(folder: Path, begin: str = _PLAIN) -> Path:
    """The same training as a script without nbdist."""
    path = folder / "train.py"
    path.write_text(begin + _TRAINING + _END)
    return path


def launched(
    folder: Path, *command: str, env: Mapping[str, str] | None = None
) -> dict[str, object]:
    """What rank 0 of a started script says."""
    done = subprocess.run(
        command,
        cwd=folder,
        env=notebook_env({"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", **(env or {})}),
        capture_output=True,
        text=True,
        timeout=_TIMEOUT_S,
        check=False,
    )
    lines = [line for line in done.stdout.splitlines() if "TOLD " in line]

    # torch 2.13 aborts now and then at the very end, after everything was printed.
    assert done.returncode == 0 or (lines and "exitcode: -6)" in done.stderr), done.stderr[-4000:]
    told: dict[str, object] = json.loads(lines[0].partition("TOLD ")[2])
    return told


def accelerate(folder: Path, config: Path, env: Mapping[str, str]) -> dict[str, object]:
    """The same under accelerate launch with a configuration."""
    return launched(
        folder, sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config),
        "--main_process_port", "0", "train.py", env=env,
    )  # fmt: skip


def close(losses: object, wanted: list[float]) -> bool:
    assert isinstance(losses, list)
    assert len(losses) == len(wanted)
    assert losses[-1] < losses[0]
    return max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) <= 1e-6


def test_accelerate_launch_gives_the_same_losses(ranks: Kernel, tmp_path: Path) -> None:
    """The YAML of ddp --accumulate 2 is accepted, and trains as the ranks here do."""
    wanted = trained(ranks, "ddp --accumulate 2")
    told = good(ranks, f"%dist_config --write {tmp_path}/ddp.yaml").visible
    script(tmp_path)
    env = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}
    done = accelerate(tmp_path, tmp_path / "ddp.yaml", env)

    assert [line for line in told.splitlines() if "environment" in line]
    assert done["type"] == "MULTI_CPU"
    assert close(done["losses"], wanted)


def test_the_batch_script_starts_the_tasks(ranks: Kernel, tmp_path: Path) -> None:
    """The Slurm script is good bash, and its one task a host starts torchrun there."""
    wanted = trained(ranks, "ddp")
    good(ranks, f"%dist_config --write {tmp_path}/job.sbatch")
    script(tmp_path)
    bash = "/bin/bash"
    fakes = {
        "srun": 'while [[ $1 == --* ]]; do shift; done\nexec "$@"',
        "scontrol": "echo localhost",
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    for name, body in fakes.items():
        fake = tmp_path / "bin" / name
        fake.parent.mkdir(exist_ok=True)
        fake.write_text(f"#!{bash}\n{body}\n")
        fake.chmod(fake.stat().st_mode | stat.S_IXUSR)
    subprocess.run([bash, "-n", "job.sbatch"], cwd=tmp_path, check=True, timeout=10)
    env = {
        "PATH": f"{tmp_path}/bin:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_NUM_NODES": "1",
    }

    assert close(launched(tmp_path, bash, "job.sbatch", env=env)["losses"], wanted)


@pytest.mark.parity
def test_the_torchrun_line_gives_the_same_losses(ranks: Kernel, tmp_path: Path) -> None:
    """The line alone, with its variables in front, trains as the ranks here do."""
    wanted = trained(ranks, "ddp --accumulate 2")
    good(ranks, f"%dist_config --write {tmp_path}/line --as torchrun")
    script(tmp_path)
    given, _, command = (tmp_path / "line").read_text().partition("torchrun ")
    env = dict(one.split("=", 1) for one in shlex.split(given))
    done = launched(
        tmp_path, sys.executable, "-m", "torch.distributed.run", *shlex.split(command), env=env
    )

    assert env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "2"
    assert close(done["losses"], wanted)


@pytest.mark.parity
@pytest.mark.parametrize(
    ("strategy", "kinds"),
    [
        ("fsdp", {"FSDPModule", "FSDPConfigBlock"}),
        ("fsdp --shard grad-op", {"FSDPModule", "FSDPConfigBlock"}),
        ("fsdp --checkpoint full", {"FSDPModule", "CheckpointWrapper"}),
        ("single", set()),
    ],
)
def test_other_strategies_give_the_same_losses(
    ranks: Kernel, tmp_path: Path, strategy: str, kinds: set[str]
) -> None:
    """FSDP2 of Accelerate on Gloo, with blocks wrapped by the class that the ranks named."""
    wanted = trained(ranks, strategy)
    good(ranks, f"%dist_config --write {tmp_path}/a.yaml")
    if strategy == "single":
        begin = _PLAIN
    else:
        begin = _AS_ON_GPUS
        assert (
            "fsdp_transformer_layer_cls_to_wrap: ConfigBlock" in (tmp_path / "a.yaml").read_text()
        )
    script(tmp_path, begin)
    done = accelerate(tmp_path, tmp_path / "a.yaml", {"ACCELERATE_USE_CPU": "true"})

    assert isinstance(done["kinds"], list)
    assert kinds <= set(done["kinds"])
    assert close(done["losses"], wanted)
