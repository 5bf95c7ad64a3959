"""The bodies of requests, from the options of the command line."""

import json
from contextlib import suppress
from dataclasses import dataclass
from decimal import Decimal
from typing import IO, Annotated, Any

import typer

from anneal.texts import STANDARD_INPUT, is_file, text_of

AUTO = "auto"

Body = Annotated[
    typer.FileBinaryRead | None,
    typer.Option(metavar="FILE", help="The request as JSON; - reads standard input. Options take precedence."),
]
Metadata = Annotated[list[str] | None, typer.Option(help="A label of yours: team=support; may be given again.")]


@dataclass(frozen=True, kw_only=True)
class JobOptions:
    """Options of `anneal jobs create`; None and empty lists were not given."""

    model: str | None
    file: str | None
    validation_file: str | None
    method: str | None
    suffix: str | None
    epochs: str | None
    batch_size: str | None
    rank: int | None
    quantization: str | None
    settings: list[str]
    metadata: list[str]
    exports: list[str]
    pool: str | None
    nodes: int | None
    max_cost: str | None
    seed: int | None

    def request(self, body: dict[str, Any]) -> dict[str, Any]:
        """Return the body with the options in it. Raises BadParameter if the file is missing or not uploaded."""
        max_cost = None if self.max_cost is None else str(amount_of(self.max_cost))
        given = {
            "model": self.model,
            "training_file": self.file,
            "validation_file": self.validation_file,
            "suffix": self.suffix,
            "seed": self.seed,
            "quantization": self.quantization,
            "exports": self.exports or None,
            "metadata": metadata_of(body, self.metadata),
            "recipe": object_of(body, "recipe") | settings_of(self.settings) or None,
            "lora": object_of(body, "lora") | present(rank=self.rank) or None,
            "compute": object_of(body, "compute") | present(pool=self.pool, node_count=self.nodes) or None,
            "budget": object_of(body, "budget") | present(max_cost_usd=max_cost) or None,
            "method": self._method(body),
        }
        request = body | present(**given)
        if "training_file" not in request:
            raise typer.BadParameter("This option is required.", param_hint="--file")
        for name, option in (("training_file", "--file"), ("validation_file", "--validation-file")):
            if is_file(file := str(request.get(name) or "")):
                text = f"{file} is a file here. Give the id that `anneal files upload {file}` prints."
                raise typer.BadParameter(text, param_hint=option)
        return request

    def _method(self, body: dict[str, Any]) -> dict[str, Any] | None:
        chosen = present(n_epochs=_number(self.epochs, "--epochs"), batch_size=_number(self.batch_size, "--batch-size"))
        if self.method is None and not chosen:
            return None
        sent = object_of(body, "method")
        kind = self.method or str(sent.get("type", "supervised"))
        before = object_of(object_of(sent, kind), "hyperparameters")
        return {"type": kind, kind: {"hyperparameters": before | chosen}}


def budget_of(request: dict[str, Any], *, shown_usd: str | None) -> dict[str, Any]:
    """Return the request's budget with the maximum that was shown: the job is refused if it is higher by now."""
    return object_of(request, "budget") | present(quoted_max_usd=shown_usd)


def read_body(file: IO[bytes] | None) -> dict[str, Any]:
    """Return the JSON object of a file, empty without one. Raises BadParameter, or Failure if it is no text."""
    if file is None:
        return {}
    name = str(getattr(file, "name", "-"))
    text = text_of(file.read(), STANDARD_INPUT if name in ("-", "<stdin>") else name)
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"The file is not JSON: {error}.", param_hint="--body") from error
    if not isinstance(found, dict):
        raise typer.BadParameter("The file holds no JSON object.", param_hint="--body")
    return found


def object_of(body: dict[str, Any], name: str) -> dict[str, Any]:
    """Return a member of the body, empty if it is missing or null. Raises BadParameter for anything but an object."""
    found = body.get(name)
    if found is None or isinstance(found, dict):
        return found or {}
    raise typer.BadParameter(f"{name!r} must be an object.", param_hint="--body")


def present(**values: object) -> dict[str, Any]:
    return {name: value for name, value in values.items() if value is not None}


def metadata_of(body: dict[str, Any], words: list[str] | None) -> dict[str, Any] | None:
    """Return the labels of a request: those of the body, and those of the option."""
    return object_of(body, "metadata") | pairs_of(words or [], "--metadata") or None


def amount_of(text: str, option: str = "--max-cost") -> Decimal:
    """Return the dollars of an option. Raises BadParameter."""
    with suppress(ArithmeticError):
        amount = Decimal(text.removeprefix("$"))
        if amount.is_finite():
            return amount
    raise typer.BadParameter(f"{text!r} is not an amount in dollars. Write it like 2.50.", param_hint=option)


def _number(text: str | None, option: str) -> int | str | None:
    if text is None or text == AUTO:
        return text
    try:
        return int(text)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is neither a whole number nor auto.", param_hint=option) from None


def pairs_of(words: list[str], option: str) -> dict[str, str]:
    return dict(pair_of(word, option) for word in words)


def pair_of(word: str, option: str) -> tuple[str, str]:
    name, sign, value = word.partition("=")
    if not (name and sign):
        raise typer.BadParameter(f"{name!r} has no value: write name=value.", param_hint=option)
    return name, value


def settings_of(words: list[str]) -> dict[str, Any]:
    """Return settings of the recipe. A value that is JSON, such as a number, true or null, is sent as that."""
    return {name: _value(text) for name, text in pairs_of(words, "--set").items()}


def _value(text: str) -> object:
    try:
        return json.loads(text)
    except ValueError:
        return text
