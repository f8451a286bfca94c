"""A rank joins its group, or says for whom it waits."""

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch
import torch.distributed as dist

from nbdist.cluster import run_owner
from nbdist.cluster.run_owner import RunOwner
from nbdist.core.host import Machine, this_machine
from nbdist.core.rank import this_rank
from nbdist.engine import facts, join
from nbdist.errors import NbdistError, StartError
from tests.programs.rank import everyone, rank, run_dir, total
from tests.support.gpus import Card, Driver, play
from tests.support.kernel import notebook_env
from tests.support.torch_ranks import ENV, on_ranks

JOIN = """
import json, sys
from pathlib import Path
from nbdist.engine import join
join.join_at_start(Path(sys.argv[1]), json.loads(sys.argv[2]))
"""


@on_ranks(2)
def test_two_processes_join_over_a_file() -> None:
    """Both have the same plan, and an all_reduce over them is right."""
    plan = this_rank().topology
    assert plan.backend == "gloo"
    assert dist.get_rank() == rank
    assert total() == 3.0
    assert os.environ["LOCAL_RANK"] == str(rank)
    assert os.environ["ACCELERATE_USE_CPU"] == "true"
    assert [place.pid for place in plan.ranks] == everyone(os.getpid())
    assert sorted(path.name for path in run_dir.glob("arrived.*")) == ["arrived.0", "arrived.1"]


def test_a_rank_that_waits_in_vain_writes_down_for_whom(tmp_path: Path) -> None:
    """A failed start is left as a record that names the missing ranks, and ends the process."""
    start = {"world_size": 4, "backend": "auto", "deadline_s": 1.0, "gpus": []}
    ended = subprocess.run(
        [sys.executable, "-c", JOIN, str(tmp_path), json.dumps(start)],
        env=notebook_env({"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "4", **ENV}),
        timeout=60,
        check=False,
    )
    written = json.loads((tmp_path / "failed.1").read_text())

    assert ended.returncode == 1
    assert written["kind"] == "StartError"
    assert written["is_explained"]
    assert written["message"] == "rank 1 waited 1 s for rank(s) 0,2-3 to join the group"


def test_a_rank_reports_its_gpu_by_the_drivers_uuid(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch writes it without "GPU-" and "MIG-": a slice would be taken for a whole GPU."""
    seen = [
        SimpleNamespace(uuid="aa-1", name="NVIDIA H100 MIG 1g.10gb"),
        SimpleNamespace(uuid="bb", name="NVIDIA H100"),
        SimpleNamespace(uuid="unlisted", name="NVIDIA H100 MIG 1g.10gb"),
    ]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_properties", seen.__getitem__)
    play(monkeypatch, tmp_path, Driver(Card("GPU-aa", slices=2), Card("GPU-bb")), None)
    reported = facts.gpus()

    assert [gpu.uuid for gpu in reported] == ["MIG-aa-1", "GPU-bb", "MIG-unlisted"]
    assert [gpu.is_slice for gpu in reported] == [True, False, True]
    assert [gpu.index for gpu in reported] == [0, 1, 2]


def test_nothing_is_known_before_a_rank_has_joined() -> None:
    """Asking a process outside of any group is an explained error."""
    with pytest.raises(StartError, match="has not joined"):
        this_rank()
    with pytest.raises(NbdistError):
        join.barrier("one", 0.1)


def test_an_engine_describes_itself() -> None:
    """Host, process, network, cores and torch are this process's own."""
    description = facts.describe(7, "127.0.0.1")

    assert description.engine_id == 7
    assert description.hostname == socket.gethostname()
    assert description.pid == os.getpid()
    assert description.torch_version == torch.__version__
    assert description.has_cuda == torch.cuda.is_available()
    assert len(description.gpus) == (torch.cuda.device_count() if description.has_cuda else 0)
    assert description.cores == len(psutil.Process().cpu_affinity())
    assert description.python == sys.executable
    assert description.toward_controller == "127.0.0.1"
    assert ("lo", "127.0.0.1") in description.addresses
    assert description.boot_id == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    assert description.network_namespace.startswith("net:[")


def test_a_launchers_variables_become_hints(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slurm's numbering is taken over; text that is no number is none."""
    ranks, sizes = facts.RANK_VARIABLES, facts.SIZE_VARIABLES
    for name in (*ranks, *sizes, *facts.LOCAL_VARIABLES, *facts.JOB_VARIABLES):
        monkeypatch.delenv(name, raising=False)
    without = facts.describe(0)
    monkeypatch.setenv("SLURM_PROCID", "3")
    monkeypatch.setenv("SLURM_NTASKS", "8")
    monkeypatch.setenv("SLURM_LOCALID", "x")
    monkeypatch.setenv("SLURM_JOB_ID", "42")
    description = facts.describe(0)

    assert (without.rank_hint, without.size_hint, without.local_hint) == (None, None, None)
    assert without.job_id == ""
    assert (
        description.rank_hint,
        description.size_hint,
        description.local_hint,
        description.job_id,
    ) == (3, 8, None, "42")


def test_a_way_to_nowhere_is_no_address() -> None:
    """Without a name or a route there is no address, and no error."""
    assert facts.address_toward("") == ""
    assert facts.address_toward("127.0.0.1") == "127.0.0.1"


def test_reachable_addresses_are_those_that_answer() -> None:
    """Only an address with a listener on the port is found, in the order asked."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        address = join.reachable(("127.0.0.2", "127.0.0.1"), port, 1.0)
    gone = join.reachable(("127.0.0.1",), port, 1.0)

    assert address == ("127.0.0.1",)
    assert gone == ()


def test_a_runs_folder_of_another_host_is_not_the_ranks_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Though a file system shows it here: its boxes are mapped and timed over there."""
    monkeypatch.setenv("NBDIST_RUN", str(tmp_path))
    here = this_machine()

    def owner(machine: Machine) -> str:
        return json.dumps(asdict(RunOwner(1, "1", machine, 0.0, "")))

    assert join.run_folder() == tmp_path  # an agent's, of this host
    (tmp_path / run_owner.FILE).write_text(owner(replace(here, host="a-container-of-this-host")))
    assert join.run_folder() == tmp_path
    (tmp_path / run_owner.FILE).write_text(owner(replace(here, boot="another")))
    assert join.run_folder() is None
    monkeypatch.setenv("NBDIST_RUN", str(tmp_path / "not-here"))
    assert join.run_folder() is None
