"""The parity certificate with a real engine: numbers of vLLM beside those of PEFT, for good and for exchanged weights.

Measured here, vLLM 0.32.0 on a CPU against PEFT 0.21 in bfloat16, in nats a token: the base differs by 0.013, a weak
adapter (0.04 from its base) by 0.014, a strong one (1.1 from its base) by 0.020; exchanged weights by 1.1.
"""

import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
import pytest

from apps.contracts.adapter_files import ALL_LINEAR, CONFIG_FILE
from apps.contracts.hyperparameters import Hyperparameters
from apps.contracts.parity import PARITY_FILE, TOLERANCE, ParityProbe
from apps.contracts.runs import BaseModelRef, DatasetRef, Manifest, RunSpec
from apps.contracts.serving import LoadState, ObservedAdapter
from gpu_workers.common.artifacts import seal_folder
from gpu_workers.train.after.publish import examine
from tests.support.engines.adapters import make_arrays, make_files
from tests.support.engines.control_plane import ControlPlane
from tests.support.engines.models import BASE_MODEL, name_of
from tests.support.engines.replica import Replica

RANK = 8
QUESTIONS = ("My card was taken twice", "How do I change my PIN", "Where is my refund", "The app does not open")

STRONG, WEAK, SWAPPED, ZERO = (name_of(word) for word in ("strong", "weak", "swapped", "zero"))
RESHAPED, BROKEN, PLAIN = (name_of(word) for word in ("template", "broken", "plain"))
ROOTED, UNROOTED, NARROW, WIDE = (name_of(word) for word in ("rooted", "unrooted", "narrow", "wide"))
RANKS = {NARROW: 12, WIDE: 16}


def publish_files(
    work_dir: Path,
    *,
    seed: int,
    size: float,
    rank: int = RANK,
    modules: Sequence[str] = ALL_LINEAR,
    dtype: str = "BF16",
    **config: object,
) -> dict[str, bytes]:
    """Return an adapter's files with the probe that the publishing child wrote for them."""
    work_dir.mkdir()
    rows = [
        {"messages": [{"role": "user", "content": f"{question} {n}"}, {"role": "assistant", "content": f"intent {n}"}]}
        for n, question in enumerate(QUESTIONS * 4)
    ]
    (work_dir / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    temporary = work_dir / "tmp"
    temporary.mkdir()
    arrays = make_arrays(BASE_MODEL, rank=rank, seed=seed, size=size, modules=modules)
    for name, content in make_files(arrays, rank=rank, dtype=dtype, target_modules=list(modules), **config).items():
        (temporary / name).write_bytes(content)
    seal_folder(
        temporary,
        work_dir / "adapter",
        lambda files: Manifest(kind="adapter", run_id="run_1", attempt=1, step=1, files=files),
    )
    spec = RunSpec(
        run_id="run_1",
        job_id="ftjob-1",
        organization_id="org_1",
        attempt=1,
        base_model=BaseModelRef(id="bm", name="demo", path=str(BASE_MODEL)),
        training=DatasetRef(id="ds", sha256="", bytes=1, rows=len(rows), url=""),
        hyperparameters=Hyperparameters(lora_rank=rank, lora_alpha=2 * rank, max_length=256),
    )
    sealed = examine(work_dir, spec, BASE_MODEL).sealed
    assert sealed
    folder = work_dir / sealed.folder
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "manifest.json"}


def other_template(probe: bytes) -> bytes:
    """The probe of a trainer that wrote chats in another way."""
    found = msgspec.json.decode(probe, type=ParityProbe)
    assert found.chat is not None
    chat = msgspec.structs.replace(found.chat, token_ids=(*found.chat.token_ids, 5))
    return msgspec.json.encode(msgspec.structs.replace(found, chat=chat))


def without_root(config: bytes) -> bytes:
    """The configuration whose alpha is divided by the rank, as by an engine that does not know rsLoRA."""
    return json.dumps(json.loads(config) | {"use_rslora": False}).encode()


@pytest.fixture(scope="module")
def replica(started: Replica, plane: ControlPlane, tmp_path_factory: pytest.TempPathFactory) -> Replica:
    """The replica with these adapters."""
    folder = tmp_path_factory.mktemp("parity")
    strong = publish_files(folder / "strong", seed=1, size=0.1)
    weak = publish_files(folder / "weak", seed=2, size=0.02)
    zero = publish_files(folder / "zero", seed=3, size=0.0)
    rooted = publish_files(folder / "rooted", seed=4, size=0.02, use_rslora=True)
    files = {
        STRONG: strong,
        WEAK: weak,
        SWAPPED: weak | {PARITY_FILE: strong[PARITY_FILE]},  # the certificate of other weights
        ZERO: zero,
        RESHAPED: weak | {PARITY_FILE: other_template(weak[PARITY_FILE])},
        BROKEN: weak | {PARITY_FILE: b'{"rows": 7}'},
        PLAIN: {name: content for name, content in weak.items() if name != PARITY_FILE},
        ROOTED: rooted,
        UNROOTED: rooted | {CONFIG_FILE: without_root(rooted[CONFIG_FILE])},
        NARROW: publish_files(folder / "narrow", seed=5, size=0.1, rank=12, modules=("q_proj", "v_proj")),
        WIDE: publish_files(folder / "wide", seed=6, size=0.03, rank=16, dtype="F32", lora_alpha=20),
    }
    started.serve(*(plane.describe(name, data, rank=RANKS.get(name, RANK)) for name, data in files.items()))
    return started


def seen(replica: Replica, name: str) -> ObservedAdapter:
    row = replica.plane.get_adapter(name)
    assert row is not None
    return row


@pytest.mark.slow
@pytest.mark.parametrize("name", [STRONG, WEAK, ROOTED, NARROW, WIDE])
def test_an_adapter_that_gives_the_trainers_numbers_is_certified(replica: Replica, name: str) -> None:
    """Kinds of adapters: strong or weak, rsLoRA, some of the modules, other ranks and scales, 32 bits."""
    row = seen(replica, name)

    assert row.state is LoadState.LOADED
    assert row.parity is not None and row.parity.tokens > 100
    assert row.parity.tuned_difference < TOLERANCE / 2  # room for noisier machines
    assert row.parity.effect > 2 * row.parity.tuned_difference
    assert row.parity.is_template_equal is True
    assert row.parity.engine.startswith("vllm ")


@pytest.mark.slow
@pytest.mark.parametrize("name", [SWAPPED, UNROOTED])
def test_an_adapter_whose_weights_or_scale_were_exchanged_is_refused(replica: Replica, name: str) -> None:
    row = seen(replica, name)

    assert row.state is LoadState.REJECTED and "not the weights that were trained" in row.reason
    assert name not in replica.list_loaded()
    assert replica.complete(name).status_code == 404


def test_an_adapter_that_changes_nothing_is_refused(replica: Replica) -> None:
    row = seen(replica, ZERO)

    assert row.state is LoadState.REJECTED and "exactly as the base model" in row.reason
    assert ZERO not in replica.list_loaded()


def test_another_chat_template_than_the_trainers_is_refused(replica: Replica) -> None:
    row = seen(replica, RESHAPED)

    assert row.state is LoadState.REJECTED and "template" in row.reason


def test_a_probe_that_cannot_be_read_is_refused(replica: Replica) -> None:
    row = seen(replica, BROKEN)

    assert row.state is LoadState.REJECTED and "cannot be read" in row.reason


def test_an_adapter_made_without_a_probe_is_served_without_a_certificate(replica: Replica) -> None:
    row = seen(replica, PLAIN)

    assert (row.state, row.parity) == (LoadState.LOADED, None)
