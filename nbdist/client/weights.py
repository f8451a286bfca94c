"""A model's weights in one file, for other programs."""

from __future__ import annotations

from pathlib import Path

from nbdist.client import answers, progress
from nbdist.client.ranks import Ranks
from nbdist.client.remote import RankFunction
from nbdist.core import checkpoint_folder
from nbdist.core.weights import Exported
from nbdist.errors import CheckpointError, Interrupted, NbdistError, OptionError

# A large model crosses a slow network and goes to a slow disk, and is read back.
EXPORT_S = 7200.0

export_weights: RankFunction[[str, str], Exported] = RankFunction(
    "nbdist.engine.weights:export_weights"
)


def export(ranks: Ranks, path: str | Path, model: str = "") -> Exported:
    """Write a model's weights into one safetensors file that transformers loads.

    Rank 0 writes it, on its host. It is read back and compared with the model, and only then gets
    its name; `config.json` comes beside it if the model has a config.

    Args:
        ranks: All take part.
        path: A file that ends in .safetensors, or a folder, which gets a `model.safetensors`.
        model: A variable on the ranks, or a path from one; empty for the only model.

    Raises:
        OptionError: There is no such model, or there are several; lists them.
        CheckpointError: It cannot be written, or what was read back differs. What was at the path
            stays.
        RankGone, RankBusy, NotRunning, Interrupted, NbdistError: As for a cell.
    """
    ranks.recover_if_needed()
    target = checkpoint_folder.resolved(path)
    try:
        with progress.of_ranks(ranks, "exporting", (0,)):
            told: list[Exported] = ranks.call_all(
                export_weights, model, str(target),
                deadline_s=EXPORT_S, is_collective=True,
            )  # fmt: skip
    except KeyboardInterrupt as error:
        raise Interrupted(f"{error}; what was at {target} is as it was") from error
    except NbdistError as error:
        if (refused := answers.refusal(error, OptionError, CheckpointError)) is not None:
            raise refused from error
        raise
    return told[0]
