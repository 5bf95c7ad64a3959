"""`anneal keys`: API keys, and the service accounts that own those of programs."""

import time
from typing import Annotated, Any

import typer

from anneal.api import item_path
from anneal.commands.requests import present
from anneal.output import AsJson, Limit, SureToDelete, confirm_deletion, emit, emit_list, emit_secret, moment
from anneal.session import session_of

app = typer.Typer(no_args_is_help=True, help="List, create, rotate and revoke API keys.")
accounts = typer.Typer(no_args_is_help=True, help="List, create and delete service accounts, which own keys.")
app.add_typer(accounts, name="accounts")
_KEYS, _ACCOUNTS = "/api/v1/keys", "/api/v1/service-accounts"
_DAY_SECONDS = 24 * 3600

KeyId = Annotated[str, typer.Argument(help="The id of a key, from `anneal keys list`.")]


@app.command("list")
def list_keys(
    context: typer.Context,
    limit: Limit = 20,
    status: Annotated[str | None, typer.Option(help="active, expired or revoked.")] = None,
    as_json: AsJson = False,
) -> None:
    """List API keys, newest first."""
    head = ("ID", "NAME", "BEGINS WITH", "STATUS", "SCOPES", "LAST USED", "EXPIRES")
    session = session_of(context)
    found = session.api.pages(_KEYS, limit=limit, status=status, project=session.project)
    emit_list(context, found, head, _cells)


def _cells(key: dict[str, Any]) -> tuple[object, ...]:
    return (
        key["id"], key["name"], key["prefix"], key["status"], ", ".join(key["scopes"]),
        moment(key["last_used_at"]), moment(key["expires_at"]),
    )  # fmt: skip


@app.command()
def create(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="What the key is for.")],
    scope: Annotated[
        list[str], typer.Option(help="What the key may do: view, inference, dataset.write …; may be given again.")
    ],
    days: Annotated[
        int | None, typer.Option(min=1, max=3650, help="The key expires after this number of days.")
    ] = None,
    requests_per_minute: Annotated[int | None, typer.Option(min=1, help="Maximum requests a minute.")] = None,
    tokens_per_minute: Annotated[int | None, typer.Option(min=1, help="Maximum tokens a minute.")] = None,
    concurrent_requests: Annotated[int | None, typer.Option(min=1, help="Maximum requests at once.")] = None,
    service_account: Annotated[
        str | None, typer.Option(help="The id of a service account that owns the key; without it, you own it.")
    ] = None,
    project: Annotated[
        str | None, typer.Option(help="The id of the key's project; without it, that of your key.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Create an API key and print its secret, which is shown only now.

    The new key cannot do more, or live longer, than the key that you are signed in with.
    """
    body = {"name": name, "scopes": scope} | present(
        expires_at=None if days is None else int(time.time()) + days * _DAY_SECONDS,
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        concurrent_requests=concurrent_requests,
        project=project,
    )
    _issue(context, f"{item_path(_ACCOUNTS, service_account)}/keys" if service_account else _KEYS, body)


@app.command()
def rotate(
    context: typer.Context,
    key: KeyId,
    overlap_hours: Annotated[
        int,
        typer.Option(min=0, max=720, help="Hours that both keys work; 0 ends the old one now. Your own key needs 1."),
    ] = 24,
    as_json: AsJson = False,
) -> None:
    """Replace a key with a new one with the same permissions, and print its secret, which is shown only now."""
    _issue(context, f"{item_path(_KEYS, key)}/rotate", {"overlap_hours": overlap_hours})


@app.command()
def revoke(context: typer.Context, key: KeyId, as_json: AsJson = False) -> None:
    """Revoke a key at once. It never works again."""
    found: dict[str, Any] = session_of(context).api.delete(item_path(_KEYS, key))
    emit(context, found, f"{found['id']} is revoked.")


def _issue(context: typer.Context, path: str, body: dict[str, Any]) -> None:
    emit_secret(context, session_of(context).api.post_once(path, body))


# --- service accounts -------------------------------------------------------------------------------------------------


@accounts.command("list")
def list_accounts(context: typer.Context, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List service accounts, newest first."""
    found = session_of(context).api.pages(_ACCOUNTS, limit=limit)
    emit_list(context, found, ("ID", "NAME", "ROLE", "CREATED"), _account_cells)


def _account_cells(account: dict[str, Any]) -> tuple[object, ...]:
    return account["id"], account["name"], account["role"], moment(account["created_at"])


@accounts.command("create")
def create_account(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The program that acts with its keys, such as nightly.")],
    role: Annotated[str, typer.Option(help="viewer, member, admin or owner.")] = "member",
    as_json: AsJson = False,
) -> None:
    """Create a service account and print its id, for `anneal keys create --service-account`."""
    found = session_of(context).api.post_once(_ACCOUNTS, {"name": name, "role": role})
    emit(context, found, found["id"])


@accounts.command("delete")
def delete_account(
    context: typer.Context,
    account: Annotated[str, typer.Argument(metavar="ACCOUNT", help="The id of a service account.")],
    yes: SureToDelete = False,
    as_json: AsJson = False,
) -> None:
    """Delete a service account and revoke its keys. It asks first."""
    confirm_deletion(account, is_accepted=yes)
    found = session_of(context).api.delete(item_path(_ACCOUNTS, account))
    emit(context, found, f"{found['id']} is deleted. Its keys are revoked.")
