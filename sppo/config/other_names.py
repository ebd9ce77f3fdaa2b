"""Names that keys of the run file have in other programs, and in an earlier version of this one.

They are those of transformers, TRL, PEFT, axolotl, LLaMA-Factory, torchtitan, DeepSpeed, Megatron.
"""

from __future__ import annotations

NAMES = {
    "parallel.sequence_parallel_degree, with sequence_parallel=ulysses": "context_parallel cp "
    "ulysses sequence_parallel_size",
    "parallel.sequence_parallel_degree, with sequence_parallel=megatron": "tensor_parallel tp "
    "tensor_model_parallel",
    "parallel.pipeline_parallel_degree": "pipeline_parallel pipeline_model_parallel pp",
    "parallel.virtual_stages": "virtual_pipeline_model_parallel",
    "parallel.data_parallel_degree": "data_parallel data_parallel_replicate dp dp_replicate",
    "parallel.zero=3, over all ranks with the same weights": "fsdp data_parallel_shard "
    "dp_shard deepspeed zero_stage zero_optimization",
    "activations.policy: auto recomputes what does not fit, recompute all": "recompute "
    "gradient_checkpointing activation_checkpointing activation_checkpoint",
    "activations.policy: auto offloads what compute hides, offload_all all": "cpu_offloading "
    "activation_offloading offload_activations",
    "state.optimizer=host": "cpu_offload offload_optimizer optimizer_cpu_offload optimizer.offload",
    "state.weights=host": "offload_param offload_params",
    "sequence.length": "max_length max_seq_length max_seq_len seq_length seq_len sequence_len "
    "sequence_length cutoff_len block_size context_length model_max_length",
    "sequence.num_subsequences, the parts that pass through a pipeline": "num_microbatches "
    "pipeline_parallel_microbatch",
    "train.sequences_per_step, over all ranks (samples_per_step of documents)": "batch_size "
    "micro_batch micro_batch_size per_device_train_batch_size train_micro_batch_size_per_gpu "
    "local_batch_size global_batch_size train_batch_size gradient_accumulation",
    "train.epochs": "num_train_epochs num_epochs",
    "train.steps": "max_steps num_steps train_iters",
    "train.dtype": "bf16 fp16 torch_dtype mixed_precision precision",
    "train.output": "output_dir dump_folder",
    "train.only, globs of the parameters that train": "freeze unfrozen",
    "optimizer.lr": "learning_rate",
    "optimizer.schedule": "lr_scheduler",
    "optimizer.warmup_steps, a number or a share such as 3%": "warmup_ratio",
    "optimizer.clip_norm": "max_grad_norm gradient_clipping clip_grad max_norm",
    "optimizer.groups": "lr_groups loraplus_lr_ratio",
    "model.from_hf": "model_name model_name_or_path base_model",
    "model.num_layers": "num_hidden_layers n_layers n_layer",
    "model.num_heads": "num_attention_heads n_heads n_head",
    "model.num_kv_heads": "num_key_value_heads num_query_groups n_kv_heads",
    "model.mlp_size": "intermediate_size ffn_hidden_size",
    "model.head_size": "head_dim kv_channels",
    "model.norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon",
    "model.max_positions": "max_position_embeddings",
    "model.tie_embeddings": "tie_word_embeddings",
    "data.tokens, a directory of sppo data prepare": "dataset datasets train_file",
    "data.eval_tokens, or validation.sets": "eval_dataset val_set_size val_size test_datasets",
    "data.samples: documents are packed, and attention does not cross them": "packing "
    "sample_packing neat_packing padding_free",
    "data.sources": "interleave mix_strategy",
    "validation.every": "eval_steps eval_interval",
    "validation.keep_best": "load_best_model_at_end",
    "validation.stop_after": "early_stopping",
    "checkpoint.every": "save_steps save_interval",
    "checkpoint.keep": "save_total_limit",
    "the same command again, which goes on from the newest checkpoint": "resume auto_resume",
    "track.to": "report_to",
    "track.project": "wandb_project",
    "track.name": "run_name wandb_name",
    "hardware.devices_per_node": "num_gpus gpus_per_node nproc_per_node",
    "hardware.nodes": "num_nodes nnodes num_machines",
    "hardware.attention, and a run chooses its own": "attn_implementation flash_attention",
    "the section adapter, with rank, alpha and targets": "lora peft use_peft",
}
"""First words of names elsewhere, by what is written here; one with a dot is a whole path."""
_HERE = {name: here for here, names in NAMES.items() for name in names.split()}

_OF_ADAPTERS = {
    **dict.fromkeys(("r", "rank"), "Here it is adapter.rank."),
    "alpha": "Here it is adapter.alpha.",
    **dict.fromkeys(("target", "target_modules", "target_linear"), "Here it is adapter.targets."),
    **dict.fromkeys(("model_dir", "adapter_name_or_path"), "Here it is adapter.from_peft."),
    **dict.fromkeys(("modules_to_save", "additional_target"), "Here it is adapter.also_train."),
    "layers_to_transform": "Here it is adapter.layers.",
    "use_rslora": "Here it is adapter.scaling=rank_stabilized.",
    "dropout": "Adapters have no dropout: leave it out; a lower adapter.rank fits less.",
    "use_dora": "Adapters are LoRA, not DoRA: leave it out.",
    "init_lora_weights": "A starts at random and B at 0: leave it out, or give adapter.from_peft.",
    "bias": "Biases stay frozen: leave it out.",
    **dict.fromkeys(
        ("rank_pattern", "alpha_pattern"), "All targets have one rank and one alpha: leave it out."
    ),
    **dict.fromkeys(
        ("load_in_4bit", "load_in_8bit", "quantization_bit"),
        "The base is not quantized: leave it out; state.weights=host takes it off the device.",
    ),
}
"""Words about keys of adapters elsewhere, without the ``lora_`` in front of some."""


def words_about(path: str) -> str:
    """Return a sentence about the key elsewhere that `path` names; "" if none is known.

    >>> words_about("train.max-length")
    'Here it is sequence.length.'
    """
    section, _, key = path.replace("-", "_").lower().rpartition(".")
    of_adapters = key.removeprefix("peft_").removeprefix("lora_")
    if of_adapters in _OF_ADAPTERS and (section == "adapter" or of_adapters != key):
        return _OF_ADAPTERS[of_adapters]
    said = [name for name in _HERE if name == path or f"{key}_".startswith(f"{name}_")]
    return f"Here it is {_HERE[max(said, key=len)]}." if said else ""
