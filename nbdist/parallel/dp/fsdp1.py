"""The older FSDP: a block's parameters are one flat parameter, split over the ranks.

For the lesson, and for code that still uses it. `fsdp` replaces it: a flat parameter has no
layout of its own, so a live model can be switched neither to FSDP1 nor from it.
"""

from __future__ import annotations

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import CustomPolicy

from nbdist.errors import OptionError
from nbdist.parallel.base.precision import DTYPES
from nbdist.parallel.base.transform import Layouts, ModelBuild, Transform
from nbdist.parallel.dp.fsdp import cast_norm_inputs, check_parameters, units_of

_STRATEGIES = {
    "full": ShardingStrategy.FULL_SHARD,
    "grad-op": ShardingStrategy.SHARD_GRAD_OP,
    "hybrid": ShardingStrategy.HYBRID_SHARD,
}


def _plan(job: ModelBuild, layouts: Layouts) -> Layouts:
    """Every parameter is whole on each rank until FSDP1 splits it, with its own names."""
    if job.choice.options.offload:
        raise OptionError(
            f"fsdp1 does not support --offload {job.choice.options.offload}. Use fsdp."
        )
    check_parameters(job)
    return layouts


def _wrap(job: ModelBuild, outer: torch.nn.Module) -> torch.nn.Module:
    """FSDP1 around the model and around each block, which it puts in the block's place.

    The user's optimizer keeps its parameters: they become views of this rank's piece.
    """
    options = job.choice.options
    units = set(units_of(job))
    policy = None
    if options.precision in DTYPES:  # batch norms are left fp32 by FSDP1 itself
        cast_norm_inputs(job.root, job.device)
        policy = MixedPrecision(DTYPES[options.precision], reduce_dtype=torch.float32)
    axes = ("dp_replicate", "dp_shard") if options.shard == "hybrid" else ("dp_shard",)
    return FullyShardedDataParallel(
        outer,
        device_mesh=job.mesh.submesh(*axes),
        sharding_strategy=_STRATEGIES[options.shard],
        auto_wrap_policy=CustomPolicy(lambda module: module in units),
        mixed_precision=policy,
        # Without it FSDP1 takes "cpu:0" for the CPU and refuses parameters on "cpu".
        device_id=job.device,
        use_orig_params=True,
    )


STEP = Transform(plan=_plan, wrap=_wrap)
