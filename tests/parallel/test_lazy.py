"""What a start does not import, and what stands for it meanwhile."""

import asyncio
import gc
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from nbdist.engine import idle_imports
from tests.support.kernel import notebook_env

HEAVY = ("sympy", "accelerate", "torch.distributed.tensor", "torch._dynamo")
RANK = """
    import json, sys
    from pathlib import Path
    from nbdist.engine import join
    from nbdist.parallel.accelerator.lazy import AcceleratorProxy

    join.join_at_start(
        Path(sys.argv[1]), {"world_size": 1, "backend": "auto", "deadline_s": 30, "gpus": []})
    first, other, third, fourth = (AcceleratorProxy() for _ in range(4))
    heavy = [name for name in %r if name in sys.modules]
    looked_at = dict(vars(first))
    still = [name for name in %r if name in sys.modules]

    import accelerate
    is_one = isinstance(first, accelerate.Accelerator), isinstance(first, accelerate.Accelerator)
    unused = not vars(first)
    other.gradient_accumulation_steps = 3
    print(json.dumps({
        "heavy": heavy, "looked_at": looked_at, "still": still, "is_one": is_one, "unused": unused,
        "steps": other.gradient_accumulation_steps,
        "kind": type(other).__name__, "ranks": first.num_processes,
        "dir": "prepare" in dir(third), "repr": repr(fourth).split(" ")[0],
        "none": isinstance(third, dict),
    }))
"""


def test_a_rank_joins_without_what_only_training_needs(tmp_path: Path) -> None:
    """`accelerator` is there without Accelerate, and is one at whatever use comes first."""
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(RANK % (HEAVY, HEAVY)), str(tmp_path)],
        env=notebook_env({"RANK": "0", "WORLD_SIZE": "1", "NBDIST_RUN": str(tmp_path)}),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    printed = json.loads(run.stdout.splitlines()[-1])

    assert printed == {
        "heavy": [],
        "looked_at": {},
        "still": [],
        "is_one": [True, True],
        "unused": True,
        "steps": 3,
        "kind": "Accelerator",
        "ranks": 1,
        "dir": True,
        "repr": "<nbdist.parallel.accelerator.accelerator.LazyAccelerator",
        "none": False,
    }


def test_modules_are_imported_one_by_one_and_cells_come_between(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cell that arrives waits for one module; the objects of all are set aside at the end."""
    for name in ("ahead_a", "ahead_b"):
        (tmp_path / f"{name}.py").write_text("held = [[] for _ in range(1000)]\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(idle_imports, "AFTER_S", 0.0)
    monkeypatch.delenv("NBDIST_PRELOAD", raising=False)
    seen_modules: list[list[str]] = []

    def loaded() -> list[str]:
        return sorted(name for name in sys.modules if name.startswith("ahead_"))

    async def idle(*, has_run: bool) -> None:
        idle_imports.begin(lambda: has_run, ("ahead_a", "ahead_b"))
        while len(loaded()) < 2:
            seen_modules.append(loaded())
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    before = gc.get_freeze_count()
    try:
        asyncio.run(idle(has_run=True))
        with_cells = gc.get_freeze_count()
        for name in loaded():
            del sys.modules[name]
        asyncio.run(idle(has_run=False))
        without = gc.get_freeze_count()
    finally:
        gc.unfreeze()
        for name in loaded():
            del sys.modules[name]

    assert ["ahead_a"] in seen_modules
    assert with_cells <= before  # frozen objects may still die
    assert without >= before + 2000


def test_a_user_may_leave_them_to_the_cells(monkeypatch: pytest.MonkeyPatch) -> None:
    """With NBDIST_PRELOAD=0 nothing is imported that no cell has asked for."""
    monkeypatch.setenv("NBDIST_PRELOAD", "0")

    async def scheduled() -> int:
        loop = asyncio.get_running_loop()
        idle_imports.begin(lambda: False)
        return len(loop._scheduled)  # type: ignore[attr-defined]

    assert asyncio.run(scheduled()) == 0
