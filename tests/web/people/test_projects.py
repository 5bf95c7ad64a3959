"""The pages of projects: create, choose, who is in one, and which fine-tunes and keys are shown and made in it."""

import pytest

from apps.accounts.members import projects
from apps.accounts.members.projects import create_project, set_project_member
from apps.accounts.models import ApiKey, Membership, Project, default_project_id
from apps.batches.completions.records import record_completions
from apps.billing.budget_settings import set_budget
from apps.catalog.models import BaseModel
from apps.core.database.clock import db_now
from apps.core.errors import PermissionDenied
from apps.datasets.models import Dataset
from apps.finetuning.jobs.creation import create_job
from apps.finetuning.jobs.requests import JobRequest
from apps.finetuning.lifecycle import JobStatus
from apps.finetuning.models import Checkpoint, FineTuningJob, GpuPool
from apps.finetuning.usage.allowances import set_allowance
from apps.interfaces.web.wizard.draft import Draft
from apps.serving.evals.models import Eval, EvalRun
from tests.factories.accounts import give_project_role, make_key
from tests.factories.batches import make_batch, make_line
from tests.factories.catalog import make_base_model
from tests.factories.finetuning import TrainingSetup, make_checkpoint, make_training_file
from tests.factories.market import Market
from tests.factories.money import USD
from tests.factories.retraining import make_plan, make_production
from tests.factories.usage import make_completion
from tests.support.pages import text

KEY = {"name": "nightly", "scopes": ["view"], "expires": "30"}


def make_member_job(floor: TrainingSetup, *, by: str) -> FineTuningJob:
    version = make_training_file(floor.organization, floor.base_model)
    asked = JobRequest(base_model=floor.base_model.name, training_file=version.pk)
    return create_job(organization=floor.organization, request=asked, by=by, now=db_now())


@pytest.fixture
def project(organization, ann) -> Project:
    return create_project(organization=organization, name="Search", is_private=False, by=ann, now=db_now())


@pytest.mark.slow
def test_owners_and_admins_create_projects_and_say_who_is_in_them(
    client_for, organization, alice, ann, bob, vera, charlie, rival
):
    admin, member = client_for(ann), client_for(bob)
    made = admin.post("/projects", {"name": " Search  team ", "is_private": "on"})
    project = Project.objects.get(name="Search team")
    assert made.url == f"/projects/{project.pk}"
    assert admin.post("/projects", {"name": "search TEAM"}).status_code == 422
    page = f"/projects/{project.pk}"
    assert "Search team" in text(admin.get(page)) and "Ann" in text(admin.get(page))
    assert [client_for(each).get(page).status_code for each in (alice, bob, vera, charlie)] == [200, 404, 404, 404]
    assert client_for(None).get(page).status_code == 302
    assert "Search team" not in text(member.get("/projects"))
    assert member.post("/projects", {"name": "x"}).status_code == 403
    assert [client_for(each).post(f"{page}/members", {"member": "x"}).status_code for each in (bob, charlie)] == [
        403,
        404,
    ]

    added = {"member": Membership.objects.get(user=bob).pk, "role": "viewer"}
    assert "Bob is now a viewer" in text(admin.post(f"{page}/members", added, follow=True))
    assert "Search team" in text(member.get("/projects"))
    assert member.post("/projects/choose", {"project": project.pk}).status_code == 302
    refused = member.post("/keys", KEY | {"project": project.pk})
    assert refused.status_code == 422 and "does not allow this" in text(refused)
    admin.post(f"{page}/members/{project.members.get(role='viewer').pk}/remove")
    assert member.get(page).status_code == 404 and member.get("/jobs").status_code == 200
    archived = admin.post("/projects/archive", {"project": project.pk, "confirm": "Search team"}, follow=True)
    assert "Archived Search team" in text(archived)
    assert "Search team" not in text(admin.get("/projects"))


@pytest.mark.slow
def test_the_chosen_project_is_that_of_what_is_shown_and_made(client_for, organization, alice, bob, floor, project):
    in_default, member = floor.job(suffix="other"), client_for(bob)
    mine = floor.job(suffix="mine")
    FineTuningJob.objects.filter(pk=mine.pk).update(project=project)
    make_key(organization, alice)
    shown = text(member.get("/jobs"))
    assert in_default.suffix in shown and "mine" in shown

    member.post("/projects/choose", {"project": project.pk})
    shown = text(member.get("/jobs"))
    assert "mine" in shown and "Project Search" in shown and in_default.pk not in shown
    assert b"".join(member.get("/jobs/export")).decode().count("ftjob-") == 1
    page = member.get("/keys")
    assert page.context["form"]["project"].initial == project.pk and not page.context["keys"]
    assert member.post("/keys", KEY | {"project": project.pk}).status_code == 302
    assert ApiKey.objects.get(name="nightly").project == project
    member.post("/projects/choose", {"project": ""})
    assert in_default.pk in text(member.get("/jobs")) and "Project Search" in text(member.get("/keys"))
    assert member.post("/projects/choose", {"project": "proj_unknown"}).status_code == 404


@pytest.mark.slow
def test_a_viewer_of_a_project_only_looks_at_its_fine_tunes(client_for, organization, alice, ann, bob, floor):
    default = Project.objects.get(pk=default_project_id(organization))
    viewer = {"project_id": default.pk, "role": "viewer", "by": alice, "now": db_now()}
    for person in (alice, bob):
        membership = Membership.objects.get(organization=organization, user=person)
        set_project_member(organization=organization, membership_id=membership.pk, **viewer)
    queued, failed = floor.job(), floor.job()
    FineTuningJob.objects.filter(pk=failed.pk).update(status=JobStatus.FAILED, finished_at=db_now())
    owner, member, page = client_for(alice), client_for(bob), f"/jobs/{queued.pk}"
    assert member.get(page).context["may_write"] is False and owner.get(page).context["may_write"] is True

    for action in ("cancel", "pause", "resume", "move"):
        sent = {"option": "a100:1", "cap": "5"}
        assert "does not allow changing" in text(member.post(f"{page}/{action}", sent, follow=True)), action
    assert "does not allow changing" in text(member.post(f"/jobs/{failed.pk}/retry", {"cap": "5"}, follow=True))
    assert member.post(f"/jobs/{failed.pk}/dismiss").status_code == 403
    many = member.post("/jobs/cancel", {"job": [queued.pk, failed.pk], "confirm": "2 fine-tunes"}, follow=True)
    assert text(many).count("does not allow changing") == 2
    states = dict(FineTuningJob.objects.values_list("pk", "status"))
    assert states == {queued.pk: JobStatus.QUEUED, failed.pk: JobStatus.FAILED}
    assert FineTuningJob.objects.get(pk=failed.pk).dismissed_at is None

    with pytest.raises(PermissionDenied, match="viewer"):
        make_member_job(floor, by=bob.pk)
    assert make_member_job(floor, by=alice.pk).project_id == default.pk
    assert "The job is being cancelled" in text(owner.post(f"{page}/cancel", follow=True))


@pytest.mark.slow
def test_pages_offer_a_viewer_of_the_project_none_of_their_actions(
    client_for, organization, alice, bob, floor, key, claim
):
    job = make_production(floor, key, claim)
    plan = make_plan(job, key)
    make_checkpoint(organization, floor.base_model, step=4)
    evaluated = Eval.objects.create(
        organization=organization, project_id=default_project_id(organization), name="sums", created_by="system",
        data_source_config={"type": "logs"}, testing_criteria=[],
    )  # fmt: skip
    run = EvalRun.objects.create(
        organization=organization, evaluated=evaluated, data_source={}, testing_criteria=[], created_by="system"
    )
    completion = make_completion(organization_id=organization.pk, created=1_762_000_000)
    record_completions(records=[completion])
    actions = {
        f"/datasets/{job.training_file_id}": ["/delete"],
        f"/adapters/{job.adapter_version_id}": ["/delete", "/adapters/stop?", '/alias"', "/aliases/delete?"],
        "/jobs/retraining": [f"{plan.pk}/{each}" for each in ("start", "switch")],
        f"/jobs/{Checkpoint.objects.latest('created_at').job_id}?tab=checkpoints": ["/try"],
        f"/evals/{evaluated.pk}": ["/runs/new", "/evals/delete?"],
        f"/evals/{evaluated.pk}/runs/{run.pk}": ["/cancel?"],
        f"/batches/{make_batch(organization, alice, [make_line('a')]).pk}": ["/cancel?"],
        f"/stored-completions/{completion.id}": ["/delete?"],
    }
    admin = Membership.objects.get(organization=organization, user=bob)
    Membership.objects.filter(pk=admin.pk).update(role="admin")

    def offered() -> dict[str, list[str]]:
        pages = {page: text(client_for(bob).get(page)) for page in actions}
        return {page: [each for each in actions[page] if each in shown] for page, shown in pages.items()}

    assert offered() == actions
    give_project_role(job.project, alice, bob, "viewer")
    assert not any(offered().values())


@pytest.mark.slow
def test_an_owner_limits_a_project_and_sees_what_it_costs(client_for, organization, alice, project):
    owner = client_for(alice)
    page = text(owner.get(f"/projects/{project.pk}"))
    assert f"/budgets?scope=project&project={project.pk}" in page
    asked = owner.get(f"/budgets?scope=project&project={project.pk}").context["form"]
    assert (asked["scope"].value(), asked["project"].value()) == ("project", project.pk)
    sent = {"scope": "project", "project": project.pk, "limit_usd": "20", "mode": "block", "thresholds": "80"}
    assert owner.post("/budgets", sent).status_code == 302
    assert "$20.00" in text(owner.get(f"/projects/{project.pk}")) and "Search" in text(owner.get("/budgets"))
    assert owner.post("/quotas", {"scope": "project", "project": "", "queued_jobs": "1"}).status_code == 422
    assert owner.post("/quotas", {"scope": "project", "project": project.pk, "queued_jobs": "1"}).status_code == 302
    assert "Search" in text(owner.get("/quotas")) and "Default project" not in text(owner.get("/usage?by=project"))
    default = default_project_id(organization)
    set_budget(
        organization=organization, scope="project", target=default, limit_nano=USD, mode="alert", by=alice.pk,
        now=db_now(),
    )  # fmt: skip
    set_allowance(
        organization=organization, scope="project", target=default, limits={"queued_jobs": 1}, by=alice.pk,
        now=db_now(),
    )  # fmt: skip
    assert "Default project" in text(owner.get("/quotas")) and "Default project" in text(owner.get("/budgets"))
    assert owner.post(f"/projects/{default}", {"name": "Default", "is_private": "on"}).status_code == 422


@pytest.mark.slow
def test_pages_leave_out_the_fine_tunes_of_a_private_project(client_for, organization, alice, bob, floor, claim):
    secret = create_project(organization=organization, name="Secret", is_private=True, by=alice, now=db_now())
    done = floor.job(suffix="done")
    claim().start().succeed(floor.base_model)
    source = make_checkpoint(organization, floor.base_model, step=5)
    done.refresh_from_db()
    done.requested |= {"start_from": {"checkpoint": source.pk}}
    done.save(update_fields=["requested"])
    owner, member, model = client_for(alice), client_for(bob), f"/adapters/{done.adapter_version_id}"

    def shown(client) -> tuple[int, bool, bool, bool]:
        return (
            client.get("/projects").context["nav_running_count"](),
            f"/jobs/{done.pk}" in text(client.get(f"/why/{done.hold_id}")),
            done.pk in dict(client.get("/jobs/retraining/new").context["form"].fields["source_job"].choices),
            "bot, step 5" in text(client.get(model)),
        )

    assert shown(member) == (1, True, True, True)
    FineTuningJob.objects.filter(pk=source.job_id).update(project=secret)
    continued = text(member.get(model))
    assert "bot, step 5" not in continued and source.pk in continued and "(deleted)" not in continued
    FineTuningJob.objects.update(project=secret)
    assert shown(owner) == (1, True, True, True) and shown(member) == (0, False, False, False)
    assert "in a private project" in text(member.get(f"/why/{done.hold_id}"))


@pytest.mark.slow
def test_only_open_pools_are_offered_and_projects_of_an_hour_are_limited(
    client_for, organization, alice, project, monkeypatch
):
    Market(organization)
    owner, page = client_for(alice), f"/projects/{project.pk}"
    GpuPool.objects.exclude(name="h100").update(is_open=False)

    def offered() -> list[str]:
        return list(dict(owner.get(page).context["form"].fields["default_pool"].choices))

    assert offered() == ["", "h100"]
    assert owner.post(page, {"name": "Search", "default_pool": "a100"}).status_code == 422
    assert owner.post(page, {"name": "Search", "default_pool": "h100"}).status_code == 302
    GpuPool.objects.update(is_open=False)
    assert offered() == ["", "h100"], "it stays until another one is chosen"
    assert owner.post(page, {"name": "Find", "default_pool": "h100"}).status_code == 302
    monkeypatch.setattr(projects, "MAX_CREATED_IN_AN_HOUR", 2)
    assert owner.post("/projects", {"name": "one"}).status_code == 302
    refused = owner.post("/projects", {"name": "two"})
    assert refused.status_code == 422 and "at most 2 projects an hour" in text(refused)


@pytest.mark.slow
def test_an_admin_of_a_project_manages_its_page_but_neither_hides_nor_archives_it(
    client_for, organization, ann, bob, vera, charlie, rival, project
):
    page, people = f"/projects/{project.pk}", {each: Membership.objects.get(user=each).pk for each in (bob, vera)}
    for membership in people.values():
        set_project_member(
            organization=organization, project_id=project.pk, membership_id=membership, role="admin", by=ann,
            now=db_now(),
        )  # fmt: skip
    other = create_project(organization=organization, name="Other", is_private=False, by=ann, now=db_now())
    admin = client_for(bob)
    shown = admin.get(page)
    assert "is_private" not in shown.context["form"].fields and "/projects/archive" not in text(shown)
    assert "Add a member" in text(shown) and "Add a member" not in text(admin.get(f"/projects/{other.pk}"))

    assert admin.post(page, {"name": "Find", "is_private": "on", "default_suffix": "Bot"}).status_code == 302
    project.refresh_from_db()
    assert (project.name, project.is_private, project.default_suffix) == ("Find", False, "bot")
    added = {"member": people[vera], "role": "viewer"}
    assert "Vera is now a viewer" in text(admin.post(f"{page}/members", added, follow=True))
    member = project.members.get(membership=people[vera]).pk
    assert admin.post(f"{page}/members/{member}/remove").status_code == 302
    for who, status in ((vera, 403), (charlie, 404)):
        client = client_for(who)
        tried = [client.post(page, {"name": "x"}), client.post(f"{page}/members", added)]
        assert [each.status_code for each in tried] == [status] * 2, who
    refused = [
        admin.post(f"/projects/{other.pk}", {"name": "x"}), admin.post(f"/projects/{other.pk}/members", added),
        admin.post("/projects/archive", {"project": project.pk}), admin.post("/projects", {"name": "x"}),
    ]  # fmt: skip
    assert [each.status_code for each in refused] == [403] * 4


@pytest.mark.slow
def test_the_wizard_says_what_the_project_chose_and_a_choice_of_ones_own_wins(
    client_for, organization, alice, bob, floor
):
    default = default_project_id(organization)
    chosen = {"default_method": "full", "default_suffix": "bot", "default_model": floor.base_model.name}
    assert client_for(alice).post(f"/projects/{default}", {"name": "All", **chosen}).status_code == 302
    member, version = client_for(bob), make_training_file(organization, floor.base_model)
    wizard, words = f"/jobs/new?dataset={version.pk}", "Chosen by the project"

    assert words in text(member.get(f"{wizard}&step=model"))
    at_method = f"{wizard}&model={floor.base_model.name}&step=method"
    form = member.get(at_method).context["form"]
    assert (form["method"].value(), form["suffix"].value()) == ("full", "bot") and words in form["suffix"].help_text
    assert text(member.get(at_method)).count(words) == 2
    sent = member.get(f"{at_method}&method=lora&shown={form.shown}&suffix=")
    assert (sent.context["form"]["method"].value(), sent.context["form"]["suffix"].value()) == ("lora", None)
    assert words not in text(sent)


@pytest.mark.slow
def test_the_wizard_offers_first_what_the_chosen_project_prefers(client_for, organization, alice, bob, project):
    market, small = Market(organization), make_base_model("small-demo")
    owner, member, page = client_for(alice), client_for(bob), f"/projects/{project.pk}"
    assert owner.post(page, {"name": "Search", "default_model": "unknown"}).status_code == 422
    defaults = {"name": "Search", "default_model": market.base_model.name, "default_pool": "a100"}
    assert owner.post(page, defaults).status_code == 302

    def offered() -> tuple[str, str]:
        model = member.get(f"/jobs/new?dataset={market.version.pk}&step=model").context["chosen"]
        return model, member.get(f"{market.wizard}&step=compute").context["auto"]

    assert offered()[0] == small.name and not offered()[1].startswith("a100")
    member.post("/projects/choose", {"project": project.pk})
    assert offered() == (market.base_model.name, "a100")
    assert "Chosen by the project" in text(member.get(f"{market.wizard}&step=compute"))
    assert "Chosen by the project" not in text(member.get(f"{market.wizard}&step=compute&pool=h100"))

    BaseModel.objects.filter(name=market.base_model.name).update(retired_at=db_now())
    shown = {each.name: each.value() for each in owner.get(page).context["form"] if each.value()}
    assert owner.post(page, shown | {"name": "Find"}).status_code == 302
    project.refresh_from_db()
    assert (project.name, project.default_model) == ("Find", market.base_model.name), "what is gone stays until changed"


@pytest.mark.slow
def test_private_work_stays_in_its_project_or_the_review_warns(client_for, organization, alice, bob, floor):
    private = create_project(organization=organization, name="Secret", is_private=True, by=alice, now=db_now())
    job = floor.job()
    FineTuningJob.objects.filter(pk=job.pk).update(project=private)
    Dataset.objects.update(project=private)
    job.refresh_from_db()
    client, draft = client_for(alice), Draft.of_job(job).with_changes({"pool": floor.pool.name})
    warning, shown = "uses a file or model from a private project", '<dt>Project</dt><dd class="trunc">{}</dd>'.format

    kept = text(client.get(draft.url("review")))
    opened = text(client.get(draft.url("review", project="")))
    answer = client.post("/jobs/new", dict(draft.choices) | {"cap_nano": f"{10**12}"})
    Project.objects.filter(pk=private.pk).update(archived_at=db_now())
    archived = text(client.get(draft.url("review")))

    assert shown("Secret") in kept and warning not in kept
    assert shown("Secret") not in opened and warning in opened
    assert FineTuningJob.objects.get(pk=answer.url.rpartition("/")[2]).project == private
    assert "You cannot create fine-tunes in that project" in archived and warning in archived
    assert "was deleted or is hidden from you" in text(client_for(bob).get(draft.url("review")))
