"""Writes docs/grafana.json, a board for what `%dist_monitor --prometheus` and DCGM export.

Run as a program: `python -m tests.support.grafana_page`. Its form is that of Grafana's export
(https://grafana.com/docs/grafana/latest/visualizations/dashboards/build-dashboards/view-dashboard-json-model/).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parents[2] / "docs" / "grafana.json"
SOURCE = {"type": "prometheus", "uid": "${source}"}
OF_GPU, OF_RANK = "{{Hostname}} GPU {{gpu}} rank {{rank}}", "rank {{rank}} on {{host}}"
HEIGHT, COLUMNS = 8, 3
# Title, unit, legend, expressions; a board's row for each. The first row is of DCGM's exporter too.
ROWS: dict[str, tuple[tuple[str, str, str, tuple[str, ...]], ...]] = {
    "GPUs": (
        ("Utilization (a kernel ran)", "percent", OF_GPU, ("DCGM_FI_DEV_GPU_UTIL",)),
        ("Memory used of all", "percentunit", OF_GPU,
         ("DCGM_FI_DEV_FB_USED / (DCGM_FI_DEV_FB_USED + DCGM_FI_DEV_FB_FREE)",)),
        ("Memory read or written", "percent", OF_GPU, ("DCGM_FI_DEV_MEM_COPY_UTIL",)),
        ("Temperature", "celsius", OF_GPU, ("DCGM_FI_DEV_GPU_TEMP",)),
        ("Power", "watt", OF_GPU, ("DCGM_FI_DEV_POWER_USAGE",)),
        ("Clocks lowered for power or heat", "bool_yes_no", OF_GPU, ("nbdist_gpu_throttled",)),
    ),
    "Ranks": (
        ("State", "string", "rank {{rank}} {{state}}", ("nbdist_rank_state == 1",)),
        ("Alive", "bool_yes_no", OF_RANK, ("nbdist_rank_up",)),
        ("Waiting in a collective", "s", OF_RANK, ("nbdist_rank_waiting_seconds",)),
        ("Since the last collective", "s", OF_RANK, ("nbdist_rank_last_collective_age_seconds",)),
        ("Running its cell", "s", OF_RANK, ("nbdist_rank_cell_seconds",)),
        ("Tokens of its experts, by those it routed", "none", OF_RANK,
         ("nbdist_expert_load_ratio",)),
    ),
    "Memory and processors": (
        ("Torch: allocated, reserved, peak", "bytes", "{{__name__}} rank {{rank}}",
         ("nbdist_torch_allocated_bytes", "nbdist_torch_reserved_bytes",
          "nbdist_torch_allocated_peak_bytes")),
        ("Host memory used of its limit", "percentunit", OF_RANK,
         ("nbdist_host_memory_used_bytes / nbdist_host_memory_limit_bytes",)),
        ("Host memory of a rank", "bytes", "{{__name__}} rank {{rank}}",
         ("nbdist_rank_resident_bytes", "nbdist_rank_proportional_bytes")),
        ("Cores, of its share", "percentunit", OF_RANK, ("nbdist_rank_cpu_ratio",)),
        ("Age of the numbers", "s", OF_RANK, ("nbdist_sample_age_seconds",)),
    ),
}  # fmt: skip


def board() -> dict[str, Any]:
    """The board as Grafana imports it: a variable for the data source, panels in rows of three."""
    panels: list[dict[str, Any]] = []
    top = 0
    for title, plots in ROWS.items():
        place = {"h": 1, "w": 24, "x": 0, "y": top}
        panels.append({"type": "row", "title": title, "gridPos": place, "panels": []})
        for number, plot in enumerate(plots):
            line, column = divmod(number, COLUMNS)
            width = 24 // COLUMNS
            place = {"h": HEIGHT, "w": width, "x": column * width, "y": top + 1 + line * HEIGHT}
            panels.append(_panel(*plot) | {"gridPos": place})
        top += 1 + -(-len(plots) // COLUMNS) * HEIGHT
    source = {
        "name": "source", "label": "Data source", "type": "datasource", "query": "prometheus"
    }  # fmt: skip
    return {
        "title": "nbdist: ranks and GPUs", "uid": "nbdist-ranks", "tags": ["nbdist", "pytorch"],
        "schemaVersion": 39, "refresh": "5s", "time": {"from": "now-15m", "to": "now"},
        "templating": {"list": [source]},
        "panels": [panel | {"id": number} for number, panel in enumerate(panels, 1)],
    }  # fmt: skip


def _panel(title: str, unit: str, legend: str, expressions: tuple[str, ...]) -> dict[str, Any]:
    """One plot over time; of states a bar for each rank."""
    targets = [
        {"refId": chr(ord("A") + number), "expr": text, "legendFormat": legend,
         "datasource": SOURCE}
        for number, text in enumerate(expressions)
    ]  # fmt: skip
    return {
        "type": "state-timeline" if unit == "string" else "timeseries",
        "title": title, "datasource": SOURCE, "targets": targets,
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
    }  # fmt: skip


def page() -> str:
    """The board as the text of the file."""
    return json.dumps(board(), indent=1) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
