"""The magics: parse what was typed, run the verb, show what it returns."""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Sequence
from typing import Any

from IPython import get_ipython
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.core.magic import no_var_expand

from nbdist import commands
from nbdist.cells.hints import name_of_the_ranks
from nbdist.cells.kernel.completion import types_on_ranks
from nbdist.core.view import View
from nbdist.errors import OptionError
from nbdist.frontend import cell_magics, completer, input_transformer
from nbdist.frontend.cell_magics import TypedMagic
from nbdist.notebook.notebook import NOTEBOOK, SHOWN, CellOptions
from nbdist.notebook.verb import Parsed, Verb, help_view, parse
from nbdist.rpc.kernel import sigint


def run_magic(verb: Verb, line: str, cell: str | None = None) -> None:
    """Run a magic and show the view that it returns.

    A distributed cell blocks here: the way inside other magics and nested cells. What takes Python
    has it behind two dashes, or as a cell magic in the lines below.
    """
    code = ""
    if cell is None:
        verb = verb.as_line or verb
    else:
        typed = cell_magics.read([f"%%{verb.name} {line}\n", *cell.splitlines(keepends=True)])
        assert typed is not None
        if typed.taker is None:
            run_blocking(typed.magics, typed.code)
            return
        (name, line), code = typed.taker, typed.code
        verb = commands.VERBS[name]
    parsed = parse(verb, line)
    if _is_answered(verb, parsed):
        return
    if cell is not None:
        if parsed.values.rest.strip():
            raise OptionError(
                f"%%{verb.name}: there is code after -- and in the lines below. Remove one of them."
            )
        parsed.values.rest = code
    SHOWN.begin()
    view = verb.run(parsed.values)
    if view is not None:
        commands.show(view)


async def run_typed(magics: Sequence[TypedMagic], code: str) -> None:
    """Run a distributed cell without blocking the kernel (`input_transformer.route` writes it)."""
    options = _cell_options(magics, code)
    if options is not None:
        await NOTEBOOK.run_async(code, options)


def run_blocking(magics: Sequence[TypedMagic], code: str) -> None:
    """The same where cells cannot await (`%autoawait off`)."""
    options = _cell_options(magics, code)
    if options is not None:
        NOTEBOOK.run(code, options)


def _cell_options(magics: Sequence[TypedMagic], code: str) -> CellOptions | None:
    """Options typed behind a cell's magics; None where there is nothing to run."""
    given = list[CellOptions]()
    for name, line in magics:
        verb = commands.VERBS[name]
        parsed = parse(verb, line)
        if _is_answered(verb, parsed):
            return None
        given.append(verb.run(parsed.values))
    options = cell_magics.combined(given)
    if code:
        return options
    NOTEBOOK.session.chosen(options.ranks)  # so that `%%rank[0] print(1)` is not passed over
    return None


def run_local(shell: InteractiveShell, _line: str, cell: str) -> None:
    """Run a cell in the kernel, inside another magic; at top level `route` does it."""
    cell_magics.read([f"%%{cell_magics.LOCAL_CELL}\n", *cell.splitlines(keepends=True)])
    shell.run_cell(cell).raise_error()


def answer(name: str, _line: str) -> None:
    """Say what replaces a magic of nbdistributed."""
    commands.show(View(f"%{name}: {commands.REPLACED_MAGICS[name]}"))


def _tell_where(result: ExecutionResult) -> None:
    """Below the NameError of a plain cell: whether ranks have a variable of that name."""
    error, shell = result.error_in_exec, get_ipython()
    if type(error) is not NameError or not error.name or not NOTEBOOK.is_running or not shell:
        return
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    if frame.f_globals is shell.user_ns:  # else it is a library's own mistake
        types = types_on_ranks(NOTEBOOK.session, error.name)
        if types:
            sys.stderr.write(f"{name_of_the_ranks(error.name, types)}\n")


def _is_answered(verb: Verb, parsed: Parsed) -> bool:
    for text in parsed.answers:
        commands.show(View(text))
    if parsed.wants_help:
        commands.show(help_view(verb))
    return parsed.wants_help


def register(shell: InteractiveShell) -> None:
    """Register every magic and the routing of cells. Twice is harmless."""
    # Typed for methods in IPython: a plain function is taken for one that lacks its self.
    add: Any = shell.register_magic_function
    for verb in commands.VERBS.values():
        kind = "cell" if verb.is_cell else "line"
        if verb.takes_code or verb.as_line is not None:
            kind = "line_cell"
        function: Any = functools.partial(run_magic, verb)
        function.__doc__ = help_view(verb).text
        if verb.takes_code:  # its braces are Python's, and IPython would fill them in
            function = no_var_expand(function)
        add(function, kind, verb.name)
    for name in commands.REPLACED_MAGICS:
        add(functools.partial(answer, name), "line", name)
    add(functools.partial(run_local, shell), "cell", cell_magics.LOCAL_CELL)
    unregister(shell)
    shell.input_transformers_cleanup.insert(0, input_transformer.route)
    shell.events.register("post_run_cell", _tell_where)
    completer.install(shell)
    sigint.ignore_before_replies(getattr(shell, "kernel", None))


def unregister(shell: InteractiveShell) -> None:
    """Take the routing and the completion away again; the ranks go on."""
    transformers = shell.input_transformers_cleanup
    # By name: after %reload_ext the function is another object.
    ours = input_transformer.__name__
    transformers[:] = [t for t in transformers if getattr(t, "__module__", "") != ours]
    callbacks = shell.events.callbacks["post_run_cell"]
    callbacks[:] = [c for c in callbacks if getattr(c, "__module__", "") != __name__]
    completer.uninstall(shell)
