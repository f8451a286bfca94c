"""Ranks on several hosts: an agent on each host starts them, reports their ends, and ends them.

Another kernel finds kept ranks by the settings and by the traits with
`to_dict`: ipyparallel writes them into its cluster file and reads them back (`from_dict`).
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from importlib import metadata
from itertools import chain
from pathlib import Path
from typing import Any

from ipyparallel.cluster.launcher import BaseLauncher, EngineLauncher
from traitlets import Dict, Float, Integer, List, Unicode

from nbdist.cluster import hosts, nccl_env
from nbdist.cluster.hosts import Host, HostCheck
from nbdist.cluster.kernel.launchers.agents import (
    BOOTSTRAP,
    AgentLost,
    HostAgent,
    RankExit,
    end_kept,
)
from nbdist.cluster.kernel.launchers.rank_set import AGENTS, RankSet
from nbdist.errors import NbdistError, OptionError, StartError

ENGINE_FILE = "engine.json"
END_PROGRAM = "nbdist.cluster.kernel.launchers.agents"
CONNECTION_DEADLINE_S = 60.0
CONNECTION_POLL_S = 0.02
ANSWER_S = 10.0
# Less than a restart waits for the end of a rank that it replaces.
EXPLAIN_S = 3.0
# Ranks that come back one after the other do not each wait for the host that all have lost.
RETRY_S = 5.0
# Ranks of other hosts get the notebook's variables whose names begin like this.
FORWARDED = (
    "NCCL_", "TORCH_", "GLOO_", "OMP_", "FI_", "HF_", "ACCELERATE_",
    "NBDIST_PRELOAD", "NBDIST_TEST",
)  # fmt: skip


class AgentEngine(BaseLauncher):  # type: ignore[misc]
    """One rank's process on the host of an agent; the identifier is the rank."""

    def __init__(self, rank: int, agent: HostAgent, **kwargs: Any):
        """Start the rank's process; nothing is waited for."""
        super().__init__(**kwargs)
        self.rank, self.agent, self.pid, self._tail = rank, agent, 0, ""

    def find_args(self) -> list[str]:
        """Return the rank's command without its variables, for ipyparallel's log."""
        return ["rank", str(self.rank), self.agent.host]

    def signal(self, sig: int) -> None:
        """Send a signal to the rank; at once, unanswered."""
        self.agent.ask("signal", rank=self.rank, number=int(sig))

    def end(self) -> None:
        """Kill the rank, with all processes of its session; unanswered."""
        self.agent.ask("end", rank=self.rank)

    def get_output(self, remove: bool = False) -> str:
        """The last of what the rank has written past its cells; asked for while it lives."""
        if self.state == "running" and not self.agent.lost:
            with contextlib.suppress(NbdistError, TimeoutError):
                self._tail = self.agent.ask("tail", rank=self.rank).result(ANSWER_S)
        return self._tail

    def finish(self, code: int | None, tail: str, unreachable: str = "") -> None:
        """Note the end of the process, or that its host cannot be reached; in the loop."""
        if self.state == "after":
            return
        self._tail = tail or self._tail
        self.notify_stop({"exit_code": code, "pid": self.pid, "unreachable": unreachable})


class AgentEngineSetLauncher(EngineLauncher, RankSet):  # type: ignore[misc]
    """Starts ranks on hosts through their agents; engine id = rank, in the order of the hosts.

    A subclass says which hosts there are (`find_hosts`) and how to reach one (`command`).
    """

    kind = AGENTS
    spare_advice = (
        "Give spare hosts or places at the start (--hosts n1:4,n2:4,n3:4 with a smaller -n)"
    )

    hosts: List[Any] = List(
        help="The hosts, each (name, places or None), in the order of the ranks."
    ).tag(config=True)
    remote_python = Unicode(sys.executable, help="The Python of the ranks, on every host.").tag(
        config=True
    )
    connect_s = Float(15.0, help="How long a host may take to answer first, in s.").tag(config=True)
    common_environment = Dict(help="Environment variables of every rank.").tag(config=True)
    places: Dict[str, int] = Dict(help="Host -> how many ranks it may have.").tag(to_dict=True)
    folders: Dict[str, str] = Dict(help="Host -> its agent's folder there.").tag(to_dict=True)
    ranks: Dict[str, str] = Dict(help="Rank -> its host.").tag(to_dict=True)
    world_size = Integer(help="Number of ranks.").tag(to_dict=True)
    keep_s = Float(help="How long ranks are kept without a kernel, in s; 0: not.").tag(to_dict=True)

    def __init__(self, **kwargs: Any):
        super().__init__(**kwargs)
        self.agents: dict[str, HostAgent] = {}
        self.launchers: dict[str, AgentEngine] = {}
        self._is_closed = False
        self._preparing = threading.Lock()  # a try that was broken off may still be under way
        self._failed: dict[str, tuple[float, str]] = {}  # host -> when it was not reached, and why
        self._sharing: asyncio.Task[None] | None = None

    @property
    def run_dir(self) -> Path:
        """The run's folder, on the kernel's machine."""
        return Path(self.profile_dir).parent

    def find_args(self) -> list[str]:
        """Return the hosts, for ipyparallel's log."""
        return ["hosts", *self.agents]

    async def find_hosts(self, n: int) -> tuple[Host, ...]:
        """The hosts to start n ranks on (0: as many as there are places).

        Raises:
            OptionError: If there is none.
        """
        if not self.hosts:
            raise OptionError(
                "No host is named. Type --hosts n1:4,n2:4, or set c.AgentEngineSetLauncher.hosts "
                "in the profile."
            )
        return tuple(Host(*entry) for entry in self.hosts)

    def command(self, host: str) -> list[str]:
        """The command on this machine that runs BOOTSTRAP with a host's Python."""
        raise NotImplementedError

    def connection_environment(self) -> dict[str, str]:
        """The environment of `command`."""
        return dict(os.environ)

    def explain(self, host: str, reason: str) -> str:
        """Why a host cannot be reached, with what to do, from the words of the connection.

        It may block: it is called in the connection's own thread.
        """
        return reason

    def explain_exit(self, host: str, end: RankExit) -> str:
        """Say who has ended a rank where its exit code does not; "" if it does. May block."""
        return ""

    def spare_hosts(self, lost: str) -> Iterable[Host]:
        """Hosts beside those of the start that may take the ranks of a lost one. May block."""
        return ()

    def engine_launchers(self) -> dict[int, AgentEngine]:
        """Rank -> its process, of those that have ended too."""
        return {int(rank): engine for rank, engine in [*self.launchers.items()]}

    async def start(self, n: int) -> list[int]:
        """Reach all hosts at once, check them, then start n ranks; 0 for every place.

        Raises:
            OptionError: If the hosts have fewer places.
            StartError: If a host is not fit, with the table of hosts; nothing runs then.
        """
        chosen = await self.find_hosts(n)
        try:
            loop, pool = asyncio.get_running_loop(), ThreadPoolExecutor(len(chosen))
            checks = [loop.run_in_executor(pool, self._reach, host.name, loop) for host in chosen]
            pool.shutdown(wait=False)  # a start that is broken off waits for no connection
            self.checks = tuple(await asyncio.gather(*checks))
            hosts.refuse(self.checks, own_versions())
            visible = self.common_environment.get("CUDA_VISIBLE_DEVICES")
            most = sys.maxsize if visible is None else len([v for v in visible.split(",") if v])
            gpus = {check.name: min(check.facts.gpus, most) for check in self.checks if check.facts}
            self.places = {h.name: h.places or gpus[h.name] or 1 for h in chosen}
            shares = hosts.share_ranks(self.places, n or None)
        except BaseException:
            self.close()
            raise
        for host in [name for name in self.agents if name not in shares]:
            threading.Thread(target=self.agents.pop(host).stop).start()
        self.folders = {host: self.agents[host].folder for host in shares}
        self.world_size = sum(map(len, shares.values()))
        for host, ranks in shares.items():
            for rank in ranks:
                self._start_rank(rank, self.agents[host], len(ranks), rank - ranks[0])
        self._sharing = asyncio.create_task(self._share_connection())
        self.notify_start(sorted(self.launchers))
        return sorted(map(int, self.launchers))

    async def attach(self) -> None:
        """Reach the hosts on which another kernel has left its ranks, all at once; start nothing.

        The launcher was made by `from_dict`. Afterwards each rank of `launchers` is running,
        or has ended, with its exit code, or is unreachable, with the reason.

        Raises:
            StartError: If this machine does not have what reaches them, such as ssh.
        """
        try:
            await self._attach(asyncio.get_running_loop())
        except BaseException:
            self.leave()
            raise
        self.notify_start(sorted(self.launchers))

    async def _attach(self, loop: asyncio.AbstractEventLoop) -> None:
        for host, folder in self.folders.items():
            try:
                self.agents[host] = self._connect(host, loop, folder)
            except OSError as error:
                raise StartError(f"{host} cannot be reached from here: {error}") from error
        for rank, host in self.ranks.items():
            self._add_engine(int(rank), self.agents[host])
        pool = ThreadPoolExecutor(max(1, len(self.agents)))
        finding = [loop.run_in_executor(pool, self._find_ranks, a) for a in self.agents.values()]
        pool.shutdown(wait=False)
        answers = await asyncio.gather(*finding)
        self.checks = tuple(check for check, _ in answers)
        for agent, (check, ends) in zip(self.agents.values(), answers, strict=True):
            if check.problem:
                self._take_loss(agent, check.problem)
            await asyncio.gather(*(self._take_exit(agent, end) for end in ends))

    def _find_ranks(self, agent: HostAgent) -> tuple[HostCheck, list[RankExit]]:
        """Ask an agent for the processes of its ranks, and for those that have ended; in a thread.

        A rank of it that is on another host by now, as this one was lost, is ended.
        """
        ends: list[RankExit] = []
        on_exit, agent.on_exit = agent.on_exit, ends.append
        try:
            facts = agent.facts(self.connect_s)
            pids = agent.pids(ANSWER_S)
        except AgentLost as error:
            agent.leave()
            return HostCheck(agent.host, problem=self._problem(agent.host, error)), []
        agent.on_exit = on_exit
        engines = {engine.rank: engine for engine in self.engines_of(agent)}
        for rank, pid in pids.items():
            if rank in engines:
                engines[rank].pid = pid
            else:
                agent.ask("end", rank=rank)
        return HostCheck(agent.host, facts), ends

    def keep(self, seconds: float) -> None:
        """Let ranks live this many seconds without a kernel, on all hosts, later ones too; 0: not.

        Raises:
            NbdistError: If a host cannot keep its ranks, or does not answer.
        """
        former, self.keep_s = self.keep_s, seconds
        living = [agent for agent in self.agents.values() if not agent.lost]
        for agent, answer in [(agent, self._keep(agent)) for agent in living]:
            try:
                answer.result(ANSWER_S)
            except AgentLost:
                continue  # told as its ranks' end
            except (NbdistError, TimeoutError) as error:
                self.keep_s = former  # on no host, rather than on some
                for other in living:
                    self._keep(other)
                problem = self._problem(agent.host, error)
                raise NbdistError(f"{agent.host} cannot keep its ranks: {problem}") from None

    def _keep(self, agent: HostAgent) -> Future[Any]:
        agent.is_kept = self.keep_s > 0
        return agent.ask("keep", seconds=self.keep_s)

    def leave(self) -> None:
        """Hang up; agents that keep their ranks go on without this kernel."""
        self._is_closed = True
        for agent in self.agents.values():
            agent.leave()

    def _connect(self, host: str, loop: asyncio.AbstractEventLoop, folder: str = "") -> HostAgent:
        """A connection to a host: to a new agent, or to that of a folder.

        Raises:
            OSError: If there is no such program.
        """
        environment = {
            **self.connection_environment(),
            **self.environment,
            "NBDIST_RUN": str(self.run_dir),
        }
        environment.pop("IPP_CONNECTION_INFO", None)
        agent = HostAgent(host, self.command(host), environment, folder)
        agent.on_exit = lambda end: asyncio.run_coroutine_threadsafe(
            self._take_exit(agent, end), loop
        )
        agent.on_lost = lambda why: loop.call_soon_threadsafe(
            self._take_loss, agent, self.explain(host, why)
        )
        return agent

    def _reach(self, host: str, loop: asyncio.AbstractEventLoop) -> HostCheck:
        """Connect to a host, ask what it is, and make the run's folder there; in a thread."""
        try:
            agent = self._connect(host, loop)
            self.agents[host] = agent
            if self._is_closed:
                agent.stop()
            facts = agent.facts(self.connect_s)
            # An agent that was lost here may keep its ranks.
            former = self.folders.get(host, "") if self.keep_s else ""
            opened = agent.ask("open", run=self.run_dir.name, former=former)
            agent.folder = opened.result(ANSWER_S)
            self.folders[host] = agent.folder
            if self.keep_s:
                self._keep(agent).result(ANSWER_S)
        except (OSError, NbdistError) as error:
            if failed := self.agents.pop(host, None):
                failed.stop(0)
            return HostCheck(host, problem=self._problem(host, error))
        return HostCheck(host, facts)

    def _problem(self, host: str, error: Exception) -> str:
        late = f"its agent did not answer within {ANSWER_S:.0f} s"
        return self.explain(host, late if isinstance(error, TimeoutError) else str(error))

    def _add_engine(self, rank: int, agent: HostAgent) -> AgentEngine:
        engine = AgentEngine(
            rank,
            agent,
            parent=self,
            log=self.log,
            profile_dir=self.profile_dir,
            cluster_id=self.cluster_id,
            identifier=str(rank),
        )
        self.launchers[str(rank)] = engine
        self.ranks[str(rank)] = agent.host
        engine.notify_start({"rank": rank})
        return engine

    def _start_rank(
        self,
        rank: int,
        agent: HostAgent,
        local_size: int,
        local_rank: int,
        environment: Mapping[str, str] | None = None,
    ) -> AgentEngine:
        engine = self._add_engine(rank, agent)
        env = {
            **self._common_variables(),
            "RANK": str(rank),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(local_size),
            **(environment or {}),
        }
        folder = Path.cwd()
        started = agent.ask(
            "start", rank=rank, argv=self._argv(rank), env=env,
            folder=str(folder), owner=folder.stat().st_uid,
        )  # fmt: skip
        started.add_done_callback(partial(self._take_start, engine, asyncio.get_running_loop()))
        return engine

    def _common_variables(self) -> dict[str, str]:
        forwarded = {k: v for k, v in os.environ.items() if k.startswith(FORWARDED)}
        return {
            **nccl_env.environment(os.environ),
            **forwarded,
            **self.common_environment,
            "NBDIST_RUN": "{folder}",
            "IPP_PROFILE_DIR": "{folder}/profile",
            "IPP_CLUSTER_ID": self.cluster_id,
        }

    def _argv(self, rank: int) -> list[str]:
        return [
            "-P",
            "-m",
            "nbdist.engine",
            f"--IPEngine.id={rank}",
            f"--IPEngine.url_file={{folder}}/{ENGINE_FILE}",
            # The agent ends the engine, reports its end, and signals it.
            "--IPEngine.max_heartbeat_misses=0",
            "--IPEngine.enable_nanny=False",
        ]

    def _take_start(
        self, engine: AgentEngine, loop: asyncio.AbstractEventLoop, started: Any
    ) -> None:
        error = started.exception()
        if error is None:
            engine.pid = started.result()
            return
        is_lost = isinstance(error, AgentLost)
        unreachable = f"{engine.agent.host} cannot be reached: {error}" if is_lost else ""
        loop.call_soon_threadsafe(engine.finish, None, str(error), unreachable)

    async def _share_connection(self) -> None:
        """Hand the controller's connection file, with its key, to every host when it is there."""
        path = Path(self.connection_files["engine"])
        end_s = time.monotonic() + CONNECTION_DEADLINE_S
        while not (text := _read_whole(path)) and time.monotonic() < end_s:  # noqa: ASYNC110  # a file
            await asyncio.sleep(CONNECTION_POLL_S)
        for agent in self.agents.values():
            agent.ask("file", name=ENGINE_FILE, text=text)

    async def _take_exit(self, agent: HostAgent, end: RankExit) -> None:
        """A rank's process has ended: keep what it has left where the kernel looks for it."""
        engine = self.launchers.get(str(end.rank))
        if engine is None or engine.agent is not agent or engine.pid not in {0, end.pid}:
            return  # of a process that was replaced
        for name, content in end.files.items():
            path = self.run_dir / name
            with contextlib.suppress(OSError):
                path.parent.mkdir(mode=0o700, exist_ok=True)
                path.write_bytes(content)
        cause = ""
        # Not in the connection's thread: a host counts as lost if its messages are not read.
        with contextlib.suppress(NbdistError, TimeoutError):
            asked = asyncio.to_thread(self.explain_exit, agent.host, end)
            cause = await asyncio.wait_for(asked, EXPLAIN_S)
        engine.finish(end.code, end.tail, cause)

    def _take_loss(self, agent: HostAgent, why: str) -> None:
        for engine in self.engines_of(agent):
            engine.finish(None, "", f"{agent.host} cannot be reached: {why}")

    def engines_of(self, agent: HostAgent) -> list[AgentEngine]:
        """The engines whose processes an agent has started and that have not ended."""
        return [e for e in self.launchers.values() if e.agent is agent and e.state == "running"]

    def prepare_host(self, rank: int, loop: asyncio.AbstractEventLoop) -> HostAgent:
        """The agent that starts a rank again: of its own host, else of one with a free place.

        Blocks; in a thread. The host that was lost is tried again first.

        Raises:
            StartError: If there is neither.
        """
        with self._preparing:
            return self._choose_host(rank, loop)

    def _choose_host(self, rank: int, loop: asyncio.AbstractEventLoop) -> HostAgent:
        former = self.launchers[str(rank)].agent
        if not former.lost:
            return former
        tried = {}
        here = dict.fromkeys([former.host, *self.places])
        # One after the other: a spare host may have to be asked for.
        for host in chain(here, (spare.name for spare in self.spare_hosts(former.host))):
            free = self._free_places(host, rank)
            if free < 1:
                tried[host] = f"{host}: all of its places are taken"
                continue
            agent = self.agents.get(host)
            if agent is not None and not agent.lost:
                return agent
            failed_s, problem = self._failed.get(host, (0.0, ""))
            if time.monotonic() - failed_s > RETRY_S:
                problem = self._add_host(host, loop)
                if not problem:
                    return self.agents[host]
                self._failed[host] = time.monotonic(), problem
            tried[host] = problem
        listed = "; ".join(tried.values())
        raise StartError(
            f"rank {rank} has no host to run on ({listed}). {self.spare_advice}, or start all "
            "ranks again with %dist_reset."
        )

    def _add_host(self, host: str, loop: asyncio.AbstractEventLoop) -> str:
        """Connect to a host for ranks that come back; why they cannot run there, or ""."""
        check = self._reach(host, loop)
        others = [other for other in self.checks if other.name != host]
        texts = hosts.problems([*others, check], own_versions())
        if not texts:
            self.checks = (*others, check)
        elif not check.problem:
            self.folders.pop(host)
            self.agents.pop(host).stop()
        return "; ".join(texts)

    def _free_places(self, host: str, rank: int) -> int:
        others = [
            engine
            for engine in self.launchers.values()
            if engine.agent.host == host and engine.rank != rank and engine.state == "running"
        ]
        return self.places.get(host, 1) - len(others)

    async def start_one(self, rank: int, environment: Mapping[str, str]) -> AgentEngine:
        """Start the process of a rank that has ended again, on its host or on another one.

        Raises:
            StartError: If no host takes it.
        """
        loop = asyncio.get_running_loop()
        agent = await asyncio.to_thread(self.prepare_host, rank, loop)
        self._forget(rank)
        agent.ask("file", name=ENGINE_FILE, text=_read_whole(Path(self.connection_files["engine"])))
        on_host = sorted(e.rank for e in self.launchers.values() if e.agent is agent)
        others = [r for r in on_host if r != rank]
        former = self.launchers[str(rank)]
        local_rank = on_host.index(rank) if former.agent is agent else len(others)
        return self._start_rank(rank, agent, len(others) + 1, local_rank, environment)

    def _forget(self, rank: int) -> None:
        """Remove the files of an earlier process of the rank."""
        for name in ("boxes/{}", "crash.{}", "cells.{}", "stacks.{}"):
            (self.run_dir / name.format(rank)).unlink(missing_ok=True)

    async def stop(self) -> None:
        """End all ranks and agents, all hosts at once; nothing of the run is left on them."""
        self.close()
        self.notify_stop({"exit_code": 0})

    def close(self) -> None:
        """The same, without a loop: returns when all agents have ended."""
        self._is_closed = True
        # Plain threads: at the interpreter's end an executor takes no work any more.
        stops = [threading.Thread(target=self._stop, args=[a]) for a in [*self.agents.values()]]
        for stop in stops:
            stop.start()
        for stop in stops:
            stop.join()

    def _stop(self, agent: HostAgent) -> None:
        """Let an agent end; one that was lost and keeps its ranks has to be found for that."""
        is_left = bool(agent.lost and self.keep_s and agent.folder)
        if is_left:
            is_left = bool(end_kept(agent.host, self._plain_command(agent.host), agent.folder))
        if (agent.stop() or not is_left) and self.folders.get(agent.host) == agent.folder:
            del self.folders[agent.host]

    def _plain_command(self, host: str) -> list[str]:
        """The command that runs BOOTSTRAP on a host."""
        others = os.environ.keys() - self.connection_environment().keys()
        return ["env", *chain(*(("-u", name) for name in sorted(others))), *self.command(host)]

    def ending(self) -> list[str] | None:
        """The command that ends kept ranks without this kernel; [] if all have ended.

        None where no command is needed: ranks are not kept, or the guardian sees their processes.
        """
        if not self.keep_s or self.is_on_this_machine:
            return None
        left = [(host, self._plain_command(host), f) for host, f in self.folders.items()]
        return [sys.executable, "-m", END_PROGRAM, json.dumps(left)] if left else []

    def signal(self, sig: int) -> None:
        """Send a signal to every rank."""
        for engine in self.launchers.values():
            engine.signal(sig)

    def get_output(self, remove: bool = False) -> str:
        """The last output of each rank, under its number."""
        tails = {rank: engine.get_output() for rank, engine in self.launchers.items()}
        return "\n".join(f"rank {rank}: {tail}" for rank, tail in tails.items() if tail)


def _read_whole(path: Path) -> str:
    """The text of a connection file; empty as long as it is not there or half written."""
    with contextlib.suppress(OSError):
        text = path.read_text()
        return text if text.rstrip().endswith("}") else ""
    return ""


def own_versions() -> dict[str, str]:
    """The notebook's version of nbdist; empty where it is a checkout that is not installed."""
    with contextlib.suppress(metadata.PackageNotFoundError):
        return {"nbdist": metadata.version("nbdist")}
    return {}


def remote_command(python: str) -> list[str]:
    """BOOTSTRAP as the words of a command on the other host."""
    return [python, "-c", BOOTSTRAP]
