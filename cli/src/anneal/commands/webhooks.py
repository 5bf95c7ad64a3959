"""`anneal webhooks`: send events of the organization to a program, and see what arrived."""

from typing import Annotated, Any

import typer

from anneal.api import item_path
from anneal.output import AsJson, Limit, emit, emit_list, emit_secret, moment
from anneal.session import session_of

app = typer.Typer(no_args_is_help=True, help="Send events to your program, and see what arrived.")
_WEBHOOKS = "/api/v1/webhooks"

WebhookId = Annotated[str, typer.Argument(metavar="WEBHOOK", help="The id of a webhook, we_….")]


@app.command("list")
def list_webhooks(context: typer.Context, as_json: AsJson = False) -> None:
    """List webhooks, oldest first."""
    head = ("ID", "NAME", "URL", "FORMAT", "STATUS", "EVENTS", "CREATED")
    emit_list(context, session_of(context).api.get(_WEBHOOKS)["data"], head, _cells)


def _cells(webhook: dict[str, Any]) -> tuple[object, ...]:
    status = ": ".join(filter(None, (webhook["status"], webhook["disabled_because"])))
    events = ", ".join(webhook["event_types"])
    return (
        webhook["id"],
        webhook["name"],
        webhook["url"],
        webhook["format"],
        status,
        events,
        moment(webhook["created_at"]),
    )


@app.command()
def create(
    context: typer.Context,
    url: Annotated[str, typer.Argument(help="Where the events are sent: an https address.")],
    event: Annotated[list[str], typer.Option(help="A type of event, such as batch.completed; may be given again.")],
    format_: Annotated[str, typer.Option("--format", help="standard, or slack for Slack's webhooks.")] = "standard",
    name: Annotated[str, typer.Option(help="Shown in lists of webhooks.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create a webhook and print the secret of its signatures, which is shown only now."""
    body = {"url": url, "event_types": event, "format": format_, "name": name}
    emit_secret(context, session_of(context).api.post_once(_WEBHOOKS, body))


@app.command()
def rotate(context: typer.Context, webhook: WebhookId, as_json: AsJson = False) -> None:
    """Replace the secret and print the new one. For 24 hours, deliveries are signed with the old one as well."""
    emit_secret(context, session_of(context).api.post_once(f"{item_path(_WEBHOOKS, webhook)}/rotate"))


@app.command()
def pause(context: typer.Context, webhook: WebhookId, as_json: AsJson = False) -> None:
    """Pause a webhook. Events that happen meanwhile are not sent later."""
    _set_paused(context, webhook, is_paused=True)


@app.command()
def resume(context: typer.Context, webhook: WebhookId, as_json: AsJson = False) -> None:
    """Resume a webhook that was paused, or that failures disabled."""
    _set_paused(context, webhook, is_paused=False)


def _set_paused(context: typer.Context, webhook: str, *, is_paused: bool) -> None:
    found = session_of(context).api.post(item_path(_WEBHOOKS, webhook), {"is_paused": is_paused})
    emit(context, found, f"{found['id']} is {found['status']}.")


@app.command()
def delete(context: typer.Context, webhook: WebhookId, as_json: AsJson = False) -> None:
    """Delete a webhook with its delivery log."""
    found: dict[str, Any] = session_of(context).api.delete(item_path(_WEBHOOKS, webhook))
    emit(context, found, f"{found['id']} is deleted.")


@app.command("test")
def send_test(context: typer.Context, webhook: WebhookId, as_json: AsJson = False) -> None:
    """Send an event of the type webhook.test."""
    _sent(context, webhook, f"{item_path(_WEBHOOKS, webhook)}/test")


@app.command()
def deliveries(context: typer.Context, webhook: WebhookId, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List the deliveries of a webhook, newest first, with the answer to each."""
    head = ("ID", "EVENT", "STATUS", "ATTEMPTS", "ANSWER", "LAST ATTEMPT")
    found = session_of(context).api.pages(f"{item_path(_WEBHOOKS, webhook)}/deliveries", limit=limit)
    emit_list(context, found, head, _delivery_cells)


def _delivery_cells(delivery: dict[str, Any]) -> tuple[object, ...]:
    answer = delivery["error"] or delivery["response_code"]
    when = moment(delivery["attempted_at"])
    return delivery["id"], delivery["event_type"], delivery["status"], delivery["attempts"], answer, when


@app.command()
def replay(
    context: typer.Context,
    webhook: WebhookId,
    delivery: Annotated[str, typer.Argument(metavar="DELIVERY", help="The id of a delivery that has ended.")],
    as_json: AsJson = False,
) -> None:
    """Send an event of the log again, with the same webhook-id."""
    _sent(context, webhook, f"{item_path(f'{item_path(_WEBHOOKS, webhook)}/deliveries', delivery)}/replay")


def _sent(context: typer.Context, webhook: str, path: str) -> None:
    found = session_of(context).api.post_once(path)
    text = f"{found['id']} is {found['status']}. See its answer with `anneal webhooks deliveries {webhook}`."
    emit(context, found, text)
