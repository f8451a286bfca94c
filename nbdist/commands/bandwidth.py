"""Verbs that measure the bandwidth between ranks."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Callable, Sequence
from pathlib import Path

from nbdist.bandwidth import view as bandwidth_view
from nbdist.bandwidth.kernel import BENCH_S, check_target, load, save
from nbdist.bandwidth.results import OPS, Bench, parse_ops
from nbdist.bandwidth.sizes import parse_sizes
from nbdist.commands.cluster import START_OPTIONS, temporary_ranks
from nbdist.core.option import Option, positive_number
from nbdist.core.view import View
from nbdist.errors import OptionError
from nbdist.notebook.notebook import NOTEBOOK
from nbdist.notebook.progress_line import ProgressLine
from nbdist.notebook.verb import TERMINAL, Verb


def measure(
    ops: str | Sequence[str] | None,
    sizes: str | Sequence[int] | None,
    limit_s: float,
    path: str | Path | None,
    progress: Callable[[str], None],
) -> Bench:
    """Measure between the notebook's ranks, and save it where a path is given.

    Raises:
        OptionError: Before anything is measured, if the file must not be written.
        NbdistError, Interrupted: See bandwidth.kernel.
    """
    session = NOTEBOOK.session
    if path is not None:
        check_target(path)
    bench = session.bandwidth.measure(ops, sizes, limit_s, progress)
    if path is not None:
        save(bench, path)
    return bench


def dist_bench(values: Namespace) -> View | None:
    """Measure, with a progress line that becomes the result; or show a file."""
    if values.file is not None:
        _check_alone(values)
        load_file = NOTEBOOK.session.bandwidth.load if NOTEBOOK.is_running else load
        return bandwidth_view.bench(load_file(values.file))
    progress = ProgressLine("measuring")
    result = measure(values.ops, values.sizes, values.limit_s, values.path, progress)
    progress.finish(bandwidth_view.bench(result))
    return None


def _check_alone(values: Namespace) -> None:
    if values.ops is not None or values.sizes is not None or values.path is not None:
        raise OptionError(
            "%dist_bench: --load shows what was measured before. Leave out --ops, --sizes and "
            "--save, or --load."
        )


def bench(values: Namespace) -> View:
    """Start ranks, measure between them, end them."""
    if values.file is not None:
        _check_alone(values)
        return bandwidth_view.bench(load(values.file), has_picture=False)
    # What is wrong with any number of ranks is refused before they are started.
    parse_ops(values.ops)
    if values.sizes is not None:
        parse_sizes(values.sizes, values.world_size or 1)
    if values.path is not None:
        check_target(values.path)
    if values.world_size == 1:
        raise OptionError("nbdist bench: 1 rank sends nothing. Use -n 2 or more.")
    with temporary_ranks(values):
        try:
            result = measure(values.ops, values.sizes, values.limit_s, values.path, _tell)
        finally:
            _tell("")
        return bandwidth_view.bench(result, has_picture=False)


def _tell(text: str) -> None:
    """Show the measurement under way in place of the one before; nothing where stderr is a file."""
    if sys.stderr.isatty():
        sys.stderr.write(f"\r\x1b[K{text}")
        sys.stderr.flush()


_OPTIONS = (
    Option(
        ("--ops",),
        f"one or more of {', '.join(OPS)} (default: all)",
        metavar="OP,OP",
        choices=tuple(OPS),
    ),
    Option(
        ("--sizes",),
        "such as 4M, 1K,1M or 1K:1G, in steps of 4 (default: 1K:1G, with Gloo 1K:64M)",
        metavar="SIZES",
    ),
    Option(
        ("--seconds",),
        f"time limit in seconds (default: {BENCH_S:.0f}); sizes that take longer are left out",
        positive_number,
        default=BENCH_S,
        metavar="S",
        name="limit_s",
    ),
    Option(("--save",), "write the measurement as JSON", metavar="FILE", name="path"),
    Option(
        ("--load",), "show a saved measurement instead of measuring", metavar="FILE", name="file"
    ),
)
_OF_START = ("-n", "--profile", "-g", "--backend", "--timeout")

VERBS = (
    Verb(
        "dist_bench",
        "Measure the bandwidth of collectives between the ranks, by operation and size.",
        "%dist_bench --ops all_reduce,all_gather --sizes 1K:64M",
        dist_bench,
        _OPTIONS,
    ),
    Verb(
        "bench",
        "Start ranks, measure the bandwidth of collectives between them, and end them.",
        "nbdist bench -n 2 --ops all_reduce --sizes 1K:64M",
        bench,
        (*(option for option in START_OPTIONS if option.flags[0] in _OF_START), *_OPTIONS),
        place=TERMINAL,
    ),
)
