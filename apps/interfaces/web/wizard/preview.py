"""The first row of the chosen file as this recipe would train it, rendered by the training code."""

from apps.catalog.queries import chat_renderer
from apps.contracts.chat import RowError, TrainOn
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.queries import read_rows
from apps.interfaces.web.datasets.row_view import RowView, view_row
from apps.interfaces.web.wizard.plan import Plan


def first_row(plan: Plan) -> RowView | None:
    """Return the first row; return None without a file or recipe, or if the model is not installed."""
    model, version, form = plan.base_model, plan.version, plan.form
    if model is None or version is None or form is None or not form.is_valid() or form.recipe is None:
        return None
    if not model.is_installed or version.status != DatasetVersionStatus.READY:
        return None
    recipe, previews = form.recipe, read_rows(version=version, first_line=1, limit=1)
    if not previews or previews[0].row is None:
        return None
    try:
        renderer = chat_renderer(base_model=model)
        return view_row(previews[0].row, renderer, limit=recipe.max_length, train_on=TrainOn(recipe.train_on))
    except RowError:
        return None
