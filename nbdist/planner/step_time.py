"""Time of a step, estimated: arithmetic by the roofline, bytes on the wire by links or measurement.

These are estimates. Every assumption is a constant here and a line of docs/plan.md.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from nbdist.bandwidth.results import OPS, LinkModel
from nbdist.planner.activations import CHUNKS
from nbdist.planner.devices import Device, link_of
from nbdist.planner.models import ModelShape
from nbdist.planner.workload import Workload, micro_batches, recipe_for, widths_of
from nbdist.strategy import footprint
from nbdist.strategy.choice import AXES, Strategy
from nbdist.strategy.table import SentBytes

# Of the peak that a data sheet names. Llama 3 was trained at 38 to 43 %:
# https://arxiv.org/abs/2407.21783, table 4.
UTILISATION = 0.4
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


@dataclass(frozen=True, slots=True)
class Flow:
    """What a rank sends in a step of the optimizer along some axes; bytes are of all messages."""

    sent: SentBytes
    wire_bytes: float
    messages: int


@dataclass(frozen=True, slots=True)
class Time:
    """A step of the optimizer, estimated, in seconds.

    Attributes:
        compute_s: Forward, backward, what is computed again, and the optimizer.
        idle_s: A pipeline's stages wait for each other.
        communication_s: All messages, one after the other.
        samples: That all ranks train on in it.
        source: What the communication's time is from.
    """

    compute_s: float
    idle_s: float
    communication_s: float
    samples: int
    source: str = "links"

    @property
    def least_s(self) -> float:
        """With all communication behind computation."""
        return max(self.compute_s + self.idle_s, self.communication_s)

    @property
    def most_s(self) -> float:
        """With none of it."""
        return self.compute_s + self.idle_s + self.communication_s

    @property
    def cost_s(self) -> float:
        """For each sample, the middle of that range: by this strategies are compared."""
        return (self.least_s + self.most_s) / 2 / self.samples


def bubble(stages: int, pieces: int, schedule: str = "1f1b") -> float:
    """The share of a step in which a pipeline's stages wait.

    (p - 1) / (m + p - 1) for gpipe and 1f1b alike: 1f1b saves memory, not time. Sources:
    https://arxiv.org/abs/2104.04473 section 2.2; https://arxiv.org/abs/2401.10241 (ZB-H1) for zb.
    """
    waits = {"interleaved": 1 / CHUNKS, "zb": 1 / 3}.get(schedule, 1.0) * (stages - 1)
    return waits / (pieces + waits)


def samples(choice: Strategy, load: Workload) -> int:
    """The effective batch: of each data-parallel rank, not of each rank."""
    dp = 1 if choice.name == "single" else choice.degrees.dp
    return load.batch * dp * choice.options.accumulate


def flows(model: ModelShape, choice: Strategy, load: Workload) -> tuple[Flow, ...]:
    """What a rank sends in a step of the optimizer, with activations."""
    recipe = recipe_for(choice, load)
    widths = widths_of(choice, recipe)
    again = choice.options.accumulate
    tokens = load.batch * load.sequence
    shape, x = model.shape, widths.compute
    sizes = {
        "activations": tokens * shape.hidden * x,
        "boundary": tokens * shape.hidden * x,
        "keys-values": 2 * tokens * shape.kv_heads * shape.head_size * x,
    }
    # Buckets and units decide how many messages there are of the model: about one for a block.
    layers = math.ceil(shape.layers / choice.degrees.pp)
    result = []
    for sent in footprint.sent_of(choice):
        if sent.what in {"parameters", "gradients"}:
            width = widths.gathered if sent.what == "parameters" else widths.reduced
            whole = footprint.model_message(choice, sent, model.parameters * width)
            # Gradients wait for the last backward. What is gathered is gathered in each, but for
            # DeepSpeed below stage 3: there it is by the optimizer's step alone.
            in_each = choice.name != "deepspeed" or choice.options.stage == 3
            times = float(again if sent.call == "all-gather" and in_each else 1)
            count = times * sent.times * layers
        else:
            # In a forward and backward: between stages once, else in each block.
            times = 1.0
            if sent.what != "boundary":
                times = layers + again_blocks(choice, layers) * _FORWARD[sent.call]
            times *= again
            count = times * sent.times
            whole = sizes[sent.what]
        wire = times * footprint.wire_bytes(choice, sent, whole)
        result.append(Flow(sent, wire, max(1, round(count))))
    return tuple(result)


def again_blocks(choice: Strategy, layers: int) -> int:
    """Of so many blocks, those whose products are computed again in backward."""
    how = choice.options.checkpoint
    if how.isdecimal():
        return layers // int(how)
    return layers if how == "full" else 0


def time_of(
    model: ModelShape,
    choice: Strategy,
    load: Workload,
    device: Device,
    measured: LinkModel | None = None,
) -> Time | None:
    """The time of a step of the optimizer, estimated; None where the device's speed is not known.

    `measured` is a model of these ranks' collectives: it counts before the device's data sheet.
    """
    precision = choice.options.precision
    if recipe_for(choice, load).parameters == 2 and precision == "fp32":
        precision = "bf16"
    peak = device.flops(precision)
    if not peak or not device.bandwidth:
        return None
    compute = _compute_s(model, choice, load, device, peak)
    idle = bubble(choice.degrees.pp, micro_batches(choice, load), choice.options.schedule)
    sums = [_flow_s(flow, choice, device, measured) for flow in flows(model, choice, load)]
    is_measured = bool(sums) and all(from_measurement for _, from_measurement in sums)
    return Time(
        compute_s=compute,
        idle_s=compute * idle / (1 - idle),
        communication_s=sum(seconds for seconds, _ in sums),
        samples=samples(choice, load),
        source="measurement" if is_measured else "links",
    )


def flops_of(model: ModelShape, choice: Strategy, load: Workload) -> float:
    """Operations of all ranks of one copy of the model in a step of the optimizer.

    6 per parameter and token, and 12 for each layer, width and pair of tokens in attention;
    what is computed again costs one forward, a third of that. Source:
    https://arxiv.org/abs/2204.02311, appendix B.
    """
    shape = model.shape
    width = shape.heads * shape.head_size
    each = 6 * model.parameters + 12 * shape.layers * width * load.sequence
    part = again_blocks(choice, shape.layers) / shape.layers
    return each * (1 + part / 3) * load.batch * load.sequence * choice.options.accumulate


def _compute_s(
    model: ModelShape, choice: Strategy, load: Workload, device: Device, peak: float
) -> float:
    """Arithmetic or the reading of weights, whichever is longer, and the optimizer's memory."""
    degrees, recipe = choice.degrees, recipe_for(choice, load)
    split = degrees.tp * degrees.pp
    arithmetic = flops_of(model, choice, load) / (split * degrees.cp) / (peak * UTILISATION)
    weights = model.parameters * widths_of(choice, recipe).compute / split
    # Read in forward, and in backward for the gradients of inputs and of weights.
    reading = 3 * weights * choice.options.accumulate / device.bandwidth
    # Everything is read, parameters and state are written.
    shares = footprint.held_parts(choice, model.parameters, recipe)
    stepping = (2 * sum(shares.values()) - shares["gradients"]) / device.bandwidth
    return max(arithmetic, reading) + stepping


def _flow_s(
    flow: Flow, choice: Strategy, device: Device, measured: LinkModel | None
) -> tuple[float, bool]:
    """Seconds, and whether by measurement."""
    n = footprint.axes_size(choice, flow.sent.axes)
    op = _MEASURED[flow.sent.call]
    if measured is not None and op in measured.fits:
        each = flow.wire_bytes / flow.messages / OPS[op].factor(n)
        return flow.messages * measured.seconds(op, each, n), True
    # Over how many neighbouring ranks a group along these axes lies.
    sizes = [getattr(choice.degrees, axis) for axis in AXES]
    outermost = min(AXES.index(axis) for axis in flow.sent.axes if sizes[AXES.index(axis)] > 1)
    link = link_of(device, math.prod(sizes[outermost:]))
    return (flow.wire_bytes / link.bytes_per_s if link else 0.0), False
