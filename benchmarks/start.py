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

# Ranks -> rounds, and the most that a start may take of torchrun's: typed at once, with the server
# of %load_ext already there.
COUNTS = {2: (7, 0.8, 0.4), 8: (3, 0.6, None), 32: (2, 0.6, None)}
# So many ranks without forks take minutes.
MOST_UNFORKED = 8
AGAIN_ROUNDS = 5
# By then a server has imported all that ranks use.
SETTLED_S = 10.0


def cells_of_ours(ranks: int) -> tuple[str, ...]:
    """From %load_ext to the first all_reduce shown."""
    return "%load_ext nbdist", f"%dist_init -n {ranks}", f"%%distributed\n{_sum(ranks)}"


def script(ranks: int) -> str:
    """The same under torchrun."""
    return f"""
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
{_sum(ranks).replace("; ", chr(10))}
# Without it a rank sometimes aborts at its end, and torchrun ends the others before they print.
dist.barrier()
dist.destroy_process_group()
"""


def by_hand(store: Path, ranks: int = 2) -> tuple[str, ...]:
    """The cells with ipyparallel alone, as its documentation has it; ranks meet in a file."""
    return (
        f"""
import ipyparallel
client = ipyparallel.Cluster(n={ranks}).start_and_connect_sync(activate=True)
client[:].scatter("own", list(range(len(client))), flatten=True).get()
""",
        f"""%%px
import torch, torch.distributed as dist
dist.init_process_group(
    "gloo", init_method="file://{store}", rank=own, world_size={ranks})
{_sum(ranks)}
""",
    )


def _sum(ranks: int) -> str:
    # One piece of text, so that nothing of another rank's comes between.
    return f"x = torch.ones(1); dist.all_reduce(x); assert x == {ranks}; print(f'sum {{x.item()}}')"


def rows() -> list[Row]:
    """A row for each way; all start anew in every round, by turns."""
    return [*(row for ranks in COUNTS for row in _rows_of(ranks)), *_rows_again()]


def _rows_again() -> list[Row]:
    """Ranks that are started once more in a notebook, beside an import of torch."""
    cells = "%dist_restart 1", "%dist_reset"
    taken: dict[str, list[float]] = {way: [] for way in (*cells, "import")}
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name, Notebook(Path(name)) as ours:
        ours.run("%load_ext nbdist")
        ours.run("%dist_init -n 2")
        time.sleep(SETTLED_S)
        for _ in range(AGAIN_ROUNDS + 1):
            for cell in cells:
                taken[cell].append(ours.run(cell).elapsed_s)
            began_s = time.perf_counter()
            subprocess.run([sys.executable, "-c", "import torch"], check=True)
            taken["import"].append(time.perf_counter() - began_s)
        ours.run("%dist_shutdown")
    medians = {way: statistics.median(times[1:]) for way, times in taken.items()}
    how = f"{AGAIN_ROUNDS} rounds; an import of torch in a process of its own"
    return [
        Row(f"2 ranks, {cell}", medians[cell], medians["import"], unit="s", how=how,
            most_ratio=most_ratio)
        for cell, most_ratio in zip(cells, (0.3, None), strict=True)
    ]  # fmt: skip


def _rows_of(ranks: int) -> list[Row]:
    rounds, most_at_once, most_settled = COUNTS[ranks]
    cells, last = cells_of_ours(ranks), "%dist_shutdown"
    shown = f"sum {ranks:.1f}"
    ways: dict[str, Callable[[Path], float]] = {
        "typed at once": lambda folder: cells_s(folder, cells, last, shown),
        "server there": lambda folder: cells_s(folder, cells, last, shown, SETTLED_S),
        "torchrun": lambda folder: torchrun_s(folder, script(ranks), ranks),
    }
    if ranks <= MOST_UNFORKED:
        ways["no fork"] = lambda folder: cells_s(folder, cells, last, shown, NBDIST_FORK="0")
    if ranks == min(COUNTS):
        ways["ipyparallel by hand"] = lambda folder: cells_s(
            folder, by_hand(folder / "store", ranks), "client.cluster.stop_cluster_sync()", shown
        )
    taken: dict[str, list[float]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="nbdist-bench-") as name:
        for number in range(rounds + 1):
            for way, function in ways.items():
                folder = Path(name) / f"{number}.{way.replace(' ', '')}"
                folder.mkdir()
                taken[way].append(function(folder))
    medians = {way: statistics.median(times[1:]) for way, times in taken.items()}
    how = f"{rounds} rounds; torchrun: a script that makes the group and does one all_reduce"
    at_once, torchrun_median_s = medians["typed at once"], medians["torchrun"]
    made = [
        Row(f"{ranks} ranks, typed at once, beside torchrun", at_once, torchrun_median_s,
            unit="s", how=how, most_ratio=most_at_once),
        Row(f"{ranks} ranks, {SETTLED_S:.0f} s after %load_ext, beside torchrun",
            medians["server there"], torchrun_median_s, unit="s", how=how, most_ratio=most_settled),
    ]  # fmt: skip
    if "no fork" in medians:
        row_name = f"{ranks} ranks, typed at once, beside NBDIST_FORK=0"
        fork_how = f"{rounds} rounds; other: each rank imports torch itself"
        made.append(Row(row_name, at_once, medians["no fork"], unit="s", how=fork_how))
    if "ipyparallel by hand" in medians:
        peer_how = f"{rounds} rounds; Cluster, %%px, init_process_group"
        peer = medians["ipyparallel by hand"]
        row_name = f"{ranks} ranks, typed at once, beside ipyparallel by hand"
        made.append(Row(row_name, at_once, peer, unit="s", how=peer_how))
    return made


def cells_s(
    folder: Path, cells: Sequence[str], last: str, shown: str, settled_s: float = 0.0, **env: str
) -> float:
    """Seconds for cells in a kernel of their own, whose last one shows a text.

    After the first there is a pause, which does not count.
    """
    with Notebook(folder, **env) as notebook:
        ran = [notebook.run(cells[0])]
        time.sleep(settled_s)
        ran += [notebook.run(cell) for cell in cells[1:]]
        assert shown in ran[-1].text, ran[-1].text
        notebook.run(last)
    return sum(start.elapsed_s for start in ran)


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
