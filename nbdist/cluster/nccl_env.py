"""Settings of torch's NCCL backend with which a hung call can be aborted and the rank lives.

By default torch ends a process whose NCCL call takes too long: right for a job of hours on many
machines, wrong in a notebook, where the variables are to be saved. The table is from the
documentation and the source of torch 2.11 to 2.13.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from nbdist.core import versions

# The torch that has two backends for NCCL, and takes the newer one by itself.
NEWER_BACKEND_SINCE = (2, 15)
_FALSE = {"", "0", "n", "no", "f", "false"}


@dataclass(frozen=True, slots=True)
class Variable:
    """One environment variable of torch's NCCL backend.

    Attributes:
        name: The name that torch reads first.
        value: The value for ranks; None if they get none because the default is right.
        reason: Its effect on a rank, as the end of "with another value ...".
        older: Names that torch also reads.
        breaks_abort: With another value a hung call cannot be aborted with the rank alive.
        is_exact: torch takes this value alone, and none that means the same.
        is_read_at_import: torch reads it when it is imported, before a group is made.
    """

    name: str
    value: str | None
    reason: str
    older: tuple[str, ...] = ()
    breaks_abort: bool = True
    is_exact: bool = False
    is_read_at_import: bool = False

    def user_setting(self, environ: Mapping[str, str]) -> tuple[str, str] | None:
        """(name, value) as the user has set it, or None."""
        names = (name for name in (self.name, *self.older) if name in environ)
        return next(((name, environ[name]) for name in names), None)


ENVIRONMENT = (
    Variable(
        "TORCH_DIST_USE_NCCL2",
        "0",
        "torch 2.15 takes its newer backend for NCCL, with which nbdist has aborted no call on a "
        "GPU yet",
        is_exact=True,
        is_read_at_import=True,
    ),
    Variable(
        "TORCH_NCCL_ASYNC_ERROR_HANDLING",
        "0",
        "torch ends the process of a rank whose call failed, timed out or was aborted",
        ("NCCL_ASYNC_ERROR_HANDLING",),
    ),
    Variable(
        "TORCH_NCCL_ENABLE_MONITORING",
        "0",
        "torch ends the process of a rank whose watchdog thread makes no progress, as in a long "
        "abort",
    ),
    Variable(
        "TORCH_NCCL_RETHROW_CUDA_ERRORS",
        "0",
        "torch throws in its watchdog thread, which ends the process, when an abort leaves a "
        "CUDA error behind",
    ),
    Variable(
        "TORCH_NCCL_PROPAGATE_ERROR",
        "0",
        "an error of one rank is passed to the others through the store, which breaks ranks "
        "that were not aborted",
    ),
    Variable(
        "TORCH_NCCL_DUMP_ON_TIMEOUT",
        "0",
        "torch waits for a dump of all ranks, and then ends the process",
    ),
    Variable(
        "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC",
        "0",
        "after an error torch waits for dumps, and the rank's next call waits for that, up to a "
        "minute",
        breaks_abort=False,
    ),
    Variable(
        "TORCH_FR_BUFFER_SIZE",
        "2000",
        "the calls of DDP and FSDP cannot be named when they hang",
        ("TORCH_NCCL_TRACE_BUFFER_SIZE",),
        breaks_abort=False,
    ),
    Variable(
        "TORCH_NCCL_BLOCKING_WAIT",
        None,
        "wait() raises by itself after the group's timeout, also while a peer still computes, "
        "and torch does not start the watchdog that sees calls end",
        ("NCCL_BLOCKING_WAIT",),
    ),
    Variable(
        "TORCH_NCCL_DESYNC_DEBUG",
        None,
        "torch takes TORCH_NCCL_ASYNC_ERROR_HANDLING=3, whatever it was given, and ends the "
        "process of a rank whose call timed out",
        ("NCCL_DESYNC_DEBUG",),
    ),
)


def environment(environ: Mapping[str, str]) -> dict[str, str]:
    """The variables that a rank is to be given; what the user has set is left alone."""
    return {
        row.name: row.value
        for row in ENVIRONMENT
        if row.value is not None and row.user_setting(environ) is None
    }


def at_import(environ: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a process needs which imports torch before it is a rank."""
    names = {row.name for row in ENVIRONMENT if row.is_read_at_import}
    return {name: value for name, value in environment(environ).items() if name in names}


def backend_note(torch_version: str, environ: Mapping[str, str]) -> str:
    """Which of torch's two backends for NCCL ranks use.

    Empty where torch has one, and where the user has chosen.
    """
    is_chosen = "TORCH_DIST_USE_NCCL2" in environ
    if is_chosen or versions.release(torch_version) < NEWER_BACKEND_SINCE:
        return ""
    return (
        f"torch {torch_version} has two backends for NCCL. Ranks use the older one "
        "(TORCH_DIST_USE_NCCL2=0): with the newer one nbdist has aborted no call on a GPU yet. "
        "TORCH_DIST_USE_NCCL2=1 in the notebook's environment chooses the newer one."
    )


def conflicts(environ: Mapping[str, str]) -> tuple[str, ...]:
    """One sentence for each variable that takes protection away, with what to do about it."""
    sentences = []
    for row in ENVIRONMENT:
        setting = row.user_setting(environ)
        if setting is None or _is_harmless(row, setting[1]):
            continue
        name, value = setting
        lost = "a hung NCCL call cannot be aborted safely: " if row.breaks_abort else ""
        sentences.append(
            f"{name}={value} was kept. With it {lost}{row.reason}. Set it to {row.value or '0'}, "
            "or remove it."
        )
    return tuple(sentences)


def _is_harmless(row: Variable, setting: str) -> bool:
    value = setting.strip()
    if row.is_exact:
        return value == row.value
    if row.value in {None, "0"}:
        return value.lower() in _FALSE
    return value.isdigit() and int(value) > 0  # a size: any but none at all
