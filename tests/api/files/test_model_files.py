"""Downloads with a key: a model's weights and documents, and uploaded files, also from where one stopped."""

import hashlib
import json

import openai
import pytest
from asgiref.sync import async_to_sync
from django.test import AsyncClient

from apps.accounts.roles import SCOPES
from apps.adapters.models import AdapterVersion
from apps.contracts.adapter_files import base_reference
from apps.contracts.runs import Export
from apps.core.models import AuditEntry
from apps.core.objects.store import CHUNK_BYTES
from tests.factories.accounts import make_key
from tests.factories.datasets import make_ready_version
from tests.factories.finetuning import adapter_files, model_files
from tests.support.sdk import openai_client

WEIGHTS = "adapter_model.safetensors"
ROWS = b'{"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]}\n' * 20


@pytest.fixture
def version(floor, claim) -> AdapterVersion:
    """An adapter with a merged model, which a job left."""
    job = floor.job(suffix="triage", exports=["merged_16bit"])
    attempt = claim().start()
    merged = attempt.upload("model", 10, model_files())
    export = Export(kind="merged_16bit", upload_id=merged.pk, manifest_sha256=merged.manifest_sha256)
    attempt.succeed(floor.base_model, exports=(export,))
    job.refresh_from_db()
    return job.adapter_version


def address(version: AdapterVersion, name: str = "") -> str:
    return f"/api/v1/models/{version.model_name}/files" + (f"/{name}" if name else "")


def status(answer) -> int:
    b"".join(answer)  # which closes the file
    return answer.status_code


@pytest.mark.slow
def test_a_key_gets_every_file_that_it_lists_with_its_hash(version, floor, key, api_client) -> None:
    client = api_client(key)
    listed = client.get(address(version)).json()["data"]

    assert client.head(address(version, listed[0]["name"])).status_code == 200, "which is no download"
    for file in listed:
        answer = client.get(address(version, file["name"]), {"export": file["export"]} if file["export"] else {})
        content = b"".join(answer.streaming_content) if answer.streaming else answer.content
        assert (len(content), hashlib.sha256(content).hexdigest()) == (file["bytes"], file["sha256"])
        assert f'filename="{file["name"]}"' in answer.headers["Content-Disposition"]
    assert {file["name"] for file in listed if file["export"] is None} == {
        *adapter_files(floor.base_model), "README.md", "reproducibility.json",
    }  # fmt: skip
    assert {file["name"] for file in listed if file["export"] == "merged_16bit"} >= set(model_files())
    audited = AuditEntry.objects.filter(action="adapter.downloaded", target=version.pk, actor=key.key.pk)
    assert audited.count() == len(listed)


def test_the_configuration_names_a_base_that_peft_loads(version, floor, key, api_client) -> None:
    answer = api_client(key).get(address(version, "adapter_config.json"))

    config = json.loads(b"".join(answer.streaming_content))
    base = floor.base_model
    assert answer.headers["Content-Type"] == "application/json"
    assert config["base_model_name_or_path"] == base_reference(repo=base.repo, name=base.name)


@pytest.mark.slow
def test_a_download_goes_on_where_it_stopped(version, floor, key, api_client) -> None:
    whole, url = (
        adapter_files(floor.base_model)[WEIGHTS],
        address(version, WEIGHTS),
    )
    etag = api_client(key).head(url).headers["ETag"]

    rest = api_client(key).get(url, headers={"Range": "bytes=1000-", "If-Range": etag})
    other = api_client(key).get(url, headers={"Range": "bytes=1000-", "If-Range": '"another"'})
    known = api_client(key).get(url, headers={"If-None-Match": f'"x", {etag}'})
    beyond = api_client(key).get(url, headers={"Range": f"bytes={len(whole)}-"})
    head = api_client(key).head(url)

    assert (rest.status_code, b"".join(rest.streaming_content)) == (206, whole[1000:])
    assert rest.headers["Content-Range"] == f"bytes 1000-{len(whole) - 1}/{len(whole)}"
    assert (other.status_code, b"".join(other.streaming_content)) == (200, whole)
    assert (known.status_code, beyond.status_code) == (304, 416)
    assert (head.status_code, head.headers["Content-Length"], head.headers["Accept-Ranges"]) == (
        200,
        str(len(whole)),
        "bytes",
    )


@pytest.mark.slow
@pytest.mark.django_db(transaction=True)
def test_a_download_is_sent_in_pieces(version, floor, key) -> None:
    async def fetch() -> list[bytes]:
        headers = {"Authorization": f"Bearer {key.secret}"}
        response = await AsyncClient().get(address(version, WEIGHTS), headers=headers)
        return [chunk async for chunk in response.streaming_content]

    chunks = async_to_sync(fetch)()

    assert max(len(chunk) for chunk in chunks) <= CHUNK_BYTES
    assert b"".join(chunks) == adapter_files(floor.base_model)[WEIGHTS]


@pytest.mark.slow
def test_only_the_owning_organization_gets_files(version, organization, rival, alice, bob, charlie, api_client) -> None:
    urls = (address(version), address(version, "adapter_config.json"))
    asking = {
        "owner": make_key(organization, alice).secret,
        "member": make_key(organization, bob, scopes=frozenset({"view"})).secret,
        "outsider": make_key(rival, charlie).secret,
        "key without the scope": make_key(organization, alice, scopes=frozenset(SCOPES) - {"view"}).secret,
        "nobody": None,
    }

    found = {who: [status(api_client(secret).get(url)) for url in urls] for who, secret in asking.items()}

    assert found == {
        "owner": [200, 200], "member": [200, 200], "outsider": [404, 404], "key without the scope": [403, 403],
        "nobody": [401, 401],
    }  # fmt: skip


@pytest.mark.slow
def test_what_is_not_there_is_refused_by_name(version, key, api_client) -> None:
    names = [api_client(key).get(address(version, name)) for name in ("manifest.json", "..%2Fsecret", "config.json")]

    assert [answer.status_code for answer in names] == [404, 404, 404]
    assert "It has adapter_model.safetensors" in names[0].json()["error"]["message"]
    assert api_client(key).get(address(version, "README.md"), {"export": "gguf"}).status_code == 404
    assert api_client(key).get("/api/v1/models/anneal-demo/files").status_code == 404


def test_the_sdk_gets_an_uploaded_file_and_a_part_of_it(key, organization) -> None:
    sdk, file = openai_client(key), make_ready_version(organization, ROWS, filename="rows.jsonl")

    answer = sdk.files.content(file.pk)
    part = sdk.files.content(file.pk, extra_headers={"Range": "bytes=-10"})

    assert answer.read() == ROWS and part.read() == ROWS[-10:]
    assert answer.response.headers["etag"] == part.response.headers["etag"]
    assert 'filename="rows.jsonl"' in answer.response.headers["content-disposition"]


def test_another_organizations_file_is_unknown_to_the_sdk(rival, charlie, organization) -> None:
    file = make_ready_version(organization, ROWS)

    with pytest.raises(openai.NotFoundError):
        openai_client(make_key(rival, charlie)).files.content(file.pk)
