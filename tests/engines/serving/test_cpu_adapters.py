"""On a CPU, a row without an adapter gets nothing of the adapters beside it."""

import pytest
import torch
from vllm.lora.ops.torch_ops import lora_ops
from vllm.lora.punica_wrapper import punica_cpu

from gpu_workers.engine.cpu_adapters import leave_out_rows_without_adapter

SLOTS, ROWS, WIDTH, RANK = 3, 4, 8, 2


@pytest.mark.parametrize("module", [punica_cpu, lora_ops])
def test_rows_without_an_adapter_get_nothing_of_the_last_slot(monkeypatch, module):
    for each in (punica_cpu, lora_ops):
        monkeypatch.setattr(each, "bgmv_shrink", lora_ops.bgmv_shrink)
    inputs, weights = torch.randn(ROWS, WIDTH), torch.randn(SLOTS, 1, RANK, WIDTH)
    indices = torch.tensor([0, -1, 2, -1])
    before, after = torch.full((ROWS, RANK), 7.0), torch.full((ROWS, RANK), 7.0)
    module.bgmv_shrink(inputs, weights, before, indices)

    leave_out_rows_without_adapter()
    module.bgmv_shrink(inputs, weights, after, indices)

    assert before[1].abs().sum() > 0, "vLLM repaired it: remove ours"
    assert torch.equal(after[[0, 2]], before[[0, 2]])
    assert after[[1, 3]].abs().sum() == 0
