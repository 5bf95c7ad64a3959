"""What the keys of other tools mean here."""

import re

SHAPES = "Anneal recognizes the rows by their columns."
NO_SUCH = "Anneal has no such setting."
OFF = "It is off or empty."
_CHOSEN = "Anneal chooses it for the GPU."
_TRACKER = "Connect the tracker in Anneal's settings."

# Keys of a tool that have the meaning of a setting here.
_SHARED = {
    "learning_rate": "learning_rate", "weight_decay": "weight_decay", "max_grad_norm": "max_grad_norm",
    "warmup_ratio": "warmup_ratio", "lora_r": "lora_rank", "lora_rank": "lora_rank", "lora_alpha": "lora_alpha",
    "lora_dropout": "lora_dropout", "seed": "seed",
}  # fmt: skip
NAMES: dict[str, dict[str, str]] = {
    "together": _SHARED | {
        "n_epochs": "epochs", "batch_size": "batch_size", "lr_scheduler_type": "lr_scheduler", "dpo_beta": "dpo_beta",
        "lora_trainable_modules": "target_modules", "random_seed": "seed", "max_seq_length": "max_length",
        "packing": "packing", "early_stopping_patience": "early_stopping_patience",
    },
    "fireworks": _SHARED | {
        "epochs": "epochs", "batch_size_samples": "batch_size", "max_context_length": "max_length",
        "kl_beta": "dpo_beta",
    },
    "axolotl": _SHARED | {
        "num_epochs": "epochs", "lr_scheduler": "lr_scheduler", "sequence_len": "max_length",
        "sample_packing": "packing", "peft_use_dora": "use_dora", "peft_use_rslora": "use_rslora",
        "rl_beta": "dpo_beta", "dpo_beta": "dpo_beta", "orpo_alpha": "orpo_beta", "val_set_size": "validation_share",
        "early_stopping_patience": "early_stopping_patience", "lora_target_modules": "target_modules",
    },
    "llama-factory": _SHARED | {
        "num_train_epochs": "epochs", "lr_scheduler_type": "lr_scheduler", "cutoff_len": "max_length",
        "packing": "packing", "use_dora": "use_dora", "use_rslora": "use_rslora", "pref_beta": "dpo_beta",
        "val_size": "validation_share", "lora_target": "target_modules",
    },
}  # fmt: skip
MODEL = {
    "together": "model",
    "fireworks": "base_model",
    "axolotl": "base_model",
    "llama-factory": "model_name_or_path",
}
BATCHES = {
    "axolotl": ("micro_batch_size", "gradient_accumulation_steps"),
    "llama-factory": ("per_device_train_batch_size", "gradient_accumulation_steps"),
}
IGNORED = {
    _CHOSEN: re.compile(
        r"bf16|fp16|tf32|.*attention|flash_attn|.*gradient_checkpointing.*|optimizer|optim|deepspeed|fsdp.*|ddp.*"
        r"|.*num_workers|load_in_8bit|eval_batch_size|per_device_eval_batch_size|nodes|region|is_turbo"
        r"|pad_to_sequence_len|bnb_4bit_.*|quantization_(bit|method|type)|double_quantization|lora_(mlp|qkv|o)_kernel"
        r"|plugins|liger_.*|enable_liger_kernel|cut_cross_entropy|torch_compile.*|torch_dtype|low_cpu_mem_usage"
        r"|use_unsloth.*|upcast_.*|dataloader_.*|group_by_length|neat_packing|pure_bf16|ray_.*|resources.*"
    ),
    _TRACKER: re.compile(r"wandb.*|report_to|swanlab.*|mlflow.*|comet.*"),
    "It steers the tool itself, or what it writes.": re.compile(
        r"output_dir|logging.*|log.*|save.*|.*saves.*|plot_loss|overwrite.*|eval_.*|evals_.*|n_evals|n_checkpoints"
        r"|display_name|dataset_prepared_path|preprocessing.*|do_train|do_eval|strict|model_type|tokenizer_type"
        r"|processor_type|trust_remote.*|hub_.*|push_.*_?to_hub|run_name|debug|remove_unused_columns"
        r"|skip_prepare_dataset|is_.*_derived_model|local_rank|streaming|buffer_size"
    ),
    "Anneal uses the chat template of the base model.": re.compile(
        r"template|chat_template.*|jinja_template|special_tokens|conversation"
    ),
    SHAPES: re.compile(
        r"ds_type|field_.*|message_.*|roles|formatting"
    ),
}  # fmt: skip
# What Together and Fireworks add to a job that is read from them.
OF_A_JOB_THERE = re.compile(
    r"id|object|name|status|state|user_id|job_id|created_by|owner_address|.*_(at|time|url|count)|events|total_.*"
    r"|.*_(completed|num_lines|size)|queue_depth|model_output_.*|progress|metrics_file_signed_url"
)
