"""Ranks of a script that torchrun has started: without a notebook and IPython.

`%dist_export` writes such scripts where only nbdist has what the notebook trained with. The
strategy, its switch and checkpoints are those of a notebook's ranks.
"""

from __future__ import annotations

import os
import uuid
from dataclasses import replace

import torch
import torch.distributed as dist

from nbdist.checkpoint import folder
from nbdist.checkpoint.rank import jobs
from nbdist.checkpoint.rank import load as checkpoint_load
from nbdist.checkpoint.rank import save as checkpoint_save
from nbdist.checkpoint.rank.export_weights import export_weights
from nbdist.checkpoint.results import FAILED, Loaded, Saved
from nbdist.checkpoint.safetensors import ExportedWeights
from nbdist.core import topology
from nbdist.core.rank import Rank, has_joined, joined, this_rank
from nbdist.engine import facts, host_staging, partial_state
from nbdist.errors import CheckpointError, StartError
from nbdist.parallel.accelerator import torch_clip, torch_grad
from nbdist.parallel.accelerator.accelerator import LazyAccelerator
from nbdist.parallel.base.consensus import all_gather_object, all_or_none, default_store
from nbdist.parallel.live import registry
from nbdist.strategy.choice import described
from nbdist.strategy.choose import StrategySpec
from nbdist.switch.rank import switch as rank_switch
from nbdist.switch.report import RankSwitchReport


class ScriptRank:
    """A rank of a script: what a notebook's session does with all ranks, each rank does here.

    Every method is collective: all ranks call it, with the same arguments. Rank 0 prints a line.

    Attributes:
        accelerator: The same as in a notebook's cells; it sets itself up at its first use.
    """

    def __init__(self) -> None:
        self.accelerator = LazyAccelerator()
        self._token = ""  # of a save that goes on

    def switch(self, strategy: str | None, /, **options: object) -> RankSwitchReport:
        """Put the live models under another strategy, or choose it for those to come.

        Raises:
            OptionError: It does not exist, or cannot be had here; nothing was changed.
            NbdistError: It failed on another rank; nothing was changed.
        """
        choice = StrategySpec(strategy, tuple(options.items())).on(this_rank().topology)
        report = rank_switch.switch(choice)
        _tell(f"switched to {described(report.after)}", *report.stale, *report.notes)
        return report

    def save(
        self,
        path: str | os.PathLike[str],
        *,
        asynchronous: bool = False,
        adapters_only: bool = False,
    ) -> None:
        """Save models, optimizers and training state as %dist_save does, for %dist_load too.

        Args:
            path: A folder that all ranks see; a checkpoint that is there is replaced.
            asynchronous: Go on training while it is written; `wait`, and the next save or load,
                wait for its end. Call `wait` at the end of the script.
            adapters_only: Save the adapters of PEFT alone, not whole models.

        Raises:
            CheckpointError, NbdistError: It cannot be saved; what was there is unchanged.
        """
        self.wait()
        target = str(folder.resolve(path))
        token = all_gather_object(uuid.uuid4().hex)[0]
        checkpoint_save.begin(target, token, asynchronous, adapters_only)
        self._token = token
        if not asynchronous:
            self.wait()

    def wait(self) -> None:
        """Wait for a save that goes on beside training.

        Raises:
            CheckpointError, NbdistError: It has failed; what was at its path is unchanged.
        """
        token, self._token = self._token, ""
        if token:
            [saved, *_] = all_or_none("The save", lambda: _end_of(token))
            assert saved is not None
            _tell(f"{saved.path} saved at step {saved.step}")

    def load(self, path: str | os.PathLike[str], *, models_only: bool = False) -> Loaded:
        """Load a checkpoint of %dist_save or of `save` into all that is prepared.

        Saved on any number of ranks, under any strategy.

        Raises:
            CheckpointError, NbdistError: There is none, or it does not fit; nothing was changed.
        """
        self.wait()
        loaded = checkpoint_load.load(str(folder.resolve(path)), models_only)
        _tell(f"{loaded.path} loaded at step {loaded.step}", *loaded.notes)
        return loaded

    def export_weights(
        self,
        path: str | os.PathLike[str],
        model: str = "",
        *,
        is_merged: bool = False,
        adapter: str = "",
    ) -> ExportedWeights:
        """Write a model's weights alone, as %dist_save --export does.

        Raises:
            OptionError, CheckpointError, NbdistError: As checkpoint.rank.export_weights.
        """
        written = export_weights(model, str(folder.resolve(path)), is_merged, adapter)
        _tell(f"{written.path} written: the weights of {written.model}")
        return written


def join(strategy: str | None = None, /, **options: object) -> ScriptRank:
    """Take this process for a rank, and choose how its models are trained. Collective.

    Every process of the group calls it once, with the same arguments, after
    `init_process_group` and, on GPUs, `torch.cuda.set_device`. In a notebook's rank it is a switch.

    Args:
        strategy: A strategy of %dist_strategy; default: ddp, or what the degrees say.
        options: The strategy's degrees and options: tp=2, bf16=True, checkpoint="full".

    Raises:
        StartError: There is no process group, or its ranks do not lie side by side on each host.
        OptionError: The strategy does not exist, or does not fit these ranks.
    """
    if not dist.is_initialized():
        raise StartError(
            "There is no process group. Call torch.distributed.init_process_group() before "
            "nbdist.join(), in a script that torchrun starts."
        )
    spec = StrategySpec.parse(strategy, options) or StrategySpec("ddp")
    if has_joined():
        rank_switch.switch(spec.on(this_rank().topology))
        return ScriptRank()
    plan = _become_rank()
    registry.set_choice(spec.on(plan))
    return ScriptRank()


def _become_rank() -> topology.Topology:
    """Find this rank's place among all processes of the group. Collective."""
    report = facts.describe(dist.get_rank())
    if os.environ.get("ACCELERATE_USE_CPU", "").lower() in {"1", "true"}:
        report = replace(report, gpus=())
    plan = topology.plan(all_gather_object(report), threads=torch.get_num_threads())
    rank = plan.rank_of_engine(report.engine_id)
    if rank != report.engine_id:
        hosts = ", ".join(place.host for place in plan.ranks)
        raise StartError(
            f"Rank {report.engine_id} would be rank {rank} by its host: ranks of a host have to "
            f"follow each other, as torchrun numbers them; theirs are {hosts}."
        )
    place = plan.ranks[rank]
    joined(Rank(place, plan, default_store()))
    backend, is_on_gpu = dist.get_backend(), place.device != "cpu"
    partial_state.install(torch.device(place.device).type, backend)
    if is_on_gpu:
        host_staging.install()
    if is_on_gpu and backend == "gloo":
        host_staging.replace_functional_collectives()
    torch_clip.install()
    torch_grad.install()
    return plan


def _end_of(token: str) -> Saved | None:
    """Return the saved content once this rank has done its part; on rank 0, once it is in place."""
    saving = jobs.wait(token)
    if saving.state == FAILED:
        raise CheckpointError(f"The checkpoint was not saved: {saving.failure}.")
    return saving.saved


def _tell(*lines: str) -> None:
    if dist.get_rank() == 0:
        print(*lines, sep="\n", flush=True)  # noqa: T201  # for the job's output
