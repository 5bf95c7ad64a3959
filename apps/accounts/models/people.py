"""People, organizations, and how people belong to them."""

import datetime
from typing import Any, ClassVar, overload

import pgtrigger
from django.contrib.auth.base_user import AbstractBaseUser, BaseUserManager
from django.contrib.postgres.fields import ArrayField
from django.db import models
from django.db.models.functions import Coalesce, Lower, Now
from django.utils.translation import gettext

from apps.accounts.roles import ROLE_CHOICES
from apps.core.database.policies import OWN_ORGANIZATION
from apps.core.database.tenancy import OrganizationModel, OrganizationQuerySet
from apps.core.ids import IdField
from apps.core.messages.key_invalidation import key_news

OWN_USER = "user_id = nullif(current_setting('anneal.user', true), '')"


class UserManager(BaseUserManager["User"]):
    def create_user(self, email: str, password: str | None = None, **fields: object) -> "User":
        """Create a person. The e-mail address is the login and is kept in lower case."""
        user = self.model(email=email.strip().lower(), **fields)
        user.set_password(password)
        user.save(using=self._db)
        return user


class User(AbstractBaseUser):
    """A person. Their permissions depend on their membership in each organization."""

    id = IdField(prefix="user")
    email = models.EmailField(unique=True)
    name = models.CharField(max_length=120, blank=True)
    is_active = models.BooleanField(default=True)
    is_operator = models.BooleanField(default=False, help_text="May open the operator console of this installation.")
    wants_job_mail = models.BooleanField(default=True, db_default=True, help_text="Mail when a job of theirs ends.")
    wants_balance_mail = models.BooleanField(default=True, db_default=True, help_text="Mail when a balance is low.")
    wants_budget_mail = models.BooleanField(default=True, db_default=True, help_text="Mail when a budget is reached.")
    wants_invoice_mail = models.BooleanField(default=True, db_default=True, help_text="Mail when an invoice is issued.")
    time_zone = models.CharField(
        max_length=64, blank=True, db_default="", help_text="IANA name; empty: the zone of the person's browser."
    )
    language = models.CharField(
        max_length=8,
        blank=True,
        db_default="",
        help_text="Of pages and mails; empty: of the browser, and English mails.",
    )
    created_at = models.DateTimeField(db_default=Now())
    service_account_of = models.ForeignKey(
        "Organization",
        on_delete=models.PROTECT,
        null=True,
        related_name="+",
        help_text="The organization whose programs act in this name. It cannot sign in. Null: a person.",
    )

    objects: ClassVar[UserManager] = UserManager()

    USERNAME_FIELD = "email"
    EMAIL_FIELD = "email"
    REQUIRED_FIELDS: ClassVar[list[str]] = []

    tenancy_reason = "a person may belong to several organizations; memberships say which"
    app_access = "write"
    app_kept_columns = ("is_operator",)

    class Meta:
        constraints = [
            models.UniqueConstraint(Lower("email"), name="user_email_case_insensitive"),
            models.CheckConstraint(
                name="service_account_is_no_operator",
                condition=models.Q(service_account_of=None) | models.Q(is_operator=False),
            ),
        ]
        triggers = [key_news("user_key_news", pgtrigger.UpdateOf("is_active"), organization="''")]

    def __str__(self) -> str:
        if self.service_account_of_id:  # in audit logs, it must not pass for a person of that name
            return gettext("%(name)s (service account)") % {"name": self.name}
        return self.name or self.email


class Organization(models.Model):
    """The tenant. It owns datasets, jobs, adapters, keys and money."""

    id = IdField(prefix="org")
    name = models.CharField(max_length=80)
    slug = models.SlugField(max_length=40, unique=True, help_text="Part of the names of its fine-tuned models.")
    created_at = models.DateTimeField(db_default=Now())
    suspended_at = models.DateTimeField(null=True)
    founded_by = models.ForeignKey(User, on_delete=models.PROTECT, null=True, related_name="+")
    has_own_share = models.BooleanField(
        db_default=False,
        help_text="It has paid, or an operator has set its limits. Until then it has one share of queues and limits "
        "together with the others its founder made.",
    )
    requires_second_factor = models.BooleanField(
        default=False, help_text="Its pages open only for members who have shown a second factor."
    )
    regions = ArrayField(
        models.CharField(max_length=40),
        null=True,
        help_text="Names of the regions that its data may be in, set by an operator; null: any.",
    )

    tenancy_reason = "the tenant itself"
    tenant_condition = (
        "id = nullif(current_setting('anneal.organization', true), '') OR id IN (SELECT organization_id FROM "  # noqa: S608 - constants
        f"accounts_membership WHERE {OWN_USER})"
    )
    app_kept_columns = ("has_own_share", "regions")

    class Meta:
        constraints = [
            models.CheckConstraint(
                name="organization_has_a_region",
                condition=models.Q(regions=None) | models.Q(regions__len__gt=0),
            )
        ]
        # Gateways read the limited ones every second.
        indexes = [models.Index(fields=["id"], condition=models.Q(regions__isnull=False), name="organization_limited")]
        triggers = [key_news("organization_key_news", pgtrigger.UpdateOf("suspended_at"), organization="NEW.id")]

    def __str__(self) -> str:
        return self.name

    @property
    def share_holder(self) -> str:
        """The id by which fair shares and limits count: the organization's, or its founder's while it shares."""
        return self.pk if self.has_own_share else self.founded_by_id or self.pk

    # The same in SQL, for a table that is called `organization` in the statement.
    SHARE_HOLDER_SQL = (
        "CASE WHEN organization.has_own_share THEN organization.id"
        " ELSE coalesce(organization.founded_by_id, organization.id) END"
    )

    @classmethod
    def share_holder_by(cls, path: str = "") -> models.Case:
        """Return the SQL of `share_holder`. `path` is the path to the organization, such as "organization__"."""
        own = models.F(f"{path}id")
        return models.Case(
            models.When(**{f"{path}has_own_share": True}, then=own),
            default=Coalesce(models.F(f"{path}founded_by_id"), own),
            output_field=models.CharField(),
        )


@overload
def key_of(organization: Organization | str) -> str: ...
@overload
def key_of(organization: None) -> None: ...
def key_of(organization: Organization | str | None) -> str | None:
    """Return the id of an organization that is given as a row or as its id; None stays None."""
    return organization if organization is None or isinstance(organization, str) else organization.pk


class MembershipQuerySet(OrganizationQuerySet):
    def people(self) -> "MembershipQuerySet":
        return self.filter(user__service_account_of=None)

    def service_accounts(self) -> "MembershipQuerySet":
        return self.exclude(user__service_account_of=None)


class Membership(OrganizationModel):
    """The role of a person, or of a service account, in an organization."""

    id = IdField(prefix="mem")
    user = models.ForeignKey(User, on_delete=models.CASCADE, related_name="memberships")
    role = models.CharField(max_length=16, choices=ROLE_CHOICES)
    created_at = models.DateTimeField(db_default=Now())

    objects: ClassVar[Any] = MembershipQuerySet.as_manager()

    tenant_condition = f"{OWN_ORGANIZATION} OR {OWN_USER}"

    class Meta:
        constraints = [models.UniqueConstraint(fields=["organization", "user"], name="membership_once")]
        triggers = [
            key_news("membership_key_news", pgtrigger.Update | pgtrigger.Delete, organization="OLD.organization_id")
        ]


class SavedView(OrganizationModel):
    """The filters and the order of a list that a member saved under a name. No other member sees it."""

    id = IdField(prefix="view")
    membership = models.ForeignKey(Membership, on_delete=models.CASCADE, related_name="saved_views")
    listing = models.CharField(max_length=40, help_text="The name of the list's address, such as web:job_list.")
    name = models.CharField(max_length=60)
    query = models.CharField(max_length=500, help_text="What follows the question mark in the list's address.")
    created_at = models.DateTimeField(db_default=Now())

    class Meta:
        constraints = [models.UniqueConstraint(fields=["membership", "listing", "name"], name="saved_view_name_once")]


class InvitationQuerySet(OrganizationQuerySet):
    def still_open(self) -> "InvitationQuerySet":
        """Return the invitations neither accepted nor revoked. Some of them may have expired."""
        return self.filter(accepted_at=None, revoked_at=None)


class Invitation(OrganizationModel):
    """A mailed link that makes its reader a member. Only the hash of its token is stored."""

    id = IdField(prefix="inv")
    email = models.EmailField()
    role = models.CharField(max_length=16, choices=ROLE_CHOICES)
    token_sha256 = models.CharField(max_length=64, unique=True)
    invited_by = models.ForeignKey(User, on_delete=models.PROTECT, related_name="+")
    made_with = models.CharField(
        max_length=64, blank=True, db_default="", help_text="The API key that sent it, with which it is revoked."
    )
    created_at = models.DateTimeField(db_default=Now())
    expires_at = models.DateTimeField()
    accepted_at = models.DateTimeField(null=True)
    accepted_by = models.ForeignKey(User, on_delete=models.PROTECT, null=True, related_name="+")
    revoked_at = models.DateTimeField(null=True)
    only_for_address = models.BooleanField(
        default=False, help_text="Only an account that has verified this address may accept it."
    )

    objects: ClassVar[Any] = InvitationQuerySet.as_manager()

    def is_open(self, *, now: datetime.datetime) -> bool:
        return self.accepted_at is None and self.revoked_at is None and self.expires_at > now

    class Meta:
        constraints = [
            models.UniqueConstraint(
                "organization",
                Lower("email"),
                name="invitation_open_once",
                condition=models.Q(accepted_at=None, revoked_at=None),
            ),
            models.CheckConstraint(
                name="invitation_accepted_pair",
                condition=models.Q(accepted_at=None, accepted_by=None)
                | models.Q(accepted_at__isnull=False, accepted_by__isnull=False),
            ),
        ]
