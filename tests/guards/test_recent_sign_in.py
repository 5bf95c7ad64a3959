"""What moves money, gives access or deletes wants a recent sign-in: a stolen session alone does none of it."""

import time
from collections.abc import Callable
from typing import Any

import pytest
from django.test import Client
from django.urls import reverse

from apps.accounts.models import Organization, User
from tests.guards.urls import URLS

pytestmark = pytest.mark.django_db
SENSITIVE = (
    "web:key_list",
    "web:billing_topup",
    "web:billing_card",
    "web:billing_portal",
    "web:billing_recharge",
    "web:billing_resume",
    "web:budget_end",
    "web:quota_end",
    "web:dataset_delete",
    "web:dataset_delete_many",
    "web:adapter_delete",
    "web:alias_delete",
    "web:organization_second_factor",
    "web:member_invite",
    "web:member_role",
    "web:member_remove",
    "web:project_archive",
    "web:project_member_set",
    "web:project_member_remove",
    "web:service_account_list",
    "web:service_account_role",
    "web:service_account_remove",
    "web:session_list",
    "staff:adjustment_create",
    "staff:adjustment_decide",
    "staff:credit_request_decline",
    "staff:payment_refund",
    "staff:difference_resolve",
    "staff:price_list",
    "staff:quota_edit",
    "staff:region_home",
    "staff:region_list",
    "staff:organization_view",
    "staff:pool_token",
    "staff:replica_detail",
    "staff:replica_accept",
    "staff:replica_accept_room",
    "staff:price_decide",
    "staff:refund_decide",
)


@pytest.mark.parametrize("name", SENSITIVE)
def test_a_sensitive_act_of_an_old_session_asks_for_the_password(
    name: str,
    alice: User,
    olga: User,
    organization: Organization,
    client_for: Callable[[User], Client],
    settings: Any,
) -> None:
    settings.STRIPE_WEBHOOK_SECRET = "whsec_guard"
    browser = client_for(olga if name.startswith("staff:") else alice)
    session = browser.session
    session["signed_in_at"] = time.time() - settings.ACCOUNT_REAUTHENTICATION_TIMEOUT - 1
    session.pop("account_authentication_methods", None)
    session.save()

    answer = browser.post(reverse(name, kwargs=dict.fromkeys(URLS[name].ids, "x")), URLS[name].data)

    assert (answer.status_code, answer.headers["Location"].split("?")[0]) == (302, reverse("account_reauthenticate"))
