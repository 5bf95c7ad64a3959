"""Requests and tokens per minute: which limits a key is under, and what members, labels and projects used of late."""

import datetime
from dataclasses import dataclass

from apps.accounts.models import Organization, key_of
from apps.accounts.queries import KeyLimits
from apps.billing.usage.labels import LABELLED_KEY_SQL
from apps.core.database.prepared import fetch_prepared
from apps.finetuning.models import AllowanceScope

RATES = ("requests_per_minute", "tokens_per_minute")

_LIMITS_OF_KEY = f"""
    SELECT key.requests_per_minute, key.tokens_per_minute, key.concurrent_requests,
        allowance.id, allowance.member_id, project.name,
        (SELECT name || '=' || value FROM jsonb_each_text(allowance.label) AS pair (name, value)),
        allowance.requests_per_minute, allowance.tokens_per_minute
    FROM accounts_apikey key
    LEFT JOIN finetuning_allowance allowance ON allowance.organization_id = key.organization_id
        AND coalesce(allowance.requests_per_minute, allowance.tokens_per_minute) IS NOT NULL
        AND (allowance.member_id = key.created_by_id OR allowance.project_id = key.project_id OR EXISTS (
            SELECT FROM billing_keylabel label
            WHERE label.organization_id = key.organization_id AND label.key_id = {LABELLED_KEY_SQL}
                AND allowance.label = jsonb_build_object(label.name, label.value)
        ))
    LEFT JOIN accounts_project project ON project.id = allowance.project_id
    WHERE key.id = %(key)s ORDER BY allowance.id
"""  # noqa: S608 - constants
# The requests that a limit would count: all but those that a limit refused.
_RECENT = f"""
    WITH hours AS MATERIALIZED (
        SELECT key_id, hour_at, sum(requests - rate_limited) AS requests, sum(input_tokens + output_tokens) AS tokens
        FROM billing_traffichour WHERE organization_id = %(organization)s AND hour_at >= %(begin)s
        GROUP BY key_id, hour_at
    ), keys AS MATERIALIZED (
        SELECT key.id, key.created_by_id, key.project_id, {LABELLED_KEY_SQL} AS labelled FROM accounts_apikey key
        WHERE key.organization_id = %(organization)s AND key.id IN (SELECT key_id FROM hours)
    ), covered AS (
        SELECT id AS key_id, '{AllowanceScope.MEMBER}' AS scope, created_by_id AS target FROM keys
        UNION ALL
        SELECT id, '{AllowanceScope.PROJECT}', project_id FROM keys
        UNION ALL
        SELECT keys.id, '{AllowanceScope.LABEL}', label.name || '=' || label.value FROM keys
        JOIN billing_keylabel label ON label.organization_id = %(organization)s AND label.key_id = keys.labelled
    ), by_hour AS (
        SELECT scope, target, sum(requests) AS requests, sum(tokens) AS tokens
        FROM covered JOIN hours USING (key_id) GROUP BY scope, target, hour_at
    )
    SELECT scope, target, sum(requests)::bigint, max(requests)::bigint, sum(tokens)::bigint, max(tokens)::bigint
    FROM by_hour GROUP BY scope, target
"""  # noqa: S608 - constants


@dataclass(frozen=True)
class RateAllowance:
    """An allowance of requests or tokens per minute. `whose` begins a sentence and names a member by id."""

    id: str
    whose: str
    requests_per_minute: int | None
    tokens_per_minute: int | None


@dataclass(frozen=True)
class RecentRequests:
    """The requests of a time that no limit refused, their tokens, and the most of each in one hour (UTC)."""

    requests: int = 0
    most_requests_of_hour: int = 0
    tokens: int = 0
    most_tokens_of_hour: int = 0


def limits_of_key(*, key_id: str) -> tuple[KeyLimits, list[RateAllowance]]:
    """Return a key's own limits, and the allowances that its requests count against, in one statement."""
    own, allowances = KeyLimits(), []
    for *limits, allowance_id, member_id, project, label, requests, tokens in fetch_prepared(
        _LIMITS_OF_KEY, {"key": key_id}
    ):
        own = KeyLimits(*limits)
        if allowance_id is not None:
            allowances.append(RateAllowance(allowance_id, _whose(member_id, project, label), requests, tokens))
    return own, allowances


def recent_requests(
    *, organization: Organization | str, begin: datetime.datetime
) -> dict[tuple[AllowanceScope, str], RecentRequests]:
    """Return what the keys of each member, label and project were used for since `begin`."""
    known = {"organization": key_of(organization), "begin": begin}
    return {
        (AllowanceScope(scope), target): RecentRequests(*used)
        for scope, target, *used in fetch_prepared(_RECENT, known)
    }


def _whose(member_id: str | None, project: str | None, label: str | None) -> str:
    if label is not None:
        return f"The label {label}"
    return f"The project {project}" if project is not None else f"The member {member_id}"
