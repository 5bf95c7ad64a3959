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

__all__ = [
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
    "SavedView",
    "User",
    "WebhookDelivery",
    "WebhookEndpoint",
    "WebhookFormat",
    "key_of",
]
