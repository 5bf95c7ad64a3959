"""`anneal models`: list models, download, deploy and delete fine-tuned ones, and move aliases."""

from pathlib import Path
from typing import Annotated, Any
from urllib.parse import quote

import typer

from anneal.api import Api, item_path, model_path
from anneal.failures import ExitCode, Failure
from anneal.output import (
    AsJson,
    Limit,
    SureToDelete,
    Yes,
    ask_secret,
    confirm_deletion,
    confirm_price,
    counted,
    emit,
    emit_list,
    moment,
    notice,
    size,
    table,
)
from anneal.session import session_of
from anneal.transfers import download

app = typer.Typer(no_args_is_help=True, help="List, download and deploy models.")
_ALIASES, _MOST_ALIASES = "/api/v1/aliases", 10_000

TunedModel = Annotated[str, typer.Argument(help="The name of a fine-tuned model, ft:….")]


@app.command("list")
def list_models(context: typer.Context, as_json: AsJson = False) -> None:
    """List base models, your fine-tuned models and aliases."""
    found = session_of(context).api.get("/v1/models")
    rows = (
        (model["id"], model.get("alias_of") or model.get("parent"), model.get("status"), moment(model["created"]))
        for model in found["data"]
    )
    emit(context, found, lambda: table(("MODEL", "MADE FROM", "STATUS", "CREATED"), rows))


@app.command()
def pull(
    context: typer.Context,
    model: TunedModel,
    to: Annotated[Path | None, typer.Option(help="The folder. By default, it has the model's name.")] = None,
    export: Annotated[str | None, typer.Option(help="merged_16bit or gguf, if it was made.")] = None,
    as_json: AsJson = False,
) -> None:
    """Download the files of a model and check the SHA-256 of each.

    Run the same command again after an interruption: it continues, and skips files that are there already.
    """
    api = session_of(context).api
    listed = api.get(f"{model_path(model, is_own=True)}/files")["data"]
    wanted = [file for file in listed if file["export"] == export]
    if not wanted:
        names = ", ".join(sorted({file["export"] for file in listed if file["export"]})) or "none"
        raise Failure(f"{model} has no files of the export {export}. Its exports: {names}.", ExitCode.NOT_FOUND)
    folder = to or Path(model.replace(":", "-").replace("/", "-"))
    try:
        files = [_pulled(api, model, file, folder) for file in wanted]
    except KeyboardInterrupt:
        notice("The download stopped. Run the same command again to continue.")
        raise
    fetched = sum(file["is_new"] for file in files)
    emit(
        context,
        {"object": "model.pull", "model": model, "folder": str(folder), "files": files},
        f"{folder} has {counted(len(files), 'file')}, {size(sum(file['bytes'] for file in files))}: "
        f"{fetched} downloaded now. All SHA-256 hashes match.",
    )


@app.command()
def convert(
    context: typer.Context,
    model: TunedModel,
    to: Annotated[str, typer.Option(help="merged_16bit or gguf.")],
    is_cancelled: Annotated[bool, typer.Option("--cancel", help="Cancel the order, while no trainer has it.")] = False,
    yes: Yes = False,
    as_json: AsJson = False,
) -> None:
    """Order another form of a finished model. It shows the price, and asks before it orders.

    Run the same command again to check its progress. After a failed order, it orders again.
    """
    api, address = session_of(context).api, f"{model_path(model, is_own=True)}/conversions"
    forms = {form["kind"]: form for form in api.get(address)["data"]}
    if to not in forms:
        raise Failure(f"A model is converted to {' or '.join(forms)}, not to {to}.", ExitCode.USAGE)
    found = forms[to]
    if is_cancelled:
        if found["id"] is None:
            raise Failure(f"{model} was not ordered as {to}.", ExitCode.REFUSED)
        found = api.post(f"{item_path(address, found['id'])}/cancel")
    elif found["status"] not in ("waiting", "running", "succeeded"):
        if refusal := found["refusal"]:
            raise Failure(refusal["message"], ExitCode.REFUSED, details=refusal)
        confirm_price(found["price_usd"], f"Convert to {to}?", is_accepted=yes)
        found = api.post_once(address, {"kind": to, "quoted_max_usd": found["price_usd"]})
    emit(context, found, _conversion_text(found))


@app.command()
def push(
    context: typer.Context,
    folder: Annotated[
        Path, typer.Argument(exists=True, file_okay=False, help="The folder that PEFT's save_pretrained wrote.")
    ],
    name: Annotated[str, typer.Option(help="Part of the model's name, such as support.")],
    base_model: Annotated[
        str | None, typer.Option(help="The base model's name here, if the configuration names another place.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a LoRA adapter that was trained elsewhere, and serve it."""
    config, weights = folder / "adapter_config.json", folder / "adapter_model.safetensors"
    if missing := [path.name for path in (config, weights) if not path.is_file()]:
        raise Failure(f"{folder} has no {' and no '.join(missing)}.", ExitCode.LOCAL)
    files = {"adapter_config": (config.name, config.read_bytes()), "weights": (weights.name, weights.read_bytes())}
    fields = {"name": name} | ({"base_model": base_model} if base_model else {})
    found = session_of(context).api.post_once("/api/v1/adapters", files=files, data=fields)
    emit(context, found, f"{found['model']} is uploaded. A trainer examines it, and then an engine tries it.")


@app.command()
def deploy(
    context: typer.Context,
    model: TunedModel,
    is_stopped: Annotated[bool, typer.Option("--stop", help="Stop serving it.")] = False,
    as_json: AsJson = False,
) -> None:
    """Start serving a fine-tuned model, or stop it."""
    address = f"{model_path(model, is_own=True)}/serving"
    found = session_of(context).api.post_once(address, {"is_served": not is_stopped})
    emit(context, found, f"{model} is {found['state']}. {found['reason'] or ''}".strip())


@app.command()
def alias(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="The name that stays while versions change, such as production.")],
    model: TunedModel,
    canary: Annotated[int, typer.Option(min=0, max=99, help="Send only this percentage of the requests to it.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Point an alias at a version of a model."""
    body = {"name": name, "version": model, "canary_percent": canary}
    found = session_of(context).api.post_once(_ALIASES, body)
    share = f", and sends {canary} % of its requests to {found['canary_version']}" if canary else ""
    emit(context, found, f"{found['model']} now points to {found['version']}{share}.")


@app.command()
def rollback(
    context: typer.Context,
    name: Annotated[str, typer.Argument(help="An alias such as production, or its whole name, ft:….")],
    as_json: AsJson = False,
) -> None:
    """End the canary of an alias at once. Without one, point it at the version before."""
    api = session_of(context).api
    found = api.post_once(f"{item_path(_ALIASES, _alias_named(api, name)['id'])}/rollback")
    emit(context, found, f"{found['model']} points to {found['version']}.")


def _alias_named(api: Api, name: str) -> dict[str, Any]:
    """Return the alias with this short or whole name. Raises Failure if there is none, or are several."""
    chosen = {"model": name} if ":" in name else {"q": name}
    aliases = api.pages(_ALIASES, limit=_MOST_ALIASES, **chosen)
    named = [each for each in aliases if name in (each["name"], each["model"])]
    if not named:
        raise Failure(f"There is no alias {name}.", ExitCode.NOT_FOUND)
    if len(named) > 1:
        whole = ", ".join(each["model"] for each in named)
        raise Failure(f"There are several aliases {name}. Give the whole name: {whole}.", ExitCode.USAGE)
    return named[0]


@app.command()
def delete(context: typer.Context, model: TunedModel, yes: SureToDelete = False, as_json: AsJson = False) -> None:
    """Stop serving a fine-tuned model and delete its weights. It asks first. Its name is never used again."""
    confirm_deletion(model, is_accepted=yes)
    found = session_of(context).api.delete(model_path(model))
    emit(context, found, f"{found['id']} is deleted.")


@app.command()
def publish(
    context: typer.Context,
    model: TunedModel,
    to: Annotated[str, typer.Option(help="The repository, owner/name. If missing, a private one is created.")],
    export: Annotated[str, typer.Option(help="merged_16bit or gguf, if it was made. By default, the adapter.")] = "",
    token: Annotated[str | None, typer.Option(envvar="HF_TOKEN", help="Your token of the hub.")] = None,
    as_json: AsJson = False,
) -> None:
    """Push a model to your own repository on the hub. Without HF_TOKEN, it asks for your token of the hub.

    Run `anneal models publications` to check its progress.
    """
    given = token.strip() if token else ask_secret("Token of the hub", variable="HF_TOKEN")
    body = {"repository": to, "token": given, "export": export}
    found = session_of(context).api.post_once(f"{model_path(model, is_own=True)}/pushes", body)
    emit(context, found, f"{model} will be pushed to {found['url']}. The token is erased when the push has ended.")


@app.command()
def publications(context: typer.Context, model: TunedModel, limit: Limit = 20, as_json: AsJson = False) -> None:
    """List the pushes of a model to the hub, newest first."""
    pushes = session_of(context).api.pages(f"{model_path(model, is_own=True)}/pushes", limit=limit)
    emit_list(context, pushes, ("REPOSITORY", "EXPORT", "STATUS", "CREATED", "COMMIT OR PROBLEM"), _cells_of_push)


def _cells_of_push(push: dict[str, Any]) -> tuple[object, ...]:
    reached = push["commit"] or push["problem"]
    return push["repository"], push["export"], push["status"], moment(push["created_at"]), reached


def base_models(api: Api) -> list[str]:
    """Return the names of the base models."""
    return [model["id"] for model in api.get("/v1/models")["data"] if "context_length" in model]


def _conversion_text(found: dict[str, Any]) -> str:
    if found["status"] == "succeeded":
        return f"It is made. Download it with `anneal models pull {found['model']} --export {found['kind']}`."
    if found["status"] == "running":
        return "A trainer is making it."
    if found["status"] == "cancelled":
        return "The order is cancelled. You pay nothing."
    return "It is ordered and waits for an idle trainer."


def _pulled(api: Api, model: str, file: dict[str, Any], folder: Path) -> dict[str, Any]:
    target = folder / file["name"]
    if set(file["name"]) & set("/\\:") or file["name"] in (".", ".."):  # it must stay in the folder, on Windows too
        raise Failure(f"The server lists a file with the name {file['name']!r}.", ExitCode.REFUSED)
    is_new = download(
        api,
        f"{model_path(model, is_own=True)}/files/{quote(file['name'])}",
        target,
        size=file["bytes"],
        sha256=file["sha256"],
        params={"export": file["export"]} if file["export"] else None,
    )
    return {"name": file["name"], "bytes": file["bytes"], "sha256": file["sha256"], "is_new": is_new}
