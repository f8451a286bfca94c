"""Activations: what forward keeps for backward on one rank, by closed formulas.

docs/plan.md has them in letters.
"""

from __future__ import annotations

from dataclasses import replace

from nbdist.planner.models import ModelShape
from nbdist.planner.shape.transformer import Latent, Transformer, linears, stages_of
from nbdist.planner.workload import (
    Widths,
    Workload,
    is_alone,
    is_megatron,
    micro_batches,
    rows_each,
)
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
    x, h, f = widths.compute, shape.hidden, shape.mlp_width
    entry = widths.residual * h / whole
    lora = shape.lora
    if kind == "full":
        return tokens * entry
    attention = _attention_numbers(shape) * x
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
        # Products of experts are computed again: torch's policy for them keeps none.
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
        # gpt-oss multiplies with a norm's weight in fp32.
        normalized = 4 if shape.has_sinks else widths.residual
        norms = 2 * (normalized * h + _norm_bytes(shape))
        outside = (norms + _inputs(shape, widths) * x * h + masks) / whole
    if shape.latent is not None:
        attention += _latent_bytes(shape, shape.latent, x)
    outside += _routed_bytes(shape, widths, rows_each(shape, choice, load))
    return tokens * (outside + (attention + mlp) / tp) + scores_bytes(shape, load, widths, choice)


def scores_bytes(shape: Transformer, load: Workload, widths: Widths, choice: Strategy) -> float:
    """Bytes of each pair of tokens and head; flash and efficient attention keep nothing."""
    x = widths.compute
    score = (2 * x + 1 if shape.has_dropout else x) if choice.options.sdpa == "math" else 0
    if shape.has_sinks:  # whatever --sdpa says; autocast takes a softmax in fp32
        score = x + 2 * widths.cast
    return load.batch * shape.heads * load.sequence**2 * score / choice.degrees.tp


def _attention_numbers(shape: Transformer) -> int:
    """Numbers for each token: queries, keys, values, and what attention makes of them.

    With sinks keys and values are repeated for the heads that share them.
    """
    kv_heads = shape.heads if shape.has_sinks else shape.kv_heads
    return (shape.heads + kv_heads) * (shape.head_size + shape.value_size)


def _latent_bytes(shape: Transformer, latent: Latent, x: int) -> int:
    """Bytes of narrow vectors around their norms, there in fp32; keys and values in one."""
    narrow = (latent.queries + latent.keys) * (2 * x + 4)
    wide = shape.heads * (shape.head_size - latent.rotary + latent.values) * x
    return narrow + wide


def _routed_bytes(shape: Transformer, widths: Widths, rows: float) -> float:
    """Bytes that experts and their router keep for each token, which has so many rows.

    A row, what its experts make inside and of it, and where it is: five indices and weights.
    Autocast does not cast for torch's product of stacked weights.
    """
    experts = shape.experts
    if experts is None:
        return 0
    row = (2 * shape.hidden + experts.kept * experts.ffn) * widths.residual + 5 * 8
    # DeepSeek's router computes in fp32, of a copy where its input is none.
    copied = 4 * shape.hidden * (shape.latent is not None and widths.residual == 2)
    # What its gate scales.
    gated = shape.hidden * widths.compute * experts.has_shared_gate
    return rows * row + experts.count * (4 + 2 * widths.cast) + copied + gated


def _frozen_norm_bytes(shape: Transformer, widths: Widths) -> int:
    """Bytes that a norm with a frozen weight keeps: its input, in fp32 if written in Python."""
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
    """Bytes that a norm keeps besides its input."""
    return 4 * shape.hidden if shape.has_written_norm else 0


def _inputs(shape: Transformer, widths: Widths) -> int:
    """Inputs of linear layers after the two norms: autocast casts for each layer anew."""
    if widths.residual == widths.compute:
        return 2
    ahead = 1 if shape.has_one_qkv else 3 if shape.latent is None else 2
    if shape.experts is None:
        return ahead + (2 if shape.is_gated else 1)
    # A router, and of shared experts gate, up and a gate for both.
    return ahead + 1 + 2 * bool(shape.mlp_width) + shape.experts.has_shared_gate


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
    """Bytes of the pipeline stage with most; without a pipeline all blocks are one stage."""
    stages, pieces = choice.degrees.pp, micro_batches(choice, load)
    piece = replace(load, batch=load.batch // pieces)
    blocks = max(
        sum(_blocks_bytes(kind, choice, piece, widths, layers) for layers, kind in stage)
        for stage in stages_of(model.shape, stages)
    )
    logits = logits_bytes(model.shape, piece, widths, choice)
    first = blocks * in_flight(choice, pieces) if stages > 1 else 0.0
    last = blocks * (pieces if choice.options.schedule == "gpipe" else 1) + logits
    return max(first, last) + _casts_bytes(model, choice, widths)


def _casts_bytes(model: ModelShape, choice: Strategy, widths: Widths) -> float:
    """Bytes of the weight copies that autocast keeps until backward has used them.

    Autocast makes no copy of frozen weights in the compute dtype.
    """
    stages, on = choice.degrees.pp, choice.degrees
    if widths.frozen == 2:
        return widths.cast * model.stage_blocks(stages) * model.block_trained(on)
    parameters, stacked = model.largest_stage(stages)
    unpacked = parameters - stacked - model.stage_blocks(stages) * model.packed
    # FSDP casts what it gathers, and experts that no other rank has are not gathered.
    alone = stacked * 2 / on.ep if widths.residual == 2 and is_alone(choice) else 0
    return widths.cast * unpacked / on.tp + alone


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
    """Bytes of so many blocks under --checkpoint: what is kept, and one block recomputed."""
    how = choice.options.checkpoint
    whole = block_bytes(shape, load, widths, choice)
    if not how:
        return layers * whole
    kind = "selective" if how == "selective" else "full"
    again = layers // int(how) if how.isdecimal() else layers
    kept_bytes = block_bytes(shape, load, widths, choice, kind=kind)
    # Recomputing a block does not store again what selective has kept of it.
    anew = whole - kept_bytes if how == "selective" else whole
    return again * kept_bytes + (layers - again) * whole + (anew if again else 0)
