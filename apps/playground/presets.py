"""Presets: settings of the playground under a name, a member's own or the organization's."""

import datetime

from django.db import transaction
from django.db.models import Q, QuerySet
from django.utils.translation import gettext

from apps.accounts.models import Membership
from apps.accounts.queries import require_home
from apps.accounts.roles import Permission, has_permission
from apps.core.database.locks import lock
from apps.core.errors import InvalidState, InvalidValue, NotFound, PermissionDenied
from apps.playground.conversations import require_storable
from apps.playground.models import Preset
from apps.playground.transcripts import PlaySettings

MAX_PRESETS = 50  # of each member, and shared ones of the organization


def list_presets(*, membership: Membership) -> QuerySet[Preset]:
    """Return the organization's shared presets and the member's own without their settings, by name."""
    rows = Preset.objects.for_organization(membership.organization_id)
    return rows.filter(Q(membership=None) | Q(membership=membership)).defer("settings").order_by("name", "id")


def get_preset(*, membership: Membership, id: str) -> Preset:
    """Return a preset that the member may use. Raises NotFound, the same for unknown and other people's ids."""
    found = list_presets(membership=membership).defer(None).filter(pk=id).first()
    if found is None:
        raise NotFound(gettext("There is no such preset. It may have been deleted."), param="preset")
    return found


@transaction.atomic
def save_preset(
    *, membership: Membership, name: str, is_shared: bool, settings: PlaySettings, now: datetime.datetime
) -> Preset:
    """Store the settings under the name, in place of an equally shared preset that has it.

    Raises InvalidValue, InvalidState, TooLongToKeep, RegionRefused if nothing of the organization may be stored here,
    and PermissionDenied if that preset is another member's.
    """
    require_home(organization=membership.organization_id)
    require_storable(settings)
    if not 1 <= len(name) <= 60 or not name.isprintable():
        raise InvalidValue(gettext("A preset's name has 1 to 60 characters. Choose another one."), param="name")
    lock(f"presets:{membership.organization_id}")
    owner = None if is_shared else membership
    rows = list_presets(membership=membership).filter(membership=owner)
    preset = rows.filter(name=name).first()
    if preset is None and rows.count() >= MAX_PRESETS:
        whose = gettext("Your organization shares") if is_shared else gettext("You have")
        raise InvalidState(
            gettext("%(whose)s %(max_presets)s presets, and no more are kept. Delete one first.")
            % {"whose": whose, "max_presets": MAX_PRESETS},
            param="name",
        )
    if preset is None:
        author = membership.user_id
        preset = Preset(organization_id=membership.organization_id, membership=owner, name=name, created_by=author)
    elif not may_change(preset, by=membership):
        raise PermissionDenied(
            gettext("Another member shares a preset with this name. Choose another name."), param="name"
        )
    preset.settings, preset.updated_at = settings, now
    preset.save()
    return preset


def delete_preset(*, membership: Membership, id: str) -> None:
    """Delete one of the member's presets, or a shared one that they may change. Raises NotFound, PermissionDenied."""
    preset = get_preset(membership=membership, id=id)
    if not may_change(preset, by=membership):
        raise PermissionDenied(gettext("Only the member who shared a preset, an admin or an owner can delete it."))
    preset.delete()


def may_change(preset: Preset, *, by: Membership) -> bool:
    """Return whether the member may replace or delete a preset: their own ones, and as admin or owner shared ones."""
    return preset.created_by == by.user_id or has_permission(by.role, Permission.MEMBER_MANAGE)
