"""Checkpoints of a session's models, saved and loaded; and one model's weights in a file."""

from __future__ import annotations

import contextlib
import os
import time
import uuid
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from nbdist.cells.kernel import progress
from nbdist.cells.kernel.cell_request import CellHook
from nbdist.checkpoint import folder
from nbdist.checkpoint.results import (
    DONE,
    FAILED,
    RUNNING,
    Loaded,
    Saved,
    SaveStarted,
    Saving,
)
from nbdist.checkpoint.safetensors import ExportedWeights
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core.failures import ranks_phrase
from nbdist.core.progress import BYTES
from nbdist.core.units import size
from nbdist.errors import CheckpointError, Interrupted, NbdistError, OptionError, RankGone
from nbdist.rpc.kernel import gather
from nbdist.rpc.kernel.functions import RankFunction

# Seconds to agree on the content, and to copy it to the hosts' memory.
BEGIN_S = 600.0
# A large checkpoint on a slow disk.
LOAD_S = 3600.0
# A large model crosses a slow network and goes to a slow disk, and is read back.
EXPORT_S = 7200.0
# A rank's control thread answers at once; one whose C code holds the GIL, later.
ANSWER_S = 1.0
SILENT_S = 300.0
STOP_S = 3.0
POLL_S = 0.05

begin_save: RankFunction[[str, str, bool, bool], SaveStarted] = RankFunction(
    "nbdist.checkpoint.rank.save:begin"
)
load_checkpoint: RankFunction[[str, bool], Loaded] = RankFunction(
    "nbdist.checkpoint.rank.load:load"
)
write_weights: RankFunction[[str, str, bool, str], ExportedWeights] = RankFunction(
    "nbdist.checkpoint.rank.export_weights:export_weights"
)
save_state: RankFunction[[str], Saving] = RankFunction("save_state")
stop_save: RankFunction[[str, str], bool] = RankFunction("stop_save")


@dataclass(slots=True)
class _Pending:
    """A save that has not ended yet.

    Attributes:
        token: Names it on the ranks.
        heard_s: When rank 0 last said anything, by the monotonic clock.
        is_stopping: A rank cannot write its part any more, and rank 0 knows.
    """

    token: str
    path: Path
    heard_s: float
    is_stopping: bool = False


class Checkpoints(CellHook):
    """The checkpoints of a session: one save at a time, and loads."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._pending: _Pending | None = None
        self._failures: list[str] = []
        self._earlier: list[str] = []
        self._ended: list[str] = []

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        asynchronous: bool = False,
        adapters_only: bool = False,
    ) -> Saved | SaveStarted:
        """Save models, optimizers and training state; what was written is read back and compared.

        The checkpoint at the path stays until the new one is complete. A save that is still going
        on is waited for first.

        Args:
            path: A folder; relative to the notebook's. One that is a checkpoint is replaced.
            asynchronous: Return once everything is copied to the hosts' memory; the outcome is
                shown at the next cell or verb, and by `wait`.
            adapters_only: Of models save the adapters of PEFT alone.

        Raises:
            CheckpointError: It cannot be saved; what was at the path is unchanged.
            RankGone, RankBusy, NotRunning, NbdistError: As for a cell.
            Interrupted: If the user interrupted it; likewise.
        """
        target = folder.resolve(path)
        self._wait_before()
        began_s = time.monotonic()
        self._ranks.recover_if_needed()
        token = uuid.uuid4().hex
        pending = self._pending = _Pending(token, target, time.monotonic())
        try:
            with progress.during("saving") as tell:
                tell("the ranks agree on the contents")
                replies: list[SaveStarted] = self._ranks.call_all(
                    begin_save, str(target), token, asynchronous, adapters_only,
                    deadline_s=BEGIN_S, is_collective=True,
                )  # fmt: skip
        except BaseException as error:
            self._stop(pending, "not all ranks have started it")
            self._pending = None
            raise _as_checkpoint_error(error, f"{target} was not saved") from error
        started = replace(
            replies[0],
            copied_bytes=sum(reply.copied_bytes for reply in replies),
            stall_s=max(reply.stall_s for reply in replies),
        )
        if asynchronous:
            return started
        try:
            saved = self._finish(pending)
        except KeyboardInterrupt as error:
            raise Interrupted(self._interrupt(pending)) from error
        return replace(saved, notes=started.notes, elapsed_s=time.monotonic() - began_s)

    def load(self, path: str | os.PathLike[str], *, models_only: bool = False) -> Loaded:
        """Read a checkpoint into the models and optimizers that the ranks have prepared.

        Saved on any number of ranks, under any strategy. A save that is still going on is waited
        for first. All is read and compared with its checksums before anything changes.

        Args:
            path: The checkpoint's folder; relative to the notebook's.
            models_only: Leave optimizers, schedulers, loaders and random generators as they are.

        Raises:
            CheckpointError: There is none, or it does not fit; nothing was changed.
            RankGone, RankBusy, NotRunning, NbdistError: As for a cell.
            Interrupted: If the user interrupted it.
        """
        source = folder.resolve(path)
        self._wait_before()
        self._ranks.recover_if_needed()
        try:
            with progress.of_ranks(self._ranks, "loading") as tell:
                tell("every rank reads and checks its part")
                replies: list[Loaded] = self._ranks.call_all(
                    load_checkpoint, str(source), models_only,
                    deadline_s=LOAD_S, is_collective=True,
                )  # fmt: skip
        except BaseException as error:
            raise _as_checkpoint_error(error, f"{source} was not loaded") from error
        return replace(
            replies[0],
            read_bytes=sum(reply.read_bytes for reply in replies),
            elapsed_s=max(reply.elapsed_s for reply in replies),
            notes=tuple(dict.fromkeys(note for reply in replies for note in reply.notes)),
        )

    def wait(self) -> Saved | None:
        """Wait for a save that goes on beside training; None without one.

        Raises:
            CheckpointError: It has failed.
            Interrupted: The user interrupted the wait; the save goes on.
        """
        pending = self._pending
        if pending is None:
            return None
        try:
            return self._finish(pending)
        except KeyboardInterrupt as error:
            raise Interrupted(f"{pending.path} is still being saved") from error

    def earlier_messages(self) -> list[str]:
        """How an earlier save beside training ended, for the verb that waited for it; once."""
        messages, self._earlier = self._earlier, []
        return messages

    def news(self) -> list[str]:
        """Messages of a save beside training that has failed; each once. Returns soon."""
        if self._pending is not None:
            with contextlib.suppress(CheckpointError):  # `_failures` has it
                if (saved := self._look(self._pending)) is not None:
                    self._ended = [f"{saved.path} was saved at step {saved.step}"]
        messages, self._failures = self._failures, []
        return messages

    def before(self, metadata: dict[str, Any]) -> list[str]:
        """A save beside training that has failed is reported with the next cell."""
        return self.news()

    def status(self) -> list[str]:
        """The progress of the save beside training, and what `news` returns."""
        if (messages := self.news()) or self._pending is None:
            return [*messages, *self._ended]
        done, total, phases = _written(self._states(self._pending))
        share = f"{100 * done // total} % of {size(total)}" if total else "0 %"
        return [f"saving {self._pending.path}: {share} written and compared ({phases})"]

    def end(self) -> list[str]:
        """Wait for a save beside training before the ranks end; an interrupt cancels it.

        Returns:
            How it ended, as messages.
        """
        pending = self._pending
        try:
            self._wait_before()
        except KeyboardInterrupt:
            assert pending is not None
            self._stop(pending, "the ranks are being stopped")
            self._pending = None
            self._earlier.append(
                f"{pending.path} was cancelled; what was at that path is unchanged"
            )
        return self.earlier_messages()

    def _wait_before(self) -> None:
        """Let an earlier save end first. Its failure is reported, and stops nothing."""
        self._earlier = [*self.news(), *self._ended]
        self._ended = []
        try:
            earlier = self.wait()
        except CheckpointError as error:
            self._earlier.append(str(error))
            return
        if earlier is not None:
            self._earlier.append(f"{earlier.path} was saved at step {earlier.step}")

    def _finish(self, pending: _Pending) -> Saved:
        """Wait for the end of a save. A failure raised here is not reported again."""
        try:
            with progress.during("saving") as tell:
                while (saved := self._look(pending, tell)) is None:
                    time.sleep(POLL_S)
        except CheckpointError:
            self._failures.clear()
            raise
        return saved

    def _look(self, pending: _Pending, tell: progress.Tell | None = None) -> Saved | None:
        """The checkpoint once it is in place; None until then.

        Raises:
            CheckpointError: It has failed, which `_failures` has then as well.
        """
        states = self._states(pending)
        first = states.get(0, Saving(RUNNING))
        gone = [rank for rank in self._ranks.ranks if not self._ranks.is_connected(rank)]
        failure = ""
        if 0 in gone:
            failure = f"rank 0 {self._how(0)}; it moves the checkpoint into place"
        elif first.state == FAILED:
            failure = first.failure
        elif time.monotonic() - pending.heard_s > SILENT_S:
            failure = f"rank 0 has not answered for {SILENT_S:.0f} s"
        if failure:
            self._pending = None
            self._stop(pending, failure)  # the others would go on with what nobody puts in place
            text = f"{pending.path} was not saved: {failure}. What was at that path is unchanged."
            self._failures.append(text)
            raise CheckpointError(text)
        if first.saved is not None:
            self._pending = None
            return first.saved
        # A rank can no longer write its part, and rank 0 may not know that.
        why = [f"rank {rank} {self._how(rank)}" for rank in gone]
        why += [s.failure for rank, s in states.items() if rank and s.state == FAILED]
        if why and not pending.is_stopping:
            pending.is_stopping = True
            self._stop(pending, why[0])
        if states and tell is not None:
            done, total, phases = _written(states)
            tell(phases, done, total, BYTES)
        return None

    def _how(self, rank: int) -> str:
        exit_ = self._ranks.exit_of(rank)
        return "cannot be reached" if exit_ is None else f"ended ({exit_.how})"

    def _states(self, pending: _Pending) -> dict[int, Saving]:
        """The progress of each rank that answers within ANSWER_S."""
        futures = self._ranks.ask_all(lambda ask, rank: save_state(ask, rank, pending.token))
        end_s = time.monotonic() + ANSWER_S
        states = {}
        for rank, future in futures.items():
            with contextlib.suppress(TimeoutError, NbdistError):
                states[rank] = future.result(max(0.0, end_s - time.monotonic()))
        if 0 in states:
            pending.heard_s = time.monotonic()
        return states

    def _stop(self, pending: _Pending, why: str) -> dict[int, Future[bool]]:
        """Ask all ranks to stop a save; by rank, whether it will stop."""
        return self._ranks.ask_all(lambda ask, rank: stop_save(ask, rank, pending.token, why))

    def _interrupt(self, pending: _Pending) -> str:
        """Stop a save that the user interrupted, and say how it ended. At most STOP_S."""
        answer = self._stop(pending, "the user interrupted it").get(0)
        end_s = time.monotonic() + STOP_S
        is_stopped = False
        with contextlib.suppress(TimeoutError, NbdistError):
            is_stopped = answer is not None and answer.result(ANSWER_S)
        states = self._states(pending)
        while time.monotonic() < end_s and any(s.state == RUNNING for s in states.values()):
            time.sleep(POLL_S)
            states = self._states(pending)
        outcome = FAILED if is_stopped else states.get(0, Saving(RUNNING)).state
        if outcome == RUNNING:
            return f"{pending.path} is being moved into place; %dist_status shows when it is done"
        self._pending = None
        if outcome == DONE:
            return f"{pending.path} was already saved"
        return f"{pending.path} was not saved; what was at that path is unchanged"


def export_weights(
    ranks: Ranks, path: str | Path, model: str = "", *, is_merged: bool = False, adapter: str = ""
) -> ExportedWeights:
    """Write a model's weights into one safetensors file that transformers loads.

    Rank 0 writes it, on its host. It is read back and compared with the model, and only then gets
    its name; `config.json` comes beside it if the model has a config. Of a model with adapters of
    PEFT only the active adapter is written, as PEFT loads it.

    Args:
        ranks: All take part.
        path: A file that ends in .safetensors, or a folder, which gets a `model.safetensors`, or
            an `adapter_model.safetensors`.
        model: A variable on the ranks, or a path from one; empty for the only model.
        is_merged: Write the base model of adapters, with one merged into its weights.
        adapter: The adapter's name; empty for the active one.

    Raises:
        OptionError: There is no such model, or there are several; lists them.
        CheckpointError: It cannot be written, or what was read back differs. What was at the path
            stays.
        RankGone, RankBusy, NotRunning, Interrupted, NbdistError: As for a cell.
    """
    ranks.recover_if_needed()
    target = folder.resolve(path)
    try:
        with progress.of_ranks(ranks, "exporting", (0,)):
            replies: list[ExportedWeights] = ranks.call_all(
                write_weights, model, str(target), is_merged, adapter,
                deadline_s=EXPORT_S, is_collective=True,
            )  # fmt: skip
    except KeyboardInterrupt as error:
        raise Interrupted(f"{error}; what was at {target} is unchanged") from error
    except NbdistError as error:
        if (
            refused := gather.remote_error_message(error, OptionError, CheckpointError)
        ) is not None:
            raise refused from error
        raise
    return replies[0]


def _written(states: dict[int, Saving]) -> tuple[int, int, str]:
    """Bytes written and compared on all ranks, their total, and what ranks do now."""
    done = sum(saving.done_bytes for saving in states.values())
    total = sum(saving.total_bytes for saving in states.values())
    phases: dict[str, list[int]] = {}
    for rank, saving in states.items():
        phases.setdefault(saving.phase, []).append(rank)
    phase_text = "; ".join(f"{ranks_phrase(ranks)} {phase}" for phase, ranks in phases.items())
    return done // 2, total // 2, phase_text  # what is written counts once, what is compared again


def _as_checkpoint_error(error: BaseException, what: str) -> BaseException:
    """The error of a call to all ranks, as an error of this checkpoint."""
    if isinstance(error, KeyboardInterrupt):
        return Interrupted(f"{what}; {error}" if str(error) else what)
    if (refused := gather.remote_error_message(error, CheckpointError)) is not None:
        return refused
    if type(error) is NbdistError:  # a rank has ended meanwhile, or raised what nobody foresaw
        return CheckpointError(f"{what}: {error}")
    return RankGone(f"{what}: {error}") if isinstance(error, RankGone) else error
