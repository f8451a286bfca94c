"""DeepSpeed's ZeRO: an engine that takes model and optimizer over, and what is asked of it.

    engine, optimizer = prepare(model, optimizer, choice, mesh, device)
    for batch in loader:
        with contextlib.nullcontext() if is_last else no_sync(engine):
            backward(engine, engine(batch))
        if is_last:
            clip(engine, 1.0)       # or not
            step(engine)            # gradients are cleared, too

The package is imported when a model is prepared: it looks for devices at once.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import importlib.util
import io
import logging
import os
import shutil
import sysconfig
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
import torch.distributed as dist

from nbdist.errors import OptionError
from nbdist.parallel.base.mesh import ParallelMesh
from nbdist.parallel.base.precision import DTYPES, to_fp32
from nbdist.parallel.base.transform import Layouts, ModelBuild, Transform
from nbdist.strategy.choice import Options, Strategy

_INSTALL = (
    "DeepSpeed is not installed on this rank. Install it where the ranks run: pip install "
    "'nbdist[deepspeed]'; without a GPU: DS_BUILD_OPS=0 DS_ACCELERATOR=cpu pip install "
    "--no-build-isolation deepspeed. Or use zero1 (stage 1) or fsdp (stage 3)"
)
_LIBAIO = (
    "--offload nvme needs the library libaio with its headers, which DeepSpeed compiles its "
    "reader with (Debian: apt-get install libaio-dev; Fedora: libaio-devel). Or use --offload cpu"
)
# Where stage 3 keeps what it moves to NVMe: a folder on such a disk. TMPDIR where unset.
_NVME_FOLDER = "NBDIST_NVME_DIR"


def prepare(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    choice: Strategy,
    mesh: ParallelMesh,
    device: torch.device,
) -> tuple[Any, torch.optim.Optimizer]:
    """Let DeepSpeed take a model and its optimizer over. Collective: every rank.

    Rank 0's values go to all. With --bf16 or --fp16 parameters are in that dtype and DeepSpeed
    keeps a copy in fp32; what forward returns is fp32 again. The first call on a machine may
    compile parts of DeepSpeed for a minute.

    Args:
        model: The user's; stays inside as `engine.module`.
        optimizer: Of torch, over all parameters of the model that are trained.
        choice: Strategy deepspeed with its options stage, offload, precision, accumulate.
        mesh: The mesh of the strategy, which has dp_replicate only.
        device: Of this rank.

    Returns:
        What is called in the model's place, and the optimizer itself: its groups hold
        DeepSpeed's own flat parameters now, and `step` steps it, so that a scheduler that
        changes learning rates in the groups works on.

    Raises:
        OptionError: If DeepSpeed, a compiler or libaio is missing, or the CPU cannot do fp16.
    """
    refuse(choice.options, device)
    assert mesh.degrees.dp == choice.world_size, mesh.degrees
    package = _package(device)
    refuse_op(package, choice.options, device)
    for tensor in (*model.parameters(), *model.buffers()):
        dist.broadcast(tensor.detach(), 0)
    model.to(device)
    settings = config(choice)
    with contextlib.redirect_stdout(io.StringIO()):  # it says what it has compiled
        engine, *_ = package.initialize(model=model, optimizer=optimizer, config=settings)
    dtype = DTYPES.get(choice.options.precision)
    if dtype is not None:
        _cast(engine, dtype)
    return engine, optimizer


def config(choice: Strategy) -> dict[str, Any]:
    """DeepSpeed's settings for a choice. Those that would change numbers are set to nothing."""
    options = choice.options
    zero: dict[str, Any] = {"stage": options.stage}
    if options.offload:
        where: dict[str, Any] = {"device": options.offload, "pin_memory": False}
        if options.offload == "nvme":
            where["nvme_path"] = os.environ.get(_NVME_FOLDER) or tempfile.gettempdir()
        zero["offload_optimizer"] = where
        if options.stage == 3:
            zero["offload_param"] = where
    settings: dict[str, Any] = {
        # Only its own reports use it, and it does not start without.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": options.accumulate,
        "zero_optimization": zero,
        # The user's optimizer is torch's, and stays so where state is offloaded.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        # It clips to 1.0 unless it is told otherwise.
        "gradient_clipping": 0.0,
        "steps_per_print": None,
    }
    if options.precision in DTYPES:
        settings[options.precision] = {"enabled": True}
    return settings


def backward(engine: Any, loss: torch.Tensor) -> None:
    """Compute gradients of a loss and, outside of `no_sync`, their mean over the ranks.

    They add up until `step`. The loss is taken as it is: with accumulation the caller divides
    it. Collective in stages 2 and 3, and outside of `no_sync`.
    """
    engine.backward(loss, scale_wrt_gas=False)


@contextlib.contextmanager
def no_sync(engine: Any) -> Iterator[None]:
    """Inside it, a backward is not the last one before the step.

    Stage 1 reduces nothing there; stages 2 and 3 have no room for whole gradients and reduce
    each time (DeepSpeed's own no_sync refuses them).

    Raises:
        OptionError: If gradients are offloaded and the choice was made without --accumulate.
    """
    is_offloaded = bool(engine.zero_cpu_offload()) or bool(engine.zero_offload_param())
    if is_offloaded and engine.gradient_accumulation_steps() == 1:
        raise OptionError(
            "DeepSpeed with --offload accumulates gradients only if that is set from the start. "
            "Choose the strategy with --accumulate 2 or more"
        )
    engine.set_gradient_accumulation_boundary(is_boundary=False)
    try:
        yield
    finally:
        engine.set_gradient_accumulation_boundary(is_boundary=True)


def clip(engine: Any, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Let the next `step` scale gradients down to a norm; returns their norm before.

    Collective: every rank, after the last backward.

    Raises:
        OptionError: If the norm is another than 2, which DeepSpeed does not have.
    """
    if norm_type != 2:
        raise OptionError(
            f"DeepSpeed clips by the 2-norm of all gradients, not the {norm_type}-norm. Leave "
            "norm_type out, or use fsdp"
        )
    engine.optimizer.clip_grad = float(max_norm)
    utils = importlib.import_module("deepspeed.utils")
    # Stage 3 keeps a part of each gradient on each rank, the others can put each together.
    is_local = engine.zero_optimization_partition_weights()
    grad_of = utils.safe_get_local_grad if is_local else utils.safe_get_full_grad
    total = torch.zeros((), dtype=torch.float64, device=engine.device)
    for parameter in engine.module.parameters():
        if not parameter.requires_grad:
            continue
        grad = grad_of(parameter)
        if grad is not None:
            total += grad.to(engine.device, torch.float64).square().sum()
    if is_local:
        dist.all_reduce(total)
    scale = getattr(engine.optimizer, "loss_scale", 1.0)
    return (total.sqrt() / scale).float()


def step(engine: Any) -> bool:
    """Step the optimizer and clear the gradients. Collective: every rank.

    Returns:
        Whether parameters have changed: not where fp16 gradients overflowed on any rank.
    """
    engine.step()
    engine.optimizer.clip_grad = 0.0
    return not getattr(engine.optimizer, "overflow", False)


def full_state(engine: Any) -> dict[str, torch.Tensor]:
    """Every parameter, whole and in fp32, and every buffer, on each rank's CPU. Collective.

    The optimizer's state is not among it: with several groups DeepSpeed loses track of whose it
    is (its 0.19). Its own `engine.save_checkpoint` has it, for as many ranks and this stage.
    """
    fp32_of = importlib.import_module("deepspeed.utils").safe_get_full_fp32_param
    state = {}
    for name, parameter in engine.module.named_parameters():
        with _gather_parameter(engine, parameter):
            value = fp32_of(parameter) if parameter.requires_grad else None
            value = parameter.detach() if value is None else value
            state[name] = value.to("cpu", torch.float32, copy=True)
    buffers = engine.module.named_buffers()
    return state | {name: buffer.detach().cpu().clone() for name, buffer in buffers}


def load_full(engine: Any, state: Mapping[str, torch.Tensor]) -> None:
    """Give parameters and buffers values of `full_state`, on every rank the same.

    What is not among them stays, and so does the optimizer's state. Collective: every rank.
    """
    set_fp32 = importlib.import_module("deepspeed.utils").safe_set_full_fp32_param
    for name, parameter in engine.module.named_parameters():
        if name not in state:
            continue
        value = state[name].to(engine.device)
        with _gather_parameter(engine, parameter, is_changed=True), torch.no_grad():
            parameter.copy_(value)
        if parameter.requires_grad:
            set_fp32(parameter, value)
    for name, buffer in engine.module.named_buffers():
        if name in state:
            buffer.copy_(state[name])


def refuse(options: Options, device: torch.device) -> None:
    """Refuse what needs no import of DeepSpeed to know.

    Raises:
        OptionError: If DeepSpeed or a compiler is missing, or options do not go together.
    """
    if importlib.util.find_spec("deepspeed") is None:
        raise OptionError(_INSTALL)
    if options.stage not in (1, 2, 3):
        raise OptionError(f"DeepSpeed has no stage {options.stage}. Use --stage 1, 2 or 3")
    if options.offload == "nvme" and options.stage != 3:
        raise OptionError(
            f"DeepSpeed moves to NVMe in stage 3 only, not in {options.stage}. Use --stage 3, or "
            "--offload cpu"
        )
    if device.type == "cpu" and not (shutil.which("g++") or os.environ.get("CXX")):
        raise OptionError(
            "DeepSpeed compiles a part of itself on the CPU, and there is no C++ compiler. "
            "Install g++, or use zero1 or fsdp"
        )


def refuse_op(package: ModuleType, options: Options, device: torch.device) -> None:
    """Raises an OptionError for what DeepSpeed says that it cannot do here: NVMe, fp16."""
    accelerator = package.accelerator.get_accelerator()
    if options.offload == "nvme":
        builder = accelerator.create_op_builder("AsyncIOBuilder")
        if builder is None or not builder.is_compatible(verbose=False):
            raise OptionError(_LIBAIO)
    if options.precision == "fp16" and not accelerator.is_fp16_supported():
        raise OptionError(f"DeepSpeed has no fp16 on this {device.type}. Use --bf16, or fsdp")


def _package(device: torch.device) -> ModuleType:
    """DeepSpeed, for this device, with what it compiles compiled."""
    if device.type == "cpu":
        # It would take a GPU that is there; and it is asked at the import.
        os.environ.setdefault("DS_ACCELERATOR", "cpu")
    os.environ.setdefault("LOCAL_RANK", str(device.index or 0))
    scripts = sysconfig.get_path("scripts")
    if scripts not in os.environ["PATH"].split(os.pathsep):  # ninja is there
        os.environ["PATH"] += os.pathsep + scripts
    package = importlib.import_module("deepspeed")
    # It tells of every step of its start.
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":
        _compile_op(package)
    return package


def _compile_op(package: ModuleType) -> None:
    """Compile and load what DeepSpeed sends with on CPUs, one rank of a machine at a time.

    torch marks a folder in which it compiles with a file, which stays when it is killed, and
    every later start waits for it for ever. Here a lock that ends with its process says who
    compiles, so that any mark found by its owner is a left one. The folder is nbdist's own,
    where the user has not set TORCH_EXTENSIONS_DIR.
    """
    cache = os.environ.get("XDG_CACHE_HOME") or Path("~/.cache").expanduser()
    default = Path(cache) / "nbdist" / f"torch-{torch.__version__}"
    folder = Path(os.environ.setdefault("TORCH_EXTENSIONS_DIR", str(default)))
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / "nbdist.lock").open("w") as lock, contextlib.redirect_stdout(io.StringIO()):
        fcntl.flock(lock, fcntl.LOCK_EX)
        for mark in folder.glob("*/lock"):
            mark.unlink()
        builder = package.accelerator.get_accelerator().create_op_builder("ShareMemCommBuilder")
        if builder is not None and builder.is_compatible(verbose=False):
            builder.load(verbose=False)


def _gather_parameter(
    engine: Any, parameter: torch.nn.Parameter, *, is_changed: bool = False
) -> Any:
    """A context in which a parameter is whole on this rank: stage 3 has a part of it.

    If it is changed inside, rank 0's is taken.
    """
    zero = importlib.import_module("deepspeed").zero
    is_split = engine.zero_optimization_partition_weights()
    return zero.GatheredParameters([parameter], 0 if is_changed else None, enabled=is_split)


def _cast(engine: Any, dtype: torch.dtype) -> None:
    """Floating arguments arrive in the parameters' dtype; what forward returns is fp32."""

    def lower(value: Any) -> Any:
        is_float = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(dtype) if is_float else value

    def before(_module: Any, args: Any, kwargs: Any) -> Any:
        return tuple(map(lower, args)), {name: lower(value) for name, value in kwargs.items()}

    def after(_module: Any, _args: Any, output: Any) -> Any:
        return to_fp32(output)

    engine.register_forward_pre_hook(before, with_kwargs=True)
    engine.register_forward_hook(after)


def _plan(job: ModelBuild, layouts: Layouts) -> Layouts:
    """Changes no layout: DeepSpeed splits what it is given in `prepare`, with the optimizer."""
    refuse(job.choice.options, job.device)
    return layouts


STEP = Transform(plan=_plan)
