"""The recipe of a training: its objective, its method and its hyperparameters.

WARNING: runs in flight hold this struct. Changes are additive only: a new field has a default, and a field never
changes meaning.
"""

from enum import StrEnum

from apps.contracts.struct import Struct

MIN_EVALUATED_ROWS = 256
_EVALUATION_SHARE = 0.1  # of training time


class Objective(StrEnum):
    """The training goal: answers (chat rows), plain text (text rows), or a preference between two answers."""

    SUPERVISED = "supervised"
    TEXT = "text"
    DPO = "dpo"
    ORPO = "orpo"

    @property
    def is_preference(self) -> bool:
        """Whether a row is a prompt with a better and a worse answer."""
        return self in (Objective.DPO, Objective.ORPO)


class Method(StrEnum):
    """The weights that change. DoRA and rsLoRA are flags of LoRA and QLoRA, as in PEFT."""

    LORA = "lora"
    QLORA = "qlora"
    FULL = "full"


class Hyperparameters(Struct, frozen=True, kw_only=True):
    """The recipe, with the usual names of its settings.

    `batch_size` is rows per optimizer step; one micro-step holds `batch_size / gradient_accumulation_steps` rows.
    """

    method: Method = Method.LORA
    epochs: int = 3
    learning_rate: float = 2e-4
    batch_size: int = 16
    gradient_accumulation_steps: int = 1
    gradient_checkpointing: bool = False
    warmup_ratio: float = 0.03
    lr_scheduler: str = "cosine"
    weight_decay: float = 0.0
    max_grad_norm: float = 1.0
    max_length: int = 4096
    cpu_offload: bool = False  # base weights, or all state of full training, stay in the host's memory
    packing: bool | None = None  # several rows in one sequence; None: if the attention kernel separates them
    seed: int = 42
    lora_rank: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.05
    target_modules: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    quantization: str | None = None  # "nf4" for QLoRA
    objective: Objective = Objective.SUPERVISED
    use_dora: bool = False
    use_rslora: bool = False
    dpo_beta: float = 0.1
    orpo_beta: float = 0.1  # the paper's lambda: weight of the odds-ratio term beside the preferred answer's loss
    eval_steps: int | None = None  # steps between evaluations of the validation rows; None: after each epoch
    early_stopping_patience: int | None = None  # evaluations without a better loss; None: train to the last step
    train_on: str = "assistant"  # "all": inputs are trained too
    validation_share: float = 0.0  # held out of the training file by apps.contracts.splits.split, with `seed`

    @property
    def is_servable(self) -> bool:
        """Whether the result is a plain adapter, which the engine can load; otherwise a whole model is delivered."""
        return self.method is not Method.FULL and not self.use_dora

    def evaluated_rows(self, *, steps_per_epoch: int) -> int:
        """Return the most rows that one evaluation reads, so that all take about a tenth of training time.

        Reading a row without learning takes half as long as training on it with an adapter.
        """
        trained = (self.eval_steps or steps_per_epoch) * self.batch_size
        return max(MIN_EVALUATED_ROWS, int(2 * _EVALUATION_SHARE * trained))
