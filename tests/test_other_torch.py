"""What `make test` tries of other releases of torch than the pinned one."""

import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PYTHONS = sorted(ROOT.glob(".venv-torch-*/bin/python"))
SHORT = ("tests/test_private_names.py", "tests/front/test_short.py")
ENDS_S = 300


@pytest.mark.timeout(ENDS_S + 30)
@pytest.mark.skipif(not PYTHONS, reason="no other torch is here: make test TORCH=2.15.0 takes one")
@pytest.mark.parametrize("python", PYTHONS, ids=lambda path: path.parents[1].name)
def test_other_releases_of_torch_have_what_is_used(python: Path) -> None:
    """Private names; under each kind of strategy steps, a hang, recovery; a switch, a checkpoint.

    Warnings are what a newer release has in store, and are no errors here.
    """
    words = ["-m", "pytest", "-q", "-m", "", "-o", "filterwarnings=default", *SHORT]
    ran = subprocess.run(
        [python, *words], cwd=ROOT, capture_output=True, text=True, timeout=ENDS_S, check=False
    )

    assert ran.returncode == 0, ran.stdout[-5000:] + ran.stderr[-2000:]
