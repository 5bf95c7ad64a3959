"""Datasets, rows and findings, adapters and filtered jobs over the API."""

from apps.datasets.tasks import inspect
from apps.interfaces.api.native import dataset_library
from tests.factories.accounts import make_key
from tests.factories.chat import assistant, line, user
from tests.factories.datasets import make_ready_version


def test_datasets_are_listed_filtered_read_and_deleted(api_client, key, organization, floor, rival, charlie):
    version = make_ready_version(organization, filename="support.jsonl")
    client, outsider = api_client(key), api_client(make_key(rival, charlie))

    (found,) = client.get("/api/v1/datasets?q=SUPPORT&status=ready").json()["data"]
    assert (found["id"], found["version_count"], found["bytes"]) == (version.dataset_id, 1, version.bytes)
    assert client.get("/api/v1/datasets?status=invalid").json()["data"] == []
    assert client.get(f"/api/v1/datasets/{found['id']}").json() == found
    (listed,) = client.get(f"/api/v1/datasets/{found['id']}/versions").json()["data"]
    assert listed["id"] == version.pk
    assert outsider.get(f"/api/v1/datasets/{found['id']}").status_code == 404
    assert outsider.get(f"/api/v1/datasets/{found['id']}/versions").status_code == 404

    assert client.delete(f"/api/v1/datasets/{found['id']}").json()["deleted"]
    assert client.get(f"/api/v1/datasets/{found['id']}").status_code == 404


def test_rows_are_read_as_the_model_sees_them(api_client, key, organization, floor, monkeypatch):
    version = make_ready_version(organization, b"\n".join([line(user("Hi"), assistant("Hello there"))] * 12))
    client = api_client(key)

    plain = client.get(f"/api/v1/files/{version.pk}/rows?limit=5").json()
    assert [row["line"] for row in plain["rows"]] == [1, 2, 3, 4, 5] and plain["next_line"] == 6
    assert plain["rows"][0]["sequences"] == []
    seen = client.get(f"/api/v1/files/{version.pk}/rows?first_line=12&model={floor.base_model.name}").json()
    (row,) = seen["rows"]
    (sequence,) = row["sequences"]
    (start, end), *_ = sequence["trained_spans"]
    assert sequence["text"][start:end].startswith("Hello there") and seen["next_line"] is None
    assert 0 < sequence["trained_tokens"] < sequence["tokens"]
    assert client.get(f"/api/v1/files/{version.pk}/rows?model=nothing").json()["error"]["param"] == "model"

    monkeypatch.setattr(dataset_library, "_MAX_RENDERED", 60)  # characters: a few rows
    early = client.get(f"/api/v1/files/{version.pk}/rows?limit=5&model={floor.base_model.name}").json()
    assert 1 <= len(early["rows"]) < 5 and early["next_line"] == len(early["rows"]) + 1

    before = client.get(f"/api/v1/files/{version.pk}/findings").json()
    inspect(version.pk)
    after = client.get(f"/api/v1/files/{version.pk}/findings").json()
    assert (before["is_inspected"], before["distinct_rows"]) == (False, None)
    assert (after["is_inspected"], after["distinct_rows"]) == (True, 1)


def test_jobs_are_filtered_by_state_model_and_words(api_client, key, organization, floor):
    job = floor.job()
    client = api_client(key)

    def found(query: str) -> list[str]:
        return [each["id"] for each in client.get(f"/v1/fine_tuning/jobs?{query}").json()["data"]]

    assert found(f"status={job.status}&model={floor.base_model.name}&q={job.pk}") == [job.pk]
    assert found("status=cancelled") == found("model=other") == found("q=nothing-like-it") == []
    wrong = client.get("/v1/fine_tuning/jobs?status=sleeping").json()["error"]
    assert wrong["param"] == "status" and "queued" in wrong["message"]
