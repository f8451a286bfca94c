"""Samples of ranks in Prometheus' text format, version 0.0.4.

https://prometheus.io/docs/instrumenting/exposition_formats/#text-based-format
Where a number means the same as one of NVIDIA's DCGM exporter it has that one's name and unit
(https://github.com/NVIDIA/dcgm-exporter, etc/default-counters.csv), so dashboards made for it work.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nbdist.core.gpus import MIB
from nbdist.core.topology import RankPlace
from nbdist.monitor.samples import STATES, Sample, read_of

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n", '"': r"\""})
_HELP_ESCAPES = str.maketrans({"\\": r"\\", "\n": r"\n"})


@dataclass(frozen=True, slots=True)
class Metric:
    """One number of each rank.

    Attributes:
        of: The number in a sample; None where it is not known, which leaves the line out.
        is_gpu: It has the GPU's labels as well.
    """

    name: str
    help: str
    of: Callable[[Sample], float | None]
    is_gpu: bool = False


def _free_mib(sample: Sample) -> float | None:
    gpu = sample.gpu
    if gpu is None or gpu.total_bytes is None or gpu.used_bytes is None:
        return None
    return (gpu.total_bytes - gpu.used_bytes) // MIB


METRICS = (
    Metric("DCGM_FI_DEV_GPU_UTIL", "GPU utilization (in %): the time in which a kernel ran.",
           read_of("gpu.busy_percent"), is_gpu=True),
    Metric("DCGM_FI_DEV_MEM_COPY_UTIL",
           "Memory utilization (in %): the time in which device memory was read or written.",
           read_of("gpu.memory_busy_percent"), is_gpu=True),
    Metric("DCGM_FI_DEV_FB_USED", "Framebuffer memory used (in MiB).",
           read_of("gpu.used_bytes", lambda used: used // MIB), is_gpu=True),
    Metric("DCGM_FI_DEV_FB_FREE", "Framebuffer memory free (in MiB).",
           _free_mib, is_gpu=True),
    Metric("DCGM_FI_DEV_GPU_TEMP", "GPU temperature (in C).", read_of("gpu.temperature_c"),
           is_gpu=True),
    Metric("DCGM_FI_DEV_POWER_USAGE", "Power draw (in W).", read_of("gpu.power_w"), is_gpu=True),
    Metric("nbdist_gpu_throttled",
           "Whether the GPU's clocks are lowered for power or heat (1) or not (0).",
           read_of("gpu.throttled", bool), is_gpu=True),
    Metric("nbdist_rank_up", "Whether the rank's process is alive (1) or has ended (0).",
           lambda sample: sample.doing.state != "dead"),
    Metric("nbdist_rank_cell_seconds",
           "How long the rank has been running its cell; 0 without one.", read_of("doing.cell_s")),
    Metric("nbdist_rank_waiting_seconds",
           "How long the rank has been inside a call of torch.distributed; 0 where it is in none.",
           lambda sample: (sample.doing.state == "waiting" and sample.doing_s) or 0.0),
    Metric("nbdist_rank_last_collective_age_seconds",
           "Time since the rank's last call of torch.distributed ended.",
           read_of("doing.collective_age_s")),
    Metric("nbdist_rank_cpu_ratio",
           "Processor time of the rank and its children, as a fraction of its share of the cores.",
           read_of("cpu_percent", lambda percent: percent / 100)),
    Metric("nbdist_rank_resident_bytes",
           "Resident host memory of the rank and its children, shared pages counted in each.",
           read_of("usage.rss_bytes")),
    Metric("nbdist_rank_proportional_bytes",
           "Proportional set size (PSS): shared pages divided among those that share them.",
           read_of("usage.pss_bytes")),
    Metric("nbdist_host_memory_used_bytes",
           "Memory of all processes that counts against nbdist_host_memory_limit_bytes.",
           read_of("usage.host_used_bytes")),
    Metric("nbdist_host_memory_limit_bytes",
           "The rank's memory limit with the least room: its control group's or the machine's.",
           read_of("usage.host_limit_bytes")),
    Metric("nbdist_torch_allocated_bytes", "GPU memory in tensors of the rank.",
           read_of("allocator.allocated_bytes")),
    Metric("nbdist_torch_reserved_bytes", "GPU memory that the rank's allocator holds.",
           read_of("allocator.reserved_bytes")),
    Metric("nbdist_torch_allocated_peak_bytes", "Peak GPU memory in tensors of the rank.",
           read_of("allocator.peak_bytes")),
    Metric("nbdist_expert_load_ratio",
           "Tokens that the rank's experts computed in the cell, by those it routed: 1 is even.",
           read_of("expert_load")),
    Metric("nbdist_sample_age_seconds", "Age of the rank's oldest number.", read_of("age_s")),
)  # fmt: skip


def exposition(samples: Sequence[Sample], places: Sequence[RankPlace]) -> str:
    """All ranks' newest numbers, with where the ranks are; what is not known is left out."""
    at = {place.rank: place for place in places}
    lines: list[str] = []
    for metric in METRICS:
        rows = [
            _line(metric.name, _labels(sample, at[sample.rank], is_gpu=metric.is_gpu), value)
            for sample in samples
            if (value := metric.of(sample)) is not None
        ]
        if rows:
            lines += [*_head(metric.name, metric.help), *rows]
    lines += _head("nbdist_rank_state", "1 for the rank's current state, 0 for the others.")
    for sample in samples:
        labels = _labels(sample, at[sample.rank], is_gpu=False)
        for state in STATES:
            is_it = float(sample.doing.state == state)
            lines.append(_line("nbdist_rank_state", {**labels, "state": state}, is_it))
    return "\n".join(lines) + "\n"


def _head(name: str, text: str) -> list[str]:
    return [f"# HELP {name} {text.translate(_HELP_ESCAPES)}", f"# TYPE {name} gauge"]


def _labels(sample: Sample, place: RankPlace, *, is_gpu: bool) -> dict[str, str]:
    labels = {"rank": str(sample.rank), "host": place.host}
    if is_gpu and sample.gpu is not None:
        gpu = sample.gpu
        labels |= {"gpu": str(gpu.index), "UUID": gpu.uuid, "modelName": gpu.name}
        labels["Hostname"] = place.host
    return labels


def _line(name: str, labels: Mapping[str, str], value: float) -> str:
    pairs = ",".join(f'{key}="{text.translate(_ESCAPES)}"' for key, text in labels.items())
    number = str(int(value)) if float(value).is_integer() else repr(float(value))
    return f"{name}{{{pairs}}} {number}"


def scrape_config(port: str, credentials_file: str) -> str:
    """Lines that Prometheus' configuration needs to read the numbers."""
    return (
        "scrape_configs:\n"
        "  - job_name: nbdist\n"
        "    scrape_interval: 5s\n"
        "    authorization:\n"
        f"      credentials_file: {credentials_file}\n"
        "    static_configs:\n"
        f'      - targets: ["127.0.0.1:{port}"]'
    )
