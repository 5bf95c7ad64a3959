"""GGUF by llama.cpp's own converter, read back by `gguf`; and what is said where there is none."""

import importlib
import shutil
import sys
from pathlib import Path

import pytest
import sentencepiece
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from gpu_workers.common.gguf_converter import FOLDER, converter_version
from gpu_workers.train.after.gguf import GGUF_FILE, NotConverted, convert_model

is_installed = pytest.mark.skipif(converter_version() is None, reason="`make setup-gguf` was not run")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A Llama with a tokenizer of SentencePiece, as Llama 2 has it: llama.cpp reads that of every model."""
    folder = tmp_path / "model"
    config = LlamaConfig(
        vocab_size=300, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    (tmp_path / "text").write_text("\n".join(f"the row {number} of {number * 7} words" for number in range(400)))
    sentencepiece.SentencePieceTrainer.train(
        input=str(tmp_path / "text"),
        model_prefix=str(folder / "tokenizer"),
        vocab_size=300,
        model_type="bpe",
        byte_fallback=True,
        minloglevel=2,
    )
    return folder


@is_installed
def test_the_file_holds_every_weight_of_the_model(model, tmp_path, monkeypatch):
    answer = convert_model(model, tmp_path / "out")

    monkeypatch.syspath_prepend(FOLDER)
    gguf = importlib.import_module("gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "out" / GGUF_FILE).tensors}
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        del sys.modules[name]
    assert (answer.architecture, answer.tensors) == ("llama", len(tensors))
    written = torch.frombuffer(bytearray(tensors["blk.1.ffn_down.weight"].data), dtype=torch.bfloat16)
    expected = load_file(model / "model.safetensors")["model.layers.1.mlp.down_proj.weight"]
    assert torch.equal(written, expected.flatten())


@is_installed
def test_a_tokenizer_that_llama_cpp_does_not_know_is_said(tiny_model, tmp_path):
    with pytest.raises(NotConverted, match="does not know this model's tokenizer"):
        convert_model(tiny_model, tmp_path / "out")


@is_installed
def test_a_broken_model_is_no_file(model, tmp_path):
    (model / "config.json").write_text("{}")

    with pytest.raises(NotConverted):
        convert_model(model, tmp_path / "out")


def test_without_a_converter_it_is_said(model, tmp_path):
    shutil.rmtree(tmp_path / "out", ignore_errors=True)

    with pytest.raises(NotConverted, match="no converter installed"):
        convert_model(model, tmp_path / "out", converter=tmp_path / "nowhere")
