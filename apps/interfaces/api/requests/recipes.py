"""Names of methods and settings of a recipe in the API, shared by jobs and estimates."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from apps.contracts.hyperparameters import Method, Objective
from apps.core.errors import InvalidValue
from apps.finetuning.recipes.limits import LIMITS_OF_EVERY_MODEL, NOT_OFFERED, Limit, as_json
from apps.interfaces.api.requests.sent_names import OF_LORA


def _schema_of(limit: Limit) -> dict[str, object]:
    schema: dict[str, object]
    if limit.options:
        one: dict[str, object] = {"enum": list(limit.options)}
        schema = {"type": "array", "items": one} if limit.is_list else one
    else:
        schema = {
            "type": "integer" if limit.is_whole else "number", "minimum": limit.minimum, "maximum": limit.maximum,
        }  # fmt: skip
    return {"description": limit.text} | ({"anyOf": [schema, {"type": "null"}]} if limit.is_nullable else schema)


# The values are checked with the model at hand, which limits some further.
Recipe = Annotated[
    dict[str, Any],
    Meta(
        description="`GET /api/v1/models/{model}/limits` has the limits of each model, and of `max_length`.",
        extra_json_schema={
            "properties": {
                "method": {"enum": list(Method)},
                **{limit.name: _schema_of(limit) for limit in LIMITS_OF_EVERY_MODEL},
            }
        },
    ),
]


class Setting(NamedTuple):
    """A value of a recipe: its name there, and the field of the body that holds it."""

    name: str
    field: str
    value: object


class LoraChoice(msgspec.Struct, forbid_unknown_fields=True):
    rank: int | None = None
    alpha: int | None = None
    dropout: float | None = None
    target_modules: tuple[str, ...] | None = None
    use_dora: bool | None = None
    use_rslora: bool | None = None


def parse_method(quantization: str | None, method: object = None) -> Method | None:
    """Return the training method: the recipe's `method`, or the one of the quantization; None if neither names one.

    Raises InvalidValue.
    """
    if quantization not in (None, "none", "nf4"):
        raise InvalidValue("quantization must be 'nf4' (QLoRA), 'none' (LoRA), or left out.", param="quantization")
    if method is None:
        return {None: None, "none": Method.LORA, "nf4": Method.QLORA}[quantization]
    _require_offered(method, param="recipe.method")
    if method not in list(Method):
        raise InvalidValue(f"method must be one of {', '.join(Method)}.", param="recipe.method")
    if quantization == "nf4" and method != Method.QLORA:
        text = f"quantization 'nf4' is QLoRA, and recipe.method is '{method}': leave one of them out."
        raise InvalidValue(text, param="quantization")
    return Method(str(method))


def parse_objective(kind: str | None) -> Objective | None:
    """Return the objective that `method.type` asks for; None if the rows decide. Raises InvalidValue."""
    if kind is None:
        return None
    _require_offered(kind, param="method.type")
    if kind not in list(Objective):
        text = f"method.type '{kind[:40]}' is not offered here: use {', '.join(Objective)}."
        raise InvalidValue(text, param="method.type")
    return Objective(kind)


def _require_offered(name: object, *, param: str) -> None:
    if isinstance(name, str) and (reason := NOT_OFFERED.get(name.lower())):
        raise InvalidValue(reason, param=param)


def settings_of(lora: LoraChoice | None, recipe: Mapping[str, object]) -> Iterator[Setting]:
    """Yield the settings of `lora` and `recipe`, without the recipe's method."""
    for name, field in OF_LORA.items():
        yield Setting(name, f"lora.{field}", getattr(lora, field, None))
    for name, value in recipe.items():
        if name != "method":
            yield Setting(name, f"recipe.{name}", value)


def as_recipe(settings: Iterable[Setting]) -> dict[str, object]:
    """Return the value of each name; null and "auto" set none. Raises InvalidValue if two fields contradict each other.

    A learning rate and its multiplier contradict each other unless the multiplier is 1.
    """
    found: dict[str, Setting] = {}
    for setting in settings:
        if setting.value is None or setting.value == "auto":
            continue
        value = list(setting.value) if isinstance(setting.value, tuple) else setting.value
        other = found.get(setting.name)
        if other is not None and other.value != value:
            raise _contradiction(other, setting)
        found[setting.name] = setting._replace(value=value)
    rate, multiplier = found.get("learning_rate"), found.get("learning_rate_multiplier")
    if rate and multiplier and multiplier.value != 1:
        raise _contradiction(multiplier, rate)
    return {name: setting.value for name, setting in found.items()}


def _contradiction(one: Setting, other: Setting) -> InvalidValue:
    shown = [f"'{setting.field}' is {as_json(setting.value)[:60]}" for setting in (one, other)]
    return InvalidValue(f"{' and '.join(shown)}: leave one of them out.", param=other.field)
