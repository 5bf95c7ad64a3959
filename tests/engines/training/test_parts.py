"""The parts of the trainer, in this process."""

import json
import math
from pathlib import Path

import httpx
import msgspec
import pytest
import torch
from huggingface_hub.errors import GatedRepoError
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerState

from apps.contracts.chat import ChatRenderer, RowKind, parse_line_as, parse_row, split_lines
from apps.contracts.failures import FailureCode
from apps.contracts.runs import BaseModelRef, DatasetRef, Manifest, RunSpec
from apps.contracts.splits.split import Split, split_keys
from apps.contracts.worker_api import ProbeRequest
from gpu_workers.common.api_client import ApiClient
from gpu_workers.common.artifacts import BrokenArtifact, seal_folder
from gpu_workers.common.config import WorkerConfig
from gpu_workers.common.events import TRAINING_FILE, VALIDATION_FILE, EventTail, EventWriter
from gpu_workers.train.attempt import _adopted
from gpu_workers.train.data.encoding import PaddingCollator, encode_file, split_keys_of, split_off
from gpu_workers.train.data.selection import select_rows
from gpu_workers.train.failures import TrainingFailed
from gpu_workers.train.loop.callbacks import ProgressCallback, StopFlag
from gpu_workers.train.loop.checkpoint import IncompleteCheckpoint, explain_inexact_resume, geometry, open_checkpoint
from gpu_workers.train.loop.sft import _score_selected, build_trainer
from gpu_workers.train.model.adapter_export import adapter_config, write_adapter
from gpu_workers.train.model.base_model import fetch_base_model
from gpu_workers.train.model.cpu_lora import speed_up_lora
from gpu_workers.train.model.weights import check_finite
from gpu_workers.trainer.children.executor import SubprocessExecutor
from gpu_workers.trainer.idle.probes import Prober
from tests.support.engines.models import BASE_MODEL
from tests.support.engines.rows import RECIPE, make_rows
from tests.twins.control_plane import CREDENTIAL, ControlPlane

PROBING_CHILD = "tests.support.engines.short_probe"
NOTHING = DatasetRef(id="ds", sha256="", bytes=0, rows=0, url="")


def make_spec(**changes: object) -> RunSpec:
    base_model = BaseModelRef(id="bm_1", name="tiny")
    fields = {"run_id": "run_1", "job_id": "ftjob-1", "organization_id": "org_1", "attempt": 1, "training": NOTHING}
    return RunSpec(**fields | {"base_model": base_model, "hyperparameters": RECIPE} | changes)


def make_peft_model(folder: Path, *, dropout: float = 0.0) -> torch.nn.Module:
    torch.manual_seed(0)
    base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = LoraConfig(r=4, lora_alpha=8, lora_dropout=dropout, target_modules=["q_proj", "down_proj"])
    model = get_peft_model(base, config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)  # zeros would hide every error of the product
    return model


def make_batch() -> dict[str, torch.Tensor]:
    rows = [{"input_ids": [3, 9, 8, 1, 4, 7, 1], "labels": [-100] * 5 + [7, 1]}]
    rows += [{"input_ids": [3, 9, 1, 4, 5, 1], "labels": [-100] * 4 + [5, 1]}]
    return PaddingCollator(0)(rows)


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "Where is my card?"}, {"role": "assistant", "content": "card_arrival"}],
        [
            {"role": "system", "content": "Bref. Ünïcode 😀\n\n  spaces  "},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": " leading"},
            {"role": "user", "content": "b\n"},
            {"role": "assistant", "content": "end "},
        ],
    ],
)
def test_our_tokens_are_those_of_apply_chat_template(messages):
    theirs = AutoTokenizer.from_pretrained(BASE_MODEL).apply_chat_template(messages, tokenize=True)["input_ids"]

    ours = ChatRenderer.from_folder(BASE_MODEL).render(
        parse_row(json.dumps({"messages": messages}).encode(), line_number=1)
    )

    assert list(ours.token_ids) == theirs


def test_labels_stand_on_the_answer_and_its_end_alone(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(make_rows(3))
    renderer = ChatRenderer.from_folder(BASE_MODEL)

    rows = encode_file(tmp_path / "rows.jsonl", renderer, max_length=64)

    tokenizer = AutoTokenizer.from_pretrained(BASE_MODEL)
    for labels in rows.labels:
        text = tokenizer.decode([label for label in labels if label != -100])
        assert text.removesuffix("<|end|>") in ("red", "green", "blue", "black", "white")


def test_rows_without_a_trained_token_left_end_the_job_with_a_reason(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(make_rows(3))

    with pytest.raises(TrainingFailed) as failure:
        encode_file(tmp_path / "rows.jsonl", ChatRenderer.from_folder(BASE_MODEL), max_length=3)

    assert failure.value.code is FailureCode.NO_TRAINABLE_TOKENS


def test_the_held_out_rows_are_those_of_the_preview_and_no_row_is_on_both_sides(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_bytes(make_rows(40, seed=1) + make_rows(10, seed=1))  # ten rows twice
    renderer = ChatRenderer.from_folder(BASE_MODEL)
    rows = (parse_line_as(line, RowKind.CHAT) for line in split_lines([path.read_bytes()]))
    previewed = Split(0.2, 7).held_out(split_keys(rows))

    held = split_off(split_keys_of(path), Split(0.2, 7))
    training = encode_file(path, renderer, max_length=64, keep=[not each for each in held])
    validation = encode_file(path, renderer, max_length=64, keep=held)

    assert held == previewed and 0 < len(validation) < len(training) < 50
    assert len(training) + len(validation) == 50
    assert not {tuple(ids) for ids in training.input_ids} & {tuple(ids) for ids in validation.input_ids}


def test_what_the_validation_file_holds_or_nearly_holds_is_not_trained_on(tmp_path):
    def row(question: str) -> bytes:
        messages = [{"role": "user", "content": question}, {"role": "assistant", "content": "Here."}]
        return json.dumps({"messages": messages}).encode() + b"\n"

    long = "please tell me where the blue card of my old account with your bank has gone since "
    long += "I ordered it at the counter"
    (tmp_path / VALIDATION_FILE).write_bytes(row("Where is it?") + row(f"{long} in march"))
    (tmp_path / TRAINING_FILE).write_bytes(
        row("Who?") + row(" where  IS it?") + row(f"{long} in april") + row(f"{long} in march")
    )
    spec = make_spec(validation=NOTHING)

    selection = select_rows(tmp_path, spec)

    assert selection.training == [True, False, False, False]
    assert (selection.validation_file, selection.validation) == (VALIDATION_FILE, None)
    [(level, message)] = selection.notes
    assert (level, message) == (
        "warn",
        "Of 4 rows, 2 are in the validation file too and 1 nearly repeat one of it: they are not trained on.",
    )
    (tmp_path / TRAINING_FILE).write_bytes(row("Where is it?") + row(f"{long} in may"))
    with pytest.raises(TrainingFailed, match="nothing is left to train on") as failure:
        select_rows(tmp_path, spec)
    assert failure.value.code is FailureCode.INVALID_TRAINING_FILE


def test_a_file_of_one_row_over_and_over_cannot_be_split(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(make_rows(1) * 12)

    with pytest.raises(TrainingFailed, match="too few different rows"):
        split_off(split_keys_of(tmp_path / "rows.jsonl"), Split(0.1, 7))


def test_a_bad_row_is_named_by_its_line(tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(make_rows(2) + b'{"messages": []}\n')

    with pytest.raises(TrainingFailed, match="Line 3") as failure:
        encode_file(tmp_path / "rows.jsonl", ChatRenderer.from_folder(BASE_MODEL), max_length=64)

    assert failure.value.code is FailureCode.INVALID_TRAINING_FILE


@pytest.mark.parametrize("dropout", [0.0, 0.3])
def test_the_fast_lora_product_is_that_of_peft(tiny_model, dropout):
    batch = make_batch()
    results = []
    for is_fast in (False, True):
        model = make_peft_model(tiny_model, dropout=dropout)
        if is_fast:
            assert speed_up_lora(model) == 4
        torch.manual_seed(1)
        loss, _, _ = _score_selected(model, batch)
        loss.backward()
        results.append((loss, {n: p.grad for n, p in model.named_parameters() if p.requires_grad}))

    (loss, gradients), (fast_loss, fast_gradients) = results
    torch.testing.assert_close(fast_loss, loss)
    torch.testing.assert_close(fast_gradients, gradients)


def test_our_loss_is_that_of_trl(tiny_model, tmp_path):
    (tmp_path / "rows.jsonl").write_bytes(make_rows(8))
    rows = encode_file(tmp_path / "rows.jsonl", ChatRenderer.from_folder(tiny_model), max_length=64)
    trainer = build_trainer(
        model=make_peft_model(tiny_model),
        folder=tiny_model,
        training=rows,
        validation=None,
        spec=make_spec(),
        work_dir=tmp_path,
        events=EventWriter(tmp_path / "events.jsonl"),
        stop=StopFlag(),
    )
    batch = make_batch()

    ours = trainer.loss_parts(trainer.model, batch)
    trainer._scores_selected_only = False
    theirs = trainer.loss_parts(trainer.model, batch)

    assert trainer.events.close() is None
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.float(), other.float())


def test_a_loss_that_is_no_number_ends_the_run(tmp_path):
    writer = EventWriter(tmp_path / "events.jsonl")
    callback = ProgressCallback(writer, StopFlag(), checkpoint_interval_seconds=300, steps_per_epoch=10)
    callback.window.loss, callback.window.steps = torch.tensor(math.nan), 1

    with pytest.raises(TrainingFailed) as failure:
        callback.report(TrainerState(global_step=3, max_steps=10), learning_rate=0.1)
    writer.close()

    assert failure.value.code is FailureCode.LOSS_NOT_FINITE
    assert EventTail(tmp_path / "events.jsonl").read() == []


def test_a_model_with_a_weight_that_is_no_number_is_never_exported():
    with pytest.raises(TrainingFailed, match="lm_head"):
        check_finite({"lm_head": torch.tensor([1.0, math.inf])})


@pytest.mark.parametrize(
    ("weight", "words"), [(math.nan, "NaN or infinite"), (6e30, "values above 1000"), (30.0, "changes")]
)
def test_an_adapter_that_no_replica_would_serve_is_never_exported(tiny_model, tmp_path, weight, words):
    """Its loss may look well: behind a normalization weights of 1e30 give a finite one."""
    model = make_peft_model(tiny_model)
    for name, tensor in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.constant_(tensor, weight)

    with pytest.raises(TrainingFailed, match=words) as failure:
        write_adapter(tmp_path, model, make_spec(), dtype=torch.bfloat16)

    assert failure.value.code is FailureCode.LOSS_NOT_FINITE


def test_the_adapter_config_holds_known_keys_and_no_path():
    config = adapter_config(make_spec(base_model=BaseModelRef(id="bm_1", name="tiny", path="/secret/place")))

    assert (config["peft_type"], config["r"], config["bias"]) == ("LORA", 4, "none")
    assert config["base_model_name_or_path"] == "./tiny"  # no hub id, which anyone could own
    assert "/secret/place" not in json.dumps(config)


def seal(folder: Path, names: tuple[str, ...]) -> Path:
    temporary = folder / "tmp"
    temporary.mkdir(parents=True)
    for name in names:
        (temporary / name).write_bytes(name.encode() * 10)
    final = folder / "checkpoint-3"
    seal_folder(
        temporary, final, lambda files: Manifest(kind="checkpoint", run_id="run_1", attempt=1, step=3, files=files)
    )
    return final


def test_a_checkpoint_without_its_optimizer_is_refused(tmp_path):
    folder = seal(tmp_path, ("adapter_model.safetensors", "trainer_state.json"))

    with pytest.raises(IncompleteCheckpoint, match=r"optimizer\.pt"):
        open_checkpoint(folder)


def test_what_changed_since_a_checkpoint_is_told():
    made_by = make_spec()
    changed = msgspec.structs.replace(RECIPE, lora_dropout=0.9)
    manifest = Manifest(kind="checkpoint", run_id="run_1", attempt=1, step=3, files=(), metadata=geometry(made_by))

    assert explain_inexact_resume(manifest, made_by) is None
    assert explain_inexact_resume(manifest, make_spec(hyperparameters=changed)) == "hyperparameters"


@pytest.mark.parametrize(("gpus", "own", "taken"), [(2, 1, 2), (2, 4, 4), (1, 1, 4), (4, 1, 1), (4, 2, 2)])
def test_a_checkpoints_rows_at_a_time_are_the_most_of_each_gpu(gpus, own, taken):
    """The checkpoint's two GPUs took two rows at a time of a batch of eight."""
    smaller = msgspec.structs.replace(RECIPE, gradient_accumulation_steps=2, gradient_checkpointing=True)
    metadata = geometry(make_spec(hyperparameters=smaller, gpu_count=2))
    manifest = Manifest(kind="checkpoint", run_id="run_1", attempt=1, step=3, files=(), metadata=metadata)
    recipe = msgspec.structs.replace(RECIPE, gradient_accumulation_steps=own)

    adopted = _adopted(manifest, make_spec(hyperparameters=recipe, gpu_count=gpus))

    assert (adopted.gradient_accumulation_steps, adopted.gradient_checkpointing) == (taken, True)
    other = msgspec.structs.replace(recipe, learning_rate=1.0)
    assert _adopted(manifest, make_spec(hyperparameters=other, gpu_count=gpus)) == other


@pytest.mark.parametrize("damage", ["truncate", "change", "remove", "no manifest"])
def test_a_torn_checkpoint_is_refused(tmp_path, damage):
    folder = seal(tmp_path, ("optimizer.pt",))
    file = folder / "optimizer.pt"
    match damage:
        case "truncate":
            file.write_bytes(file.read_bytes()[:-1])
        case "change":
            file.write_bytes(b"X" + file.read_bytes()[1:])
        case "remove":
            file.unlink()
        case _:
            (folder / "manifest.json").unlink()

    with pytest.raises(BrokenArtifact):
        open_checkpoint(folder)


@pytest.mark.parametrize(("token", "word"), [("hf_x", "has not accepted the terms"), (None, "has stored no token")])
def test_a_gated_base_model_says_what_is_missing(monkeypatch, token, word):
    def refuse(*args, **kwargs):
        raise GatedRepoError("403", response=httpx.Response(403, request=httpx.Request("GET", "https://hub")))

    monkeypatch.setattr("gpu_workers.train.model.base_model.snapshot_download", refuse)

    with pytest.raises(TrainingFailed, match=word) as failure:
        fetch_base_model(BaseModelRef(id="bm", name="x", repo="owner/gated", revision="0" * 40), hub_token=token)

    assert failure.value.code is FailureCode.BASE_MODEL_UNAVAILABLE


def test_a_base_model_with_other_files_than_registered_is_refused(tiny_model):
    reference = BaseModelRef(id="bm_1", name="tiny", path=str(tiny_model), files_sha256={"config.json": "0" * 64})

    with pytest.raises(TrainingFailed) as failure:
        fetch_base_model(reference, hub_token=None)

    assert failure.value.code is FailureCode.BASE_MODEL_UNAVAILABLE


@pytest.mark.slow
def test_a_missing_measurement_is_taken_and_reported(plane: ControlPlane, tiny_model, tmp_path, fork_server):
    """In a forked child that measures for half a second; the platform's own journeys have the real one."""
    reference = BaseModelRef(id="bm_1", name="tiny", path=str(tiny_model))
    plane.probes = [ProbeRequest(base_model=reference, method="qlora", micro_batch_size=4, sequence_length=32)]
    config = WorkerConfig(
        internal_url=plane.url,
        credential_file=tmp_path / "credential.json",
        work_dir=tmp_path,
        base_model_roots=(tiny_model.parent,),
        trainer_thread_limit=1,
    )
    api = ApiClient(plane.url, credential=CREDENTIAL)
    executor = SubprocessExecutor(PROBING_CHILD, thread_limit=1, fork_server=fork_server)
    # Other tests keep the machine busy: it does not wait for them to end.
    prober = Prober(config, api, gpu_key="cpu", device="0", executor=executor, patience_seconds=1.0)

    probe = prober.find()
    assert probe and prober.run(probe, should_stop=lambda: False)
    assert prober.find() is None
    api.close()

    [report] = plane.reports
    assert 0 < report.tokens_per_second_low <= report.tokens_per_second <= report.tokens_per_second_high
    assert (report.method, report.gpu_key, report.threads) == ("qlora", "cpu", 1)
    assert report.peak_memory_bytes > 10**8
    assert 0 < report.startup_seconds < 120
