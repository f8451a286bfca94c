"""Has what is installed the private names that docs/private_names.md lists.

The first thing to run with a new release of torch, accelerate, ipyparallel or ipykernel: it takes
seconds, and names what is gone. What a name does is tested where it is used.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

PAGE = Path(__file__).parents[1] / "docs" / "private_names.md"

# Where a name is -> names. An attribute counts, and for what objects get the text of the module.
NAMES = {
    "ipyparallel.client.client:Client": (
        "_send", "_engines", "_mux_stream", "_control_stream", "_query_stream", "_iopub_stream",
        "_registration_callbacks", "_io_loop", "_dispatch_iopub",
    ),
    "ipyparallel.cluster.launcher:BatchSystemLauncher": ("_run_command",),
    "ipyparallel.cluster.launcher:LocalProcessLauncher": ("_start_waiting",),
    "ipyparallel.controller.app:IPController": ("next_port", "construct_url"),
    "ipyparallel.controller.heartmonitor:HeartMonitor": (),
    "zmq.devices.monitoredqueuedevice:monitored_queue": (),
    "zmq:Context": ("_instance",),
    "nbval.plugin:IPyNbFile": (),
    "nbval.plugin:IPyNbCell": ("compare_outputs", "sanitize"),
    "nbval.plugin": ("skip_compare",),
    "ipykernel.kernelbase:Kernel": ("control_handlers", "do_execute", "raw_input", "getpass"),
    "ipykernel.kernelapp": ("shell_channel_thread",),
    "ipykernel.comm.comm:BaseComm": ("_reply_subshell_for",),
    "ipykernel.iostream:IOPubThread": ("socket",),
    "ipykernel.iostream:OutStream": (
        "_buffer_lock", "_buffers", "_flush", "_flush_pending", "_should_watch",
    ),
    "IPython.core.compilerop:CachingCompiler": ("_filename_map", "get_code_name"),
    "IPython.core.interactiveshell:InteractiveShell": ("run_code",),
    "IPython.core.inputtransformer2:TransformerManager": ("check_complete",),
    "ipykernel.zmqshell:ZMQInteractiveShell": ("ask_exit",),
    "torch.distributed.distributed_c10d": (
        "_world", "_get_default_store", "_new_group_with_tag", "_new_process_group_helper",
        "_resolve_process_group", "_create_process_group_wrapper", "_process_group_name",
    ),
    "torch.distributed:ProcessGroup": (
        "_register_backend", "_backend_id", "_set_group_name", "_get_backend",
        "_set_default_backend", "recv_anysource", "send", "recv", "allreduce_coalesced",
        "allgather_coalesced",
    ),
    "torch.distributed:Work": ("wait", "get_future"),
    "torch.utils.checkpoint:CheckpointFunction": ("forward",),
    "torch.utils.checkpoint": ("_checkpoint_without_reentrant_generator",),
    "torch.distributed:ProcessGroupGloo": ("create_device", "_Options"),
    "torch.distributed.device_mesh:DeviceMesh": (
        "_get_root_mesh", "_init_backend", "_mesh_dim_names",
    ),
    "torch._C._distributed_c10d": ("_dump_fr_trace", "_register_work"),
    "torch.ops._c10d_functional:wait_tensor": (),
    "torch.nn.parallel:DistributedDataParallel": (
        "_get_ddp_logging_data", "_ddp_params_and_buffers_to_ignore",
    ),
    "torch._C._distributed_c10d:Reducer": ("_reset_state",),
    "torch.distributed.fsdp:FSDPModule": ("_get_fsdp_state",),
    "torch.distributed._composable_state": ("_module_state_mapping",),
    "torch.distributed.tensor.parallel:ParallelStyle": ("_apply",),
    "torch.utils.data.dataloader": ("_MultiProcessingDataLoaderIter", "_BaseDataLoaderIter"),
    "torch.utils.data.dataloader:_BaseDataLoaderIter": (
        "__next__", "_num_yielded", "_index_sampler", "_dataset", "_num_workers",
    ),
    "torch.utils.data._utils.signal_handling": ("_remove_worker_pids",),
    "torch._C": ("_current_graph_task_id", "_disabled_torch_function_impl"),
    "torch._C:_autograd": ("SavedTensor",),
    "torch.cuda": ("_is_in_bad_fork",),
    "torch.cuda.memory": ("_record_memory_history", "_snapshot"),
    "torch.cuda:CUDAGraph": ("capture_begin", "capture_end"),
    "torch.autograd": ("_profiler_enabled",),
    "torch.nn:Module": ("_parameters", "_buffers", "_modules", "_forward_hooks"),
    "torch:Tensor": ("_backward_hooks", "_post_accumulate_grad_hooks"),
    "torch.optim:Optimizer": ("_group_tensors_by_device_and_dtype", "hooked"),
    "torch": ("_foreach_norm", "_foreach_mul_", "_dynamo"),
    "torch.ops.aten": (
        "_scaled_dot_product_efficient_attention", "_scaled_dot_product_flash_attention_for_cpu",
    ),
    "torch.ops.aten.add.Tensor": ("_schema",),
    "torch.nn.modules.dropout:_DropoutNd": (),
    "torch.nn.modules.batchnorm:_NormBase": (),
    "torch.nn:TransformerEncoder": ("use_nested_tensor",),
    "torch.nn:TransformerEncoderLayer": ("activation_relu_or_gelu",),
    "torch.distributed.checkpoint.filesystem": ("_StorageInfo",),
    "torch.distributed.checkpoint.metadata": ("_MEM_FORMAT_ENCODING",),
    "torch.serialization": ("_get_layout",),
    "torch.testing._internal.distributed.fake_pg": (),
    "torch._subclasses.fake_tensor": (),
    "torch.utils._python_dispatch": (),
    "accelerate:Accelerator": (
        "_models", "_optimizers", "_schedulers", "_dataloaders", "_custom_objects",
    ),
    "cloudpickle.cloudpickle": ("globals_ref",),
}  # fmt: skip
# Names that a torch has which is built for CUDA.
CUDA_NAMES = {
    "torch:_C": ("_cuda_isHistoryEnabled", "_cuda_attach_out_of_memory_observer"),
    "torch.distributed:ProcessGroupNCCL": (
        "abort", "perform_nocolor_split", "eager_connect_single_device",
    ),
    "torch._C:_distributed_c10d": ("_dump_nccl_trace",),
}  # fmt: skip
# Of a process, and what a node of autograd, a group's own backend, or another machine has.
ELSEWHERE = {
    "_config", "_current_frames", "_saved_reduction", "_saved_total_weight", "_saved_self",
    "_saved_self_sym_numel", "_saved_other", "_attn_implementation", "_c10d_functional",
    "_scaled_dot_product_", "_C", "_internal", "_subclasses", "_python_dispatch", "_autograd",
    "__init__", "_checkpoint_without_reentrant_generator_impl",
}  # fmt: skip


def _find(path: str) -> Any:
    """An object by `module:attribute`, or by dots alone below torch.ops."""
    module, _, attribute = path.partition(":")
    value: Any = None
    for number in range(len(parts := module.split(".")), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:number]))
        except ModuleNotFoundError:
            continue
        rest = parts[number:]
        break
    for name in [*rest, *filter(None, [attribute])]:
        value = getattr(value, name)
    return value


def _missing(owner: Any, names: Sequence[str]) -> list[str]:
    """Names that it has neither as attributes nor in the source of its module."""
    missing = [name for name in names if not hasattr(owner, name)]
    if not missing:
        return []
    try:
        source = inspect.getsource(inspect.getmodule(owner) or owner)
    except (OSError, TypeError):  # it is written in C++
        source = ""
    return [name for name in missing if not re.search(rf"\b{name}\b", source)]


def test_the_private_names_are_there() -> None:
    """As attributes, or in the source of a class, where its objects get them."""
    from torch.backends import cuda

    expected = NAMES | (CUDA_NAMES if cuda.is_built() else {})
    gone = {}
    for path, names in expected.items():
        try:
            missing = _missing(_find(path), names)
        except AttributeError as error:
            missing = [str(error)]
        if missing:
            gone[path] = missing

    assert gone == {}, "See docs/private_names.md for what each is used for, and where."


def test_every_private_name_of_the_page_is_looked_for() -> None:
    """The table above has each name with an underscore; the page has each name of the table."""
    text = PAGE.read_text(encoding="utf-8")
    whats = [line.split("|")[1] for line in text.splitlines() if line.startswith("| ")]
    quoted = {name for what in whats for code in re.findall(r"`([^`]*)`", what)
              for name in re.findall(r"(?<![\w])_\w+", code)}  # fmt: skip
    known = {name for names in (NAMES | CUDA_NAMES).values() for name in names}
    known |= set(re.findall(r"\b_\w+", " ".join(NAMES)))

    assert quoted - known - ELSEWHERE == set()
