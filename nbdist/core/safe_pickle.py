"""Pickles that may come from anybody, read without running any of it.

A pickle is a program. Before anything of it runs, all its instructions are read: only those that
make plain values are let through, none of which can name, import or call anything. Source of the
instructions: Lib/pickletools.py.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from functools import cache
from typing import Any, NoReturn

from nbdist.errors import SnapshotError

# A compressed file, too, may be no larger than this once it is unpacked. One that is has 10^7
# events or more.
MOST_BYTES = 2**30
# Each takes 64 bytes or more in memory, and one byte here.
MOST_CONTAINERS = 2**26
_STOP = 0x2E
_BINUNICODE = 0x58
# Looked through at once; the matcher remembers as many places to come back to.
_RUN = 4096
# What makes values and keeps them: constants, numbers, texts, lists, tuples, dicts, the memo.
_WITHOUT_ARGUMENT = rb"\(\}\])Nusaeltd\x85\x86\x87\x88\x89\x94"
# These begin by what follows: a name of a module and of what is in it.
_GLOBALS = {"GLOBAL", "INST"}
_INSTRUCTIONS = {ord(one.code): one for one in pickletools.opcodes}
_TEXT = re.compile(rb"(?:\x8c.|X.{4})([\w.]{1,200})", re.DOTALL)
_WHY = {
    "GLOBAL": "imports {name}",
    "STACK_GLOBAL": "imports {name}",
    "INST": "imports and calls {name}",
    "REDUCE": "calls a function",
    "BUILD": "sets an object's state",
    "NEWOBJ": "makes an object of a class",
    "NEWOBJ_EX": "makes an object of a class",
    "OBJ": "makes an object of a class",
    "EXT1": "imports by a number (copyreg)",
    "EXT2": "imports by a number (copyreg)",
    "EXT4": "imports by a number (copyreg)",
    "PERSID": "refers to something outside of the file",
    "BINPERSID": "refers to something outside of the file",
    "LONG4": "holds a number of more than 255 bytes",
}
_ERRORS = (
    pickle.UnpicklingError, AttributeError, EOFError, IndexError, KeyError, MemoryError, TypeError,
    ValueError, OverflowError,
)  # fmt: skip


@cache
def _pattern(third: int, fourth: int) -> re.Pattern[bytes]:
    """Instructions that are let through.

    Args:
        third: The largest third byte of a value's number in the memo: memory is taken for all
            numbers up to the largest.
        fourth: Likewise.
    """
    short = b"|".join(re.escape(bytes([n])) + b"[\\x00-\\xff]{%d}" % n for n in range(256))
    places = b"[\\x00-\\xff]{2}[\\x00-\\x%02x][\\x00-\\x%02x]" % (third, fourth)
    parts = (
        b"[" + _WITHOUT_ARGUMENT + b"]",
        rb"[Khq\x80][\x00-\xff]",  # BININT1, BINGET, BINPUT, PROTO
        rb"M[\x00-\xff]{2}",  # BININT2
        rb"[Jj][\x00-\xff]{4}",  # BININT, LONG_BINGET
        b"r" + places,  # LONG_BINPUT
        rb"[G\x95][\x00-\xff]{8}",  # BINFLOAT, FRAME
        rb"[\x8c\x8a](?:" + short + b")",  # SHORT_BINUNICODE, LONG1
    )
    return re.compile(b"(?:" + b"|".join(parts) + b"){0,%d}" % _RUN)


class _Plain(pickle.Unpickler):
    """Makes plain values; the instructions are known to be harmless before it is made."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise SnapshotError(f"imports {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise SnapshotError("refers to something outside of the file")


def loads(data: bytes) -> Any:
    """The value of a pickle: None, truths, numbers, texts, and lists, tuples and dicts of them.

    Args:
        data: Of protocol 2 to 5, as pickle has written it since Python 2.3.

    Raises:
        SnapshotError: If it is cut off, holds anything else, or would take too much memory.
    """
    containers = sum(map(data.count, (b"}", b"]", b")", b"(", b"\x85", b"\x86", b"\x87")))
    if containers > MOST_CONTAINERS:
        raise SnapshotError(f"holds about {containers} lists and dicts, over {MOST_CONTAINERS}")
    _check(data)
    try:
        return _Plain(io.BytesIO(data)).load()
    except _ERRORS as error:
        raise SnapshotError(f"is damaged ({type(error).__name__}: {error})") from None


def _check(data: bytes) -> None:
    """Refuse a pickle with an instruction that does more than make plain values."""
    pattern = _pattern(min(len(data) >> 16, 255), len(data) >> 24)
    if not data:
        raise SnapshotError("is empty")
    if data[0] != pickle.PROTO[0]:
        raise SnapshotError("is no pickle of protocol 2 or later")
    at = 0
    while at < len(data):
        found = pattern.match(data, at)
        end = found.end() if found else at
        if end == at:
            if data[at] == _STOP:
                return
            if data[at] != _BINUNICODE:
                _refuse(data, at)
            end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "little")
            if len(data) < at + 5:
                break
        at = end
    raise SnapshotError("is cut off: it ends before its last instruction")


def _refuse(data: bytes, at: int) -> NoReturn:
    known = _INSTRUCTIONS.get(data[at])
    if known is None:
        raise SnapshotError(
            f"is damaged: byte {at} ({data[at]:#04x}) is no instruction of a pickle"
        )
    length = known.arg.n if known.arg else 0
    # The others have their length in front of them: the pattern would have taken a whole one.
    if known.name in {"SHORT_BINUNICODE", "LONG1"} or at + 1 + max(length, 0) > len(data):
        raise SnapshotError("is cut off: it ends in the middle of a value")
    if known.name == "LONG_BINPUT":
        raise SnapshotError("is damaged: it counts more values than it has bytes")
    why = _WHY.get(known.name, f"has the instruction {known.name}").format(name=_name(data, at))
    raise SnapshotError(
        f"{why} (byte {at}). A snapshot holds only lists, dicts, texts and numbers; nothing of "
        "this file was run"
    )


def _name(data: bytes, at: int) -> str:
    """What an instruction imports: two lines behind it, or the two texts before it."""
    if _INSTRUCTIONS[data[at]].name in _GLOBALS:
        texts = data[at + 1 : at + 401].split(b"\n")[:2]
    else:
        texts = _TEXT.findall(data, max(0, at - 500), at)[-2:]
    return ".".join(text.decode("utf-8", "replace") for text in texts) or "something"
