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


class Row(msgspec.Struct, kw_only=True):
    """What the table shows of a family's results; the rest stays in the file."""

    family: str
    architecture: str
    example: str
    losses: dict[str, tuple[float, float]] = {}
    is_resumed_exactly: bool = False
    served: str = ""
    differences: dict[str, float] = {}
    merged_difference: float = 0.0
    error: str = ""


def read_matrix() -> list[Row]:
    """Return the committed results of the last run."""
    return msgspec.json.decode(MATRIX.read_bytes(), type=list[Row])


def render(rows: Sequence[Row]) -> str:
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
            {"adapter": "as an adapter", "merged": "merged only"}.get(row.served, "failed"), differences,
        )  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    failed = [f"- **{row.family}** failed: {row.error}" for row in rows if row.error]
    return "\n".join([_BEGIN, "", *lines, *([""] if failed else []), *failed, "", _END])


def write_docs() -> None:
    """Put the table into the page."""
    page = DOCS.read_text()
    DOCS.write_text(re.sub(f"{_BEGIN}.*{_END}", lambda _: render(read_matrix()), page, flags=re.DOTALL))
