"""What the one replica of these tests serves, and questions to its engine."""

import numpy as np

from apps.contracts.serving import DesiredAdapter
from tests.support.engines.adapters import make_arrays, make_files
from tests.support.engines.control_plane import ControlPlane
from tests.support.engines.models import BASE_MODEL, name_of
from tests.support.engines.replica import Replica

GOOD, OTHER, THIRD = name_of("good"), name_of("other"), name_of("third")
ENDLESS = {"max_tokens": 480, "logit_bias": {"1": -100}}  # 1 ends the text
NAN, BOMB, PREFIX, NOOP = name_of("nan"), name_of("bomb"), name_of("prefix"), name_of("noop")


def make_adapters(plane: ControlPlane) -> dict[str, DesiredAdapter]:
    """Publish three good adapters and one of each bad kind."""
    poisoned = make_arrays(BASE_MODEL)
    next(iter(poisoned.values())).flat[3] = np.nan
    misnamed = {
        name.replace("model.model.", "model.language_model.model."): a for name, a in make_arrays(BASE_MODEL).items()
    }
    idle = {name: a * 0 if ".lora_B." in name else a for name, a in make_arrays(BASE_MODEL).items()}
    files = {
        GOOD: make_files(make_arrays(BASE_MODEL, seed=1)),
        OTHER: make_files(make_arrays(BASE_MODEL, seed=2)),
        THIRD: make_files(make_arrays(BASE_MODEL, seed=3)),
        NAN: make_files(poisoned),
        BOMB: make_files(make_arrays(BASE_MODEL), lora_alpha=1e9),
        PREFIX: make_files(misnamed),
        NOOP: make_files(idle),
        "text": make_files(make_arrays(BASE_MODEL, seed=4)),
    }
    return {name: plane.describe(name, data) for name, data in files.items()}


def count(replica: Replica, name: str) -> float:
    """Return one of the engine's own series, added up."""
    lines = replica.engine_http.get("/metrics").text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(f"vllm:{name}{{"))
