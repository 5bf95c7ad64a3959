"""Judge models among the graders: the allowed models, and the short-lived key that a run's worker calls them with."""

import datetime
from dataclasses import asdict

from django.conf import settings
from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.login.key_operations import issue_member_token
from apps.accounts.models import ApiKey, Organization
from apps.accounts.queries import KeyLimits, find_actor, get_key_limits
from apps.adapters.lifecycle import AdapterVersionStatus
from apps.adapters.queries import get_version_by_name, list_versions
from apps.billing.usage.metering import price_ceiling
from apps.billing.usage.slices import take_limit
from apps.catalog.queries import active_prices, get_base_model, inference_sku, list_base_models
from apps.contracts.evaluation import EvaluationPlan, GraderKind
from apps.contracts.worker_api import JudgeAccess
from apps.core.errors import InvalidValue, NotFound, PermissionDenied, RateLimited
from apps.finetuning.recipes.stored_requests import stored_request
from apps.finetuning.runs.leases import Lease, lock_run

# As long as a worker allows for the parts after training.
KEY_LIFETIME = datetime.timedelta(minutes=30)
_SILENT = (AdapterVersionStatus.REFUSED, AdapterVersionStatus.FILES_ONLY)
_VERSIONS_OFFERED = 100
# What a judge needs, so that a worker which was taken over spends little more: it waits for limits of the gateway, a
# run gets so many keys, and all of them spend together at most so many times the price of all calls.
_MOST_KEYS, _CALLS_AT_ONCE, _TOKENS_A_CALL, _SPENT_AT_MOST = 4, 2, 4_000, 2
_FEWEST_CALLS = 10  # the gateway sets more aside for a call than it costs
_PARAM = "evaluation.grader"


def list_judges(*, organization: Organization | str) -> list[tuple[str, str]]:
    """Return the models that may judge, name and label: the served base models, then the newest versions."""
    bases = [(model.name, model.display_name) for model in list_base_models(only_installed=True)]
    versions = list_versions(organization=organization).exclude(status__in=_SILENT)[:_VERSIONS_OFFERED]
    return [
        *bases,
        *((version.model_name, f"{version.adapter.name}, {version.label}") for version in versions),
    ]


def require_judge(*, organization: Organization | str, plan: EvaluationPlan | None) -> None:
    """Raise InvalidValue if a plan's judge is not a model that the organization can call."""
    if plan is None or plan.grader.kind is not GraderKind.JUDGE:
        return
    name = plan.grader.model
    try:
        if name.startswith("ft:"):
            is_served = get_version_by_name(organization=organization, model_name=name).status not in _SILENT
        else:
            is_served = get_base_model(name=name).is_installed
    except NotFound as missing:
        raise InvalidValue(
            gettext("The judge '%(name)s' does not exist: name a model that is served.") % {"name": name[:60]},
            param=_PARAM,
        ) from missing
    if not is_served:
        raise InvalidValue(
            gettext("The judge '%(name)s' is not served here: name a model that is served.") % {"name": name[:60]},
            param=_PARAM,
        )


@transaction.atomic
def open_judge(*, lease: Lease, now: datetime.datetime) -> JudgeAccess:
    """Return the judge's URL, model and a key for the run's worker, issued in the name of the job's creator.

    Raises StaleLease, NotFound (the plan has no judge, or it was deleted or has no price), PermissionDenied (the
    creator may no longer use inference), and RateLimited above _MOST_KEYS of the run. The key has the limits of the key
    that created the job, if they are lower, and a limit on what it spends: what the run's earlier keys left of theirs.
    """
    run, job = lock_run(lease=lease)
    plan = stored_request(job).evaluation
    if plan is None or plan.grader.kind is not GraderKind.JUDGE:
        raise NotFound(gettext("This run has no judge."))
    creator = find_actor(organization=job.organization_id, actor=job.created_by, now=now)
    if creator is None:
        raise PermissionDenied(
            gettext("The job's creator has left, or the key that created it was revoked or has expired.")
        )
    keys, name = ApiKey.objects.for_organization(job.organization_id), f"Judge of {job.pk}"
    earlier = list(keys.filter(name=name, created_at__gte=run.created_at).order_by("created_at", "pk"))
    if len(earlier) >= _MOST_KEYS:
        raise RateLimited(gettext("This run asked for a judge too often."), retry_after_seconds=3600)
    made_with = keys.filter(pk=job.created_by).first()
    calls = max(2 * plan.max_answers, _FEWEST_CALLS)  # of the base model and of the tuned one
    needed = KeyLimits(
        requests_per_minute=calls, tokens_per_minute=calls * _TOKENS_A_CALL, concurrent_requests=_CALLS_AT_ONCE
    )
    whole_nano = _spend_limit_nano(job.organization_id, plan.grader.model, calls * _TOKENS_A_CALL)
    left_nano = sum(take_limit(organization=job.organization_id, key_id=key.pk) for key in earlier)
    issued = issue_member_token(
        membership=creator,
        now=now,
        name=name,
        lifetime=KEY_LIFETIME,
        project_id=job.project_id,
        limits=_lower(needed, get_key_limits(key_id=made_with.pk)) if made_with else needed,
        spend_limit_nano=left_nano if earlier else whole_nano,
        most=_MOST_KEYS,
        made_with=made_with,
    )
    return JudgeAccess(url=f"{settings.WORKER_GATEWAY_URL}/v1", key=issued.secret, model=plan.grader.model)


def _spend_limit_nano(organization_id: str, model_name: str, tokens: int) -> int:
    """Return _SPENT_AT_MOST times the price of so many of the model's tokens, of the dearer kind.

    Raises NotFound for a model that was deleted or has no price.
    """
    base = (
        get_version_by_name(organization=organization_id, model_name=model_name).adapter.base_model
        if model_name.startswith("ft:")
        else get_base_model(name=model_name)
    )
    skus = [inference_sku(base, direction=direction) for direction in ("input", "output")]
    rules = active_prices(skus=skus, organization=organization_id).values()
    prices = [price_ceiling(quantity=tokens, price_nano=each.price_nano, per=each.per) for each in rules]
    if not prices:
        raise NotFound(gettext("No price is set for the judge's model. Ask the operator of this installation."))
    return _SPENT_AT_MOST * max(prices)


def _lower(needed: KeyLimits, own: KeyLimits) -> KeyLimits:
    """Return the lower of each limit."""
    pairs = {name: (limit, getattr(own, name)) for name, limit in asdict(needed).items()}
    return KeyLimits(**{name: min(each for each in pair if each is not None) for name, pair in pairs.items()})
