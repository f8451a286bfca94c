"""What Prometheus reads, by a strict reading of its text format's grammar."""

import re
from dataclasses import replace

from nbdist.core.gpus import MIB, GpuReading
from nbdist.core.topology import RankPlace
from nbdist.monitor.process_usage import Usage
from nbdist.monitor.prometheus import METRICS, exposition, scrape_config
from nbdist.monitor.samples import STATES, Allocator, Doing, Sample
from tests.support import grafana_page

PLACE = RankPlace(0, 0, 0, 1, 0, 'ho"st\\1', 9, "cuda:0", "H", "8c2a", 4)
GPU = GpuReading(
    3, "GPU-8c2a", "NVIDIA\nH200", 3 * MIB + 5, 8 * MIB, 97.0, 40.0, 61.0, 512.5, 700.0, ()
)
SAMPLE = Sample(
    0, 100.0, Doing("waiting", "waiting in barrier()", 97.5, 20.0, "barrier()", 30.25),
    Usage(1.0, 1000, 900, 5000, 6000), 150.0, GPU, Allocator(10, 20, 30), 0.5, 1.25,
)  # fmt: skip
_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_VALUE = r'"(?:[^"\\\n]|\\\\|\\"|\\n)*"'
_PAIR = rf"[a-zA-Z_][a-zA-Z0-9_]*={_VALUE}"
_LINE = re.compile(rf"({_NAME})\{{({_PAIR}(?:,{_PAIR})*)\}} (-?\d+(?:\.\d+)?(?:e[+-]?\d+)?)")
Read = dict[str, dict[tuple[tuple[str, str], ...], float]]


def read(text: str) -> Read:
    """Metric -> labels -> value; every line has to be one of the grammar's, in its order."""
    assert text.endswith("\n")
    assert "\n\n" not in text
    families: Read = {}
    helps: list[str] = []
    lines = iter(text[:-1].split("\n"))
    for line in lines:
        if line.startswith("#"):
            name = re.fullmatch(rf"# HELP ({_NAME}) [^\n]+", line)
            assert name is not None, line
            assert next(lines) == f"# TYPE {name[1]} gauge"
            helps.append(name[1])
            families[name[1]] = {}
            continue
        match = _LINE.fullmatch(line)
        assert match is not None, line
        assert match[1] == helps[-1], "the lines of a metric stand together, below its head"
        labels = tuple(
            (pair.partition("=")[0], _unescaped(pair.partition("=")[2][1:-1]))
            for pair in re.findall(_PAIR, match[2])
        )
        assert labels not in families[match[1]], "a series twice"
        families[match[1]][labels] = float(match[3])
    assert len(helps) == len(set(helps))
    assert all(families.values()), "a head without a line"
    return families


def _unescaped(text: str) -> str:
    return re.sub(r"\\(.)", lambda m: {"n": "\n"}.get(m[1], m[1]), text)


def test_all_that_is_known_is_there_with_its_unit_and_labels() -> None:
    """MiB, watts, seconds and ratios as the names say; odd characters in labels come through."""
    families = read(exposition([SAMPLE], [PLACE]))
    rank = (("rank", "0"), ("host", 'ho"st\\1'))
    gpu = (
        *rank, ("gpu", "3"), ("UUID", "GPU-8c2a"), ("modelName", "NVIDIA\nH200"),
        ("Hostname", 'ho"st\\1'),
    )  # fmt: skip

    assert set(families) == {*(metric.name for metric in METRICS), "nbdist_rank_state"}
    assert {name: families[name][gpu] for name in families if name.startswith("DCGM")} == {
        "DCGM_FI_DEV_GPU_UTIL": 97,
        "DCGM_FI_DEV_MEM_COPY_UTIL": 40,
        "DCGM_FI_DEV_FB_USED": 3,
        "DCGM_FI_DEV_FB_FREE": 4,
        "DCGM_FI_DEV_GPU_TEMP": 61,
        "DCGM_FI_DEV_POWER_USAGE": 512.5,
    }
    assert families["nbdist_gpu_throttled"][gpu] == 0
    assert families["nbdist_rank_cpu_ratio"][rank] == 1.5
    assert families["nbdist_rank_waiting_seconds"][rank] == 2.5
    assert families["nbdist_rank_last_collective_age_seconds"][rank] == 30.25
    assert families["nbdist_rank_up"][rank] == 1
    assert families["nbdist_expert_load_ratio"][rank] == 1.25
    assert families["nbdist_torch_allocated_peak_bytes"][rank] == 30
    assert {
        dict(labels)["state"]: value for labels, value in families["nbdist_rank_state"].items()
    } == {state: float(state == "waiting") for state in STATES}


def test_what_is_not_known_has_no_line() -> None:
    """A rank on a CPU beside a dead one: no zeros that stand for "unknown"."""
    bare = Sample(0, 100.0, Doing("idle", "idle"), SAMPLE.usage, 12.0)
    dead = Sample(1, 100.0, Doing("dead", "ended (signal SIGKILL)"))
    places = [PLACE, replace(PLACE, rank=1)]
    families = read(exposition([bare, dead], places))

    assert not [
        name for name in families if name.startswith(("DCGM", "nbdist_torch", "nbdist_gpu"))
    ]
    assert [dict(labels)["rank"] for labels in families["nbdist_rank_cpu_ratio"]] == ["0"]
    assert list(families["nbdist_rank_up"].values()) == [1, 0]
    assert "nbdist_rank_last_collective_age_seconds" not in families
    assert families["nbdist_rank_waiting_seconds"] == dict.fromkeys(families["nbdist_rank_up"], 0.0)


def test_no_sample_yet_is_no_error() -> None:
    """Before the first sample there are no values."""
    text = exposition([], [PLACE])

    assert [line for line in text.splitlines() if not line.startswith("#")] == []


def test_the_configuration_is_yaml_that_prometheus_takes() -> None:
    """The token stands in a file, not in the notebook."""
    import yaml

    (job,) = yaml.safe_load(scrape_config("9400", "/run/x/prometheus.token"))["scrape_configs"]

    assert job["static_configs"] == [{"targets": ["127.0.0.1:9400"]}]
    assert job["authorization"] == {"credentials_file": "/run/x/prometheus.token"}


def test_the_board_shows_every_number_and_no_other() -> None:
    """docs/grafana.json is made from a table, and asks for names that are served."""
    expressions = " ".join(
        target["expr"]
        for panel in grafana_page.board()["panels"]
        for target in panel.get("targets", ())
    )
    served = {*(metric.name for metric in METRICS), "nbdist_rank_state"}

    assert {*re.findall(r"[A-Za-z_]\w+", expressions)} == served
    assert grafana_page.PAGE.read_text() == grafana_page.page(), "tests.support.grafana_page"


def test_no_two_panels_of_the_board_overlap() -> None:
    """Each has its cells of Grafana's grid of 24 columns for itself."""
    cells = [
        (x, y)
        for panel in grafana_page.board()["panels"]
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert len(cells) == len({*cells})
    assert max(x for x, _ in cells) < 24
