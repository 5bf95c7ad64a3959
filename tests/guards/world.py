"""Two tenants with one object of each kind, for the guards that try one's ids on the other.

A feature adds one line to MAKERS (objects of a tenant) or SHARED (objects of the installation).
"""

from collections.abc import Callable

from apps.accounts.members.invitations import invitation_token
from apps.accounts.models import ProjectMember
from apps.accounts.roles import ROLES
from apps.adapters.models import AdapterVersion
from apps.finetuning.models import Checkpoint
from apps.finetuning.recipes.checkpoint_names import name_of
from apps.payments.models import ReconciliationDifference
from tests.factories.accounts import make_key, make_member, make_organization, make_user
from tests.factories.catalog import make_base_model, make_hub_lookup, make_listed_model
from tests.factories.datasets import make_ready_version, make_upload, make_version
from tests.factories.finetuning import give_credit, make_job, make_pool, make_worker
from tests.factories.serving import make_replica
from tests.guards.makers import models, money, people, requests, retraining
from tests.guards.makers.tenants import Installation, Tenant, World

Maker = Callable[[Tenant], str]


# kind of object -> makes one of a tenant and returns what stands in an address or a body; in this order, so that a
# later one may use `tenant.ids` of an earlier one.
MAKERS: dict[str, Maker] = {
    "organization": lambda tenant: tenant.organization.pk,
    "membership": people.membership,
    "service_account": people.service_account,
    "project": people.project,
    "project_member": lambda tenant: ProjectMember.objects.get(project=tenant.ids["project"]).pk,
    "invitation": people.invitation,
    "invitation_token": lambda tenant: invitation_token(tenant.ids["invitation"]),
    "saved_view": people.saved_view,
    "key": people.key,
    "dataset_version": lambda tenant: (
        make_ready_version(tenant.organization, filename=f"{tenant.canary}.jsonl", dataset_name=tenant.canary).pk
    ),
    "dataset": lambda tenant: make_version(tenant.organization, filename=f"{tenant.canary}-2.jsonl").dataset_id,
    "upload": lambda tenant: make_upload(tenant.organization, filename=f"{tenant.canary}.jsonl").pk,
    "upload_part": requests.upload_part,
    "job": lambda tenant: make_job(tenant.organization, tenant.installation.base_model, suffix=tenant.canary).pk,
    "checkpoint": models.checkpoint,
    "batch_file": requests.batch_file,
    "batch": requests.batch,
    "completion": requests.completion,
    "eval": requests.eval_,
    "eval_run": requests.eval_run,
    "output_item": requests.output_item,
    "checkpoint_name": lambda tenant: name_of(Checkpoint.objects.get(pk=tenant.ids["checkpoint"])),
    "adapter_version": lambda tenant: models.adapter_version(tenant).pk,
    "adapter": lambda tenant: AdapterVersion.objects.get(pk=tenant.ids["adapter_version"]).adapter_id,
    "model_name": lambda tenant: AdapterVersion.objects.get(pk=tenant.ids["adapter_version"]).model_name,
    "model_file": models.model_file,
    "conversion": models.conversion,
    "hub_push": models.hub_push,
    "deployment": models.deployment,
    "alias": models.alias,
    "retraining_plan": retraining.retraining_plan,
    "conversation": requests.conversation,
    "preset": requests.preset,
    "licence_acceptance": people.licence_acceptance,
    "tracker_key": models.tracker_key,
    "topup": money.topup,
    "hosted_page": money.hosted_page,
    "budget": money.budget,
    "allowance": money.allowance,
    "invoice": money.invoice,
    "invoice_line": money.invoice_line,
    "adjustment": money.adjustment,
    "credit_request": money.credit_request,
    "card_refund": money.card_refund,
    "price_request": money.price_request,
    "notification": people.notification,
    "webhook": people.webhook,
    "webhook_delivery": people.webhook_delivery,
}

# kind of object -> the id of one that belongs to no tenant
SHARED: dict[str, Callable[[Installation], str]] = {
    "base_model": lambda installation: installation.base_model.pk,
    "base_model_name": lambda installation: installation.base_model.name,
    "listed_model_name": lambda installation: installation.listed_model.name,
    "number": lambda installation: "1",
    "help_slug": lambda installation: "training",
    "tracker_kind": lambda installation: "wandb",
    "pool": lambda installation: installation.pool.pk,
    "region": lambda installation: installation.pool.region_id,
    "worker": lambda installation: installation.worker.pk,
    "replica": lambda installation: make_replica(installation.base_model, "unix:///nowhere").pk,
    "hub_lookup": lambda installation: make_hub_lookup(installation.base_model).pk,
    "difference": lambda _: (
        ReconciliationDifference.objects.get_or_create(source_id="pi_1", ours_cents=1, theirs_cents=2)[0].pk
    ),
}


def build_world() -> World:
    base_model = make_base_model()
    pool = make_pool()
    listed = make_listed_model("llama-3.1-8b", licence="Llama 3.1 Community License")
    installation = Installation(base_model, listed, pool, make_worker(pool, base_model=base_model))
    return World(
        installation=installation,
        acme=make_full_tenant("Acme", "canary-acme", installation),
        rival=make_full_tenant("Rival", "canary-rival", installation),
        operator=make_user("operator", is_operator=True),
        loner=make_user("loner"),
    )


def make_full_tenant(name: str, canary: str, installation: Installation) -> Tenant:
    """Return a new organization with one object of each kind."""
    owner = make_user(f"{canary}-owner")
    organization = make_organization(name, owner=owner)
    people = {role: make_member(organization, role) for role in ROLES if role != "owner"} | {"owner": owner}
    tenant = Tenant(organization, people, installation, canary, make_key(organization, owner).secret)
    give_credit(organization)
    for kind, make in MAKERS.items():
        tenant.ids[kind] = make(tenant)
    return tenant
