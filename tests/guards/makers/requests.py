"""Files, batches, evals, and what the playground keeps of a tenant."""

import msgspec

from apps.accounts.models import Membership, default_project_id
from apps.batches.completions.records import CompletionRecord, record_completions
from apps.batches.models import BatchFile, BatchRequest
from apps.batches.operations import create_batch
from apps.contracts.evaluation.graders import StringCheckGrader
from apps.core.database.clock import db_now
from apps.core.ids import new_id
from apps.datasets.models import Upload, UploadPart
from apps.playground.conversations import keep_conversation
from apps.playground.presets import save_preset
from apps.playground.transcripts import PlaySettings, PlayTurn, Transcript
from apps.serving.evals.models import EvalItem, EvalRun
from apps.serving.evals.operations import create_eval
from tests.guards.makers.tenants import Tenant


def upload_part(tenant: Tenant) -> str:
    upload = Upload.objects.get(pk=tenant.ids["upload"])
    return UploadPart.objects.create(organization=tenant.organization, upload=upload, bytes=1).pk


def batch_file(tenant: Tenant) -> str:
    made = {"purpose": "batch", "filename": f"{tenant.canary}.jsonl", "object_key": "nowhere", "bytes": 1}
    made["project_id"] = default_project_id(tenant.organization)
    return BatchFile.objects.create(organization=tenant.organization, created_by=tenant.owner.pk, **made).pk


def batch(tenant: Tenant) -> str:
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


def completion(tenant: Tenant) -> str:
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


def eval_(tenant: Tenant) -> str:
    return create_eval(
        organization=tenant.organization,
        name=tenant.canary,
        data_source_config={"type": "logs", "metadata": {}},
        criteria=[StringCheckGrader(name="exact", input=tenant.canary, reference="x", operation="eq")],
        metadata={},
        by=tenant.owner.pk,
    ).pk


def eval_run(tenant: Tenant) -> str:
    run = EvalRun(
        organization=tenant.organization, evaluated_id=tenant.ids["eval"], name=tenant.canary, created_by="system",
        data_source={"type": "completions", "source": {"type": "stored_completions"}}, testing_criteria=[],
    )  # fmt: skip
    run.save(force_insert=True)
    return run.pk


def output_item(tenant: Tenant) -> str:
    source = msgspec.json.encode({"item": {"text": tenant.canary}}).decode()
    return EvalItem.objects.create(
        organization=tenant.organization, run_id=tenant.ids["eval_run"], number=0, source=source, status="pass", bytes=1
    ).pk


def conversation(tenant: Tenant) -> str:
    transcript = Transcript(columns=[[PlayTurn(role="user", content=tenant.canary)]])
    return keep_conversation(membership=_owner_of(tenant), transcript=transcript, now=db_now()).pk


def preset(tenant: Tenant) -> str:
    settings = PlaySettings(system=tenant.canary)
    return save_preset(
        membership=_owner_of(tenant), name=tenant.canary, is_shared=True, settings=settings, now=db_now()
    ).pk


def _owner_of(tenant: Tenant) -> Membership:
    return Membership.objects.get(organization=tenant.organization, user=tenant.owner)
