"""Traces from files: real ones of torch's profiler on two CPU ranks, and one by hand of a GPU."""

import gzip
import json
from collections import Counter
from decimal import Decimal
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from nbdist.errors import TraceError
from nbdist.trace import chrome_trace
from nbdist.trace.breakdown import breakdown
from nbdist.trace.kernel.recordings import read_folder
from nbdist.trace.names import collective, kind, type_bytes
from nbdist.trace.read import read
from nbdist.trace.trace import (
    COMMUNICATION,
    COMPUTE,
    COPY,
    DATA,
    HOST,
    KINDS,
    MARK,
    WAIT,
    RankTrace,
)
from tests.support.captured import check_trace
from tests.support.cuda_traces import (
    BACKWARD_NS,
    COPY_NS,
    FORWARD_NS,
    OPTIMIZER_NS,
    REDUCE_NS,
    CudaProgram,
    ddp_step,
)

FOLDER = Path(__file__).resolve().parents[1] / "data" / "traces"
STRATEGIES = ("ddp", "fsdp", "tp", "pp")
# The captured model (tests/support/capture_traces.py): two blocks and a head, in fp32.
_BLOCK_BYTES = 4 * (32 * 64 + 64 + 64 * 32 + 32)
_HEAD_BYTES = 4 * (32 * 4 + 4)
_BATCH_BYTES = 4 * 8 * 32


_CALLS = ("gloo:", "c10d::", "_c10d_functional::")


def calls(trace: RankTrace) -> Counter[tuple[str, int]]:
    """(name, bytes) of each collective -> how often."""
    events = trace.events
    places = np.flatnonzero(events.kind == COMMUNICATION)
    return Counter((trace.names[events.name[p]], int(events.size_bytes[p])) for p in places)


def parsed(path: Path) -> dict[str, Any]:
    text = gzip.decompress(path.read_bytes())
    # As floats, times since 1970 lose their last digit.
    whole: dict[str, Any] = json.loads(text, parse_float=Decimal)
    return whole


def event(category: str, name: str, thread: int, start: float, end: float, **more: Any) -> Any:
    """As torch writes it, of the process 1 where nothing else is said; times in microseconds."""
    return {
        "ph": "X", "cat": category, "name": name, "pid": 1, "tid": thread, "ts": start,
        "dur": end - start, **more,
    }  # fmt: skip


def written(path: Path, whole: Any) -> Path:
    path.write_text(json.dumps(whole, default=float))
    return path


# What two steps of the captured cell send, by arithmetic.
_SENT = {
    # One bucket holds all gradients, which is below DDP's first 1 MB. The broadcasts are those
    # with which DDP rebuilds its buckets after the first backward.
    "ddp": {("all-reduce", 2 * _BLOCK_BYTES + _HEAD_BYTES): 2},
    # Blocks are gathered for forward and backward; the head, as the outermost, once.
    "fsdp": {
        ("all-gather", _BLOCK_BYTES): 2 * 2 * 2,
        ("reduce-scatter", _BLOCK_BYTES): 2 * 2,
        ("all-gather", _HEAD_BYTES): 2,
        ("reduce-scatter", _HEAD_BYTES): 2,
    },
    # One for each block's output, and one for the gradient of the second block's input.
    "tp": {("all-reduce", _BATCH_BYTES): 2 * 3},
    # Two microbatches: half a batch there, and the gradient of it back.
    "pp": {("send", _BATCH_BYTES // 2): 2 * 2, ("receive", _BATCH_BYTES // 2): 2 * 2},
}


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_real_traces_hold_what_the_strategy_sends(strategy: str) -> None:
    """Collectives of each rank by name and size, as the model's shapes say."""
    trace = read_folder(FOLDER / strategy)

    assert [rank.rank for rank in trace.ranks] == [0, 1]
    assert trace.strategy.startswith(strategy)
    for rank in trace.ranks:
        counts = calls(rank)

        assert {key: counts[key] for key in _SENT[strategy]} == _SENT[strategy]
        assert rank.groups == ("all ranks",)
        assert rank.group_ranks == ((0, 1),)
        assert [step.number for step in rank.steps] == [0, 1]
        assert rank.problem == ""
        assert rank.lanes[0].name == "main thread"
        assert [lane.name.split()[0] for lane in rank.lanes[1:]] == ["gloo"] * (len(rank.lanes) - 1)


@pytest.mark.parametrize("name", sorted(path.name for path in FOLDER.iterdir()))
def test_every_captured_trace_adds_up(name: str) -> None:
    """Of CPU ranks, and of those on GPUs as `make gpu` captures them."""
    assert len(check_trace(FOLDER / name).ranks) == 2


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_real_file_is_read_as_json_reads_it(strategy: str, tmp_path: Path) -> None:
    """Every event, its name, thread and times to the nanosecond; in another layout as well."""
    path = FOLDER / strategy / "rank0.json.gz"
    whole = parsed(path)
    events = [event for event in whole["traceEvents"] if event["ph"] == "X"]

    raw = chrome_trace.read(path)

    heads = [raw.heads[number] for number in raw.head]
    assert [(h.category, h.name, h.process, h.thread) for h in heads] == [
        (e["cat"], e["name"], str(e["pid"]), str(e["tid"])) for e in events
    ]
    assert raw.start_ns.tolist() == [round(e["ts"] * 1000) for e in events]
    assert raw.duration_ns.tolist() == [round(e["dur"] * 1000) for e in events]
    assert all(events[place]["args"] == args for place, args in raw.args.items())
    noted = [e["cat"] == "user_annotation" or e["name"].startswith(_CALLS) for e in events]
    assert len(raw.args) == sum(noted) > 0
    compact = chrome_trace.read(written(tmp_path / "compact.json", whole))
    assert abs(compact.start_ns - raw.start_ns).max() <= 1
    assert dict(compact.args) == dict(raw.args)
    assert dict(compact.threads) == dict(raw.threads)


def test_a_real_file_is_read_in_pieces_as_in_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces end in the middle of events, names and numbers."""
    path = FOLDER / "ddp" / "rank0.json.gz"
    whole = chrome_trace.read(path)
    for size in (3001, 4999, 100_003):
        monkeypatch.setattr(chrome_trace, "CHUNK_BYTES", size)

        pieces = chrome_trace.read(path)

        assert pieces.start_ns.tolist() == whole.start_ns.tolist()
        assert pieces.head.tolist() == whole.head.tolist()
        assert pieces.args == whole.args


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_depths_of_real_traces_are_those_of_a_count(strategy: str) -> None:
    """How many events of the lane are open when one begins."""
    for rank in read_folder(FOLDER / strategy).ranks:
        events = rank.events
        for lane in range(len(rank.lanes)):
            open_ns: list[int] = []
            for place in np.flatnonzero(events.lane == lane):
                open_ns = [end for end in open_ns if end > events.start_ns[place]]

                assert events.depth[place] == len(open_ns)
                open_ns.append(events.start_ns[place] + events.duration_ns[place])


# Written by hand after the format of torch's traces on a GPU (no captured one was at hand): NCCL's
# kernels with the notes of torch's ParamCommsUtils.hpp, copies, launches of the host.
def gpu_trace() -> dict[str, Any]:
    def host(category: str, name: str, start: float, end: float) -> Any:
        return event(category, name, 77, start, end, pid=77)

    def stream(category: str, name: str, number: int, start: float, end: float, **args: Any) -> Any:
        return event(category, name, number, start, end, pid=0, args=args)

    step = {"External id": 9}

    sent = {
        "Collective name": "allreduce", "dtype": "BFloat16", "In msg nelems": 1000,
        "Out msg nelems": 1000, "Group size": 2, "Process Group Name": "0",
        "Process Group Description": "default_pg",
    }  # fmt: skip
    gathered = sent | {
        "Collective name": "_allgather_base", "dtype": "Float", "In msg nelems": 50,
        "Out msg nelems": 100, "Process Group Name": "3", "Process Group Description": "mesh_tp",
    }  # fmt: skip
    return {
        "distributedInfo": {
            "rank": 1, "world_size": 2, "pg_config": [
                {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 2, "ranks": []},
                {"pg_name": "3", "pg_desc": "mesh_tp", "pg_size": 2, "ranks": [1, 0]},
            ],
        },
        "baseTimeNanoseconds": 1_700_000_000_000_000_000,
        "traceEvents": [
            {"ph": "M", "name": "thread_name", "pid": 77, "tid": 77, "args": {"name": "python"}},
            host("cpu_op", "aten::linear", 0, 20),
            host("cuda_runtime", "cudaLaunchKernel", 5, 10),
            host("cuda_runtime", "cudaStreamSynchronize", 200, 300),
            host("user_annotation", "ProfilerStep#4", 0, 310) | {"args": step},
            stream("gpu_user_annotation", "ProfilerStep#4", 7, 29.999, 262.001, **step),
            stream("kernel", "ampere_bf16_s16816gemm", 7, 30, 130),
            stream("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 7, 242, 247),
            stream("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 7, 250, 260),
            stream("gpu_memset", "Memset (Device)", 7, 261, 262),
            stream("kernel", "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(x)", 20, 80, 230, **sent),
            stream("kernel", "ncclDevKernel_AllGather_RING_LL(x)", 20, 231, 240, **gathered),
        ],
    }  # fmt: skip


def test_a_gpu_trace_is_read_with_streams_and_collectives(tmp_path: Path) -> None:
    """By hand, and without the host's launches as compute; its shares by arithmetic."""
    trace = read(written(tmp_path / "gpu.json", gpu_trace())).trace
    events = trace.events
    kinds = {
        trace.names[name]: KINDS[kind] for name, kind in zip(events.name, events.kind, strict=True)
    }

    assert (trace.rank, trace.device) == (1, "cuda")
    assert [(lane.name, lane.is_device) for lane in trace.lanes] == [
        ("main thread", False), ("stream 7", True), ("stream 20", True),
    ]  # fmt: skip
    assert kinds == {
        "aten::linear": "host", "cudaLaunchKernel": "host", "cudaStreamSynchronize": "wait",
        "ampere_bf16_s16816gemm": "compute", "all-reduce": "communication",
        "all-gather": "communication", "Memcpy DtoH (Device -> Pageable)": "copy",
        "Memcpy DtoD (Device -> Device)": "compute", "Memset (Device)": "compute",
    }  # fmt: skip
    assert calls(trace) == {("all-reduce", 2000): 1, ("all-gather", 400): 1}
    groups = events.group[events.kind == COMMUNICATION]
    assert [trace.groups[group] for group in groups] == ["all ranks", "mesh_tp"]
    assert trace.group_ranks == ((0, 1), (1, 0))
    steps = [(step.number, step.start_ns, step.end_ns) for step in trace.steps]
    assert steps == [(4, 30_000, 262_000)]
    [shares] = breakdown(read_folder(tmp_path)).ranks
    assert (shares.compute_ns, shares.overlap_ns, shares.exposed_ns) == (106_000, 50_000, 109_000)
    assert (shares.copy_ns, shares.idle_ns) == (10_000, 7_000)


@pytest.mark.parametrize(
    "kernel",
    [
        "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)",
        "ncclSymDevKernel_AllReduce_RSxLD_AGxST_sum_bf16(ncclSymDevArgs)",
        "ncclSymkDevKernel_AllReduce_AGxLLMC_R_sum_f16(ncclSymkDevWorkArgs4K)",
    ],
)
def test_all_kernels_of_nccl_communicate(kernel: str) -> None:
    """Those for symmetric memory too, of 2.27 and of later versions."""
    assert kind("kernel", kernel, is_device=True) == COMMUNICATION
    assert collective(kernel) == "all-reduce"


STEP_NS = COPY_NS + FORWARD_NS + BACKWARD_NS + REDUCE_NS + OPTIMIZER_NS
MARK_NS = 2000


def ddp_trace(path: Path, *, steps: int, mark_ns: int = MARK_NS) -> list[int]:
    """Writes nbdist's trace of steps after one that is left out; the end of each on the GPU."""
    program = CudaProgram()
    ends_ns = [ddp_step(program, mark_ns=mark_ns)[1] for _ in range(steps + 1)]
    # The host has launched all before the GPU is through with the first.
    assert program.now_ns < ends_ns[0]
    program.written(path, nbdist={"ends": list(range(steps + 1)), "skipped": 1})
    return ends_ns


def test_steps_of_a_gpu_are_cut_by_its_own_clock(tmp_path: Path) -> None:
    """In a loop that never waits; shares and kernels of each step by arithmetic."""
    ends_ns = ddp_trace(tmp_path / "rank0.json", steps=3)

    whole = read_folder(tmp_path)
    trace = whole.ranks[0]

    assert trace.has_device_steps
    durations_ns = [step.end_ns - step.start_ns for step in trace.steps]
    assert durations_ns == [end - start for start, end in pairwise(ends_ns)]
    assert durations_ns == [STEP_NS + MARK_NS] * 3
    numbers = breakdown(whole)
    assert numbers.step_ns == STEP_NS + MARK_NS
    [shares] = numbers.ranks
    assert shares.compute_ns == 3 * (FORWARD_NS + BACKWARD_NS + OPTIMIZER_NS + MARK_NS)
    assert (shares.exposed_ns, shares.copy_ns) == (3 * REDUCE_NS, 3 * COPY_NS)
    assert (shares.idle_ns, numbers.notes) == (0, ())
    # Of the step that is left out nothing counts, and all that was launched for the others does.
    assert calls(trace) == {("all-reduce", 4000): 3}
    assert (numbers.sent_bytes, numbers.traffic[0].count) == (4000, 1)
    names = Counter(trace.names[name] for name in trace.events.name)
    assert (names["cudaLaunchKernel"], names["ampere_sgemm_64x64_nn"]) == (3 * 5, 3)
    assert "nbdist.step" not in names


def test_steps_of_torchs_schedule_are_cut_by_the_gpus_clock(tmp_path: Path) -> None:
    """Each begins with its own first copy; what torch opens after the last step is none."""
    program = CudaProgram()
    spans_ns = []
    for number in range(3):
        with program.annotation(f"ProfilerStep#{number + 4}"):
            spans_ns.append(ddp_step(program))
    with program.annotation("ProfilerStep#7"):
        pass
    begins_ns = [begin_ns for begin_ns, _ in spans_ns]

    trace = read(program.written(tmp_path / "torch.json")).trace

    # The trace's zero is the first annotation's begin.
    edges_ns = [ns - 1_000_000 for ns in (*begins_ns, spans_ns[-1][1])]
    assert [(step.number, step.start_ns, step.end_ns) for step in trace.steps] == [
        (number + 4, *span) for number, span in enumerate(pairwise(edges_ns))
    ]
    assert edges_ns[2] - edges_ns[1] == STEP_NS


def test_steps_that_the_gpu_does_not_tell_are_cut_by_the_hosts_clock(tmp_path: Path) -> None:
    """Such as those captured in a CUDA graph, where a mark launches nothing; a note says so."""
    ddp_trace(tmp_path / "rank0.json", steps=3, mark_ns=0)

    numbers = breakdown(read_folder(tmp_path))

    assert numbers.step_ns < 100_000 < STEP_NS
    assert "cut by the host's clock on rank 0" in numbers.notes[0]


def test_names_of_all_backends_are_told_alike() -> None:
    """Gloo's, c10d's operators, torch's notes and NCCL's kernels."""
    cases = {
        "gloo:all_reduce": "all-reduce", "c10d::_allgather_base_": "all-gather",
        "c10d::_reduce_scatter_base_": "reduce-scatter", "_reduce_scatter_base": "reduce-scatter",
        "allreduce_coalesced": "all-reduce", "ncclDevKernel_SendRecv(x)": "send",
        "ncclKernel_Broadcast_RING_LL_Sum_int8_t": "broadcast",
        "c10d::alltoall_base_": "all-to-all",
        "gloo:recv": "receive", "gloo:barrier": "barrier", "c10d::allreduce_": "all-reduce",
        "ncclDevKernel_ReduceScatter_Sum_f32": "reduce-scatter", "something": "something",
    }  # fmt: skip

    assert {name: collective(name) for name in cases} == cases
    assert [type_bytes(name) for name in ("float", "c10::BFloat16", "Half", "Long", "what")] == [
        4, 2, 2, 8, 0,
    ]  # fmt: skip


def test_what_a_dataloader_does_is_data(tmp_path: Path) -> None:
    """Operators inside its iteration too."""
    whole = {
        "traceEvents": [
            event("user_annotation", "enumerate(DataLoader)#_SingleProcess.__next__", 1, 0, 10),
            event("cpu_op", "aten::stack", 1, 2, 7),
            event("cpu_op", "aten::mm", 1, 12, 17),
            event("user_annotation", "my forward", 1, 11, 19),
        ]
    }

    events = read(written(tmp_path / "data.json", whole)).trace.events

    assert events.kind.tolist() == [DATA, DATA, MARK, COMPUTE]


def test_what_issues_a_collective_waits_for_it(tmp_path: Path) -> None:
    """An autograd.Function's time is no compute but for the operators in it."""
    whole = {
        "traceEvents": [
            event("cpu_op", "_AllToAll", 1, 0, 100),
            event("cpu_op", "aten::empty", 1, 1, 4),
            event("cpu_op", "c10d::alltoall_base_", 1, 5, 10),
            event("cpu_op", "MyFunction", 1, 110, 120),
        ]
    }
    trace = read(written(tmp_path / "rank0.json", whole)).trace

    kinds = {trace.names[n]: k for n, k in zip(trace.events.name, trace.events.kind, strict=True)}
    assert kinds["_AllToAll"] == HOST
    assert kinds["aten::empty"] == kinds["MyFunction"] == COMPUTE


def test_threads_of_several_groups_are_told_apart_by_the_flight_recorder(tmp_path: Path) -> None:
    """Gloo's own events tell no group; most of a thread's calls do."""
    base = 1_000_000_000

    def gloo(thread: int, start: float, n: int) -> dict[str, Any]:
        args = {"Input Dims": [[n]], "Input type": ["float"]}
        return event("user_annotation", "gloo:all_reduce", thread, start, start + 5, args=args)

    recorded = [
        ["gloo:all_reduce", base + at * 1000 - 500, group, [[n]]]
        for at, group, n in (
            (10, "0", 4), (20, "5", 8), (30, "0", 4), (31, "5", 4), (40, "6", 2)
        )
    ]  # fmt: skip
    whole = {
        "distributedInfo": {
            "rank": 0,
            "pg_config": [
                {"pg_name": "0", "pg_desc": "default_pg", "pg_size": 4, "ranks": [0, 1, 2, 3]},
                {"pg_name": "5", "pg_desc": "mesh_dp", "pg_size": 2, "ranks": [0, 2]},
            ],
        },
        "nbdist": {
            "calls": recorded,
            "groups": {"5": "pairs"},
            "made": [  # torch's header is of the recording's beginning
                {"pg_name": "5", "pg_desc": "mesh_dp", "ranks": [0, 2]},
                {"pg_name": "6", "pg_desc": "mesh_tp", "ranks": [0, 1]},
            ],
        },
        "baseTimeNanoseconds": base,
        "traceEvents": [
            event("cpu_op", "aten::mm", 1, 0, 3),
            gloo(8, 10, 4), gloo(9, 20, 8), gloo(8, 30, 4), gloo(9, 31, 4), gloo(7, 40, 2),
        ],
    }  # fmt: skip

    trace = read(written(tmp_path / "groups.json", whole)).trace

    assert trace.groups == ("all ranks", "pairs", "mesh_tp")
    assert trace.group_ranks[2] == (0, 1)
    assert trace.events.group.tolist() == [-1, 0, 1, 0, 1, 2]


def test_a_file_that_is_cut_off_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    """Plain and compressed; the problem says so."""
    packed = (FOLDER / "ddp" / "rank0.json.gz").read_bytes()
    plain = gzip.decompress(packed)
    whole = len(chrome_trace.read(FOLDER / "ddp" / "rank0.json.gz"))
    for name, content in (("a.json", plain[: len(plain) // 2]), ("b.json.gz", packed[:20_000])):
        path = tmp_path / name
        path.write_bytes(content)

        trace = read(path).trace

        assert 100 < len(chrome_trace.read(path)) < whole
        assert len(trace.events) > 100
        assert name in trace.problem
        assert "cut off" in trace.problem


def test_what_is_no_trace_is_refused(tmp_path: Path) -> None:
    """With what it is, and what a trace would be."""
    cases = {
        "text.json": (b"no JSON at all", "is not a trace"),
        "other.json": (b'{"cells": []}', "no list `traceEvents`"),
        "torn.json": (b'{"traceEvents":[{"ph":"X","ts":1', "cut off"),
        "empty.json": (b"", "is not a trace"),
        "torn.json.gz": (gzip.compress(b'{"cells": 1}')[:12], "is not a trace"),
    }
    for name, (content, message) in cases.items():
        (tmp_path / name).write_bytes(content)

        with pytest.raises(TraceError, match=name) as raised:
            read(tmp_path / name)

        assert message in str(raised.value)
    with pytest.raises(TraceError, match="cannot be read: No such file"):
        read(tmp_path / "absent.json")


def test_a_trace_without_events_says_so(tmp_path: Path) -> None:
    """Such as one of a schedule that was never reached."""
    trace = read(written(tmp_path / "none.json", {"traceEvents": []})).trace

    assert len(trace.events) == 0
    assert trace.problem == "Nothing was recorded: the trace holds no events."


def test_a_trace_of_another_version_is_read_without_what_it_lacks(tmp_path: Path) -> None:
    """No base time, ranks, groups, types or thread names; whole microseconds; a bare list."""
    events = [
        event("cpu_op", "aten::mm", 4, 5, 12, pid=4),
        event("user_annotation", "gloo:all_reduce", 6, 6, 8, pid=4),
        {"ph": "X", "name": "bare", "ts": 20},
        {"ph": "i", "name": "instant"},
        "nonsense",
    ]

    recording = read(written(tmp_path / "rank3.json", events))

    assert recording.zero_ns == 0
    assert recording.trace.rank == 3
    assert recording.trace.events.start_ns.tolist() == [0, 1000, 15_000]
    assert recording.trace.events.kind.tolist() == [COMPUTE, COMMUNICATION, HOST]
    assert calls(recording.trace) == {("all-reduce", 0): 1}
    assert recording.trace.groups == ()


def test_only_marks_that_end_a_step_count(tmp_path: Path) -> None:
    """What nbdist has put into the file says which; steps before the wanted ones are cut away."""
    ends = (9, 10, 19, 20, 29, 30)
    marks = [event("user_annotation", "nbdist.step", 1, at, at + 1) for at in ends]
    operators = [event("cpu_op", "aten::mm", 1, at, at + 1) for at in (0, 12, 22)]
    ours = {"ends": [1, 3, 5], "skipped": 1}
    whole = {"nbdist": ours, "traceEvents": operators + marks}

    trace = read(written(tmp_path / "steps.json", whole)).trace

    assert [(step.number, step.start_ns, step.end_ns) for step in trace.steps] == [
        (0, 0, 10_000), (1, 10_000, 20_000),
    ]  # fmt: skip
    assert trace.events.start_ns.tolist() == [1000, 11_000]
    assert WAIT not in trace.events.kind
    assert COPY not in trace.events.kind


def test_a_folder_is_read_whole(tmp_path: Path) -> None:
    """What cannot be read is told; two of one rank, and none at all, are refused."""
    for rank in (0, 1):
        source = FOLDER / "ddp" / f"rank{rank}.json.gz"
        (tmp_path / source.name).write_bytes(source.read_bytes())
    (tmp_path / "rank2.json").write_text("torn")

    trace = read_folder(tmp_path)

    assert [rank.rank for rank in trace.ranks] == [0, 1]
    assert "rank2.json is not a trace" in trace.notes[0]
    (tmp_path / "again.json.gz").write_bytes((tmp_path / "rank1.json.gz").read_bytes())
    with pytest.raises(TraceError, match="two traces of rank 1"):
        read_folder(tmp_path)
    with pytest.raises(TraceError, match=r"no traces in .*absent.*--save"):
        read_folder(tmp_path / "absent")
