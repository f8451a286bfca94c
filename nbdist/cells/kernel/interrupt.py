"""The steps after an interrupt, and their times: SIGINT, abort, giving the notebook back."""

from __future__ import annotations

from dataclasses import dataclass

# After an interrupt (or a timeout) ranks get this long; then the notebook is given back.
GIVE_BACK_S = 4.5
# After a second press; a rank in Python code is back by then, however fast the presses came.
GIVE_BACK_AGAIN_S = 0.5
# Ranks that are still inside a collective then are aborted.
ABORT_S = 1.0
# Ranks that are still in other C code then are named, with what another press does.
WARN_S = 1.5
# The longest time of an abort until all ranks are back and their groups made anew.
ABORTED_S = 2.0
# A rank reports its cell's begin at most this long before it takes interrupts.
BEGIN_S = 0.1
# Between two interrupts of a rank: the second would hit what the first one made it clean up.
SIGINT_AGAIN_S = 0.5

NEVER_S = float("inf")


@dataclass(slots=True)
class InterruptEscalation:
    """The interrupts of one cell and their consequences in time; times are monotonic.

    Attributes:
        began_s: The first press, or the timeout; None before.
        replace_s: When a press has asked for the replacement of ranks in C code.
    """

    began_s: float | None = None
    presses: int = 0
    replace_s: float | None = None
    _pressed_s: float = 0.0
    _again_s: float = NEVER_S
    _warned_s: float = NEVER_S
    _aborted_s: float = -NEVER_S

    @property
    def has_begun(self) -> bool:
        """Whether the cell is being interrupted."""
        return self.began_s is not None

    def press(self, now_s: float) -> None:
        """Take in a press: the first interrupts, a second hurries, one after the warning replaces.

        A second press in the moment of the first is impatience. A rank's variables are given up
        only by a press that comes after its rank was named with that very consequence.
        """
        self.presses += 1
        self._pressed_s = now_s
        if self.began_s is None:
            self.began_s = now_s
        elif now_s > self._warned_s:
            self.replace_s = now_s
        elif self.presses > 1:
            self._again_s = min(self._again_s, now_s)

    def time_out(self, now_s: float) -> None:
        """Begin as a first press would, for the cell's timeout."""
        self.began_s = now_s

    def aborted(self, now_s: float) -> None:
        """The ranks' collectives were broken off: their cells are about to end."""
        self._aborted_s = now_s

    def warned(self, now_s: float) -> None:
        """Note that a line has said what the next press does."""
        self._warned_s = min(self._warned_s, now_s)

    @property
    def is_warned(self) -> bool:
        """Whether a line has said what the next press does."""
        return self._warned_s < NEVER_S

    def sigint_s(self, begun_s: float | None, sent_s: float | None = None) -> float:
        """When a rank gets SIGINT, for each press one: its code may have caught the one before.

        Not before its cell has begun, when an engine ignores it; `sent_s` is that of the last one.
        """
        if self.began_s is None:
            return NEVER_S
        if sent_s is not None:
            return sent_s + SIGINT_AGAIN_S if self._pressed_s > sent_s else NEVER_S
        return min(NEVER_S if begun_s is None else begun_s + BEGIN_S, self.give_back_s)

    @property
    def abort_s(self) -> float:
        """When ranks that are still in a collective are aborted."""
        if self.began_s is None:
            return NEVER_S
        return min(self.began_s + ABORT_S, max(self._again_s, self.began_s + BEGIN_S))

    @property
    def warn_s(self) -> float:
        """When ranks that are still in other C code are named."""
        if self.began_s is None or self.is_warned:
            return NEVER_S
        return self.began_s + WARN_S

    @property
    def give_back_s(self) -> float:
        """When the notebook is given back, whatever the ranks do."""
        if self.began_s is None:
            return NEVER_S
        hurried_s = max(self._again_s + GIVE_BACK_AGAIN_S, self._aborted_s + ABORTED_S)
        return min(self.began_s + GIVE_BACK_S, hurried_s, self.replace_s or NEVER_S)
