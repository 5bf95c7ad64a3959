"""What the product declares of each architecture is what PEFT finds in transformers' class, for every family."""

from pathlib import Path

import msgspec
import peft
import pytest
import torch

from apps.contracts.adapter_files import SUPPORT, expected_tensors
from apps.contracts.hyperparameters import Hyperparameters
from apps.estimates.models.architectures import from_config, lora_parameter_count, parameter_count
from gpu_workers.train.failures import TrainingFailed
from gpu_workers.train.model.loading import load_model, lora_config
from tests.support.engines.miniatures import MINIATURES, build_model, is_mixture

NOT_ADAPTED = {"glm4": {"gate_up_proj"}}  # linear layers without an adapter, by the declaration's reason


@pytest.mark.parametrize("name", MINIATURES)
def test_an_adapter_has_the_declared_layers_and_shapes(name: str) -> None:
    """A new version of transformers may name or fuse layers in another way, and PEFT would pass over them silently."""
    support = SUPPORT[MINIATURES[name].architecture]
    with torch.device("meta"):
        model = build_model(name, vocabulary=64, pad_token_id=0)
        config = model.config.to_dict() | {"architectures": [MINIATURES[name].architecture]}
        counted = sum(parameter.numel() for parameter in model.parameters())
        linear = {key.rpartition(".")[2] for key, part in model.model.named_modules() if type(part) is torch.nn.Linear}
        adapted = peft.get_peft_model(model, lora_config(Hyperparameters(lora_rank=8, target_modules=support.modules)))
    made = peft.get_peft_model_state_dict(adapted, save_embedding_layers=False)

    assert {key: tuple(tensor.shape) for key, tensor in made.items()} == expected_tensors(
        config, rank=8, target_modules=support.modules
    )
    architecture = from_config(config)
    assert parameter_count(architecture) == counted
    assert lora_parameter_count(architecture, rank=8, target_modules=support.modules) == sum(
        tensor.numel() for tensor in made.values()
    )
    dense = {"gate_proj", "up_proj", "down_proj"} if is_mixture(name) else set()  # of its layers without experts
    assert linear - set(support.modules) - dense <= NOT_ADAPTED.get(support.model_type, set())


def test_every_declared_architecture_has_a_miniature() -> None:
    assert {mini.architecture for mini in MINIATURES.values()} == set(SUPPORT)


def test_layers_that_the_base_model_does_not_have_are_refused_before_its_weights_are_read(tmp_path: Path) -> None:
    """PEFT would train the experts of a mixture if asked for gate_proj, up_proj and down_proj."""
    (tmp_path / "config.json").write_bytes(msgspec.json.encode({"architectures": ["Qwen3MoeForCausalLM"]}))

    with pytest.raises(TrainingFailed, match="no down_proj, gate_proj, up_proj to adapt: use q_proj"):
        load_model(tmp_path, Hyperparameters())
