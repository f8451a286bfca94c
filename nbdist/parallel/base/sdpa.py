"""The kernel that runs scaled_dot_product_attention: chosen by name, or refused by name."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from nbdist.errors import OptionError
from nbdist.parallel.base import recomputation
from nbdist.parallel.base.transform import ModelBuild

_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
_NO_KERNEL = "No available kernel"
_HALVES = (torch.bfloat16, torch.float16)


class _Chosen(threading.local):
    name = ""


_chosen = _Chosen()


def refuse_backend(job: ModelBuild) -> None:
    """Refuse a backend that this device or model would not run. No rank is met.

    Raises:
        OptionError: Names the backends that the device has.
    """
    wanted = job.choice.options.sdpa
    if not wanted:
        return
    available = _available(job.device)
    if wanted not in available:
        name = torch.cuda.get_device_name(job.device) if job.device.type == "cuda" else "the CPU"
        raise OptionError(
            f"--sdpa {wanted}: {name} has no such kernel here. Use {' or '.join(available)}, or "
            "leave it out."
        )
    is_half = job.choice.options.precision != "fp32" or any(
        parameter.dtype in _HALVES for parameter in job.base.parameters()
    )
    if job.device.type == "cuda" and wanted in ("flash", "cudnn") and not is_half:
        raise OptionError(
            f"--sdpa {wanted}: this kernel supports only bf16 and fp16, and the model is fp32. "
            "Add --bf16 or --fp16, or use efficient or math."
        )
    # A Hugging Face model says which attention it uses; only sdpa's kernel can be chosen.
    implementation = getattr(getattr(job.base, "config", None), "_attn_implementation", None)
    if implementation not in (None, "sdpa"):
        raise OptionError(
            f"--sdpa {wanted}: {type(job.base).__name__} uses its attention '{implementation}', "
            'not torch\'s. Load it with attn_implementation="sdpa", or leave --sdpa out.'
        )


def choose_backend(root: torch.nn.Module, name: str, *, is_checked: bool) -> None:
    """Let all attention of a module's forward run on a backend. Sets `root.forward`.

    Args:
        root: What is called: a pipeline's stage, or the model.
        name: Of the backend.
        is_checked: See at the first forward in training that there is attention to choose for.
    """
    recomputation.follow(as_now)
    run = root.forward
    # No closure: copy.deepcopy makes a partial's bound method one of the copy.
    called: Any = functools.partial(_run_with_backend, root, run, name, [is_checked])
    root.forward = functools.update_wrapper(called, run)


def with_backend(name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `run` with its attention on a backend, and return its result. dynamo can trace it."""
    with sdpa_kernel(_BACKENDS[name]):
        return run(*args, **kwargs)


@contextlib.contextmanager
def _remembered(name: str) -> Iterator[None]:
    """Within it, `as_now` knows the backend, and torch's error says what to do.

    Raises:
        OptionError: The backend has no kernel for a call: torch's own words do not say which.
    """
    before, _chosen.name = _chosen.name, name
    try:
        yield
    except RuntimeError as error:
        if _NO_KERNEL not in str(error):
            raise
        raise OptionError(
            f"--sdpa {name}: torch has no such kernel for a call of this model's attention. Its "
            "warnings name the reason: a mask, dropout, the dtype, or the size of a head. Use "
            "math, which takes everything, or leave --sdpa out."
        ) from error
    finally:
        _chosen.name = before


def as_now(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, and whenever it runs, its attention is on the backend of this moment."""
    return functools.partial(with_backend, _chosen.name, run) if _chosen.name else run


def _run_with_backend(
    root: torch.nn.Module,
    run: Callable[..., Any],
    name: str,
    is_unseen: list[bool],
    *args: Any,
    **kwargs: Any,
) -> Any:
    # Evaluation may take torch's fast path, which needs no such call.
    if not (is_unseen[0] and root.training and torch.is_grad_enabled()):
        with _remembered(name):
            return with_backend(name, run, *args, **kwargs)
    with _remembered(name), _Sees() as sees:
        outputs = with_backend(name, run, *args, **kwargs)
    if not sees.has_seen:
        raise OptionError(
            f"--sdpa {name}: the forward of {type(root).__name__} never calls "
            "torch.nn.functional.scaled_dot_product_attention, so there is no kernel to choose. "
            "Leave --sdpa out, or let the model use that function."
        )
    is_unseen[0] = False
    return outputs


class _Sees(TorchFunctionMode):
    """Notes whether scaled_dot_product_attention is called."""

    has_seen = False

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is torch.nn.functional.scaled_dot_product_attention:
            self.has_seen = True
        return func(*args, **(kwargs or {}))


def _available(device: torch.device) -> tuple[str, ...]:
    """The backends that this device has, by name."""
    if device.type != "cuda":
        return ("flash", "math")
    capability = torch.cuda.get_device_capability(device)
    is_there = {
        # Compute capability 8.0 (Ampere): torch's sdp_utils.cpp, check_sm_version.
        "flash": torch.backends.cuda.is_flash_attention_available() and capability >= (8, 0),
        "efficient": capability >= (5, 0),
        "math": True,
        "cudnn": torch.backends.cudnn.is_available()  # type: ignore[no-untyped-call]
        and capability >= (8, 0),
    }
    return tuple(name for name, there in is_there.items() if there)
