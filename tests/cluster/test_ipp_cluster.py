"""Where a controller listens, whether it is encrypted, and what is said of the rest."""

import json
from pathlib import Path
from typing import Self
from unittest.mock import Mock

import pytest
from traitlets.config import Config

from nbdist.cluster.kernel import ipp_cluster, profiles
from nbdist.cluster.peer_filter import OpenPort
from nbdist.core import host
from nbdist.core.topology import EngineReport, plan

OWN = "10.1.2.3"
CURVE = ipp_cluster.ENABLE_CURVE


@pytest.fixture
def routes(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Peer -> the own address toward it; without an entry there is no way."""
    table = {host.ELSEWHERE: OWN}

    class Probe:
        def __init__(self, *_: object) -> None: ...
        def __enter__(self) -> Self:
            return self

        def __exit__(self, *_: object) -> None: ...
        def connect(self, peer: tuple[str, int]) -> None:
            if peer[0] not in table:
                raise OSError(101, "Network is unreachable")
            self.address = table[peer[0]]

        def getsockname(self) -> tuple[str, int]:
            return self.address, 40000

    monkeypatch.setattr(host.socket, "socket", Probe)
    return table


def profile(engines: str = "slurm", **settings: object) -> Config:
    config = Config()
    config.Cluster.engine_launcher_class = engines
    config.Cluster.update(settings)
    return config


@pytest.mark.parametrize(
    ("hosts", "ways", "address"),
    [
        ((), {}, OWN),
        (("me@n1", "n2"), {"n1": "192.168.7.1"}, "192.168.7.1"),
        # Debian's line gives this machine's own name 127.0.1.1; the next host counts.
        (("login", "n2"), {"login": "127.0.0.1", "n2": "192.168.7.1"}, "192.168.7.1"),
        (("login",), {"login": "127.0.0.1"}, OWN),
        # A name that only ssh's configuration knows.
        (("gpu-box",), {}, OWN),
        (("gpu-box",), {host.ELSEWHERE: None}, "*"),
    ],
)
def test_engines_have_one_address_and_the_notebook_the_loopback(
    hosts: tuple[str, ...], ways: dict[str, str], address: str, routes: dict[str, str]
) -> None:
    """A profile that says nothing: the address toward the first other host, with CURVE."""
    routes.update(ways)
    for peer in [peer for peer, way in routes.items() if way is None]:
        del routes[peer]
    config = profile(controller_args=["--HeartMonitor.period=200"])
    ipp_cluster.listen(config, hosts)

    assert config.Cluster.controller_args == [
        "--HeartMonitor.period=200",
        f"--IPController.engine_ip={address}",
        CURVE,
    ]
    assert "controller_ip" not in config.Cluster


def test_kept_ranks_have_a_controller_for_notebooks_of_other_hosts(routes: dict[str, str]) -> None:
    """Where engines reach it, encrypted; one that only this machine reaches stays on the loopback.

    Not for ranks that end with their notebook: for it the loopback is enough.
    """
    routes["n1"] = "192.168.7.1"
    config, local = profile(), profile("local")
    ipp_cluster.listen(config, ["n1"], is_kept=True)
    ipp_cluster.listen(local, is_kept=True)

    assert config.Cluster.controller_args == [
        "--IPController.engine_ip=192.168.7.1",
        "--IPController.client_ip=192.168.7.1",
        CURVE,
    ]
    assert "controller_args" not in local.Cluster


@pytest.mark.parametrize(
    ("settings", "args"),
    [
        # Beyond the loopback, whichever way it is said, also by a name that may be the loopback.
        ({"controller_ip": "*"}, [CURVE]),
        ({"controller_ip": "0.0.0.0"}, [CURVE]),
        ({"controller_ip": OWN}, [CURVE]),
        ({"controller_ip": "::"}, [CURVE]),
        ({"controller_ip": "fe80::1"}, [CURVE]),
        ({"controller_ip": "login"}, [CURVE]),
        ({"controller_args": ["--ip=*"]}, ["--ip=*", CURVE]),
        ({"controller_args": ["--ip", "*"]}, ["--ip", "*", CURVE]),
        ({"controller_args": ["--IPController.ip=eth0"]}, ["--IPController.ip=eth0", CURVE]),
        ({"controller_args": ["--ip=127.0.0.1", "--IPController.client_ip", OWN]},
         ["--ip=127.0.0.1", "--IPController.client_ip", OWN, CURVE]),
        ({"controller_args": ["--IPController.monitor_ip"]}, ["--IPController.monitor_ip", CURVE]),
        # On it.
        ({"controller_ip": "127.0.0.1"}, None),
        ({"controller_ip": "127.0.1.1"}, None),
        ({"controller_ip": "::1"}, None),
        ({"controller_ip": "localhost"}, None),
        ({"controller_args": ["--ip=127.0.0.1", "--ping=200"]}, ["--ip=127.0.0.1", "--ping=200"]),
        # What the profile says of CURVE counts.
        ({"controller_ip": "*", "controller_args": ["--IPController.enable_curve=False"]},
         ["--IPController.enable_curve=False"]),
        ({"controller_ip": "*", "controller_args": [CURVE]}, [CURVE]),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("routes")
def test_a_profile_that_names_an_address_keeps_it(
    settings: dict[str, object], args: list[str] | None
) -> None:
    """It is encrypted unless only this machine can reach it."""
    config = profile(**settings)
    ipp_cluster.listen(config)

    assert config.Cluster.get("controller_args") == args
    assert config.Cluster.get("controller_ip") == settings.get("controller_ip")


@pytest.mark.usefixtures("routes")
def test_arguments_that_a_profile_appends_count_too() -> None:
    """traitlets keeps them apart until they are read."""
    config = profile()
    config.Cluster.controller_args.append("--ip=*")
    ipp_cluster.listen(config)

    assert config.Cluster.controller_args == ["--ip=*", CURVE]


@pytest.mark.usefixtures("routes")
def test_engines_on_this_machine_alone_open_nothing() -> None:
    """Neither does a controller that runs elsewhere, whose address nobody here knows."""
    local = profiles.load("local")
    before = list(local.Cluster.controller_args)
    plain = profile("local")
    far = profile(controller_launcher_class="slurm")
    for config in (local, plain, far):
        ipp_cluster.listen(config)

    assert local.Cluster.controller_args == before
    assert "controller_args" not in plain.Cluster
    assert "controller_args" not in far.Cluster


@pytest.mark.parametrize("engines", ["ssh", "slurm", "mpi", "pbs"])
@pytest.mark.usefixtures("routes")
def test_all_kinds_of_engines_elsewhere_reach_it(engines: str) -> None:
    """ipyparallel's launcher for SSH derives from the local one, and is none."""
    config = profile(engines)
    ipp_cluster.listen(config)

    assert f"--IPController.engine_ip={OWN}" in config.Cluster.controller_args


def test_what_is_said_of_open_traffic() -> None:
    """Ports, addresses and interface; whether others reach them; whether cells are encrypted."""
    reports = [EngineReport(e, f"node{e}", addresses=(("eth0", f"10.0.0.{e}"),)) for e in (1, 2)]
    two_hosts = plan(reports)
    ports = [OpenPort(f"10.0.0.{e}", 40000 + e, "eth0", True) for e in (1, 1, 2)]
    unknown = [*ports, OpenPort("0.0.0.0", 4000, "", False)]

    assert two_hosts.addresses == ("10.0.0.1", "10.0.0.2")
    assert ipp_cluster.open_traffic(two_hosts, ports, is_encrypted=True) == (
        "Between the 2 hosts, cells and their output are encrypted; what GLOO and torch's store "
        "send is neither encrypted nor authenticated (3 ports on eth0, 10.0.0.1: 2, 10.0.0.2: 1; "
        "open to these hosts alone). Use a network that you trust."
    )
    assert not ipp_cluster.open_traffic(two_hosts, [], is_encrypted=False)  # pretended hosts
    text = ipp_cluster.open_traffic(two_hosts, unknown, is_encrypted=False)
    assert "signed, but not encrypted, as the profile turns CURVE off" in text
    assert "4 ports on all interfaces, eth0" in text
    assert "1 of them open to any host" in text


def test_the_file_that_an_attach_reads_is_whole_while_it_is_written(tmp_path: Path) -> None:
    """Whoever has it open reads to the end what was there: no kernel's end leaves half a file."""
    (tmp_path / "profile" / "security").mkdir(parents=True)
    cluster = ipp_cluster.cluster(Config(), tmp_path, ipp_cluster.logger(tmp_path))
    cluster.write_cluster_file()
    path = Path(cluster.cluster_file)
    before = path.read_text()
    with path.open() as file:
        cluster.engines["again"] = Mock(state="running", to_dict=lambda: {"pid": 7})
        cluster.write_cluster_file()
        read = file.read()

    assert read == before
    assert json.loads(path.read_text())["engines"]["sets"] == {"again": {"pid": 7}}
    assert [file.name for file in path.parent.iterdir()] == [path.name]
