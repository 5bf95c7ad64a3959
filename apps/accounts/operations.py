"""Operations that change organizations and memberships, each audited in its own transaction, and saved views."""

import datetime
import secrets
from collections.abc import Collection

from django.db import IntegrityError, transaction
from django.utils.text import slugify
from django.utils.translation import gettext

from apps.accounts.models import (
    DEFAULT_NAME,
    Membership,
    Organization,
    Project,
    Region,
    SavedView,
    User,
    default_project_id,
)
from apps.accounts.queries import list_regions, list_saved_views
from apps.accounts.roles import Owner
from apps.core import audit
from apps.core.database.tenancy import set_organization
from apps.core.errors import InvalidState, InvalidValue, NotFound, PermissionDenied

_SLUG_LENGTH = 40
_SLUG_ATTEMPTS = 8


# --- Organizations ----------------------------------------------------------------------------------------------------


@transaction.atomic
def create_organization(*, name: str, owner: User, now: datetime.datetime) -> Organization:
    """Create an organization owned by `owner`, and its default project.

    A surrounding `tenant` block acts for it from here on.
    """
    organization = _insert_organization(name=clean_name(name), owner=owner, now=now)
    Membership.objects.create(organization=organization, user=owner, role=Owner.name, created_at=now)
    Project.objects.create(
        id=default_project_id(organization), organization=organization, name=DEFAULT_NAME, created_by=owner.pk,
        created_at=now,
    )  # fmt: skip
    audit.record(
        organization=organization, by=owner.pk, action="organization.create", target=organization.pk, name=name
    )
    return organization


def list_founded(*, user: User) -> list[str]:
    """Return the ids of the organizations a person founded. Run it under `system()`.

    The person stays locked until the transaction ends, so that two requests cannot count the same organizations.
    """
    User.objects.select_for_update().get(pk=user.pk)
    return list(Organization.objects.filter(founded_by=user).values_list("pk", flat=True))


def _insert_organization(*, name: str, owner: User, now: datetime.datetime) -> Organization:
    """Insert the organization under the first free slug.

    Other organizations are invisible here, so the unique index decides.
    """
    for attempt in range(_SLUG_ATTEMPTS):
        base = slugify(name) or "organization"
        suffix = "" if attempt == 0 else f"-{secrets.token_hex(2)}"
        slug = base[: _SLUG_LENGTH - len(suffix)].rstrip("-") + suffix
        organization = Organization(name=name, slug=slug, founded_by=owner, created_at=now)
        set_organization(organization)
        try:
            with transaction.atomic():
                organization.save(force_insert=True)
        except IntegrityError:
            continue
        return organization
    raise InvalidState(gettext("No free address was found for this name. Choose another."), param="name")


@transaction.atomic
def rename_organization(*, organization: Organization, name: str, by: User) -> None:
    """Change the display name. The slug stays, because the names of the organization's models contain it."""
    before, organization.name = organization.name, clean_name(name)
    organization.save(update_fields=["name"])
    audit.record(
        organization=organization,
        by=by.pk,
        action="organization.rename",
        target=organization.pk,
        before=before,
        after=organization.name,
    )


@transaction.atomic
def set_second_factor_policy(*, organization: Organization, is_required: bool, by: User) -> None:
    """Require a second factor of every member, or stop requiring it. The caller makes sure that `by` has one."""
    if organization.requires_second_factor == is_required:
        return
    organization.requires_second_factor = is_required
    organization.save(update_fields=["requires_second_factor"])
    audit.record(
        organization=organization,
        by=by.pk,
        action="organization.second_factor_policy",
        target=organization.pk,
        is_required=is_required,
    )


def clean_name(name: str) -> str:
    cleaned = " ".join(name.split())
    if not cleaned:
        raise InvalidValue(gettext("A name is required."), param="name")
    return cleaned[:80]


# --- Regions ----------------------------------------------------------------------------------------------------------


@transaction.atomic
def create_region(*, name: str, by: str) -> Region:
    """Add a region. Its name cannot change. Raises InvalidValue."""
    name = clean_name(name)[:40]
    if list_regions().filter(name__iexact=name).exists():
        raise InvalidValue(gettext("A region named %(name)s already exists.") % {"name": repr(name)}, param="name")
    region = Region.objects.create(name=name)
    audit.record(organization=None, by=by, action="region.created", target=region.pk)
    return region


@transaction.atomic
def set_home_region(*, region: Region, by: str) -> None:
    """Set the region of the object store, the database and the gateways. Nothing is moved."""
    homes = Region.objects.select_for_update().filter(is_home=True)
    before = homes.get()
    if before == region:
        return
    homes.update(is_home=False)
    Region.objects.filter(pk=region.pk).update(is_home=True)
    audit.record(organization=None, by=by, action="region.home_set", target=region.pk, before=before.pk)


@transaction.atomic
def set_regions(*, organization: Organization, regions: Collection[str], by: str) -> None:
    """Limit the organization to these regions; without any, lift the limit. Raises InvalidValue for an unknown one.

    Claims, routes and placements follow at once. A run elsewhere stores a checkpoint and waits.
    """
    known = set(list_regions().values_list("pk", flat=True))
    if unknown := sorted(set(regions) - known):
        text = gettext("There is no region named %(name)s. Choose from: %(known)s.")
        raise InvalidValue(text % {"name": repr(unknown[0]), "known": ", ".join(sorted(known))}, param="regions")
    before, organization.regions = organization.regions, sorted(set(regions)) or None
    if organization.regions == before:
        return
    organization.save(update_fields=["regions"])
    audit.record_in_each(
        organizations=[None, organization], by=by, action="organization.regions_set", target=organization.pk,
        before=before, after=organization.regions,
    )  # fmt: skip


# --- Saved views of lists ---------------------------------------------------------------------------------------------

MAX_SAVED_VIEWS = 20  # of one list
_MAX_VIEW_NAME, _MAX_VIEW_QUERY = 60, 500  # characters


@transaction.atomic
def save_view(*, membership: Membership, listing: str, name: str, query: str) -> SavedView:
    """Save the search, filters and order of a list under a name. This replaces an existing view of that name.

    Raises InvalidValue, InvalidState.
    """
    name = " ".join(name.split())
    if not 0 < len(name) <= _MAX_VIEW_NAME:
        raise InvalidValue(
            gettext("The name of a view has 1 to %(max_view_name)s characters.") % {"max_view_name": _MAX_VIEW_NAME},
            param="name",
        )
    if not 0 < len(query) <= _MAX_VIEW_QUERY:
        raise InvalidValue(gettext("Search, filter or sort the list first. Then save the view."), param="query")
    Membership.objects.select_for_update().get(pk=membership.pk)  # two requests must not both save the last one
    others = list_saved_views(membership=membership, listing=listing).exclude(name=name)
    if others.count() >= MAX_SAVED_VIEWS:
        raise InvalidState(
            gettext("A list has at most %(max_saved_views)s saved views. Delete one first.")
            % {"max_saved_views": MAX_SAVED_VIEWS}
        )
    view, _ = SavedView.objects.update_or_create(
        organization_id=membership.organization_id,
        membership=membership,
        listing=listing,
        name=name,
        defaults={"query": query},
    )
    return view


def delete_view(*, membership: Membership, view_id: str) -> SavedView:
    """Delete one of the member's own views. Raises NotFound, PermissionDenied."""
    views = SavedView.objects.for_organization(membership.organization_id).filter(pk=view_id)
    view = views.first()
    if view is None:
        raise NotFound(gettext("No such view."))
    if view.membership_id != membership.pk:
        raise PermissionDenied(gettext("Only the member who saved a view can delete it."))
    views.delete()
    return view
