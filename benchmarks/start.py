"""From a running kernel to the first all_reduce shown, beside torchrun and ipyparallel by hand."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks import Row
from benchmarks.kernels import Notebook

RANKS = 2
ROUNDS = 7
MOST_RATIO = 1.2
# One piece of text, so that nothing of another rank's comes between.
_SUM = "x = torch.ones(1); dist.all_reduce(x); print(f'sum {x.item()}')"
_SHOWN = f"sum {RANKS:.1f}"
OURS = ("%load_ext nbdist", f"%dist_init -n {RANKS}", f"%%distributed\n{_SUM}")
SCRIPT = f"""
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
{_SUM.replace("; ", chr(10))}
# Without it a rank sometimes aborts at its end, and torchrun ends the others before they print.
dist.barrier()
dist.destroy_process_group()
"""
# As its documentation has it; ranks meet in a file, as nbdist's do.
_BY_HAND = (
    f"""
import ipyparallel
client = ipyparallel.Cluster(n={RANKS}).start_and_connect_sync(activate=True)
client[:].scatter("own", list(range(len(client))), flatten=True).get()
""",
    f"""%%px
import torch, torch.distributed as dist
dist.init_process_group(
    "gloo", init_method="file://STORE", rank=own, world_size={RANKS})
{_SUM}
""",
)


def rows() -> list[Row]:
    """A row for each way; all start anew in every round, by turns."""
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        ways: dict[str, Callable[[Path], float]] = {
            "ours": lambda folder: cells_s(folder, OURS, "%dist_shutdown"),
            "torchrun": lambda folder: torchrun_s(folder, SCRIPT, RANKS),
            "ipyparallel by hand": _by_hand_s,
        }
        taken: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(ROUNDS + 1):
            for way, function in ways.items():
                folder = Path(name) / f"{number}.{way.split()[0]}"
                folder.mkdir()
                taken[way].append(function(folder))
    medians = {way: statistics.median(times[1:]) for way, times in taken.items()}
    return [
        Row(
            f"{RANKS} ranks, beside {way}",
            medians["ours"],
            medians[way],
            unit="s",
            how=f"{ROUNDS} rounds; {how}",
            most_ratio=most_ratio,
        )
        for way, how, most_ratio in (
            ("torchrun", "a script that makes the group and does one all_reduce", MOST_RATIO),
            ("ipyparallel by hand", "Cluster, %%px, init_process_group", None),
        )
    ]


def cells_s(folder: Path, cells: Sequence[str], last: str, shown: str = _SHOWN) -> float:
    """Seconds for cells in a kernel of their own, whose last one shows a text."""
    with Notebook(folder) as notebook:
        ran = [notebook.run(cell) for cell in cells]
        assert shown in ran[-1].text, ran[-1].text
        notebook.run(last)
    return sum(one.elapsed_s for one in ran)


def _by_hand_s(folder: Path) -> float:
    return cells_s(folder, by_hand(folder / "store"), "client.cluster.stop_cluster_sync()")


def by_hand(store: Path) -> tuple[str, ...]:
    """The cells with ipyparallel alone, whose ranks meet in a file."""
    return tuple(cell.replace("STORE", str(store)) for cell in _BY_HAND)


def torchrun_s(folder: Path, script: str, ranks: int, shown: str | None = None) -> float:
    """Seconds until a script under torchrun has shown a text on every rank."""
    path = folder / "script.py"
    path.write_text(script)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(ranks)]
    env = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    began_s = time.perf_counter()
    process = subprocess.Popen(
        [*command, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(path)],
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    with process:
        assert process.stdout is not None
        wanted, elapsed_s = ranks, 0.0
        for line in process.stdout:
            # Two ranks' lines can come as one.
            wanted -= line.count(shown or f"sum {ranks:.1f}")
            if not wanted and not elapsed_s:
                elapsed_s = time.perf_counter() - began_s
    assert elapsed_s, f"{path} has not shown it {ranks} times"
    return elapsed_s
