"""What stands in the files of sshd and Slurm on the hosts of tests/support/hosts.py."""

from collections.abc import Mapping, Sequence

SSHD_CONFIG = """
HostKey /etc/ssh/ssh_host_ed25519_key
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
UsePAM no
PrintMotd no
MaxStartups 100:30:200
MaxSessions 100
Subsystem sftp internal-sftp
"""

_SLURM_CONFIG = """
ClusterName=hosts
SlurmctldHost=head
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CredType=cred/munge
StateSaveLocation=/run/slurm/state
SlurmdSpoolDir=/run/slurm/spool
SlurmctldPidFile=/run/slurm/slurmctld.pid
SlurmdPidFile=/run/slurm/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
MpiDefault=none
SwitchType=switch/none
ReturnToService=2
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=5,sched_min_interval=100000,batch_sched_delay=0
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
PreemptType=preempt/partition_prio
PreemptMode=CANCEL
GresTypes=gpu
SlurmdParameters=config_overrides
"""
_SLURM_SETTINGS = {
    "SlurmctldTimeout": 30,
    "SlurmdTimeout": 300,
    "KillWait": 5,
    "MinJobAge": 300,
    "EnforcePartLimits": "ALL",
}
# `small` refuses more than one host and ten minutes; jobs in `spare` are cancelled for others'.
SLURM_PARTITIONS = (
    "main Nodes=ALL Default=YES MaxTime=INFINITE PriorityTier=2",
    "small Nodes=node1 MaxNodes=1 MaxTime=10 PriorityTier=2",
    "spare Nodes=ALL MaxTime=INFINITE PriorityTier=1",
)


def slurm_files(
    n: int, gpus: int, cpus: int, partitions: Sequence[str], settings: Mapping[str, object]
) -> dict[str, str]:
    """Name and text of each file in /etc/slurm, the same on all hosts, for `n` nodes."""
    nodes = f"node[1-{n}]"
    lines = [f"{name}={value}" for name, value in (_SLURM_SETTINGS | dict(settings)).items()]
    lines.append(f"NodeName={nodes} CPUs={cpus} RealMemory=4000 Gres=gpu:{gpus} State=UNKNOWN")
    lines += [f"PartitionName={line} State=UP" for line in partitions]
    devices = f"NodeName={nodes} Name=gpu File=/run/slurm/gpu[0-{gpus - 1}]\n" if gpus else ""
    return {
        "slurm.conf": _SLURM_CONFIG + "\n".join(lines) + "\n",
        "gres.conf": f"AutoDetect=off\n{devices}",
        # No cgroup is used, yet slurmd ends without a line that says which kind.
        "cgroup.conf": "CgroupPlugin=cgroup/v1\n",
    }
