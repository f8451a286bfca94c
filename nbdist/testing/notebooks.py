"""Notebooks as nbval runs them, with nbdist's settings, their ranks' end, and its differences."""

from __future__ import annotations

from argparse import Namespace
from collections import defaultdict
from collections.abc import Generator, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from nbval.plugin import IPyNbCell, IPyNbFile

from nbdist.cluster.kernel import orphans
from nbdist.cluster.kernel.start import GPUS, RANKS
from nbdist.cluster.run_owner import Process
from nbdist.core import host
from nbdist.testing.difference import difference

SANITIZE = Path(__file__).resolve().parents[1] / "nbval_sanitize.cfg"
STARTUP_TIMEOUT_S = 120
CELL_TIMEOUT_S = 300
# The guardian of a kernel that has ended needs less to end the ranks.
GUARDIAN_DEADLINE_S = 10.0


def nbval_options(typed: Namespace) -> list[str]:
    """Options for nbval before the typed ones."""
    options = [
        f"--nbval-kernel-startup-timeout={STARTUP_TIMEOUT_S}",
        f"--nbval-cell-timeout={CELL_TIMEOUT_S}",
    ]
    # The kernel is this environment's Python, whatever a notebook's own metadata names.
    options += [] if typed.nbval_kernel_name else ["--nbval-current-env"]
    return [*options, *([] if typed.nbval_lax else ["--nbval"])]


@pytest.hookimpl(wrapper=True)
def pytest_collect_file(
    file_path: Path, parent: pytest.Collector
) -> Generator[None, list[pytest.Collector], list[pytest.Collector]]:
    """Put this module's notebook in the place of nbval's."""
    collectors = yield
    return [
        NotebookFile.from_parent(parent, path=file_path)
        if type(collector) is IPyNbFile
        else collector
        for collector in collectors
    ]


class NotebookFile(IPyNbFile):  # type: ignore[misc]
    """A notebook; its kernel has NBDIST_TEST=1, and after it no process of its ranks is left."""

    _kernel_process: Process | None = None

    def setup(self) -> None:
        """Start the kernel."""
        ranks, gpus = self.config.option.nbdist_ranks, self.config.option.nbdist_gpus
        settings = {"NBDIST_TEST": 1, RANKS: ranks, GPUS: gpus}
        with pytest.MonkeyPatch.context() as environment:
            for name, value in settings.items():
                if value is not None:
                    environment.setenv(name, str(value))
            super().setup()
        pid = getattr(self.kernel.km.provisioner, "pid", None)
        if pid is not None and (start := host.started(pid)):
            self._kernel_process = Process(pid, start)

    def teardown(self) -> None:
        """End the kernel, and what its ranks have left."""
        super().teardown()
        if self._kernel_process is not None:
            for line in orphans.clean_after(self._kernel_process, GUARDIAN_DEADLINE_S):
                self.warn(pytest.PytestWarning(f"left by {self.path.name}: {line}"))

    def get_sanitize_files(self) -> list[str]:
        """The typed one, then nbdist's."""
        return [*super().get_sanitize_files(), str(SANITIZE)]

    def collect(self) -> Iterator[StoredCell]:
        """Yield the notebook's code cells."""
        for cell in super().collect():
            yield StoredCell.from_parent(
                self, name=cell.name, cell_num=cell.cell_num, cell=cell.cell, options=cell.options
            )


class StoredCell(IPyNbCell):  # type: ignore[misc]
    """A cell; where its outputs differ, it says what each rank printed in place of what."""

    _difference: Sequence[str] = ()

    def compare_outputs(self, test: Any, ref: Any, skip_compare: Any = None) -> bool:
        """Whether the outputs are equal, as nbval compares them."""
        is_equal = bool(super().compare_outputs(test, ref, skip_compare))
        if not is_equal:
            self._difference = difference(self._texts(ref), self._texts(test))
        return is_equal

    def repr_failure(self, excinfo: Any) -> str:
        """Text that pytest shows of a cell that failed."""
        if not self._difference:
            return str(super().repr_failure(excinfo))
        source = "\n".join(f"    {line}" for line in self.cell.source.splitlines())
        head = f"Cell {self.cell_num} of {self.parent.path.name}: the outputs are not those stored"
        return "\n".join([head, "", source, "", *self._difference])

    def _texts(self, outputs: Any) -> dict[str, list[str]]:
        """The texts that nbval compares, by stream, kind of display, and part of an error."""
        texts: dict[str, list[str]] = defaultdict(list)
        for output in outputs:
            fields = {**output, **output.get("data", {})}
            if output["output_type"] == "stream":
                fields = {output["name"]: output["text"]}
            for kind, value in fields.items():
                if kind not in {*self.parent.skip_compare, "data"}:
                    texts[kind].append(str(self.sanitize(value)))
        return dict(texts)
