"""What a recorded cell has allocated, and for what: against sums that torch itself gives."""

from __future__ import annotations

import gc
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers
from torch.utils.checkpoint import checkpoint

from nbdist.errors import SnapshotError
from nbdist.memory.rank import cpu
from nbdist.memory.rank import record as memory_record
from nbdist.memory.snapshot import (
    ACTIVATION,
    BACKWARD,
    BEFORE,
    CATEGORIES,
    COMMUNICATION,
    GRADIENT,
    OPTIMIZER,
    PARAMETER,
    STAYS,
    STEPPING,
    Blocks,
    MemoryOptions,
    RankMemory,
)
from nbdist.memory.timeline import is_in_use
from nbdist.parallel.base.tensors import local_of
from nbdist.recording.rank import cell_hook, steps
from nbdist.variables import unpack
from tests.support.recordings import Place, forbid_parsing, own_profiler
from tests.support.torch_ranks import on_ranks

Record = Callable[..., RankMemory]


@pytest.fixture
def record(monkeypatch: pytest.MonkeyPatch) -> Iterator[Record]:
    """Records a call in this process, which is no rank; nothing is left on afterwards."""
    monkeypatch.setattr(memory_record, "this_rank", Place)
    gc.collect()
    before = dict(optimizers._global_optimizer_post_hooks)

    def run(cell: Callable[[], Any], **options: Any) -> RankMemory:
        recording = memory_record._Recording(MemoryOptions(**options), "token")
        recording.start()
        try:
            result = cell()
        finally:
            recording.stop()
        del result
        return recording.memory()

    yield run
    assert not steps.is_profiling(unknown=True)
    assert dict(optimizers._global_optimizer_post_hooks) == before
    assert not optimizers._global_optimizer_pre_hooks


def at(memory: RankMemory, time_ns: int, category: int) -> Blocks:
    """The blocks of a category that are there at a time."""
    blocks = memory.blocks
    return blocks.take(is_in_use(blocks, time_ns) & (blocks.category == category))


def total(memory: RankMemory, time_ns: int, category: int) -> int:
    """Bytes of exact blocks."""
    there = at(memory, time_ns, category)
    return int(there.size_bytes[there.is_exact].sum())


def elements_bytes(tensors: Any) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


class Block(torch.nn.Module):
    """A small transformer's block with an embedding before it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(30, 16)
        self.layer = torch.nn.TransformerEncoderLayer(16, 2, 40, batch_first=True)
        self.head = torch.nn.Linear(16, 30)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.layer(self.embedding(tokens))
        result: torch.Tensor = self.head(hidden)
        return result


def loss_of(model: torch.nn.Module) -> torch.Tensor:
    tokens = torch.randint(0, 30, (4, 7))
    logits = model(tokens)
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens.flatten())


def test_parameters_gradients_and_state_are_the_bytes_of_their_elements(record: Record) -> None:
    """At the peak of a second step, of a model that was there before."""
    model = Block()
    optimizer = torch.optim.Adam(model.parameters())

    def cell() -> None:
        for _ in range(2):
            optimizer.zero_grad()
            loss_of(model).backward()
            optimizer.step()

    memory = record(cell)
    stepping = [phase for phase in memory.phases if phase.kind == STEPPING]
    parameters = list(model.parameters())
    states = [v for state in optimizer.state.values() for v in state.values()]

    assert [phase.kind for phase in memory.phases] == [BACKWARD, STEPPING] * 2
    assert len(memory.step_ends_ns) == 2
    assert memory.step_ends_ns[1] >= stepping[1].end_ns > stepping[1].start_ns
    now = stepping[1].start_ns
    assert total(memory, now, PARAMETER) == elements_bytes(parameters)
    assert total(memory, now, GRADIENT) == elements_bytes(p.grad for p in parameters)
    assert total(memory, now, OPTIMIZER) == elements_bytes(states)
    assert total(memory, stepping[0].start_ns, OPTIMIZER) == 0
    assert COMMUNICATION not in memory.blocks.category
    assert {*at(memory, now, PARAMETER).start_ns.tolist()} == {BEFORE}


def test_activations_are_what_autograd_has_saved(record: Record) -> None:
    """When the backward begins: the very storages, and the loss beside them."""
    model, saved, loss_at = Block(), dict[int, int](), []
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def cell() -> None:
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            loss = loss_of(model)
        loss_at.append(loss.untyped_storage().data_ptr())
        loss.backward()

    memory = record(cell)
    (backward,) = memory.phases
    there = at(memory, backward.start_ns - 1, ACTIVATION)
    activations = dict(zip(there.address.tolist(), there.size_bytes.tolist(), strict=True))
    activations.pop(loss_at[0])

    assert len(saved) > 10
    # Autograd's own first gradient is made as the backward begins.
    assert {a: size for a, size in activations.items() if a in saved} == saved
    assert all(size == 4 for address, size in activations.items() if address not in saved)


def test_checkpoints_keep_less_and_make_it_again(record: Record) -> None:
    """Only the input of each layer; what is made again in the backward is temporary there."""
    model = torch.nn.Sequential(*[torch.nn.Linear(64, 64) for _ in range(6)])

    def plain(layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return layer(hidden).relu().sin()

    def again(layer: torch.nn.Module, hidden: torch.Tensor) -> torch.Tensor:
        return checkpoint(plain, layer, hidden, use_reentrant=False, preserve_rng_state=False)

    def saved_count(run: Callable[..., torch.Tensor]) -> int:
        def cell() -> None:
            hidden = torch.ones(32, 64, requires_grad=True)
            for layer in model:
                hidden = run(layer, hidden)
            hidden.sum().backward()

        memory = record(cell)
        (backward,) = [phase for phase in memory.phases if phase.kind == BACKWARD]
        return int(at(memory, backward.start_ns, ACTIVATION).size_bytes.sum()) // (32 * 64 * 4)

    assert saved_count(again) == 7  # six inputs and the result
    # Of each layer its input, what relu gives, and the argument of sin, which is the same.
    assert saved_count(plain) == 13


def test_allocations_have_the_line_of_their_forward(record: Record) -> None:
    """Of every operator, and of the backward's; lines of modules' dispatch are left out."""
    model = torch.nn.Linear(8, 8)

    def cell() -> None:
        hidden = model(torch.ones(4, 8))
        hidden.exp().sum().backward()

    first = cell.__code__.co_firstlineno
    memory = record(cell)
    lines = defaultdict(set)
    for operator, stack in zip(memory.blocks.operator, memory.blocks.stack, strict=True):
        if operator >= 0 and stack >= 0:
            frames = [frame for frame in memory.stacks[stack] if frame.function == "cell"]
            lines[memory.names[operator]] |= {
                (frame.line - first, frame.is_line_known) for frame in frames
            }

    assert lines["aten::ones"] == {(1, True)}
    assert lines["aten::linear"] == lines["AddmmBackward0"] == {(1, True)}
    assert lines["aten::exp"] == lines["ExpBackward0"] == {(2, True)}
    files = {frame.file for stack in memory.stacks for frame in stack}
    assert __file__ in files
    assert not any(file.endswith("modules/module.py") for file in files)
    assert any(file.endswith("torch/nn/modules/linear.py") for file in files)


def test_without_stacks_the_same_blocks_have_the_same_categories(record: Record) -> None:
    """Phases come from the backward's nodes then."""

    def cell() -> Any:
        torch.manual_seed(1)
        model = torch.nn.Sequential(torch.nn.Linear(9, 9), torch.nn.ReLU(), torch.nn.Linear(9, 3))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        for _ in range(2):
            model(torch.ones(5, 9)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        return model, optimizer

    def sizes_and_kinds(memory: RankMemory) -> list[tuple[int, str]]:
        kinds = [CATEGORIES[category] for category in memory.blocks.category]
        rows = zip(memory.blocks.size_bytes.tolist(), kinds, memory.blocks.start_ns, strict=True)
        return [(size, kind) for size, kind, start in rows if start != BEFORE]

    with_stacks, without = record(cell), record(cell, has_stacks=False)

    assert without.stacks == ()
    # A gradient's first seed is made before the first node of a backward.
    assert [row for row in sizes_and_kinds(with_stacks) if row[0] > 8] == [
        row for row in sizes_and_kinds(without) if row[0] > 8
    ]
    assert [phase.kind for phase in without.phases] == [BACKWARD, STEPPING] * 2


def test_without_the_profilers_tree_there_are_no_stacks(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file for Chrome has the same allocations; what lacks is told."""
    tensors: list[torch.Tensor] = []

    class Results:
        """As of a version of torch that has no tree."""

    original = torch.profiler.profile.stop

    def stop(self: Any) -> None:
        original(self)
        whole = self.profiler.kineto_results
        without = Results()
        without.save = whole.save  # type: ignore[attr-defined]
        self.profiler.kineto_results = without

    monkeypatch.setattr(cpu.profile, "stop", stop)
    memory = record(lambda: tensors.append(torch.ones(1000)))
    b = memory.blocks
    (place,) = (b.address == tensors[0].data_ptr()).nonzero()[0]

    assert memory.problem == cpu.NO_TREE
    assert (b.size_bytes[place], b.end_ns[place], b.stack[place]) == (4000, STAYS, -1)
    assert b.start_ns[place] > 0


def test_owners_that_cannot_be_told_leave_the_cell_alone(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its step is made, the history is there, and what lacks is told."""
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before = model.weight.detach().clone()

    def fail(_optimizer: object) -> None:
        raise RuntimeError("odd state")

    def cell() -> None:
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()

    monkeypatch.setattr(memory_record.owners, "of_optimizer", fail)
    memory = record(cell)

    assert not torch.equal(model.weight, before)
    assert memory.problem == "What SGD holds could not be determined: odd state."
    assert [phase.kind for phase in memory.phases] == [BACKWARD, STEPPING]
    assert len(memory.step_ends_ns) == 1


def test_a_closure_s_backward_is_apart_from_its_step(record: Record) -> None:
    """LBFGS calls it several times in one step."""
    model = torch.nn.Linear(6, 6)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = (model(torch.ones(2, 6)) - 1).square().sum()
        loss.backward()
        return loss

    memory = record(lambda: optimizer.step(closure))
    ends = [0]
    for phase in memory.phases:
        assert phase.start_ns >= ends[-1]
        ends.append(phase.end_ns)

    kinds = [phase.kind for phase in memory.phases]
    assert kinds.count(BACKWARD) >= 2
    assert kinds[0] == kinds[-1] == STEPPING


def test_names_of_code_that_is_gone_cost_no_recording(
    record: Record, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch parses all names where it is asked to keep events of several cycles."""
    forbid_parsing(monkeypatch)
    kept: list[torch.Tensor] = []

    memory = record(lambda: kept.append(torch.ones(1000)))

    assert memory.problem == ""
    assert kept[0].data_ptr() in memory.blocks.address


def test_another_profiler_is_told_and_left_alone(record: Record) -> None:
    """It goes on; one in the cell ends the recording."""
    profiler = own_profiler()
    profiler.start()
    with pytest.raises(SnapshotError, match="Another profiler runs on this rank"):
        record(lambda: None)
    assert steps.is_profiling(unknown=False)
    profiler.stop()

    def cell() -> None:
        with own_profiler():
            torch.ones(3)

    with pytest.raises(SnapshotError, match="has used a profiler of its own"):
        record(cell)


def test_what_is_older_than_the_recording_ends_when_it_is_freed(record: Record) -> None:
    """Gradients of an earlier cell, a variable, and what only autograd holds."""
    model = torch.nn.Linear(30, 30)
    model(torch.ones(3, 30)).sum().backward()
    gradient = model.weight.grad.data_ptr()
    hidden = torch.ones(700, requires_grad=True).exp()
    saved, loss = hidden.data_ptr(), hidden.square().sum()
    del hidden
    box = [torch.ones(800)]
    boxed = box[0].data_ptr()

    between: list[torch.Tensor] = []

    def cell() -> None:
        between.append(torch.ones(11))
        model.zero_grad()
        between.append(torch.ones(11))
        loss.backward()
        between.append(torch.ones(11))
        box.clear()
        between.append(torch.ones(11))

    memory = record(cell)
    new = memory.blocks.take(memory.blocks.end_ns == STAYS)
    old = memory.blocks.take(memory.blocks.start_ns == BEFORE)
    begins = dict(zip(new.address.tolist(), new.start_ns.tolist(), strict=True))
    ends = dict(zip(old.address.tolist(), old.end_ns.tolist(), strict=True))
    first, second, third, fourth = [begins[tensor.data_ptr()] for tensor in between]

    assert first < ends[gradient] < second < ends[saved] < third < ends[boxed] < fourth
    assert ends[model.weight.data_ptr()] == STAYS


def test_memory_of_no_allocator_is_there_with_its_name(record: Record, tmp_path: Path) -> None:
    """A mapped file that the cell opens."""
    (tmp_path / "w").write_bytes(b"\1" * 4096)
    model = torch.nn.Linear(2, 2)

    def cell() -> None:
        mapped = torch.from_file(str(tmp_path / "w"), size=1024, dtype=torch.float32)
        model.weight = torch.nn.Parameter(mapped)

    memory = record(cell)
    (place,) = (memory.blocks.address == model.weight.data_ptr()).nonzero()[0]

    assert memory.blocks.size_bytes[place] == 4096
    assert memory.blocks.category[place] == PARAMETER
    assert memory.blocks.end_ns[place] == STAYS


def test_what_arrives_is_what_was_recorded(record: Record) -> None:
    """By begin, finish and now, as the notebook calls them."""
    with pytest.raises(SnapshotError, match="Nothing was recorded"):
        memory_record.finish(())
    memory_record.begin(MemoryOptions(), "mine")
    assert cell_hook.state.armed is not None
    with pytest.raises(SnapshotError, match="Nothing was recorded"):
        memory_record.finish(())
    assert cell_hook.state.armed is None
    memory_record.begin(MemoryOptions(), "mine")
    recording, cell_hook.state.armed = cell_hook.state.armed, None
    assert recording is not None
    recording.start()
    tensor = torch.ones(500)
    recording.stop()
    recorded = unpack.unpack(memory_record.finish(()))["memory"]
    now = unpack.unpack(memory_record.now(()))["memory"]

    assert tensor.data_ptr() in recorded.blocks.address
    assert recorded.duration_ns > 0
    assert (now.duration_ns, now.rank) == (0, 0)
    assert tensor.data_ptr() in now.blocks.address
    assert unpack.unpack(memory_record.finish(()))["memory"].duration_ns == recorded.duration_ns


def recorded_on_ranks(wrap: Callable[[torch.nn.Sequential], Any]) -> tuple[RankMemory, int]:
    """A training's, and the bytes of its parameters; at its end bytes are those of elements."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(32, 64), torch.nn.ReLU(), torch.nn.Linear(64, 32)
    model = wrap(torch.nn.Sequential(*layers))
    optimizer = torch.optim.Adam(model.parameters())
    recording = memory_record._Recording(MemoryOptions(), "token")
    recording.start()
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randn(8, 32)).square().sum().backward()
        optimizer.step()
    recording.stop()
    memory, parameters = recording.memory(), [*model.parameters()]
    states = [value for state in optimizer.state.values() for value in state.values()]
    for category, tensors in (
        (PARAMETER, parameters),
        (GRADIENT, [p.grad for p in parameters]),
        (OPTIMIZER, states),
    ):
        size_bytes = elements_bytes(local_of(tensor) for tensor in tensors)
        assert total(memory, memory.phases[-1].end_ns, category) == size_bytes
    assert (len(memory.step_ends_ns), memory.problem) == (3, "")
    return memory, elements_bytes(map(local_of, parameters))


def sharded(model: torch.nn.Sequential) -> torch.nn.Module:
    for layer in (model[0], model[2]):
        fully_shard(layer)
    return fully_shard(model)


@on_ranks(2)
def test_on_two_ranks_the_bytes_are_those_of_the_local_elements() -> None:
    """At the end of the last step; DDP's buckets hold all gradients, FSDP gathers whole layers."""
    whole = 4 * (32 * 64 + 64 + 64 * 32 + 32)
    ddp, size_bytes = recorded_on_ranks(DistributedDataParallel)
    assert size_bytes == whole
    sent = ddp.blocks.take(ddp.blocks.category == COMMUNICATION)
    assert sent.size_bytes.sum() >= whole
    fsdp, size_bytes = recorded_on_ranks(sharded)
    assert size_bytes == whole // 2
    sent = fsdp.blocks.take(fsdp.blocks.category == COMMUNICATION)
    assert sent.size_bytes[~sent.is_exact].sum() >= 3 * whole
