"""Pickles that may come from anybody, read without running any of it.

A pickle is a program. Before anything of it runs, all its instructions are read: only those that
make plain values are let through, none of which can name, import or call anything. Where classes
are given, instructions that make objects are let through too, and can name those classes alone.
Restricting what a pickle names is not enough: LONG_BINPUT takes memory for as many values as it
likes, and EXT1 to EXT4 import by a number. Source of the instructions: Lib/pickletools.py.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NoReturn

# A compressed file, too, may be no larger than this once it is unpacked. One that is has 10^7
# events or more.
MOST_BYTES = 2**30
# Each takes 64 bytes or more in memory, and one byte here.
MOST_CONTAINERS = 2**26
# What unpickling raises where a pickle is damaged.
ERRORS = (
    pickle.UnpicklingError, AttributeError, EOFError, ImportError, IndexError, KeyError,
    MemoryError, TypeError, ValueError, OverflowError, RuntimeError, AssertionError,
)  # fmt: skip
_STOP = 0x2E
_BINUNICODE = 0x58
# Looked through at once; the matcher remembers as many places to come back to.
_RUN = 4096
# What makes values and keeps them: constants, numbers, texts, lists, tuples, dicts, the memo.
_WITHOUT_ARGUMENT = rb"\(\}\])Nusaeltd\x85\x86\x87\x88\x89\x94"
# What makes objects: REDUCE, BUILD, NEWOBJ, STACK_GLOBAL; GLOBAL has two lines behind it.
_OF_CLASSES = rb"[Rb\x81\x93]", rb"c[^\n]{1,200}\n[^\n]{1,200}\n"
_INSTRUCTIONS = {ord(opcode.code): opcode for opcode in pickletools.opcodes}
_TEXT = re.compile(rb"(?:\x8c.|X.{4})([\w.]{1,200})", re.DOTALL)
_WHY = {
    "GLOBAL": "imports {name}",
    "STACK_GLOBAL": "imports {name}",
    "INST": "imports and calls {name}",
    "REDUCE": "calls a function",
    "BUILD": "sets an object's state",
    **dict.fromkeys(("NEWOBJ", "NEWOBJ_EX", "OBJ"), "makes an object of a class"),
    **dict.fromkeys(("EXT1", "EXT2", "EXT4"), "imports by a number (copyreg)"),
    **dict.fromkeys(("PERSID", "BINPERSID"), "refers to something outside of the file"),
    "LONG4": "holds a number of more than 255 bytes",
}


class Refused(Exception):
    """A pickle is damaged, or holds what is not let through; the message goes behind its name."""


@cache
def _pattern(third: int, fourth: int, *, has_classes: bool) -> re.Pattern[bytes]:
    """Instructions that are let through; with classes also those that make objects.

    The third and fourth byte of a value's number in the memo are bounded: memory is taken for all
    numbers up to the largest.
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
        *(_OF_CLASSES if has_classes else ()),
    )
    return re.compile(b"(?:" + b"|".join(parts) + b"){0,%d}" % _RUN)


class _Restricted(pickle.Unpickler):
    """Names what is in its table, and nothing else."""

    def __init__(self, data: bytes, classes: Mapping[tuple[str, str], Any]) -> None:
        super().__init__(io.BytesIO(data))
        self._classes = classes

    def find_class(self, module: str, name: str) -> Any:
        if self._classes.get((module, name)) is None:
            raise Refused(
                f"refers to {module}.{name}, which such a file never contains: another program has "
                "written it, and nothing in it was run"
            )
        return self._classes[module, name]


def loads(data: bytes, classes: Mapping[tuple[str, str], Any] | None = None) -> Any:
    """The value of a pickle: None, truths, numbers, texts, and lists, tuples and dicts of them.

    Args:
        data: Of protocol 2 to 5, as pickle has written it since Python 2.3.
        classes: By module and name: what it may hold besides. Making one must do nothing.

    Raises:
        Refused: If it is cut off, holds anything else, or would take too much memory.
    """
    containers = sum(map(data.count, (b"}", b"]", b")", b"(", b"\x85", b"\x86", b"\x87")))
    if containers > MOST_CONTAINERS:
        raise Refused(f"holds about {containers} lists and dicts, over {MOST_CONTAINERS}")
    _check(data, has_classes=bool(classes))
    try:
        return _Restricted(data, classes or {}).load()
    except ERRORS as error:
        raise Refused(f"is damaged ({type(error).__name__}: {error})") from None


def _check(data: bytes, *, has_classes: bool) -> None:
    """Refuse a pickle with an instruction that is not let through."""
    if not data:
        raise Refused("is empty")
    if data[0] != pickle.PROTO[0]:
        raise Refused("is not a pickle of protocol 2 or later")
    pattern = _pattern(min(len(data) >> 16, 255), len(data) >> 24, has_classes=has_classes)
    at = 0
    while at < len(data):
        run = pattern.match(data, at)
        end = run.end() if run else at
        if end == at:
            if data[at] == _STOP:
                return
            if data[at] != _BINUNICODE:
                _refuse(data, at)
            end = at + 5 + int.from_bytes(data[at + 1 : at + 5], "little")
            if len(data) < at + 5:
                break
        at = end
    raise Refused("is cut off: it ends before its last instruction")


def _refuse(data: bytes, at: int) -> NoReturn:
    opcode = _INSTRUCTIONS.get(data[at])
    if opcode is None:
        raise Refused(f"is damaged: byte {at} ({data[at]:#04x}) is not a pickle instruction")
    length = opcode.arg.n if opcode.arg else 0
    # The others have their length in front of them: the pattern would have taken a whole one.
    if opcode.name in {"SHORT_BINUNICODE", "LONG1"} or at + 1 + max(length, 0) > len(data):
        raise Refused("is cut off: it ends in the middle of a value")
    if opcode.name == "LONG_BINPUT":
        raise Refused("is damaged: it counts more values than it has bytes")
    why = _WHY.get(opcode.name, f"has the instruction {opcode.name}").format(name=_name(data, at))
    raise Refused(
        f"{why} (byte {at}). It may hold only lists, dicts, texts and numbers; nothing of this "
        "file was run"
    )


def _name(data: bytes, at: int) -> str:
    """Name that an instruction imports: two lines after it, or the two texts before it."""
    if _INSTRUCTIONS[data[at]].name in {"GLOBAL", "INST"}:
        texts = data[at + 1 : at + 401].split(b"\n")[:2]
    else:
        texts = _TEXT.findall(data, max(0, at - 500), at)[-2:]
    return ".".join(text.decode("utf-8", "replace") for text in texts) or "something"
