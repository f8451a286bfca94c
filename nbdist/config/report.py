"""Report of a check of a configuration: findings with the changes that would mend them."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from nbdist.config.keys import KINDS, LABEL, WORDY, Keys
from nbdist.config.tree import (
    REMOVE,
    RENAME,
    SET,
    YAML,
    ConfigEntry,
    Document,
    Fix,
    join_path,
    plain,
    write_value,
)
from nbdist.core.finding import BAD, OK, WARN, Finding

# Who says how many ranks there are, where the user types it.
TYPED = "--ranks"
# Kinds of configurations that are known, with how each is recognised.
ACCELERATE = "Accelerate"
DEEPSPEED = "DeepSpeed"
INSTRUCTLAB = "InstructLab"
TRANSFORMERS = "transformers"
KNOWN = {
    ACCELERATE: "a YAML or JSON of `accelerate config`, with distributed_type in it",
    DEEPSPEED: "a JSON with zero_optimization, train_batch_size or other keys of DeepSpeed",
    TRANSFORMERS: "a JSON or YAML of DistributedConfig, with tp_size or fsdp_size in it",
    INSTRUCTLAB: "a YAML with train: in it, of which the batch and the precision are checked",
}
_SHOWN = 60


@dataclass(frozen=True, slots=True)
class CheckContext:
    """Facts known beside the file, as the count of ranks and other files.

    Attributes:
        ranks: How many there will be; None where nobody says.
        source: Who says so: "--ranks", "as run here", or a key of the file.
        tp, pp, cp: Ranks along axes that see the same data; None where not typed.
        dp: Data-parallel ranks as typed; None where not.
        others: Configurations that count together with this one.
    """

    ranks: int | None = None
    source: str = ""
    tp: int | None = None
    pp: int | None = None
    cp: int | None = None
    dp: int | None = None
    others: tuple[Document, ...] = ()

    @property
    def is_typed(self) -> bool:
        """Whether the user has typed the ranks, so that no other number of them is wanted."""
        return self.source == TYPED


@dataclass(frozen=True, slots=True)
class ConfigFinding(Finding):
    """A finding with the changes that mend it, in order; none where nobody can know."""

    fixes: tuple[Fix, ...] = ()


@dataclass(frozen=True, slots=True)
class Checked:
    """A configuration that was checked.

    Attributes:
        kind: A key of KNOWN; "" for another.
        findings: In the order of the lines, those about the whole first; the good as well.
    """

    document: Document
    kind: str
    findings: tuple[ConfigFinding, ...]

    def __bool__(self) -> bool:
        """Whether it can run as it is: nothing found is bad."""
        return not self.is_bad

    @property
    def is_bad(self) -> bool:
        """Whether it cannot run, or would not do what it says."""
        return any(finding.verdict == BAD for finding in self.findings)


@dataclass(slots=True)
class Report:
    """Collects the findings about one document."""

    document: Document
    said: list[ConfigFinding] = field(default_factory=list)

    def good(self, name: str, value: str, line: int = 0) -> None:
        """Note something that is well."""
        self.said.append(ConfigFinding(name, value, line=line))

    def say(
        self, verdict: str, path: tuple[str, ...], why: str, what: str, *fixes: Fix, value: str = ""
    ) -> None:
        """Note something about a key: its value is shown (or what is found), and its line."""
        entry = self.document.entry(*path)
        if not value:
            value = "not there" if entry is None else show_value(plain(entry.node))
        line = self.document.line(*path)
        name = join_path(path)
        self.said.append(ConfigFinding(name, value, verdict, why, what, line=line, fixes=fixes))

    def bad(self, path: tuple[str, ...], why: str, what: str, *fixes: Fix, value: str = "") -> None:
        """Note what cannot run, or would not do what it says."""
        self.say(BAD, path, why, what, *fixes, value=value)

    def warn(self, path: tuple[str, ...], why: str, what: str, *fixes: Fix) -> None:
        """Note what works and is not wise."""
        self.say(WARN, path, why, what, *fixes)

    def flaws(self) -> None:
        """Note what is not in the file's format."""
        for flaw in self.document.flaws:
            fields = flaw.name, show_value(flaw.found), BAD, flaw.why, flaw.what
            self.said.append(ConfigFinding(*fields, line=flaw.line))

    def done(self, kind: str) -> Checked:
        """All of it, in the order of the lines."""
        ordered = sorted(self.said, key=lambda finding: finding.line or 0)
        return Checked(self.document, kind, tuple(ordered))


def show_value(value: Any) -> str:
    """A value as it is told, on one line."""
    if isinstance(value, dict):
        return "{...}" if value else "{}"
    text = str(value).lower() if isinstance(value, bool) else str(value)
    text = "null" if value is None else " ".join(text.split())
    return text if len(text) <= _SHOWN else f"{text[: _SHOWN - 3]}..."


def is_count(value: Any) -> bool:
    """Whether a value is a whole number above 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def is_true(value: Any) -> bool:
    """Whether a value means yes, as Accelerate takes it."""
    return str(value).lower() in ("true", "1", "yes", "on", "y", "t")


def check_keys(notes: Report, path: tuple[str, ...], keys: Keys, verdict: str, why: str) -> None:
    """Compare a mapping's keys and values with a table; verdict and why are of unknown keys."""
    entries = notes.document.entries(*path)
    present = {entry.key for entry in entries}
    for entry in entries:
        here = (*path, entry.key)
        if entry.key in keys:
            check_type(notes, here, entry, keys[entry.key])
            continue
        near = difflib.get_close_matches(entry.key, set(keys) - present, 1, cutoff=0.8)
        if near:
            fix = Fix(RENAME, here, near[0])
            notes.say(verdict, here, why, f"change the key to {near[0]}", fix)
        else:
            notes.say(verdict, here, why, "take it out", Fix(REMOVE, here))


def check_type(notes: Report, path: tuple[str, ...], entry: ConfigEntry, kind: str) -> None:
    """Note a value that is not of its key's type, with the one that was meant where it is clear."""
    value = plain(entry.node)
    if value is None or _fits(value, kind):
        return
    if value == "auto" and (notes.document.syntax != YAML or path[0] == "deepspeed_config"):
        return  # told by the checks of that kind, as who fills it in depends on it
    if kind.startswith("="):
        _check_choice(notes, path, entry, kind)
        return
    why = f"it must be {KINDS[kind]}, and {_as_typed(notes.document, entry)} is {_type(value)}"
    meant = _meant(value, kind)
    if meant is None:
        notes.bad(path, why, f"write {KINDS[kind]}")
    else:
        what = f"write {write_value(meant, notes.document.syntax)}"
        notes.bad(path, why, what, Fix(SET, path, meant))


def _check_choice(notes: Report, path: tuple[str, ...], entry: ConfigEntry, kind: str) -> None:
    value, choices = plain(entry.node), kind[1:].split("|")
    if str(value) in choices and not isinstance(value, bool):
        return
    typed = _as_typed(notes.document, entry)
    word = next((choice for choice in choices if choice.lower() == typed.lower()), None)
    if isinstance(value, bool) and word is not None:
        why = f"YAML reads {typed} without quotation marks as {show_value(value)}"
        # Accelerate starts one process for a distributed_type that it compares with nothing.
        verdict = WARN if path == ("distributed_type",) else BAD
        notes.say(verdict, path, why, f"write '{word}'", Fix(SET, path, word))
        return
    why = f"{typed} is not one of {', '.join(choices)}"
    near = word or next(iter(difflib.get_close_matches(str(value), choices, 1)), None)
    if near is None or str(value).isdigit():
        notes.bad(path, why, "choose one of them")
    else:
        notes.bad(path, why, f"write {near}", Fix(SET, path, near))


def _as_typed(document: Document, entry: ConfigEntry) -> str:
    text = document.text[entry.node.start : entry.node.end]
    return show_value(text.strip("'\"") if not entry.node.is_quoted else text)


def _fits(value: Any, kind: str) -> bool:
    if kind.startswith("="):
        choices = kind[1:].split("|")
        return str(value) in choices and not isinstance(value, bool | float | dict | list)
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    is_whole = is_number and math.isfinite(value) and value == int(value)
    fits = {
        "bool": isinstance(value, bool),
        WORDY: str(value).lower() in ("true", "false", "yes", "no", "1", "0"),
        "count": is_whole and value > 0,
        "int": is_whole and value >= 0,
        "number": is_number,
        "text": isinstance(value, str | int),
        LABEL: isinstance(value, str),
        "map": isinstance(value, dict),
        "list": isinstance(value, list),
        "any": True,
    }
    return fits[kind]


def _meant(value: Any, kind: str) -> Any:
    """The value that a string or another type stands for; None where it is not clear."""
    if kind == LABEL and not isinstance(value, bool | dict | list):
        return str(value)
    if kind in ("bool", WORDY) and str(value).lower() in ("true", "false", "1", "0"):
        return str(value).lower() in ("true", "1")
    if kind in ("count", "int", "number") and isinstance(value, str):
        try:
            number = float(value.replace("_", ""))
        except ValueError:
            return None
        is_whole = number.is_integer() and (kind != "number" or number == 0)
        meant = int(number) if is_whole else number
        return meant if math.isfinite(number) and _fits(meant, kind) else None
    return None


def _type(value: Any) -> str:
    names: dict[type, str] = {str: "a string", bool: "true or false", dict: "a mapping",
                              list: "a list", int: "a number", float: "a number"}  # fmt: skip
    return names.get(type(value), f"a {type(value).__name__}")


def findings_of(checked: Checked, name: str) -> Iterator[ConfigFinding]:
    """Findings of another file that are bad or unwise, with its name; without the changes."""
    for finding in checked.findings:
        if finding.verdict != OK:
            where = f"{name}, line {finding.line}" if finding.line else name
            yield replace(finding, name=f"{where}: {finding.name}", line=0, fixes=())
