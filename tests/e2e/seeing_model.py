"""Write a tiny Idefics3 with random weights: `python -m tests.e2e.seeing_model FOLDER`, in the engines' environment.

It answers nonsense, but an image goes the whole way: decoded, resized, encoded and read as tokens. Of the families that
vLLM serves this one needs no torchvision, which the CPU build goes without.
"""

import sys
from pathlib import Path

import torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    Idefics3Processor,
    LlamaConfig,
    PreTrainedTokenizerFast,
)
from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

DEMO = Path(__file__).resolve().parents[2] / "demo" / "base_model"
IMAGE_PIXELS, PATCH_PIXELS, PATCHES_A_SIDE_OF_A_TOKEN = 32, 8, 2
TOKENS = (IMAGE_PIXELS // PATCH_PIXELS // PATCHES_A_SIDE_OF_A_TOKEN) ** 2
SPECIAL_TOKENS = ["<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>"]
CONTEXT_LENGTH = 512


def write_model(folder: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(DEMO)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
    pictures = Idefics3ImageProcessorPil(
        size={"longest_edge": IMAGE_PIXELS}, max_image_size={"longest_edge": IMAGE_PIXELS}, do_image_splitting=False
    )
    Idefics3Processor(pictures, tokenizer, image_seq_len=TOKENS).save_pretrained(folder)
    vision = Idefics3VisionConfig(
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        image_size=IMAGE_PIXELS,
        patch_size=PATCH_PIXELS,
    )
    text = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=CONTEXT_LENGTH,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
        bos_token_id=None,
    )
    config = Idefics3Config(
        vision_config=vision.to_dict(),
        text_config=text.to_dict(),
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        scale_factor=PATCHES_A_SIDE_OF_A_TOKEN,
    )
    torch.manual_seed(0)
    Idefics3ForConditionalGeneration(config).to(torch.bfloat16).save_pretrained(folder)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
