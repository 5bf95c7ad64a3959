"""Members, keys, projects, views, notices and webhooks of a tenant."""

from apps.accounts.members.invitations import invite_member
from apps.accounts.members.projects import create_project
from apps.accounts.models import Membership, Notification, OrganizationEvent, WebhookDelivery, WebhookEndpoint
from apps.accounts.notices.deliveries import queue_delivery
from apps.accounts.notices.endpoints import create_endpoint
from apps.accounts.notices.events import announce
from apps.accounts.operations import save_view
from apps.catalog.licences import accept_licence
from apps.core.database.clock import db_now
from tests.factories.accounts import make_key, make_member, make_service_account
from tests.guards.makers.tenants import Tenant


def membership(tenant: Tenant) -> str:
    return Membership.objects.get(user=make_member(tenant.organization, "viewer", tenant.canary)).pk


def service_account(tenant: Tenant) -> str:
    return make_service_account(tenant.organization, tenant.owner, role="viewer", name=tenant.canary).pk


def project(tenant: Tenant) -> str:
    """An open project of which the owner is a member."""
    return create_project(
        organization=tenant.organization, name=tenant.canary, is_private=False, by=tenant.owner, now=db_now()
    ).pk


def invitation(tenant: Tenant) -> str:
    email = f"{tenant.canary}@example.com"
    return invite_member(organization=tenant.organization, email=email, role="viewer", by=tenant.owner, now=db_now()).pk


def saved_view(tenant: Tenant) -> str:
    """A view of the owner."""
    membership = Membership.objects.get(organization=tenant.organization, user=tenant.owner)
    return save_view(membership=membership, listing="web:job_list", name=tenant.canary, query="status=failed").pk


def key(tenant: Tenant) -> str:
    key = make_key(tenant.organization, tenant.owner).key
    key.name = tenant.canary
    key.save(update_fields=["name"])
    return key.pk


def licence_acceptance(tenant: Tenant) -> str:
    model = tenant.installation.listed_model
    now = db_now()
    return accept_licence(
        organization=tenant.organization, base_model=model, licence=model.licence, by=tenant.canary, now=now
    ).pk


def notification(tenant: Tenant) -> str:
    announce(
        organization=tenant.organization, type="fine_tuning.job.failed", subject="ftjob-1",
        title=lambda: tenant.canary, path="/jobs", key="canary", users=[tenant.owner.pk],
    )  # fmt: skip
    return Notification.objects.get(organization=tenant.organization, key="canary").pk


def webhook(tenant: Tenant) -> str:
    endpoint, _ = create_endpoint(
        organization=tenant.organization, url=f"https://hooks.example.com/{tenant.canary}",
        event_types=["fine_tuning.job.failed"], format="standard", by=tenant.owner.pk,
    )  # fmt: skip
    return endpoint.pk


def webhook_delivery(tenant: Tenant) -> str:
    endpoint = WebhookEndpoint.objects.get(pk=tenant.ids["webhook"])
    delivery = queue_delivery(
        endpoint=endpoint, event=OrganizationEvent.objects.filter(organization=tenant.organization)[0]
    )
    WebhookDelivery.objects.filter(pk=delivery.pk).update(status="failed", response_text=tenant.canary)
    return delivery.pk
