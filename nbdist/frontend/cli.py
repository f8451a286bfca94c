"""The command line: `nbdist VERB`, read from the same table as the magics.

Exit code 0 if all went well, 1 for an error (or a finding of `doctor` that is bad), 2 for wrong
use, 130 after Ctrl-C.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Sequence

from nbdist.commands import VERBS, WORDS
from nbdist.errors import DistributedError, NbdistError, OptionError, did_you_mean
from nbdist.notebook.verb import NOTEBOOK, Verb, help_view, parse

FAILED = 1
WRONG_USE = 2
INTERRUPTED = 130  # as shells count: 128 + SIGINT
_HELP = {"-h", "--help"}
_COLOURS = re.compile(r"\x1b\[[0-9;]*m")


def main(argv: Sequence[str] | None = None) -> int:
    """Do what was typed after `nbdist`, by default for this process; the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()
    except BrokenPipeError:  # `nbdist doctor | head`: nobody reads on
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    return code


def _run(words: list[str]) -> int:
    if not words:
        _say(overview())
        return WRONG_USE
    word, *rest = words
    if word in {*_HELP, "help"}:
        print(overview())
        return 0
    verb = find_verb("version" if word == "--version" else word)
    if verb is None:
        hint = did_you_mean(word.lstrip("%").removeprefix("dist_"), WORDS, 3)
        _say(f"nbdist: there is no verb {word!r}.{hint} nbdist --help lists all.")
        return WRONG_USE
    if verb.place == NOTEBOOK and _HELP.isdisjoint(rest):
        _say(
            f"{verb.typed} works only in a notebook: it acts on the ranks that the notebook "
            f"started. There: %load_ext nbdist, %dist_init -n 2, then for example {verb.example}"
        )
        return WRONG_USE
    return _run_verb(verb, rest)


def _run_verb(verb: Verb, words: list[str]) -> int:
    try:
        parsed = parse(verb, shlex.join(words))
        for answer in parsed.answers:
            _say(answer)
        view = help_view(verb) if parsed.wants_help else verb.run(parsed.values)
    except OptionError as error:
        _say(str(error))
        return WRONG_USE
    except NbdistError as error:
        text = str(error)
        if isinstance(error, DistributedError) and error.traceback_text:
            text = f"{error.traceback_text}\n\n{text}"
        _say(text if sys.stderr.isatty() else _COLOURS.sub("", text))
        return FAILED
    except KeyboardInterrupt as error:
        _say(f"interrupted: {error}" if str(error) else "interrupted")
        return INTERRUPTED
    if view is None:
        return 0
    print(view.text)
    return FAILED if view.is_bad else 0


def find_verb(word: str) -> Verb | None:
    """The verb that is meant, by its word or as its magic is typed; None if there is none."""
    name = word.lstrip("%")
    if name in WORDS:
        return WORDS[name]
    verb = VERBS.get(name)
    return verb if verb is None or verb.place == NOTEBOOK else verb.in_terminal()


def overview() -> str:
    """All verbs with a line each: those of the command line, and those of a notebook."""
    in_terminal = [(word, WORDS[word]) for word in sorted(WORDS) if WORDS[word].place != NOTEBOOK]
    in_notebook = [(verb.typed, verb) for verb in VERBS.values() if verb.place == NOTEBOOK]
    width = max(len(name) for name, _ in (*in_terminal, *in_notebook))

    def lines(verbs: Sequence[tuple[str, Verb]]) -> list[str]:
        return [f"  {name:{width}}  {verb.help}" for name, verb in verbs]

    return "\n".join(
        [
            "usage: nbdist VERB [options]; nbdist VERB --help shows them with an example",
            "",
            *lines(in_terminal),
            "",
            "only in a notebook, after %load_ext nbdist:",
            *lines(in_notebook),
        ]
    )


def _say(text: str) -> None:
    sys.stderr.write(f"{text}\n")
