"""Adapters that were trained elsewhere: uploaded in one call, checked, served, and downloaded as PEFT loads them."""

import datetime
import json
import struct

import msgspec
import pytest
from django.core.files.uploadedfile import SimpleUploadedFile

from apps.accounts.roles import SCOPES
from apps.adapters.models import Adapter, AdapterVersion
from apps.contracts.adapter_files import base_reference
from apps.contracts.hyperparameters import Hyperparameters, Method
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue
from apps.core.models import AuditEntry
from apps.core.objects.store import object_key, store
from apps.finetuning.models import Examination, Quota
from apps.finetuning.recipes import completion
from apps.finetuning.recipes.start_points import StartPoint, find_start_point, signed_ref
from apps.finetuning.results import examinations, uploaded_adapters
from apps.serving.models import Deployment
from tests.factories.accounts import make_key
from tests.factories.finetuning import adapter_files

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
PATH = "/api/v1/adapters"


@pytest.fixture
def files(floor) -> dict[str, bytes]:
    return adapter_files(floor.base_model)


def config_of(files: dict[str, bytes], **changes: object) -> bytes:
    return json.dumps(json.loads(files[CONFIG]) | changes).encode()


def send(client, files: dict[str, bytes], **fields: str):
    form = {
        "name": "Support Bot",
        "adapter_config": SimpleUploadedFile(CONFIG, files[CONFIG]),
        "weights": SimpleUploadedFile(WEIGHTS, files[WEIGHTS]),
    }
    return client.post(PATH, form | fields, format="multipart")


def objects_of(organization) -> set[str]:
    return {key for key, _ in store().list_objects(f"org/{organization.pk}/adapters")}


def test_an_adapter_is_uploaded_served_and_downloaded(floor, files, api_client, key, organization) -> None:
    client, base = api_client(key), floor.base_model

    repeated = json.loads(files[CONFIG])["target_modules"] * 2
    config = config_of(files, peft_version="0.17.0", lora_dropout=0.1, target_modules=repeated)
    made = send(client, files | {CONFIG: config}).json()

    version = AdapterVersion.objects.get(pk=made["id"])
    assert len(version.target_modules) == len(set(repeated))
    assert (made["name"], made["version"], made["base_model"], made["rank"]) == ("support-bot", 1, base.name, 16)
    assert (made["is_uploaded"], made["job"], made["certificate"]) == (True, None, "checking")
    assert made["model"].startswith(f"ft:{base.name}:{organization.slug}:support-bot:")
    assert not Deployment.objects.exists() and Examination.objects.get().version == version
    examinations.release_overdue(now=db_now() + datetime.timedelta(minutes=11))
    assert Deployment.objects.filter(adapter_version=version, removed_at=None).exists()
    assert AuditEntry.objects.filter(action="adapter.published", actor=key.key.pk, target=version.pk).exists()
    listed = client.get(f"/api/v1/models/{made['model']}/files").json()["data"]
    assert {file["name"] for file in listed} == {WEIGHTS, CONFIG, "README.md"}
    card = client.get(f"/api/v1/models/{made['model']}/files/README.md").content.decode()
    assert "which was uploaded" in card and "PeftModel.from_pretrained" in card and "rank 16" in card
    kept = json.loads(b"".join(client.get(f"/api/v1/models/{made['model']}/files/{CONFIG}").streaming_content))
    assert kept["base_model_name_or_path"] == base_reference(repo=base.repo, name=base.name)
    assert kept["r"] == 16 and kept["inference_mode"] and "peft_version" not in kept
    start = signed_ref(version.pk, 0, version.manifest, version.manifest_sha256, version.object_prefix)
    for file in start.files:  # a job may continue from it
        assert store().stat(f"{version.object_prefix}/{file.name}").bytes == file.bytes
    assert send(client, files).json()["version"] == 2 and Adapter.objects.count() == 1


def test_a_job_that_continues_an_upload_keeps_its_scale(floor, files, api_client, key, organization) -> None:
    def start_of(**changes: object) -> StartPoint:
        made = send(api_client(key), files | {CONFIG: config_of(files, **changes)}).json()
        return find_start_point(organization=organization, model=made["model"])

    def choose(start: StartPoint, asked: dict[str, object]) -> Hyperparameters:
        values = start.require_shape(asked, method=Method.LORA)
        recipe = completion.choose(base_model=start.base_model, method=Method.LORA, asked=values, keeps_rank=True)
        return recipe.hyperparameters

    scaled = start_of(lora_alpha=8.0, use_rslora=True)
    kept = choose(scaled, {})
    assert (kept.lora_rank, kept.lora_alpha, kept.use_rslora, kept.use_dora) == (16, 8, True, False)
    for name, value in (("lora_alpha", 32), ("use_rslora", False), ("use_dora", True)):
        with pytest.raises(InvalidValue, match=name) as refused:
            choose(scaled, {name: value})
        assert refused.value.param == f"hyperparameters.{name}"
    with pytest.raises(InvalidValue, match="lora_alpha"):
        choose(start_of(lora_alpha=12.5), {})
    assert choose(msgspec.structs.replace(scaled, shape=scaled.shape | {"lora_rank": 24}), {}).lora_rank == 24


@pytest.mark.parametrize(
    ("changes", "param", "words"),
    [
        ({"base_model_name_or_path": "acme/unknown"}, "base_model", "No installed base model"),
        ({"base_model_name_or_path": "/home/me/model"}, "base_model", "send its name as base_model"),
        ({"use_dora": True}, "adapter_config", "use_dora"),
        ({"auto_mapping": {"base_model_class": "X", "parent_library": "evil"}, "mine": 1}, "adapter_config", "'mine'"),
        ({"modules_to_save": ["lm_head"]}, "adapter_config", "modules_to_save"),
        ({"r": 128}, "adapter_config", "up to rank 64"),
        ({"r": 10**6}, "adapter_config", "whole number"),
        ({"target_modules": ["lm_head"]}, "adapter_config", "target_modules"),
        ({"target_modules": "all-linear"}, "adapter_config", "target_modules"),
        ({"lora_alpha": 1e9}, "adapter_config", "lora_alpha"),
        ({"lora_alpha": 10**400}, "adapter_config", "lora_alpha"),
        ({"base_model_name_or_path": {"name": None}}, "base_model", "names no base model"),
        ({"base_model_name_or_path": "\ud800"}, "base_model", r"No installed base model is '\ud800'"),
        ({"revision": "\ud800\0"}, "base_model", r"trained on commit '\ud800\x00'"),
        ({"r": 8}, None, "has shape"),
        ({"target_modules": ["q_proj"]}, None, "does not belong"),
    ],
)
def test_an_adapter_that_cannot_be_served_is_refused(changes, param, words, files, api_client, key, organization):
    answer = send(api_client(key), files | {CONFIG: config_of(files, **changes)})

    error = answer.json()["error"]
    assert answer.status_code == 400 and words in error["message"]
    assert error["param"] == param
    assert not AdapterVersion.objects.exists() and objects_of(organization) == set()


@pytest.mark.slow
def test_weights_that_are_no_safetensors_are_refused(files, api_client, key, organization) -> None:
    client, header = api_client(key), files[WEIGHTS]
    pickled = b"\x80\x04\x95" + b"\x00" * 64
    cut, longer = header[:-10], header + b"\x00" * 8
    huge = struct.pack("<Q", 2**40) + b"{}"

    for weights in (pickled, cut, longer, huge, b"", b"PK\x03\x04"):
        answer = send(client, files | {WEIGHTS: weights})
        assert answer.status_code == 400, answer.content
    for config in (b"", b"[]", b"{", b'{"r": 1, "r": 2}', b"\xff\xfe", b"{" + b" " * 70_000 + b"}"):
        assert send(client, files | {CONFIG: config}).status_code in (400, 413)
    assert not AdapterVersion.objects.exists() and objects_of(organization) == set()


def test_the_base_model_can_be_named(floor, files, api_client, key) -> None:
    local = files | {CONFIG: config_of(files, base_model_name_or_path="/home/me/model", revision="abc")}
    client = api_client(key)

    assert send(client, local, base_model="nothing").json()["error"]["code"] == "model_not_found"
    assert send(client, local, base_model=floor.base_model.name).json()["base_model"] == floor.base_model.name


def test_uploads_keep_within_storage_size_and_number(files, api_client, key, organization, monkeypatch) -> None:
    client = api_client(key)
    monkeypatch.setattr(uploaded_adapters, "MAX_BYTES", len(files[WEIGHTS]) - 1)
    assert send(client, files).status_code == 413
    monkeypatch.setattr(uploaded_adapters, "MAX_BYTES", len(files[WEIGHTS]))
    quota = Quota.objects.create(organization=organization, storage_bytes=len(files[WEIGHTS]) - 1)
    assert "storage" in send(client, files).json()["error"]["message"]
    quota.storage_bytes = None
    quota.save()
    assert objects_of(organization) == set()

    monkeypatch.setattr(uploaded_adapters, "MAX_A_DAY", 1)
    assert [send(client, files).status_code, send(client, files).status_code] == [200, 429]
    AdapterVersion.objects.update(created_at=db_now() - datetime.timedelta(days=2))
    monkeypatch.setattr(uploaded_adapters, "MAX_KEPT", 1)
    assert "keeps at most 1" in send(client, files).json()["error"]["message"]
    assert AdapterVersion.objects.count() == 1


def test_who_uploads_an_adapter(files, api_client, organization, rival, alice, bob, vera, charlie, client_for) -> None:
    without = frozenset(SCOPES) - {"adapter.write"}
    asking = {
        "owner": make_key(organization, alice),
        "member": make_key(organization, bob, scopes=frozenset({"adapter.write"})),
        "viewer": make_key(organization, vera, scopes=frozenset({"view"})),
        "key without the scope": make_key(organization, alice, scopes=without),
        "anonymous": None,
    }

    found = {who: send(api_client(secret), files).status_code for who, secret in asking.items()}

    assert found == {"owner": 200, "member": 200, "viewer": 403, "key without the scope": 403, "anonymous": 401}
    outsider = api_client(make_key(rival, charlie))
    version = AdapterVersion.objects.filter(organization=organization).first()
    assert outsider.get(f"{PATH}/{version.pk}").status_code == 404
    assert outsider.get(f"/api/v1/models/{version.model_name}/files").status_code == 404


@pytest.mark.slow
def test_the_page_uploads_an_adapter(files, client_for, bob, vera, organization) -> None:
    form = {"name": "mine", "base_model": ""}
    sent = {
        "adapter_config": SimpleUploadedFile(CONFIG, files[CONFIG]),
        "weights": SimpleUploadedFile(WEIGHTS, files[WEIGHTS]),
    }
    wrong = SimpleUploadedFile(WEIGHTS, b"PK\x03\x04" + bytes(60))

    browser = client_for(bob)
    refused = browser.post("/adapters/upload", form | sent | {"weights": wrong})
    for file in sent.values():
        file.seek(0)
    made = browser.post("/adapters/upload", form | sent)

    assert refused.status_code == 422 and b"header" in refused.content
    assert made.status_code == 302
    assert "an upload" in browser.get("/adapters").content.decode()
    assert browser.get(made["Location"]).status_code == 200
    assert client_for(vera).get("/adapters/upload").status_code == 403


@pytest.mark.slow
def test_what_a_killed_upload_left_is_swept(files, api_client, key, organization) -> None:
    made = send(api_client(key), files).json()
    store().put_stream(object_key(organization.pk, "adapters", "adpv_gone", WEIGHTS), [b"x"])

    uploaded_adapters.sweep_orphans(now=db_now() + datetime.timedelta(days=2))

    assert {name.split("/")[3] for name in objects_of(organization)} == {made["id"]}
