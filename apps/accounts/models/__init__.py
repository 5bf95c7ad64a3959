"""Models of accounts, by subject."""

from apps.accounts.models.keys import ApiKey, KeyKind
from apps.accounts.models.notices import (
    DeliveryStatus,
    EndpointStatus,
    Notification,
    NotificationKind,
    OrganizationEvent,
    WebhookDelivery,
    WebhookEndpoint,
    WebhookFormat,
)
from apps.accounts.models.people import Invitation, Membership, Organization, SavedView, User, key_of
from apps.accounts.models.projects import DEFAULT_NAME, Project, ProjectMember, ProjectRole, default_project_id
from apps.accounts.models.regions import Region, allowed_in, home_region, is_allowed

__all__ = [
    "DEFAULT_NAME",
    "ApiKey",
    "DeliveryStatus",
    "EndpointStatus",
    "Invitation",
    "KeyKind",
    "Membership",
    "Notification",
    "NotificationKind",
    "Organization",
    "OrganizationEvent",
    "Project",
    "ProjectMember",
    "ProjectRole",
    "Region",
    "SavedView",
    "User",
    "WebhookDelivery",
    "WebhookEndpoint",
    "WebhookFormat",
    "allowed_in",
    "default_project_id",
    "home_region",
    "is_allowed",
    "key_of",
]
