"""The examination of base and tuned model after training: the comparison on held-out rows, and the certificate's probe.

Both use the 16-bit base with the adapter beside it, as in serving, if that model fits into memory. Otherwise the probe
is scored weight by weight from the files (`streamed`). The comparison is then made on the 4-bit base that a QLoRA run
trained, or in part, weight by weight.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path

import msgspec
import peft
import torch
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from apps.contracts.adapter_files import WEIGHTS_FILE
from apps.contracts.chat import ChatRenderer
from apps.contracts.evaluation import EvaluationPlan, EvaluationReport, GraderKind
from apps.contracts.hyperparameters import Method, Objective
from apps.contracts.parity import ParityProbe
from apps.contracts.runs import RunSpec
from gpu_workers.common.events import TRAINING_FILE
from gpu_workers.train.after.comparison import Examiner, Findings
from gpu_workers.train.after.judge import Judge
from gpu_workers.train.after.probe_rows import build_probe, choose_rows, first_chat, score_rows
from gpu_workers.train.after.scoring import logprobs_of, score_logits
from gpu_workers.train.data.encoding import load_renderer
from gpu_workers.train.data.examples import Example, ExampleReader
from gpu_workers.train.data.rows import Pairs, encode
from gpu_workers.train.data.selection import select_rows
from gpu_workers.train.model.hardware import detect
from gpu_workers.train.model.loading import quantization_config
from gpu_workers.train.model.memory import free_bytes
from gpu_workers.train.model.streamed import NotStreamable, StreamedModel
from gpu_workers.trainer.publication import PublishSecrets

_PARITY_ROWS = 64
_ROOM = 1.3  # times the weights: the memory of a model while it answers
_QUANTIZED_SHARE = 0.4  # of the 16-bit weights, embeddings and head included
_STREAMED_TOKENS = 16_384  # held-out tokens that are read weight by weight, in four passes over the files
_DTYPE = torch.bfloat16
_QUANTIZED_NOTE = "Compared on the 4-bit base model that was trained: the 16-bit one does not fit into this machine."

Scores = list[tuple[float, ...]]


def examine_result(
    work_dir: Path, spec: RunSpec, base: Path, trained: Path, secrets: PublishSecrets
) -> tuple[EvaluationReport | None, ParityProbe | None]:
    """Return the comparison if rows are held out, and the probe if the result is served as an adapter."""
    renderer = load_renderer(base, spec.base_model.chat_template)
    chosen = select_rows(work_dir, spec)
    held_out = (
        _examples(work_dir / chosen.validation_file, spec, renderer, chosen.validation)
        if chosen.validation_file
        else []
    )
    has_probe = is_adapter(trained) and spec.hyperparameters.is_servable
    tokenizer = Tokenizer.from_file(str(base / "tokenizer.json"))
    config = AutoConfig.from_pretrained(base, local_files_only=True, trust_remote_code=False)
    rows = held_out or (_examples(work_dir / TRAINING_FILE, spec, renderer, chosen.training) if has_probe else [])
    text_config = config.get_text_config()
    context_length = int(getattr(text_config, "max_position_embeddings", 2_048))
    pad_id = getattr(text_config, "pad_token_id", None)
    pad_id = pad_id if isinstance(pad_id, int) else 0  # any valid id: padding is masked
    fixed = choose_rows(rows[:_PARITY_ROWS], context_length=context_length) if has_probe else []
    plan = spec.evaluation or EvaluationPlan()
    subject = _subject_of(base, trained, spec)
    examiner = Examiner(subject.cut(held_out), plan, tokenizer, pad_id=pad_id) if held_out else None
    seen = subject.examine(examiner, fixed)
    report = None
    if examiner and seen.findings:
        judge = None
        if plan.grader.kind is GraderKind.JUDGE:
            judge = Judge(plan.grader, secrets.judge, seconds=plan.judge_seconds, refusal=secrets.judge_refusal)
        report = examiner.report(*seen.findings, judge=judge)
        if subject.note:
            report = msgspec.structs.replace(report, notes=(subject.note, *report.notes))
    if not fixed:
        return report, None
    is_chat = spec.hyperparameters.objective is Objective.SUPERVISED
    probe = build_probe(
        fixed,
        base=seen.base_scores,
        tuned=seen.tuned_scores,
        chat=first_chat(work_dir / TRAINING_FILE, renderer, tokenizer) if is_chat else None,
        chat_template=renderer.chat_template,
        dtype=_DTYPE,
    )
    return report, probe


def is_adapter(trained: Path) -> bool:
    return (trained / WEIGHTS_FILE).is_file()


# --- three ways to examine base and tuned model -----------------------------------------------------------------------


class Seen(msgspec.Struct, frozen=True):
    """The results of base and tuned model. `findings` is None if no rows are held out."""

    base_scores: Scores
    tuned_scores: Scores
    findings: tuple[Findings, Findings] | None


class _Dense:
    """Examines base and tuned model in memory, one after the other."""

    note = ""

    def __init__(self, base: Path, trained: Path, *, dtype: torch.dtype = _DTYPE) -> None:
        """Compare in `dtype`; the probe is always scored in 16 bits."""
        self._base = base
        self._trained = trained
        self._dtype = dtype

    def cut(self, rows: list[Example]) -> list[Example]:
        return rows

    def examine(self, examiner: Examiner | None, fixed: Sequence[Sequence[int]]) -> Seen:
        model = self._load()
        before = self._compare(examiner, model)
        base_scores = score_rows(model, fixed)
        model = self._tune(model)
        after = self._compare(examiner, model)
        tuned_scores = score_rows(model, fixed)
        return Seen(base_scores, tuned_scores, (before, after) if before and after else None)

    def _compare(self, examiner: Examiner | None, model: torch.nn.Module) -> Findings | None:
        if examiner is None:
            return None
        widened = [each for each in model.parameters() if each.dtype is _DTYPE and self._dtype is not _DTYPE]
        for parameter in widened:
            parameter.data = parameter.data.to(self._dtype)
        found = examiner.examine(model)
        for parameter in widened:
            parameter.data = parameter.data.to(_DTYPE)  # exact: it came from 16 bits
        return found

    def _load(self) -> PreTrainedModel:
        return _load(self._base)

    def _tune(self, model: PreTrainedModel) -> PreTrainedModel | peft.PeftModel:
        if not is_adapter(self._trained):
            return _load(self._trained)
        of_base = {id(parameter) for parameter in model.parameters()}
        adapted = peft.PeftModel.from_pretrained(model, self._trained, autocast_adapter_dtype=False)
        for parameter in adapted.parameters():  # of the adapter alone: the base's rotary frequencies stay in float32
            if id(parameter) not in of_base:
                parameter.data = parameter.data.to(model.device, _DTYPE)
        return adapted.eval()


class _Quantized(_Dense):
    """Compares on the 4-bit base that was trained, and scores the probe on the 16-bit base, weight by weight."""

    note = _QUANTIZED_NOTE

    def examine(self, examiner: Examiner | None, fixed: Sequence[Sequence[int]]) -> Seen:
        found = super().examine(examiner, ()).findings if examiner else None
        if not fixed:
            return Seen([], [], found)
        probe = _Streamed(self._base, self._trained).examine(None, fixed)
        return Seen(probe.base_scores, probe.tuned_scores, found)

    def _load(self) -> PreTrainedModel:
        return _load(self._base, quantization_config=quantization_config(_DTYPE))

    def _tune(self, model: PreTrainedModel) -> peft.PeftModel:
        return peft.PeftModel.from_pretrained(model, self._trained, autocast_adapter_dtype=False).eval()


class _Streamed:
    """Scores some of the held-out rows weight by weight from the files, and generates no answers."""

    def __init__(self, base: Path, trained: Path) -> None:
        self._base = base
        self._trained = trained
        self.note = ""

    def cut(self, rows: list[Example]) -> list[Example]:
        tokens = 0
        kept: list[Example] = []
        for row in rows:
            tokens += len(row.token_ids)
            if kept and tokens > _STREAMED_TOKENS:
                break
            kept.append(row)
        self.note = (
            f"The base model does not fit into this machine: loss and token accuracy of {len(kept)} rows are compared, "
            "and no answers."
        )
        return kept

    def examine(self, examiner: Examiner | None, fixed: Sequence[Sequence[int]]) -> Seen:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        is_beside = is_adapter(self._trained)
        model = StreamedModel(self._base, dtype=_DTYPE, device=device)
        tuned = model if is_beside else StreamedModel(self._trained, dtype=_DTYPE, device=device)
        base_scores, before = _score(model, examiner, fixed)
        with model.adapted(self._trained) if is_beside else nullcontext():
            tuned_scores, after = _score(tuned, examiner, fixed)
        return Seen(base_scores, tuned_scores, (before, after) if before and after else None)


def _score(
    model: StreamedModel, examiner: Examiner | None, fixed: Sequence[Sequence[int]]
) -> tuple[Scores, Findings | None]:
    scores = [logprobs_of(logits, row) for row, logits in zip(fixed, model.score(fixed), strict=True)]
    if examiner is None:
        return scores, None
    rows = examiner.examples
    logits = model.score([row.token_ids for row in rows])
    found = [score_logits(each, row) for row, each in zip(rows, logits, strict=True)]
    return scores, Findings(scores=found, answers=[])


def _subject_of(base: Path, trained: Path, spec: RunSpec) -> _Dense | _Streamed:
    recipe = spec.hyperparameters
    needed = _ROOM * sum(file.stat().st_size for file in base.glob("*.safetensors"))
    free = free_bytes()
    if needed <= free:
        # Many CPUs multiply 16-bit numbers one at a time.
        is_slow = not detect().has_bf16 and not torch.cuda.is_available()
        return _Dense(base, trained, dtype=torch.float32 if is_slow and 2 * needed <= free else _DTYPE)
    if recipe.method is Method.QLORA and _QUANTIZED_SHARE * needed <= free:
        return _Quantized(base, trained)
    if recipe.use_dora:
        raise NotStreamable("the base model does not fit into this machine, and DoRA is not compared weight by weight")
    return _Streamed(base, trained)


def _load(folder: Path, **options: object) -> PreTrainedModel:
    """Return a model as it is served: 16 bits, dense, on the accelerator if there is one."""
    if torch.cuda.is_available():
        options["device_map"] = {"": torch.cuda.current_device()}
    model = AutoModelForCausalLM.from_pretrained(
        folder, local_files_only=True, trust_remote_code=False, use_safetensors=True, dtype=_DTYPE, **options
    )
    return model.eval()


# --- rows -------------------------------------------------------------------------------------------------------------


def _examples(path: Path, spec: RunSpec, renderer: ChatRenderer, keep: Sequence[bool] | None) -> list[Example]:
    recipe = spec.hyperparameters
    rows = encode(path, renderer, recipe, keep=keep)
    reader = ExampleReader(renderer.tokenizer, max_length=recipe.max_length)
    if isinstance(rows, Pairs):
        return [reader.read_preferred(pair) for pair in rows.rows]
    is_chat = recipe.objective is Objective.SUPERVISED
    return [reader.read(rows.input_ids[i], rows.labels[i], can_be_asked=is_chat) for i in range(len(rows))]
