"""Finished models: examined and converted by an idle trainer, and loaded as the model card says."""

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from apps.contracts.adapter_files import clean_adapter_config
from apps.contracts.adapter_files.loading import ADAPTER_PATH, BASE_PATH, loading_code
from apps.contracts.runs import BaseModelRef, CheckpointRef, Manifest
from apps.contracts.worker_api import ConversionReport, ConversionRequest, ExaminationReport, ExaminationRequest
from gpu_workers.common.api_client import ApiClient
from gpu_workers.common.artifacts import seal_folder
from gpu_workers.common.config import WorkerConfig
from gpu_workers.train.after.scoring import token_logprobs
from gpu_workers.trainer.children.executor import SubprocessExecutor
from gpu_workers.trainer.children.fork_server import ForkServer
from gpu_workers.trainer.idle.conversions import Converter
from gpu_workers.trainer.idle.examinations import Examiner
from gpu_workers.trainer.publication import GGUF_EXPORT, MERGED_EXPORT, MODULE, Publisher
from tests.twins.control_plane import CREDENTIAL, ControlPlane

MODULES = ("q_proj", "down_proj")


@pytest.fixture
def adapter(tiny_model: Path, tmp_path: Path) -> Path:
    """What PEFT saves, with the configuration that an upload keeps."""
    torch.manual_seed(7)
    config = peft.LoraConfig(r=8, lora_alpha=32, target_modules=list(MODULES), init_lora_weights=False)
    model = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.bfloat16), config)
    model.save_pretrained(tmp_path / "saved")
    (tmp_path / "saved" / "README.md").unlink()
    file = tmp_path / "saved" / "adapter_config.json"
    file.write_text(json.dumps(clean_adapter_config(json.loads(file.read_text()), base_model="./tiny")))
    seal_folder(
        tmp_path / "saved",
        tmp_path / "adapter",
        lambda files: Manifest(kind="adapter", run_id="", attempt=0, step=0, files=files),
    )
    return tmp_path / "adapter"


@pytest.fixture
def publisher(fork_server: ForkServer) -> Publisher:
    """Its children are forked, as those of a worker without a GPU."""
    return Publisher(SubprocessExecutor(MODULE, thread_limit=1, fork_server=fork_server))


def offered(plane: ControlPlane, adapter: Path) -> CheckpointRef:
    files = tuple(plane.add_object(f"adapter/{path.name}", path.read_bytes()) for path in sorted(adapter.iterdir()))
    sealed = next(file for file in files if file.name == "manifest.json")
    return CheckpointRef(id="adpv_1", step=0, manifest_sha256=sealed.sha256, files=files)


def config_of(plane: ControlPlane, base: Path, work_dir: Path) -> WorkerConfig:
    return WorkerConfig(
        internal_url=plane.url,
        credential_file=work_dir / "credential.json",
        work_dir=work_dir / "work",
        base_model_roots=(base.parent,),
    )


def examine(
    plane: ControlPlane, base: Path, adapter: Path, work_dir: Path, publisher: Publisher, *, stops: bool = False
) -> ExaminationReport:
    plane.examinations = [
        ExaminationRequest(
            id="exam_1",
            base_model=BaseModelRef(id="bm_1", name="tiny", path=str(base)),
            adapter=offered(plane, adapter),
            lora_rank=8,
            target_modules=MODULES,
        )
    ]
    api = ApiClient(plane.url, credential=CREDENTIAL)
    examiner = Examiner(config_of(plane, base, work_dir), api, device="0", publisher=publisher)
    assert examiner.run_one(should_stop=lambda: stops)
    assert not examiner.run_one(should_stop=lambda: False)
    api.close()
    assert list((work_dir / "work" / "runs").iterdir()) == []
    return plane.examined[-1]


@pytest.mark.slow
def test_the_probe_has_the_numbers_of_the_model_that_the_card_loads(plane, tiny_model, adapter, tmp_path, publisher):
    report = examine(plane, tiny_model, adapter, tmp_path, publisher)

    assert report.probe is not None, report.error
    code = "\n".join(loading_code(repo="", revision="", name="tiny"))
    code = code.replace(BASE_PATH.format(name="tiny"), str(tiny_model)).replace(ADAPTER_PATH, str(adapter))
    loaded: dict[str, peft.PeftModel] = {}
    exec(code, loaded)  # the card's own lines
    for row in report.probe.rows[:2]:
        found = np.array(token_logprobs(loaded["model"].eval(), row.token_ids))
        assert np.abs(found - np.array(row.tuned)).mean() < 0.02
        assert np.abs(found - np.array(row.base)).mean() > 0.05
    assert report.probe.chat is not None and 1 < len(report.probe.rows) <= 8


def test_an_examination_that_must_stop_or_finds_other_files_is_given_back(
    plane, tiny_model, adapter, tmp_path, publisher
):
    stopped = examine(plane, tiny_model, adapter, tmp_path, publisher, stops=True)
    assert stopped.probe is None and stopped.error

    weights = adapter / "adapter_model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"x")
    broken = examine(plane, tiny_model, adapter, tmp_path, publisher)
    assert broken.probe is None and "CheckpointBroken" in broken.error


@pytest.mark.slow
def test_an_idle_trainer_merges_later_keeps_its_lease_and_says_what_it_cannot_make(
    plane, tiny_model, adapter, tmp_path, publisher
):
    api = ApiClient(plane.url, credential=CREDENTIAL)
    converter = Converter(config_of(plane, tiny_model, tmp_path), api, device="0", publisher=publisher)

    def convert(kind: str, *, stops: bool = False) -> ConversionReport | None:
        plane.converted.clear()
        base = BaseModelRef(id="bm_1", name="tiny", path=str(tiny_model))
        wanted = ConversionRequest(
            id="conv_1", kind=kind, base_model=base, adapter=offered(plane, adapter), beat_seconds=0.0
        )
        plane.conversions = [wanted]
        assert converter.run_one(should_stop=lambda: stops)
        assert list((tmp_path / "work" / "runs").iterdir()) == []
        return plane.converted[0] if plane.converted else None

    merged = convert(MERGED_EXPORT)

    assert merged is not None and not merged.problem, merged
    upload = next(name for name in plane.uploads if name.endswith(merged.manifest_sha256[:12]))
    folder = tmp_path / "merged"
    folder.mkdir()
    for name, content in plane.stored_files(upload).items():
        (folder / name).write_bytes(content)
    prompt = torch.tensor([[3, 100, 200, 1, 4]])
    base = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.no_grad():
        plain = base(prompt).logits
        expected = peft.PeftModel.from_pretrained(base, adapter).eval()(prompt).logits
        found = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()(prompt).logits
    assert (expected - found).abs().max() < 0.05 * (expected - plain).abs().max()
    assert plane.conversions_kept > 0

    unknown = convert(GGUF_EXPORT)  # llama.cpp does not know its tokenizer, or there is no converter
    assert unknown is not None and unknown.problem and unknown.is_lasting and not unknown.manifest_sha256
    assert convert(MERGED_EXPORT, stops=True) == ConversionReport(is_interrupted=True)
    plane.is_conversion_lost = True
    assert convert(MERGED_EXPORT) is None, "nothing is reported under a lost lease"
    assert not converter.run_one(should_stop=lambda: False)
    api.close()
