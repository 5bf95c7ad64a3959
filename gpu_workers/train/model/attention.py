"""Attention for this machine. Rows packed into one sequence never attend to each other, and a CPU computes in float32.

bfloat16 attention's backward has no fast CPU kernel (measured 16 ms per layer against 2 ms in float32), so on a CPU
only the attention product runs in float32.
"""

from functools import cache
from pathlib import Path

import torch
from torch.nn.attention.varlen import varlen_attn
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, AttentionInterface, AutoConfig
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from gpu_workers.train.model.hardware import FLASH_CAPABILITY, Attention

ROWS_APART = "rows_apart"
_PLAIN_LAYERS = {"full_attention", "sliding_attention"}


def attention_of(folder: Path) -> Attention:
    """Return the kind of attention that the model of a folder's config.json needs."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    text, model = config.get_text_config(), MODEL_FOR_CAUSAL_LM_MAPPING.get(type(config), None)
    is_known = model is not None and model._supports_sdpa and model._supports_attention_backend
    if not is_known or set(getattr(text, "layer_types", None) or ()) - _PLAIN_LAYERS:
        return Attention.OWN
    return Attention.CAPPED if getattr(text, "attn_logit_softcapping", None) else Attention.PLAIN


def register_attention() -> str:
    """Register our attention with transformers; return the name to load a model with."""
    AttentionInterface.register(ROWS_APART, _attention)
    AttentionMaskInterface.register(ROWS_APART, _mask)
    return ROWS_APART


def _mask(*args: object, attention_mask: torch.Tensor | None = None, **options: object) -> torch.Tensor | None:
    """Return no mask for packed rows. The borders in `cu_seq_lens_q` replace it and save its T x T memory."""
    return None if attention_mask is None else sdpa_mask(*args, attention_mask=attention_mask, **options)


def _attention(
    module: torch.nn.Module,
    query_BHTE: torch.Tensor,
    key_BHTE: torch.Tensor,
    value_BHTE: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    cu_seq_lens_q: torch.Tensor | None = None,
    max_length_q: int = 0,
    sliding_window: int | None = None,
    scaling: float | None = None,
    **options: object,
) -> tuple[torch.Tensor, None]:
    """Return the output [B, T, H, E] without the weights, as transformers expects it."""
    dtype = query_BHTE.dtype
    if cu_seq_lens_q is not None and _has_varlen(query_BHTE.device):
        output_BTHE = _varlen(
            query_BHTE,
            key_BHTE,
            value_BHTE,
            cu_seq_lens_q,
            max_length_q,
            window=(sliding_window or 0) - 1,
            scale=scaling,
        )
        return output_BTHE.to(dtype), None
    if not query_BHTE.is_cuda:
        query_BHTE, key_BHTE, value_BHTE = query_BHTE.float(), key_BHTE.float(), value_BHTE.float()
        if attention_mask is not None and attention_mask.dtype is not torch.bool:
            attention_mask = attention_mask.float()
    options = {name: option for name, option in options.items() if name not in _BORDERS} | {"scaling": scaling}
    if cu_seq_lens_q is None:
        output_BTHE, _ = sdpa_attention_forward(module, query_BHTE, key_BHTE, value_BHTE, attention_mask, **options)
    else:
        output_BTHE = _row_by_row(module, query_BHTE, key_BHTE, value_BHTE, cu_seq_lens_q, sliding_window, options)
    return output_BTHE.to(dtype), None


@cache
def _has_varlen(device: torch.device) -> bool:
    """Return whether torch's FlashAttention runs on the device. It needs Ampere or newer."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= FLASH_CAPABILITY


_BORDERS = ("cu_seq_lens_k", "max_length_k")


def _short(dtype: torch.dtype) -> torch.dtype:
    if dtype is not torch.float32:
        return dtype
    return torch.get_autocast_dtype("cuda") if torch.is_autocast_enabled("cuda") else torch.bfloat16


def _row_by_row(
    module: torch.nn.Module,
    query_BHTE: torch.Tensor,
    key_BHTE: torch.Tensor,
    value_BHTE: torch.Tensor,
    borders: torch.Tensor,
    window: int | None,
    options: dict[str, object],
) -> torch.Tensor:
    """Attend row by row. This is fastest on a CPU, because padding needs no products or masks.

    The output is zero behind the last border. `borders` has the first token of each row and the end of the last.
    Returns [B, T, H, E].
    """
    lengths = borders.diff().tolist()
    filling = query_BHTE.shape[2] - sum(lengths)
    splits = [*lengths, filling]
    tensors = (query_BHTE, key_BHTE, value_BHTE)
    parts = zip(*(tensor.split(splits, 2) for tensor in tensors), lengths, strict=False)
    rows_BTHE = [
        sdpa_attention_forward(module, q, k, v, _band(n, window, q.device), **options)[0] for q, k, v, n in parts
    ]
    if filling:
        rows_BTHE.append(rows_BTHE[0].new_zeros(1, filling, *rows_BTHE[0].shape[2:]))
    return torch.cat(rows_BTHE, dim=1)


def _band(length: int, window: int | None, device: torch.device) -> torch.Tensor | None:
    """Return the mask of a row: each token sees itself and the `window` - 1 before it; None if that is all."""
    if not window or length <= window:
        return None
    causal_TT = torch.ones(length, length, dtype=torch.bool, device=device).tril()
    return causal_TT.triu(1 - window)


def _varlen(
    query_BHTE: torch.Tensor,
    key_BHTE: torch.Tensor,
    value_BHTE: torch.Tensor,
    borders: torch.Tensor,
    longest: int,
    *,
    window: int,
    scale: float | None,
) -> torch.Tensor:
    """Run torch's FlashAttention over the packed rows, in 16 bits. Returns [B, T, H, E].

    With weights in float32, the rotary embedding converts autocast's 16-bit values back to float32.
    """
    dtype = _short(query_BHTE.dtype)
    query_THE, key_THE, value_THE = (
        tensor[0].transpose(0, 1).to(dtype) for tensor in (query_BHTE, key_BHTE, value_BHTE)
    )
    output_THE = varlen_attn(
        query_THE,
        key_THE,
        value_THE,
        borders,
        borders,
        longest,
        longest,
        scale=scale,
        window_size=(window, 0),
        enable_gqa=query_THE.shape[1] != key_THE.shape[1],
    )
    return output_THE.unsqueeze(0)
