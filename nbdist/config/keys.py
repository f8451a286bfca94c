"""Which keys a configuration can have, and of which type: Accelerate's YAML, DeepSpeed's JSON.

Accelerate's are those of its ClusterConfig and of the options of `accelerate launch` (a test
compares both with the installed version). DeepSpeed's: https://www.deepspeed.ai/docs/config-json/
"""

from __future__ import annotations

from collections.abc import Mapping

# A type is a word of KINDS, or choices: "=no|fp16".
BOOL, COUNT, INT, NUMBER, TEXT, MAP, LIST, ANY = (
    "bool", "count", "int", "number", "text", "map", "list", "any",
)  # fmt: skip
# What Accelerate hands on as text: true and "true" are the same there.
WORDY = "wordy"
# A text that Accelerate takes apart: a number in its place has no split().
LABEL = "label"
KINDS: Mapping[str, str] = {
    BOOL: "true or false",
    WORDY: "true or false",
    COUNT: "a whole number above 0",
    INT: "a whole number, 0 or more",
    NUMBER: "a number",
    TEXT: "a string",
    LABEL: "a string",
    MAP: "a mapping",
    LIST: "a list",
    ANY: "anything",
}
Keys = Mapping[str, str]

DISTRIBUTED_TYPES = (
    "NO", "MULTI_CPU", "MULTI_GPU", "MULTI_NPU", "MULTI_MLU", "MULTI_SDAA", "MULTI_MUSA",
    "MULTI_XPU", "MULTI_HPU", "MULTI_NEURON", "DEEPSPEED", "FSDP", "XLA", "MEGATRON_LM",
)  # fmt: skip
_SHARDING = "FULL_SHARD|SHARD_GRAD_OP|NO_SHARD|HYBRID_SHARD|HYBRID_SHARD_ZERO2"

ACCELERATE: Keys = {
    "compute_environment": "=LOCAL_MACHINE|AMAZON_SAGEMAKER",
    "distributed_type": "=" + "|".join(DISTRIBUTED_TYPES),
    "mixed_precision": "=no|fp16|bf16|fp8",
    "use_cpu": BOOL,
    "debug": BOOL,
    "num_processes": COUNT,
    "machine_rank": INT,
    "num_machines": COUNT,
    "gpu_ids": LABEL,
    "main_process_ip": TEXT,
    "main_process_port": INT,
    "rdzv_backend": TEXT,
    "same_network": BOOL,
    "main_training_function": TEXT,
    "enable_cpu_affinity": BOOL,
    "fp8_config": MAP,
    "deepspeed_config": MAP,
    "fsdp_config": MAP,
    "parallelism_config": MAP,
    "megatron_lm_config": MAP,
    "mpirun_config": MAP,
    "downcast_bf16": WORDY,
    "tpu_name": TEXT,
    "tpu_zone": TEXT,
    "tpu_use_cluster": BOOL,
    "tpu_use_sudo": BOOL,
    "command_file": TEXT,
    "commands": LIST,
    "tpu_vm": LIST,
    "tpu_env": LIST,
    "dynamo_config": MAP,
}
# Older keys that Accelerate turns into newer ones as it reads.
ACCELERATE_OLD: Keys = {"fp16": BOOL, "dynamo_backend": TEXT}

FSDP: Keys = {
    "fsdp_version": "=1|2",
    "fsdp_offload_params": WORDY,
    "fsdp_min_num_params": INT,
    "fsdp_sharding_strategy": "=" + _SHARDING + "|1|2|3|4|5",
    "fsdp_reshard_after_forward": ANY,
    "fsdp_auto_wrap_policy": "=TRANSFORMER_BASED_WRAP|SIZE_BASED_WRAP|NO_WRAP",
    "fsdp_transformer_layer_cls_to_wrap": TEXT,
    "fsdp_backward_prefetch": "=BACKWARD_PRE|BACKWARD_POST|NO_PREFETCH",
    "fsdp_state_dict_type": "=FULL_STATE_DICT|LOCAL_STATE_DICT|SHARDED_STATE_DICT",
    "fsdp_forward_prefetch": WORDY,
    "fsdp_use_orig_params": WORDY,
    "fsdp_cpu_ram_efficient_loading": WORDY,
    "fsdp_sync_module_states": WORDY,
    "fsdp_activation_checkpointing": WORDY,
    "fsdp_activation_checkpointing_offload": WORDY,
    "fsdp_ignored_modules": TEXT,
}
PARALLELISM: Keys = {
    "parallelism_config_dp_replicate_size": COUNT,
    "parallelism_config_dp_shard_size": COUNT,
    "parallelism_config_tp_size": COUNT,
    "parallelism_config_cp_size": COUNT,
    "parallelism_config_cp_backend": "=torch",
    "parallelism_config_cp_comm_strategy": "=allgather|alltoall",
    "parallelism_config_sp_size": COUNT,
    "parallelism_config_sp_backend": "=deepspeed",
    "parallelism_config_sp_seq_length": COUNT,
    "parallelism_config_sp_seq_length_is_variable": WORDY,
    "parallelism_config_sp_attn_implementation": TEXT,
}
# Inside the YAML of Accelerate.
DEEPSPEED_INLINE: Keys = {
    "deepspeed_config_file": TEXT,
    "zero_stage": "=0|1|2|3",
    "offload_optimizer_device": "=none|cpu|nvme",
    "offload_param_device": "=none|cpu|nvme",
    "offload_optimizer_nvme_path": TEXT,
    "offload_param_nvme_path": TEXT,
    "gradient_accumulation_steps": COUNT,
    "gradient_clipping": NUMBER,
    "zero3_init_flag": WORDY,
    "zero3_save_16bit_model": WORDY,
    "deepspeed_hostfile": TEXT,
    "deepspeed_exclusion_filter": TEXT,
    "deepspeed_inclusion_filter": TEXT,
    "deepspeed_multinode_launcher": "=pdsh|standard|openmpi|mvapich|mpich|nossh|slurm",
    "deepspeed_moe_layer_cls_names": TEXT,
}
# What Accelerate refuses beside deepspeed_config_file, because that file says it.
IN_DEEPSPEED_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)  # fmt: skip
MEGATRON: Keys = {
    "megatron_lm_tp_degree": COUNT,
    "megatron_lm_pp_degree": COUNT,
    "megatron_lm_num_micro_batches": COUNT,
    "megatron_lm_sequence_parallelism": WORDY,
    "megatron_lm_recompute_activations": WORDY,
    "megatron_lm_recompute_granularity": TEXT,
    "megatron_lm_recompute_method": TEXT,
    "megatron_lm_recompute_num_layers": INT,
    "megatron_lm_use_distributed_optimizer": WORDY,
    "megatron_lm_use_custom_fsdp": WORDY,
    "megatron_lm_gradient_clipping": NUMBER,
    "megatron_lm_no_load_optim": WORDY,
    "megatron_lm_no_save_optim": WORDY,
    "megatron_lm_eod_mask_loss": WORDY,
    "megatron_lm_overlap_cpu_optimizer_d2h_h2d": WORDY,
    "megatron_lm_optimizer_cpu_offload": WORDY,
    "megatron_lm_use_precision_aware_optimizer": WORDY,
    "megatron_lm_decoder_last_pipeline_num_layers": INT,
    "megatron_lm_attention_backend": TEXT,
    "megatron_lm_expert_model_parallel_size": COUNT,
    "megatron_lm_expert_tensor_parallel_size": COUNT,
    "megatron_lm_context_parallel_size": COUNT,
    "megatron_lm_attention_dropout": NUMBER,
    "megatron_lm_hidden_dropout": NUMBER,
    "megatron_lm_attention_softmax_in_fp32": WORDY,
    "megatron_lm_calculate_per_token_loss": WORDY,
    "megatron_lm_use_rotary_position_embeddings": WORDY,
}
DYNAMO: Keys = {
    "dynamo_backend": TEXT,
    "dynamo_mode": "=default|reduce-overhead|max-autotune",
    "dynamo_use_fullgraph": WORDY,
    "dynamo_use_dynamic": WORDY,
    "dynamo_use_regional_compilation": WORDY,
}
# Of each mapping in an Accelerate YAML; fp8 and mpirun are left to Accelerate.
ACCELERATE_PARTS: Mapping[str, Keys] = {
    "deepspeed_config": DEEPSPEED_INLINE,
    "fsdp_config": FSDP,
    "parallelism_config": PARALLELISM,
    "megatron_lm_config": MEGATRON,
    "dynamo_config": DYNAMO,
}
# What Accelerate puts before a key that comes without it.
PREFIXES: Mapping[str, str] = {"fsdp_config": "fsdp_", "dynamo_config": "dynamo_"}
# Where it puts nothing, and passes over such a key in silence.
STRICT_PREFIXES: Mapping[str, str] = {
    "parallelism_config": "parallelism_config_",
    "megatron_lm_config": "megatron_lm_",
}

DEEPSPEED: Keys = {
    "train_batch_size": COUNT,
    "train_micro_batch_size_per_gpu": COUNT,
    "gradient_accumulation_steps": COUNT,
    "gradient_clipping": NUMBER,
    "steps_per_print": NUMBER,
    "zero_optimization": MAP,
    "fp16": MAP,
    "bf16": MAP,
    "bfloat16": MAP,
    "amp": MAP,
    "torch_autocast": MAP,
    "optimizer": MAP,
    "scheduler": MAP,
    "activation_checkpointing": MAP,
    "aio": MAP,
    "zero_allow_untested_optimizer": BOOL,
    "zero_force_ds_cpu_optimizer": BOOL,
    "prescale_gradients": BOOL,
    "gradient_predivide_factor": NUMBER,
    "gradient_allreduce_op": TEXT,
    "sparse_gradients": BOOL,
    "communication_data_type": "=fp16|bf16|fp32",
    "seq_parallel_comm_data_type": "=fp16|bf16|fp32",
    "sequence_parallel_size": COUNT,
    "data_types": MAP,
    "wall_clock_breakdown": BOOL,
    "memory_breakdown": BOOL,
    "dump_state": BOOL,
    "disable_allgather": BOOL,
    "dataloader_drop_last": BOOL,
    "graph_harvesting": BOOL,
    "vocabulary_size": COUNT,
    "log_level": TEXT,
    "use_data_before_expert_parallelism": BOOL,
    "managed_gradient_accumulation": BOOL,
    **dict.fromkeys(
        (
            "flops_profiler", "autotuning", "elasticity", "comms_logger", "tensorboard", "wandb",
            "csv_monitor", "comet", "data_efficiency", "curriculum_learning",
            "compression_training", "sparse_attention", "pipeline", "checkpoint",
            "tensor_parallel", "expert_parallel", "hybrid_engine", "eigenvalue",
            "progressive_layer_drop", "quantize_training", "nebula", "datastates_ckpt",
            "weight_quantization", "compile", "timers", "monitor_config", "zero_quantized_comms",
        ),
        ANY,
    ),
}  # fmt: skip
OFFLOAD_OPTIMIZER: Keys = {
    "device": "=none|cpu|nvme",
    "nvme_path": TEXT,
    "buffer_count": INT,
    "pin_memory": BOOL,
    "pipeline_read": BOOL,
    "pipeline_write": BOOL,
    "pipeline": BOOL,
    "fast_init": BOOL,
    "ratio": NUMBER,
    "super_offload": BOOL,
    "convert_grad_on_cpu": BOOL,
    "cpuadam_cores_perc": NUMBER,
}
OFFLOAD_PARAM: Keys = {
    "device": "=none|cpu|nvme",
    "nvme_path": TEXT,
    "buffer_count": INT,
    "buffer_size": INT,
    "max_in_cpu": INT,
    "pin_memory": BOOL,
}
ZERO: Keys = {
    "stage": "=0|1|2|3",
    "contiguous_gradients": BOOL,
    "reduce_scatter": BOOL,
    "reduce_bucket_size": INT,
    "use_multi_rank_bucket_allreduce": BOOL,
    "allgather_partitions": BOOL,
    "allgather_bucket_size": INT,
    "overlap_comm": BOOL,
    "load_from_fp32_weights": BOOL,
    "elastic_checkpoint": BOOL,
    "offload_param": MAP,
    "offload_optimizer": MAP,
    "zenflow": MAP,
    "sub_group_size": INT,
    "cpu_offload": BOOL,
    "cpu_offload_param": BOOL,
    "cpu_offload_use_pin_memory": BOOL,
    "stage3_max_live_parameters": INT,
    "stage3_max_reuse_distance": INT,
    "stage3_prefetch_bucket_size": INT,
    "stage3_param_persistence_threshold": INT,
    "stage3_model_persistence_threshold": INT,
    "stage3_gather_16bit_weights_on_model_save": BOOL,
    "stage3_gather_fp16_weights_on_model_save": BOOL,
    "stage3_module_granularity_threshold": INT,
    "stage3_use_all_reduce_for_fetch_params": BOOL,
    "stage3_allgather_sequential": BOOL,
    "stage3_partition_stream_chunk_size": INT,
    "ignore_unused_parameters": BOOL,
    "legacy_stage1": BOOL,
    "round_robin_gradients": BOOL,
    "zero_hpz_partition_size": INT,
    "zero_quantized_weights": BOOL,
    "zero_quantized_nontrainable_weights": BOOL,
    "zero_quantized_gradients": BOOL,
    "zeropp_loco_param": MAP,
    "mics_shard_size": NUMBER,
    "mics_hierarchical_params_gather": BOOL,
    "memory_efficient_linear": BOOL,
    "pipeline_loading_checkpoint": BOOL,
    "override_module_apply": BOOL,
    "log_trace_cache_warnings": BOOL,
    "enable_sanity_checks": BOOL,
    "save_muon_momentum_buffer_in_memory": BOOL,
    "leaf_module": MAP,
}
FP16: Keys = {
    "enabled": BOOL,
    "auto_cast": BOOL,
    "loss_scale": NUMBER,
    "initial_scale_power": INT,
    "loss_scale_window": INT,
    "hysteresis": INT,
    "consecutive_hysteresis": BOOL,
    "min_loss_scale": NUMBER,
    "fp16_master_weights_and_grads": BOOL,
}
BF16: Keys = {
    "enabled": BOOL,
    "immediate_grad_update": BOOL,
    "check_grad_overflow": BOOL,
    "bf16_master_weights_and_grads": BOOL,
    "bf16_optimizer_states": BOOL,
}
OPTIMIZER: Keys = {"type": TEXT, "params": MAP, "legacy_fusion": BOOL}
SCHEDULER: Keys = {"type": TEXT, "params": MAP}
# Of each mapping whose keys DeepSpeed checks itself, and refuses others.
DEEPSPEED_PARTS: Mapping[tuple[str, ...], Keys] = {
    ("zero_optimization",): ZERO,
    ("zero_optimization", "offload_optimizer"): OFFLOAD_OPTIMIZER,
    ("zero_optimization", "offload_param"): OFFLOAD_PARAM,
    ("fp16",): FP16,
    ("bf16",): BF16,
}
# Of those whose other keys it passes over.
DEEPSPEED_LOOSE: Mapping[tuple[str, ...], Keys] = {
    ("optimizer",): OPTIMIZER,
    ("scheduler",): SCHEDULER,
}
# Numbers among an optimizer's and a scheduler's own parameters.
DEEPSPEED_NUMBERS = frozenset(
    {
        "lr", "eps", "weight_decay", "momentum", "warmup_min_lr", "warmup_max_lr",
        "warmup_num_steps", "total_num_steps", "min_lr", "max_lr", "lr_range_test_min_lr",
        "cycle_min_lr", "cycle_max_lr",
    }
)  # fmt: skip
SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
