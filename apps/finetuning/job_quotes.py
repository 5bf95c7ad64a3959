"""What a file costs to train on, on every open pool."""

import datetime

from apps.catalog.models import BaseModel
from apps.catalog.queries import list_base_models
from apps.contracts.runs import Hyperparameters
from apps.core.errors import Unavailable
from apps.datasets.inspecting import find_overlap
from apps.datasets.models import DatasetVersion
from apps.datasets.operations import COUNT_NOW_BYTES, count_tokens
from apps.datasets.queries import find_token_count
from apps.finetuning.options import PoolQuote
from apps.finetuning.quoting import quote_pools
from apps.finetuning.training_data import training_data


class StillCounting(Unavailable):
    """The file is large and its tokens are being counted; asking again later answers."""

    code = "still_counting"


def get_quotes(
    *,
    base_model: BaseModel,
    version: DatasetVersion,
    recipe: Hyperparameters,
    now: datetime.datetime,
    validation: DatasetVersion | None = None,
) -> list[PoolQuote]:
    """Return a quote for each open pool, counting the file's tokens first when nobody has yet.

    A model that is not installed has no tokenizer here: it is quoted by an installed one's count, and never launched.
    Raises StillCounting for a file too large to count while somebody waits.
    """
    counting = counting_model(base_model)
    if is_still_counting(version=version, base_model=counting):
        raise StillCounting(f"The tokens of {version.pk} are being counted: try again soon.", param="training_file")
    count = count_tokens(version=version, base_model=counting)
    data = training_data(
        version=version,
        count=count,
        recipe=recipe,
        validation=validation,
        validation_count=find_token_count(version=validation, base_model=counting) if validation else None,
        left_out_rows=(find_overlap(version=version, other=validation) or 0) if validation else 0,
    )
    return quote_pools(
        base_model=base_model, data=data, hyperparameters=recipe, organization=version.organization_id, now=now
    )


def is_still_counting(*, version: DatasetVersion, base_model: BaseModel) -> bool:
    """Return whether the file is too large to count at once and its count, asked for at validation, is not there."""
    is_large = version.bytes > COUNT_NOW_BYTES
    return is_large and find_token_count(version=version, base_model=base_model) is None


def counting_model(base_model: BaseModel) -> BaseModel:
    """Return the model whose tokenizer counts for `base_model`: itself, or the first installed one in its place."""
    if base_model.is_installed:
        return base_model
    return list_base_models(only_installed=True).first() or base_model
