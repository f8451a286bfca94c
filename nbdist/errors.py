"""Every error that a user of nbdist can meet.

None of them derives from IPython's UsageError: nbval, nbclient and Run All
pass over that one, so a failure would be reported as success.
"""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Iterable


class NbdistError(Exception):
    """A failure that nbdist found and explains in its message."""

    def _render_traceback_(self) -> list[str]:
        # IPython calls this instead of drawing frames: the frames would show
        # nbdist's own code, and the message already says what to do.
        return [f"{type(self).__name__}: {self}"]


class OptionError(NbdistError):
    """An option, rank or value that does not exist; the message lists what does."""


def did_you_mean(word: object, choices: Iterable[str], most: int = 1) -> str:
    """` Did you mean fsdp?`, behind the sentence that there is no such word; empty if none is."""
    near = difflib.get_close_matches(str(word).lower(), choices, most)
    return f" Did you mean {' or '.join(near)}?" if near else ""


def no_such(what: str, word: object, choices: Iterable[str], also: str = "") -> OptionError:
    """The error for a word that is none of the choices; `also` is what the list does not have."""
    choices = tuple(choices)
    typed = word if what.startswith("-") else repr(word)
    return OptionError(
        f"There is no {what} {typed}.{did_you_mean(word, choices)} "
        f"Choose one of {', '.join(choices)}{also}."
    )


class StartError(NbdistError):
    """A cluster could not start; the message names the process and its reason."""


class NotRunning(NbdistError):
    """A verb needs ranks and none are running in this notebook."""


class AlreadyRunning(NbdistError):
    """Ranks are running already, and others were asked for."""


class RankBusy(NbdistError):
    """A chosen rank still runs an earlier cell."""


class RankGone(NbdistError):
    """A chosen rank, or the cluster's controller, has ended."""


class CellTimeout(NbdistError):
    """A cell ran longer than its --timeout; its ranks were interrupted."""


class TransferError(NbdistError):
    """A variable could not be pushed to ranks or pulled from them; nothing was bound."""


class TraceError(NbdistError):
    """A trace cannot be recorded, read or saved; what the ranks run goes on."""


class SnapshotError(NbdistError):
    """A memory snapshot cannot be taken, read or saved; what the ranks run goes on."""


class CheckpointError(NbdistError):
    """A checkpoint cannot be saved, read or loaded; the earlier one at its path is whole."""


class DistributedError(NbdistError):
    """The cell's code raised on one or more ranks.

    Attributes:
        ranks: The ranks that failed, in rank order.
        traceback_text: Each distinct traceback once, with its ranks, root cause first.
        advice: What to do about it, shown below; or empty.
    """

    def __init__(
        self,
        message: str,
        *,
        ranks: tuple[int, ...] = (),
        traceback_text: str = "",
        advice: str = "",
    ):
        super().__init__(message)
        self.ranks = ranks
        self.traceback_text = traceback_text
        self.advice = advice
        # Shown by plain Python; IPython asks _render_traceback_.
        for note in filter(None, (re.sub(r"\x1b\[[0-9;]*m", "", traceback_text), advice)):
            self.add_note(note)

    def __reduce__(self) -> tuple[object, ...]:
        # Exceptions with keyword-only arguments do not survive pickling otherwise.
        named = {name: getattr(self, name) for name in ("ranks", "traceback_text", "advice")}
        return functools.partial(type(self), str(self), **named), ()

    def _render_traceback_(self) -> list[str]:
        summary = f"{type(self).__name__}: {self}"
        lines = [self.traceback_text, "", summary] if self.traceback_text else [summary]
        return [*lines, "", self.advice] if self.advice else lines


class Deadlock(DistributedError):
    """Ranks waited in collectives that could not end; they were aborted, and are back."""


class NoKeyboard(NbdistError):
    """The cell asks for typed input, which a rank cannot get."""


class RankStays(NbdistError):
    """The cell asks its rank to end, which only the notebook decides."""


class ScriptEnded(NbdistError):
    """A program of `nbdist run` ended itself with another exit code than 0."""


class Interrupted(KeyboardInterrupt):
    """The user interrupted a distributed cell or a start; says what is left of it."""

    def _render_traceback_(self) -> list[str]:
        return [f"KeyboardInterrupt: {self}"]


# Frontends show an exception's class by name; this one is a KeyboardInterrupt to everybody,
# and its own class exists only to leave nbdist's frames out of the traceback.
Interrupted.__name__ = "KeyboardInterrupt"
