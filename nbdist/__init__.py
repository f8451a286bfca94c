"""nbdist: interactive experiments with distributed PyTorch in one notebook.

In a notebook: `%load_ext nbdist`, `%dist_init -n 2`, then cells that begin with
`%%distributed`. From Python: `session = nbdist.start(2)`, `session.run("print(rank)")`.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from nbdist.core.units import shown
from nbdist.core.versions import VERSION

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from IPython.core.interactiveshell import InteractiveShell

    from nbdist.config.view import CheckView
    from nbdist.core.view import View
    from nbdist.engine.torchrun import join as join
    from nbdist.notebook.session import Session
    from nbdist.parallel.accelerator.accelerator import Accelerator as Accelerator
    from nbdist.planner.view.plan_view import PlanView

# Without Accelerator and join: `from nbdist import *` would load torch in the notebook.
__all__ = [
    "__version__", "attach", "bench", "check_config", "compare", "detach", "doctor", "export",
    "load_ipython_extension", "plan", "session", "shown", "start", "step",
]  # fmt: skip
__version__ = VERSION


def start(  # noqa: PLR0913  # the options of %dist_init, by name
    n: int | None = None,
    *,
    profile: str = "local",
    hosts: str = "",
    gpus: str | None = None,
    backend: str = "auto",
    seed: int | None = None,
    timeout_s: float | None = None,
    grace_s: float | None = None,
    debug: str = "off",
    strategy: str | None = None,
    slurm: Mapping[str, Any] | None = None,
    keep_s: float = 0.0,
    save: str = "",
    **strategy_options: object,
) -> Session:
    """Start ranks and return them; the same as %dist_init.

    Args:
        n: Number of ranks; default: NBDIST_RANKS, or one per GPU, or 2 on the CPU.
        profile: Kind of cluster.
        hosts: Hosts with their ranks, "n1:4,n2:4", or the path of a file of them.
        gpus: "0,1", or "none" for the CPU; default: NBDIST_GPUS, or all.
        backend: "auto", "nccl" or "gloo".
        seed: Seeds the random generators of all ranks alike.
        timeout_s: Longest time that the start may take.
        grace_s: Seconds from reporting a certain deadlock to aborting it; default: 5.
        debug: torch's own checks of every collective: "off", "info" or "detail".
        strategy: How models are trained in parallel; default: ddp.
        slurm: Of the job, with the profile slurm: gpus_per_node, partition, account, time, sbatch.
        keep_s: How long the ranks go on without this process; default: they end with it.
        save: Where a checkpoint is written at the end of that time.
        strategy_options: Its degrees and options: tp=2, bf16=True, checkpoint="full".

    Raises:
        AlreadyRunning: If this process has ranks already.
        OptionError: If an option cannot be met on this machine.
        StartError: If a rank did not come up.
    """
    from nbdist import commands
    from nbdist.cluster.hosts import parse_hosts
    from nbdist.cluster.kernel.start import DEFAULT_DEADLINE_S, DEFAULT_GRACE_S, StartOptions
    from nbdist.cluster.slurm import SlurmOptions
    from nbdist.strategy.choose import StrategySpec

    options = StartOptions(
        n, profile, gpus, backend, seed, debug=debug, keep_s=keep_s, save=save,
        deadline_s=DEFAULT_DEADLINE_S if timeout_s is None else timeout_s,
        grace_s=DEFAULT_GRACE_S if grace_s is None else grace_s,
        strategy=StrategySpec.parse(strategy, strategy_options),
        hosts=parse_hosts(hosts) if hosts else (),
        slurm=SlurmOptions(**slurm or {}),
    )  # fmt: skip
    return commands.start_and_show(options).session


def detach(keep_s: float | None = None, *, save: str = "") -> float:
    """Let go of the ranks, which go on without this process; the same as %dist_detach.

    Args:
        keep_s: For how long; default: as the start said, or 8 hours.
        save: Where a checkpoint is written at the end of that time.

    Returns:
        For how long they go on, in seconds.

    Raises:
        NotRunning: If there are no ranks.
        StartError: If what an attach needs cannot be written down.
    """
    from nbdist.notebook.notebook import NOTEBOOK

    NOTEBOOK.session.checkpoints.end()
    return NOTEBOOK.detach(keep_s, save)


def attach(run: str = "", *, take: bool = False) -> Session:
    """Hold ranks that were kept and go on with the cell that they run; as %dist_attach.

    Args:
        run: Its name, the beginning of that, or its folder; default: the only one that is kept.
        take: From the process that holds it.

    Raises:
        AlreadyRunning: If this process has ranks, or another one holds those.
        NotRunning, OptionError, StartError: If there is no such run, or it cannot be reached.
        DistributedError: If the cell failed on a rank; the ranks are held.
    """
    from nbdist.commands.cluster import attach_and_show

    return attach_and_show(run, takes=take)


def session() -> Session:
    """The ranks of this process.

    Raises:
        NotRunning: If there are none.
    """
    from nbdist.notebook.notebook import NOTEBOOK

    return NOTEBOOK.session


def bench(
    ops: str | Sequence[str] | None = None,
    sizes: str | Sequence[int] | None = None,
    *,
    limit_s: float = 10.0,
    save: str | Path | None = None,
) -> View:
    """Measure the bandwidth of collectives between the running ranks; the same as %dist_bench.

    `session().bench` returns the numbers, and `session().bandwidth.model` the time of a message.

    Args:
        ops: "all_reduce,all_gather", or a list; default: all.
        sizes: "4M", "1K,1M" or "1K:1G", or a list of bytes.
        limit_s: Time limit in seconds; sizes that do not fit in are left out.
        save: A file to write the measurement to, as JSON.

    Raises:
        NotRunning: If there are no ranks.
        OptionError: If an operation or size does not exist, or the file must not be written.
    """
    from nbdist.bandwidth.view import bench as shown_bench
    from nbdist.commands.bandwidth import measure

    return shown_bench(measure(ops, sizes, limit_s, save, lambda _text: None))


def plan(  # noqa: PLR0913  # the options of %dist_plan, by name
    model: Any,
    *,
    strategy: str | None = None,
    ranks: int | None = None,
    gpu: str | None = None,
    memory: str | None = None,
    batch: int = 1,
    seq: int = 2048,
    optimizer: str | None = None,
    recipe: str | None = None,
    samples: int = 0,
    imbalance: float = 1.0,
    engine: str | None = None,
    inputs: str = "",
    network: float | None = None,
    price: float | None = None,
    tokens: float | None = None,
    copies: bool = False,
    search: bool = False,
    nodes: int | None = None,
    keep_free: str | None = None,
    lora: int | None = None,
    targets: str | Sequence[str] | None = None,
    quant: str | None = None,
    **strategy_options: object,
) -> PlanView:
    """Say whether a model will fit, under which strategy; the same as %dist_plan.

    It needs no ranks, and without engine="fake" no torch. `.plan` has the numbers in bytes and
    seconds, `.advice` what to choose.

    Args:
        model: Its number of parameters (7e9, "7B"), a name, the path of a config.json, or a
            transformers config or model of the notebook; where ranks run, also the name of a
            variable there that is a model.
        strategy: A single strategy; default: a row for each.
        ranks: Number of ranks; default: the running ranks, or 8.
        gpu: A name of the catalogue; default: the GPU of the running ranks, or h100.
        memory: Of a device that is not in the catalogue, such as "24GB".
        batch: Samples that a data-parallel rank computes at once.
        seq: Tokens of each.
        optimizer: adamw (the default), sgd and others; of a model on the ranks its own.
        recipe: What is stored for a parameter: "fp32", "autocast", "mixed" or "bf16".
        samples: The effective batch of all ranks; sets accumulate.
        imbalance: Rows of the rank that gets most of those that share experts, by their mean.
        engine: "formulas", or "fake": a step with fake tensors in a process of its own.
        inputs: A variable on the ranks that a model there is called with.
        network: GB/s that a host can send to others; default: what such hosts commonly have.
        price: Of one GPU for an hour; adds what training costs.
        tokens: To train on; adds the GPU-hours.
        copies: dp beside tp or pp keeps whole copies, as Megatron does; nbdist shards there.
        search: All configurations, the fastest that fit first, instead of a row for each strategy.
        nodes: Hosts of the ranks; default: 8 ranks on each, or those running.
        keep_free: The part of each device's memory that has to stay free: "10%" (default: "20%").
        lora: The rank r of LoRA's adapters, beside which all is frozen.
        targets: The layers with adapters; default: PEFT's, "q_proj,v_proj" mostly.
        quant: How the frozen linear layers are stored: "4bit" or "4bit-double".
        strategy_options: Degrees and options: tp=2, bf16=True, checkpoint="full".

    Raises:
        OptionError: If a word does not exist, or degrees do not fit.
    """
    from nbdist.commands.plan import make_plan
    from nbdist.planner.request import PlanRequest

    request = PlanRequest(
        strategy=strategy, ranks=ranks, gpu=gpu, memory=memory, batch=batch, sequence=seq,
        optimizer=optimizer, recipe=recipe, samples=samples, imbalance=imbalance, engine=engine,
        inputs=inputs, network=network, price=price, tokens=tokens, copies=copies,
        is_search=search, nodes=nodes, keep_free=keep_free, lora=lora, targets=targets, quant=quant,
    )  # fmt: skip
    return make_plan(model, request, strategy_options)


def doctor(*, clean: bool = False, topology: bool = False) -> View:
    """Say whether ranks can work on this machine, and what to do; the same as %dist_doctor.

    Args:
        clean: First end and remove what dead runs of this user have left.
        topology: Hosts, GPUs and the links between them instead.

    Raises:
        OptionError: If both are asked for.
    """
    from nbdist.commands.doctor import examine

    return examine(is_cleaning=clean, has_topology=topology)


def compare(strategies: Sequence[str], code: str) -> View:
    """Run the same steps under several strategies and say what each took; as %dist_compare.

    Args:
        strategies: As typed: ["ddp", "fsdp --bf16", "tp"].
        code: Source as in a distributed cell; it runs twice under each.

    Returns:
        A table with a picture, to be shown.

    Raises:
        OptionError: If a strategy does not exist, or there is no code.
        DistributedError: If the code fails; the strategy and state of before are back.
    """
    from nbdist.commands.compare import compare_strategies

    return compare_strategies(strategies, code)


def export(  # noqa: PLR0913  # the options of %dist_export, by name
    notebook: str | Path | None,
    script: str | Path,
    *,
    slurm: str | Path | None = None,
    accelerate: str | Path | None = None,
    ranks: int | None = None,
    nodes: int | None = None,
    device: str | None = None,
    is_forced: bool = False,
) -> View:
    """Write a notebook's distributed cells as one script; the same as %dist_export.

    It needs no ranks, and runs nothing of the notebook. The script runs without nbdist where
    Accelerate trains as the notebook does; its first lines say so, or why it needs nbdist.

    Args:
        notebook: Its file; None for the notebook that runs this, "history" for the cells that
            have run in this kernel.
        script: The file to write.
        slurm: A batch script for Slurm to write as well.
        accelerate: A configuration for `accelerate launch` to write as well.
        ranks: How many it is started on; default: as in the notebook.
        nodes: How many hosts; default: as in the notebook.
        device: "gpu" or "cpu"; default: as the ranks here, and gpu without ranks.
        is_forced: Replace files that exist.

    Returns:
        What was taken, and what was left out and why, to be shown.

    Raises:
        OptionError: If a file cannot be read or written, or no cell can be taken.
    """
    from nbdist.commands.export import ExportRequest, write_script

    request = ExportRequest(
        script, notebook, slurm=slurm, accelerate=accelerate, ranks=ranks, nodes=nodes,
        device=device, is_forced=is_forced,
    )  # fmt: skip
    return write_script(request)


def check_config(  # the options of %dist_config, by name
    file: str | Path,
    *,
    ranks: int | None = None,
    beside: str | Path | None = None,
    write: str | Path | None = None,
    is_forced: bool = False,
    **degrees: int,
) -> CheckView:
    """Say what is wrong with a configuration of Accelerate or DeepSpeed; as %dist_config FILE.

    It needs no ranks. `.checked` has the findings, and is true if the file can run.

    Args:
        file: Its YAML or JSON.
        ranks: Number of ranks; default: the running ranks, or what the file says.
        beside: Another file that counts together with it.
        write: Where to write it corrected.
        is_forced: Replace that file if it exists.
        degrees: tp=8, pp=4: ranks that see the same data do not count in the batch.

    Raises:
        OptionError: If a file cannot be read or written, or is neither YAML nor JSON.
    """
    from nbdist.commands.config import around_of, check_file

    others = [] if beside is None else [beside]
    return check_file(file, around_of(ranks, degrees), others, write, is_forced=is_forced)


def step() -> None:
    """End a training step of a recorded cell here, where no `optimizer.step()` does.

    For %%dist_profile and %%dist_memory. On any rank, at any time; it does nothing where no cell
    is being recorded. From the first call on, optimizers no longer end the steps of that cell.
    """
    recorded = sys.modules.get("nbdist.recording.rank.cell_hook")  # a rank has it
    if recorded is not None:
        recorded.step()


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics (`%load_ext nbdist`), import for ranks aside, and say what is kept."""
    from nbdist.cluster.kernel import rank_server

    rank_server.preload()  # it imports torch while this process imports the verbs

    from nbdist.commands.cluster import tell_kept
    from nbdist.frontend import magics

    magics.register(shell)
    tell_kept()


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take the routing of cells away; running ranks go on."""
    from nbdist.frontend import magics

    magics.unregister(shell)


def __getattr__(name: str) -> Any:
    """`from nbdist import Accelerator`: Accelerate's, under the strategy that was chosen.

    `nbdist.join("fsdp", tp=2)` makes a process of torchrun a rank, in a script without a notebook.
    Loaded when they are asked for: they need torch, which the notebook's own process never loads.
    """
    if name == "join":
        from nbdist.engine.torchrun import join

        return join
    if name == "Accelerator":
        from nbdist.parallel.accelerator.accelerator import Accelerator

        return Accelerator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
