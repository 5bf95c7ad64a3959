"""Quote queries: count the files, read the pools once, and quote every recipe on them."""

import datetime
from collections.abc import Sequence

from django.utils.translation import gettext

from apps.catalog.models import BaseModel
from apps.catalog.queries import list_base_models
from apps.contracts.hyperparameters import Hyperparameters
from apps.core.errors import Unavailable
from apps.datasets.inspection.comparisons import find_comparison, find_or_compare
from apps.datasets.lifecycle import DatasetVersionStatus
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.operations import count_tokens, is_counted_at_once
from apps.datasets.queries import find_refusal, find_token_count
from apps.finetuning.quotes.computation import quote_pools
from apps.finetuning.quotes.options import PoolQuote
from apps.finetuning.quotes.pool_facts import find_open_pools
from apps.finetuning.recipes.training_data import Counted, training_data


class StillCounting(Unavailable):
    """A large file is still being counted, or compared with the other one; the client can ask again later."""

    code = "still_counting"


def get_quotes(
    *,
    base_model: BaseModel,
    version: DatasetVersion,
    recipe: Hyperparameters,
    now: datetime.datetime,
    validation: DatasetVersion | None = None,
    count: TokenCount | None = None,
    max_age_seconds: float = 0.0,
    node_count: int = 1,
) -> list[PoolQuote]:
    """Return a quote for each open pool; count the file's tokens first if they are not counted.

    With a `node_count`, so many machines of the pool train together. `count` is the file's stored count by this model,
    if the caller has it. `max_age_seconds` is that of the facts about pools. Raises the errors of count_files.
    """
    counting = counting_model(base_model)
    count = count or find_token_count(version=version, base_model=counting)
    counted = count_files(version=version, count=count, validation=validation, counting=counting)
    return quote_counted(
        base_model=base_model,
        counted=counted,
        recipes=[recipe],
        now=now,
        max_age_seconds=max_age_seconds,
        node_count=node_count,
    )[0]


def quote_counted(
    *,
    base_model: BaseModel,
    counted: Counted,
    recipes: Sequence[Hyperparameters],
    now: datetime.datetime,
    with_ways: bool = True,
    max_age_seconds: float = 0.0,
    node_count: int = 1,
) -> list[list[PoolQuote]]:
    """Return the quotes of several recipes on the pools, whose facts may be `max_age_seconds` old.

    By default, each quote that does not fit includes the changes that make it fit.
    """
    pools = find_open_pools(
        base_model=base_model,
        methods={recipe.method for recipe in recipes},
        now=now,
        organization=counted.version.organization_id,
        max_age_seconds=max_age_seconds,
    )
    return [
        quote_pools(
            base_model=base_model,
            data=training_data(counted, recipe),
            hyperparameters=recipe,
            pools=pools,
            with_ways=with_ways,
            node_count=node_count,
        )
        for recipe in recipes
    ]


def count_files(
    *, version: DatasetVersion, count: TokenCount | None, validation: DatasetVersion | None, counting: BaseModel
) -> Counted:
    """Return the files with their token counts by `counting`. Count a small training file now if `count` is missing.

    Raises StillCounting for a file too large to count in a request, and for two too large to compare in one.
    """
    if is_still_counting(version=version, count=count, base_model=counting):
        raise StillCounting(
            gettext("The tokens of %(version)s are being counted: try again soon.") % {"version": version.pk},
            param="training_file",
        )
    if is_still_comparing(version=version, validation=validation):
        raise StillCounting(
            gettext("The rows of %(version)s are being compared with its validation file: try again soon.")
            % {"version": version.pk},
            param="validation_file",
        )
    count = count or count_tokens(version=version, base_model=counting)
    return _counted(version, count, validation, counting)


def find_counted(*, version: DatasetVersion, validation: DatasetVersion | None, counting: BaseModel) -> Counted:
    """Return the files with what is stored: their token counts by `counting` and their comparison.

    Raises StillCounting if the training file's count or the comparison is missing. Nothing is computed or requested.
    """
    count = find_token_count(version=version, base_model=counting)
    if count is None:
        raise StillCounting(
            gettext("The tokens of %(version)s are not counted yet.") % {"version": version.pk}, param="training_file"
        )
    other = validation if validation is not None and _are_ready(version, validation) else None
    if other is not None and find_comparison(version=version, other=other) is None:
        message = gettext("The rows of %(version)s are not compared with its validation file yet.") % {
            "version": version.pk
        }
        raise StillCounting(message, param="validation_file")
    return _counted(version, count, validation, counting)


def _counted(
    version: DatasetVersion, count: TokenCount, validation: DatasetVersion | None, counting: BaseModel
) -> Counted:
    if validation is None:
        return Counted(version=version, count=count)
    compared = find_comparison(version=version, other=validation)
    return Counted(
        version=version,
        count=count,
        validation=validation,
        validation_count=find_token_count(version=validation, base_model=counting),
        left_out_rows=compared.left_out_rows if compared else 0,
    )


def is_still_counting(*, version: DatasetVersion, count: TokenCount | None, base_model: BaseModel) -> bool:
    """Return whether the file is too large to count at once and its count, requested at validation, is missing.

    A file that the model's template refused is not pending: counting it again returns the reason at once.
    """
    if count is not None or is_counted_at_once(version):
        return False
    return find_refusal(version=version, base_model=base_model) is None


def is_still_comparing(*, version: DatasetVersion, validation: DatasetVersion | None) -> bool:
    """Return whether both files are ready but not yet compared; the comparison is requested here."""
    if validation is None or not _are_ready(version, validation):
        return False
    return find_or_compare(version=version, other=validation) is None


def _are_ready(*versions: DatasetVersion) -> bool:
    return all(version.status == DatasetVersionStatus.READY for version in versions)


def counting_model(base_model: BaseModel) -> BaseModel:
    """Return the model whose tokenizer counts for `base_model`: itself, or the first installed one instead.

    A model that is not installed has no tokenizer here: it is quoted by another model's count, and never launched.
    """
    if base_model.is_installed:
        return base_model
    return list_base_models(only_installed=True).first() or base_model
