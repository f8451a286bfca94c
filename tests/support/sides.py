"""A text for `TorchRanks`: parts of whole tensors by slicing, and parameters that lie so."""

# part(whole, side): this rank's elements, None if it holds nothing.
# parameter(value, side): the value laid out, as plain, DTensor or meta Parameter.
SIDES = """
    from dataclasses import replace
    from torch.distributed.tensor import DTensor, Partial
    from nbdist.strategy.tensor_layout import Placement, TensorLayout, local_runs, local_shape
    from nbdist.strategy.choice import Degrees

    cpu = torch.device("cpu")
    flat = init_device_mesh("cpu", (n,))
    square = init_device_mesh("cpu", (2, n // 2), mesh_dim_names=("dp", "tp"))

    def part(whole, side, who=rank):
        local = local_runs(side.layout, side.degrees, who)
        for dim, pieces in enumerate(local or ()):
            rows = [i for start, length in pieces for i in range(start, start + length)]
            whole = whole.index_select(dim, torch.tensor(rows, dtype=torch.long))
        return None if local is None else whole.clone().contiguous()

    def placed(local, side):
        "A local part as a plain tensor or as a DTensor, as the side says."
        layout, degrees = side.layout, side.degrees
        tp, shard = ([Replicate() if dim is None else Shard(dim)]
                     for dim in (layout.tp_dim, layout.shard_dim))
        meshes = {"flat tp": (flat, tp), "flat shard": (flat, shard), "both": (square, shard + tp),
                  "hsdp": (square, [Replicate(), *shard])}
        kind = ("both" if degrees.tp > 1 and degrees.dp_shard > 1 else
                "hsdp" if degrees.dp_shard > 1 and degrees.dp_replicate > 1 else
                "flat tp" if degrees.tp > 1 else "flat shard" if degrees.dp_shard > 1 else "")
        if not kind or not layout.shape:
            return local
        mesh, placements = meshes[kind]
        stride = torch.empty(layout.shape, device="meta").stride()
        return DTensor.from_local(local, mesh, placements, run_check=False,
                                  shape=torch.Size(layout.shape), stride=stride)

    def parameter(value, side):
        local = part(value, side)
        if local is None:
            return torch.nn.Parameter(torch.empty(value.shape, device="meta"))
        return torch.nn.Parameter(placed(local, side))

    def whole_side(shape, number):
        return Placement(TensorLayout(shape), Degrees(dp_replicate=n))

    def fsdp_side(shape, number):
        return Placement(TensorLayout(shape, shard_dim=0 if shape else None), Degrees(dp_shard=n))

    def hsdp_side(shape, number):
        degrees = Degrees(dp_replicate=2, dp_shard=n // 2)
        return Placement(TensorLayout(shape, shard_dim=0 if shape else None), degrees)

    def tp_side(shape, number):
        "Matrices are split, the rest lies on all."
        return Placement(TensorLayout(shape, tp_dim=len(shape) - 1 if len(shape) > 1 else None),
                    Degrees(tp=n))

    def both_side(shape, number):
        tp = 1 if len(shape) > 1 else None
        degrees = Degrees(dp_shard=2, tp=n // 2)
        return Placement(TensorLayout(shape, tp_dim=tp, shard_dim=0 if shape else None), degrees)

    def pp_side(shape, number):
        "One stage each, and number 0 on the first and the last."
        stages = {0, n - 1} if number == 0 else {number % n}
        return Placement(TensorLayout(shape, stages=frozenset(stages)), Degrees(pp=n))

    def owned_side(shape, number):
        "The state under zero1."
        owner = frozenset({number % n})
        return Placement(TensorLayout(shape, ranks=owner), Degrees(dp_replicate=n))
"""
