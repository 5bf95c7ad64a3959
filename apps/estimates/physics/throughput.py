"""Measured training speeds: a pool's own probe, or a published row."""

from functools import cached_property

import msgspec

from apps.estimates.models.architectures import Architecture, active_linear_parameter_count
from apps.estimates.physics.plans import DEFAULT_TARGET_MODULES


class SpeedSource(msgspec.Struct, frozen=True, kw_only=True):
    """The origin of a speed, shown beside it. `kind` is "probe", "published", "physics" (computed) or "none"."""

    kind: str
    text: str
    url: str | None = None
    measured_at: str | None = None


class ProbeRow(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One measured training speed: from a pool's own probe, or published elsewhere with a URL.

    `tokens_per_second` counts real tokens of the whole micro-step, `tokens_per_micro_step` those in one.
    `fixed_seconds_per_micro_step` is the part of its time that does not grow with tokens, if measured. `waited_share`
    is the share of the measurement spent waiting for a core; the speed excludes it. `trained_share` of the tokens were
    trained.
    """

    gpu_key: str
    architecture: Architecture
    method: str
    tokens_per_second: float
    tokens_per_micro_step: int
    sequence_length: int
    source: SpeedSource
    tokens_per_second_low: float | None = None
    tokens_per_second_high: float | None = None
    lora_rank: int = 16
    target_modules: tuple[str, ...] = DEFAULT_TARGET_MODULES
    gradient_checkpointing: bool = False
    fixed_seconds_per_micro_step: float = 0.0
    waited_share: float = 0.0
    trained_share: float = 1.0
    gpu_count: int = 1
    conditions: str = ""

    @cached_property
    def active_parameter_count(self) -> int:
        """Return the parameters of the measured model that one token passes through."""
        return active_linear_parameter_count(self.architecture)
