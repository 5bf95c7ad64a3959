"""Service accounts: names in which programs act, whose API keys stay when the person who created them leaves.

A service account is a member that cannot sign in: it has an address that receives no mail, and no password.
Those who manage members manage the accounts whose role has no more permissions than their own.
"""

import datetime
from collections import Counter

from django.db import transaction
from django.utils.translation import gettext

from apps.accounts.members.memberships import known_role, lock_members, require_grantable
from apps.accounts.models import ApiKey, KeyKind, Membership, Organization, User
from apps.accounts.notices.events import announce
from apps.accounts.notices.notifications import MANAGERS
from apps.accounts.queries import KeyIdentity, MemberKind, get_membership, list_service_accounts
from apps.accounts.roles import Permission
from apps.core import audit
from apps.core.errors import InvalidState, InvalidValue, PermissionDenied, RateLimited

MAX_SERVICE_ACCOUNTS = 100  # of an organization
_NAME_LENGTH = 80
_DOMAIN = "service-account.invalid"  # RFC 2606: no mail can reach it
_NEEDED = frozenset({Permission.MEMBER_MANAGE.value, Permission.KEY_MANAGE.value})


@transaction.atomic
def create_service_account(
    *,
    organization: Organization,
    name: str,
    role: str,
    by: User,
    now: datetime.datetime,
    identity: KeyIdentity | None = None,
) -> Membership:
    """Create a service account with a role that `by` and `identity`, the calling key, may give.

    Raises PermissionDenied, InvalidValue, InvalidState for a name in use or above MAX_SERVICE_ACCOUNTS, RateLimited.
    """
    acting = lock_members(organization, by)
    require_grantable(acting, known_role(role), identity=identity)
    name = _free_name(organization, name)
    if list_service_accounts(organization=organization).count() >= MAX_SERVICE_ACCOUNTS:
        raise InvalidState(
            gettext("An organization has at most %(max_service_accounts)s service accounts. Remove one first.")
            % {"max_service_accounts": MAX_SERVICE_ACCOUNTS}
        )
    today = User.objects.filter(service_account_of=organization, created_at__gt=now - datetime.timedelta(days=1))
    if today.count() >= MAX_SERVICE_ACCOUNTS:  # rows of removed ones stay, for the audit log
        text = gettext(
            "An organization can create at most %(max_service_accounts)s service accounts a day. Try again tomorrow."
        ) % {"max_service_accounts": MAX_SERVICE_ACCOUNTS}
        raise RateLimited(text, retry_after_seconds=3600)
    user = User(name=name, service_account_of=organization, created_at=now)
    user.email = f"{user.pk}@{_DOMAIN}"
    user.wants_job_mail = user.wants_balance_mail = user.wants_budget_mail = user.wants_invoice_mail = False
    user.set_unusable_password()
    user.save(force_insert=True)
    account = Membership.objects.create(organization=organization, user=user, role=role, created_at=now)
    audit.record(
        organization=organization, by=by.pk, action="service_account.create", target=user.pk, name=name, role=role
    )
    announce(
        organization=organization,
        type="service_account.created",
        subject=user.pk,
        title=lambda: f"{by} created the service account {name} as {role}",
        path="/service-accounts",
        key=f"service-account:{user.pk}",
        roles=MANAGERS,
    )
    return account


@transaction.atomic
def rename_service_account(
    *, organization: Organization, id: str, name: str, by: User, identity: KeyIdentity | None = None
) -> Membership:
    """Give a service account another name. Raises NotFound, PermissionDenied, InvalidValue, InvalidState."""
    account = lock_service_account(organization=organization, id=id, by=by, identity=identity, needed=frozenset())
    before, account.user.name = account.user.name, _free_name(organization, name, but=account)
    account.user.save(update_fields=["name"])
    audit.record(
        organization=organization, by=by.pk, action="service_account.rename", target=account.user_id,
        before=before, after=account.user.name,
    )  # fmt: skip
    return account


def lock_service_account(
    *,
    organization: Organization,
    id: str,
    by: User,
    identity: KeyIdentity | None,
    needed: frozenset[str] = _NEEDED,
) -> Membership:
    """Lock the members and return a service account for which `by` and the calling key may act.

    A key of the account may do everything that the account may. So both need each permission of its role, and the
    calling key also needs the scopes in `needed`. Raises NotFound, PermissionDenied.
    """
    acting = lock_members(organization, by)
    account = get_membership(organization=organization, id=id, kind=MemberKind.SERVICE_ACCOUNT)
    require_grantable(acting, account.role, identity=identity)
    if identity and (missing := sorted(needed - identity.scopes)):
        raise PermissionDenied(
            gettext("This API key lacks %(missing)s, so it cannot make keys of service accounts.")
            % {"missing": ", ".join(missing)}
        )
    return account


def count_active_keys(*, organization: Organization, now: datetime.datetime) -> Counter[str]:
    """Return the number of working API keys of each service account, by the id of its user."""
    keys = ApiKey.objects.for_organization(organization).usable(now=now).filter(kind=KeyKind.SECRET)
    creators = keys.exclude(created_by__service_account_of=None).values_list("created_by_id", flat=True)
    return Counter(creators)


def _free_name(organization: Organization, name: str, *, but: Membership | None = None) -> str:
    name = " ".join(name.split())
    if not 0 < len(name) <= _NAME_LENGTH:
        raise InvalidValue(
            gettext("The name of a service account has 1 to %(name_length)s characters.")
            % {"name_length": _NAME_LENGTH},
            param="name",
        )
    same = list_service_accounts(organization=organization).filter(user__name__iexact=name)
    if same.exclude(pk=but.pk if but else "").exists():
        raise InvalidState(
            gettext("A service account named %(name)s already exists. Choose another name.") % {"name": name},
            param="name",
        )
    return name
