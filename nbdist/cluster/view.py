"""Ranks as a table: where each one runs, and what it does."""

from __future__ import annotations

import html
from collections.abc import Mapping, Sequence

from nbdist.cluster.status import Status
from nbdist.core import units
from nbdist.core.failures import ranks_are
from nbdist.core.topology import RankPlace, Topology
from nbdist.core.units import shown, shown_host, shown_lines
from nbdist.core.view import View, lines_html, table


def ranks_and_hosts(topology: Topology) -> str:
    """`2 ranks on 1 host`."""
    n, hosts = topology.world_size, topology.n_hosts
    return f"{n} rank{'s' if n > 1 else ''} on {hosts} host{'s' if hosts > 1 else ''}"


def _device(place: RankPlace) -> str:
    return shown(f"{place.device} {place.device_name}".strip())


def _why(topology: Topology) -> list[str]:
    lines = [topology.why]
    if not topology.is_scaling:
        lines.append(f"{_sharing(topology)}: timings here say nothing about scaling.")
    return shown_lines(lines)


def _sharing(topology: Topology) -> str:
    """Why times are no scaling numbers: what ranks take from each other."""
    if topology.ranks[0].device != "cpu":
        return "The ranks share a GPU"
    if topology.n_hosts == 1:
        return "The ranks share one machine's CPU cores"
    if max(place.local_world_size for place in topology.ranks) == 1:
        return "The ranks compute on CPUs"
    return "The ranks of a host share its CPU cores"


def start_view(topology: Topology, elapsed_s: float, notes: Sequence[str] = ()) -> View:
    """The output of %dist_init: every rank's host, device, backend and threads, and why."""
    rows = [
        [
            str(place.rank),
            shown_host(place.host),
            _device(place),
            shown(topology.backend),
            shown(place.threads),
        ]
        for place in topology.ranks
    ]
    return table(
        ["rank", "host", "device", "backend", "threads"],
        rows,
        before=[f"{ranks_and_hosts(topology)}, ready in {units.seconds(elapsed_s)}"],
        after=[*_why(topology), *notes],
    )


def restart_view(ranks: Sequence[int], elapsed_s: float, notes: Sequence[str]) -> View:
    """The output of %dist_restart: the ranks that are back, and what is missing there."""
    head = f"{ranks_are(ranks)} back after {units.seconds(elapsed_s)}, groups rejoined"
    lines = [head, *notes]
    return View("\n".join(lines), lines_html(lines))


def attach_view(topology: Topology, states: Status, elapsed_s: float, notes: Sequence[str]) -> View:
    """The output of %dist_attach: what every rank does, and its memory."""
    head = f"{ranks_and_hosts(topology)}, attached in {units.seconds(elapsed_s)}"
    return _states(topology, states, head, [*notes, *states.waits])


def status(topology: Topology, states: Status, running_s: float, mode: str) -> View:
    """The output of %dist_status: what every rank does, its memory, and who waits for whom."""
    backend = shown(topology.backend)
    head = f"{ranks_and_hosts(topology)}, {backend}, up for {units.seconds(running_s)}"
    on_gpus = [rank for rank in topology.ranks if rank.device != "cpu"]
    devices = {rank.device_uuid or f"{rank.host} {rank.device}" for rank in on_gpus}
    if devices and not units.is_stored():  # CPU ranks have stored no such words
        head += f", {len(devices) * running_s / 3600:.2f} GPU-hours"
    view = _states(topology, states, head, [*states.waits, f"plain cells run {mode}"])
    stacks = [(f"rank {state.rank}", state.stack.rstrip()) for state in states.ranks if state.stack]
    if not stacks:
        return view
    text = "\n\n".join([view.text, *(f"{who}\n{stack}" for who, stack in stacks)])
    blocks = "".join(
        f"<details open><summary>{who}</summary><pre>{html.escape(stack)}</pre></details>"
        for who, stack in stacks
    )
    return View(text, view.html + blocks)


def _states(topology: Topology, states: Status, head: str, after: Sequence[str]) -> View:
    rows = []
    for place, state in zip(topology.ranks, states.ranks, strict=True):
        doing = state.state
        if state.busy_s:
            doing += f" for {units.seconds(state.busy_s)}"
        rows.append(
            [
                str(place.rank),
                shown_host(place.host),
                shown(place.pid),
                _device(place),
                doing,
                _memory(state.memory_bytes),
            ]
        )
    head_row = ["rank", "host", "pid", "device", "state", "memory"]
    return table(head_row, rows, before=[head], after=after)


def _memory(memory_bytes: Mapping[str, int]) -> str:
    if not memory_bytes:
        return "-"
    text = f"{units.size(memory_bytes['resident'])} host"
    if "allocated" in memory_bytes:
        text += (
            f", {units.size(memory_bytes['allocated'])} GPU"
            f" ({units.size(memory_bytes['reserved'])} reserved)"
        )
    return shown(text)
