"""A GPU's manners without a GPU: a device that works off a queue, and NCCL's place in torch.

For tests on the CPU. `install` makes torch's spare device, "privateuseone", a device whose
operations are queued and executed later, in order, by a thread. Waiting for it is as with CUDA: in
C, without the GIL, on a core of its own (state R), and nothing interrupts it. `QueuedNccl` stands
where torch has ProcessGroupNCCL: a call returns at once and is executed behind what the device
was given before, one communicator is made for each group by all of its members, the flight
recorder has entries that are not retired, an abort waits for the kernels of other communicators,
and a device that has failed once fails for ever. `QueuedNccl2` stands for torch 2.15's newer one.

What it is not: fast, or a proof for a GPU. tests/gpu checks each of these manners on one.
"""

from __future__ import annotations

import ctypes
import itertools
import pickle
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from IPython import get_ipython
from torch.distributed import distributed_c10d as c10d
from torch.utils import backend_registration

from nbdist.core import rank as ranks
from nbdist.engine import shell_hooks
from nbdist.hang.rank import call_log, main_thread, nccl_abort

NAME = "queued"
DEVICE = torch.device("privateuseone", 0)
# How often a kernel looks for the parts of other ranks.
POLL_S = 0.002
_aten = torch.ops.aten
# Their results depend on what is in memory, not on its form alone.
_BY_CONTENT = {"nonzero", "masked_select", "_unique2", "equal", "is_nonzero", "_local_scalar_dense"}


class _Aborted(Exception):
    """A kernel whose communicator was aborted."""


class DeviceError(RuntimeError):
    """As torch.AcceleratorError: what the device has failed with, at each later use."""


@dataclass(slots=True)
class _Stream:
    """A queue of kernels, and the thread that executes them."""

    device: _Device
    kernels: SimpleQueue[tuple[Callable[[], None], threading.Event]] = field(
        default_factory=SimpleQueue
    )
    last: threading.Event = field(default_factory=threading.Event)

    def __post_init__(self) -> None:
        self.last.set()
        threading.Thread(target=self._work, name="queued-device", daemon=True).start()

    def put(self, kernel: Callable[[], None]) -> threading.Event:
        """Queue a kernel; the event is set once it has been executed."""
        self.device.check()
        done = threading.Event()
        self.last = done
        self.kernels.put((kernel, done))
        return done

    def query(self) -> bool:
        """Whether everything has been executed."""
        self.device.check()
        return self.last.is_set()

    def synchronize(self) -> None:
        """Wait as CUDA does: in C, on a core, and nothing interrupts it."""
        spin(self.last)
        self.device.check()

    def _work(self) -> None:
        while True:
            kernel, done = self.kernels.get()
            try:
                if self.device.error is None:
                    kernel()
            except _Aborted:
                pass
            except BaseException as error:  # noqa: BLE001  # raised at each later use
                self.device.error = error
            done.set()


@dataclass(slots=True)
class _Device:
    """This process's device: its stream, and the error that it does not come back from."""

    error: BaseException | None = None
    stream: Any = None

    def check(self) -> None:
        if self.error is not None:
            raise DeviceError(f"CUDA error: device-side assert triggered ({self.error})")


_device = _Device()


def spin(done: threading.Event) -> None:
    """Wait for an event in C: the GIL is released, a core is used, no signal is handled."""
    libc = ctypes.CDLL(None)
    lock = ctypes.c_int()
    libc.pthread_spin_init(ctypes.byref(lock), 0)
    libc.pthread_spin_lock(ctypes.byref(lock))

    def release() -> None:
        done.wait()
        libc.pthread_spin_unlock(ctypes.byref(lock))

    threading.Thread(target=release, daemon=True).start()
    libc.pthread_spin_lock(ctypes.byref(lock))


class QueuedTensor(torch.Tensor):
    """A tensor on the device: its memory is there at once, its contents when their turn came."""

    memory: torch.Tensor

    @staticmethod
    def on(memory: torch.Tensor) -> QueuedTensor:
        """The tensor whose memory this is."""
        made: QueuedTensor = torch.Tensor._make_wrapper_subclass(
            QueuedTensor,
            memory.shape,
            strides=memory.stride(),
            storage_offset=memory.storage_offset(),
            dtype=memory.dtype,
            device=DEVICE,
        )
        made.memory = memory
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func.namespace == "c10d":
            return _call(func, args, kwargs)
        if func._opname in _BY_CONTENT or func is _aten._to_copy.default:
            return _execute_now(func, args, kwargs)
        if func in {_aten.copy_.default, _aten._copy_from.default} and not isinstance(
            args[0 if func is _aten.copy_.default else 1], QueuedTensor
        ):
            return _execute_now(func, args, kwargs)
        return _queue(func, args, kwargs)

    def tolist(self) -> Any:
        """Of a subclass torch itself gives no list."""
        return self.cpu().tolist()

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"{self.cpu()!r} on {NAME}"


def _memory_of(value: Any) -> Any:
    return value.memory if isinstance(value, QueuedTensor) else value


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Arguments for memory; what is made on the device is made in memory."""
    return {
        name: torch.device("cpu") if name == "device" and value is not None else value
        for name, value in kwargs.items()
        if name != "pin_memory"
    }


def _execute_now(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """What the host waits for: the queue first, then the operation."""
    _device.stream.synchronize()
    asked = kwargs.get("device")
    to_host = func is _aten._to_copy.default and asked is not None and asked.type == "cpu"
    args = torch.utils._pytree.tree_map(_memory_of, args)
    result = func(*args, **_on_cpu(kwargs))
    if to_host or func._opname not in {"_to_copy", "nonzero", "masked_select", "_unique2"}:
        return result
    return torch.utils._pytree.tree_map_only(torch.Tensor, QueuedTensor.on, result)


def _queue(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Queue an operation on device memory; its results have their form at once."""
    tree_map = torch.utils._pytree.tree_map
    memories, options = tree_map(_memory_of, (tuple(args), _on_cpu(kwargs)))
    returns = func._schema.returns
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    if is_view:
        return torch.utils._pytree.tree_map_only(
            torch.Tensor, QueuedTensor.on, func(*memories, **options)
        )
    if any(r.alias_info is not None for r in returns) or not returns:
        _device.stream.put(lambda: func(*memories, **options))
        written = [
            value
            for value, spec in zip(args, func._schema.arguments, strict=False)
            if spec.alias_info is not None and spec.alias_info.is_write
        ]
        written += [
            kwargs[spec.name]
            for spec in func._schema.arguments
            if spec.name in kwargs and spec.alias_info is not None and spec.alias_info.is_write
        ]
        return (written[0] if len(returns) == 1 else tuple(written)) if returns else None
    forms = torch.utils._pytree.tree_map_only(
        torch.Tensor, lambda tensor: tensor.to("meta"), (memories, options)
    )
    forms[1].update({"device": torch.device("meta")} if "device" in forms[1] else {})
    outputs = torch.utils._pytree.tree_map_only(
        torch.Tensor,
        lambda form: torch.empty_strided(form.shape, form.stride(), dtype=form.dtype),
        func(*forms[0], **forms[1]),
    )
    flat, _ = torch.utils._pytree.tree_flatten(outputs)

    def compute() -> None:
        results, _ = torch.utils._pytree.tree_flatten(func(*memories, **options))
        for output, result in zip(flat, results, strict=True):
            if output.shape != result.shape:
                raise RuntimeError(f"{func}: {output.shape} was told, {result.shape} came out")
            output.copy_(result)

    _device.stream.put(compute)
    return torch.utils._pytree.tree_map_only(torch.Tensor, QueuedTensor.on, outputs)


def kernel(seconds: float) -> None:
    """Queue a kernel that computes for so long, as torch.cuda._sleep does."""
    _device.stream.put(lambda: time.sleep(seconds))


def device_assert() -> None:
    """Queue a kernel that fails: the device cannot be used again."""

    def fail() -> None:
        raise IndexError("index out of bounds")

    _device.stream.put(fail)


# The place of NCCL.

_records: list[dict[str, Any]] = []
_communicators: list[QueuedNccl] = []
_works: list[_Work] = []
_numbers = itertools.count()


class QueuedNccl(dist.ProcessGroupGloo):
    """Stands where torch has ProcessGroupNCCL. The base is a shell, through which nothing goes."""

    kind = "nccl"
    sees_ends = True  # the recorder

    class Options:
        """The fields that torch and nbdist set."""

        def __init__(self, *_: Any, **__: Any) -> None:
            self.is_high_priority_stream = False
            self.config: Any = None
            self.global_ranks_in_group: list[int] = []
            self.group_name = ""
            self._timeout = timedelta(minutes=10)
            self.split_from = self.split_color = None

    def __init__(self, store: dist.Store, rank: int, size: int, options: Any = None) -> None:
        # Torch 2.15 asks it for the group's size.
        shell = dist.PrefixStore("shell", store)
        super().__init__(shell, rank, size, timeout=timedelta(seconds=30))
        self._options = options or QueuedNccl.Options()
        self._store, self._rank, self._size = store, rank, size
        self._id = next(_numbers)
        self._aborted = threading.Event()
        self._idle = threading.Event()
        self._idle.set()
        self._stream: Any = None
        self._counts: dict[str, int] = {}
        _communicators.append(self)

    @property
    def options(self) -> Any:  # type: ignore[override]
        return self._options

    def eager_connect_single_device(self, device: Any = None) -> None:
        """Make the communicator. All members; nothing ends the wait for them."""
        self._store.set(f"init/{self._rank}", "here")
        connected = threading.Event()

        def connect() -> None:
            self._store.wait([f"init/{rank}" for rank in range(self._size)], timedelta(hours=1))
            connected.set()

        threading.Thread(target=connect, daemon=True).start()
        spin(connected)
        self._stream = _Stream(_device)

    def perform_nocolor_split(self, device: Any) -> None:
        """What NCCL's backends alone have."""

    def abort(self) -> None:
        """End this communicator's kernels; then free memory, which waits for the whole device."""
        self._aborted.set()
        for communicator in _communicators:
            communicator._idle.wait()

    @property
    def place(self) -> int:
        """This rank's place in the group."""
        return self._rank

    def queue(
        self,
        header: _Header,
        payload: Callable[[], torch.Tensor],
        execute: Callable[[list[torch.Tensor]], None],
        outputs: Sequence[QueuedTensor],
    ) -> _Work:
        """Queue a call behind what the device has been given so far."""
        if self._stream is None:
            self.eager_connect_single_device()
        channel = header.channel
        number = self._counts[channel] = self._counts.get(channel, 0) + 1
        record = self._record(header, number)
        before = _device.stream.put(lambda: None)

        def run() -> None:
            before.wait()
            self._idle.clear()
            try:
                execute(self._exchange(header, number, payload()))
                record["retired"] = self.sees_ends
            finally:
                self._idle.set()

        work = _Work(self._stream.put(run), outputs)
        _works.append(work)
        return work

    def _exchange(self, header: _Header, number: int, part: torch.Tensor) -> list[torch.Tensor]:
        """All members' parts of a call; one that differs hangs until the abort."""
        prefix = f"{header.channel}/{number}"
        self._store.set(f"{prefix}/{self._rank}", pickle.dumps((header.form, part)))
        keys = [f"{prefix}/{rank}" for rank in header.ends or range(self._size)]
        while not self._store.check(keys):
            if self._aborted.wait(POLL_S):
                raise _Aborted
        parts = [pickle.loads(self._store.get(key)) for key in keys]
        if any(form != header.form for form, _ in parts):
            self._aborted.wait()
            raise _Aborted
        return [part for _, part in parts]

    def _record(self, header: _Header, number: int) -> dict[str, Any]:
        record = {
            "record_id": len(_records),
            "pg_id": self._id,
            "process_group": (self.options.group_name, ""),
            "collective_seq_id": self._counts.get("all", 0),
            "op_id": number,
            "is_p2p": header.ends is not None,
            "profiling_name": f"{self.kind}:{header.op}",
            "input_sizes": [list(header.shape)],
            "input_dtypes": [header.dtype],
            "time_created_ns": time.time_ns(),
            "retired": False,
        }
        _records.append(record)
        return record


class QueuedNccl2(QueuedNccl):
    """Stands where torch 2.15 has ProcessGroupNCCL2: a hook of the group's records its calls."""

    kind = "nccl2"
    sees_ends = False


class _RecorderHook:
    """Stands where torch 2.15 has FlightRecorderHook: it hears of ends from one backend."""

    @staticmethod
    def attach(group: Any, _ranks: Any) -> _RecorderHook:
        """Hear from the group's present backend."""
        _backend_of(group).sees_ends = True
        return _RecorderHook()

    def remove(self) -> None:
        """Hear of nothing any more."""


@dataclass(frozen=True, slots=True)
class _Header:
    """A call: what has to be equal on all members; `ends` are a transfer's places in the group."""

    op: str
    shape: tuple[int, ...]
    dtype: str
    ends: tuple[int, int] | None

    @property
    def channel(self) -> str:
        return "all" if self.ends is None else f"{self.ends[0]}-{self.ends[1]}"

    @property
    def form(self) -> tuple[Any, ...]:
        return ("transfer" if self.ends else self.op), self.shape, self.dtype


class _Work(dist.Work):
    """Of a queued call: to wait for it makes the device wait, not the host."""

    def __init__(self, done: threading.Event, outputs: Sequence[QueuedTensor]) -> None:
        super().__init__()
        self._done = done
        self._outputs = list(outputs)

    def wait(self, timeout: Any = None) -> bool:  # as torch's
        done = self._done
        _device.stream.put(lambda: done.wait() and None)
        return True

    def is_completed(self) -> bool:
        return self._done.is_set()

    def get_future(self) -> Any:
        self.wait()  # whoever uses the future's value is behind it on the device
        future: torch.futures.Future[Any] = torch.futures.Future()
        future.set_result(self._outputs)
        return future


def _dump(include_collectives: bool, *_: Any) -> bytes:  # as torch's
    """The flight recorder, as torch's `_dump_nccl_trace` gives it."""
    status: dict[str, dict[str, int]] = {}
    for record in _records:
        counts = status.setdefault(
            str(record["pg_id"]), {"last_enqueued_collective": 0, "last_completed_collective": 0}
        )
        if not record["is_p2p"]:
            counts["last_enqueued_collective"] = record["op_id"]
            if record["retired"]:
                counts["last_completed_collective"] = record["op_id"]
    dump: dict[str, Any] = {"pg_status": status}
    if include_collectives:
        dump["entries"] = [dict(record) for record in list(_records)]
    return pickle.dumps(dump)


def _backend_of(group: Any) -> QueuedNccl:
    backend: Any = group._get_backend(DEVICE)
    return getattr(backend, "wrapped_pg", backend)  # type: ignore[no-any-return]


def _call(func: Any, args: Any, kwargs: Any) -> Any:
    """A function of torch.ops.c10d: its tensors, where it returns them, and its work."""
    arguments = func._schema.arguments
    values = dict(zip((argument.name for argument in arguments), args, strict=False))
    defaults = {a.name: a.default_value for a in arguments if a.has_default_value()}
    call = SimpleNamespace(**{"async_op": True, **defaults, **values, **kwargs})
    call.backend = _backend_of(dist.ProcessGroup.unbox(call.process_group))
    returned, work = _COLLECTIVES[func._opname](call)
    boxed = work.boxed()
    return boxed if len(func._schema.returns) == 1 else (returned, boxed)


def _all_reduce(call: Any) -> tuple[Any, _Work]:
    (tensor,) = call.tensors
    return call.tensors, _run(call, "all_reduce", tensor, [tensor], _reduction(call))


def _broadcast(call: Any) -> tuple[Any, _Work]:
    (tensor,) = call.tensors
    root = call.root_rank
    return call.tensors, _run(call, "broadcast", tensor, [tensor], lambda parts: [parts[root]])


def _all_gather_into_tensor(call: Any) -> tuple[Any, _Work]:
    output, tensor = call.output_tensor, call.input_tensor

    def join(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [torch.cat([part.flatten() for part in parts]).view(output.shape)]

    return output, _run(call, "_all_gather_base", tensor, [output], join)


def _all_gather(call: Any) -> tuple[Any, _Work]:
    (tensor,), (outputs,) = call.input_tensors, call.output_tensors
    return call.output_tensors, _run(call, "all_gather", tensor, outputs, lambda parts: parts)


def _reduce_scatter_tensor(call: Any) -> tuple[Any, _Work]:
    output, tensor, place = call.output_tensor, call.input_tensor, call.backend.place
    reduce = _reduction(call)

    def own_part(parts: list[torch.Tensor]) -> list[torch.Tensor]:
        return [reduce(parts)[0].chunk(len(parts))[place].view(output.shape)]

    return output, _run(call, "_reduce_scatter_base", tensor, [output], own_part)


def _send(call: Any) -> tuple[Any, _Work]:
    ends = call.backend.place, call.dst
    return None, _run(call, f"send {ends[0]}->{ends[1]}", call.tensors[0], [], None, ends)


def _recv(call: Any) -> tuple[Any, _Work]:
    (tensor,), ends = call.tensors, (call.src, call.backend.place)
    name = f"recv {ends[1]}<-{ends[0]}"
    return None, _run(call, name, tensor, [tensor], lambda parts: parts[:1], ends)


def _reduction(call: Any) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
    kind = dist.ReduceOp.RedOpType(call.reduce_op.op())
    reduce = {
        dist.ReduceOp.SUM: lambda stacked: stacked.sum(0),
        dist.ReduceOp.AVG: lambda stacked: stacked.mean(0),
        dist.ReduceOp.MAX: lambda stacked: stacked.amax(0),
        dist.ReduceOp.MIN: lambda stacked: stacked.amin(0),
    }[kind]
    return lambda parts: [reduce(torch.stack(parts))]


def _run(  # what a call consists of
    call: Any,
    op: str,
    tensor: QueuedTensor,
    outputs: Sequence[QueuedTensor],
    combine: Callable[[list[torch.Tensor]], list[torch.Tensor]] | None,
    ends: tuple[int, int] | None = None,
) -> _Work:
    """Queue it: `combine` makes of all members' tensors what goes into the outputs."""
    dtype = _DTYPES.get(tensor.dtype, str(tensor.dtype))
    memory, memories = tensor.memory, [output.memory for output in outputs]

    def execute(parts: list[torch.Tensor]) -> None:
        for place, result in zip(memories, combine(parts) if combine else [], strict=True):
            place.copy_(result)

    header = _Header(op, tuple(tensor.shape), dtype, ends)
    work: _Work = call.backend.queue(header, memory.clone, execute, outputs)
    if ends is None and not call.async_op:
        work.wait()  # of a transfer torch does so itself
    return work


_DTYPES = {torch.float32: "Float", torch.int64: "Long", torch.float64: "Double"}
_COLLECTIVES: dict[str, Callable[[Any], tuple[Any, _Work]]] = {
    "allreduce_": _all_reduce,
    "broadcast_": _broadcast,
    "_allgather_base_": _all_gather_into_tensor,
    "allgather_": _all_gather,
    "_reduce_scatter_base_": _reduce_scatter_tensor,
    "send": _send,
    "recv_": _recv,
}


# Torch and nbdist are told of it.


def install(kind: type[QueuedNccl] = QueuedNccl) -> torch.device:
    """Give this rank such a device and its groups such a backend. Collective: all ranks.

    Returns:
        The device, for `torch.ones(3, device=...)`.
    """
    if _device.stream is None:
        _device.stream = _Stream(_device)
        backend_registration._setup_privateuseone_for_python_backend(NAME)
        _register_factories()
        _stand_for_cuda(kind)
    world: Any = c10d._world
    if kind is QueuedNccl2 and not hasattr(world, "pg_flight_recorder_hooks"):
        world.pg_flight_recorder_hooks = {}
    state = ranks.this_rank()
    for group, name in sorted(world.pg_names.items(), key=lambda item: str(item[1])):
        if nccl_abort.backend(group) is None:
            store = dist.PrefixStore(f"queued/{name}", state.store)
            options = QueuedNccl.Options()
            options.group_name = str(name)
            backend = kind(store, group.rank(), group.size(), options)
            group._register_backend(DEVICE, dist.ProcessGroup.BackendType.NCCL, backend)
            if kind is QueuedNccl2:
                world.pg_flight_recorder_hooks[group] = _RecorderHook.attach(group, ())
            backend.eager_connect_single_device()
            kinds = dist.Backend(f"cpu:gloo,{NAME}:nccl")
            world.pg_backend_config[group] = str(kinds)
            world.pg_map[group] = kinds, world.pg_map[group][1]
    return DEVICE


def _register_factories() -> None:
    library = torch.library.Library("aten", "IMPL")
    _libraries.append(library)

    def empty(size: Any, *, dtype: Any = None, **_: Any) -> QueuedTensor:
        return QueuedTensor.on(torch.empty(size, dtype=dtype))

    def empty_strided(size: Any, stride: Any, *, dtype: Any = None, **_: Any) -> QueuedTensor:
        return QueuedTensor.on(torch.empty_strided(size, stride, dtype=dtype))

    library.impl("empty.memory_format", empty, "PrivateUse1")
    library.impl("empty_strided", empty_strided, "PrivateUse1")
    # torch makes these of something empty that it resizes, which a queue would do too late.
    for name in ("arange", "arange.start", "arange.start_step", "eye", "linspace", "randperm"):
        op, _, overload = name.partition(".")
        function = getattr(getattr(_aten, op), overload or "default")

        def make(*args: Any, function: Any = function, **options: Any) -> QueuedTensor:
            return QueuedTensor.on(function(*args, **_on_cpu(options)))

        library.impl(name, make, "PrivateUse1")


_libraries: list[Any] = []


def _stand_for_cuda(kind: type[QueuedNccl]) -> None:
    """Put it where torch has CUDA and NCCL, as far as nbdist asks for them."""
    cuda: Any = torch.cuda
    cuda.is_initialized = lambda: True
    cuda.current_device = lambda: 0
    cuda.set_device = lambda _: None
    cuda.synchronize = lambda _=None: _device.stream.synchronize()
    cuda.current_stream = lambda _=None: _device.stream
    c10d.ProcessGroupNCCL = kind  # type: ignore[misc]
    c10d.FlightRecorderHook = _RecorderHook  # type: ignore[attr-defined]
    for module in (c10d, dist):
        module.is_nccl_available = lambda: True  # type: ignore[attr-defined]
    nccl_abort.CUDA = DEVICE
    if call_log._recorder is not None:  # it stands around torch's own class alone
        _Work.wait = call_log._recorder._wrap_wait(_Work.wait)  # type: ignore[method-assign]
    if (shell := get_ipython()) is not None:
        shell_hooks.finish_device_calls(shell)
    main_thread._recorders.append(main_thread._FlightRecorder(_dump))  # type: ignore[arg-type]
    state = ranks.this_rank()
    places = tuple(replace(place, device=str(DEVICE)) for place in state.topology.ranks)
    topology = replace(state.topology, ranks=places)
    ranks.joined(replace(state, place=places[state.place.rank], topology=topology))
