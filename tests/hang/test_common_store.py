"""The ranks' store: on one address, and with another rank when its rank is gone."""

import os
import pickle
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist

from nbdist.core import topology
from nbdist.core.rank import this_rank
from nbdist.engine import join
from nbdist.errors import NbdistError
from nbdist.hang.rank import common_store, process_groups
from nbdist.hang.recovery import merge_groups
from tests.programs.rank import (
    broken_off,
    everyone,
    is_new,
    n,
    rank,
    refusal,
    say,
    total,
    wait_for,
)
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


def survive_loss(lost: int) -> tuple[Any, float]:
    """As a rank of three whose other one is lost: go on without it, and ask for a new process.

    Returns:
        The others' group, and their sum.
    """
    others = [r for r in range(n) if r != lost]
    alone = 6.0 - lost - 1.0
    pair = dist.new_group(others)
    common_store.LOST_S = 2
    common_store._limit_waits(*common_store._ports.current)
    say("made")
    wait_for("dead", [lost])
    if rank == lost:
        time.sleep(60)
    assert broken_off(lambda: dist.all_reduce(torch.ones(2)))[0] == "RuntimeError"
    began_s = time.monotonic()
    in_store = refusal(lambda: this_rank().store.check(["nothing"]), RuntimeError)
    assert time.monotonic() - began_s < 20
    assert bool(in_store) == (lost == 0)
    process_groups.recover(1, (lost,))
    assert total(pair) == alone
    assert total(dist.new_group(others, use_local_synchronization=True)) == alone

    report = topology.EngineReport(lost, "elsewhere", cores=4, pid=1)
    plan = topology.replan(this_rank().topology, {lost: report})
    at = ("", *join.take_plan(plan, [lost]))
    say("plan", pickle.dumps((plan, process_groups.created_groups(), at)))
    process_groups.recover(2)
    return pair, alone


def loses(lost: int, address: str) -> None:
    """A rank is lost, by a kill or by its cable; a new process takes its place on another host."""
    pair, alone = (None, 0.0) if is_new else survive_loss(lost)
    group = dist.new_group()
    assert total() == total(group) == 6.0  # no rank ends while another one still connects
    assert group.size() == 3
    assert pair is None or total(pair) == alone
    assert [place.host for place in this_rank().topology.ranks] == [
        "elsewhere" if r == lost else "here" for r in range(3)
    ]
    assert os.environ["LOCAL_WORLD_SIZE"] == ("1" if rank == lost else "2")
    assert os.environ["GROUP_WORLD_SIZE"] == "2"
    assert os.environ["MASTER_ADDR"] == address
    assert rank != lost or os.environ["LOCAL_RANK"] == "0"
    assert len(set(everyone(os.environ["MASTER_PORT"]))) == 1
    is_holder = everyone(common_store.where() == common_store._own_address())
    assert is_holder.index(True) == (1 if lost == 0 else 0)


def replace_lost(ranks: TorchRanks, lost: int, **env: str) -> None:
    """Start a process in the place of the lost rank once the others are ready."""
    said = [pickle.loads(ranks.wait_for("plan", r)) for r in range(ranks.size) if r != lost]
    assert len({str(at) for _, _, at in said}) == 1
    plan, _, at = said[0]
    ranks.replace(lost, 2, plan, merge_groups(groups for _, groups, _ in said), at, **env)
    ranks.results()


@pytest.mark.parametrize("lost", [0, pytest.param(2, marks=pytest.mark.faults)])
def test_a_killed_rank_is_replaced_over_a_port(tmp_path: Path, lost: int) -> None:
    """Whether or not it held the store: the others are whole without it and with a new one."""
    given = {"lost": lost, "address": "127.0.0.1"}
    with TorchRanks(tmp_path, 3, loses, arguments=given, TEST_ADDRESS="127.0.0.1") as ranks:
        for rank in range(3):
            ranks.wait_for("made", rank)
        ranks.kill(lost)
        replace_lost(ranks, lost)


@pytest.mark.skipif(bool(support_hosts.missing()), reason=support_hosts.missing())
def test_ranks_of_a_host_that_is_cut_off_are_replaced_on_another(tmp_path: Path) -> None:
    """Nobody is told of the cut: the others' collective is broken off, and no store waits on."""
    with support_hosts.Hosts(2) as hosts:
        first, second = (
            f"/proc/{hosts.popen(node, ['sleep', '300']).pid}/ns/net" for node in hosts.nodes
        )
        ranks = TorchRanks(
            tmp_path, 3, loses, arguments={"lost": 0, "address": hosts.address("node2")},
            TEST_ADDRESS=hosts.address("node1"), TEST_NETWORKS=f"{first} {second} {second}",
            GLOO_SOCKET_IFNAME="eth0",
        )  # fmt: skip
        with ranks:
            for rank in range(3):
                ranks.wait_for("made", rank)
            hosts.cut("node1")
            ranks.tell("dead", 0)
            replace_lost(ranks, 0, TEST_NETWORKS=f"{second} {second} {second}")
