"""An engine's facts about itself: its host, its GPUs, its launcher's rank."""

from __future__ import annotations

import os
import socket
import sys

import psutil
import torch

from nbdist.cluster import peer_filter
from nbdist.cluster.peer_filter import OpenPort
from nbdist.core import gpus as host_gpus
from nbdist.core import procfs
from nbdist.core.host import address_toward, is_loopback, usable_cores
from nbdist.core.topology import EngineReport, Gpu

# The launcher's own numbering of its tasks, in the order in which they are believed. nbdist's own
# launchers set torchrun's.
RANK_VARIABLES = (
    "RANK",
    "SLURM_PROCID",
    "OMPI_COMM_WORLD_RANK",
    "PMIX_RANK",
    "PMI_RANK",
    "PALS_RANKID",
    "JOB_COMPLETION_INDEX",  # of a pod of a Kubernetes Indexed Job
)
SIZE_VARIABLES = (
    "WORLD_SIZE",
    "SLURM_STEP_NUM_TASKS",
    "SLURM_NTASKS",
    "OMPI_COMM_WORLD_SIZE",
    "PMI_SIZE",
)
LOCAL_VARIABLES = (
    "LOCAL_RANK",
    "SLURM_LOCALID",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "MPI_LOCALRANKID",
    "PALS_LOCAL_RANKID",
)
JOB_VARIABLES = ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID")


def describe(engine_id: int, controller_address: str = "") -> EngineReport:
    """The report of this engine, from which the kernel plans ranks and devices."""
    return EngineReport(
        engine_id=engine_id,
        hostname=os.environ.get("NBDIST_HOST") or socket.gethostname(),
        boot_id=procfs.boot_id(),
        network_namespace=procfs.link(procfs.PROC / "self/ns/net"),
        pid=os.getpid(),
        addresses=addresses(),
        toward_controller=address_toward(controller_address),
        cuda_visible_devices=os.environ.get("CUDA_VISIBLE_DEVICES"),
        gpus=gpus(),
        cores=usable_cores(),
        rank_hint=_number(RANK_VARIABLES),
        size_hint=_number(SIZE_VARIABLES),
        local_hint=_number(LOCAL_VARIABLES),
        job_id="" if "RANK" in os.environ else job_id(),
        python=sys.executable,
        torch_version=str(torch.__version__),
        has_cuda=torch.cuda.is_available(),
    )


def job_id() -> str:
    """The batch system's number of the job that this process runs in; empty outside of one."""
    return next((os.environ[v] for v in JOB_VARIABLES if v in os.environ), "")


def gpus() -> tuple[Gpu, ...]:
    """The GPUs that this process sees, in its own order, by the driver's UUIDs."""
    if not torch.cuda.is_available():
        return ()
    readings = host_gpus.read_once()
    devices = []
    for index in range(torch.cuda.device_count()):
        properties = torch.cuda.get_device_properties(index)
        uuid = str(getattr(properties, "uuid", "")) or f"index-{index}"
        uuid = readings.driver_uuid(uuid, properties.name)
        devices.append(Gpu(index=index, uuid=uuid, name=properties.name))
    return tuple(devices)


def addresses() -> tuple[tuple[str, str], ...]:
    """(interface, IPv4 address) of every interface that is up."""
    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    return tuple(
        (name, entry.address)
        for name, entries in sorted(psutil.net_if_addrs().items())
        for entry in entries
        if entry.family == socket.AF_INET and name in up
    )


def open_ports() -> tuple[OpenPort, ...]:
    """The TCP ports at which this process listens beyond the loopback."""
    interfaces = {ip: name for name, ip in addresses()}
    return tuple(
        OpenPort(
            entry.laddr.ip,
            entry.laddr.port,
            interfaces.get(entry.laddr.ip, ""),
            peer_filter.is_restricted(entry.fd),
        )
        for entry in psutil.Process().net_connections("tcp")
        if entry.status == psutil.CONN_LISTEN and not is_loopback(entry.laddr.ip)
    )


def _number(variables: tuple[str, ...]) -> int | None:
    return next((int(os.environ[v]) for v in variables if os.environ.get(v, "").isdigit()), None)
