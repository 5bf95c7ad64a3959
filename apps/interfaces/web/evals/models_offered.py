"""The models that a form offers: base models and adapters that answer, and aliases."""

from collections.abc import Sequence

from django.utils.translation import gettext

from apps.accounts.models import Organization
from apps.finetuning.runs.judges import list_judges
from apps.serving.aliases import is_imported, list_aliases
from apps.serving.models import Alias

_MOST_ALIASES = 100
ModelChoices = Sequence[tuple[str, Sequence[tuple[str, str]]]]  # groups of names and labels


def list_models(*, organization: Organization) -> ModelChoices:
    """Return the models that the organization can ask, in groups."""
    served = list_judges(organization=organization)
    aliases = list_aliases(organization=organization)[:_MOST_ALIASES]
    groups = (
        (gettext("Adapters"), [one for one in served if one[0].startswith("ft:")]),
        (gettext("Aliases"), [(alias.model_name, name_of_alias(alias)) for alias in aliases]),
        (gettext("Base models"), [one for one in served if not one[0].startswith("ft:")]),
    )
    return [group for group in groups if group[1]]


def offer_models(models: ModelChoices, chosen: str, *, empty: str = "") -> list[tuple[str, object]]:
    """Return the choices of a field, with the chosen model if it is not among them. The domain checks that one."""
    known = {name for _, group in models for name, _ in group}
    own = [(chosen, chosen)] if chosen and chosen not in known and "\x00" not in chosen else []
    return [("", empty or gettext("Choose one")), *own, *models]


def name_of_alias(alias: Alias) -> str:
    return alias.name if is_imported(alias) else f"{alias.name}, {alias.adapter.name}"
