"""Expert parallelism: each rank has some of the experts of each layer.

The ranks that share experts see different data: each routes its own tokens, sends them to the
ranks that have their experts, and gets back what these have made of them. All else lies as without
it, under DDP or FSDP2.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.tensor import Shard

from nbdist.errors import OptionError
from nbdist.parallel.base.foreach_by_mesh import step_by_mesh
from nbdist.parallel.base.transform import Layouts, ModelBuild, Transform
from nbdist.parallel.ep.dispatch import ExpertGroup, dispatch
from nbdist.parallel.ep.experts import LayerExperts, find_experts
from nbdist.parallel.tp.attention import split_parameter
from nbdist.strategy.choice import Degrees
from nbdist.strategy.degrees import divisors
from nbdist.strategy.options import listed

# Where DDP looks for parameters that it leaves alone.
_IGNORED = "_ddp_params_and_buffers_to_ignore"


def _plan(job: ModelBuild, layouts: Layouts) -> Layouts:
    """Find the experts; each of their parameters is split along its first dim."""
    experts = find_experts(job.base)
    for name, layer in experts.items():
        _refuse_uneven(name, layer, job.mesh.degrees)
    names = _parameter_names(job.base, experts)
    missing = [name for name in names if name not in layouts]
    if missing:
        raise OptionError(f"{missing[0]} is tied to another parameter, which ep does not share.")
    job.step_data["ep"] = experts
    return {
        name: replace(layout, ep_dim=0) if name in names else layout
        for name, layout in layouts.items()
    }


def _lay_out(job: ModelBuild) -> None:
    """Make meta DTensors of the experts, and let their forward be the exchange around their own."""
    experts: dict[str, LayerExperts] = job.step_data["ep"]
    meshes = job.mesh.expert_mesh
    assert meshes is not None
    names = meshes.mesh_dim_names or ()
    mesh = meshes["ep"] if len(names) > 1 else meshes
    # FSDP2 averages over them by itself.
    averages_here = "edp" in names and job.mesh.degrees.dp_shard == 1
    copies = meshes["edp"].get_group() if averages_here else None
    for name, layer in experts.items():
        module = job.base.get_submodule(name)
        for key, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, split_parameter(parameter, mesh, Shard(0)))
        attributes = vars(module)
        attributes.update(dict.fromkeys(layer.counts, layer.count // job.mesh.degrees.ep))
        inner = attributes.get("forward") or functools.partial(type(module).forward, module)
        group = ExpertGroup(mesh.get_group(), copies, layer.count, name)
        forward: Any = functools.partial(dispatch, module, inner, group)
        module.forward = functools.update_wrapper(forward, type(module).forward)
    step_by_mesh()


def _wrap(job: ModelBuild, outer: torch.nn.Module) -> torch.nn.Module:
    vars(outer)[_IGNORED] = _parameter_names(job.base, job.step_data["ep"])
    return outer


def _parameter_names(base: torch.nn.Module, experts: dict[str, LayerExperts]) -> list[str]:
    """The experts' parameters, by name in the model."""
    return [
        f"{name}.{key}"
        for name in experts
        for key, _ in base.get_submodule(name).named_parameters()
    ]


def _refuse_uneven(name: str, layer: LayerExperts, degrees: Degrees) -> None:
    if layer.count % degrees.ep == 0:
        return
    fitting = [n for n in divisors(layer.count)[1:] if degrees.dp % n == 0]
    use = f"--ep {listed(fitting, 'or')}, or fsdp" if fitting else "fsdp"
    raise OptionError(
        f"{degrees.ep} ranks cannot share the {layer.count} experts of {name} evenly. Use {use}."
    )


STEP = Transform(_plan, _lay_out, _wrap)
