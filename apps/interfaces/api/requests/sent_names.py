"""Field names as clients sent them: OpenAI's, ours or the ecosystem's. The domain has one name for each value."""

from collections.abc import Iterator
from contextlib import contextmanager

from apps.core.errors import DomainError

_DOMAIN = "hyperparameters."
_MAX_PARAM = 200
_COMPUTE = "compute."  # a job's object, whose members an estimate has at the top
_RENAMED = {"budget.max_cost": "budget.max_cost_usd"}
_OF_OPENAI = {
    "epochs": "n_epochs",
    "batch_size": "batch_size",
    "learning_rate_multiplier": "learning_rate_multiplier",
    "dpo_beta": "beta",
    "orpo_beta": "beta",
}
OF_LORA = {
    "lora_rank": "rank",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "target_modules",
    "use_dora": "use_dora",
    "use_rslora": "use_rslora",
}


@contextmanager
def as_sent(data: object) -> Iterator[None]:
    """Make an error about a value name the field that holds it in the body `data`."""
    try:
        yield
    except DomainError as error:
        error.param = _RENAMED.get(error.param or "", error.param)
        if isinstance(data, dict) and (member := (error.param or "").removeprefix(_COMPUTE)) in data:
            error.param = member
        name = (error.param or "").removeprefix(_DOMAIN)
        sent = _sent_name(name, data) if error.param != name else None
        if sent:
            error.param = sent[:_MAX_PARAM]
            for start in (f"{name} ", f"{name!r} "):
                if error.message.startswith(start):
                    error.message = f"'{sent}' {error.message.removeprefix(start)}"
        raise


def _sent_name(name: str, data: object) -> str | None:
    """Return the field that holds the value in the body. If several do, the last one counts."""
    if not isinstance(data, dict):
        return None
    method = data.get("method")
    kind = method.get("type", "supervised") if isinstance(method, dict) else None
    theirs, lora = _OF_OPENAI.get(name), OF_LORA.get(name)
    candidates = [("recipe", name)]
    candidates += [("lora", lora)] if lora else []
    candidates += [(f"method.{kind}.hyperparameters", theirs), ("hyperparameters", theirs)] if theirs else []
    for place, leaf in candidates:
        if _has(data, [*place.split("."), str(leaf)]):
            return f"{place}.{leaf}"
    return name if name in data else None


def _has(data: object, path: list[str]) -> bool:
    for step in path:
        if not isinstance(data, dict) or step not in data:
            return False
        data = data[step]
    return True
