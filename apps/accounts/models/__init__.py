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
    "SavedView",
    "User",
    "WebhookDelivery",
    "WebhookEndpoint",
    "WebhookFormat",
    "default_project_id",
    "key_of",
]
