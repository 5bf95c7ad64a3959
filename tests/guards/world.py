"""Two tenants with one object of each kind, for the guards that try one's ids on the other.

A feature adds one line to MAKERS (objects of a tenant) or SHARED (objects of the installation).
"""

from collections.abc import Callable

import msgspec

from apps.accounts.members.invitations import invitation_token, invite_member
from apps.accounts.members.projects import create_project
from apps.accounts.models import (
    Membership,
    Notification,
    OrganizationEvent,
    ProjectMember,
    WebhookDelivery,
    WebhookEndpoint,
)
from apps.accounts.notices.deliveries import queue_delivery
from apps.accounts.notices.endpoints import create_endpoint
from apps.accounts.notices.events import announce
from apps.accounts.operations import save_view
from apps.accounts.roles import ROLES
from apps.adapters.models import Adapter, AdapterVersion
from apps.batches.completions.records import CompletionRecord, record_completions
from apps.batches.models import BatchFile, BatchRequest
from apps.batches.operations import create_batch
from apps.catalog.licences import accept_licence
from apps.contracts.evaluation.graders import StringCheckGrader
from apps.core.database.clock import db_now
from apps.core.ids import new_id, ulid_of
from apps.datasets.models import Upload, UploadPart
from apps.finetuning.models import (
    Checkpoint,
    Conversion,
    FineTuningJob,
    HubPush,
    HubPushToken,
)
from apps.finetuning.recipes.checkpoint_names import name_of
from apps.finetuning.results.model_cards import CARD_FILE
from apps.finetuning.runs.trackers import store_tracker_key
from apps.payments.models import ReconciliationDifference
from apps.playground.conversations import keep_conversation
from apps.playground.presets import save_preset
from apps.playground.transcripts import PlaySettings, PlayTurn, Transcript
from apps.serving.evals.models import EvalItem, EvalRun
from apps.serving.evals.operations import create_eval
from apps.serving.models import Alias
from apps.serving.operations import deploy
from tests.factories.accounts import make_key, make_member, make_organization, make_service_account, make_user
from tests.factories.catalog import make_base_model, make_hub_lookup, make_listed_model
from tests.factories.datasets import make_ready_version, make_upload, make_version
from tests.factories.finetuning import give_credit, make_job, make_pool, make_worker
from tests.factories.serving import make_replica
from tests.guards.makers import checkpoints, money, retraining
from tests.guards.makers.tenants import Installation, Tenant, World

Maker = Callable[[Tenant], str]


def _membership(tenant: Tenant) -> str:
    return Membership.objects.get(user=make_member(tenant.organization, "viewer", tenant.canary)).pk


def _service_account(tenant: Tenant) -> str:
    return make_service_account(tenant.organization, tenant.owner, role="viewer", name=tenant.canary).pk


def _project(tenant: Tenant) -> str:
    """An open project of which the owner is a member."""
    return create_project(
        organization=tenant.organization, name=tenant.canary, is_private=False, by=tenant.owner, now=db_now()
    ).pk


def _invitation(tenant: Tenant) -> str:
    email = f"{tenant.canary}@example.com"
    return invite_member(organization=tenant.organization, email=email, role="viewer", by=tenant.owner, now=db_now()).pk


def _saved_view(tenant: Tenant) -> str:
    """A view of the owner."""
    membership = Membership.objects.get(organization=tenant.organization, user=tenant.owner)
    return save_view(membership=membership, listing="web:job_list", name=tenant.canary, query="status=failed").pk


def _key(tenant: Tenant) -> str:
    key = make_key(tenant.organization, tenant.owner).key
    key.name = tenant.canary
    key.save(update_fields=["name"])
    return key.pk


def _adapter_version(tenant: Tenant) -> AdapterVersion:
    adapter = Adapter.objects.create(
        organization=tenant.organization, name=tenant.canary, base_model=tenant.installation.base_model
    )
    identifier = new_id("adpv")
    return AdapterVersion.objects.create(
        id=identifier,
        organization=tenant.organization,
        adapter=adapter,
        number=1,
        model_name=f"ft:{tenant.installation.base_model.name}:{tenant.organization.slug}:s:{ulid_of(identifier)}",
        lora_name=new_id("a", "-"),
        source=tenant.ids["job"],
        object_prefix=f"org/{tenant.organization.pk}/adapters/{identifier}",
        manifest={"files": []},
        manifest_sha256="0" * 64,
        bytes=0,
        rank=16,
        target_modules=["q_proj"],
        method="lora",
        chat_template_sha256="0" * 64,
        metrics={"step": 40},
    )


def _model_file(tenant: Tenant) -> str:
    """The card of the version, which the job made."""
    FineTuningJob.objects.filter(pk=tenant.ids["job"]).update(adapter_version_id=tenant.ids["adapter_version"])
    return CARD_FILE


def _upload_part(tenant: Tenant) -> str:
    upload = Upload.objects.get(pk=tenant.ids["upload"])
    return UploadPart.objects.create(organization=tenant.organization, upload=upload, bytes=1).pk


def _batch_file(tenant: Tenant) -> str:
    made = {"purpose": "batch", "filename": f"{tenant.canary}.jsonl", "object_key": "nowhere", "bytes": 1}
    return BatchFile.objects.create(organization=tenant.organization, created_by=tenant.owner.pk, **made).pk


def _batch(tenant: Tenant) -> str:
    batch = create_batch(
        organization=tenant.organization,
        input_file_id=tenant.ids["batch_file"],
        endpoint="/v1/completions",
        by=tenant.owner.pk,
        now=db_now(),
    )
    BatchRequest.objects.create(
        organization=tenant.organization, batch=batch, line=1, custom_id=tenant.canary, offset=0, bytes=1
    )
    return batch.pk


def _completion(tenant: Tenant) -> str:
    completion_id = new_id("chatcmpl", "-")
    request = {"messages": [{"role": "user", "content": tenant.canary}]}
    record = CompletionRecord(
        id=completion_id,
        organization_id=tenant.organization.pk,
        key_id=tenant.ids["key"],
        request_id="req_1",
        model_name=tenant.installation.base_model.name,
        created=1_800_000_000,
        metadata={"tenant": tenant.canary},
        request=msgspec.Raw(msgspec.json.encode(request)),
        answer=msgspec.Raw(b'{"choices": [], "usage": {}}'),
    )
    record_completions(records=[record])
    return completion_id


def _eval(tenant: Tenant) -> str:
    return create_eval(
        organization=tenant.organization,
        name=tenant.canary,
        data_source_config={"type": "logs", "metadata": {}},
        criteria=[StringCheckGrader(name="exact", input=tenant.canary, reference="x", operation="eq")],
        metadata={},
        by=tenant.owner.pk,
    ).pk


def _eval_run(tenant: Tenant) -> str:
    run = EvalRun(
        organization=tenant.organization, evaluated_id=tenant.ids["eval"], name=tenant.canary, created_by="system",
        data_source={"type": "completions", "source": {"type": "stored_completions"}}, testing_criteria=[],
    )  # fmt: skip
    run.save(force_insert=True)
    return run.pk


def _output_item(tenant: Tenant) -> str:
    source = msgspec.json.encode({"item": {"text": tenant.canary}}).decode()
    return EvalItem.objects.create(
        organization=tenant.organization, run_id=tenant.ids["eval_run"], number=0, source=source, status="pass", bytes=1
    ).pk


def _deployment(tenant: Tenant) -> str:
    version = AdapterVersion.objects.get(pk=tenant.ids["adapter_version"])
    return str(deploy(version=version, by="system").pk)


def _alias(tenant: Tenant) -> str:
    version = AdapterVersion.objects.get(pk=tenant.ids["adapter_version"])
    return Alias.objects.create(
        organization=tenant.organization,
        adapter=version.adapter,
        name="staging",
        model_name=f"{version.model_name.rsplit(':', 1)[0]}:{tenant.canary}",
        version=version,
        canary_version=version,
        canary_percent=5,
    ).pk


def _conversation(tenant: Tenant) -> str:
    transcript = Transcript(columns=[[PlayTurn(role="user", content=tenant.canary)]])
    return keep_conversation(membership=_owner_of(tenant), transcript=transcript, now=db_now()).pk


def _preset(tenant: Tenant) -> str:
    settings = PlaySettings(system=tenant.canary)
    return save_preset(
        membership=_owner_of(tenant), name=tenant.canary, is_shared=True, settings=settings, now=db_now()
    ).pk


def _owner_of(tenant: Tenant) -> Membership:
    return Membership.objects.get(organization=tenant.organization, user=tenant.owner)


def _licence_acceptance(tenant: Tenant) -> str:
    model = tenant.installation.listed_model
    now = db_now()
    return accept_licence(
        organization=tenant.organization, base_model=model, licence=model.licence, by=tenant.canary, now=now
    ).pk


def _tracker_key(tenant: Tenant) -> str:
    return store_tracker_key(
        organization=tenant.organization, kind="wandb", secret=f"key-{tenant.canary}", url="", by="system", now=db_now()
    ).pk


def _notification(tenant: Tenant) -> str:
    announce(
        organization=tenant.organization, type="fine_tuning.job.failed", subject="ftjob-1",
        title=lambda: tenant.canary, path="/jobs", key="canary", users=[tenant.owner.pk],
    )  # fmt: skip
    return Notification.objects.get(organization=tenant.organization, key="canary").pk


def _webhook(tenant: Tenant) -> str:
    endpoint, _ = create_endpoint(
        organization=tenant.organization, url=f"https://hooks.example.com/{tenant.canary}",
        event_types=["fine_tuning.job.failed"], format="standard", by=tenant.owner.pk,
    )  # fmt: skip
    return endpoint.pk


def _conversion(tenant: Tenant) -> str:
    return Conversion.objects.create(
        organization=tenant.organization, version_id=tenant.ids["adapter_version"], kind="gguf", bytes=1, price_nano=0,
        created_by=tenant.canary, created_at=db_now(),
    ).pk  # fmt: skip


def _hub_push(tenant: Tenant) -> str:
    push = HubPush.objects.create(
        organization=tenant.organization, version_id=tenant.ids["adapter_version"], created_by="system",
        repository=f"{tenant.canary}/model", created_at=db_now(),
    )  # fmt: skip
    HubPushToken.objects.create(push=push, token_sealed=b"sealed")
    return push.pk


def _webhook_delivery(tenant: Tenant) -> str:
    endpoint = WebhookEndpoint.objects.get(pk=tenant.ids["webhook"])
    delivery = queue_delivery(
        endpoint=endpoint, event=OrganizationEvent.objects.filter(organization=tenant.organization)[0]
    )
    WebhookDelivery.objects.filter(pk=delivery.pk).update(status="failed", response_text=tenant.canary)
    return delivery.pk


# kind of object -> makes one of a tenant and returns what stands in an address or a body; in this order, so that a
# later one may use `tenant.ids` of an earlier one.
MAKERS: dict[str, Maker] = {
    "organization": lambda tenant: tenant.organization.pk,
    "membership": _membership,
    "service_account": _service_account,
    "project": _project,
    "project_member": lambda tenant: ProjectMember.objects.get(project=tenant.ids["project"]).pk,
    "invitation": _invitation,
    "invitation_token": lambda tenant: invitation_token(tenant.ids["invitation"]),
    "saved_view": _saved_view,
    "key": _key,
    "dataset_version": lambda tenant: (
        make_ready_version(tenant.organization, filename=f"{tenant.canary}.jsonl", dataset_name=tenant.canary).pk
    ),
    "dataset": lambda tenant: make_version(tenant.organization, filename=f"{tenant.canary}-2.jsonl").dataset_id,
    "upload": lambda tenant: make_upload(tenant.organization, filename=f"{tenant.canary}.jsonl").pk,
    "upload_part": _upload_part,
    "job": lambda tenant: make_job(tenant.organization, tenant.installation.base_model, suffix=tenant.canary).pk,
    "checkpoint": checkpoints.checkpoint,
    "batch_file": _batch_file,
    "batch": _batch,
    "completion": _completion,
    "eval": _eval,
    "eval_run": _eval_run,
    "output_item": _output_item,
    "checkpoint_name": lambda tenant: name_of(Checkpoint.objects.get(pk=tenant.ids["checkpoint"])),
    "adapter_version": lambda tenant: _adapter_version(tenant).pk,
    "adapter": lambda tenant: AdapterVersion.objects.get(pk=tenant.ids["adapter_version"]).adapter_id,
    "model_name": lambda tenant: AdapterVersion.objects.get(pk=tenant.ids["adapter_version"]).model_name,
    "model_file": _model_file,
    "conversion": _conversion,
    "hub_push": _hub_push,
    "deployment": _deployment,
    "alias": _alias,
    "retraining_plan": retraining.retraining_plan,
    "conversation": _conversation,
    "preset": _preset,
    "licence_acceptance": _licence_acceptance,
    "tracker_key": _tracker_key,
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
    "notification": _notification,
    "webhook": _webhook,
    "webhook_delivery": _webhook_delivery,
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
