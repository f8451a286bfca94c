"""A process of torchrun as a rank: what nbdist.join takes, and what it and its rank refuse."""

from pathlib import Path

from tests.support.kernel import run_python

_SCRIPT = """
import os, sys
import nbdist
assert "IPython" not in sys.modules and "torch" not in sys.modules
import torch
import torch.distributed as dist
from nbdist.errors import NbdistError

def refused(call):
    try:
        call()
    except NbdistError as error:
        print(type(error).__name__, str(error), flush=True)

os.environ["ACCELERATE_USE_CPU"] = "true"
refused(lambda: nbdist.join("ddp"))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
refused(lambda: nbdist.join("fsdb"))
refused(lambda: nbdist.join("tp", tp=2))
this_rank = nbdist.join()
refused(lambda: this_rank.save("new"))
model = torch.nn.Linear(2, 2)
model, optimizer = this_rank.accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0))
open("file", "w").write("mine")
refused(lambda: this_rank.save("file"))
refused(lambda: this_rank.load("none"))
refused(lambda: this_rank.switch("fsdb"))
weight = next(model.parameters())
before = weight.detach().clone()
this_rank.save("new", asynchronous=True)
with torch.no_grad():
    weight.zero_()  # beside the save, which has a copy
this_rank.wait()
this_rank.load("new")
print(torch.equal(weight, before), open("file").read(), "IPython" in sys.modules)
this_rank.export_weights("weights", "model")
refused(lambda: this_rank.export_weights("weights", "mdl"))
"""


def test_a_process_becomes_a_rank(tmp_path: Path) -> None:
    """Once it has a group; errors are the notebook's, and nothing is changed by one."""
    (tmp_path / "a.py").write_text(_SCRIPT)
    done = run_python(str(tmp_path / "a.py"), cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    lines = iter(done.stdout.splitlines())

    assert done.returncode == 0, done.stderr
    for expected in (
        "StartError There is no process group. Call torch.distributed.init_process_group()",
        "OptionError There is no strategy 'fsdb'. Did you mean fsdp?",
        "OptionError 1 rank cannot form tp=2",
        "CheckpointError No model is prepared on the ranks",
        f"CheckpointError {tmp_path}/file is a file",
        f"CheckpointError No nbdist checkpoint found at {tmp_path}/none",
        "OptionError There is no strategy 'fsdb'. Did you mean fsdp?",
        f"{tmp_path}/new saved at step 0",
        f"{tmp_path}/new loaded at step 0",
        "True mine False",
        f"{tmp_path}/weights/model.safetensors written: the weights of Linear",
        "OptionError There is no variable mdl on the ranks. Models there: model (",
    ):
        assert next(lines).startswith(expected), done.stdout
