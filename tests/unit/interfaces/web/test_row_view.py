from pathlib import Path

import pytest

from apps.contracts.chat import ChatRenderer, ChatRow, parse_row
from apps.interfaces.web.datasets.row_view import RowView, row_view

FOLDER = Path(__file__).resolve().parents[4] / "demo/base_model"


@pytest.fixture(scope="module")
def renderer() -> ChatRenderer:
    return ChatRenderer.from_folder(FOLDER)


def parsed(*messages: str) -> ChatRow:
    return parse_row(f'{{"messages": [{", ".join(messages)}]}}'.encode(), line_number=1)


def view(renderer: ChatRenderer, row: ChatRow) -> RowView:
    return row_view(row, renderer.render(row), renderer)


ROW = parsed(
    '{"role": "system", "content": "Be brief."}',
    '{"role": "user", "content": "Hi"}',
    '{"role": "assistant", "content": "Hello", "weight": 0}',
    '{"role": "user", "content": "Hi"}',
    '{"role": "assistant", "content": "Again"}',
)


def test_every_character_is_shown_once_in_the_turn_of_its_message(renderer: ChatRenderer) -> None:
    shown = view(renderer, ROW)

    texts = ["".join(piece.text for part in turn.parts for piece in part.pieces) for turn in shown.turns]
    assert "".join(texts) == renderer.render(ROW).text
    assert [turn.role for turn in shown.turns] == ["system", "user", "assistant", "user", "assistant"]
    assert texts[1] == "<|user|>Hi<|end|>"
    assert texts[4] == "<|assistant|>Again<|end|>"


def test_only_what_is_trained_is_marked_and_control_tokens_are_told_apart(renderer: ChatRenderer) -> None:
    last = view(renderer, ROW).turns[-1]

    marked = [(part.is_trained, [(piece.text, piece.is_control) for piece in part.pieces]) for part in last.parts]
    assert marked == [
        (False, [("<|assistant|>", True)]),
        (True, [("Again", False), ("<|end|>", True)]),
    ]
    assert not any(part.is_trained for turn in view(renderer, ROW).turns[:-1] for part in turn.parts)


def test_tokens_add_up_by_turn(renderer: ChatRenderer) -> None:
    shown, rendered = view(renderer, ROW), renderer.render(ROW)

    assert sum(turn.tokens for turn in shown.turns) == shown.token_count == rendered.n_tokens
    assert sum(turn.trained_tokens for turn in shown.turns) == shown.trained_count == rendered.n_trained
    assert "".join(token.text for token in shown.tokens) == rendered.text
    assert [token.text for token in shown.tokens if token.is_trained][-1] == "<|end|>"


def test_a_template_that_rewrites_the_text_is_shown_in_one_piece() -> None:
    shouting = "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] | upper + '<|end|>' }}{% endfor %}"
    shouting += "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    renderer = ChatRenderer(shouting, FOLDER / "tokenizer.json")

    shown = view(renderer, parsed('{"role": "user", "content": "hi"}', '{"role": "assistant", "content": "yo"}'))

    assert [turn.role for turn in shown.turns] == ["conversation"]
    assert shown.turns[0].tokens == shown.token_count


def test_a_very_long_row_shows_its_first_tokens(renderer: ChatRenderer) -> None:
    words = " ".join(["word"] * 4_000)
    row = parsed(f'{{"role": "user", "content": "{words}"}}', '{"role": "assistant", "content": "ok"}')

    shown = view(renderer, row)

    assert len(shown.tokens) == 2_000
    assert shown.hidden_token_count == shown.token_count - 2_000 > 0
