"""Anneal's own calls on serving: aliases, an adapter's warmth, and keeping it warm."""

from typing import Annotated, Literal, TypedDict

import msgspec
from django.http.response import HttpResponseBase
from rest_framework.request import Request

from apps.accounts.roles import Permission
from apps.adapters.lifecycle import AdapterVersionStatus
from apps.adapters.models import AdapterVersion
from apps.catalog.models import PriceRule
from apps.core.database.clock import db_now
from apps.core.errors import InvalidState
from apps.finetuning.recipes.checkpoint_names import find_named
from apps.finetuning.results.checkpoint_models import version_named
from apps.interfaces.api.requests.pagination import ListObject, SearchQuery, page, with_words_of
from apps.interfaces.api.views import ApiView
from apps.serving import aliases, operations
from apps.serving import keep_warm as warmth
from apps.serving.models import Alias, Deployment
from apps.serving.queries import ServingState, ServingStatus, serving_states


class AliasRequest(msgspec.Struct, forbid_unknown_fields=True):
    """`name` is a short one, or the whole name of a model that was imported from another service."""

    name: str
    version: str  # the version's own `ft:…` name
    canary_percent: Annotated[
        int,
        msgspec.Meta(
            description="1 to 99: send this share of the alias's requests to the version. 0: move the alias to it, "
            "which also ends a canary."
        ),
    ] = 0
    expected_version: Annotated[
        str | None,
        msgspec.Meta(
            description="Move the alias only if it stands for this version, without a canary; empty: only make one."
        ),
    ] = None


class AliasesQuery(SearchQuery):
    limit: Annotated[int, msgspec.Meta(ge=1, le=100)] = 100
    model: Annotated[str, msgspec.Meta(max_length=240, description="The whole name of an alias.")] | None = None


class AliasObject(TypedDict):
    object: Literal["alias"]
    id: str
    name: str
    model: str
    version: str
    canary_version: str | None
    canary_percent: int
    previous_version: str | None
    moved_at: int


class DeletedAlias(TypedDict):
    id: str
    object: Literal["alias"]
    deleted: Literal[True]


class AliasList(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.ADAPTER_WRITE}
    examples = {"POST": {"name": "production", "version": "ft:anneal-demo:acme:support:01m8", "canary_percent": 10}}

    def get(self, request: Request, query: AliasesQuery) -> ListObject[AliasObject]:
        """List aliases by their whole names, in which `q` searches. `model` gets the one with this whole name."""
        found = aliases.list_aliases(organization=self.organization)
        rows = found.filter(model_name=query.model) if query.model else found
        rows = with_words_of(query, rows, fields=("model_name",))
        return page(query, rows, alias_object, order=("model_name", "id"), places=found)

    def post(self, request: Request, body: AliasRequest) -> AliasObject:
        """Create or move an alias, or send `canary_percent` of its requests to another version.

        A replica must have loaded the version. If none has, the error is `version_not_loaded`, and a replica is asked
        to load it.
        """
        if find_named(self.organization, body.version):
            raise InvalidState("No replica has loaded this checkpoint yet: send it a request first.", param="version")
        alias = aliases.point_alias(
            version=aliases.get_exact_version(organization=self.organization, model_name=body.version, param="version"),
            name=body.name,
            canary_percent=body.canary_percent,
            expected=body.expected_version,
            by=self.actor,
            now=db_now(),
        )
        return alias_object(alias)

    def _respond(self, request: Request) -> HttpResponseBase:
        with aliases.loading_what_is_cold():  # outside the transaction that a refusal rolls back
            return super()._respond(request)


class AliasDetail(ApiView):
    required_scope = {"GET": Permission.VIEW, "DELETE": Permission.ADAPTER_WRITE}

    def get(self, request: Request, alias_id: str) -> AliasObject:
        """Return an alias."""
        return alias_object(aliases.get_alias(organization=self.organization, id=alias_id))

    def delete(self, request: Request, alias_id: str) -> DeletedAlias:
        """Delete the alias. Requests for its name then get 404; its versions stay."""
        alias = aliases.get_alias(organization=self.organization, id=alias_id)
        aliases.delete_alias(alias=alias, by=self.actor)
        return {"id": alias_id, "object": "alias", "deleted": True}


class AliasRollback(ApiView):
    """End a canary, or return to the previous version, at once."""

    required_scope = {"POST": Permission.ADAPTER_WRITE}

    def post(self, request: Request, alias_id: str) -> AliasObject:
        alias = aliases.get_alias(organization=self.organization, id=alias_id)
        return alias_object(aliases.roll_back(alias=alias, by=self.actor, now=db_now()))


class ServingRequest(msgspec.Struct, forbid_unknown_fields=True):
    is_served: bool | None = None
    keep_warm: bool | None = None


class WarmPrice(TypedDict):
    price_nano: int
    per_ms: int


class ServingObject(TypedDict):
    object: Literal["model.serving"]
    model: str
    state: str
    reason: str | None
    is_kept_warm: bool
    warm_price: WarmPrice | None


class ModelServing(ApiView):
    required_scope = {"GET": Permission.VIEW, "POST": Permission.ADAPTER_WRITE}
    examples = {"POST": {"is_served": True}}

    def get(self, request: Request, model: str) -> ServingObject:
        """Return how a model is served.

        `state` is `warm`, `loading`, `cold`, `off`, `failed`, `rejected` or `files_only`.
        """
        if checkpoint := find_named(self.organization, model):
            base_model = checkpoint.job.base_model
            price = warmth.warm_price(base_model=base_model, organization=self.organization)
            return _serving_object(model, _NEVER_ASKED_FOR, price=price, is_kept_warm=False)
        return serving_object(aliases.get_exact_version(organization=self.organization, model_name=model))

    def post(self, request: Request, model: str, body: ServingRequest) -> ServingObject:
        """Start or stop serving a model; keep it warm for a price or by demand."""
        version = version_named(organization=self.organization, model_name=model)
        if body.is_served is True:
            operations.deploy(version=version, by=self.actor)
        if body.is_served is False:
            operations.undeploy(version=version, by=self.actor, now=db_now())
        if body.keep_warm is True:
            warmth.keep_warm(version=version, by=self.actor, now=db_now())
        if body.keep_warm is False:
            warmth.let_cool(version=version, by=self.actor, now=db_now())
        return serving_object(version)


# The engine's states in the API's words; states not listed have the same name.
_STATES = {"loaded": "warm", "waiting": "loading"}


_NEVER_ASKED_FOR = ServingState(ServingStatus.OFF, "A checkpoint answers once a request names it.")


def serving_object(version: AdapterVersion) -> ServingObject:
    deployment = Deployment.objects.filter(adapter_version=version, removed_at=None).first()
    # A whole model's own replica never unloads it, so there is nothing to pay for.
    is_whole = version.status == AdapterVersionStatus.FILES_ONLY
    base_model, owner = version.adapter.base_model, version.organization_id
    return _serving_object(
        version.model_name,
        serving_states(versions=[version])[version.pk],
        price=None if is_whole else warmth.warm_price(base_model=base_model, organization=owner),
        is_kept_warm=deployment is not None and deployment.pinned_at is not None,
    )


def _serving_object(name: str, state: ServingState, *, price: PriceRule | None, is_kept_warm: bool) -> ServingObject:
    return {
        "object": "model.serving",
        "model": name,
        "state": _STATES.get(state.state, state.state),
        "reason": state.reason or None,
        "is_kept_warm": is_kept_warm,
        "warm_price": {"price_nano": price.price_nano, "per_ms": price.per} if price else None,
    }


def alias_object(alias: Alias) -> AliasObject:
    canary, previous = alias.canary_version, alias.previous_version
    return {
        "object": "alias",
        "id": alias.pk,
        "name": alias.name,
        "model": alias.model_name,
        "version": alias.version.model_name,
        "canary_version": canary.model_name if canary else None,
        "canary_percent": alias.canary_percent,
        "previous_version": previous.model_name if previous else None,
        "moved_at": int(alias.moved_at.timestamp()),
    }
