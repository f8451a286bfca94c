"""Data parallelism: DDP, FSDP2, FSDP1, ZeRO-1 and DeepSpeed. No other axis of the mesh."""
