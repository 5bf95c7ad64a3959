"""`anneal login`, `logout` and `usage`."""

import sys
from typing import Annotated

import httpx
import typer

from anneal.api import foreign_answer
from anneal.commands.projects import show_project
from anneal.output import AsJson, ask_secret, dollars, emit, fields, notice
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
