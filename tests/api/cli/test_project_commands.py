"""`anneal projects` and `--project`: projects with members and budgets, and work in one of them."""

import pytest

from apps.accounts.members.projects import create_project
from apps.accounts.models import Project, ProjectMember, default_project_id
from apps.billing.budget_settings import set_budget
from apps.billing.budgets import list_budgets
from apps.core.database.clock import db_now
from apps.finetuning.models import FineTuningJob
from tests.factories.accounts import make_key, make_service_account
from tests.factories.datasets import jsonl
from tests.factories.money import USD
from tests.support.sdk import create, openai_client


@pytest.fixture
def project(organization, alice) -> Project:
    return create_project(organization=organization, name="Search", is_private=False, by=alice, now=db_now())


@pytest.fixture
def project_key(anneal, project) -> str:
    """The secret of a key in the project."""
    names = ("view", "job.write", "dataset.write", "adapter.write", "key.manage")
    scopes = [word for name in names for word in ("--scope", name)]
    return anneal("keys", "create", "search", *scopes, "--project", project.pk).output.strip()


@pytest.mark.slow
def test_a_project_is_created_changed_and_archived(anneal, key, organization) -> None:
    made = anneal("projects", "create", "Search", "--private")
    one = made.output.strip()
    changed = anneal("projects", "change", one, "--open", "--name", "Find", "--suffix", "Team A", "--method", "qlora")
    shown, listed = anneal("projects", "show", one), anneal("projects", "list")
    archived = anneal("projects", "archive", one)

    assert made.exit_code == 0 and changed.exit_code == 0, changed.errors
    assert "Find" in shown.output and "team-a" in shown.output and "qlora" in shown.output
    assert "all members" in listed.output and "Default project" in listed.output
    assert archived.output.strip() == f"{one} is archived." and one not in anneal("projects", "list").output
    kept = anneal("projects", "list", "--all", "--json").json["data"]
    assert [(each["id"], each["status"]) for each in kept][1:] == [(one, "archived")]
    assert anneal("projects", "change", default_project_id(organization)).exit_code == 2, "nothing to change"
    assert anneal("projects", "change", default_project_id(organization), "--method", "magic").exit_code == 5


def test_members_are_named_by_address_or_id(anneal, key, organization, alice, bob, project) -> None:
    account = make_service_account(organization, alice)
    words = ("projects", "members", "add", project.pk)
    added = anneal(*words, bob.email.upper(), "--role", "viewer")
    by_id = anneal(*words, account.pk, "--role", "admin", "--json")
    listed = anneal("projects", "members", "list", project.pk)
    removed = anneal("projects", "members", "remove", project.pk, bob.email)

    assert added.output.strip() == "Bob has the role viewer." and by_id.json["role"] == "admin", added.errors
    assert "Bob" in listed.output and "admin" in listed.output
    assert removed.exit_code == 0 and not ProjectMember.objects.filter(membership__user=bob).exists()
    again = anneal("projects", "members", "remove", project.pk, bob.email)
    unknown = anneal(*words, "eve@example.com")
    assert (again.exit_code, unknown.exit_code) == (4, 4) and "Invite them" in unknown.errors
    assert anneal("projects", "members", "remove", project.pk, by_id.json["id"]).exit_code == 0


@pytest.mark.slow
def test_a_budget_keeps_what_is_not_changed_until_it_ends(anneal, key, organization, project) -> None:
    none = anneal("projects", "budget", project.pk)
    assert anneal("projects", "budget", project.pk, "--mode", "block").exit_code == 2, "there is no limit to keep"
    words = ("projects", "budget", project.pk, "--limit")
    set_, raised = anneal(*words, "$20", "--mode", "block", "--alert-at", "50"), anneal(*words, "30")
    budget = list_budgets(organization=organization).get()
    assert "no budget" in none.output and "$20.00 a month, block" in set_.output, set_.errors
    assert raised.exit_code == 0 and (budget.limit_nano, budget.mode, budget.thresholds) == (30 * USD, "block", [50])
    assert "$30.00 a month" in anneal("projects", "show", project.pk).output
    assert anneal(*words, "plenty").exit_code == 2

    assert anneal(*words, "40", "--end").exit_code == 2 and list_budgets(organization=organization).exists()
    assert "is ended" in anneal("projects", "budget", project.pk, "--end").output
    assert not list_budgets(organization=organization).exists()


@pytest.mark.slow
def test_projects_are_changed_by_those_who_manage_them_alone(
    anneal, organization, bob, rival, charlie, project
) -> None:
    member = make_key(organization, bob, scopes=frozenset({"view", "key.manage"})).secret
    outsider = make_key(rival, charlie).secret
    words = [
        ("create", "mine"), ("change", project.pk, "--name", "mine"), ("archive", project.pk),
        ("members", "add", project.pk, "mem_1"), ("members", "remove", project.pk, "projm_1"),
        ("budget", project.pk, "--limit", "1"),
    ]  # fmt: skip

    assert {anneal("projects", *each, key=member).exit_code for each in words} == {3}
    assert {anneal("projects", *each, key=outsider).exit_code for each in words[1:]} == {4}
    assert {anneal("projects", *each, key=None).exit_code for each in words} == {3}
    assert anneal("projects", "show", project.pk, key=member).exit_code == 0


@pytest.mark.slow
def test_with_a_project_its_jobs_keys_and_costs_are_shown_and_other_keys_refused(
    anneal, key, network, floor, project, project_key, file_id, organization, alice
) -> None:
    job = create(openai_client(project_key), file_id).id
    create(openai_client(key), file_id)
    inside = ("--project", project.pk)

    def ids(*words: str) -> list[str]:
        return [each["id"] for each in anneal(*words, "--json", key=project_key).json["data"]]

    assert ids(*inside, "jobs", "list") == [job] and len(ids("jobs", "list")) == 2
    assert len(ids(*inside, "keys", "list")) == 1 and len(ids("keys", "list")) == 2
    assert {call.headers.get("OpenAI-Project") for call in network.calls if "project=" in str(call.url)} == {project.pk}
    set_budget(
        organization=organization, scope="project", target=project.pk, limit_nano=50 * USD, mode="block", by=alice.pk,
        now=db_now(),
    )  # fmt: skip
    cost = anneal(*inside, "usage", key=project_key)
    assert "Search" in cost.output and "$50.00 a month, block" in cost.output
    assert "Available" in anneal("usage", key=project_key).output
    wrong = anneal(*inside, "jobs", "list")
    assert wrong.exit_code == 3 and default_project_id(organization) in wrong.errors, "Alice's key is in another one"


def test_a_key_is_stored_for_each_project(anneal, key, project, project_key, tmp_path) -> None:
    inside = ("--project", project.pk)
    assert anneal("login", answer=f"{key.secret}\n", key=None).exit_code == 0
    assert anneal(*inside, "jobs", "list", key=None).exit_code == 3, "the key is in another project"
    assert anneal(*inside, "login", answer=f"{project_key}\n", key=None).exit_code == 0

    assert anneal(*inside, "jobs", "list", key=None).exit_code == 0
    assert len(anneal("keys", "list", "--json", key=None).json["data"]) == 2
    assert anneal(*inside, "logout", key=None).exit_code == 0
    stored = next((tmp_path / "home").rglob("credentials.json")).read_text()
    assert key.secret in stored and project_key not in stored


@pytest.mark.slow
def test_what_a_project_chooses_is_named_before_a_job_starts(anneal, key, floor, file_id, project, project_key) -> None:
    missing = anneal("jobs", "create", "--file", file_id, "--yes", key=project_key)
    assert missing.exit_code == 5 and "model" in missing.errors
    model, pool = floor.base_model.name, floor.pool.name
    assert anneal("projects", "change", project.pk, "--model", model, "--pool", pool).exit_code == 0

    rehearsed = anneal("jobs", "create", "--file", file_id, "--dry-run", key=project_key)
    asked = anneal("jobs", "create", "--file", file_id, "--model", model, "--yes", key=project_key)

    assert "Chosen by the project: model, pool." in rehearsed.output.replace("\n", " ")
    assert asked.exit_code == 0 and "Chosen by the project: pool." in asked.errors


@pytest.mark.slow
def test_a_manifest_names_the_project_of_its_job(
    anneal, floor, project, project_key, checking_server, tmp_path, monkeypatch
) -> None:
    text = "name: bot\ndataset: rows.jsonl\nmodel: anneal-demo\nbeat_current: false\n"
    (tmp_path / "anneal.yaml").write_text(f"{text}project: {project.pk}\n")
    (tmp_path / "rows.jsonl").write_bytes(jsonl())
    monkeypatch.chdir(tmp_path)

    refused = anneal("apply", "--yes")
    other = anneal("--project", "proj_other", "apply", "--yes", key=project_key)
    done = anneal("apply", "--yes", "--json", key=project_key)

    assert (refused.exit_code, other.exit_code) == (3, 2) and "proj_other" in other.errors
    assert done.exit_code == 0 and done.json["started"], done.errors
    assert FineTuningJob.objects.get().project == project
    assert anneal("apply", "--json", key=project_key).json["started"] is False
