"""Time of a step of the optimizer, and where it goes: compute, exposed messages, idle stages.

docs/plan.md has the model in words, with the source of each constant.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from nbdist.bandwidth.results import OPS, LinkModel
from nbdist.planner.activations import CHUNKS
from nbdist.planner.block_time import Pass, RankSpeed, Speeds, block_pass, embedding_pass, head_pass
from nbdist.planner.collective_time import (
    all_to_all_bytes_per_s,
    latency_s,
    ring_bytes_per_s,
    ring_of,
)
from nbdist.planner.devices import Device
from nbdist.planner.models import ModelShape
from nbdist.planner.pipeline_time import makespan_s
from nbdist.planner.shape.transformer import Transformer, linears, stages_of
from nbdist.planner.workload import (
    Widths,
    Workload,
    is_megatron,
    micro_batches,
    recipe_for,
    rows_each,
    widths_for,
)
from nbdist.strategy import footprint
from nbdist.strategy.choice import Strategy, steps_of
from nbdist.strategy.table import HELD, SentBytes

# footprint's collective -> what is measured of it.
_MEASURED = {
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-gather": "all_gather",
    "broadcast": "broadcast",
    "ring": "send_recv",
    "all-to-all": "all_to_all",
    "send": "send_recv",
}
# Of the calls in a block, those of its forward: they come once more where it is computed again.
_FORWARD = {"all-reduce": 1 / 2, "ring": 1 / 3, "all-to-all": 1 / 2}
# Messages for each exchange of rows: how many there are, where each belongs and its weight.
_WITH_ROWS = 2
# Of matrices, and bytes of a number of theirs that torch.optim.Muon's owners get (fp32).
_SPLITS, _MUON_WIDTH = ("dp_shard", "tp"), 4
SPEEDS = Speeds()


@dataclass(frozen=True, slots=True)
class Flow:
    """The messages of a rank in an optimizer step along some axes; bytes are of all messages."""

    sent: SentBytes
    wire_bytes: float
    messages: int


@dataclass(frozen=True, slots=True)
class Time:
    """A step of the optimizer, estimated, in seconds.

    Attributes:
        compute_s: Forward, backward, what is computed again, and the optimizer, of the stage that
            has most.
        idle_s: A pipeline's stages wait for each other.
        communication_s: All messages, one after the other.
        samples: That all ranks train on in it.
        source: What the communication's time is from.
        exposed_s: By axis (dp, tp, pp, cp, ep), the messages that computation waits for.
        model_flops: Operations of the step on all ranks, without what is computed again.
        peak_flops: Of all ranks together, operations per second.
        tokens: Of each sample.
    """

    compute_s: float
    idle_s: float
    communication_s: float
    samples: int
    source: str = "links"
    exposed_s: Mapping[str, float] = field(default_factory=dict, hash=False)
    model_flops: float = 0.0
    peak_flops: float = 0.0
    tokens: int = 0

    @property
    def step_s(self) -> float:
        """The prediction: what overlaps is behind computation, and the rest is not."""
        return self.compute_s + self.idle_s + sum(self.exposed_s.values())

    @property
    def least_s(self) -> float:
        """With all communication behind computation, of different axes at the same time."""
        return min(self.step_s, max(self.compute_s + self.idle_s, self.communication_s))

    @property
    def most_s(self) -> float:
        """With none of it."""
        return max(self.compute_s + self.idle_s + self.communication_s, self.step_s)

    @property
    def cost_s(self) -> float:
        """Seconds per sample; strategies are ranked by it."""
        return self.step_s / self.samples

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second of all ranks together."""
        return self.samples * self.tokens / self.step_s

    @property
    def mfu(self) -> float:
        """The model's operations as a part of the data sheet's peak; what is done again is none."""
        return self.model_flops / self.step_s / self.peak_flops


def samples(choice: Strategy, load: Workload) -> int:
    """The effective batch: of each data-parallel rank, not of each rank."""
    dp = 1 if choice.name == "single" else choice.degrees.dp
    return load.batch * dp * choice.options.accumulate


def flows(model: ModelShape, choice: Strategy, load: Workload) -> tuple[Flow, ...]:
    """Count the messages of a rank in an optimizer step, with activations."""
    widths = widths_for(model, choice, load)
    tokens = load.batch * load.sequence
    shape, x = model.shape, widths.compute
    rows = rows_each(shape, choice, load)
    sizes = {
        "activations": tokens * shape.hidden * x,
        "boundary": tokens * shape.hidden * x,
        "keys-values": 2 * tokens * shape.kv_heads * shape.head_size * x,
        # Of all ranks that share experts, as if each got as many rows as the one with most.
        "tokens": tokens * choice.degrees.ep * rows * shape.hidden * widths.residual,
    }
    result = []
    for sent in _sent_of(choice, load):
        if sent.what in HELD:
            whole = _model_bytes(model, choice, sent, widths)
            times = _times_of_model(choice, load, sent)
            # Buckets and units decide how many messages there are: about one for a block.
            count = times * sent.times * math.ceil(shape.layers / choice.degrees.pp)
        else:
            whole, times = sizes[sent.what], _times_of_blocks(shape, choice, sent)
            count = times * sent.times * micro_batches(choice, load)
            count *= _WITH_ROWS if sent.what == "tokens" else 1
            if sent.call == "send" and is_megatron(choice, load):
                whole /= choice.degrees.tp
        wire = times * footprint.wire_bytes(choice, sent, whole)
        result.append(Flow(sent, wire, max(1, round(count))))
    return (*result, *_muon_flows(shape, choice, load))


def _muon_flows(shape: Transformer, choice: Strategy, load: Workload) -> Iterator[Flow]:
    """Count Muon's messages for blocks' split matrices: all to their owners, and back.

    In fp32, as nbdist.parallel.optimizers.muon does (docs/strategies.md#optimizers).
    """
    split = footprint.split_axes(choice, "parameters")
    axes = tuple(axis for axis in split if axis in _SPLITS and getattr(choice.degrees, axis) > 1)
    if load.optimizer != "muon" or not {"fsdp", "tp"} & {*steps_of(choice)} or not axes:
        return
    numbers = sum(count * layer.weights for count, kind in shape.kinds for layer in linears(kind))
    sent = SentBytes(axes, "all-to-all", "matrices", 2)
    whole = numbers * _MUON_WIDTH / choice.degrees.pp
    yield Flow(sent, footprint.wire_bytes(choice, sent, whole), 2)


def _times_of_model(choice: Strategy, load: Workload, sent: SentBytes) -> float:
    """How often what is about the model is sent in a step, besides its own `times`.

    Gradients wait for the last backward, but for those of experts beside DDP, which nbdist averages
    in each, and Megatron in the last. What is gathered is gathered in each, but for DeepSpeed below
    stage 3: there it is by the optimizer's step alone.
    """
    in_each = choice.name != "deepspeed" or choice.options.stage == 3
    is_alone = sent.call == "all-reduce" and sent.axes == ("edp",) and not is_megatron(choice, load)
    is_gathered = sent.call == "all-gather" and in_each
    times = float(choice.options.accumulate if is_gathered or is_alone else 1)
    if sent.call == "all-gather" and choice.degrees.pp > 1 and sent.times > 1:
        # Every forward leaves a pipeline's blocks split, no backward but the last does.
        times *= (micro_batches(choice, load) + 1) / sent.times
    return times


def _times_of_blocks(shape: Transformer, choice: Strategy, sent: SentBytes) -> float:
    """The same of activations: between stages once in each backward, else in each block."""
    layers, times = math.ceil(shape.layers / choice.degrees.pp), 1.0
    if sent.what != "boundary":
        blocks = shape.routed_blocks if sent.what == "tokens" else layers
        times = blocks + _again_calls(choice, blocks, sent) * _FORWARD[sent.call]
    if sent.what == "boundary" and choice.options.schedule == "interleaved" and layers > 1:
        times *= CHUNKS
    return times * choice.options.accumulate


def _sent_bytes(model: ModelShape, choice: Strategy, sent: SentBytes, widths: Widths) -> float:
    """Bytes of the model in these messages; what is frozen is sent only where it is split."""
    if sent.what == "gradients":
        return model.trained * widths.reduced
    if {*sent.axes} & {*footprint.split_axes(choice, "parameters")}:
        return model.whole_bytes(widths.gathered)
    return model.trained * widths.gathered


def _model_bytes(model: ModelShape, choice: Strategy, sent: SentBytes, widths: Widths) -> float:
    """Bytes of a message about the model; experts that ranks share have their own messages."""
    width = widths.reduced if sent.what == "gradients" else widths.gathered
    stacked = model.shape.stacked_parameters * width / (choice.degrees.pp * choice.degrees.ep)
    if sent.axes == ("edp",):
        return stacked
    rest = _sent_bytes(model, choice, sent, widths) - model.shape.stacked_parameters * width
    whole = footprint.model_message(choice, sent, rest)
    return whole if choice.degrees.ep > 1 else whole + stacked


def _again_calls(choice: Strategy, blocks: int, sent: SentBytes) -> int:
    """Number of blocks whose forward messages are sent again in backward."""
    is_again = sent.what == "tokens" and choice.options.checkpoint == "selective"
    return blocks if is_again else again_blocks(choice, blocks)


def _sent_of(choice: Strategy, load: Workload) -> Iterator[SentBytes]:
    """Count the choice's messages: of experts too, along the ranks that have the same ones.

    The parts that Megatron sends between stages are gathered over tp.
    """
    for sent in footprint.sent_of(choice):
        yield sent
        if choice.degrees.ep > 1 and choice.degrees.edp > 1 and sent.what in HELD:
            yield replace(sent, axes=("edp",))
        if sent.call == "send" and choice.degrees.tp > 1 and is_megatron(choice, load):
            yield replace(sent, call="all-gather", axes=("tp",))


def again_blocks(choice: Strategy, layers: int) -> int:
    """Number of blocks whose products are recomputed in backward."""
    how = choice.options.checkpoint
    if how.isdecimal():
        return layers // int(how)
    return layers if how == "full" else 0


def model_flops(model: ModelShape, choice: Strategy, load: Workload) -> float:
    """Operations of all ranks in a step of the optimizer, without what is computed again.

    6 per parameter and token, and 12 for each layer, width and pair of tokens in attention.
    Source: https://arxiv.org/abs/2204.02311, appendix B. 4 of a parameter that is frozen beside
    adapters: 2 are those of its gradient. Of experts only those that a token is sent to count.
    """
    shape = model.shape
    width = shape.heads * (shape.head_size + shape.value_size)
    idle = shape.parameters - shape.active_parameters
    each = (
        flops_each(model, model.parameters - idle, model.trained - idle)
        + 6 * shape.layers * width * load.sequence
    )
    return each * samples(choice, load) * load.sequence


def flops_each(model: ModelShape, parameters: float, trained: float) -> float:
    """Operations of products for each token, of parameters of which so many are trained."""
    return 4 * parameters + 2 * trained if model.lora else 6 * parameters


def time_of(
    model: ModelShape,
    choice: Strategy,
    load: Workload,
    device: Device,
    measured: LinkModel | None = None,
    speeds: Speeds = SPEEDS,
) -> Time | None:
    """The time of a step of the optimizer, estimated; None where the device's speed is not known.

    `measured` is a model of these ranks' collectives: it counts before the device's data sheet.
    """
    precision = choice.options.precision
    recipe = recipe_for(choice, load)
    if recipe.parameters == 2 and precision == "fp32":
        precision = "bf16"
    if not device.flops(precision) or not device.bandwidth:
        return None
    width = 4 if precision == "fp32" else 2
    rows = rows_each(model.shape, choice, load)
    rank = RankSpeed(device, speeds, precision, width, is_megatron(choice, load), rows)
    sums = {
        (flow.sent.what, flow.sent.call, flow.sent.axes): _flow_s(flow, choice, rank, measured)
        for flow in flows(model, choice, load)
    }
    is_measured = bool(sums) and all(by_measurement for _, by_measurement in sums.values())
    sent_s = {key: seconds for key, (seconds, _) in sums.items()}
    step = _Step(model, choice, load, rank, sent_s, *_passes(model, choice, load, rank))
    compute_s, idle_s, exposed_s = step.pipelined() if choice.degrees.pp > 1 else step.flat()
    if matrices_s := step.of("matrices"):  # by the optimizer, when all else is done
        axis = "dp" if choice.degrees.dp_shard > 1 else "tp"
        exposed_s[axis] = exposed_s.get(axis, 0.0) + matrices_s
    ranks = 1 if choice.name == "single" else choice.world_size
    return Time(
        compute_s=compute_s + step.optimizer_s,
        idle_s=idle_s,
        communication_s=sum(sent_s.values()),
        samples=samples(choice, load),
        source="measurement" if is_measured else "links",
        exposed_s={axis: seconds for axis, seconds in exposed_s.items() if seconds > 0},
        model_flops=model_flops(model, choice, load),
        peak_flops=device.flops(precision) * ranks,
        tokens=load.sequence,
    )


def _passes(
    model: ModelShape, choice: Strategy, load: Workload, rank: RankSpeed
) -> tuple[Mapping[Transformer, Pass], Pass, Pass]:
    """Times of one micro-batch: a block of each kind, the head and the embedding."""
    widths = widths_for(model, choice, load)
    samples_each = load.batch / micro_batches(choice, load)
    tokens = samples_each * load.sequence / choice.degrees.cp
    blocks = {
        kind: block_pass(kind, choice, widths, samples_each, load.sequence, rank)
        for _, kind in model.shape.kinds
    }
    if choice.options.checkpoint.isdecimal():
        part = again_blocks(choice, model.shape.layers) / model.shape.layers
        blocks = {
            kind: replace(block, backward_s=block.backward_s + part * block.forward_s)
            for kind, block in blocks.items()
        }
    ends = (head_pass, embedding_pass)
    head, embedding = (end(model.shape, choice, widths, tokens, rank) for end in ends)
    return blocks, head, embedding


def _flow_s(
    flow: Flow, choice: Strategy, rank: RankSpeed, measured: LinkModel | None
) -> tuple[float, bool]:
    """Seconds of all its messages, one after the other, and whether by measurement."""
    n = footprint.axes_size(choice, flow.sent.axes)
    op = _MEASURED[flow.sent.call]
    if measured is not None and op in measured.fits:
        each = flow.wire_bytes / flow.messages / OPS[op].factor(n)
        return flow.messages * measured.seconds(op, each, n), True
    ring = ring_of(choice, flow.sent.axes, rank.device.per_host)
    rate = all_to_all_bytes_per_s if flow.sent.call == "all-to-all" else ring_bytes_per_s
    bytes_s = flow.wire_bytes / rate(ring, rank.device, rank.speeds)
    return flow.messages * latency_s(flow.sent.call, ring, rank.device) + bytes_s, False


@dataclass(frozen=True, slots=True)
class _Step:
    """A step's parts: passes of one piece of a batch, and seconds of messages by flow."""

    model: ModelShape
    choice: Strategy
    load: Workload
    rank: RankSpeed
    sent_s: Mapping[tuple[str, str, tuple[str, ...]], float]
    blocks: Mapping[Transformer, Pass]
    head: Pass
    embedding: Pass

    @property
    def passes(self) -> int:
        """Backwards of a step."""
        return self.choice.options.accumulate

    @property
    def optimizer_s(self) -> float:
        """Everything is read, parameters and state are written; gradients are added up before."""
        recipe = recipe_for(self.choice, self.load)
        stacked, degrees = self.model.shape.stacked_parameters, self.choice.degrees
        shares = footprint.held_parts(self.choice, self.model.trained, recipe, stacked)
        rest = (self.model.trained - stacked) / degrees.tp + stacked / degrees.ep
        whole = rest * recipe.gradients / degrees.pp
        adding = 3 * whole * (self.passes * micro_batches(self.choice, self.load) - 1)
        moved = 2 * sum(shares.values()) - shares["gradients"] + adding
        return moved / self.rank.bytes_per_s

    def of(self, what: str, axes: tuple[str, ...] = ()) -> float:
        """Seconds of what is sent so, along any axes or along these."""
        return sum(
            seconds
            for (sent, _, along), seconds in self.sent_s.items()
            if sent == what and axes in {(), along}
        )

    def flat(self) -> tuple[float, float, dict[str, float]]:
        """Compute, idle and exposed seconds without a pipeline."""
        layers, k = self.model.shape.layers, self.passes
        every = self._blocks(self.model.shape.kinds)
        forward_s = every.forward_s + self.head.forward_s + self.embedding.forward_s
        backward_s = every.backward_s + self.head.backward_s + self.embedding.backward_s
        split, tokens = self.of("activations"), self.of("tokens")
        inside = split + tokens
        axis = "cp" if self.choice.name == "ulysses" else "tp"
        ring = self._hidden(self.of("keys-values"), k * every.attention_s)
        # What other axes wait for leaves time to messages of this one.
        forward_s += inside / 2 / k
        backward_s += inside / 2 / k
        exposed = {axis: split, "ep": tokens}
        exposed["dp"] = self._model_s(forward_s, backward_s, layers)
        exposed["cp"] = exposed.get("cp", 0.0) + ring
        return k * (forward_s + backward_s) - inside, 0.0, exposed

    def pipelined(self) -> tuple[float, float, dict[str, float]]:
        """The same of a pipeline; compute is that of the slowest stage."""
        choice, shape, k = self.choice, self.model.shape, self.passes
        p, pieces = choice.degrees.pp, micro_batches(choice, self.load)
        most = math.ceil(shape.layers / p)
        calls = k * pieces * most
        # Two of its four calls are a forward's, and those that are computed again.
        again = again_blocks(choice, most) / most
        each = self.of("activations") / calls
        tp = Pass(each * 2 / (4 + 2 * again), each * (2 + 2 * again) / (4 + 2 * again))
        plain, whole = [], []
        for stage, kinds in enumerate(stages_of(shape, p)):
            blocks, every = sum(count for count, _ in kinds), self._blocks(kinds)
            ends = [self.embedding] * (stage == 0) + [self.head] * (stage == p - 1)
            ahead = every.forward_s + sum(end.forward_s for end in ends)
            back = every.backward_s + sum(end.backward_s for end in ends)
            plain.append(Pass(ahead, back))
            whole.append(Pass(ahead + blocks * tp.forward_s, back + blocks * tp.backward_s))
        chunks = CHUNKS if choice.options.schedule == "interleaved" and most > 1 else 1
        send_s = self.of("boundary") / (2 * k * pieces * chunks)
        times = (
            tuple(stage.forward_s for stage in whole),
            tuple(stage.backward_s for stage in whole),
        )
        schedule = choice.options.schedule
        without = makespan_s(schedule, *times, 0.0, pieces, chunks)
        sends = makespan_s(schedule, *times, send_s, pieces, chunks) - without
        slowest = max(range(p), key=lambda stage: whole[stage].both_s)
        busy, compute = pieces * whole[slowest].both_s, pieces * plain[slowest].both_s
        dp = self._model_s(whole[slowest].forward_s, whole[slowest].backward_s, most)
        exposed = {"tp": k * (busy - compute), "pp": k * sends, "dp": dp}
        return k * compute, k * (without - busy), exposed

    def _blocks(self, kinds: Iterable[tuple[int, Transformer]]) -> Pass:
        """Time of so many blocks of each kind, one after the other."""
        passes = [(count, self.blocks[kind]) for count, kind in kinds]
        return Pass(
            sum(count * block.forward_s for count, block in passes),
            sum(count * block.backward_s for count, block in passes),
            sum(count * block.attention_s for count, block in passes),
        )

    def _hidden(self, sent_s: float, behind_s: float) -> float:
        """Compute the exposed part of messages, and how much slower they make the computation."""
        slower = self.rank.speeds.contention * min(sent_s, behind_s)
        return max(0.0, sent_s - behind_s) + slower

    def _model_s(self, forward_s: float, backward_s: float, blocks: int) -> float:
        """Seconds in which parameters and gradients are waited for.

        DDP's buckets are reduced behind the last backward but for the last one; FSDP gathers a
        block while the one before computes, and reduces behind the backward of the next. Copies
        beside tp or pp reduce when all is done, as Megatron does, and so do DeepSpeed's stages 1
        and 2, and what ZeRO gathers after the optimizer's step is waited for.
        """
        gather, reduce = self.of("parameters"), self.of("gradients")
        steps, choice = {*steps_of(self.choice)}, self.choice
        is_sharded = bool({"fsdp", "fsdp1"} & steps) and choice.degrees.dp_shard > 1
        is_sharded |= choice.name == "deepspeed" and choice.options.stage == 3
        if is_sharded:
            return self._sharded_s(gather, reduce, forward_s, backward_s, blocks)
        if "ddp" in steps and choice.name not in {"tp", "pp"}:
            alone = self.of("gradients", axes=("edp",))  # each is waited for where it is made
            buckets = reduce - alone
            last = buckets / blocks
            hidden = self._hidden(buckets - last, backward_s * (1 - 1 / blocks))
            return gather + alone + last + hidden
        return gather + reduce

    def _sharded_s(
        self, gather: float, reduce: float, forward_s: float, backward_s: float, blocks: int
    ) -> float:
        """FSDP: of the root and of one block everything is waited for, of the others the rest."""
        once = self.choice.options.shard == "grad-op"
        passes, pieces = self.passes, micro_batches(self.choice, self.load)
        ahead = gather / passes / (1 if once else pieces + 1)
        back = 0.0 if once else ahead
        width = widths_for(self.model, self.choice, self.load).gathered
        degrees = self.choice.degrees
        whole = self.model.whole_bytes(width, replace(degrees, tp=1, pp=1))
        root = self.model.root_parameters * width / whole
        alone = root + (1 - root) / blocks
        waits = passes * ahead * alone + reduce * alone
        rest = 1 - alone
        waits += passes * self._hidden(ahead * rest, forward_s)
        waits += (passes * pieces - 1) * self._hidden(back * rest, backward_s)
        return waits + self._hidden((back + reduce) * rest, backward_s)
