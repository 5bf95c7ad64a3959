"""The spans of trained answers in a rendered conversation.

If a template marks what the model writes, its marks are used. Otherwise those of its marked twin are used, if both
render the same text (TRL itself trains with these twins). With any other template an answer starts where the generation
prompt ends, and ends with the token that ends the turn.
"""

import re
from collections.abc import Sequence
from typing import Any

from apps.contracts.templating.environment import TEMPLATE_FAULTS, ChatTemplate, Span

Messages = Sequence[dict[str, Any]]
Tools = list[dict[str, Any]] | None


class NotPrefixStable(Exception):
    """The answer of message `index` cannot be separated from the text around it."""

    def __init__(self, index: int) -> None:
        super().__init__(index)
        self.index = index


class SpanFinder:
    """One template, its marked twin if any, and the control tokens of its tokenizer."""

    def __init__(self, template: ChatTemplate, twin: ChatTemplate | None, control_tokens: Sequence[str]) -> None:
        self._template = template
        self._twin = twin
        self._control = control_pattern(control_tokens)

    def render(self, messages: Messages, tools: Tools, trained: Sequence[int] | None) -> tuple[str, list[Span]]:
        """Return the text and the spans of the trained messages. Raises TEMPLATE_FAULTS or NotPrefixStable.

        Without `trained`, the one span is everything after the generation prompt of the last message.
        """
        text, marked = self._template.render(messages, tools)
        if trained is None:
            return text, [(self._shared_length(text, self.render_prompt(messages[:-1], tools)), len(text))]
        marked = marked or self._marked_by_twin(messages, tools, text)
        chosen = _choose(marked, messages, trained) if marked else None
        if chosen is not None:
            return text, chosen
        return text, [self._find_answer(text, messages, tools, index) for index in trained]

    def render_prompt(self, messages: Messages, tools: Tools) -> str:
        """Return the text at which an inference request with these messages starts."""
        return self._template.render(messages, tools, add_generation_prompt=True)[0]

    def _shared_length(self, text: str, before: str) -> int:
        """Return how much of a prompt the text starts with.

        Where they differ, only a control token ends the shared part reliably: the texts after it may start alike.
        """
        if text.startswith(before):
            return len(before)
        parting = next((at for at, (a, b) in enumerate(zip(text, before, strict=False)) if a != b), len(text))
        return max((found.end() for found in self._control.finditer(text, 0, parting)), default=parting)

    def _marked_by_twin(self, messages: Messages, tools: Tools, text: str) -> list[Span]:
        if self._twin is None:
            return []
        try:
            twin_text, spans = self._twin.render(messages, tools)
        except TEMPLATE_FAULTS:
            return []
        return spans if twin_text == text else []

    def _find_answer(self, text: str, messages: Messages, tools: Tools, index: int) -> Span:
        before = self.render_prompt(messages[:index], tools)
        is_last = index == len(messages) - 1
        through = text if is_last else self._template.render(messages[: index + 1], tools)[0]
        if text.startswith(before) and through.startswith(before) and text.startswith(through):
            return len(before), self._end_of_turn(text, len(before), len(through))
        return self._find_by_generation_prompt(text, before, messages, tools, index)

    def _end_of_turn(self, text: str, start: int, limit: int) -> int:
        """Return the end of the turn's last control token, or of its text if it has none."""
        ends = [found.end() for found in self._control.finditer(text, start, limit)]
        return ends[-1] if ends else start + len(text[start:limit].rstrip())

    def _find_by_generation_prompt(self, text: str, before: str, messages: Messages, tools: Tools, index: int) -> Span:
        """Find an answer by its opening, for a template that renders earlier turns differently.

        Rows cannot contain control tokens, so the opening occurs once per answer in the text.
        """
        closed = self._template.render(messages[:index], tools)[0] if index else ""
        opening = before.removeprefix(closed) if before.startswith(closed) else ""
        first = self._control.search(opening)
        if first is None:
            raise NotPrefixStable(index)
        answers = [at for at, message in enumerate(messages) if message["role"] == "assistant"]
        for opened in (opening, opening[: first.end()]):
            starts = [found.end() for found in re.finditer(re.escape(opened), text)]
            if len(starts) == len(answers):
                start = starts[answers.index(index)]
                following = text.find(first.group(), start)
                return start, self._end_of_turn(text, start, len(text) if following < 0 else following)
        raise NotPrefixStable(index)


def control_pattern(tokens: Sequence[str]) -> re.Pattern[str]:
    """Return a pattern that matches any of the control tokens, longest first."""
    longest_first = sorted((token for token in tokens if token), key=len, reverse=True)
    return re.compile("|".join(re.escape(token) for token in longest_first) or r"(?!)")


def _choose(marked: list[Span], messages: Messages, trained: Sequence[int]) -> list[Span] | None:
    """Return the marked spans of the trained messages, None if the assignment is ambiguous."""
    answers = [index for index, message in enumerate(messages) if message["role"] == "assistant"]
    if len(answers) == len(trained):
        return marked
    if len(marked) == len(answers):
        return [marked[answers.index(index)] for index in trained]
    return None
