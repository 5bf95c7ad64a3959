"""Projects over the API: who may do what, what a private one hides, and keys, budgets and allowances in one."""

import openai
import pytest

from apps.accounts.login.key_operations import IssuedKey, issue_key
from apps.accounts.login.key_rotation import rotate_key
from apps.accounts.members.projects import create_project, set_project_member
from apps.accounts.models import Membership, Project, ProjectMember, default_project_id
from apps.accounts.roles import ROLES, SCOPES, Admin, Member, Viewer
from apps.adapters.models import Adapter
from apps.billing.budget_settings import set_budget
from apps.billing.budgets import Attribution
from apps.billing.models import Hold, TrafficHour
from apps.billing.usage.sums import Group, sum_by_group
from apps.catalog.models import BaseModel
from apps.catalog.operations import set_price
from apps.core.database.clock import db_now
from apps.core.errors import NotFound
from apps.core.models import AuditEntry
from apps.finetuning.conversions.orders import order
from apps.finetuning.models import FineTuningJob, GpuPool
from apps.finetuning.usage.allowances import set_allowance
from tests.factories.accounts import make_key, make_service_account
from tests.factories.catalog import make_base_model
from tests.factories.market import Market
from tests.factories.money import USD, give_credit, spend
from tests.factories.serving import make_version
from tests.support.sdk import create, openai_client

PROJECTS, JOBS = "/api/v1/projects", "/v1/fine_tuning/jobs"


def post(client, path, **body):
    return client.post(path, body, format="json")


def key_in(project: Project, by, *, scopes=frozenset(SCOPES) - {"organization.manage"}) -> IssuedKey:
    role = Membership.objects.get(organization=project.organization, user=by).role
    held = {each.value for each in ROLES[role].permissions}
    return issue_key(
        organization=project.organization, name="test", scopes=frozenset(scopes) & held, by=by, expires_at=None,
        now=db_now(), project_id=project.pk,
    )  # fmt: skip


@pytest.fixture
def project(organization, alice) -> Project:
    return create_project(organization=organization, name="Search", is_private=False, by=alice, now=db_now())


@pytest.fixture
def secret_project(organization, alice) -> Project:
    return create_project(organization=organization, name="Secret", is_private=True, by=alice, now=db_now())


def test_a_project_is_changed_as_it_was_read_while_its_costs_grow(api_client, key, organization, project):
    client, place = api_client(key), f"{PROJECTS}/{project.pk}"
    read = client.get(place)
    give_credit(organization)
    spend(organization, USD, "ftjob-1", attribution=Attribution(project_id=project.pk))

    changed = client.post(place, {"name": "Find"}, format="json", headers={"If-Match": read.headers["ETag"]})

    now = client.get(place)
    assert (changed.status_code, now.json()["name"]) == (200, "Find")
    assert (read.json()["spent_usd"], now.json()["spent_usd"]) == ("0", "1")


@pytest.mark.slow
def test_owners_and_admins_manage_projects_members_see_them_and_outsiders_nothing(
    api_client, organization, alice, ann, bob, vera, rival, charlie, project
):
    one, members = f"{PROJECTS}/{project.pk}", f"{PROJECTS}/{project.pk}/members"
    member = Membership.objects.get(user=bob).pk

    def statuses(client) -> list[int]:
        added = post(client, members, member=member)
        return [
            *(client.get(each).status_code for each in (PROJECTS, one, members)),
            post(client, PROJECTS, name=f"by {id(client)}").status_code,
            post(client, one, name=f"renamed by {id(client)}").status_code,
            added.status_code,
            client.delete(f"{members}/{added.json().get('id', 'projm_none')}").status_code,
            post(client, f"{PROJECTS}/{default_project_id(organization)}/archive").status_code,
        ]

    for person, role, may in ((alice, Admin, 200), (ann, Admin, 200), (bob, Member, 403), (vera, Viewer, 403)):
        scopes = frozenset(SCOPES) & {each.value for each in role.permissions}
        found = statuses(api_client(make_key(organization, person, scopes=scopes)))
        assert found == [200] * 3 + [may] * 4 + [400 if may == 200 else 403], "the default project stays"
    outsider = api_client(make_key(rival, charlie))
    assert [each["is_default"] for each in outsider.get(PROJECTS).json()["data"]] == [True], "their own one"
    refused = [
        outsider.get(one), outsider.get(members), post(outsider, one, name="x"), post(outsider, members, member=member),
        outsider.delete(f"{members}/projm_1"), post(outsider, f"{one}/archive"),
    ]  # fmt: skip
    assert [each.status_code for each in refused] == [404] * 6
    assert {post(api_client(None), each).status_code for each in (PROJECTS, one, members)} == {401}
    assert api_client(None).get(PROJECTS).status_code == 401


def test_an_organization_that_never_uses_projects_has_one_in_which_all_is(api_client, organization, alice, floor, key):
    job = floor.job()
    (listed,) = api_client(key).get(PROJECTS).json()["data"]
    assert (listed["id"], listed["is_default"]) == (default_project_id(organization), True)
    assert {job.project_id, key.key.project_id, Hold.objects.get(source=job.pk).project_id} == {listed["id"]}


@pytest.mark.slow
def test_a_key_fixes_the_project_of_its_jobs_and_openais_header_must_name_it(
    organization, alice, bob, floor, file_id, project
):
    made = key_in(project, bob)

    job = create(openai_client(made, project=project.pk), file_id)

    row = FineTuningJob.objects.get(pk=job.id)
    assert (row.project_id, row.member_id) == (project.pk, bob.pk)
    assert Hold.objects.get(source=job.id).project_id == project.pk
    assert job.to_dict()["project_id"] == project.pk
    for other in (default_project_id(organization), "proj_unknown"):
        with pytest.raises(openai.AuthenticationError) as refused:
            openai_client(made, project=other).models.list()
        assert refused.value.code == "mismatched_project"
    mine = openai_client(made)
    assert [each.id for each in mine.fine_tuning.jobs.list(extra_query={"project": project.pk})] == [job.id]
    assert not list(mine.fine_tuning.jobs.list(extra_query={"project": default_project_id(organization)}))


@pytest.mark.slow
def test_a_key_changes_no_job_of_a_project_that_its_creator_only_views(
    api_client, organization, alice, bob, floor, file_id, project
):
    made, default, now = key_in(project, bob), default_project_id(organization), db_now()
    job = floor.job()
    membership = Membership.objects.get(user=bob).pk
    set_project_member(
        organization=organization, project_id=default, membership_id=membership, role="viewer", by=alice, now=now
    )
    one, client = f"/v1/fine_tuning/jobs/{job.pk}", api_client(made)
    assert client.get(one).status_code == 200
    tried = [post(client, f"{one}/{each}") for each in ("cancel", "pause", "resume")]
    tried.append(post(client, f"/api{one}/retry"))
    tried.append(post(client, f"/api{one}/moves", option="h100:1", quoted_max_usd="5"))
    assert [(each.status_code, each.json()["error"]["code"]) for each in tried] == [
        (403, "insufficient_permissions")
    ] * 5
    mine = create(openai_client(made), file_id).id
    assert post(client, f"/v1/fine_tuning/jobs/{mine}/cancel").json()["status"] == "cancelled"


@pytest.mark.slow
def test_a_private_project_hides_its_jobs_and_keys_from_all_but_members_and_owners(
    api_client, organization, alice, ann, bob, floor, claim, file_id, secret_project
):
    hidden = key_in(secret_project, alice)
    job = create(openai_client(hidden), file_id)
    claim().start().succeed(floor.base_model)
    (results,) = openai_client(hidden).fine_tuning.jobs.retrieve(job.id).result_files
    one, theirs = f"/v1/fine_tuning/jobs/{job.id}", f"{PROJECTS}/{secret_project.pk}"
    admin = api_client(make_key(organization, ann, scopes=frozenset(SCOPES) - {"organization.manage"}))

    def found(client) -> list[int]:
        return [
            client.get(each).status_code for each in (
                one, f"{one}/events", theirs, f"/api/v1/keys/{hidden.key.pk}", f"/v1/files/{results}",
                f"/v1/files/{results}/content", f"/api/v1/usage?project={secret_project.pk}",
            )
        ]  # fmt: skip

    assert found(admin) == [404] * 7 and found(api_client(hidden)) == [200] * 7
    assert found(api_client(make_key(organization, alice))) == [200] * 7, "an owner's key that manages all"
    assert results not in str(admin.get("/v1/files").json())
    repeated = post(
        admin, "/api/v1/fine_tuning/retraining_plans", name="p", source_job=job.id, dataset="d", alias="a",
        max_usd="20", min_new_rows=1,
    )  # fmt: skip
    assert (repeated.status_code, repeated.json()["error"]["param"]) == (404, "source_job")
    assert job.id not in str(admin.get("/v1/fine_tuning/jobs").json())
    assert "Secret" not in str(admin.get(PROJECTS).json()) and hidden.key.pk not in str(
        admin.get("/api/v1/keys").json()
    )
    assert post(admin, theirs, is_private=False).status_code == 404
    with pytest.raises(NotFound):
        key_in(secret_project, bob)
    refused = post(
        api_client(make_key(organization, alice)), f"{PROJECTS}/{default_project_id(organization)}", is_private=True
    )
    assert refused.json()["error"]["param"] == "is_private"


def test_a_key_works_as_long_as_its_creator_works_in_the_project(api_client, organization, alice, bob, secret_project):
    now, membership = db_now(), Membership.objects.get(user=bob)
    account = make_service_account(organization, alice)
    owner, members = api_client(make_key(organization, alice)), f"{PROJECTS}/{secret_project.pk}/members"
    added = post(owner, members, member=membership.pk).json()
    made = key_in(secret_project, bob)
    client = api_client(made)
    assert "inference" in client.get("/api/v1/me").json()["key"]["scopes"]

    post(owner, members, member=membership.pk, role="viewer")
    assert client.get("/api/v1/me").json()["key"] | {"expires_at": 0} == {
        "id": made.key.pk, "project": secret_project.pk, "scopes": ["view"], "expires_at": 0,
    }  # fmt: skip
    owner.delete(f"{members}/{added['id']}")
    assert client.get("/api/v1/me").status_code == 401
    post(owner, members, member=account.pk)
    set_project_member(
        organization=organization, project_id=secret_project.pk, membership_id=membership.pk, role="member", by=alice,
        now=now,
    )  # fmt: skip
    assert client.get("/api/v1/me").status_code == 200

    rotated = rotate_key(organization=organization, key_id=made.key.pk, overlap=2 * (now - now), by=bob, now=db_now())
    assert rotated.key.project_id == secret_project.pk
    assert post(owner, f"{PROJECTS}/{secret_project.pk}/archive").json()["status"] == "archived"
    assert api_client(rotated).get("/api/v1/me").status_code == 401
    assert post(owner, "/api/v1/keys", name="k", scopes=["view"], project=secret_project.pk).status_code == 400
    assert "Secret" not in str(owner.get(PROJECTS).json())
    assert "Secret" in str(owner.get(f"{PROJECTS}?include_archived=true").json())
    assert set(AuditEntry.objects.filter(target=secret_project.pk).values_list("action", flat=True)) == {
        "project.create", "project.member_set", "project.member_remove", "project.archive",
    }  # fmt: skip


def test_a_key_makes_keys_of_its_project_and_of_others_only_if_it_manages_members(
    api_client, organization, alice, bob, project
):
    made = api_client(key_in(project, bob))
    new = post(made, "/api/v1/keys", name="k", scopes=["view"]).json()
    assert new["project"] == project.pk
    refused = post(made, "/api/v1/keys", name="k", scopes=["view"], project=default_project_id(organization))
    assert (refused.status_code, refused.json()["error"]["param"]) == (403, "project")
    owner = api_client(make_key(organization, alice))
    assert post(owner, "/api/v1/keys", name="k", scopes=["view"], project=project.pk).json()["project"] == project.pk
    set_budget(
        organization=organization, scope="project", target=default_project_id(organization), limit_nano=USD,
        mode="block", by=alice.pk, now=db_now(),
    )  # fmt: skip
    escape = post(owner, "/api/v1/keys", name="k", scopes=["view"], project=project.pk)
    assert escape.status_code == 403, "its project has a budget, which would not cover the new key"
    assert {each["id"] for each in owner.get(f"/api/v1/keys?project={project.pk}").json()["data"]} >= {new["id"]}


@pytest.mark.slow
def test_a_project_has_a_budget_an_allowance_and_a_usage_of_its_own(
    api_client, organization, alice, bob, floor, file_id, project
):
    owner, sdk = api_client(make_key(organization, alice)), openai_client(key_in(project, bob))
    allowed = post(owner, "/api/v1/allowances", scope="project", target=project.pk, queued_jobs=1).json()
    limited = post(owner, "/api/v1/budgets", scope="project", target=project.pk, limit_usd="50", mode="block").json()
    job = create(sdk, file_id)
    with pytest.raises(openai.RateLimitError, match="the project Search 1 unfinished job"):
        create(sdk, file_id)
    create(openai_client(make_key(organization, bob, scopes=frozenset({"job.write", "view"}))), file_id)

    (counted,) = owner.get("/api/v1/allowances").json()["data"]
    assert (counted["id"], counted["target"], counted["queued_jobs"]["used"]) == (allowed["id"], project.pk, 1)
    held = Hold.objects.get(source=job.id).amount_nano
    budget = owner.get(f"/api/v1/budgets/{limited['id']}").json()
    assert float(budget["held_usd"]) == pytest.approx(held / USD)
    owner.delete(f"/api/v1/allowances/{allowed['id']}")
    post(owner, "/api/v1/budgets", scope="project", target=project.pk, limit_usd="0.01", mode="block")
    with pytest.raises(openai.RateLimitError, match="budget of the project Search"):
        create(sdk, file_id)
    unknown = post(owner, "/api/v1/budgets", scope="project", target="proj_unknown", limit_usd="1")
    assert (unknown.status_code, unknown.json()["error"]["param"]) == (400, "target")
    with pytest.raises(NotFound):
        set_allowance(
            organization=organization, scope="project", target="proj_unknown", limits={"queued_jobs": 1}, by=alice.pk,
            now=db_now(),
        )  # fmt: skip

    none = ("aborted", "rate_limited", "over_quota", "not_found", "invalid", "failed", "cached_input_tokens")
    for key in (key_in(project, bob), make_key(organization, alice)):
        TrafficHour.objects.create(
            organization=organization, model_name="m", key_id=key.key.pk, hour_at=db_now(), requests=1, input_tokens=5,
            output_tokens=6, cost_nano=7, first_token_counts=[], latency_counts=[], **dict.fromkeys(none, 0),
        )  # fmt: skip
    assert len(owner.get(f"/api/v1/usage?project={project.pk}").json()["data"]) == 1
    assert float(owner.get(f"{PROJECTS}/{project.pk}").json()["spent_usd"]) == 0
    post(owner, "/api/v1/budgets", scope="project", target=project.pk, limit_usd="50", mode="block")
    spend(organization, 2 * USD, "ftjob-spent", attribution=Attribution(project_id=project.pk))
    spend(organization, 3 * USD, "ftjob-before", attribution=Attribution())  # as before there were projects
    charged_at = db_now()
    Hold.objects.filter(status="closed").update(closed_at=charged_at)  # on one day
    spent = [owner.get(f"{PROJECTS}/{each['id']}").json()["spent_usd"] for each in owner.get(PROJECTS).json()["data"]]
    assert [float(each) for each in spent] == [3, 2]
    day = charged_at.date()
    sums = sum_by_group(organization=organization, first=day, last=day, group=Group.PROJECT, most=9)
    assert sums.largest == {default_project_id(organization): 3 * USD, project.pk: 2 * USD}


def test_a_conversion_counts_under_the_project_of_its_model(organization, alice, floor, project):
    set_price(sku="conversion:bytes", unit="bytes", price_nano=USD, per=10**9, by=alice.pk, now=db_now())
    version, other = make_version(organization, floor.base_model), make_version(organization, floor.base_model)
    Adapter.objects.filter(pk=version.adapter_id).update(project=project)
    version.refresh_from_db()

    def project_of(each) -> str:
        ordered = order(version=each, kind="merged_16bit", shown_nano=10 * USD, by=alice.pk, now=db_now())
        return Hold.objects.get(source=ordered.pk).project_id

    assert project_of(version) == project.pk
    assert project_of(other) == default_project_id(organization)


@pytest.mark.slow
def test_a_job_takes_from_its_keys_project_what_it_does_not_name(api_client, organization, alice, bob, project):
    market = Market(organization)
    owner, client = api_client(make_key(organization, alice)), api_client(key_in(project, bob))
    one, files = f"{PROJECTS}/{project.pk}", {"training_file": market.version.pk}
    missing = post(client, JOBS, **files).json()["error"]
    assert (missing["code"], missing["param"]) == ("missing_required_parameter", "model")
    model, wished = (
        market.base_model.name,
        {"default_pool": "a100", "default_method": "qlora", "default_suffix": "Bot 7"},
    )
    for field in (*wished, "default_model"):
        assert post(owner, one, **{field: "?"}).json()["error"]["param"] == field
    assert post(owner, one, default_model=model, **wished).json()["default_suffix"] == "bot-7"

    def job(by, **body) -> tuple[str, str, str, str]:
        made = FineTuningJob.objects.get(pk=post(by, JOBS, **files, **body).json()["id"])
        return made.base_model.name, made.pool.name, made.method, made.suffix

    rehearsed = post(client, JOBS, **files, dry_run=True).json()
    assert rehearsed["from_project"] == ["model", "method", "suffix", "pool"] and rehearsed["pool"] == "a100"
    assert job(client) == (model, "a100", "qlora", "bot-7")
    small = make_base_model("small-demo").name
    named = {"model": model, "suffix": "", "quantization": "none", "compute": {"pool": "h100"}}
    assert job(client, **named) == (model, "h100", "lora", "")
    assert post(client, JOBS, **files, **named, dry_run=True).json()["from_project"] == []
    cheapest = job(owner, model=model)
    assert cheapest[1] != "a100" and cheapest[2:] == ("lora", ""), "its key is in the default project"
    GpuPool.objects.filter(name="a100").update(is_open=False)
    assert job(client)[1] != "a100", "the pool is closed"
    kept = post(owner, one, default_pool="", default_model=small).json()
    assert (kept["default_model"], kept["default_pool"], kept["default_method"]) == (small, None, "qlora")
    BaseModel.objects.filter(name=small).update(retired_at=db_now())
    gone = post(client, JOBS, **files).json()["error"]
    assert gone["param"] == "model" and f"The project Search uses the base model {small}" in gone["message"]


@pytest.mark.slow
def test_admins_of_a_project_manage_it_alone_and_neither_hide_nor_archive_it(
    api_client, organization, alice, bob, vera, ann, project
):
    now, people = db_now(), {each: Membership.objects.get(user=each).pk for each in (alice, bob, vera, ann)}

    def give(person, role: str, project_id: str = project.pk) -> None:
        set_project_member(
            organization=organization, project_id=project_id, membership_id=people[person], role=role, by=alice, now=now
        )

    for person in (bob, vera):
        give(person, "admin")
    other = create_project(organization=organization, name="Other", is_private=False, by=alice, now=now)

    def statuses(client, place: Project) -> list[int]:
        one = f"{PROJECTS}/{place.pk}"
        added = post(client, f"{one}/members", member=people[ann], role="member")
        return [
            post(client, one, default_suffix="bot").status_code,
            added.status_code,
            client.delete(f"{one}/members/{added.json().get('id', 'projm_none')}").status_code,
        ]

    admin = api_client(key_in(project, bob))
    assert statuses(admin, project) == [200] * 3 and statuses(admin, other) == [403] * 3
    one = f"{PROJECTS}/{project.pk}"
    assert post(admin, f"{one}/members", member=people[ann], role="viewer").status_code == 403, "she may do more"
    assert post(admin, f"{one}/members", member=people[vera], role="viewer").status_code == 200
    assert post(admin, f"{one}/members", member=people[vera], role="admin").status_code == 200
    assert post(admin, one, is_private=False, name="Find").json()["name"] == "Find"
    refused = [post(admin, one, is_private=True), post(admin, f"{one}/archive"), post(admin, PROJECTS, name="x")]
    assert [each.status_code for each in refused] == [403] * 3
    assert statuses(api_client(key_in(project, bob, scopes=frozenset({"view", "job.write"}))), project) == [403] * 3
    assert statuses(api_client(key_in(other, bob)), project) == [403] * 3, "the key is of another project"
    assert statuses(api_client(key_in(project, vera)), project) == [403] * 3, "she is a viewer of the organization"
    give(alice, "admin")
    narrow = api_client(key_in(project, alice, scopes=frozenset({"view", "key.manage"})))
    found = [post(narrow, one, name="Found"), post(narrow, one, is_private=True)]
    assert [each.status_code for each in found] == [200, 403], "an owner may, but this key may not manage members"
    give(alice, "member")
    for role in ("member", "viewer"):
        give(bob, role)
        assert statuses(admin, project) == [403] * 3, role
    assert set(ProjectMember.objects.filter(project=project).values_list("role", flat=True)) == {
        "member", "viewer", "admin",
    }  # fmt: skip
