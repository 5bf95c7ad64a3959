"""The code of a model card that loads an adapter with PEFT."""

BASE_PATH, ADAPTER_PATH = "/path/to/{name}", "/path/to/this/folder"  # the reader puts their own in place of them


def loading_code(*, repo: str, revision: str, name: str) -> list[str]:
    """Return lines of Python that load the base model and the adapter beside it as `model`."""
    where = f'"{repo}", revision="{revision}"' if repo else f'"{BASE_PATH.format(name=name)}"'
    return [
        "from peft import PeftModel",
        "from transformers import AutoModelForCausalLM",
        "",
        f"base = AutoModelForCausalLM.from_pretrained({where})",
        f'model = PeftModel.from_pretrained(base, "{ADAPTER_PATH}")',
    ]
