"""The table of `docs/models.md`, from the results of the last run and the product's declaration."""

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from apps.contracts.adapter_files import SUPPORT
from gpu_workers.common.config import REPOSITORY

MATRIX = Path(__file__).with_name("matrix.json")
DOCS = REPOSITORY / "docs" / "models.md"
_BEGIN, _END = "<!-- begin: make family-matrix -->", "<!-- end -->"


class FamilyResult(msgspec.Struct, kw_only=True):
    """What a family's path measured. Differences are means over tokens, in nats, of 16-bit numbers."""

    family: str
    architecture: str
    example: str
    parameters: int = 0
    quoted_bytes: int = 0
    losses: dict[str, tuple[float, float]] = {}  # by method: of the first and the last three steps
    is_resumed_exactly: bool = False
    served: str = ""
    differences: dict[str, float] = {}  # by method: the engine's numbers from the trainer's
    effects: dict[str, float] = {}  # by method: the adapter's numbers from the base model's
    base_difference: float = 0.0
    equal_tokens: dict[str, int] = {}  # by method: greedy tokens of the engine that are the trainer's
    peft_difference: float = 0.0
    merged_difference: float = 0.0
    is_trained: bool = False
    error: str = ""


def read_matrix() -> list[FamilyResult]:
    """Return the committed results of the last run."""
    return msgspec.json.decode(MATRIX.read_bytes(), type=list[FamilyResult])


def render(rows: Sequence[FamilyResult]) -> str:
    """Return the generated part of the page."""
    lines = [
        "| family | class | LoRA on | loss: LoRA, QLoRA | resume | served | adapter, QLoRA adapter, merged |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        support = SUPPORT[row.architecture]
        modules = ", ".join(module.removesuffix("_proj") for module in support.modules)
        losses = ", ".join(f"{first:.2f} → {last:.2f}" for first, last in row.losses.values())
        differences = ", ".join(f"{value:.3f}" for value in (*row.differences.values(), row.merged_difference))
        cells = (
            f"{support.family} ({row.example})", f"`{row.architecture}`", modules, losses,
            "exact" if row.is_resumed_exactly else "no",
            "as an adapter" if row.served else "failed", differences,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    notes = [f"- **{row.family}** failed: {row.error}" for row in rows if row.error]
    tried = {row.architecture for row in rows}
    if untried := [support.family for name, support in SUPPORT.items() if name not in tried]:
        notes.append(f"- Declared from the sources, and not tried yet: {', '.join(untried)}.")
    return "\n".join([_BEGIN, "", *lines, *([""] if notes else []), *notes, "", _END])


def write_docs() -> None:
    """Put the table into the page."""
    page = DOCS.read_text()
    DOCS.write_text(re.sub(f"{_BEGIN}.*{_END}", lambda _: render(read_matrix()), page, flags=re.DOTALL))
