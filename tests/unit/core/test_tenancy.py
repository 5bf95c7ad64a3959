"""Entering and leaving a tenant: nothing of it outlives its block, however the block ends."""

import pytest
from django.db import connection, transaction

from apps.accounts.login.key_operations import IssuedKey
from apps.accounts.models import ApiKey, Organization, User
from apps.core.database.tenancy import set_organization, system, tenant

pytestmark = pytest.mark.django_db


def identity() -> tuple[str, str, str]:
    with connection.cursor() as cursor:
        cursor.execute(
            "SELECT current_user::text, coalesce(current_setting('anneal.organization', true), ''),"
            " coalesce(current_setting('anneal.user', true), '')"
        )
        return cursor.fetchone()


def test_a_block_acts_for_its_organization_and_person(organization: Organization, alice: User) -> None:
    before = identity()

    with tenant(organization=organization, user=alice):
        inside = identity()

    assert inside == ("anneal_app", organization.pk, alice.pk)
    assert identity() == before


def test_a_block_inside_a_block_gives_the_outer_one_back(organization: Organization, rival: Organization) -> None:
    with tenant(organization=organization):
        with tenant(organization=rival):
            assert identity()[1] == rival.pk
        assert identity()[:2] == ("anneal_app", organization.pk)
        with system():
            assert identity()[0] == "anneal_sys"
        assert identity()[:2] == ("anneal_app", organization.pk)


def test_an_exception_gives_the_outer_one_back(organization: Organization, rival: Organization) -> None:
    with tenant(organization=organization):
        with pytest.raises(RuntimeError), tenant(organization=rival):
            raise RuntimeError
        assert identity()[:2] == ("anneal_app", organization.pk)


def test_the_organization_may_be_chosen_inside_the_block(organization: Organization, key: IssuedKey) -> None:
    with tenant():
        assert not ApiKey.objects.exists()
        set_organization(organization)
        assert ApiKey.objects.get() == key.key


@pytest.mark.django_db(transaction=True)
@pytest.mark.parametrize("ends", ["commit", "rollback"])
def test_the_next_user_of_the_connection_inherits_nothing(ends: str) -> None:
    login = identity()[0]

    try:
        with tenant(organization="org_1", user="user_1"):
            assert identity() == ("anneal_app", "org_1", "user_1")
            if ends == "rollback":
                raise RuntimeError
    except RuntimeError:
        pass

    assert identity() == (login, "", "")


@pytest.mark.django_db(transaction=True)
def test_a_choice_outside_of_a_transaction_does_not_stick() -> None:
    set_organization("org_1")

    assert identity()[1] == ""


def test_a_savepoint_that_fails_keeps_the_tenant(organization: Organization) -> None:
    with tenant(organization=organization):
        with pytest.raises(RuntimeError), transaction.atomic():
            raise RuntimeError
        assert identity()[1] == organization.pk
