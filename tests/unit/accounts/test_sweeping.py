"""Browser tokens do not pile up; API keys are never swept."""

import datetime

import pytest

from apps.accounts.login.browser_tokens import TOKEN_RETENTION, sweep_expired_tokens
from apps.accounts.login.key_operations import MEMBER_TOKEN_LIFETIME, issue_key
from apps.accounts.models import ApiKey
from apps.core.database.clock import db_now
from tests.factories.accounts import make_member_token

MINUTE = datetime.timedelta(minutes=1)


@pytest.mark.django_db
def test_expired_browser_tokens_are_deleted_a_month_later_and_api_keys_never(organization, alice) -> None:
    now = db_now()
    token = make_member_token(organization, alice)
    key = issue_key(
        organization=organization, name="ci", scopes=frozenset({"view"}), by=alice, expires_at=now + MINUTE, now=now
    )
    due = now + MEMBER_TOKEN_LIFETIME + TOKEN_RETENTION

    assert sweep_expired_tokens(now=due - MINUTE) == 0
    assert sweep_expired_tokens(now=due + MINUTE) == 1
    assert not ApiKey.objects.filter(pk=token.key.pk).exists()
    assert ApiKey.objects.filter(pk=key.key.pk).exists()
