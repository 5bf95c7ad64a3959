"""A published row that is complete."""

ROW = {
    "id": "x-1", "model": "Llama-3.1-8B", "method": "qlora", "rank": 16, "targets": "all linear", "seq_len": 2048,
    "micro_batch": 2, "grad_ckpt": True, "optimizer": "adamw", "precision": "bf16", "attention": "flash",
    "packing": True, "gpu": "NVIDIA H100 80GB HBM3", "gpu_key": None, "gpu_count": 1, "parallelism": "none",
    "metric": "peak_vram_gb",
    "value": 20.0, "unit_note": "GiB", "source_url": "https://example.org", "quote": "", "source": "someone",
    "grad_accum": 8, "quality": "A", "notes": "", "workload": "fine-tuning",
}  # fmt: skip
