"""Unsloth's or Axolotl's training of the same rows, on a CUDA card where they are installed.

`python -m tests.bench.training.rivals REQUEST.json RESULT.json NAME`. Each gets our token ids and labels, so that
nothing but the training differs, and its own documented settings otherwise.
"""

import importlib
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec

# Unsloth patches transformers, PEFT and TRL while it is imported, and says so when it comes too late.
_FIRST = importlib.import_module("unsloth") if "unsloth" in sys.argv[1:] else None

import torch  # noqa: E402
import transformers  # noqa: E402

from gpu_workers.train.data.encoding import encode_file, load_renderer  # noqa: E402
from tests.bench.training.meter import TARGETS, Meter, Request, held_out_loss  # noqa: E402


def main(request: Request, result: Path) -> None:
    train = {"unsloth": _unsloth, "axolotl": _axolotl}[request.variant]
    with tempfile.TemporaryDirectory() as folder:
        meter = Meter(request)
        model = train(request, Path(folder), meter)
        result.write_text(json.dumps(meter.result(held_out_loss(model, request))))


def _rows(request: Request) -> list[dict[str, Any]]:
    rows = encode_file(Path(request.rows), load_renderer(Path(request.model), ""), max_length=request.max_length)
    return [
        {"input_ids": ids, "labels": labels, "attention_mask": [1] * len(ids)}
        for ids, labels in zip(rows.input_ids, rows.labels, strict=True)
    ]


def _unsloth(request: Request, folder: Path, meter: Meter) -> Any:
    datasets, trl = importlib.import_module("datasets"), importlib.import_module("trl")
    assert _FIRST is not None
    model, tokenizer = _FIRST.FastLanguageModel.from_pretrained(
        request.model, max_seq_length=request.max_length, dtype=None, load_in_4bit=False
    )
    model = _FIRST.FastLanguageModel.get_peft_model(
        model,
        r=request.rank,
        lora_alpha=2 * request.rank,
        lora_dropout=0.0,
        target_modules=list(TARGETS),
        use_gradient_checkpointing="unsloth",
    )
    trainer = trl.SFTTrainer(
        model=model,
        processing_class=tokenizer,
        train_dataset=datasets.Dataset.from_list(_rows(request)),
        data_collator=transformers.DataCollatorForSeq2Seq(tokenizer),
        args=trl.SFTConfig(
            output_dir=str(folder),
            per_device_train_batch_size=request.batch_size,
            num_train_epochs=1,
            learning_rate=request.learning_rate,
            max_length=request.max_length,
            dataset_kwargs={"skip_prepare_dataset": True},
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    meter.watch(trainer)
    trainer.train()
    return trainer.model


def _axolotl(request: Request, folder: Path, meter: Meter) -> Any:
    """Axolotl builds its trainer itself; the meter is put on whichever it makes."""
    rows = folder / "rows.jsonl"
    rows.write_text("\n".join(json.dumps(row) for row in _rows(request)))
    trained = folder / "trained"
    config = folder / "config.yaml"
    config.write_text(json.dumps(_axolotl_config(request, rows, trained)))  # JSON is YAML
    original = transformers.Trainer.train

    def train(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        meter.watch(trainer)
        return original(trainer, *args, **kwargs)

    transformers.Trainer.train = train
    importlib.import_module("axolotl.cli.train").do_cli(config=str(config))
    base = transformers.AutoModelForCausalLM.from_pretrained(request.model, dtype=torch.bfloat16).cuda()
    return importlib.import_module("peft").PeftModel.from_pretrained(base, trained)


def _axolotl_config(request: Request, rows: Path, trained: Path) -> dict[str, Any]:
    return {
        "base_model": request.model,
        "datasets": [{"path": str(rows), "ds_type": "json", "type": None}],  # already token ids
        "output_dir": str(trained),
        "dataset_prepared_path": str(trained.parent / "prepared"),
        "sequence_len": request.max_length,
        "sample_packing": False,  # as many rows a step as everybody
        "group_by_length": True,
        "micro_batch_size": request.batch_size,
        "gradient_accumulation_steps": 1,
        "num_epochs": 1,
        "learning_rate": request.learning_rate,
        "lr_scheduler": "linear",
        "optimizer": "adamw_torch_fused",
        "adapter": "lora",
        "lora_r": request.rank,
        "lora_alpha": 2 * request.rank,
        "lora_dropout": 0.0,
        "lora_target_modules": list(TARGETS),
        "bf16": "auto",
        "flash_attention": importlib.util.find_spec("flash_attn") is not None,
        "saves_per_epoch": 1,
        "val_set_size": 0,
        "logging_steps": 1000,
    }


if __name__ == "__main__":
    main(msgspec.json.decode(Path(sys.argv[1]).read_bytes(), type=Request), Path(sys.argv[2]))
