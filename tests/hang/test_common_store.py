"""The ranks' store: on one address, and with another rank when its rank is gone."""

import pickle
import socket
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from nbdist.errors import NbdistError
from nbdist.hang.rank import common_store
from nbdist.hang.recovery import merge_groups
from tests.support import hosts as support_hosts
from tests.support.torch_ranks import TorchRanks


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process that has no store yet."""
    ports = common_store._Ports()
    monkeypatch.setattr(common_store, "_ports", ports)
    yield
    if ports.reserved is not None:
        ports.reserved.close()


def test_the_store_listens_on_the_one_address() -> None:
    """torch's own listener would take every interface; ours takes the address it was given."""
    port = common_store.open_store("127.0.0.1", 2)
    listening = [
        c.laddr.ip
        for c in psutil.Process().net_connections("tcp")
        if c.status == psutil.CONN_LISTEN and c.laddr.port == port
    ]
    store = common_store.connect("127.0.0.1", port, 2)
    client = dist.TCPStore("127.0.0.1", port, 2, is_master=False, wait_for_workers=False)
    client.set("key", "value")

    assert listening == ["127.0.0.1"]
    assert store.get("key") == b"value"


def test_a_reserved_port_is_closed_until_its_rank_opens_the_store() -> None:
    """Others may come before it is open, and wait for it; the port is the one that was told."""
    common_store.reserve("127.0.0.1")
    at = common_store._own_address()
    assert at is not None
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(at, 1.0)
    opening = threading.Timer(0.3, common_store._open, [2])
    opening.start()
    client = dist.TCPStore(*at, 2, is_master=False)
    client.set("key", "value")
    opening.join()

    assert common_store._own_address() == at
    assert common_store.connect(*at, 2).get("key") == b"value"


def test_a_store_that_nobody_opens_is_told_with_its_address(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By the deadline, not after torch's five minutes."""
    monkeypatch.setattr(common_store, "CONNECT_S", 0.5)
    with pytest.raises(NbdistError, match=r"127.0.0.1:1 could not be reached within"):
        common_store.connect("127.0.0.1", 1, 2)


def test_waits_for_a_host_that_vanishes_have_a_limit() -> None:
    """The system gives the connection up; torch's client has no limit of its own."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        with socket.create_connection(("127.0.0.1", port)) as connection:
            common_store._limit_waits("127.0.0.1", port)
            limits_ms = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT)
            is_probed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)

    assert limits_ms == 1000 * common_store.LOST_S
    assert is_probed


# A rank of three is lost, by a kill or by its cable; the others go on alone, and then with a new
# process in its place, on another host.
LOST = """
    lost = int(os.environ["LOST"])
    others = [r for r in range(n) if r != lost]
    keys = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")

    def end(**result):
        state, group = this_rank(), dist.new_group()
        total(group)  # no rank ends while another one still connects
        done(world=total(), environment=[os.environ[key] for key in keys], **result,
             hosts=[place.host for place in state.topology.ranks], later=group.size(),
             holder=common_store.where() == common_store._own_address())

    if is_new:
        end()
    pair = dist.new_group(others)
    common_store.LOST_S = 2
    common_store._limit_waits(*common_store._ports.current)
    say("made")
    wait_for("lost", [lost])
    if rank == lost:
        time.sleep(60)
    error, _ = broken_off(lambda: dist.all_reduce(torch.ones(2)))
    began = time.monotonic()
    in_store = refusal(lambda: this_rank().store.check(["nothing"]), RuntimeError)
    waited_s = time.monotonic() - began
    process_groups.recover(1, (lost,))
    alone = [total(pair), total(dist.new_group(others, use_local_synchronization=True))]

    report = topology.EngineReport(lost, "elsewhere", cores=4, pid=1)
    plan = topology.replan(this_rank().topology, {lost: report})
    at = ("", *runtime.take_plan(plan, [lost]))
    say("plan", pickle.dumps((plan, process_groups.created_groups(), at)))
    process_groups.recover(2)
    end(error=error, in_store=in_store, waited_s=waited_s, alone=alone, pair=total(pair))
"""


def replace_lost(ranks: TorchRanks, lost: int, **env: str) -> list[dict[str, Any]]:
    """Start a process in the place of the lost rank once the others are ready; all results."""
    said = [pickle.loads(ranks.wait_for("plan", r)) for r in range(ranks.size) if r != lost]
    assert len({str(at) for _, _, at in said}) == 1
    ranks.replace(
        lost, 2, said[0][0], merge_groups(groups for _, groups, _ in said), said[0][2], **env
    )
    return ranks.results()


def check_lost(
    results: list[dict[str, Any]], lost: int, address_of_rank_0: str = "127.0.0.1"
) -> None:
    others = [result for rank, result in enumerate(results) if rank != lost]
    for rank, result in enumerate(results):
        assert (result["world"], result["later"]) == (6.0, 3)
        assert result["hosts"] == ["elsewhere" if r == lost else "here" for r in range(3)]
        assert result["environment"][1:3] == ["1" if rank == lost else "2", "2"]
        assert result["environment"][3] == address_of_rank_0
    assert results[lost]["environment"][0] == "0"
    assert len({result["environment"][4] for result in results}) == 1
    assert [result["holder"] for result in results].index(True) == (1 if lost == 0 else 0)
    for result in others:
        assert result["error"] == "RuntimeError"
        assert bool(result["in_store"]) == (lost == 0)
        assert result["waited_s"] < 20
        assert result["alone"] == [6.0 - lost - 1.0] * 2
        assert result["pair"] == 6.0 - lost - 1.0


@pytest.mark.parametrize("lost", [0, pytest.param(2, marks=pytest.mark.faults)])
def test_a_killed_rank_is_replaced_over_a_port(tmp_path: Path, lost: int) -> None:
    """Whether or not it held the store: the others are whole without it and with a new one."""
    with TorchRanks(tmp_path, 3, LOST, TEST_ADDRESS="127.0.0.1", LOST=str(lost)) as ranks:
        for rank in range(3):
            ranks.wait_for("made", rank)
        ranks.kill(lost)
        (tmp_path / f"lost.{lost}").touch()
        results = replace_lost(ranks, lost)

    check_lost(results, lost)


@pytest.mark.skipif(bool(support_hosts.missing()), reason=support_hosts.missing())
def test_ranks_of_a_host_that_is_cut_off_are_replaced_on_another(tmp_path: Path) -> None:
    """Nobody is told of the cut: the others' collective is broken off, and no store waits on."""
    with support_hosts.Hosts(2) as hosts:
        address = hosts.address("node2")
        first, second = (
            f"/proc/{hosts.popen(node, ['sleep', '300']).pid}/ns/net" for node in hosts.nodes
        )
        ranks = TorchRanks(
            tmp_path, 3, LOST, LOST="0", TEST_ADDRESS=hosts.address("node1"),
            TEST_NETWORKS=f"{first} {second} {second}", GLOO_SOCKET_IFNAME="eth0",
        )  # fmt: skip
        with ranks:
            for rank in range(3):
                ranks.wait_for("made", rank)
            hosts.cut("node1")
            (tmp_path / "lost.0").touch()
            results = replace_lost(ranks, 0, TEST_NETWORKS=f"{second} {second} {second}")

    check_lost(results, 0, address)
