"""`anneal projects`: parts of an organization's work, who works in them, and what they may cost."""

from typing import Annotated, Any

import typer

from anneal.api import Api, item_path
from anneal.commands.requests import amount_of, present
from anneal.failures import ExitCode, Failure
from anneal.output import AsJson, Limit, dollars, emit, emit_list, fields, moment
from anneal.session import session_of

app = typer.Typer(no_args_is_help=True, help="List, create and change projects, their members and budgets.")
members = typer.Typer(no_args_is_help=True, help="List, add and remove who has a role in a project.")
app.add_typer(members, name="members")
_PROJECTS, _BUDGETS, _MEMBERS = "/api/v1/projects", "/api/v1/budgets", "/api/v1/members"
_MOST_MEMBERS = 10_000
_DEFAULTS = ("model", "pool", "method", "suffix")

ProjectId = Annotated[str, typer.Argument(metavar="PROJECT", help="The id of a project, proj_….")]
Member = Annotated[
    str, typer.Argument(metavar="MEMBER", help="An e-mail address, or the id of a member or service account.")
]


@app.command("list")
def list_projects(
    context: typer.Context,
    limit: Limit = 20,
    with_archived: Annotated[bool, typer.Option("--all", help="Also archived ones.")] = False,
    as_json: AsJson = False,
) -> None:
    """List projects, oldest first."""
    found = session_of(context).api.pages(_PROJECTS, limit=limit, include_archived="true" if with_archived else None)
    emit_list(context, found, ("ID", "NAME", "STATUS", "SEEN BY", "BASE MODEL", "POOL", "CREATED"), _cells)


def _cells(project: dict[str, Any]) -> tuple[object, ...]:
    return (
        project["id"], project["name"], project["status"], _readers(project), project["default_model"],
        project["default_pool"], moment(project["created_at"]),
    )  # fmt: skip


def _readers(project: dict[str, Any]) -> str:
    return "its members" if project["is_private"] else "all members"


@app.command()
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What the project is for.")],
    is_private: Annotated[bool, typer.Option("--private", help="Only its members and owners see it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Create a project and print its id."""
    found = session_of(context).api.post_once(_PROJECTS, {"name": name, "is_private": is_private})
    emit(context, found, found["id"])


@app.command()
def show(context: typer.Context, project: ProjectId, as_json: AsJson = False) -> None:
    """Show a project, what it cost this month, and its budget."""
    show_project(context, project)


def show_project(context: typer.Context, project: str) -> None:
    api = session_of(context).api
    found = api.get(item_path(_PROJECTS, project))
    budget = _budget_of(api, project)
    lines = [
        ("Project", found["name"]),
        ("Id", found["id"]),
        ("Status", found["status"]),
        ("Seen by", _readers(found)),
        ("Spent this month", dollars(found["spent_usd"])),
        ("Budget", _budget_text(budget) if budget else None),
        *((f"New jobs: {name}", found[f"default_{name}"]) for name in _DEFAULTS),
    ]
    emit(context, found | {"budget": budget}, lambda: fields(lines))


@app.command()
def change(
    context: typer.Context,
    project: ProjectId,
    name: Annotated[str | None, typer.Option(help="The new name.")] = None,
    is_private: Annotated[
        bool | None, typer.Option("--private/--open", help="Whether only its members and owners see it.")
    ] = None,
    model: Annotated[str | None, typer.Option(help='The base model of jobs that name none; "" for none.')] = None,
    pool: Annotated[
        str | None, typer.Option(help='The default pool, if it can run a job; "" for the cheapest.')
    ] = None,
    method: Annotated[str | None, typer.Option(help='The default method: lora, qlora or full; "" for lora.')] = None,
    suffix: Annotated[str | None, typer.Option(help='A part of their models\' names; "" for none.')] = None,
    as_json: AsJson = False,
) -> None:
    """Change a project: its name, who sees it, and the defaults of its jobs."""
    body = present(
        name=name, is_private=is_private, default_model=model, default_pool=pool, default_method=method,
        default_suffix=suffix,
    )  # fmt: skip
    if not body:
        raise typer.BadParameter("Name what to change, such as --name.", param_hint="--name")
    found = session_of(context).api.post_once(item_path(_PROJECTS, project), body)
    emit(context, found, f"{found['id']} is changed.")


@app.command()
def archive(context: typer.Context, project: ProjectId, as_json: AsJson = False) -> None:
    """Archive a project. Its API keys never work again. Its jobs and models stay."""
    found = session_of(context).api.post_once(f"{item_path(_PROJECTS, project)}/archive")
    emit(context, found, f"{found['id']} is archived.")


@app.command()
def budget(
    context: typer.Context,
    project: ProjectId,
    limit: Annotated[str | None, typer.Option(help="The monthly limit of the project, in dollars.")] = None,
    mode: Annotated[str | None, typer.Option(help="alert, block or pause: what happens at the limit.")] = None,
    alert_at: Annotated[list[int] | None, typer.Option(help="A percentage to notify at; may be given again.")] = None,
    is_ended: Annotated[bool, typer.Option("--end", help="End the budget.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the monthly budget of a project; set it with --limit, and end it with --end.

    Settings that you leave out stay as in the old budget.
    """
    if is_ended and (limit is not None or mode is not None or alert_at):
        raise typer.BadParameter("Leave out the other options, or leave out --end.", param_hint="--end")
    api = session_of(context).api
    api.get(item_path(_PROJECTS, project))
    now = _budget_of(api, project)
    if is_ended and now is not None:
        ended = api.delete(item_path(_BUDGETS, now["id"]))
        emit(context, ended, "The budget is ended.")
        return
    if limit is not None or mode is not None or alert_at:
        if limit is None and now is None:
            raise typer.BadParameter("This option is required.", param_hint="--limit")
        kept = {name: now[name] for name in ("limit_usd", "mode", "thresholds")} if now else {}
        limit_usd = None if limit is None else str(amount_of(limit, "--limit"))
        chosen = present(limit_usd=limit_usd, mode=mode, thresholds=alert_at or None)
        now = api.post_once(_BUDGETS, {"scope": "project", "target": project} | kept | chosen)
    emit(context, now, _budget_text(now) if now else "This project has no budget.")


def _budget_of(api: Api, project: str) -> dict[str, Any] | None:
    found: list[dict[str, Any]] = api.get(_BUDGETS)["data"]
    return next((each for each in found if (each["scope"], each["target"]) == ("project", project)), None)


def _budget_text(budget: dict[str, Any]) -> str:
    spent, held = dollars(budget["spent_usd"]), dollars(budget["held_usd"])
    return f"{dollars(budget['limit_usd'])} a month, {budget['mode']}. {spent} spent, {held} held."


# --- members ----------------------------------------------------------------------------------------------------------


@members.command("list")
def list_members(context: typer.Context, project: ProjectId, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List who has a role in a project, oldest first. In an open project, others work with their own role."""
    found = session_of(context).api.pages(f"{item_path(_PROJECTS, project)}/members", limit=limit)
    emit_list(context, found, ("ID", "NAME", "ROLE", "ADDED"), _member_cells)


def _member_cells(member: dict[str, Any]) -> tuple[object, ...]:
    return member["id"], member["name"], member["role"], moment(member["added_at"])


@members.command()
def add(
    context: typer.Context,
    project: ProjectId,
    member: Member,
    role: Annotated[str, typer.Option(help="viewer, member or admin.")] = "member",
    as_json: AsJson = False,
) -> None:
    """Give a member of the organization a role in a project. It replaces an earlier role."""
    api = session_of(context).api
    chosen = _member_of(api, member)["id"] if "@" in member else member
    found = api.post_once(f"{item_path(_PROJECTS, project)}/members", {"member": chosen, "role": role})
    emit(context, found, f"{found['name']} has the role {found['role']}.")


@members.command()
def remove(
    context: typer.Context,
    project: ProjectId,
    member: Annotated[
        str, typer.Argument(metavar="MEMBER", help="An e-mail address, or an id from `anneal projects members list`.")
    ],
    as_json: AsJson = False,
) -> None:
    """End a member's role in a project."""
    api, place = session_of(context).api, f"{item_path(_PROJECTS, project)}/members"
    if "@" in member:
        user = _member_of(api, member)["user"]
        found = next((each["id"] for each in api.pages(place, limit=_MOST_MEMBERS) if each["user"] == user), None)
        if found is None:
            raise Failure(f"{member} has no role in {project}.", ExitCode.NOT_FOUND)
        member = found
    ended: dict[str, Any] = api.delete(item_path(place, member))
    emit(context, ended, f"{ended['id']} is removed.")


def _member_of(api: Api, email: str) -> dict[str, Any]:
    """Return the member of the organization with this address. Raises Failure."""
    for each in api.pages(_MEMBERS, limit=_MOST_MEMBERS, q=email):
        if each["email"].lower() == email.lower():
            return each
    raise Failure(f"No member has the address {email}. Invite them first.", ExitCode.NOT_FOUND)
