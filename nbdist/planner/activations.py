"""Activations: what forward keeps for backward on one rank, by closed formulas.

docs/plan.md has them in letters.
"""

from __future__ import annotations

import math
from dataclasses import replace

from nbdist.planner.models import ModelShape, Transformer, linears
from nbdist.planner.workload import Widths, Workload, is_megatron, micro_batches
from nbdist.strategy.choice import Strategy

# Model chunks of each rank under --schedule interleaved.
CHUNKS = 2


def block_bytes(
    shape: Transformer, load: Workload, widths: Widths, choice: Strategy, *, kind: str = ""
) -> float:
    """Activations that one block keeps of one batch on one rank.

    Source: Korthikanti et al. 2022, https://arxiv.org/abs/2205.05198, equations 1 to 4: this is
    s b h (34 + 5 a s / h) of bf16, with dropout, four times wider MLP and scores that are kept.
    What autocast, and norms and activations written out in Python keep more is counted as
    tests/planner/test_models_rank.py finds it in transformers' models.

    Of the choice count tp, cp, sequence parallelism and whether scores are kept (sdpa math). `kind`
    is "" for all that backward needs, "full" for the block's input alone, "selective" for what
    products of matrices and attention give.
    """
    tokens = load.batch * load.sequence / choice.degrees.cp
    tp = choice.degrees.tp
    # What tensor parallelism leaves whole, unless it splits the sequence there.
    whole = tp if choice.options.has_sequence_parallel else 1
    x, h, f = widths.compute, shape.hidden, shape.ffn
    entry = widths.residual * h / whole
    lora = shape.lora
    if kind == "full":
        return tokens * entry
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_size * x
    if shape.has_qk_norm and kind != "selective":
        # Queries and keys as they were, and normalized in fp32.
        attention += (shape.heads + shape.kv_heads) * shape.head_size * (4 if lora else x + 4)
    if kind == "selective":
        mlp = (2 if shape.is_gated else 1) * f * x
        pairs = (
            sum(lora.rank + at.outputs / (1 if at.is_rowwise else tp) for at in shape.targets)
            if lora
            else 0
        )
        return tokens * (entry + 2 * x * h / whole + (attention + mlp) / tp + x * pairs)
    masks = 2 * h if shape.has_dropout else 0
    mlp = (shape.kept_in_mlp or (4 if shape.is_gated else 2)) * f * x
    if lora:
        whole_inputs, split_inputs = _adapter_inputs(shape, widths)
        outside = (2 * _frozen_norm_bytes(shape, widths) + whole_inputs * x + masks) / whole
        outside += lora.rank * len(shape.targets) * x
        # What the last linear layer takes is kept for its adapters alone.
        mlp += (split_inputs - f) * x
    else:
        norms = 2 * (widths.residual * h + _norm_bytes(shape))
        outside = (norms + _inputs(shape, widths) * x * h + masks) / whole
    # Of each pair of tokens and head; flash and efficient attention keep nothing.
    score = (2 * x + 1 if shape.has_dropout else x) if choice.options.sdpa == "math" else 0
    scores = load.batch * shape.heads * load.sequence**2 * score / tp
    return tokens * (outside + (attention + mlp) / tp) + scores


def _frozen_norm_bytes(shape: Transformer, widths: Widths) -> int:
    """That a norm keeps whose weight is frozen: its input, in fp32 if it is written in Python."""
    return shape.hidden * (4 if shape.has_written_norm else widths.residual)


def _adapter_inputs(shape: Transformer, widths: Widths) -> tuple[int, int]:
    """Numbers of each token that adapters keep as their inputs: whole ones, and those tp splits.

    A frozen layer keeps none. Layers with one input share it, unless autocast casts it for each:
    PEFT takes it to fp32, the type of A, and autocast back. Attention's result is kept anyway.
    """
    layers, targets = linears(shape), shape.targets
    if widths.cast:
        split = [at.inputs for at in targets if at.is_rowwise]
        return sum(at.inputs for at in targets) - sum(split), sum(split)
    border = next(number for number, at in enumerate(layers) if at.is_rowwise)
    groups = (layers[:border], layers[border + 1 : -1])
    used = sum(any(at in targets for at in group) for group in groups)
    return used * shape.hidden, shape.ffn if layers[-1] in targets else 0


def _norm_bytes(shape: Transformer) -> int:
    """That a norm keeps besides its input."""
    return 4 * shape.hidden if shape.has_written_norm else 0


def _inputs(shape: Transformer, widths: Widths) -> int:
    """Inputs of linear layers after the two norms: autocast casts for each layer anew."""
    if widths.residual == widths.compute:
        return 2
    return (1 if shape.has_one_qkv else 3) + (2 if shape.is_gated else 1)


def logits_bytes(shape: Transformer, load: Workload, widths: Widths, choice: Strategy) -> float:
    """After the last block: norm, head and loss, which tp does not divide but in Megatron.

    Log-softmax in fp32, the gradient of the loss by it, and the logits' gradient: these are there
    when backward begins, and the logits themselves no longer (docs/accuracy.md has it measured).
    """
    tokens = load.batch * load.sequence / choice.degrees.cp
    x = widths.compute
    norm = (widths.residual + x) * shape.hidden + _norm_bytes(shape)
    if shape.lora:
        norm = _frozen_norm_bytes(shape, widths)
    vocab = shape.vocab / (choice.degrees.tp if is_megatron(choice, load) else 1)
    return tokens * (norm + vocab * 12)


def activations(model: ModelShape, choice: Strategy, load: Workload, widths: Widths) -> float:
    """Of the pipeline stage that has most; without a pipeline all blocks are one stage."""
    stages, pieces = choice.degrees.pp, micro_batches(choice, load)
    piece = replace(load, batch=load.batch // pieces)
    layers = math.ceil(model.shape.layers / stages)
    blocks = _blocks_bytes(model.shape, choice, piece, widths, layers)
    logits = logits_bytes(model.shape, piece, widths, choice)
    first = blocks * in_flight(choice, pieces) if stages > 1 else 0.0
    last = blocks * (pieces if choice.options.schedule == "gpipe" else 1) + logits
    return max(first, last) + _casts_bytes(model, choice, widths)


def _casts_bytes(model: ModelShape, choice: Strategy, widths: Widths) -> float:
    """Of the copies of weights that autocast keeps until backward has used them.

    Of what is frozen in the type that is computed in it makes none.
    """
    stages, tp = choice.degrees.pp, choice.degrees.tp
    if widths.frozen == 2:
        return widths.cast * model.stage_blocks(stages) * model.block_trained(tp)
    unpacked = model.stage_parameters(stages) - model.stage_blocks(stages) * model.packed
    return widths.cast * unpacked / tp


def in_flight(choice: Strategy, pieces: int) -> float:
    """Micro-batches whose activations the first stage keeps at one time.

    Source: https://arxiv.org/abs/2104.04473 section 2.2, and Korthikanti et al. for interleaved.
    """
    stages, schedule = choice.degrees.pp, choice.options.schedule
    if schedule == "gpipe":
        return pieces
    if schedule == "interleaved":
        return min(pieces, stages * (1 + (stages - 1) / (stages * CHUNKS)))
    return min(pieces, stages)


def _blocks_bytes(
    shape: Transformer, choice: Strategy, load: Workload, widths: Widths, layers: int
) -> float:
    """Of so many blocks, as --checkpoint has it: what is kept, and one block computed again."""
    how = choice.options.checkpoint
    whole = block_bytes(shape, load, widths, choice)
    if not how:
        return layers * whole
    kind = "selective" if how == "selective" else "full"
    again = layers // int(how) if how.isdecimal() else layers
    kept_bytes = block_bytes(shape, load, widths, choice, kind=kind)
    # What selective keeps of a block is no second time there when the rest is computed again.
    anew = whole - kept_bytes if how == "selective" else whole
    return again * kept_bytes + (layers - again) * whole + (anew if again else 0)
