"""%dist_config: what it writes starts the same training elsewhere; what it checks is told."""

import json
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from nbdist.commands import WORDS
from nbdist.config.emit import run_line
from nbdist.frontend.cli import main
from nbdist.notebook.verb import parse, strategy_given
from nbdist.strategy.choose import choose
from tests.support.cells import Cell
from tests.support.kernel import Kernel, notebook_env

_TIMEOUT_S = 110.0
_BASH = "/bin/bash"
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
# A model that holds itself in a circle may live longer on one rank than on another.
_FORGET = (
    "%%distributed\nimport gc\ndel net, steps, loader, losses, loss, x, y, data\n_ = gc.collect()"
)
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

# A model that transformers can split; the folder is put in.
_LLAMA = """
import json
import torch
from transformers import LlamaForCausalLM
net = LlamaForCausalLM.from_pretrained("{folder}"{split})
steps = torch.optim.AdamW(net.parameters(), lr=0.01, foreach=False)
torch.manual_seed(1)
data = torch.randint(64, (24, 8))
loader = torch.utils.data.DataLoader(data, batch_size=4)
net, steps, loader = accelerator.prepare(net, steps, loader)
losses = []
for x in loader:
    loss = net(input_ids=x, labels=x).loss
    accelerator.backward(loss)
    steps.step()
    steps.zero_grad()
    losses.append(loss.item())
y = None
"""
_SAVED = """%%rank[0]
import torch
from transformers import LlamaConfig, LlamaForCausalLM
torch.manual_seed(0)
LlamaForCausalLM(LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=64,
    num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
    max_position_embeddings=64, tie_word_embeddings=False)).save_pretrained("{folder}")
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
    return losses_of(kernel, _TRAINING)


def losses_of(kernel: Kernel, code: str) -> list[float]:
    """The losses that both ranks have after training in a cell."""
    text = good(kernel, f"%%distributed\n{code}\nprint(json.dumps(losses))").text
    losses: list[float] = json.loads(text[text.index("] [") + 2 : text.index("]\n", 5) + 1])
    return losses


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
    # torchrun's folder of logs would stay in the temporary one.
    alone = {"CUDA_VISIBLE_DEVICES": "", "TMPDIR": str(folder)}
    done = subprocess.run(
        command, cwd=folder, env=notebook_env({**alone, **(env or {})}), capture_output=True,
        text=True, timeout=_TIMEOUT_S, check=False,
    )  # fmt: skip
    lines = [line for line in done.stdout.splitlines() if "TOLD " in line]

    # torch 2.13 aborts now and then at the very end, after everything was printed.
    assert done.returncode == 0 or (lines and "exitcode: -6)" in done.stderr), done.stderr[-4000:]
    facts: dict[str, object] = json.loads(lines[0].partition("TOLD ")[2])
    return facts


def slurm(folder: Path, hosts: int) -> dict[str, str]:
    """The environment of a job, in which Slurm's programs are played: tasks of all hosts here."""
    fakes = {
        "srun": (
            "while [[ $1 == --* ]]; do shift; done\n"
            'for ((host = 1; host < SLURM_JOB_NUM_NODES; host++)); do "$@" & done\n"$@"\nwait'
        ),
        "scontrol": "echo localhost",
        "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
    }
    (folder / "bin").mkdir()
    for name, body in fakes.items():
        fake = folder / "bin" / name
        fake.write_text(f"#!{_BASH}\n{body}\n")
        fake.chmod(0o700)
    return {
        "PATH": f"{folder}/bin:{os.environ['PATH']}",
        "SLURM_JOB_ID": str(os.getpid()),
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_JOB_NUM_NODES": str(hosts),
    }


def accelerate(folder: Path, config: Path, env: Mapping[str, str]) -> dict[str, object]:
    """The same under accelerate launch with a configuration."""
    return launched(
        folder, sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(config),
        "--main_process_port", "0", "train.py", env=env,
    )  # fmt: skip


def close(losses: object, wanted: list[float]) -> bool:
    assert isinstance(losses, list)
    assert len(losses) == len(wanted)
    assert len(set(losses)) == len(losses)  # it trains
    return max(abs(a - b) for a, b in zip(losses, wanted, strict=True)) <= 1e-6


@pytest.mark.parity
def test_accelerate_launch_gives_the_same_losses(ranks: Kernel, tmp_path: Path) -> None:
    """The YAML of ddp --accumulate 2 is accepted, and trains as the ranks here do."""
    wanted = trained(ranks, "ddp --accumulate 2")
    text = good(ranks, f"%dist_config --write {tmp_path}/ddp.yaml").visible
    script(tmp_path)
    env = {"ACCELERATE_USE_CPU": "true", "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "2"}
    done = accelerate(tmp_path, tmp_path / "ddp.yaml", env)

    assert [line for line in text.splitlines() if "environment" in line]
    assert done["type"] == "MULTI_CPU"
    assert close(done["losses"], wanted)


def test_the_batch_script_calls_torchrun_on_each_host(kernel: Kernel, tmp_path: Path) -> None:
    """The Slurm script is good bash; its task on each host has the same line."""
    good(kernel, f"%dist_config --write {tmp_path}/job.sbatch --nodes 2")
    env = slurm(tmp_path, 2)
    (tmp_path / "bin" / "torchrun").write_text(f'#!{_BASH}\necho "$*"\n')
    done = subprocess.run(
        [_BASH, "job.sbatch"], cwd=tmp_path, env=notebook_env(env), capture_output=True, text=True,
        check=True, timeout=_TIMEOUT_S,
    )  # fmt: skip

    assert re.fullmatch(
        r"(--nnodes 2 --nproc-per-node 1 --rdzv-backend c10d --rdzv-endpoint localhost:\d+ "
        r"--rdzv-id \d+ train\.py\n)\1",
        done.stdout,
    ), done.stdout


@pytest.mark.parity
@pytest.mark.parametrize("hosts", [1, 2])
def test_the_batch_script_starts_the_tasks(ranks: Kernel, tmp_path: Path, hosts: int) -> None:
    """The Slurm script's task on each host starts torchrun there."""
    wanted = trained(ranks, "ddp")
    good(ranks, f"%dist_config --write {tmp_path}/job.sbatch --nodes {hosts}")
    script(tmp_path)
    done = launched(tmp_path, _BASH, "job.sbatch", env=slurm(tmp_path, hosts))

    assert f"#SBATCH --nodes={hosts}" in (tmp_path / "job.sbatch").read_text()
    assert close(done["losses"], wanted)


@pytest.mark.parity
def test_the_torchrun_line_gives_the_same_losses(ranks: Kernel, tmp_path: Path) -> None:
    """The line alone, with its variables in front, trains as the ranks here do."""
    wanted = trained(ranks, "ddp --accumulate 2")
    good(ranks, f"%dist_config --write {tmp_path}/line --as torchrun")
    script(tmp_path)
    given, _, command = (tmp_path / "line").read_text().partition("torchrun ")
    env = dict(setting.split("=", 1) for setting in shlex.split(given))
    done = launched(
        tmp_path, sys.executable, "-m", "torch.distributed.run", *shlex.split(command), env=env
    )

    assert env["ACCELERATE_GRADIENT_ACCUMULATION_STEPS"] == "2"
    assert close(done["losses"], wanted)


@pytest.mark.parity
@pytest.mark.timeout(240)
def test_tensor_parallelism_gives_the_same_losses(ranks: Kernel, tmp_path: Path) -> None:
    """Accelerate's mesh of the YAML, with a model that transformers splits over it."""
    good(ranks, _SAVED.format(folder=tmp_path / "llama"))
    good(ranks, "%dist_strategy tp")
    wanted = losses_of(ranks, _LLAMA.format(folder=tmp_path / "llama", split=""))
    good(ranks, f"%dist_config --write {tmp_path}/tp.yaml")
    split = ", tp_plan='auto', device_mesh=accelerator.torch_device_mesh"
    training = _LLAMA.format(folder=tmp_path / "llama", split=split)
    (tmp_path / "train.py").write_text(_AS_ON_GPUS + training + _END)
    done = accelerate(tmp_path, tmp_path / "tp.yaml", {"ACCELERATE_USE_CPU": "true"})

    assert "parallelism_config_tp_size: 2" in (tmp_path / "tp.yaml").read_text()
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
    wraps = "fsdp_transformer_layer_cls_to_wrap: ConfigBlock" in (tmp_path / "a.yaml").read_text()
    script(tmp_path, _AS_ON_GPUS if wraps else _PLAIN)
    done = accelerate(tmp_path, tmp_path / "a.yaml", {"ACCELERATE_USE_CPU": "true"})

    assert wraps is (strategy != "single")
    assert isinstance(done["kinds"], list)
    assert kinds <= set(done["kinds"])
    assert close(done["losses"], wanted)


_LINES = {
    "three_axes.json --ranks 800 --tp 8 --pp 4": "change train_batch_size to 2000 (accumulation",
    "zero3_offload.json": "16 is not micro-batch 1 x accumulation 16 x 2 data-parallel ranks = 32",
    "zero3_adamw.json --with {data}/instructlab.yaml": "says mixed_precision bf16",
    "accelerate_ddp.yaml": "there are 2 ranks (as run here)",
    "accelerate_deepspeed.yaml --ranks 6": "there are 6 ranks (--ranks); change it to 6",
}


@pytest.mark.parametrize("typed", _LINES)
def test_a_file_is_checked_in_the_notebook(kernel: Kernel, typed: str) -> None:
    """Ranks that run are those that count, unless others are typed."""
    cell = kernel.run(f"%dist_config {_DATA}/{typed.format(data=_DATA)}")

    assert cell.status == "ok", cell.visible
    assert _LINES[typed] in cell.visible


_MISTAKES = {
    "%dist_config nowhere.yaml": "There is no file nowhere.yaml",
    "%dist_config a.yaml b.yaml": "name one file to check",
    "%dist_config a.yaml --strategy ddp": "--strategy cannot be used with a file",
    "%dist_config a.yaml --bf16": "precision is read from the file",
    "%dist_config --with b.json": "--with needs a file",
    "%dist_config --ranks 4": "Name the strategy as well: --strategy ddp",
    "%dist_config --strategy fsdp --ranks 8 --nodes 3": "8 ranks cannot be spread evenly over 3",
    "%dist_config --strategy fdsp": "Did you mean fsdp?",
    "%dist_config --device cuda": "There is no --device cuda. Choose one of gpu, cpu",
    "%dist_config --write ddp.txt": "does not say which form the file has",
    "%dist_config --write a.yaml --as xml": "There is no --as xml. Choose one of accelerate",
    "%dist_config --write nowhere/a.yaml": "There is no folder",
    "%dist_config --write a.json": "ddp is not a strategy of DeepSpeed",
    "%dist_config --strategy pp --write a.yaml": "nbdist run train.py -n 2 --strategy pp",
    "%dist_config --apply": "--apply needs a file",
    "%dist_config a.yaml --apply --ranks 4": "--apply takes the file as it is",
}


@pytest.mark.parametrize("typed", _MISTAKES)
def test_a_mistake_says_what_works(kernel: Kernel, typed: str) -> None:
    """What cannot be shown, written or checked fails the cell with the reason and the choices."""
    kernel.run(typed).check_failure("OptionError", re.escape(_MISTAKES[typed]))


def test_all_forms_are_shown(kernel: Kernel) -> None:
    """Without a file each form stands under its heading, or why there is none."""
    live = kernel.run("%dist_config").visible
    for_gpus = kernel.run("%dist_config --device gpu").visible
    other = kernel.run("%dist_config --strategy fsdp --tp 2 --ranks 16 --nodes 2").visible
    called = good(kernel, "import nbdist\nsorted(nbdist.session().config().texts)").visible

    assert "--- deepspeed: none" in live
    assert "torchrun --standalone --nproc-per-node 2 train.py" in live
    assert "use_cpu: true" in live
    assert "use_cpu: false" in for_gpus
    assert "CPU=true" not in for_gpus
    assert "parallelism_config_dp_shard_size: 8" in other
    assert "--nnodes 2 --nproc-per-node 8" in other
    assert "['accelerate', 'sbatch', 'torchrun']" in called
    assert "--- transformers: none" in live


def test_a_file_is_written_corrected(kernel: Kernel, tmp_path: Path) -> None:
    """The changes are told one by one, and no file is replaced unasked."""
    file = _DATA / "zero3_offload.json"
    line = f"%dist_config {file} --ranks 8 --write {tmp_path}/right.json"
    text = good(kernel, line).visible
    again = kernel.run(line)
    call = f"nbdist.check_config('{tmp_path}/right.json', ranks=8).checked.is_bad"

    assert "gradient_accumulation_steps is now 2, was 16" in text
    assert json.loads((tmp_path / "right.json").read_text())["gradient_accumulation_steps"] == 2
    assert "--force replaces it" in again.failure.evalue
    assert "False" in good(kernel, f"import nbdist\n{call}").visible


def test_a_files_strategy_is_put_under_the_live_model(ranks: Kernel, tmp_path: Path) -> None:
    """What the ranks wrote comes back; a file with a mistake changes nothing."""
    trained(ranks, "fsdp --bf16")
    good(ranks, f"%dist_config --write {tmp_path}/fsdp.yaml --device gpu")
    good(ranks, "%dist_strategy ddp")
    applied = good(ranks, f"%dist_config {tmp_path}/fsdp.yaml --apply").visible
    broken = tmp_path / "broken.yaml"
    broken.write_text("distributed_type: MULTI_GPU\nmixed_precision: bf17\n")
    refused = ranks.run(f"%dist_config {broken} --apply")
    current = good(ranks, "import nbdist; print(nbdist.session().strategy.current())").text

    assert applied.startswith("ddp, dp 2 -> fsdp, dp 2, --bf16 in ")
    assert "The strategy does not have these keys of the file: fsdp_config.fsdp_" in applied
    assert "num_processes: 2" in applied
    assert "rdzv_backend" not in applied
    refused.check_failure("OptionError", "Nothing was changed")
    assert "name='fsdp'" in current


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["{data}/zero2_adamw.json", "--ranks", "8"], 0),
        (["{data}/three_axes.json"], 1),
        (["{data}/nowhere.json"], 2),
        (["--strategy", "fsdp", "--ranks", "8"], 0),
        ([], 2),
    ],
)
def test_the_exit_code_in_a_terminal(
    words: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """0 for a file that can run, 1 for one that cannot, 2 for wrong use; no ranks are needed."""
    assert main(["config", *(word.format(data=_DATA) for word in words)]) == code
    assert "".join(capsys.readouterr())


@pytest.mark.parametrize(
    "typed",
    ["pp", "pp --dp 2 --tp 2 --schedule gpipe", "cp --dp 2", "ulysses", "zero1 --bf16",
     "tp --sequence-parallel", "fsdp --shard hybrid --replicas 2 --tp 2"],
)  # fmt: skip
def test_the_line_that_starts_a_strategy_means_it(typed: str) -> None:
    """What is told where there is no configuration is read as the same strategy."""
    name, *options = typed.split()
    verb = WORDS["run"]
    first = parse(verb, f"train.py -n 8 --strategy {name} {' '.join(options)}").values
    choice = choose(name, strategy_given(first), 8)
    line = run_line(choice).removeprefix("nbdist run ")
    again = parse(verb, line).values

    assert choose(again.strategy, strategy_given(again), again.world_size) == choice
