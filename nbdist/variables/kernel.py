"""Variables between notebook and ranks: large ones through /dev/shm, all of it or nothing."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from IPython import get_ipython

from nbdist.cluster import shm
from nbdist.cluster.kernel.ranks import Ranks
from nbdist.core.failures import ranks_phrase
from nbdist.core.host import usable_cores
from nbdist.errors import Interrupted, NbdistError, TransferError
from nbdist.rpc.kernel import sigint
from nbdist.rpc.kernel.functions import Caller, RankFunction
from nbdist.variables import pack, unpack
from nbdist.variables.names import check_names, check_on_ranks
from nbdist.variables.pack import Packed, PackedValue
from nbdist.variables.unpack import UnpackedMemory

ASK_S = 30.0
# Tens of gigabytes over a disk, where /dev/shm is small.
TRANSFER_S = 600.0
# A rank that was interrupted may put a file into a folder that is being removed.
REMOVE_TRIES = 5
# What the kernel never loads for somebody else; a user's own import of them is fine.
HEAVY = ("torch", "accelerate")

missing_names: RankFunction[[Sequence[str]], dict[str, tuple[str, ...]]] = RankFunction(
    "nbdist.variables.rank:missing_names"
)
send_values: RankFunction[[Sequence[str], Sequence[str], bool, bool], PackedValue] = RankFunction(
    "nbdist.variables.rank:send"
)
receive: RankFunction[[str, PackedValue], None] = RankFunction("nbdist.variables.rank:receive")
bind: RankFunction[[str, Sequence[str]], None] = RankFunction("nbdist.variables.rank:bind")
drop: RankFunction[[str], None] = RankFunction("nbdist.variables.rank:drop")


@dataclass(frozen=True, slots=True)
class VariableTransfer:
    """Variables that were pushed or pulled.

    Attributes:
        values: By name. Pulled from several ranks: a list in rank order.
        ranks: Where they went, or came from.
        remarks: What there is to say about it, a sentence each.
    """

    values: Mapping[str, Any] = field(repr=False)
    ranks: tuple[int, ...]
    remarks: tuple[str, ...] = ()


class Variables:
    """The way of variables between the notebook and a session's ranks."""

    def __init__(self, ranks: Ranks):
        self._ranks = ranks
        self._explained: set[str] = set()  # types that numpy does not have: explained once each

    def push(
        self, variables: Mapping[str, object], ranks: str | Sequence[int] | None = None
    ) -> VariableTransfer:
        """Give ranks copies of values, each its own, under these names; all of them or none.

        Functions and classes of cells go as their code. What they use goes along, to the ranks that
        have no variable of that name.

        Args:
            variables: By name.
            ranks: As in Session.run.

        Raises:
            OptionError: If a name or a rank cannot be one.
            TransferError: If a value cannot be sent, or cannot be unpacked on a rank.
            RankGone, RankBusy, NotRunning: As for a cell.
            Interrupted: If the user interrupted it.
        """
        check_names(tuple(variables), "%dist_push")
        chosen = self._ranks.chosen(ranks)
        self._ranks.make_whole()
        self._ranks.check_ready(chosen)  # before a large value is copied
        with _all_or_nothing("pushed"):
            packed, remarks = self._packed(variables, chosen)
            token = uuid.uuid4().hex
            with self.folders(chosen) as folders:
                parcel = pack.send(packed, folders, remarks)
                try:
                    self._call(receive, token, parcel, ranks=chosen)
                except (NbdistError, KeyboardInterrupt):
                    for rank in chosen:
                        drop(self._ranks.call, rank, token)
                    raise
        self._call(bind, token, tuple(variables), ranks=chosen)
        return VariableTransfer(variables, chosen, parcel.remarks)

    def _packed(
        self, variables: Mapping[str, object], ranks: tuple[int, ...]
    ) -> tuple[Packed, list[str]]:
        """Values taken apart together with what they use, and what there is to say of that."""
        from nbdist.variables import definitions  # cloudpickle: not for every notebook

        torch = sys.modules.get("torch")
        packed = definitions.pack_definitions(variables, torch, _name_of_cell)
        uses, refused = definitions.used_by(packed, variables, torch)
        if not uses and not refused:
            return packed, []
        names = sorted({*uses, *refused})
        missing = self._ranks.call_all(missing_names, names, deadline_s=ASK_S, ranks=ranks)
        lacking = {name: [absent for absent in missing if name in absent] for name in names}
        along = {name: uses[name] for name in names if name in uses and lacking[name]}
        packed = definitions.pack_definitions({**variables, **along}, torch, _name_of_cell)
        present = [name for name in uses if len(lacking[name]) < len(ranks)]
        present = sorted(name for name in present if not definitions.is_imported(uses[name]))
        remarks = [f"sent along, as it is used there: {', '.join(along)}"] if along else []
        if present:
            verb = f"%dist_push {' '.join(present)}"
            remarks.append(f"used as the ranks have it: {', '.join(present)} ({verb} replaces it)")
        remarks += [f"used, but {why}" for name, why in refused.items() if lacking[name]]
        return packed, remarks

    def pull(
        self,
        names: Sequence[str],
        ranks: str | Sequence[int] | None = None,
        *,
        is_whole: bool = False,
    ) -> VariableTransfer:
        """The values of variables: of one rank as they are, of several as a list in rank order.

        Args:
            names: Of variables that all these ranks have.
            ranks: As in Session.run.
            is_whole: Gather DTensors, which takes all ranks, also those that are not pulled from.

        Raises:
            OptionError: If a rank does not have a name; it says which ranks have it.
            TransferError: If a value cannot be sent, or cannot be unpacked in the notebook.
            RankGone, RankBusy, NotRunning: As for a cell.
            Interrupted: If the user interrupted it.
        """
        check_names(names, "%dist_pull")
        chosen = self._ranks.chosen(ranks)
        asked = self._ranks.ranks if is_whole else chosen
        if is_whole:
            self._ranks.recover_if_needed()
        with _all_or_nothing("pulled"):
            missing = self._ranks.call_all(missing_names, names, deadline_s=ASK_S, ranks=asked)
            check_on_ranks(dict(zip(asked, missing, strict=True)))
            with self.folders(chosen) as folders:

                def send(call: Caller, rank: int) -> Future[PackedValue]:
                    return send_values(call, rank, names, folders, rank in chosen, is_whole)

                replies = self._call(send, ranks=asked, is_collective=is_whole)
                by_rank = dict(zip(asked, replies, strict=True))
                received = {rank: by_rank[rank] for rank in chosen}
                values = _unpack_all(received)
        by_name = {name: [rank_values[name] for rank_values in values] for name in names}
        if len(chosen) == 1:
            by_name = {name: rank_values[0] for name, rank_values in by_name.items()}
        return VariableTransfer(by_name, chosen, self._remarks(list(received.values())))

    def _call(
        self,
        function: Callable[..., Future[Any]],
        *args: Any,
        ranks: Sequence[int],
        is_collective: bool = False,
    ) -> list[Any]:
        try:
            return self._ranks.call_all(
                function, *args, deadline_s=TRANSFER_S, is_collective=is_collective, ranks=ranks
            )
        except NbdistError as error:
            kind = getattr(error.__cause__, "ename", "")
            if kind == TransferError.__name__:
                raise TransferError(str(error)) from error
            raise

    @contextlib.contextmanager
    def folders(self, ranks: Sequence[int]) -> Iterator[tuple[str, ...]]:
        """Folders for large values on their way, the best first; removed in any case.

        None where a rank runs on another host, which sees no file of this one.
        """
        places = {place.rank: place.host for place in self._ranks.topology.ranks}
        folders: list[str] = []
        try:
            if {places[rank] for rank in ranks} == {socket.gethostname()}:
                run_dir = self._ranks.cluster.run_dir
                prefix = shm.folder_prefix(os.getuid(), run_dir.name)
                for place in (shm.SHM, run_dir):
                    with contextlib.suppress(OSError):  # macOS has no /dev/shm: then the next
                        folders.append(tempfile.mkdtemp(prefix=prefix, dir=place))
            yield tuple(folders)
        finally:
            with sigint.deferred_sigint():  # a second press would leave them
                for folder in folders * REMOVE_TRIES:
                    shutil.rmtree(folder, ignore_errors=True)

    def _remarks(self, parcels: Sequence[PackedValue]) -> tuple[str, ...]:
        """The ranks' remarks, each once, and converted types, once in a session."""
        remarks = dict.fromkeys(remark for parcel in parcels for remark in parcel.remarks)
        if "torch" not in sys.modules:
            dtypes = {name for parcel in parcels for name in unpack.non_numpy_types(parcel)}
            for name in sorted((dtypes & unpack.AS_FLOAT32) - self._explained):
                self._explained.add(name)
                remarks[
                    f"numpy has no {name}: the values were converted to float32, exactly. After "
                    "`import torch` in the notebook, tensors arrive as tensors"
                ] = None
        return tuple(remarks)


def _name_of_cell(file: str) -> str:
    """`cell [3] of the notebook`; another file's own name."""
    shell = get_ipython()
    label = shell.compile.format_code_name(file) if shell is not None else None
    return f"cell {label[1].removeprefix('In')} of the notebook" if label else file


def _unpack_all(parcels: Mapping[int, PackedValue]) -> list[dict[str, Any]]:
    """The ranks' values. Their memory is read side by side, which fresh pages make slow."""
    absent = [name for name in HEAVY if name not in sys.modules]
    refused = {name: f"`import {name}` in the notebook first" for name in absent}
    is_over = threading.Event()

    def check() -> None:
        if is_over.is_set():
            raise TransferError("it was interrupted")

    def read(parcel: PackedValue) -> UnpackedMemory:
        memory = unpack.read(parcel, sys.modules.get("torch"), check)
        if parcel.path:
            Path(parcel.path).unlink(missing_ok=True)  # its memory, too, is free now
        return memory

    values = []
    with ThreadPoolExecutor(min(len(parcels), usable_cores())) as pool:
        reading = {rank: pool.submit(read, parcel) for rank, parcel in parcels.items()}
        try:
            for rank, future in reading.items():
                try:
                    # Values are made here: that runs the sender's classes.
                    values.append(unpack.make_values(future.result(), pack.OURS | refused))
                except TransferError as error:
                    where = f"in the notebook, from {ranks_phrase([rank])}"
                    raise TransferError(f"{where}: {error}") from error
        finally:
            is_over.set()
    return values


@contextlib.contextmanager
def _all_or_nothing(done: str) -> Iterator[None]:
    """Add to every error raised inside that nothing was pushed or pulled."""
    try:
        yield
    except KeyboardInterrupt as error:
        message = str(error)
        raise Interrupted(
            f"{message}; nothing was {done}" if message else f"nothing was {done}"
        ) from error
    except TransferError as error:
        raise TransferError(f"{str(error).rstrip('.')}. Nothing was {done}.") from error
