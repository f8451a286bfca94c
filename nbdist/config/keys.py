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


def _keys(names: Mapping[str, str], prefix: str = "") -> Keys:
    """Key -> type, of a table that has each type once, before the keys that have it."""
    return {prefix + key: kind for kind, keys in names.items() for key in keys.split()}


ACCELERATE = _keys({
    "=LOCAL_MACHINE|AMAZON_SAGEMAKER": "compute_environment",
    "=" + "|".join(DISTRIBUTED_TYPES): "distributed_type",
    "=no|fp16|bf16|fp8": "mixed_precision",
    BOOL: "use_cpu debug same_network enable_cpu_affinity tpu_use_cluster tpu_use_sudo",
    COUNT: "num_processes num_machines",
    INT: "machine_rank main_process_port",
    LABEL: "gpu_ids",
    TEXT: "main_process_ip rdzv_backend main_training_function tpu_name tpu_zone command_file",
    MAP: "fp8_config deepspeed_config fsdp_config parallelism_config megatron_lm_config "
         "mpirun_config dynamo_config",
    WORDY: "downcast_bf16",
    LIST: "commands tpu_vm tpu_env",
})  # fmt: skip
# Older keys that Accelerate turns into newer ones as it reads.
ACCELERATE_OLD: Keys = {"fp16": BOOL, "dynamo_backend": TEXT}

FSDP = _keys({
    "=1|2": "version",
    INT: "min_num_params",
    "=FULL_SHARD|SHARD_GRAD_OP|NO_SHARD|HYBRID_SHARD|HYBRID_SHARD_ZERO2|1|2|3|4|5":
        "sharding_strategy",
    ANY: "reshard_after_forward",
    "=TRANSFORMER_BASED_WRAP|SIZE_BASED_WRAP|NO_WRAP": "auto_wrap_policy",
    TEXT: "transformer_layer_cls_to_wrap ignored_modules",
    "=BACKWARD_PRE|BACKWARD_POST|NO_PREFETCH": "backward_prefetch",
    "=FULL_STATE_DICT|LOCAL_STATE_DICT|SHARDED_STATE_DICT": "state_dict_type",
    WORDY: "offload_params forward_prefetch use_orig_params cpu_ram_efficient_loading "
           "sync_module_states activation_checkpointing activation_checkpointing_offload",
}, "fsdp_")  # fmt: skip
PARALLELISM = _keys({
    COUNT: "dp_replicate_size dp_shard_size tp_size cp_size sp_size sp_seq_length",
    "=torch": "cp_backend",
    "=allgather|alltoall": "cp_comm_strategy",
    "=deepspeed": "sp_backend",
    WORDY: "sp_seq_length_is_variable",
    TEXT: "sp_attn_implementation",
}, "parallelism_config_")  # fmt: skip
# transformers.distributed.DistributedConfig, as its to_json_file writes it.
DISTRIBUTED = _keys({
    COUNT: "tp_size fsdp_size dp_replicate_size pp_size ep_size",
    BOOL: "enable_sequence_parallel enable_expert_parallel fsdp_cpu_offload fsdp_mixed_precision",
    MAP: "fsdp_plan ep_plan",
    ANY: "tp_plan",
    TEXT: "ep_implementation",
})  # fmt: skip
# Inside the YAML of Accelerate.
DEEPSPEED_INLINE = _keys({
    "=0|1|2|3": "zero_stage",
    "=none|cpu|nvme": "offload_optimizer_device offload_param_device",
    "=pdsh|standard|openmpi|mvapich|mpich|nossh|slurm": "deepspeed_multinode_launcher",
    COUNT: "gradient_accumulation_steps",
    NUMBER: "gradient_clipping",
    WORDY: "zero3_init_flag zero3_save_16bit_model",
    TEXT: "deepspeed_config_file offload_optimizer_nvme_path offload_param_nvme_path "
          "deepspeed_hostfile deepspeed_exclusion_filter deepspeed_inclusion_filter "
          "deepspeed_moe_layer_cls_names",
})  # fmt: skip
# What Accelerate refuses beside deepspeed_config_file, because that file says it.
IN_DEEPSPEED_FILE = (
    "gradient_accumulation_steps", "gradient_clipping", "zero_stage", "offload_optimizer_device",
    "offload_param_device", "offload_param_nvme_path", "offload_optimizer_nvme_path",
    "zero3_save_16bit_model",
)  # fmt: skip
MEGATRON = _keys({
    COUNT: "tp_degree pp_degree num_micro_batches expert_model_parallel_size "
           "expert_tensor_parallel_size context_parallel_size",
    INT: "recompute_num_layers decoder_last_pipeline_num_layers",
    NUMBER: "gradient_clipping attention_dropout hidden_dropout",
    TEXT: "recompute_granularity recompute_method attention_backend",
    WORDY: "sequence_parallelism recompute_activations use_distributed_optimizer use_custom_fsdp "
           "no_load_optim no_save_optim eod_mask_loss overlap_cpu_optimizer_d2h_h2d "
           "optimizer_cpu_offload use_precision_aware_optimizer attention_softmax_in_fp32 "
           "calculate_per_token_loss use_rotary_position_embeddings",
}, "megatron_lm_")  # fmt: skip
DYNAMO = _keys({
    TEXT: "backend",
    "=default|reduce-overhead|max-autotune": "mode",
    WORDY: "use_fullgraph use_dynamic use_regional_compilation",
}, "dynamo_")  # fmt: skip
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

DEEPSPEED = _keys({
    COUNT: "train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps "
           "sequence_parallel_size vocabulary_size",
    NUMBER: "gradient_clipping steps_per_print gradient_predivide_factor",
    MAP: "zero_optimization fp16 bf16 bfloat16 amp torch_autocast optimizer scheduler "
         "activation_checkpointing aio data_types",
    BOOL: "zero_allow_untested_optimizer zero_force_ds_cpu_optimizer prescale_gradients "
          "sparse_gradients wall_clock_breakdown memory_breakdown dump_state disable_allgather "
          "dataloader_drop_last graph_harvesting use_data_before_expert_parallelism "
          "managed_gradient_accumulation",
    TEXT: "gradient_allreduce_op log_level",
    "=fp16|bf16|fp32": "communication_data_type seq_parallel_comm_data_type",
    ANY: "flops_profiler autotuning elasticity comms_logger tensorboard wandb csv_monitor comet "
         "data_efficiency curriculum_learning compression_training sparse_attention pipeline "
         "checkpoint tensor_parallel expert_parallel hybrid_engine eigenvalue "
         "progressive_layer_drop quantize_training nebula datastates_ckpt weight_quantization "
         "compile timers monitor_config zero_quantized_comms",
})  # fmt: skip
OFFLOAD_OPTIMIZER = _keys({
    "=none|cpu|nvme": "device",
    TEXT: "nvme_path",
    INT: "buffer_count",
    BOOL: "pin_memory pipeline_read pipeline_write pipeline fast_init super_offload "
          "convert_grad_on_cpu",
    NUMBER: "ratio cpuadam_cores_perc",
})  # fmt: skip
OFFLOAD_PARAM = _keys({
    "=none|cpu|nvme": "device",
    TEXT: "nvme_path",
    INT: "buffer_count buffer_size max_in_cpu",
    BOOL: "pin_memory",
})  # fmt: skip
ZERO = _keys({
    "=0|1|2|3": "stage",
    NUMBER: "mics_shard_size",
    MAP: "offload_param offload_optimizer zenflow zeropp_loco_param leaf_module",
    INT: "reduce_bucket_size allgather_bucket_size sub_group_size stage3_max_live_parameters "
         "stage3_max_reuse_distance stage3_prefetch_bucket_size "
         "stage3_param_persistence_threshold stage3_model_persistence_threshold "
         "stage3_module_granularity_threshold stage3_partition_stream_chunk_size "
         "zero_hpz_partition_size",
    BOOL: "contiguous_gradients reduce_scatter use_multi_rank_bucket_allreduce "
          "allgather_partitions overlap_comm load_from_fp32_weights elastic_checkpoint "
          "cpu_offload cpu_offload_param cpu_offload_use_pin_memory "
          "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save "
          "stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
          "ignore_unused_parameters legacy_stage1 round_robin_gradients zero_quantized_weights "
          "zero_quantized_nontrainable_weights zero_quantized_gradients "
          "mics_hierarchical_params_gather memory_efficient_linear pipeline_loading_checkpoint "
          "override_module_apply log_trace_cache_warnings enable_sanity_checks "
          "save_muon_momentum_buffer_in_memory",
})  # fmt: skip
FP16 = _keys({
    BOOL: "enabled auto_cast consecutive_hysteresis fp16_master_weights_and_grads",
    NUMBER: "loss_scale min_loss_scale",
    INT: "initial_scale_power loss_scale_window hysteresis",
})  # fmt: skip
BF16 = _keys({
    BOOL: "enabled immediate_grad_update check_grad_overflow bf16_master_weights_and_grads "
          "bf16_optimizer_states",
})  # fmt: skip
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
DEEPSPEED_NUMBERS = _keys({
    NUMBER: "lr eps weight_decay momentum warmup_min_lr warmup_max_lr warmup_num_steps "
            "total_num_steps min_lr max_lr lr_range_test_min_lr cycle_min_lr cycle_max_lr",
})  # fmt: skip
SCHEDULERS = ("LRRangeTest", "OneCycle", "WarmupLR", "WarmupDecayLR", "WarmupCosineLR")
