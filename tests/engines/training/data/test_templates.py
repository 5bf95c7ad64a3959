"""Ids and mask against TRL's own data preparation, for the chat templates of the catalogue's model families.

The templates are those of the installed TRL (`trl/chat_templates`, Apache License 2.0, Copyright The HuggingFace
Team; each names the model repository it was taken from). Tokenizers stand in: one byte-level, one with word marks, each
with the control tokens the template writes.
"""

import datetime
import json
import random
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import trl
from datasets import Dataset
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import SFTConfig, SFTTrainer

from apps.contracts.chat import ChatRenderer, RowError, RowKind, TrainOn, parse_row, parse_row_as
from apps.contracts.templating.environment import TEMPLATE_DATE
from gpu_workers.train.data.examples import ExampleReader

ROOT = Path(__file__).parents[4]
TEMPLATES = Path(trl.__file__).parent / "chat_templates"
# The families of apps/catalog/data/models.json that TRL can mask. Mistral, SmolLM2, TinyLlama and Phi-4 are not among
# them: TRL refuses assistant-only loss for their templates.
MASKED_BY_TRL = (
    "llama3", "qwen2_5", "qwen3", "qwen3_instruct_2507", "gemma", "gemma3", "phi3", "phi3_5", "gptoss",
    "deepseek_r1_distill",
)  # fmt: skip
# gpt-oss asks whether a message *has* tool calls, and TRL's Arrow columns give every message the key: TRL fails on it.
WITH_TOOLS = ("qwen2_5", "qwen3", "qwen3_instruct_2507")
WITHOUT_SYSTEM = ("gemma",)
# Families of no catalogue model. TRL has templates with marks for some: what those give is what TRL trains.
MARKED_BY_TRL = ("cohere", "cohere2", "deepseekv3", "glm4moe", "lfm2")
IDS_ONLY = ("llama3_1", "llama3_2", "cohere", "cohere2", "deepseekv3", "glm4moe", "lfm2")
ROWS = 40
PIECES = (
    "Hello", " world", "\n", "\n\n", "  ", "Grüße", "😀👍🏽", "é", "日本語", "{\"a\": [1, 2]}", "it's", " 12,345.67",
    "<b>",
    "def f(x):\n    return x", "user", "assistant", "<", "|", "</s", "#", "…", "\t", "model", "think",
)  # fmt: skip
TOOL = {"type": "function", "function": {"name": "add", "description": "Adds.", "parameters": {
    "type": "object", "properties": {"a": {"type": "number", "description": "One."}}, "required": ["a"]}}}  # fmt: skip


@pytest.fixture(autouse=True)
def _on_our_day(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let `strftime_now` of transformers say the day it says here always."""

    class Frozen(datetime.datetime):
        @classmethod
        def now(cls, tz: datetime.tzinfo | None = None) -> datetime.datetime:
            return TEMPLATE_DATE

    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Frozen)


@cache
def template(name: str) -> str:
    return (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")


@cache
def tokenizer(name: str) -> PreTrainedTokenizerFast:
    """A tokenizer that knows the template's control tokens."""
    text = template(name)
    base = words() if name.startswith(("gemma", "cohere")) else Tokenizer.from_file(
        str(ROOT / "demo/base_model/tokenizer.json")
    )  # fmt: skip
    base.post_processor = None
    control = re.findall(
        r"<\|[^|<>]+\|>|<｜[^｜]+｜>|<(?:start|end)_of_turn>|\[[a-z]?gMASK\]|<sop>|<\|[A-Z_]+\|>", text
    )
    base.add_special_tokens(sorted({*control, "<s>", "</s>"}))
    base.add_tokens([token for token in ("<think>", "</think>", "<tool_call>", "</tool_call>") if token in text])
    return PreTrainedTokenizerFast(
        tokenizer_object=base, bos_token="<s>", eos_token="</s>", pad_token="</s>", chat_template=text
    )


def words() -> Tokenizer:
    """A small tokenizer of the kind of Gemma's and Llama 2's: spaces become word marks, bytes for what is unknown."""
    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    made.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")])
    bytes_and_unknown = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=1500, special_tokens=bytes_and_unknown, show_progress=False)
    made.train_from_iterator((ROOT / "README.md").read_text(encoding="utf-8").splitlines(), trainer)
    return made


def renderer(name: str, chat_template: str) -> ChatRenderer:
    known = tokenizer(name)
    return ChatRenderer(
        chat_template, known.backend_tokenizer.to_str(), bos_token="<s>", eos_token="</s>", pad_token="</s>"
    )


def made_up(rng: random.Random) -> str:
    return "".join(rng.choice(PIECES) for _ in range(rng.randint(1, 8))).strip("\n") or "x"


def conversation(name: str, rng: random.Random) -> dict[str, Any]:
    """A conversation as a customer writes it."""
    messages: list[dict[str, Any]] = []
    if name not in WITHOUT_SYSTEM and rng.random() < 0.4:
        messages.append({"role": "system", "content": made_up(rng)})
    for _ in range(rng.choice((1, 1, 2, 3))):
        messages.append({"role": "user", "content": made_up(rng)})
        messages.append({"role": "assistant", "content": made_up(rng) + "."})
    if name not in WITH_TOOLS or rng.random() < 0.7:
        return {"messages": messages}
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1}'}}
    asked = [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "tool_call_id": "c1"},
    ]
    return {"messages": [*messages[:-1], *asked, messages[-1]], "tools": [TOOL]}


def for_trl(row: dict[str, Any]) -> dict[str, Any]:
    """The same conversation as TRL expects it: arguments as objects, the tools as JSON text."""
    messages = json.loads(json.dumps(row["messages"]))
    for message in messages:
        message["content"] = message["content"] or ""
        for call in message.get("tool_calls", []):
            call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    return {"messages": messages, "tools": json.dumps(row["tools"]) if "tools" in row else None}


def conversations(name: str) -> list[dict[str, Any]]:
    rng = random.Random(name)
    return [conversation(name, rng) for _ in range(ROWS)]


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer makes ./trainer_output wherever it is made."""
    monkeypatch.chdir(tmp_path)


def prepared_by_trl(rows: list[dict[str, Any]], processing: PreTrainedTokenizerFast, **config: Any) -> list[Any]:
    """What SFTTrainer itself would train on: (ids, labels) of each row."""
    model = LlamaForCausalLM(
        LlamaConfig(vocab_size=len(processing), hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                    num_attention_heads=1, bos_token_id=None, eos_token_id=None)
    )  # fmt: skip
    arguments = SFTConfig(use_cpu=True, bf16=False, report_to="none", max_length=None, **config)
    trainer = SFTTrainer(model, arguments, train_dataset=Dataset.from_list(rows), processing_class=processing)
    return [(row["input_ids"], row.get("labels") or row["input_ids"]) for row in trainer.train_dataset]


def ours(made: ChatRenderer, rows: list[dict[str, Any]], **options: Any) -> list[Any]:
    parsed = [parse_row(json.dumps(row).encode(), line_number=at) for at, row in enumerate(rows)]
    rendered = list(made.render_many(parsed, **options))
    assert rendered == [made.render(row, **options) for row in parsed]
    return [(row.token_ids, row.labels(-100)) for row in rendered]


@pytest.mark.parametrize("name", MASKED_BY_TRL + MARKED_BY_TRL)
def test_a_template_with_marks_gives_trls_ids_and_mask(name: str) -> None:
    rows = conversations(name)
    marked = template(f"{name}_training")

    theirs = prepared_by_trl([for_trl(row) for row in rows], tokenizer(name), assistant_only_loss=True)

    assert ours(renderer(name, marked), rows) == theirs


@pytest.mark.parametrize("name", MASKED_BY_TRL)
def test_the_models_own_template_gives_its_ids_and_trls_mask(name: str) -> None:
    """TRL patches some templates so that they render other text (Qwen3 keeps empty thoughts in every turn, R1 keeps
    them all). The pinned template decides here; where TRL trains the same ids, the mask is the same."""
    rows = conversations(name)
    known = tokenizer(name)
    mine = ours(renderer(name, template(name)), rows)

    theirs = prepared_by_trl([for_trl(row) for row in rows], known, assistant_only_loss=True)

    messages = [for_trl(row) for row in rows]
    assert [ids for ids, _ in mine] == [
        known.apply_chat_template(
            row["messages"], tools=json.loads(row["tools"]) if row["tools"] else None, return_dict=False
        )
        for row in messages
    ]
    same = [(one, other) for one, other in zip(mine, theirs, strict=True) if one[0] == other[0]]
    assert len(same) == ROWS if name != "qwen3" else len(same) > ROWS / 4
    assert [one for one, _ in same] == [other for _, other in same]
    assert all(any(label != -100 for label in labels) for _, labels in mine)


@pytest.mark.parametrize("name", MASKED_BY_TRL)
def test_a_question_ends_with_its_whole_answer_and_a_cut_one_is_not_asked(name: str) -> None:
    messages = [
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Good day."},
        {"role": "user", "content": "Which colour?"},
        {"role": "assistant", "content": "Red it is."},
    ]
    row = parse_row(json.dumps({"messages": messages}).encode(), line_number=1)
    made = renderer(name, template(name))
    reader, rendered = ExampleReader(made.tokenizer, max_length=4_096), made.render(row)

    whole = reader.read(rendered.token_ids, rendered.labels(-100), can_be_asked=True)

    assert whole.prompt is not None and whole.answer is not None
    assert "Which colour?" in made.tokenizer.decode(whole.prompt)
    assert "Red it is" not in made.tokenizer.decode(whole.prompt)
    *words, end = whole.answer
    assert made.tokenizer.decode(words, skip_special_tokens=True).strip().endswith("Red it is.")
    assert made.tokenizer.get_added_tokens_decoder()[end].special
    for length in range(len(whole.prompt) + 1, rendered.n_tokens):
        cut, cut_reader = rendered.truncate(length), ExampleReader(made.tokenizer, max_length=length)
        assert cut_reader.read(cut.token_ids, cut.labels(-100), can_be_asked=True).prompt is None
    later = [*messages, {"role": "user", "content": "Why?"}, {"role": "assistant", "content": "No.", "weight": 0}]
    other = made.render(parse_row(json.dumps({"messages": later}).encode(), line_number=1))
    assert reader.read(other.token_ids, other.labels(-100), can_be_asked=True).prompt is None
    unasked = reader.read(rendered.token_ids, rendered.labels(-100), can_be_asked=False)
    assert unasked.prompt is None and unasked.token_ids == whole.token_ids


@pytest.mark.parametrize("name", IDS_ONLY)
def test_ids_are_those_of_the_template_of_other_families(name: str) -> None:
    rows = conversations("gemma")
    made, known = renderer(name, template(name)), tokenizer(name)
    try:
        mine = ours(made, rows)
    except RowError as error:
        pytest.fail(f"{name}: {error}")

    assert [ids for ids, _ in mine] == [
        known.apply_chat_template(for_trl(row)["messages"], return_dict=False) for row in rows
    ]
    assert all(0 < sum(label != -100 for label in labels) < len(ids) for ids, labels in mine)


@pytest.mark.slow
@pytest.mark.parametrize("name", MASKED_BY_TRL)
def test_completions_and_whole_rows_are_masked_as_trl_does(name: str) -> None:
    rows = [{"messages": row["messages"]} for row in conversations(name) if "tools" not in row][:15]
    known, made = tokenizer(name), renderer(name, template(name))
    pairs = [{"prompt": row["messages"][:-1], "completion": row["messages"][-1:]} for row in rows]

    assert ours(made, rows, train_on=TrainOn.COMPLETION) == prepared_by_trl(pairs, known)
    assert ours(made, rows, train_on=TrainOn.ALL) == prepared_by_trl(rows, known)


def test_plain_text_is_tokenised_as_trl_does() -> None:
    rng = random.Random(1)
    rows = [{"text": made_up(rng) + "."} for _ in range(ROWS)]
    parsed = [parse_row_as(json.dumps(row).encode(), RowKind.TEXT, line_number=1) for row in rows]

    mine = [(row.token_ids, row.labels(-100)) for row in renderer("llama3", template("llama3")).render_many(parsed)]

    assert mine == prepared_by_trl(rows, tokenizer("llama3"))
