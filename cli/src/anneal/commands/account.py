"""`anneal login`, `logout`, `usage`, `costs` and `audit`."""

import sys
from typing import Annotated, Any

import httpx
import typer

from anneal.api import foreign_answer
from anneal.commands.projects import show_project
from anneal.output import AsJson, Limit, ask_secret, dollars, emit, emit_list, fields, moment, notice, table
from anneal.session import session_of

_THIS_MACHINE = ("127.0.0.1", "localhost", "::1")


def login(
    context: typer.Context,
    base_url: Annotated[str | None, typer.Option(help="The address of the installation.")] = None,
    as_json: AsJson = False,
) -> None:
    """Check an API key and store it for this user.

    The key comes from ANNEAL_API_KEY, a prompt or standard input. Other users could see it on the command line.
    Without a terminal, the address is the given one, else the one used last, at first http://127.0.0.1:8000.
    """
    session = session_of(context)
    session.given_url = base_url or session.given_url
    if session.given_url is None and sys.stdin.isatty():  # otherwise the first line is the key
        session.given_url = typer.prompt("Address", default=session.base_url, err=True)
    address = httpx.URL(session.base_url)
    if address.scheme == "http" and address.host not in _THIS_MACHINE:
        notice("This address is not encrypted, so others on the network can read the key. Use https if you can.")
    session.given_key = session.given_key or ask_secret("API key", variable="ANNEAL_API_KEY")
    found = session.api.get("/api/v1/me")
    if not isinstance(found, dict) or "organization" not in found:
        raise foreign_answer()
    session.store_key(session.given_key)
    organization, regions = found["organization"]["name"], found["organization"].get("regions")
    limits = f" It is limited to {', '.join(regions)}." if regions else ""
    emit(
        context,
        found | {"base_url": session.base_url, "stored_in": str(session.credentials_file)},
        f"You are signed in to {session.base_url} as {organization}.{limits} The key is in {session.credentials_file}.",
    )


def logout(context: typer.Context, as_json: AsJson = False) -> None:
    """Delete the API key stored for this address, or for its project in --project.

    The key itself stays valid until you revoke it.
    """
    session = session_of(context)
    session.store_key(None)
    place = f"{session.project} at {session.base_url}" if session.project else session.base_url
    emit(context, {"base_url": session.base_url, "deleted": True}, f"Deleted the stored key for {place}.")


def usage(context: typer.Context, as_json: AsJson = False) -> None:
    """Show the credit, and what training and inference have cost; with a project, what it cost this month."""
    session = session_of(context)
    if session.project:
        show_project(context, session.project)
        return
    found = session.api.get("/api/v1/billing")
    lines = [
        ("Available", dollars(found["available_usd"])),
        ("On hold", dollars(found["held_usd"])),
        ("Training", dollars(found["training_usd"])),
        ("Inference", dollars(found["inference_usd"])),
        ("Tokens billed", f"{found['tokens_billed']:,}"),
        ("Requests not charged yet", found["unrated_requests"] or None),
    ]
    emit(context, found, lambda: fields(lines))


def costs(
    context: typer.Context,
    by: Annotated[str, typer.Option(help="day, subject, key, member, project or label.")] = "day",
    first: Annotated[str | None, typer.Option(help="The first day in UTC, as 2026-01-31; else 30 days.")] = None,
    last: Annotated[str | None, typer.Option(help="The last day in UTC, included; else today.")] = None,
    label: Annotated[str | None, typer.Option(help="With --by label: its name; else that of your invoices.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=1000, help="How many, the most expensive first; all days.")] = 100,
    as_json: AsJson = False,
) -> None:
    """Show what was spent in a period, by day or by what spent it. A subject is a model, a job or storage."""
    found = session_of(context).api.get("/api/v1/costs", group_by=by, first=first, last=last, label=label, limit=limit)
    rows = [(each["group"], each["kind"], dollars(each["cost_usd"])) for each in found["data"]]
    if found["others"]:
        rows.append((f"{found['others']:,} others", None, dollars(found["others_usd"])))
    rows.append(("Total", None, dollars(found["total_usd"])))
    emit(context, found, lambda: table((by.upper(), "KIND", "COST"), rows))


def audit(
    context: typer.Context,
    since: Annotated[str | None, typer.Option(help="Entries from then on: a day or time in UTC.")] = None,
    until: Annotated[str | None, typer.Option(help="Entries before then.")] = None,
    action: Annotated[str | None, typer.Option(help="An action such as key.create; key. for all on keys.")] = None,
    actor: Annotated[str | None, typer.Option(help="The id of a person or a key.")] = None,
    target: Annotated[str | None, typer.Option(help="The id of what was changed.")] = None,
    limit: Limit = 20,
    as_json: AsJson = False,
) -> None:
    """List the audit log, newest first. It needs a key with the scope audit.read."""
    chosen = {"since": since, "until": until, "action": action, "actor": actor, "target": target}
    found = session_of(context).api.pages("/api/v1/audit", limit=limit, **chosen)
    emit_list(context, found, ("TIME", "ACTION", "ACTOR", "TARGET", "ADDRESS"), _entry_cells)


def _entry_cells(entry: dict[str, Any]) -> tuple[object, ...]:
    return moment(entry["created_at"]), entry["action"], entry["actor"], entry["target"], entry["ip"]
