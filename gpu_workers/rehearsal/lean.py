"""A process that only traces imports this first. The libraries then leave out 150 megabytes that it never uses.

torch, TRL and transformers import these packages if they are installed. bitsandbytes compiles some operators of CPUs,
which loads torch's compiler; a trace runs their fake kernels.
"""

import sys
from collections.abc import Callable

for _name in ("mistral_common", "pynvml", "redis", "wandb"):
    sys.modules[_name] = None  # type: ignore[assignment]

import torch  # noqa: E402


def _not_compiled(function: Callable[..., object] | None = None, **_: object) -> object:
    return function or _not_compiled


torch.compile = _not_compiled
