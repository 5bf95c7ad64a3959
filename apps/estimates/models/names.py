"""Different publishers' names for one base model or GPU type."""

import re
from collections.abc import Iterator, Mapping

from apps.estimates.models.architectures import Architecture

# Words that only distinguish variants of the same shape.
_VARIANTS = frozenset(
    (
        "instruct", "chat", "hf", "base", "it", "pt", "bnb", "4bit", "8bit", "unsloth", "gptq", "awq", "int4", "int8",
        "fp8", "bf16", "dynamic", "meta", "preview",
    )
)  # fmt: skip
# Words that distinguish shapes of a few models only. They are dropped only if the name with them is not known.
_LOOSE = re.compile(
    r"v\d+(\.\d+)?|\d{4}|\d+k|1m|alpha|beta|coder|code|math|thinking|reasoning|distill|deepseek|nemotron|h2ogpt|r1|llm"
    r"|sft|dpo|orpo|kto|gguf|fp16|f16|float16|bfloat16|text|model|deduped|long|mxfp4|nf4|quantized"
)
_SIZE = re.compile(r"[\d.]+[bm]?")
_GPUS = (
    ("gb300", r"gb300"), ("gb200", r"gb200"), ("b300-sxm-270", r"b300"), ("b200-sxm-180", r"b200"),
    ("h200-nvl-141", r"h200.*nvl"), ("h200-sxm-141", r"h200"), ("h100-nvl-94", r"h100.*nvl"),
    ("h100-pcie-80", r"h100.*pcie"), ("h100-sxm-80", r"h100"), ("a100-pcie-80", r"a100.*pcie.*80|a100.*80.*pcie"),
    ("a100-pcie-40", r"a100.*pcie"), ("a100-sxm-40", r"a100.*40"), ("a100-sxm-80", r"a100|a800"),
    ("l40s-48", r"l40s"), ("l40-48", r"\bl40\b"), ("l4-24", r"\bl4\b"), ("rtx-4090", r"4090"), ("rtx-5090", r"5090"),
    ("rtx-3090", r"3090"), ("rtx-6000-ada", r"6000 ?ada"), ("rtx-pro-6000-bw", r"pro 6000"), ("rtx-a6000", r"a6000"),
    ("a10g-24", r"a10g"), ("t4-16", r"\bt4\b"), ("v100-sxm-32", r"v100.*32"), ("v100-sxm-16", r"v100"),
    ("mi300x", r"mi300"), ("mi325x", r"mi325"), ("mi355x", r"mi355"), ("rtx-4080-16", r"4080"),
)  # fmt: skip


class Names(Mapping[str, Architecture]):
    """Architectures by name.

    A name that is not in the table is looked up without owner, variant and spelling; then also without its version, if
    all models of the remaining name have one shape.
    """

    def __init__(self, exact: Mapping[str, Architecture]) -> None:
        self._exact = exact
        self._plain: dict[str, Architecture] = {}
        bare: dict[str, list[Architecture]] = {}
        for name, architecture in exact.items():
            self._plain.setdefault(plain_name(name), architecture)
            bare.setdefault(bare_name(name), []).append(architecture)
        bare.pop("", None)
        self._bare = {name: found[0] for name, found in bare.items() if all(each == found[0] for each in found)}

    def __getitem__(self, name: str) -> Architecture:
        found = self._find(name)
        if found is None:
            raise KeyError(name)
        return found

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._find(name) is not None

    def _find(self, name: str) -> Architecture | None:
        spellings = (name, re.sub(r"\s*\(.*\)$", "", name))  # a remark in parentheses may follow
        return next((found for each in spellings if (found := self._find_spelling(each))), None)

    def _find_spelling(self, name: str) -> Architecture | None:
        return self._exact.get(name) or self._plain.get(plain_name(name)) or self._bare.get(bare_name(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._exact)

    def __len__(self) -> int:
        return len(self._exact)


def plain_name(name: str) -> str:
    """Return the name without owner and variant: "unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit" -> "llama-3.1-8b"."""
    text = re.sub(r"[()]", "", re.sub(r"[\s_]+", "-", name.strip().rsplit("/", 1)[-1].lower()))
    text = re.sub(r"\b(llama|qwen|gemma|phi|mistral|mixtral|falcon)-?(?=\d)", r"\1-", text)
    return "-".join(word for word in text.split("-") if word and word not in _VARIANTS)


def bare_name(name: str) -> str:
    """Return the plain name without versions and purposes too: "Qwen2.5-Coder-7B-Instruct" -> "qwen-2.5-7b".

    Return nothing if only a size is left, which many models share.
    """
    words = [word for word in plain_name(name).split("-") if not _LOOSE.fullmatch(word)]
    return "" if all(_SIZE.fullmatch(word) for word in words) else "-".join(words)


def gpu_key(row_key: str | None, name: str | None) -> str:
    """Return the catalog's key of a GPU: the row's key, else the one for its name; empty if neither is known."""
    if row_key:
        return row_key
    text = (name or "").lower()
    return next((key for key, pattern in _GPUS if re.search(pattern, text)), "")
