"""The comparison of base and tuned model on held-out rows: loss, token accuracy, graded answers, regressions."""

import time
from collections.abc import Sequence

import msgspec
import numpy as np
import torch
from tokenizers import Tokenizer

from apps.contracts.evaluation import Comparison, EvaluationPlan, EvaluationReport, Grader, GraderKind, WorseRow
from gpu_workers.train.after.graders import grade
from gpu_workers.train.after.intervals import compare_ratio, compare_scores
from gpu_workers.train.after.judge import Judge, Question, Verdicts
from gpu_workers.train.after.scoring import RowScore, score_row
from gpu_workers.train.data.examples import Example
from gpu_workers.train.model.generation import write_answers

_SHOWN_ROWS = 20
_SHOWN_CHARACTERS = 400
_WORSE_LOSS = 0.02  # nats per token: smaller differences are rounding noise


Grades = tuple[Sequence[float | None], Sequence[float | None]]  # of base and tuned, row by row; None: not scored


class Findings(msgspec.Struct, frozen=True):
    """The results of one model: a score for each row, and answers as far as time allowed."""

    scores: list[RowScore]
    answers: list[str]


class Examiner:
    """Asks one model after the other the same questions."""

    def __init__(self, examples: Sequence[Example], plan: EvaluationPlan, tokenizer: Tokenizer, *, pad_id: int) -> None:
        self._began = time.monotonic()
        self._plan = plan
        self._tokenizer = tokenizer
        self._pad_id = pad_id
        self.examples = examples[: plan.max_rows]
        self._asked = [row for row in self.examples if row.prompt is not None][: plan.max_answers]
        self._stop_ids = sorted({row.answer[-1] for row in self._asked if row.answer})
        longest = max((len(row.answer or []) for row in self._asked), default=0)
        self._answer_tokens = min(longest + 16, plan.max_answer_tokens)

    def examine(self, model: torch.nn.Module) -> Findings:
        """Score every row, then generate answers until half of the plan's time is used (each model has a half)."""
        scores = [score_row(model, example) for example in self.examples]
        ends = time.monotonic() + self._plan.seconds / 2
        written = write_answers(
            model,
            [row.prompt or [] for row in self._asked],
            stop_ids=self._stop_ids,
            pad_id=self._pad_id,
            max_tokens=self._answer_tokens,
            is_over=lambda: time.monotonic() > ends,
        )
        return Findings(scores=scores, answers=[self._text(ids) for ids in written])

    def report(self, base: Findings, tuned: Findings, *, judge: Judge | None = None) -> EvaluationReport:
        """Compare the two models. Answers that only one model had time for do not count.

        If the plan has a judge, `judge` grades. Rows that it did not score are not compared.
        """
        grader = self._plan.grader
        count = min(len(base.answers), len(tuned.answers))
        verdicts = self._ask(judge, base, tuned, count) if judge and count else None
        if verdicts:
            graded: Grades = list(verdicts.scores[::2]), list(verdicts.scores[1::2])
        else:
            graded = self._grade(base, tuned, count)
        worse = self._worse(base, tuned, graded)
        return EvaluationReport(
            rows=len(self.examples),
            answers=count,
            grader=grader.kind.value,
            comparisons=tuple(_compare(base.scores, tuned.scores, graded, grader)),
            worse_rows=len(worse),
            worse=tuple(worse[:_SHOWN_ROWS]),
            notes=(*self._notes(count), *_notes_on_judge(verdicts, graded)),
            seconds=time.monotonic() - self._began,
            judge=grader.model,
            judge_calls=verdicts.calls if verdicts else 0,
            judge_input_tokens=verdicts.input_tokens if verdicts else 0,
            judge_output_tokens=verdicts.output_tokens if verdicts else 0,
        )

    def _grade(self, base: Findings, tuned: Findings, count: int) -> Grades:
        if self._plan.grader.kind is GraderKind.JUDGE:
            return [], []
        references = self._references(count)
        graded: list[list[float | None]] = [
            [
                grade(self._plan.grader, answer, reference)
                for answer, reference in zip(found.answers, references, strict=False)
            ]
            for found in (base, tuned)
        ]
        return graded[0], graded[1]

    def _ask(self, judge: Judge, base: Findings, tuned: Findings, count: int) -> Verdicts:
        """Let the judge grade both answers to a row one after the other, so that time ends for both at the same row."""
        questions = [
            Question(question=self._text(row.prompt or []), reference=reference, answer=found.answers[index])
            for index, (row, reference) in enumerate(zip(self._asked, self._references(count), strict=False))
            for found in (base, tuned)
        ]
        return judge.judge(questions)

    def _references(self, count: int) -> list[str]:
        return [self._text((row.answer or [])[:-1]) for row in self._asked[:count]]

    def _worse(self, base: Findings, tuned: Findings, graded: Grades) -> list[WorseRow]:
        """Return the rows with a lower score or a higher loss, the worst first."""
        places = {id(row): index for index, row in enumerate(self._asked)}
        found = []
        for number, (example, before, after) in enumerate(
            zip(self.examples, base.scores, tuned.scores, strict=True), start=1
        ):
            place = places.get(id(example), len(graded[0]))
            scores = (graded[0][place], graded[1][place]) if place < len(graded[0]) else (None, None)
            losses = before.loss / before.n_tokens, after.loss / after.n_tokens
            has_lower_score = scores[0] is not None and scores[1] is not None and scores[1] < scores[0]
            if has_lower_score or losses[1] > losses[0] + _WORSE_LOSS:
                answers = [found.answers[place] if scores[0] is not None else "" for found in (base, tuned)]
                found.append(self._worse_row(number, example, losses, scores, answers))
        return sorted(
            found, key=lambda row: ((row.tuned_score or 0) - (row.base_score or 0), row.base_loss - row.tuned_loss)
        )

    def _worse_row(
        self,
        number: int,
        example: Example,
        losses: tuple[float, float],
        scores: Sequence[float | None],
        answers: list[str],
    ) -> WorseRow:
        prompt, reference = example.prompt or example.token_ids, (example.answer or [0])[:-1]
        return WorseRow(
            row=number,
            prompt=_cut(self._text(prompt), from_end=True),
            reference=_cut(self._text(reference)),
            base_loss=losses[0],
            tuned_loss=losses[1],
            base_answer=_cut(answers[0]),
            tuned_answer=_cut(answers[1]),
            base_score=scores[0],
            tuned_score=scores[1],
        )

    def _notes(self, count: int) -> list[str]:
        notes = []
        if not self._asked:
            notes.append("No row ends with a whole answer: only loss and token accuracy are compared.")
        elif count < len(self._asked):
            notes.append(f"Time was over after {count} of {len(self._asked)} answers.")
        return notes

    def _text(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(list(ids), skip_special_tokens=True).strip()


def _notes_on_judge(verdicts: Verdicts | None, graded: Grades) -> list[str]:
    if verdicts is None:
        return []
    both = sum(None not in pair for pair in zip(*graded, strict=True))
    why = ": " + verdicts.trouble.rstrip(".") if verdicts.trouble else ""
    if not both:
        return [f"There is no judge's score{why}."]
    return [] if both == len(graded[0]) else [f"The judge scored {both} of {len(graded[0])} rows{why}."]


def _compare(base: list[RowScore], tuned: list[RowScore], graded: Grades, grader: Grader) -> list[Comparison]:
    weight = np.array([score.n_tokens for score in base], dtype=float)
    losses = [np.array([score.loss for score in scores]) for scores in (base, tuned)]
    right = [np.array([score.n_correct for score in scores], dtype=float) for scores in (base, tuned)]
    found = [
        compare_ratio("loss", losses[0], losses[1], weight, is_higher_better=False),
        compare_ratio("token_accuracy", right[0], right[1], weight, is_higher_better=True),
    ]
    if scored := [pair for pair in zip(*graded, strict=True) if None not in pair]:
        before, after = np.array(scored, dtype=float).T
        found.append(compare_scores(grader.kind.value, before, after))
    return found


def _cut(text: str, *, from_end: bool = False) -> str:
    if len(text) <= _SHOWN_CHARACTERS:
        return text
    return "…" + text[-_SHOWN_CHARACTERS:] if from_end else text[:_SHOWN_CHARACTERS] + "…"
