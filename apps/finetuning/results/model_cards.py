"""Model cards of an adapter version and its exports, with the metadata block that the hub reads and checks."""

import json
from collections.abc import Sequence

from apps.adapters.lifecycle import AdapterVersionStatus
from apps.adapters.models import AdapterVersion
from apps.catalog.models import BaseModel
from apps.contracts.adapter_files.loading import loading_code
from apps.contracts.evaluation import EvaluationReport
from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.core.money import dollars
from apps.finetuning.models import FineTuningJob
from apps.finetuning.queries import report_of
from apps.finetuning.quotes.delivery import GGUF
from apps.finetuning.recipes.stored_requests import recipe_of
from apps.finetuning.results.provenance import BUNDLE_FILE, energy, label_of

CARD_FILE = "README.md"
# Identifiers of the hub for licences; it rejects a card with any other value in `license`.
_HUB_LICENCES = frozenset(
    {"apache-2.0", "mit", "bsd-2-clause", "bsd-3-clause", "isc", "cc0-1.0", "cc-by-4.0", "cc-by-sa-4.0", "cc-by-nc-4.0"}
)


def model_card(*, job: FineTuningJob, version: AdapterVersion, export: str = "") -> str:
    """Return the card in Markdown: of the version's own files, or of an export such as "merged_16bit"."""
    lines = [
        "---",
        *_metadata(job, export),
        "---",
        "",
        f"# {version.adapter.name}, {version.label}",
        "",
        _what_it_is(job, export),
        "",
        "## Training",
        "",
        *_table(("", ""), _training_facts(job, version)),
        *([] if export or job.hyperparameters["method"] == "full" else _loading_lines(job.base_model)),
        *_evaluation_lines(report_of(version)),
        *_parity_lines(version),
        "## Reproduce",
        "",
        f"`{BUNDLE_FILE}` beside this file holds the hashes of the data, the recipe, the seed and the versions.",
        "",
    ]
    return "\n".join(lines)


def uploaded_card(*, version: AdapterVersion) -> str:
    """Return the card of an adapter that was trained elsewhere: how to load it."""
    base, modules = version.adapter.base_model, ", ".join(version.target_modules)
    lines = [
        "---",
        *_base_lines(base, "peft", "adapter", ["lora"]),
        "---",
        "",
        f"# {version.adapter.name}, {version.label}",
        "",
        f"An adapter of {_name_of(base)}, which was uploaded. Its training is not known here.",
        "",
        f"LoRA, rank {version.rank}, of the layers {modules}.",
        "",
        *_loading_lines(base),
    ]
    return "\n".join(lines)


def _metadata(job: FineTuningJob, export: str) -> list[str]:
    recipe = job.hyperparameters
    is_adapter = recipe["method"] != "full" and not export
    library = "gguf" if export == GGUF else "peft" if is_adapter else "transformers"
    tags = [recipe["method"] if recipe["method"] == "full" else "lora", recipe.get("objective", "supervised")]
    return _base_lines(job.base_model, library, "adapter" if is_adapter else "finetune", tags)


def _base_lines(base: BaseModel, library: str, relation: str, tags: list[str]) -> list[str]:
    # Without a repository the hub would take the name for another publisher's model.
    named = [f"base_model: {json.dumps(base.repo)}", f"base_model_relation: {relation}"] if base.repo else []
    return [
        *named,
        f"library_name: {library}",
        "pipeline_tag: text-generation",
        f"tags: [{', '.join(tags)}]",
        *_licence_lines(base),
    ]


def _licence_lines(base: BaseModel) -> list[str]:
    name = base.licence.partition(" (")[0].strip()
    if not name:
        return []
    if name.lower() in _HUB_LICENCES:
        return [f"license: {name.lower()}"]
    link = [f"license_link: {json.dumps(base.licence_url)}"] if base.licence_url else []
    return ["license: other", f"license_name: {json.dumps(name)}", *link]


def _what_it_is(job: FineTuningJob, export: str) -> str:
    of = _name_of(job.base_model)
    if job.hyperparameters["method"] == "full":
        return f"A whole model: {of} with every weight trained."
    return f"A whole model: {of} with its adapter merged in." if export else f"An adapter of {of}."


def _name_of(base: BaseModel) -> str:
    return f"`{base.name}`" + (f" at commit `{base.revision}`" if base.revision else "")


def _loading_lines(base: BaseModel) -> list[str]:
    """Return how to load an adapter from its folder."""
    code = loading_code(repo=base.repo, revision=base.revision, name=base.name)
    return ["## Load it", "", "```python", *code, "```", ""]


def _training_facts(job: FineTuningJob, version: AdapterVersion) -> list[tuple[str, str]]:
    recipe = recipe_of(job)
    used = energy(job=job)
    left_out = ""
    if job.validation_file_id:
        left_out = ", without those that stand in the validation file too"
    elif job.hyperparameters.get("validation_share"):
        left_out = f", {job.hyperparameters['validation_share']:.0%} of them held out"
    data = f"a file of {job.training_file.rows:,} rows{left_out}, SHA-256 `{job.training_file.sha256[:16]}…`"
    return [
        ("Data", data),
        ("Objective", recipe.objective),
        *_method_facts(recipe, version),
        ("Epochs, steps", f"{recipe.epochs}, {version.metrics.get('step')}"),
        ("Learning rate", f"{recipe.learning_rate:g}, {recipe.lr_scheduler}"),
        ("Seed", str(job.seed)),
        ("Trained tokens", f"{job.trained_tokens:,}"),
        ("Cost", f"{dollars(job.cost_nano)} for {job.billed_gpu_ms / 1000:g} GPU-seconds"),
        ("Energy", used.method if used.kwh is None else f"at most {used.kwh} kWh ({used.method})"),
    ]


def _method_facts(recipe: Hyperparameters, version: AdapterVersion) -> list[tuple[str, str]]:
    if recipe.method is Method.FULL:
        return [("Method", "full: every weight")]
    name = recipe.method + (", DoRA" if recipe.use_dora else "")
    scale = ", alpha by the rank's root" if recipe.use_rslora else ""
    shape = f"{name}, rank {recipe.lora_rank}, alpha {recipe.lora_alpha}{scale}"
    return [("Method", shape), ("Layers", ", ".join(version.target_modules))]


def _evaluation_lines(report: EvaluationReport | None) -> list[str]:
    if report is None:
        return ["## Evaluation", "", "No held-out rows were given.", ""]
    rows = [
        (
            label_of(found.name),
            f"{found.base.value:.4f} [{found.base.low:.4f}, {found.base.high:.4f}]",
            f"{found.tuned.value:.4f} [{found.tuned.low:.4f}, {found.tuned.high:.4f}]",
            found.verdict,
        )
        for found in report.comparisons
    ]
    return [
        "## Evaluation",
        "",
        f"On {report.rows} held-out rows ({report.answers} answers), base and tuned model, 95 % intervals:",
        "",
        *_table(("Measure", "Base", "Tuned", "Tuned is"), rows),
        f"{report.worse_rows} rows got worse.",
        "",
    ]


def _parity_lines(version: AdapterVersion) -> list[str]:
    if version.status != AdapterVersionStatus.READY:
        return []
    parity = version.parity
    words = (
        f"Loaded by {parity['engine']}, its log-probabilities on {parity['tokens']} tokens are within "
        f"{parity['tuned_difference']:.4f} nats of the trainer's on average ({parity['tolerance']:g} is allowed)."
    )
    return [words, ""]


def _table(head: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> list[str]:
    lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
    return [*lines, *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows), ""]
