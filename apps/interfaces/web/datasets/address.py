"""The state of a dataset's page, which its address holds, and the choices that its selects offer."""

from dataclasses import dataclass
from urllib.parse import urlencode

from django.http import HttpRequest, QueryDict
from django.urls import reverse
from django.utils.translation import gettext

from apps.catalog.models import BaseModel
from apps.catalog.queries import list_base_models
from apps.contracts.chat import RowKind, TrainOn
from apps.contracts.splits.split import Split
from apps.core.messages.translation import later
from apps.datasets import queries
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.rows import kind_of
from apps.datasets.token_counts import LIMITS
from apps.finetuning.recipes.completion import choose_longest_row, choose_validation_share

_NAMES = ("model", "limit", "share", "seed", "against", "first", "line", "view", "find", "q")
ROWS_BEFORE = 2  # shown above the row that a link points at; a phone's list shows three rows
VIEWS = (("chat", later("Chat")), ("tokens", later("Tokens")), ("json", "JSON"))
SHARES = (
    (0, later("No validation split")),
    (1, later("1% validation split")),
    (5, later("5% validation split")),
    (10, later("10% validation split")),
    (20, later("20% validation split")),
)
DEFAULT_SEED = 42
TRAINED = (
    (TrainOn.ASSISTANT, later("Answers trained")),
    (TrainOn.ALL, later("Answers and inputs trained")),
)  # `train_on` of a recipe


@dataclass(frozen=True)
class Address:
    """The state of the page, all of it in its URL. `find` lists the rows of one finding, `q` those with a text."""

    version: DatasetVersion
    model: str
    limit: int
    usual_limit: int  # the limit that training uses by default
    share: int
    usual_share: int  # the default of training
    seed: int
    first: int
    line: int
    view: str
    find: str
    q: str  # a text that the rows contain
    against: str  # the validation file to compare with, "" for none
    train_on: TrainOn

    @property
    def fields(self) -> dict[str, object]:
        """The fields that differ from their defaults."""
        return self._fields({})

    def url(self, **changes: object) -> str:
        return f"{reverse('web:dataset_detail', args=[self.version.pk])}?{urlencode(self._fields(changes))}"

    def editor_url(self, line: int) -> str:
        """Return the address of the page that edits the row, which returns to this state."""
        return f"{reverse('web:dataset_row', args=[self.version.pk])}?{urlencode(self._fields({'line': line}))}"

    def _fields(self, changes: dict[str, object]) -> dict[str, object]:
        query = {name: getattr(self, name) for name in _NAMES} | changes
        query |= {"train_on": self.train_on.value if self.train_on is not TrainOn.ASSISTANT else ""}
        shown = {name: value for name, value in query.items() if value not in ("", None, 0)}
        if query["share"] != self.usual_share:
            shown["share"] = query["share"]
        return shown

    def at(self, line: int) -> str:
        """Return the address of the list around one row."""
        return self.url(line=line, first=max(1, line - ROWS_BEFORE), find="", q="")

    @property
    def split(self) -> Split:
        return Split(self.share / 100, self.seed)


def viewer_url(file_id: str, query: QueryDict, line: int) -> str:
    """Return the viewer's address at this line, with the parameters that the editor's address carries."""
    kept = {name: query[name] for name in (*_NAMES, "train_on") if query.get(name)}
    return f"{reverse('web:dataset_detail', args=[file_id])}?{urlencode(kept | {'line': line})}"


def chosen_model(request: HttpRequest) -> BaseModel | None:
    models = list_base_models(only_installed=True)
    return models.filter(name=request.GET.get("model", "")).first() or models.first()


def model_options() -> list[tuple[str, str]]:
    return [(model.name, model.display_name) for model in list_base_models(only_installed=True)]


def limit_options(model: BaseModel | None) -> list[tuple[int, str]]:
    """Return the limits to choose from in ascending order, up to the model's context length."""
    longest = model.context_length if model else LIMITS[-1]
    own = {min(model.default_recipe.get("max_length", longest), longest)} if model else set()
    limits = {longest, *own, *(each for each in LIMITS if each < longest)}
    return [(limit, gettext("%(limit)s tokens") % {"limit": f"{limit:,}"}) for limit in sorted(limits)]


def read_address(
    request: HttpRequest, version: DatasetVersion, model: BaseModel | None, count: TokenCount | None
) -> Address:
    view, line = request.GET.get("view", ""), _number(request, "line", 1)
    limits = [limit for limit, _ in limit_options(model)]
    is_text = kind_of(version) is RowKind.TEXT
    longest = count.longest_row_tokens if count else None
    usual = choose_longest_row(model, longest, is_text=is_text)[0] if model else LIMITS[-1]  # as training does
    limit = _number(request, "limit", usual)
    usual_share = round(100 * choose_validation_share(version.rows, is_text=is_text)[0])
    shares = {str(share): share for share, _ in SHARES}
    trains_inputs = request.GET.get("train_on") == TrainOn.ALL and kind_of(version) is RowKind.CHAT
    return Address(
        version=version,
        model=model.name if model else "",
        limit=limit if limit in limits else usual,
        usual_limit=usual,
        share=shares.get(request.GET.get("share", ""), usual_share),
        usual_share=usual_share,
        seed=_number(request, "seed", DEFAULT_SEED),
        first=_number(request, "first", max(1, line - ROWS_BEFORE)),
        line=line,
        view=view if view in dict(VIEWS) else "chat",
        find=request.GET.get("find", "")[:40],
        q=request.GET.get("q", "").strip()[:200],
        against=request.GET.get("against", "")[:80],
        train_on=TrainOn.ALL if trains_inputs else TrainOn.ASSISTANT,
    )


def _number(request: HttpRequest, name: str, default: int) -> int:
    text = request.GET.get(name, "")
    return max(1, int(text)) if text.isascii() and text.isdigit() and len(text) < 10 else default


def seen_newest(request: HttpRequest) -> int | None:
    """Return the number of the newest version when the form was shown, None if the form has none."""
    text = request.POST.get("newest", "")
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else None


def find_compared(address: Address) -> DatasetVersion | None:
    """Return the validation file to compare with, if the address names one. Raises UnknownFile."""
    if not address.against:
        return None
    return queries.get_version(organization=address.version.organization_id, id=address.against)
