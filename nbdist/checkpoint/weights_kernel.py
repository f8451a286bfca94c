"""A model's weights in one file, for other programs."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from nbdist.cells.kernel import progress
from nbdist.checkpoint import folder, remote_weights
from nbdist.checkpoint.safetensors import Exported
from nbdist.errors import CheckpointError, Interrupted, NbdistError, OptionError
from nbdist.rpc.kernel import gather

if TYPE_CHECKING:
    from nbdist.cells.kernel.session import Session

# A large model crosses a slow network and goes to a slow disk, and is read back.
EXPORT_S = 7200.0


def export(session: Session, path: str | Path, model: str = "") -> Exported:
    """Write a model's weights into one safetensors file that transformers loads.

    Rank 0 writes it, on its host. It is read back and compared with the model, and only then gets
    its name; `config.json` comes beside it if the model has a config.

    Args:
        session: Its ranks; all take part.
        path: A file that ends in .safetensors, or a folder, which gets a `model.safetensors`.
        model: A variable on the ranks, or a path from one; empty for the only model.

    Raises:
        OptionError: There is no such model, or there are several; lists them.
        CheckpointError: It cannot be written, or what was read back differs. What was at the path
            stays.
        RankGone, RankBusy, NotRunning, Interrupted, NbdistError: As for a cell.
    """
    session.upkeep.recover_if_needed()
    target = folder.resolved(path)
    try:
        with progress.of_ranks(session, "exporting", (0,)):
            told: list[Exported] = session.call_all(
                remote_weights.export_weights, model, str(target),
                deadline_s=EXPORT_S, is_collective=True,
            )  # fmt: skip
    except KeyboardInterrupt as error:
        raise Interrupted(f"{error}; what was at {target} is as it was") from error
    except NbdistError as error:
        if (
            refused := gather.remote_error_message(error, OptionError, CheckpointError)
        ) is not None:
            raise refused from error
        raise
    return told[0]
