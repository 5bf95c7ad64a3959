"""Datasets, rows and findings, adapters and filtered jobs over the API."""

from apps.core.database.clock import db_now
from apps.datasets import queries
from apps.datasets.models import DatasetVersion
from apps.datasets.tasks import inspect
from apps.datasets.validation.leases import validate_version
from apps.interfaces.api.native.datasets import library
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

    monkeypatch.setattr(library, "_MAX_RENDERED", 60)  # characters: a few rows
    early = client.get(f"/api/v1/files/{version.pk}/rows?limit=5&model={floor.base_model.name}").json()
    assert 1 <= len(early["rows"]) < 5 and early["next_line"] == len(early["rows"]) + 1

    before = client.get(f"/api/v1/files/{version.pk}/findings").json()
    inspect(version.pk)
    after = client.get(f"/api/v1/files/{version.pk}/findings").json()
    assert (before["is_inspected"], before["distinct_rows"]) == (False, None)
    assert (after["is_inspected"], after["distinct_rows"]) == (True, 1)


def rows_of(count: int) -> bytes:
    return b"\n".join([line(user(f"Hi {number}"), assistant("Hello")) for number in range(count)])


def post(client, version, call: str, body: dict[str, object] | None = None):
    return client.post(f"/api/v1/files/{version.pk}/{call}", body or {}, format="json")


def changes_of(client, file_id: str, since: str = "") -> dict[str, object]:
    return client.get(f"/api/v1/files/{file_id}/changes", {"since": since} if since else {}).json()


def test_a_row_is_edited_and_deleted_and_a_version_restored(
    api_client, key, organization, vera, rival, charlie, monkeypatch
):
    version = make_ready_version(
        organization, b"\n".join([line(user(f"Hi {n}"), assistant("Hello")) for n in range(12)])
    )
    client, viewer = api_client(key), api_client(make_key(organization, vera, scopes=frozenset({"view"})))
    new = line(user("Bye"), assistant("See you")).decode()

    edited = DatasetVersion.objects.get(pk=post(client, version, "edits", {"line": 3, "row": new}).json()["id"])
    validate_version(version_id=edited.pk, now=db_now())
    assert (edited.number, edited.derived_from_id, edited.created_by) == (2, version.pk, key.key.pk)
    found = changes_of(client, edited.pk)
    assert (found["since"], found["is_compared"], found["changed"], found["added"]) == (version.pk, True, 1, 0)
    assert found["first_changed"] == [{"old_line": 3, "new_line": 3}]
    late = post(client, version, "edits", {"line": 3, "row": None})
    assert (late.status_code, late.json()["error"]["code"]) == (400, "newer_version")
    wrong = post(client, edited, "edits", {"line": 3, "row": '{"messages": 1}'}).json()["error"]
    assert (wrong["code"], wrong["param"]) == ("invalid_value", "row")

    shorter = DatasetVersion.objects.get(pk=post(client, edited, "edits", {"line": 1, "row": None}).json()["id"])
    validate_version(version_id=shorter.pk, now=db_now())
    assert changes_of(client, shorter.pk, since=version.pk)["first_removed"] == [{"old_line": 1, "new_line": None}]
    assert changes_of(client, version.pk, since="file-none")["error"]["param"] == "since"
    assert viewer.post(f"/api/v1/files/{shorter.pk}/changes", {"since": version.pk}, format="json").json()[
        "is_compared"
    ]

    restored = post(client, version, "restore").json()
    assert DatasetVersion.objects.get(pk=restored["id"]).number == 4 and restored["derived_from"] == version.pk
    monkeypatch.setattr(queries, "_MOST_OTHERS", 1)
    assert [changes_of(client, pk)["since"] for pk in (edited.pk, version.pk)] == [version.pk, restored["id"]]
    for call, body in (("edits", {"line": 1, "row": None}), ("restore", {}), ("split", {"share": 0.5})):
        assert post(viewer, version, call, body).status_code == 403
        assert post(api_client(make_key(rival, charlie)), version, call, body).status_code == 404
        assert post(api_client(), version, call, body).status_code == 401


def test_a_file_is_split_into_two_datasets_once_it_is_inspected(api_client, key, organization):
    version, client = make_ready_version(organization, rows_of(40)), api_client(key)

    assert post(client, version, "split", {"share": 0.5}).json()["error"]["code"] == "invalid_state"
    inspect(version.pk)
    assert post(client, version, "split", {"share": 0.01}).json()["error"]["param"] == "share"
    made = post(client, version, "split", {"share": 0.5, "seed": 7}).json()

    files = [DatasetVersion.objects.get(pk=made[name]["id"]) for name in ("training_file", "validation_file")]
    counts = [validate_version(version_id=each.pk, now=db_now()).rows for each in files]
    assert sum(counts) == 40 and min(counts) >= 10
    assert len({each.dataset_id for each in files} | {version.dataset_id}) == 3


def test_jobs_are_filtered_by_state_model_and_words(api_client, key, organization, floor):
    job = floor.job()
    client = api_client(key)

    def found(query: str) -> list[str]:
        return [each["id"] for each in client.get(f"/v1/fine_tuning/jobs?{query}").json()["data"]]

    assert found(f"status={job.status}&model={floor.base_model.name}&q={job.pk}") == [job.pk]
    assert found("status=cancelled") == found("model=other") == found("q=nothing-like-it") == []
    wrong = client.get("/v1/fine_tuning/jobs?status=sleeping").json()["error"]
    assert wrong["param"] == "status" and "queued" in wrong["message"]
