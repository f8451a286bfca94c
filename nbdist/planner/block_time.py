"""Time of a block and of the head on one rank: products, attention, bytes and launches.

Constants that no data sheet has are in `Speeds`; docs/plan.md says where each is from.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from nbdist.planner.devices import Device
from nbdist.planner.shape.transformer import Linear, Transformer, linears
from nbdist.planner.workload import Widths
from nbdist.strategy.choice import Strategy

# Rows and columns of the result that one multiprocessor makes at a time, and the part of the
# largest one's rate: a smaller tile reads more for each operation. Source:
# https://docs.nvidia.com/deeplearning/performance/dl-performance-matrix-multiplication
TILES = ((256, 128, 1.0), (128, 128, 0.95), (128, 64, 0.85), (64, 64, 0.7))
# Parts into which the summed dimension may be cut, where the result has too few tiles.
SPLITS = (1, 2, 4, 8)
# Operations of attention's backward by those of its forward: five products for two. Source:
# https://arxiv.org/abs/2307.08691, section 3.1.
ATTENTION_BACKWARD = 2.5
# Bytes that a backward moves for one of the forward: it reads a gradient as well.
BYTES_BACKWARD = 2.0
# Times that --sdpa math reads or writes a score: written, read and written by softmax, read; in
# backward its gradient as well, which two products read.
SCORE_BYTES = (4, 7)
# And attention with sinks, in transformers' `eager_attention_forward` of gpt-oss: a product, scale,
# mask, sinks beside it, maximum, difference, softmax, product; backward through each of them.
SINK_SCORE_BYTES = (13, 17)
# For each entry of the logits: cast to fp32, log-softmax and loss; their gradients, cast back.
LOSS_BYTES = (16, 18)
# Elementwise and sorting kernels of a router and of experts' rows in transformers; of rows that
# travel about as many more.
ROUTED_KERNELS = 12


@dataclass(frozen=True, slots=True)
class Speeds:
    """Speeds that no data sheet has; fitted or from a source, see docs/plan.md.

    Attributes:
        attention: Rate of attention by that of products.
        streams: The part of the memory's bandwidth that elementwise kernels reach.
        network, nvlink, pcie: The part of a link's rate that collectives reach.
        contention: The part by which communication behind computation slows that down.
        k_fill: Steps along the summed dimension that a tile loses to its begin and end.
        kernel_s: That a kernel takes on the device, however small.
        launch_s: That a kernel takes the host to launch, in eager mode.
    """

    attention: float = 0.33
    streams: float = 0.63
    network: float = 0.37
    contention: float = 0.25
    k_fill: float = 128.0
    kernel_s: float = 3e-6
    launch_s: float = 7e-6
    nvlink: float = 0.76
    pcie: float = 0.6


@dataclass(frozen=True, slots=True)
class Pass:
    """A forward and a backward, in seconds; `attention_s` is attention's part of both."""

    forward_s: float = 0.0
    backward_s: float = 0.0
    attention_s: float = 0.0

    @property
    def both_s(self) -> float:
        """Forward and backward."""
        return self.forward_s + self.backward_s


@dataclass(frozen=True, slots=True)
class RankSpeed:
    """The speed of a rank; `width` is the bytes of a number in products.

    `rows_each` is how many rows of experts it has for each of its tokens (workload.rows_each).

    Of Megatron (`workload.is_megatron`), dropout and the sum after it are one kernel, and the
    loss is of each tp rank's part of the vocabulary.
    """

    device: Device
    speeds: Speeds
    precision: str
    width: int
    is_megatron: bool = False
    rows_each: float = 0.0

    @property
    def rate(self) -> float:
        """Operations per second in large matrix products."""
        return self.device.flops(self.precision) * self.device.sustained

    @property
    def bytes_per_s(self) -> float:
        """Bytes per second in elementwise kernels."""
        return self.device.bandwidth * self.speeds.streams

    def product_s(self, m: float, n: float, k: float, count: int = 1) -> float:
        """Seconds of (m, k) times (k, n); of so many in one kernel."""
        if min(m, n, k) < 1:
            return 0.0
        moved = count * (m * k + k * n + m * n) * self.width
        args = (math.ceil(m), math.ceil(n), math.ceil(k))
        arithmetic = product_steps(*args, self.device.sms, self.speeds.k_fill, count) / self.rate
        return max(arithmetic, moved / self.bytes_per_s) + self.speeds.kernel_s


@functools.lru_cache(maxsize=1 << 16)
def product_steps(m: int, n: int, k: int, sms: int, k_fill: float, count: int = 1) -> float:
    """Operations of a product, or of so many in one kernel, with those that tiles and waves waste.

    The result is cut into tiles, and `sms` of them are made at a time: the last wave takes as long
    as a full one (wave quantization), the last tile as long as a whole one. Of the tiles and cuts
    of the summed dimension the fastest counts, as a library chooses it. Without `sms` nothing is
    cut.
    """
    if not sms:
        return 2.0 * count * m * n * (k + k_fill)
    best = math.inf
    for rows, columns, part in TILES:
        tiles = count * math.ceil(m / rows) * math.ceil(n / columns)
        for split in SPLITS:
            waves = math.ceil(tiles * split / sms)
            depth = math.ceil(k / split) + k_fill
            best = min(best, 2.0 * waves * sms * rows * columns * depth / part)
            if tiles * split >= sms:
                break
    return best


def block_pass(
    shape: Transformer,
    choice: Strategy,
    widths: Widths,
    samples: float,
    sequence: int,
    rank: RankSpeed,
) -> Pass:
    """Forward and backward of one block of so many samples, with what is computed again.

    Without messages. `--checkpoint full` adds a forward to the backward, `selective` one of what
    is elementwise.
    """
    tokens = samples * sequence / choice.degrees.cp
    linear, trained = _products(shape, choice, tokens)
    forward_s = sum(rank.product_s(m, n, k) for m, n, k in linear)
    # Gradients of inputs and, of what is trained, of weights.
    backward_s = sum(rank.product_s(m, k, n) for m, n, k in linear)
    backward_s += sum(rank.product_s(k, n, m) for m, n, k in trained)
    attention = _attention(shape, choice, samples, sequence, rank)
    moved_s = tokens * _moved_bytes(shape, choice, widths, rank) / rank.bytes_per_s
    casts_s = _cast_bytes(shape, choice, widths) / rank.bytes_per_s
    small, fused = _kernels(shape, choice, rank)
    moved_s = moved_s * fused + small * rank.speeds.kernel_s
    unpacked_s, copies = _unpacked(shape, widths, rank)
    routed, kernels = _routed(shape, choice, widths, tokens, rank)
    ahead_s = forward_s + attention.forward_s + moved_s + casts_s + unpacked_s + routed.forward_s
    back_s = backward_s + attention.backward_s + BYTES_BACKWARD * moved_s + unpacked_s
    back_s += routed.backward_s
    launches = (small + len(linear) + copies + kernels + 1) * rank.speeds.launch_s
    ahead_s, back_s = max(ahead_s, launches), max(back_s, 2 * launches)
    # torch's policy of what is kept has no products of experts.
    again = {"full": ahead_s, "selective": moved_s + routed.forward_s}
    again_s = again.get(choice.options.checkpoint, 0.0)
    return Pass(ahead_s, back_s + again_s, attention.both_s)


def head_pass(
    shape: Transformer, choice: Strategy, widths: Widths, tokens: float, rank: RankSpeed
) -> Pass:
    """The last norm, the head's product and the loss, which tp does not divide but in Megatron."""
    vocab, h = shape.vocab / choice.degrees.tp, shape.hidden
    product = rank.product_s(tokens, vocab, h)
    back = rank.product_s(tokens, h, vocab)
    back += 0.0 if shape.lora else rank.product_s(h, vocab, tokens)
    norm = tokens * h * (widths.residual + widths.compute)
    logits = tokens * (vocab if rank.is_megatron else shape.vocab)
    ahead, behind = (logits * each for each in LOSS_BYTES)
    return Pass(
        product + (norm + ahead) / rank.bytes_per_s,
        back + (BYTES_BACKWARD * norm + behind) / rank.bytes_per_s,
    )


def embedding_pass(
    shape: Transformer, choice: Strategy, widths: Widths, tokens: float, rank: RankSpeed
) -> Pass:
    """Rows that are read, and a gradient of the whole table that is written and filled.

    A frozen one has none.
    """
    rows = 2 * tokens * shape.hidden * widths.residual
    if shape.lora:
        return Pass(rows / rank.bytes_per_s, 0.0)
    table = 2 * shape.vocab * shape.hidden * widths.reduced / choice.degrees.tp
    return Pass(rows / rank.bytes_per_s, (2 * rows + table) / rank.bytes_per_s)


# (m, n, k) of a product of (m, k) and (k, n).
Product = tuple[float, float, float]


def _products(
    shape: Transformer, choice: Strategy, tokens: float
) -> tuple[list[Product], list[Product]]:
    """Products of a block's linear layers on one tp rank: all, and those with trained weights."""
    tp, adapters = choice.degrees.tp, list[Product]()
    layers = [_local(layer, tp) for layer in linears(shape)]
    products = [(tokens, outputs, inputs) for inputs, outputs in layers]
    if shape.lora is None:
        return products, products
    for inputs, outputs in (_local(layer, tp) for layer in shape.targets):
        adapters += [(tokens, shape.lora.rank, inputs), (tokens, outputs, shape.lora.rank)]
    return [*products, *adapters], adapters


def _local(layer: Linear, tp: int) -> tuple[float, float]:
    """Inputs and outputs of a layer on one rank of tp."""
    inputs, outputs = float(layer.inputs), float(layer.outputs)
    return (inputs / tp, outputs) if layer.is_rowwise else (inputs, outputs / tp)


def _routed(
    shape: Transformer, choice: Strategy, widths: Widths, tokens: float, rank: RankSpeed
) -> tuple[Pass, int]:
    """The router and the experts of a rank, without messages, and the kernels of a forward.

    Rows lie evenly on its experts, whose products are one kernel each (torch's grouped_mm). Where
    they compute in fp32, as autocast leaves it, that is a loop.
    """
    experts = shape.experts
    if experts is None:
        return Pass(), 0
    h, f, here = shape.hidden, experts.ffn, experts.count // choice.degrees.ep
    rows, is_shared = tokens * rank.rows_each, choice.degrees.ep > 1
    is_loop = widths.residual == 4
    if is_loop:
        rank = replace(rank, precision="fp32", width=4)

    def both_s(*shape_of: float) -> float:
        m, n, k = shape_of
        return here * rank.product_s(m, n, k) if is_loop else rank.product_s(m, n, k, here)

    each, route = rows / here, (tokens, experts.count, h)
    products = ((each, 2 * f, h), (each, h, f))
    ahead_s = sum(both_s(m, n, k) for m, n, k in products) + rank.product_s(*route)
    back_s = sum(both_s(m, k, n) + both_s(k, n, m) for m, n, k in products)
    back_s += 2 * rank.product_s(*route)
    # Taken in the order of experts, scaled, put back and added up; sent, the same once more.
    moved = rows * (7 * h + (experts.kept + 1) * f + 6 * h * is_shared) * widths.residual
    kernels = ROUTED_KERNELS * (2 if is_shared else 1)
    moved_s = moved / rank.bytes_per_s + kernels * rank.speeds.kernel_s
    launched = kernels + 2 * (here if is_loop else 1)
    return Pass(ahead_s + moved_s, back_s + BYTES_BACKWARD * moved_s), launched


def _unpacked(shape: Transformer, widths: Widths, rank: RankSpeed) -> tuple[float, int]:
    """Seconds in which a pass makes copies of 4-bit weights to compute with, and its kernels."""
    if shape.lora is None or not shape.lora.quant:
        return 0.0, 0
    layers = linears(shape)
    moved = sum(layer.weights for layer in layers) * (widths.compute + 1 / 2)
    return moved / rank.bytes_per_s + len(layers) * rank.speeds.kernel_s, len(layers)


def _attention(
    shape: Transformer, choice: Strategy, samples: float, sequence: int, rank: RankSpeed
) -> Pass:
    """Two products of each pair of tokens; half of the pairs, as later ones are masked.

    `--sdpa math` takes all pairs, as products by their shapes, and moves their scores.
    """
    heads = samples * shape.heads / choice.degrees.tp
    pairs = heads * sequence * sequence / choice.degrees.cp
    rate = rank.rate * rank.speeds.attention
    if choice.options.sdpa != "math" and not shape.has_sinks:
        forward_s = pairs * (shape.head_size + shape.value_size) / rate
        return _attention_pass(forward_s, ATTENTION_BACKWARD * forward_s)
    rows, d, x = heads * sequence / choice.degrees.cp, shape.head_size, rank.width
    # Scores are a short sum over a head's width; of a backward's four products one is.
    scores_s, values_s = rank.product_s(rows, sequence, d), rank.product_s(rows, d, sequence)
    dropped = (2 * x + 1) * shape.has_dropout
    moved = SINK_SCORE_BYTES if shape.has_sinks else SCORE_BYTES
    ahead_s, back_s = (pairs * (each * x + dropped) / rank.bytes_per_s for each in moved)
    return _attention_pass(scores_s + values_s + ahead_s, scores_s + 3 * values_s + back_s)


def _attention_pass(forward_s: float, backward_s: float) -> Pass:
    return Pass(forward_s, backward_s, forward_s + backward_s)


def _moved_bytes(shape: Transformer, choice: Strategy, widths: Widths, rank: RankSpeed) -> float:
    """Bytes that the elementwise kernels of a block's forward read and write for each token.

    Two norms, two sums with what flows past, dropout (in the sum's kernel its mask alone), the
    activation with its gate, and rotary positions; an activation written out in Python is counted
    as one kernel.
    """
    r, x, h = widths.residual, widths.compute, shape.hidden
    tp = choice.degrees.tp
    whole = tp if choice.options.has_sequence_parallel else 1
    outside = 2 * h * (r + x) + 2 * h * (2 * r + x)
    outside += 2 * h * (1 if rank.is_megatron else 2 * x + 1) * shape.has_dropout
    if widths.residual != widths.compute:  # autocast casts the inputs of linear layers
        outside += 2 * h * (r + x)
    inside = (5 if shape.is_gated else 2) * shape.mlp_width * x
    # An adapter's result is scaled and added; PEFT casts its input to fp32, and autocast back.
    inside += sum(5 * at.outputs * x + 12 * at.inputs * bool(widths.cast) for at in shape.targets)
    rotary = 0 if shape.positions else 4 * (shape.heads + shape.kv_heads) * shape.head_size * x
    return outside / whole + (inside + rotary) / tp


def _cast_bytes(shape: Transformer, choice: Strategy, widths: Widths) -> float:
    """Bytes of weights that autocast casts in each forward: read in fp32, written in half."""
    numbers = shape.adapters() if widths.frozen == 2 else shape.block_parameters - shape.stacked
    return numbers / choice.degrees.tp * (4 + widths.cast) * bool(widths.cast)


def _kernels(shape: Transformer, choice: Strategy, rank: RankSpeed) -> tuple[int, float]:
    """Elementwise kernels of a forward, and the part of their bytes: a compiler fuses neighbours.

    Fused, a chain of two reads and writes once.
    """
    dropouts = 2 * (shape.has_dropout and not rank.is_megatron)
    count = 5 + dropouts + shape.is_gated + 4 * (not shape.positions) + 2 * len(shape.targets)
    return (count // 2, 0.5) if choice.options.is_compiled else (count, 1.0)
