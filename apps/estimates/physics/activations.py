"""Bytes per token of a training step: what the forward and backward pass keep, and the loss."""

from typing import NamedTuple

from apps.contracts.hyperparameters import Method
from apps.estimates.models.shapes import Shape
from apps.estimates.physics.gpus import Gpu
from apps.estimates.physics.plans import TrainingPlan
from apps.estimates.physics.stacks import StackProfile
from apps.estimates.physics.states import is_autocast_of_fp32

# LoRA's dropout saves a byte mask on a GPU (native_dropout); on a CPU the mask has the type of its input.
_GPU_DROPOUT_MASK_BYTES = 1

# TRL 1.16 scores hidden states in tiles of this many tokens by this many vocabulary entries
# (trl/kernels/chunked_logprob.py TOKEN_CHUNK_SIZE, trl/trainer/utils.py _CHUNKED_LOGPROB_CHUNK_SIZE).
_TILE_TOKENS = 4096
_TILE_VOCABULARY = 32768
# Without Triton (CPU), torch operators compute the tile: y, z, log p, p, the gradient and three temporaries are alive
# at once in fp32, and one boolean mask (trl/kernels/chunked_logprob.py _backward_tile).
_TORCH_TILE_BYTES = 8 * 4 + 1

# Eager attention: bytes per score that a layer keeps, and that are alive in its attention's backward pass. transformers
# (eager_attention_forward) keeps the softmax in fp32 and its 16-bit copy, and makes the gradient of each and of the
# scores. Gemma 2 also keeps the tanh of its cap. gpt-oss computes with its sinks' type, and makes most copies in the
# forward pass.
_EAGER_BYTES, _CAPPED_BYTES, _SINK_BYTES, _WIDE_SINK_BYTES = (6, 16), (8, 14), (2, 6), (6, 12)
_EAGER_MASK_BYTES = 2 + 2  # full and sliding, in 16 bits
# A padded batch needs a mask of length x length per row: boolean, and expanded to 16 bits by the kernel.
_MASK_BYTES_PER_SCORE = 1 + 2
# Under DeepSpeed the model runs in 16 bits without autocast: logits, shifted copy, log-probabilities, gradient.
_DEEPSPEED_LOSS_BYTES = 8.0
_FP32_LOSS_BYTES = 12.0  # stacks that keep at least so much of each logit keep it in fp32, also under a 16-bit head


class Activations(NamedTuple):
    """Bytes of a micro-step's activations.

    `kept` by the forward pass, `kept_first` of them when the backward pass reaches the first layer, and `working`, what
    the backward pass of a layer adds. Without checkpointing, the end of the forward pass may add more.
    """

    kept: float
    kept_first: float
    working: float


class TokenBytes:
    """Bytes per token of activations and loss, operator by operator, as transformers' modelling code runs them.

    Of one layer: `layer` is kept for its backward pass, or with checkpointing `checkpoint`; `forward` and `backward`
    are the temporaries of its passes.
    """

    def __init__(self, shape: Shape, plan: TrainingPlan, gpu: Gpu, stack: StackProfile, width: int) -> None:
        s, a = shape, shape.architecture
        if plan.method == Method.QLORA and stack.quantized_activation_bytes:
            width = stack.quantized_activation_bytes
        self.shape, self.plan, self.stack, self.width, self.is_cpu = shape, plan, stack, width, gpu.is_cpu
        self.has_dropout = plan.lora_dropout > 0 and not plan.is_preference  # TRL turns it off for pairs
        self.is_fused = stack.fused_kernels or plan.is_compiled
        is_nf4 = plan.method == Method.QLORA and plan.quantization == "nf4"
        self.has_wide_norms = is_nf4 and plan.compute_dtype in stack.wide_norms
        # Most norms in fp32 give fp32 results, and bitsandbytes' layers return the type they are given.
        is_wide = self.has_wide_norms and not a.keeps_norm_type
        ff_width = 4 if is_wide else width
        self.is_cast = is_autocast_of_fp32(plan, stack)
        self.residual = s.hidden * (4 if is_wide or self.is_cast else width)
        self.converts_inputs = self._converts_inputs()
        # The result of each expert is kept, because the router's weight of it has a gradient.
        routed = (a.experts_per_token or 0) * s.hidden * width * (2 if a.attention_sinks else 1)
        self.mlp = self._ff_copies() * ff_width * s.active_ff + routed
        self.layer = self._norms() + self._attention() + self.mlp + self._inputs()
        self.forward, backward = self._temporaries(ff_width, 3 * routed)
        is_offloaded = stack.offloads_checkpoints or plan.offloads_activations
        self.checkpoint = 0 if is_offloaded else self.residual
        # A norm keeps its input in fp32. If the checkpoint is in fp32, it is the input of the layer's first norm.
        shared = self.residual if self.residual == 4 * s.hidden and not (is_offloaded or self.is_fused) else 0
        output = 2 * width * s.hidden  # the gradients of the layer's output and of the next norm's input
        self.working = max(self.forward, backward)
        self.working_in_mlp = self.layer - shared + max(self.forward + output, backward)
        self.working_in_attention = self.layer - shared - self.mlp + output  # the MLP's backward pass is over
        self.mask = 0 if plan.is_packed else _MASK_BYTES_PER_SCORE
        self.score, self.score_peak = self._score_bytes() if plan.attention == "eager" else (0, 0)
        self.head_gradient = s.head * 4 if plan.method == Method.FULL and stack.is_tiled_loss else 0

    def activations(self, rows: int, length: int, checkpointing: bool) -> Activations:
        """Return the bytes of the activations in one micro-step."""
        tokens, layers = rows * length, self.shape.n_layers
        mask = self.mask * tokens * length if rows > 1 else 0
        kept = alive = 0
        if self.score:
            scores = self.shape.architecture.n_heads * tokens * length
            kept, alive, mask = scores * self.score, scores * self.score_peak, tokens * length * _EAGER_MASK_BYTES
        if checkpointing:
            checkpoint = tokens * self.checkpoint
            working = max(tokens * self.working_in_mlp + kept, tokens * self.working_in_attention + alive)
            return Activations(layers * checkpoint + mask, checkpoint + mask, working)
        layer = tokens * self.layer + kept
        return Activations(layers * layer + mask, layer + mask, max(tokens * self.working, alive - kept))

    def _score_bytes(self) -> tuple[int, int]:
        """Return the bytes of eager attention's score that a layer keeps, and those alive in its attention."""
        a = self.shape.architecture
        if a.attention_sinks:
            return _WIDE_SINK_BYTES if self.has_wide_norms else _SINK_BYTES
        return _CAPPED_BYTES if a.has_score_cap else _EAGER_BYTES

    def _norms(self) -> float:
        """Return the inputs of the norms, which compute in fp32 unless fused, and what their gradients need."""
        s, a = self.shape, self.shape.architecture
        heads = s.query + s.key_value if a.qk_norm else 0
        kept = (self.width if self.is_fused else 4) * (a.norms_per_layer * s.hidden + heads)
        if self.plan.method == Method.FULL and not self.is_fused:
            kept += a.norms_per_layer * self.residual + self.width * heads
        return kept

    def _attention(self) -> float:
        s, stack = self.shape, self.stack
        is_apart = stack.packs_micro_batches and self.plan.is_packed and self.plan.attention == "flash"
        if is_apart and not self.is_cpu:
            whole = s.query + s.key_value if s.has_fused_qkv else 0  # the value is a view of the whole product
            return self.width * (2 * s.query + 2 * s.key_value + whole)
        key_value = s.query if stack.repeats_key_values else s.key_value
        return self.width * (2 * s.query + 2 * key_value)

    def _ff_copies(self) -> int:
        return self.shape.ff_copies - 1 if self.is_fused else self.shape.ff_copies

    def loss(self, tokens: int) -> float:
        """Return the bytes of the loss at the head's peak."""
        s, stack = self.shape, self.stack
        if not stack.is_tiled_loss:
            per_logit = _DEEPSPEED_LOSS_BYTES if self.plan.is_deepspeed else stack.loss_bytes
            per_logit = min(per_logit, stack.compiled_loss_bytes) if self.plan.is_compiled else per_logit
            widened = 2 if self._is_loss_widened(per_logit) else 1
            head = 2 * s.head if self.plan.steps_in_backward else 0  # gradients of a chunk, and of those before it
            return max(tokens * s.vocabulary * per_logit * widened, (tokens * s.vocabulary + head) * self.width)
        tile = min(tokens, _TILE_TOKENS) * min(s.vocabulary, _TILE_VOCABULARY)
        per_value = self.width + (_TORCH_TILE_BYTES if self.is_cpu else 0)
        hidden = tokens * s.hidden * (self.width + 4)  # selected positions, and their gradient in fp32
        return tile * per_value + hidden + self.head_gradient

    def _is_loss_widened(self, per_logit: float) -> bool:
        """Return whether the loss's counted copies, of 16 bits, are in fp32 here. From 12 bytes on, they are anyway."""
        plan, stack = self.plan, self.stack
        is_head_wide = plan.method == Method.QLORA and plan.quantization == "nf4" and stack.upcasts_unquantized
        return per_logit < _FP32_LOSS_BYTES and (
            plan.compute_dtype == "float32" or (stack.has_head_loss and is_head_wide)
        )

    def evaluation(self, tokens: int, loss: float) -> float:
        """Return the bytes of the loss without gradient: logits, their fp32 copy and log-probabilities, or a tile.

        `loss` are the bytes of the loss with its gradient.
        """
        if self.stack.is_tiled_loss:
            return loss - self.head_gradient
        per_logit = _DEEPSPEED_LOSS_BYTES if self.plan.is_deepspeed else self.stack.loss_bytes
        return tokens * self.shape.vocabulary * min(per_logit * 5 / 6, self.width + 4 + 4)

    def _inputs(self) -> float:
        """Return the inputs of linear layers, of which each trained weight needs its own."""
        s, plan, width = self.shape, self.plan, self.width
        if plan.method == Method.FULL:
            # Autocast converts the input of each matrix anew. Otherwise the layers of a block share theirs.
            return width * (s.linear_inputs if self.is_cast else 2 * s.hidden + s.active_ff)
        rank = plan.lora_rank * s.adapter_modules / s.n_layers * width
        # DoRA scales the results of base and adapter by a trained magnitude, and so keeps both.
        dora = s.adapted_outputs * (width + (width if self.converts_inputs else 4)) if plan.use_dora else 0
        # each module has its own dropped-out copy, and a mask
        if self.has_dropout and not self.stack.fused_adapters:
            mask = width if self.is_cpu else _GPU_DROPOUT_MASK_BYTES
            return s.adapted_inputs * (width + mask) + rank + dora
        if self.converts_inputs:
            return s.adapted_inputs * width + rank + dora
        return s.distinct_adapted_inputs * width + rank + dora

    def _converts_inputs(self) -> bool:
        """Return whether PEFT converts each module's input to the adapter's fp32, and autocast converts it back."""
        plan, stack = self.plan, self.stack
        is_wide = stack.quantized_adapter_bytes if plan.method == Method.QLORA else stack.adapter_bytes
        is_merged = stack.fused_adapters or plan.is_compiled
        return is_wide == 4 and stack.is_autocast and not is_merged and not self.is_cpu and self.width == 2

    def _temporaries(self, ff_width: int, routed: int) -> tuple[float, float]:
        """Return the temporaries at the peaks of a layer's forward and backward pass, both in the MLP."""
        s, width, ff = self.shape, self.width, self.shape.active_ff
        is_full, adapts_down = self.plan.method == Method.FULL, s.has_adapted_down and not self.is_cpu
        forward = ff_width * ff + self.residual + 2 * width * s.hidden
        if adapts_down and not is_full and self.converts_inputs:
            # the input in fp32, where it is not anyway, and its dropped-out copy
            forward += (0 if ff_width == 4 else 4 * ff) + (4 * ff if self.has_dropout else 0)
        freed = width * ff if is_full or adapts_down else 0  # the last matrix's input, of which the gradient is done
        return max(forward, routed), max(3 * ff_width * ff - freed, routed) + 2 * width * s.hidden
