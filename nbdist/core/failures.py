"""Which rank failed first, and each distinct traceback once."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from nbdist.core.ranks import rank_label
from nbdist.core.units import compared

# A rank whose peer is gone fails too, often before the peer's own error has
# arrived. These texts mark such followers; they are never the root cause while
# another error is there. Seen with Gloo (torch 2.11 and 2.13) and read in NCCL's.
FOLLOWER_PATTERNS = (
    r"Connection closed by peer",
    r"Connection reset by peer",
    r"Broken pipe",
    r"Timed out waiting \d+ms",
    r"Socket Timeout",
    r"remote process exited or there was a network error",
    r"NCCL communicator was aborted",
    r"NCCL calls of this rank hung and were aborted",  # hang/rank/nccl_abort.py
    r"Watchdog caught collective operation timeout",
    r"monitoredBarrier",
    r"timed out after \d+ms in barrier",
    r"until the wait was aborted",  # hang/rank/rendezvous.py
    r"the collectives of this rank were broken off",  # hang/rank/recorder.py
    r"pipeline stage \d+, on rank \d+, failed",  # parallel/pp/shape_inference.py
)
_FOLLOWER = re.compile("|".join(FOLLOWER_PATTERNS))
_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ADDRESS = re.compile(r"0x[0-9a-fA-F]+")
# As IPython begins a frame: `File /usr/lib/python3.11/random.py:12, in choice(seq)`.
_LIBRARY_FRAME = re.compile(r"\s*File .*[/\\](?:site-packages|dist-packages|python3\.\d+)[/\\]")
_PORT = re.compile(r"(?<=[\w\]]):\d{4,5}\b")

# Of an exception's text, and of one frame with the values that it shows.
LONGEST_TEXT = 20_000
# More different tracebacks than this are told in one line each: nobody reads eight.
FULL_TRACEBACKS = 3


@dataclass(frozen=True, slots=True)
class RankFailure:
    """One rank's failure in one cell.

    Attributes:
        name: The exception's class, or what happened ("RankDied").
        traceback: IPython's coloured traceback lines; empty when there is none.
        at_s: When it happened, seconds since the epoch by the rank's own clock.
        advice: What to do about it, lines of text for below the error; or empty.
    """

    rank: int
    name: str
    message: str
    traceback: tuple[str, ...] = ()
    at_s: float = 0.0
    advice: str = ""

    @property
    def is_follower(self) -> bool:
        """Whether this is what a rank sees after another one has failed."""
        return is_follower(self.message)


def is_follower(message: str) -> bool:
    """Whether an exception's text is what a rank sees after another one has failed."""
    return bool(_FOLLOWER.search(message))


def root_cause_first(failures: Iterable[RankFailure]) -> tuple[RankFailure, ...]:
    """Failures in the order in which to read them: causes by time, then followers by time."""
    return tuple(sorted(failures, key=lambda f: (f.is_follower, f.at_s, f.rank)))


def grouped(failures: Iterable[RankFailure]) -> tuple[tuple[RankFailure, tuple[int, ...]], ...]:
    """Each distinct failure with the ranks that have it, root cause first.

    Two failures are the same when their tracebacks are, memory addresses, marked
    values and colours aside. Followers may also name different ports of their peers.
    """
    groups: dict[tuple[str, ...], list[RankFailure]] = {}
    for failure in root_cause_first(failures):
        texts = [failure.message, "\n".join(failure.traceback)]
        texts = [compared(plain(text)) for text in texts]
        if failure.is_follower:
            texts = [_PORT.sub("", text) for text in texts]
        groups.setdefault((failure.name, *texts), []).append(failure)
    return tuple((same[0], tuple(sorted(f.rank for f in same))) for same in groups.values())


def chain(error: BaseException | None) -> Iterator[BaseException]:
    """The exception and those that it came from; they can go round in a circle."""
    visited: set[int] = set()
    while error is not None and id(error) not in visited:
        visited.add(id(error))
        yield error
        error = error.__cause__ or error.__context__


def shortened(text: str) -> str:
    """The text, or both ends of one that is longer than LONGEST_TEXT."""
    skipped = len(text) - LONGEST_TEXT
    if skipped <= 0:
        return text
    end = LONGEST_TEXT // 2
    return f"{text[:end]}\n... {skipped:,} characters not shown\n{text[-end:]}"


def plain(text: str) -> str:
    """The text without colours, and with memory addresses made equal."""
    return _ADDRESS.sub("0x...", _ANSI.sub("", text))


def ranks_phrase(ranks: Sequence[int]) -> str:
    """`rank 1`, `ranks 0-3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {rank_label(ranks)}"


def ranks_on_hosts(hosts: Mapping[int, str]) -> str:
    """`ranks 0-1 on a, rank 2 on b`; the keys are ranks."""
    ranks_of = {name: [r for r, host in hosts.items() if host == name] for name in hosts.values()}
    return ", ".join(f"{ranks_phrase(ranks)} on {host}" for host, ranks in ranks_of.items())


def ranks_are(ranks: Sequence[int]) -> str:
    """`rank 1 is`, `ranks 0-3 are`."""
    return f"{ranks_phrase(ranks)} {'are' if len(ranks) > 1 else 'is'}"


def summary(failures: Iterable[RankFailure]) -> str:
    """One line: the root cause with its ranks, and who else failed.

    `rank 1 raised ValueError: boom; rank 0 then failed with RuntimeError: Connection closed ...`
    """
    (first, ranks), *others = grouped(failures)
    line = f"{ranks_phrase(ranks)} {_failure_text(first, _one_line(first.message))}"
    for failure, its_ranks in others[:FULL_TRACEBACKS]:
        # Of a follower's message, which says where in Gloo's source it is, only what happened.
        happened = _FOLLOWER.search(plain(failure.message))
        message = happened[0] if happened else failure.message
        verb = "then failed with" if happened else "raised"
        line += f"; {ranks_phrase(its_ranks)} {_failure_text(failure, _one_line(message), verb)}"
    rest = sorted(rank for _, its in others[FULL_TRACEBACKS:] for rank in its)
    if rest:
        line += f"; {ranks_phrase(rest)} failed too"
    return line


def traceback_text(failures: Sequence[RankFailure]) -> str:
    """Every distinct traceback under the ranks that have it, root cause first.

    Of ranks that failed because of another one, without the frames of libraries: what matters is
    where their own code was. A death has no traceback; `summary` tells it.
    """
    parts = []
    has_cause = any(not failure.is_follower for failure in failures)
    raised = [failure for failure in failures if failure.name != "RankDied"]
    for number, (failure, ranks) in enumerate(grouped(raised)):
        who = ranks_phrase(ranks)
        if number >= FULL_TRACEBACKS:
            parts.append(f"{_bold(who)} {_failure_text(failure, _one_line(failure.message))}")
        elif failure.traceback:
            head = _bold(f"{who} {_failure_text(failure, '')}")
            is_short = has_cause and failure.is_follower
            frames = [
                frame
                for frame in failure.traceback
                if not (is_short and _LIBRARY_FRAME.match(plain(frame)))
            ]
            parts.append(f"{head}:\n" + "\n".join(frames))
        else:
            parts.append(f"{_bold(who)} {_failure_text(failure, failure.message)}")
    return "\n\n".join(parts)


def advice(failures: Iterable[RankFailure]) -> str:
    """Advice on the first cause that has any, and the other ranks that ran out of memory too."""
    advised = [failure for failure in root_cause_first(failures) if failure.advice]
    if not advised:
        return ""
    first, *others = advised
    also = sorted(failure.rank for failure in others)
    return first.advice + (f"\n{ranks_phrase(also)} ran out of memory too" if also else "")


def _bold(text: str) -> str:
    return f"\x1b[1m{text}\x1b[0m"


def _failure_text(failure: RankFailure, message: str, verb: str = "raised") -> str:
    if failure.name == "RankDied":
        return message
    return f"{verb} {failure.name}" + (f": {message}" if message else "")


def _one_line(message: str, longest: int = 600) -> str:
    first = plain(message).strip().split("\n", 1)[0]
    return first if len(first) <= longest else first[: longest - 3] + "..."
