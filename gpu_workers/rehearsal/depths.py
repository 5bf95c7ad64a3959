"""Models with few layers of each kind, and the memory of the whole model, extrapolated from two such depths."""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from transformers import AutoConfig

from gpu_workers.rehearsal.trace import Trace

# Settings that say which layers are of another kind, besides lists with one entry a layer.
_DENSE_FIRST = "first_k_dense_replace"
_DENSE_ONLY = "mlp_only_layers"


class Depths(NamedTuple):
    """`base` is the shallow configuration; `deeper` adds one layer of a kind, of which the model has `missing` more."""

    base: dict[str, object]
    deeper: tuple[tuple[dict[str, object], int], ...]


def depths_of(config: Mapping[str, object]) -> Depths:
    """Return the shallow configurations of a model: its first and its last layer, and one of each other kind."""
    whole = AutoConfig.for_model(**config).to_dict()
    count = int(whole["num_hidden_layers"])
    kinds = [_kind(whole, index, count) for index in range(count)]
    if count < 3:
        return Depths(_cut(whole, range(count), count), ())
    kept = [0, count - 1]
    for index, kind in enumerate(kinds):
        if kind not in [kinds[each] for each in kept]:
            kept.append(index)
    kept.sort()
    found = []
    for kind in dict.fromkeys(kinds):
        missing = kinds.count(kind) - sum(kinds[each] == kind for each in kept)
        if missing:
            # Its place is after the first layer, so that every kind's own moment is counted near the last layer.
            added = next(index for index in range(1, count) if kinds[index] == kind)
            found.append((_cut(whole, [kept[0], added, *kept[1:]], count), missing))
    return Depths(_cut(whole, kept, count), tuple(found))


def whole_trace(depths: Depths, trace: Callable[[Mapping[str, object]], Trace]) -> Trace:
    """Trace the shallow configurations and extrapolate each moment to the whole model."""
    base = trace(depths.base)
    peaks, resting, weights = {key: float(value) for key, value in base.peaks.items()}, base.resting, base.weights
    for config, missing in depths.deeper:
        deeper = trace(config)
        for key, value in base.peaks.items():
            peaks[key] += missing * (deeper.peaks.get(key, value) - value)
        resting += missing * (deeper.resting - base.resting)
        weights += missing * (deeper.weights - base.weights)
    return Trace({key: round(value) for key, value in peaks.items()}, resting, weights)


def _kind(config: Mapping[str, object], index: int, count: int) -> tuple[object, ...]:
    lists = [value[index] for value in config.values() if isinstance(value, list) and len(value) == count]
    dense_first = config.get(_DENSE_FIRST)
    dense_only = config.get(_DENSE_ONLY)
    return (
        *map(str, lists),
        isinstance(dense_first, int) and index < dense_first,
        isinstance(dense_only, list) and index in dense_only,
    )


def _cut(config: Mapping[str, object], kept: Sequence[int], count: int) -> dict[str, object]:
    """Return the configuration with only these layers."""
    cut = {
        key: [value[index] for index in kept] if isinstance(value, list) and len(value) == count else value
        for key, value in config.items()
    }
    if isinstance(dense := config.get(_DENSE_FIRST), int):
        cut[_DENSE_FIRST] = sum(index < dense for index in kept)
    if isinstance(dense := config.get(_DENSE_ONLY), list) and len(dense) != count:
        cut[_DENSE_ONLY] = [place for place, index in enumerate(kept) if index in dense]
    return cut | {"num_hidden_layers": len(kept)}
