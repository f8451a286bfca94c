"""Checks a configuration that a user has written, whatever its kind, and corrects it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from nbdist.config import accelerate, deepspeed, distributed_config, instructlab
from nbdist.config.report import (
    ACCELERATE,
    DEEPSPEED,
    INSTRUCTLAB,
    KNOWN,
    TRANSFORMERS,
    CheckContext,
    Checked,
    Report,
    findings_of,
    is_count,
    show_value,
)
from nbdist.config.tree import REMOVE, RENAME, Document, Fix, apply_fix, join_path, remove_flaw
from nbdist.errors import OptionError

_KINDS: dict[str, tuple[Callable[[Document], bool], Callable[[Report, CheckContext], None]]] = {
    ACCELERATE: (accelerate.matches, accelerate.check),
    INSTRUCTLAB: (instructlab.matches, instructlab.check),
    DEEPSPEED: (deepspeed.matches, deepspeed.check),
    TRANSFORMERS: (distributed_config.matches, distributed_config.check),
}
# Where a file itself says how many ranks it is for.
_RANKS = {ACCELERATE: ("num_processes",), INSTRUCTLAB: ("train", "num_gpus")}
# More changes than any file needs; a change that does not mend would be made for ever.
_MOST_CHANGES = 100


def kind_of(document: Document) -> str:
    """A key of KNOWN; "" where the file is of another kind."""
    return next((kind for kind, (is_one, _) in _KINDS.items() if is_one(document)), "")


def check(document: Document, around: CheckContext) -> Checked:
    """Check a configuration, and those that count together with it.

    Where nobody says how many ranks there are, the file does.
    """
    checked = _check_alone(document, around)
    alone = replace(_with_ranks(document, checked.kind, around), others=())
    more_findings = [
        finding
        for other in around.others
        for finding in findings_of(_check_alone(other, alone), other.name)
        if kind_of(other)
    ]
    return replace(checked, findings=(*checked.findings, *more_findings))


def _check_alone(document: Document, around: CheckContext) -> Checked:
    notes = Report(document)
    notes.flaws()
    kind = kind_of(document)
    if not kind:
        keys = ", ".join(show_value(entry.key) for entry in document.entries()[:6]) or "none"
        formats = "; ".join(f"{name}: {what}" for name, what in KNOWN.items())
        what = f"only the syntax was checked. Known formats: {formats}"
        notes.bad(("kind",), f"its keys ({keys}) match no known format", what, value="unknown")
        return notes.done("")
    notes.good("kind", f"{kind}, in {document.syntax}")
    _KINDS[kind][1](notes, _with_ranks(document, kind, around))
    checked = notes.done(kind)
    if not around.is_typed:
        return checked
    # Without changes that would make other ranks than those that were typed.
    path = _RANKS.get(kind)
    findings = [
        finding
        if all(fix.path != path or fix.value == around.ranks for fix in finding.fixes)
        else replace(finding, fixes=())
        for finding in checked.findings
    ]
    return replace(checked, findings=tuple(findings))


def _with_ranks(document: Document, kind: str, around: CheckContext) -> CheckContext:
    path = _RANKS.get(kind)
    said = None if path is None else document.value(*path)
    if around.ranks is None and is_count(said):
        assert path is not None
        return replace(around, ranks=said, source=f"as {join_path(path)} says")
    return around


def corrected(
    checked: Checked, around: CheckContext, read: Callable[[str], Document]
) -> tuple[Checked, tuple[str, ...]]:
    """The same configuration with the changes that its findings name, and checked again.

    One change at a time, as each may move the next one's place. What nobody can know is left.
    Returns what is still found in the corrected text, and a line for each change.
    """
    changes: list[str] = []
    done: list[Fix] = []  # two rules that want different values would go on for ever
    while len(changes) < _MOST_CHANGES:
        document = checked.document
        flaw = next((candidate for candidate in document.flaws if candidate.end), None)
        if flaw is not None:
            document = read(remove_flaw(document, flaw))
            changes.append(f"line {flaw.line}: {flaw.name} {show_value(flaw.found)} taken out")
        else:
            wanted = [finding.fixes for finding in checked.findings if finding.fixes]
            fixes = next((those for those in wanted if not all(f in done for f in those)), None)
            if fixes is None:
                break
            for fix in fixes:
                document, line = _changed(document, fix, read)
                changes.append(line)
            done += fixes
        checked = check(document, around)
    return checked, tuple(changes)


def _changed(document: Document, fix: Fix, read: Callable[[str], Document]) -> tuple[Document, str]:
    """The document with a change, and a line about it; as it was where it would not be read."""
    before = document.entry(*fix.path)
    now = {RENAME: f"is now called {fix.value}", REMOVE: "taken out"}
    change = now.get(fix.action, f"is now {show_value(fix.value)}")
    if before is not None and fix.action not in now:
        change += f", was {show_value(document.text[before.node.start : before.node.end])}"
    line = f"line {document.line(*fix.path)}: {join_path(fix.path)} {change}"
    try:
        return read(apply_fix(document, fix)), line
    except OptionError:  # an anchor stood there, to which other lines refer
        return document, f"{line}: not changed, since other lines refer to it; change it by hand"
