"""The engine's process: the notebook's sys.path, torch, then ipyparallel's engine.

Run by its path, before nbdist can be imported, so the first lines use the standard library
alone. Torch is imported while the controller is still coming up; then its connection file is waited
for, and once the engine is on its way there it joins the group (engine/early_join.py).
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

URL_FILE_OPTION = "--IPEngine.url_file="
CONTROLLER_DEADLINE_S = 60.0


def wait_for_controller(arguments: list[str]) -> None:
    """Return once the controller's connection file is there and whole.

    ipyparallel's own waiting looks every 0.1 s and reads a file that may be half written.
    """
    paths = [a.removeprefix(URL_FILE_OPTION) for a in arguments if a.startswith(URL_FILE_OPTION)]
    end = time.monotonic() + CONTROLLER_DEADLINE_S
    while paths:
        try:
            json.loads(Path(paths[0]).read_text())
        except (OSError, ValueError):
            if time.monotonic() > end:
                limit = f"{CONTROLLER_DEADLINE_S:.0f} s"
                sys.exit(f"the controller did not write {paths[0]} within {limit}")
            time.sleep(0.01)
        else:
            return


def refuse(run_dir: Path, version: str) -> None:
    """End this process, whose torch has no torch.distributed, and report why to the notebook."""
    from nbdist.core import versions

    message = versions.without_distributed(version, sys.executable)
    failure = {"kind": "StartError", "message": message, "is_explained": True, "traceback": ""}
    (run_dir / f"failed.{os.environ['RANK']}").write_text(json.dumps(failure))
    sys.exit(message)


def main() -> None:
    """Be one rank until asked to stop."""
    run_dir = Path(os.environ["NBDIST_RUN"])
    if (notebook := run_dir / "notebook.json").exists():
        sys.path[:] = json.loads(notebook.read_text())["sys_path"]
    else:  # on another host: its own Python's, and the notebook's folder where it is there too
        sys.path.insert(0, "")
    # Inherited from a notebook that nbval runs; ipykernel then leaves out what C code and
    # child processes print.
    os.environ.pop("PYTEST_CURRENT_TEST", None)

    from nbdist.engine import child_sockets
    from nbdist.rpc.rank import crash_files

    crash_files.arm(run_dir, int(os.environ["RANK"]))
    child_sockets.use(run_dir, int(os.environ["RANK"]))

    import torch  # the longest part, before there is anything to register with

    if not torch.distributed.is_available():  # nothing of what follows could be imported
        refuse(run_dir, torch.__version__)

    wait_for_controller(sys.argv)

    from ipyparallel.engine.app import main as run_engine

    sys.argv[0] = "ipengine"
    run_engine()


if __name__ == "__main__":
    main()
