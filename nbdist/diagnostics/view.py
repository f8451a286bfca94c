"""Views of `%dist_doctor` and `nbdist status`."""

from __future__ import annotations

import html
import time
from collections.abc import Iterator, Sequence

from nbdist.cells.kept_run import KeptRun
from nbdist.cluster.run_owner import Run
from nbdist.core.failures import ranks_phrase
from nbdist.core.units import shown, shown_host, shown_lines
from nbdist.core.view import (
    View,
    drawing,
    folded,
    lines,
    lines_html,
    measured,
    table,
    verdicts,
)
from nbdist.diagnostics.links import Interface
from nbdist.diagnostics.topology import LINKS, HostLinks, LinkPicture, examine, speed
from nbdist.strategy.choice import described
from nbdist.strategy.options import listed

# The innermost axes: their groups are to lie within a host, and have colours.
_COLOURED = ("tp", "cp")
_COLOURS = ("#4c78a8", "#59a14f", "#b07aa1", "#9c755f", "#76b7b2", "#edc948")
_ALONE, _CROSSING = "#8a8a8a", "#d62728"
_HOST_PX, _NETWORK_PX, _TILE_PX, _GAP_PX, _PER_ROW = 480, 680, 52, 6, 8
_MOST_OPEN = 2
_HERE = "No ranks run in this notebook: this machine alone. %dist_init starts some."
_LOCAL = "loopback"
_WHY_LOCAL = "nbdist's launcher sets it where all ranks are on the kernel's host"


def below(*views: View) -> View:
    """Views, one below the other."""
    return View(
        "\n\n".join(view.text for view in views),
        "".join(view.html for view in views),
        is_bad=any(view.is_bad for view in views),
    )


def running(those: Sequence[Run]) -> View:
    """The runs whose notebook lives, one row each."""
    rows = [
        [
            run.name,
            str(run.owner.pid if run.owner else "-"),
            str(len(run.hosts) or "-"),
            ", ".join(dict.fromkeys(run.hosts)) or "-",
            time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(run.owner.since_s))
            if run.owner
            else "-",
            run.state,
            run.owner.where if run.owner else "-",
        ]
        for run in those
    ]
    if not rows:
        return View("you have no clusters running on this machine")
    head = ["run", "kernel", "ranks", "hosts", "since", "state", "notebook"]
    return table(head, rows)


def kept(those: Sequence[KeptRun], now_s: float) -> View:
    """The runs that outlive their notebook, one row each; `now_s` in Unix time."""
    rows = [
        [
            entry.run.name,
            f"held by {entry.holder}" if entry.holder else "kept",
            str(len(entry.run.hosts) or "-"),
            entry.gpus,
            entry.age(now_s),
            entry.left(now_s),
            entry.cell.phrase(now_s) if entry.cell else "-",
        ]
        for entry in those
    ]
    return table(["run", "state", "ranks", "GPUs", "up for", "time left", "newest cell"], rows)


def topology(picture: LinkPicture) -> View:
    """Ranks with their interfaces, what each host has, where the mesh lies, and what is wrong.

    The picture repeats what the text has: hosts as boxes, ranks in them, the network beside.
    """
    has_ranks = picture.strategy is not None
    ranks = _ranks(picture) if has_ranks else View(_HERE, lines_html([_HERE]))
    parts = [ranks, _hosts(picture), *([_axes(picture)] if picture.axes else [])]
    findings = examine(picture)
    parts += [measured(verdicts(findings) if findings else View(""))]
    return View(
        "\n\n".join(part.text for part in parts if part.text),
        f"<div>{drawing(_svg(picture))}{''.join(part.html for part in parts)}</div>",
        is_bad=any(part.is_bad for part in parts),
    )


def _ranks(picture: LinkPicture) -> View:
    assert picture.strategy is not None
    rows = []
    for its in picture.hosts:
        for place, links in zip(its.places, its.links, strict=True):
            chosen = links.chosen
            interface = f"{chosen.gloo} {chosen.address}".strip() if chosen else _LOCAL
            rows.append(
                [
                    str(place.rank),
                    shown_host(its.host.name),
                    shown(f"{place.device} {place.device_name}".strip()),
                    shown(interface),
                    shown(chosen.why if chosen else _WHY_LOCAL),
                ]
            )
    count, hosts = len(rows), len(picture.hosts)
    head = f"{count} rank{'s' if count > 1 else ''} on {hosts} host{'s' if hosts > 1 else ''}, "
    head += f"{shown(picture.backend)}, {described(picture.strategy)}"
    return table(["rank", "host", "device", "interface", "because"], rows, before=[head])


def _hosts(picture: LinkPicture) -> View:
    """Links of each host, a line for each kind; in a notebook more than two hosts are folded."""
    text, body = [], ""
    for its in picture.hosts:
        ranks = f": {ranks_phrase(its.host.ranks)}" if its.host.ranks else ""
        title = f"host {shown_host(its.host.name)}{ranks}"
        facts = [*_host_lines(its)]
        text += [title, *shown_lines(f"  {line}" for line in facts)]
        facts_html = lines(shown_lines(facts)).html
        body += folded(title, facts_html, is_open=len(picture.hosts) <= _MOST_OPEN)
    return View("\n".join(text), body)


def _host_lines(its: HostLinks) -> Iterator[str]:
    named = [i for i in its.any_rank.interfaces if i.addresses or i.is_device]
    for interface in named:
        yield f"interface {interface.name}: {_interface(interface, its)}"
    if others := len(its.any_rank.interfaces) - len(named):
        yield f"and {others} virtual interface{'s' if others > 1 else ''} without an address"
    for port in its.any_rank.rdma:
        yield f"{port.kind} {port.device}, port {port.port}: {port.state} {port.rate}".rstrip()
    if not its.any_rank.rdma:
        yield "no EFA, InfiniBand or RoCE device"
    if its.any_rank.plugins:
        yield f"NCCL's network plugins: {', '.join(its.any_rank.plugins)}"
    if its.networks:
        ways = {way for links in its.links if links.nccl for way in links.nccl.ways}
        reached = f"; ranks connected through {', '.join(sorted(ways))}" if ways else ""
        yield f"NCCL uses {', '.join(its.networks)} between hosts{reached}"
    yield from its.gpus.problems
    yield from _gpu_lines(its)


def _interface(interface: Interface, its: HostLinks) -> str:
    facts = [
        ", ".join(interface.addresses) or "no address",
        interface.kind if not interface.driver else f"{interface.kind} ({interface.driver})",
        "up" if interface.is_up else "no link",
        speed(interface),
    ]
    if interface.name in its.chosen:
        facts.append("used by the ranks")
    elif its.chosen and not interface.leads_out:
        facts.append("passed over: it leads to no other host")
    return ", ".join(filter(None, facts))


def _gpu_lines(its: HostLinks) -> Iterator[str]:
    """The GPUs, and how each pair is connected: in a sentence where all are alike."""
    readings = its.gpus
    ranks = {place.device_uuid: place.rank for place in its.places}
    for gpu in readings.gpus:
        user = f", rank {ranks[gpu.uuid]}" if gpu.uuid in ranks else ""
        yield f"GPU {gpu.index} {gpu.name}{user}"
    kinds = {kind for _, _, kind in readings.links}
    if len(kinds) == 1:
        yield f"between all GPUs: {LINKS[kinds.pop()]}"
    elif kinds:
        link_of = {frozenset(pair): kind for *pair, kind in readings.links}
        numbers = sorted(
            {number for first, second, _ in readings.links for number in (first, second)}
        )
        yield "    " + " ".join(f"{number:>4}" for number in numbers)
        for row in numbers:
            cells = [link_of.get(frozenset((row, n)), "-") for n in numbers]
            yield f"{row:>4}" + " ".join(f"{cell:>4}" for cell in cells)
        yield ", ".join(f"{kind}: {LINKS[kind]}" for kind in LINKS if kind in kinds)


def _axes(picture: LinkPicture) -> View:
    """Place of each axis of the mesh, with one of its groups, if possible one that crosses."""
    rows = []
    for place in picture.axes:
        where = "each within a host"
        if place.crossing:
            count = "all" if place.crossing == place.groups else str(len(place.crossing))
            where = f"{count} between {listed(map(shown_host, place.hosts))}"
        example = ranks_phrase((place.crossing or place.groups)[0])
        rows.append([place.axis, str(place.degree), str(len(place.groups)), where, example])
    return table(["axis", "ranks", "groups", "where", "such as"], rows)


def _svg(picture: LinkPicture) -> str:
    """Hosts below each other as boxes with their ranks, the network as a bar beside them."""
    shapes: list[str] = []
    y = 8
    for its in picture.hosts:
        height = 66 + _TILE_PX * -(-len(its.places) // _PER_ROW)
        shapes += _host_shapes(picture, its, y, height)
        y += height + 12
    if len(picture.hosts) > 1:
        shapes.append(_box(_NETWORK_PX, 8, 12, y - 20, "currentColor"))
        shapes.append(_text(_NETWORK_PX - 40, y + 10, "network", 11))
    shapes.append(_text(4, y + 10, _key(picture), 11))
    count = len(picture.hosts)
    name = f"{count} host{'s' if count > 1 else ''} with ranks and the links between them"
    width, height = _NETWORK_PX + 20, y + 20
    return (
        f'<svg role="img" aria-label="{name}; the text below says the same." width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}" font-family="sans-serif">'
        f"{''.join(shapes)}</svg>"
    )


def _host_shapes(picture: LinkPicture, its: HostLinks, y: int, height: int) -> Iterator[str]:
    colours = _group_colours(picture)
    yield _box(4, y, _HOST_PX, height, "none")
    yield _text(14, y + 18, its.host.name, 13)
    for number, place in enumerate(its.places):
        x = 14 + (number % _PER_ROW) * (_TILE_PX + _GAP_PX)
        top = y + 28 + (number // _PER_ROW) * _TILE_PX
        yield _box(x, top, _TILE_PX, _TILE_PX - 8, colours.get(place.rank, _ALONE))
        yield _text(x + 5, top + 18, f"rank {place.rank}", 11)
        yield _text(x + 5, top + 34, place.device, 10)
    yield _text(14, y + height - 12, _inside(its), 11)
    if len(picture.hosts) > 1:
        at = y + height // 2
        yield (
            f'<line x1="{_HOST_PX + 4}" x2="{_NETWORK_PX}" y1="{at}" y2="{at}" '
            'stroke="currentColor"></line>'
        )
        yield _text(_HOST_PX + 12, at - 6, _wire(its), 11)


def _group_colours(picture: LinkPicture) -> dict[int, str]:
    """A colour for each rank by its group of the innermost drawn axis; red where that crosses."""
    place = next((place for place in reversed(picture.axes) if place.axis in _COLOURED), None)
    if place is None:
        return {}
    return {
        rank: _CROSSING if group in place.crossing else _COLOURS[number % len(_COLOURS)]
        for number, group in enumerate(place.groups)
        for rank in group
    }


def _key(picture: LinkPicture) -> str:
    place = next((place for place in reversed(picture.axes) if place.axis in _COLOURED), None)
    if place is None:
        return ""
    crossing = "; red: they are on several hosts" if place.crossing else ""
    return f"ranks of one colour are one group along {place.axis}{crossing}"


def _inside(its: HostLinks) -> str:
    links = its.gpus.links
    if not links:
        return f"{len(its.gpus.gpus)} GPU" if its.gpus.gpus else "no GPU is used"
    order = list(LINKS)
    *pair, slowest = max(links, key=lambda link: order.index(link[2]))
    if len({kind for *_, kind in links}) == 1:
        return f"between all GPUs: {LINKS[slowest]}"
    return f"slowest link of GPUs: {LINKS[slowest]} ({pair[0]} and {pair[1]})"


def _wire(its: HostLinks) -> str:
    """Label of the way to the network: NCCL's word for it, and the interface."""
    used = [interface for interface in its.any_rank.interfaces if interface.name in its.chosen]
    return " ".join(filter(None, (*its.networks, *(f"{i.name} {speed(i)}".strip() for i in used))))


def _box(x: int, y: int, width: int, height: int, fill: str) -> str:
    return (
        f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="4" fill="{fill}" '
        'fill-opacity="0.35" stroke="currentColor"></rect>'
    )


def _text(x: int, y: int, text: str, size: int) -> str:
    body = html.escape(text)
    return f'<text x="{x}" y="{y}" font-size="{size}" fill="currentColor">{body}</text>'
