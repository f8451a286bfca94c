"""Calls in which Gloo cannot take a GPU's tensors go by way of host memory.

Most of Gloo's collectives copy a GPU's tensors to the host and back by themselves. Its send and
recv hand the GPU's address to the network ("Bad address", and the connection is lost), and so does
the coalesced all-gather; the coalesced all-reduce refuses. docs/limits.md has the table. So the
methods of groups are wrapped through which all calls from Python pass: dist.send and its kin,
batch_isend_irecv, torch's pipelining, ours and the user's.

A sent tensor is copied to the host within the call, once the GPU has computed it. A received one
is copied back by `Work.wait`, on the stream that was current in the call.

Functional collectives, which DTensor uses to redistribute, make two of these calls in C++, past any
wrapper: seen on an H200 as SIGSEGV in each `full_tensor()`. They have kernels of our own here.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch._C import _distributed_c10d
from torch.library import Library

Function = Callable[..., Any]
_READ, _WRITTEN = "read", "written"
# Method of a process group -> what happens to the tensors in its first arguments.
_METHODS = {
    "send": ({_READ},),
    "recv": ({_WRITTEN},),
    "recv_anysource": ({_WRITTEN},),
    "allreduce_coalesced": ({_READ, _WRITTEN},),
    "allgather_coalesced": ({_WRITTEN}, {_READ}),
    "allgather_into_tensor_coalesced": ({_WRITTEN}, {_READ}),
    "all_gather_single_coalesced": ({_WRITTEN}, {_READ}),  # its name from torch 2.13 on
}


@dataclass(frozen=True, slots=True)
class _Arrival:
    """The tensors that a call writes.

    Attributes:
        outputs: The caller's tensors, as they were given.
        stream: The GPU's stream; None without a GPU.
        copies: (output, its copy on the host) until it has been copied back.
    """

    outputs: Any
    stream: torch.cuda.Stream | None
    copies: list[tuple[torch.Tensor, torch.Tensor]]

    def copy_back(self) -> Any:
        """Bring what has come to where it belongs, once, and return the outputs."""
        # The waiting thread can have another stream, or be torch's own thread for futures.
        with torch.cuda.stream(self.stream):
            while self.copies:
                tensor, host = self.copies[-1]
                # Written as by a backend: autograd counts it as no change.
                tensor.data.copy_(host)
                self.copies.pop()
        return self.outputs


_arrivals: weakref.WeakKeyDictionary[Any, _Arrival] = weakref.WeakKeyDictionary()


@functools.cache  # once in a process
def install() -> None:
    """Wrap the methods, on ranks with a GPU.

    Before the recorder is installed, which so sees one call and one wait as ever.
    """
    group: Any = dist.ProcessGroup
    for name, roles in _METHODS.items():
        if method := getattr(group, name, None):  # one that this torch lacks is left out
            setattr(group, name, _through_host(method, roles))
    work: Any = dist.Work
    work.wait = _copying_back(work.wait)
    work.get_future = _with_copies(work.get_future)


def _is_on_host(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


def _out_of_reach(group: Any, tensors: Any) -> torch.Tensor | None:
    """The first of tensors on one device, if Gloo would get them and cannot read them there."""
    while isinstance(tensors, list | tuple):
        if not tensors:
            return None
        tensors = tensors[0]
    if _is_on_host(tensors):
        return None
    backend = group._get_backend(tensors.device)  # noqa: SLF001  # the only way to it
    return tensors if getattr(backend, "wrapped_pg", backend).name() == "gloo" else None


def _through_host(method: Function, roles: tuple[set[str], ...]) -> Function:
    """A group's method, with copies on the host for tensors that Gloo cannot reach."""

    @functools.wraps(method)
    def call(group: Any, *args: Any, **kwargs: Any) -> Any:
        tensor = _out_of_reach(group, args[0]) if args else None
        if tensor is None:
            return method(group, *args, **kwargs)
        stream = torch.cuda.current_stream(tensor.device) if tensor.is_cuda else None
        arrival = _Arrival(args[0], stream, [])
        staged = [
            _host_copies(tensors, role, arrival) for tensors, role in zip(args, roles, strict=False)
        ]
        work = method(group, *staged, *args[len(staged) :], **kwargs)
        if arrival.copies:
            _arrivals[work] = arrival
        return work

    return call


def _host_copies(tensors: Any, role: set[str], arrival: _Arrival) -> Any:
    """The like of a tensor, or of lists of them, on the host."""
    if not isinstance(tensors, torch.Tensor):
        return [_host_copies(part, role, arrival) for part in tensors]
    # With its strides, so that torch refuses what it would refuse on the host.
    host = torch.empty_strided(
        tensors.size(),
        tensors.stride(),
        dtype=tensors.dtype,
        device="cpu",
        pin_memory=tensors.is_cuda,
    )
    if _READ in role:
        host.copy_(tensors.detach())
    if _WRITTEN in role:
        arrival.copies.append((tensors, host))
    return host


def _copying_back(original: Function) -> Function:
    """Wrap Work.wait: received values are in the caller's tensors when it returns."""

    @functools.wraps(original)
    def wait(work: Any, *args: Any, **kwargs: Any) -> Any:
        arrival = _arrivals.get(work) if _arrivals else None
        if arrival is None:
            return original(work, *args, **kwargs)
        has_come = False
        try:
            has_come = original(work, *args, **kwargs)
        except KeyboardInterrupt:  # an interrupt is raised when the message is there
            has_come = work.is_completed()
            raise
        finally:
            if has_come:
                arrival.copy_back()
        return has_come

    return wait


def _with_copies(original: Function) -> Function:
    """Wrap Work.get_future: the future's value is the caller's tensors, filled."""

    @functools.wraps(original)
    def get_future(work: Any) -> Any:
        future, arrival = original(work), _arrivals.get(work)
        if arrival is None:
            return future

        def finish(done: Any) -> Any:
            done.value()  # raises what the call has failed with
            return arrival.copy_back()

        return future.then(finish)

    return get_future


def replace_functional_collectives(dispatch_key: str = "CUDA") -> None:
    """Let the functional collectives that coalesce give Gloo one tensor at a time. Call it once.

    Only on ranks whose groups are all Gloo's. `dispatch_key` is torch's name of a kind of tensors.
    """

    def reduce_copies(inputs: Sequence[torch.Tensor], *how: Any) -> list[torch.Tensor]:
        return _reduce([x.clone(memory_format=torch.contiguous_format) for x in inputs], *how)

    library: Any = _library()
    kernels = {
        "all_gather_into_tensor": lambda x, *where: _gather([x], *where)[0],
        "all_gather_into_tensor_coalesced": _gather,
        "all_reduce_coalesced": reduce_copies,
        "all_reduce_coalesced_": _reduce,
    }
    for name, kernel in kernels.items():
        library.impl(name, kernel, dispatch_key)


@functools.cache  # torch takes the kernels back when this is collected
def _library() -> Library:
    return Library("_c10d_functional", "IMPL")  # type: ignore[no-untyped-call]


def _gather(inputs: Sequence[torch.Tensor], group_size: int, group: Any) -> list[torch.Tensor]:
    """The ranks' tensors, one after the other along the first dimension."""
    outputs = []
    for tensor in inputs:
        part = torch.view_as_real(tensor) if tensor.is_complex() else tensor
        whole = part.new_empty((group_size, *part.shape))
        work = _group(group).allgather([list(whole.unbind())], [part.contiguous()])
        output = whole.flatten(0, 1) if tensor.dim() else whole
        outputs.append(torch.view_as_complex(output) if tensor.is_complex() else output)
        _distributed_c10d._register_work(outputs[-1], work)  # noqa: SLF001  # for wait_tensor
    return outputs


def _reduce(tensors: Sequence[torch.Tensor], reduction: str, group: Any) -> list[torch.Tensor]:
    """Reduce each tensor in place over the ranks."""
    options = dist.AllreduceOptions()
    options.reduceOp = getattr(dist.ReduceOp, reduction.upper())
    for tensor in tensors:
        work = _group(group).allreduce([tensor], options)
        _distributed_c10d._register_work(tensor, work)  # noqa: SLF001  # for wait_tensor
    return list(tensors)


def _group(group: Any) -> Any:
    """The group that a functional collective names; from torch 2.13 on it may be given itself."""
    if isinstance(group, dist.ProcessGroup):
        return group
    return _distributed_c10d._resolve_process_group(group)  # noqa: SLF001  # the only way to it
