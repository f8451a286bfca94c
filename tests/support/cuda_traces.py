"""A trace of a GPU as Kineto writes it, of a made-up program whose times are known.

The host launches one after another and does not wait; each stream runs in order. Fields, categories
and what annotations have on the GPU are as in libkineto's GenericActivityProfiler.cpp and
output_json.cpp, and as in traces of torch on V100s (HolisticTraceAnalysis, tests/data). No GPU ran.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PROCESS, MAIN, AUTOGRAD, COMPUTE_STREAM, NCCL_STREAM = 77, 77, 93, 7, 20
# The host takes so long for one launch.
LAUNCH_NS = 5_000
_RUNTIME = {"gpu_memcpy": "cudaMemcpyAsync", "gpu_memset": "cudaMemsetAsync"}
BASE_NS = 1_700_000_000_000_000_000


@dataclass
class CudaProgram:
    """What the program has done until now; times in ns.

    Attributes:
        now_ns: The host's clock.
        free_ns: Stream -> when what was launched on it until now will have ended.
    """

    now_ns: int = 1_000_000
    free_ns: dict[int, int] = field(default_factory=dict)
    _host: list[dict[str, Any]] = field(default_factory=list)
    _device: list[dict[str, Any]] = field(default_factory=list)
    # As CUPTI has it, the innermost annotation of each thread.
    _open: dict[int, list[int]] = field(default_factory=dict)
    _names: dict[int, str] = field(default_factory=dict)
    _spans: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)
    _last: int = 0

    @contextmanager
    def annotation(self, name: str, thread: int = MAIN) -> Iterator[None]:
        """`record_function` around what is done inside."""
        number, start_ns = self._next(), self.now_ns
        self._names[number] = name
        self._open.setdefault(thread, []).append(number)
        self.now_ns += 1000
        yield
        self.now_ns += 1000
        self._open[thread].pop()
        args = {"External id": number, "Record function id": 0, "Ev Idx": number}
        self._host.append(
            _event("user_annotation", name, (PROCESS, thread), (start_ns, self.now_ns), args)
        )

    def launch(
        self,
        name: str,
        took_ns: int,
        *,
        stream: int = COMPUTE_STREAM,
        thread: int = MAIN,
        category: str = "kernel",
        after: int | None = None,
        **more: Any,
    ) -> tuple[int, int]:
        """(start, end) on the GPU of what is launched; `after`: a stream that is waited for."""
        number = self._next()
        runtime = _RUNTIME.get(category, "cudaLaunchKernel")
        start_ns, self.now_ns = self.now_ns, self.now_ns + LAUNCH_NS
        args = {"External id": number, "cbid": 211, "correlation": number}
        self._host.append(
            _event("cuda_runtime", runtime, (PROCESS, thread), (start_ns, self.now_ns), args)
        )
        begin_ns = max(
            self.now_ns,
            self.free_ns.get(stream, 0),
            0 if after is None else self.free_ns.get(after, 0),
        )
        end_ns = self.free_ns[stream] = begin_ns + took_ns
        args = {
            "External id": number, "device": 0, "context": 1, "stream": stream,
            "correlation": number, **more,
        }  # fmt: skip
        self._device.append(_event(category, name, (0, stream), (begin_ns, end_ns), args))
        if self._open.get(thread):
            key = (stream, self._open[thread][-1])
            first_ns, last_ns = self._spans.get(key, (begin_ns, end_ns))
            self._spans[key] = min(first_ns, begin_ns), max(last_ns, end_ns)
        return begin_ns, end_ns

    def written(self, path: Path, **header: Any) -> Path:
        """The file of rank 0 of two, after a synchronisation."""
        on_device = [
            _event(
                "gpu_user_annotation", self._names[number], (0, stream),
                (start_ns - 1, end_ns + 1), {"External id": number},
            )
            for (stream, number), (start_ns, end_ns) in self._spans.items()
        ]  # fmt: skip
        whole = {
            "schemaVersion": 1,
            "distributedInfo": {
                "rank": 0, "world_size": 2,
                "pg_config": [{"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2}],
            },
            **header,
            "baseTimeNanoseconds": BASE_NS,
            "traceEvents": [*self._host, *self._device, *on_device],
        }  # fmt: skip
        path.write_text(json.dumps(whole))
        return path

    def _next(self) -> int:
        self._last += 1
        return self._last


def _event(
    category: str, name: str, where: tuple[int, int], span_ns: tuple[int, int], args: Any
) -> dict[str, Any]:
    (process, thread), (start_ns, end_ns) = where, span_ns
    return {
        "ph": "X", "cat": category, "name": name, "pid": process, "tid": thread,
        "ts": start_ns / 1000, "dur": (end_ns - start_ns) / 1000, "args": args,
    }  # fmt: skip


# What `ddp_step` lets the GPU do, in ns.
COPY_NS, FORWARD_NS, BACKWARD_NS, REDUCE_NS, OPTIMIZER_NS = (
    100_000, 2_000_000, 4_000_000, 3_000_000, 1_000_000,
)  # fmt: skip


def ddp_step(program: CudaProgram, *, mark_ns: int | None = None) -> tuple[int, int]:
    """A step of DDP without a wait; (start of its first copy, end of its last kernel) on the GPU.

    Args:
        program: What comes before it.
        mark_ns: nbdist's mark takes so long; 0 for one that launches nothing, None for no mark.
    """
    begin_ns, _ = program.launch("Memcpy HtoD (Pageable -> Device)", COPY_NS, category="gpu_memcpy")
    with program.annotation("DistributedDataParallel.forward"):
        program.launch("ampere_sgemm_64x64_nn", FORWARD_NS)
    # On autograd's own thread, which has none of the main thread's annotations.
    program.launch("ampere_sgemm_64x64_nt", BACKWARD_NS, thread=AUTOGRAD)
    with program.annotation("nccl:all_reduce", AUTOGRAD):
        program.launch(
            "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", REDUCE_NS,
            stream=NCCL_STREAM, thread=AUTOGRAD, after=COMPUTE_STREAM,
            **{
                "Collective name": "allreduce", "In msg nelems": 1000, "Out msg nelems": 1000,
                "Group size": 2, "dtype": "Float", "Process Group Name": "0",
                "Process Group Description": "default_pg",
            },
        )  # fmt: skip
    with program.annotation("Optimizer.step#SGD.step"):
        _, end_ns = program.launch(
            "void at::native::multi_tensor_apply_kernel", OPTIMIZER_NS, after=NCCL_STREAM
        )
        if mark_ns is not None:
            with program.annotation("nbdist.step"):
                if mark_ns:
                    _, end_ns = program.launch("void at::native::FillFunctor<float>", mark_ns)
    return begin_ns, end_ns
