"""Bytes per token of a training step: what the forward and backward pass keep, and the loss."""

from apps.contracts.runs import Method
from apps.estimates.models.shapes import Shape
from apps.estimates.physics.gpus import Gpu
from apps.estimates.physics.plans import TrainingPlan
from apps.estimates.physics.stacks import StackProfile

# LoRA's dropout saves a byte mask on a GPU (native_dropout); on a CPU the mask has the type of its input.
_GPU_DROPOUT_MASK_BYTES = 1

# TRL 1.16 scores hidden states in tiles of this many tokens by this many vocabulary entries
# (trl/kernels/chunked_logprob.py TOKEN_CHUNK_SIZE, trl/trainer/utils.py _CHUNKED_LOGPROB_CHUNK_SIZE).
_TILE_TOKENS = 4096
_TILE_VOCABULARY = 32768
# Without Triton (CPU), torch operators compute the tile: y, z, log p, p, the gradient and three temporaries are alive
# at once in fp32, and one boolean mask (trl/kernels/chunked_logprob.py _backward_tile).
_TORCH_TILE_BYTES = 8 * 4 + 1

# Eager attention keeps softmax in fp32 and its 16-bit copy for the backward pass (transformers
# eager_attention_forward), and also makes the gradient of each.
_EAGER_SAVED_BYTES = 4 + 2
_EAGER_WORKING_BYTES = 4 + 4 + 2
# A padded batch needs a mask of length x length per row: boolean, and expanded to 16 bits by the kernel.
_MASK_BYTES_PER_SCORE = 1 + 2
# Under DeepSpeed the model runs in 16 bits without autocast: logits, shifted copy, log-probabilities, gradient.
_DEEPSPEED_LOSS_BYTES = 8.0
_FP32_LOSS_BYTES = 12.0  # stacks that keep at least so much of each logit keep it in fp32, also under a 16-bit head


class TokenBytes:
    """Bytes per token of activations and loss, operator by operator, as transformers' modelling code runs them."""

    def __init__(self, shape: Shape, plan: TrainingPlan, gpu: Gpu, stack: StackProfile, width: int) -> None:
        s = shape
        if plan.method == Method.QLORA and stack.quantized_activation_bytes:
            width = stack.quantized_activation_bytes
        self.shape, self.plan, self.stack, self.width, self.is_cpu = shape, plan, stack, width, gpu.is_cpu
        is_fused = stack.fused_kernels or plan.is_compiled
        norm_bytes = width if is_fused else 4  # RMSNorm works on an fp32 copy unless fused
        norms = s.architecture.norms_per_layer * norm_bytes * s.hidden
        key_values = s.query if stack.repeats_key_values else s.key_value
        attention = width * (2 * s.query + 2 * key_values)
        ff_copies = s.ff_copies - 1 if is_fused else s.ff_copies
        # Most norms in fp32 give fp32 results, and bitsandbytes' layers return the type they are given.
        is_wide = plan.method == Method.QLORA and plan.quantization == "nf4" and stack.has_wide_norms
        ff_width = 4 if is_wide and not s.architecture.keeps_norm_type else width
        self.layer = norms + attention + ff_copies * ff_width * s.active_ff + self._adapter_inputs()
        self.working = width * 2 * s.hidden + ff_width * 3 * s.active_ff
        is_offloaded = stack.offloads_checkpoints or plan.offloads_activations
        self.checkpoint = 0 if is_offloaded else s.n_layers * s.hidden * width
        self.head_gradient = s.head * 4 if plan.method == Method.FULL and stack.is_tiled_loss else 0

    def activations(self, rows: int, length: int, checkpointing: bool) -> tuple[float, float]:
        """Return the bytes kept by the forward pass of all layers, and those the backward pass of one layer adds."""
        s, tokens = self.shape, rows * length
        layer, working = tokens * self.layer, tokens * self.working
        if self.plan.attention == "eager":
            scores = rows * s.architecture.n_heads * length**2
            layer, working = layer + scores * _EAGER_SAVED_BYTES, working + scores * _EAGER_WORKING_BYTES
        mask = 0 if rows == 1 or self.plan.is_packed else rows * length**2 * _MASK_BYTES_PER_SCORE
        if checkpointing:
            return tokens * self.checkpoint + mask, layer + working
        return s.n_layers * layer + mask, working

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

    def evaluation(self, tokens: int) -> float:
        """Return the bytes of the loss without gradient: logits, their fp32 copy and log-probabilities, or a tile."""
        if self.stack.is_tiled_loss:
            return self.loss(tokens) - self.head_gradient
        per_logit = _DEEPSPEED_LOSS_BYTES if self.plan.is_deepspeed else self.stack.loss_bytes
        return tokens * self.shape.vocabulary * min(per_logit * 5 / 6, self.width + 4 + 4)

    def _adapter_inputs(self) -> float:
        s, plan, width = self.shape, self.plan, self.width
        # inputs of the two blocks and of the down projection; the layers of a block share them
        if plan.method == Method.FULL:
            return width * (2 * s.hidden + s.active_ff)
        rank = plan.lora_rank * s.adapter_modules / s.n_layers * width
        # DoRA scales the results of base and adapter by a trained magnitude, and so keeps both.
        dora = s.adapted_outputs * (width + 4) if plan.use_dora else 0
        # each module has its own dropped-out copy, and a mask
        if plan.lora_dropout > 0 and not self.stack.fused_kernels:
            mask = width if self.is_cpu else _GPU_DROPOUT_MASK_BYTES
            return s.adapted_inputs * (width + mask) + rank + dora
        return s.distinct_adapted_inputs * width + rank + dora
