"""The stand-in for a GPU behaves as it says; tests/gpu asks a GPU the same."""

import json
import os
import subprocess
import sys

from nbdist.cluster import nccl_env
from tests.support import device_manners


def test_the_stand_in_has_a_gpus_manners() -> None:
    """Calls are queued, waits use a core and hear no signal, aborts are together, errors stay."""
    program = [sys.executable, "-m", device_manners.__name__, "queued"]
    environ = os.environ | nccl_env.at_import(os.environ)  # as a rank has it
    done = subprocess.run(
        program, capture_output=True, text=True, check=False, timeout=120, env=environ
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == device_manners.EXPECTED
