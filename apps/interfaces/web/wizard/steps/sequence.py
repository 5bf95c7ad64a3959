"""The wizard's steps in order: what each one shows, chooses and sends, and the errors that are fixed there."""

from collections.abc import Callable
from dataclasses import dataclass

from apps.core.errors import DomainError
from apps.core.messages.translation import later
from apps.interfaces.web.shell.access import OrganizationRequest
from apps.interfaces.web.wizard.draft import FILE_NAMES, METHOD_NAMES, Draft
from apps.interfaces.web.wizard.plan import Plan, StepContext
from apps.interfaces.web.wizard.steps.compute import compute_context
from apps.interfaces.web.wizard.steps.dataset import dataset_context
from apps.interfaces.web.wizard.steps.method import method_context
from apps.interfaces.web.wizard.steps.model import model_context
from apps.interfaces.web.wizard.steps.review import review_context

# The recipe fields that can be changed beside the compute step's table.
LIVE_FIELDS = ("epochs", "batch_size", "max_length", "lora_rank")


@dataclass(frozen=True, kw_only=True)
class Step:
    """One step. The next step is closed until `opens_next` is chosen.

    `fields` are those that its own form sends; the rest of the draft travels in hidden fields. A new recipe drops the
    pool and the cap. `forms` are the plan's forms that must be right. A refusal of the job that names one of `params`
    is fixed here.
    """

    name: str
    heading: str
    context: Callable[[OrganizationRequest, Plan], StepContext]
    opens_next: str = ""
    fields: tuple[str, ...] = ()
    forms: tuple[str, ...] = ()
    params: tuple[str, ...] = ()
    is_priced: bool = True


_LISTED = (
    Step(
        name="dataset",
        heading=later("Choose a dataset"),
        context=dataset_context,
        opens_next="dataset",
        fields=(*FILE_NAMES, "pool", "cap"),
        params=("training_file", "validation_file"),
        is_priced=False,
    ),
    Step(
        name="model",
        heading=later("Choose a base model"),
        context=model_context,
        opens_next="model",
        fields=("model", "pool", "cap"),
        params=("model",),
        is_priced=False,
    ),
    Step(
        name="method",
        heading=later("Choose a method"),
        context=method_context,
        opens_next="method",
        fields=(*METHOD_NAMES, "pool", "cap"),
        forms=("form", "after", "tracking"),
        params=("suffix", "evaluation.grader", "exports"),
    ),
    Step(
        name="compute",
        heading=later("Choose compute"),
        context=compute_context,
        opens_next="pool",
        fields=("method", *LIVE_FIELDS, "node_count", "pool", "cap", "within", "needed_by"),
        forms=("form", "compute_form"),
        params=(
            "compute.pool",
            "compute.gpu_count",
            "compute.node_count",
            "budget.max_cost_usd",
            "budget.quoted_max_usd",
        ),
    ),
    Step(name="review", heading=later("Review and launch"), context=review_context),
)
STEPS = {step.name: step for step in _LISTED}


def list_reachable(draft: Draft) -> list[str]:
    """Return the steps that can be opened: those whose earlier steps are all answered."""
    names = []
    for step in STEPS.values():
        names.append(step.name)
        if step.opens_next and not draft.get(step.opens_next):
            break
    return names


def choose_step(plan: Plan, asked: str) -> str:
    """Return the step to show: the requested one, unless it is closed or an earlier one has an error."""
    reachable = list_reachable(plan.draft)
    if plan.refusal or set(FILE_NAMES) & set(plan.gone):
        return "dataset"
    if plan.form is not None and "compute" in reachable and not plan.form.is_valid():
        is_shown_there = set(plan.form.errors) <= {"method", *LIVE_FIELDS}
        return "compute" if asked == "compute" and is_shown_there else "method"
    if "compute" in reachable and (plan.after.errors or plan.tracking.errors):
        return "method"
    if plan.compute_form.errors:
        return "compute"
    return asked if asked in reachable else reachable[-1]


def step_that_fixes(problem: DomainError) -> str:
    """Return the step where a refusal of the job is fixed; return "" if none fixes it."""
    param = problem.param or ""
    if found := next((step.name for step in STEPS.values() if param in step.params), ""):
        return found
    if param.startswith("hyperparameters"):
        return "method"
    is_cap_too_high = problem.code == "insufficient_quota" and "required_nano" in problem.data
    return "compute" if is_cap_too_high else ""
