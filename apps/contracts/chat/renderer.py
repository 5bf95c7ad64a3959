"""Rendering of rows with a base model's chat template and tokenizer."""

import hashlib
import json
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from tokenizers import Tokenizer

from apps.contracts.chat.encoding import ranges_by_offsets
from apps.contracts.chat.rendered import RenderedPair, RenderedRow, Span, TrainOn
from apps.contracts.chat.rows import ChatMessage, ChatRow, PreferenceRow, TextRow
from apps.contracts.chat.texts import Text, TextMaker
from apps.contracts.chat.tokenizer_files import load_tokenizer, read_model_texts, read_tokenizer
from apps.contracts.templating.process import TemplateProcess, shared_process

# Increased when a row could give other tokens or another mask; part of every renderer's fingerprint.
RENDERING_VERSION = 2
_BATCH_CHARACTERS = 1_000_000
_BATCHES_AHEAD = 2

Encoded = tuple[list[int], tuple[Span, ...]]


class ChatRenderer:
    """A chat template with its tokenizer: rows in; text, token ids and trained ranges out. Deterministic.

    `tokenizer_json` is the content of the file (str or bytes) or its Path. The ids equal those of
    `apply_chat_template(..., tokenize=True)`, and so those of serving. The template runs in a separate process with
    limited time and memory.
    """

    def __init__(
        self,
        chat_template: str,
        tokenizer_json: str | bytes | Path,
        *,
        bos_token: str = "",
        eos_token: str = "",
        pad_token: str = "",
        unk_token: str = "",
        process: TemplateProcess | None = None,
    ) -> None:
        content = read_tokenizer(tokenizer_json)
        self._tokenizer = load_tokenizer(content)
        tokens = {"bos_token": bos_token, "eos_token": eos_token, "pad_token": pad_token, "unk_token": unk_token}
        self._tokens = {name: token for name, token in tokens.items() if token}
        self.chat_template = chat_template
        special = json.dumps(self._tokens, sort_keys=True)
        digest = hashlib.sha256(f"{RENDERING_VERSION}\0{chat_template}\0{special}\0".encode())
        digest.update(content)
        self.fingerprint = digest.hexdigest()
        self._texts = TextMaker(
            chat_template, self._tokenizer, self._tokens, process or shared_process, self.fingerprint
        )

    @classmethod
    def from_folder(cls, folder: Path, *, chat_template: str = "") -> "ChatRenderer":
        """Return a renderer from a folder, read as `from_pretrained` does; a given template replaces the folder's."""
        texts = read_model_texts(folder, chat_template)
        tokens = texts.tokens
        return cls(
            texts.chat_template,
            folder / "tokenizer.json",
            bos_token=tokens["bos_token"],
            eos_token=tokens["eos_token"],
            pad_token=tokens["pad_token"],
            unk_token=tokens["unk_token"],
        )

    @property
    def special_tokens(self) -> dict[str, str]:
        """The tokens that the template may use; pass them back to build the same renderer without the folder."""
        return dict(self._tokens)

    @property
    def tokenizer(self) -> Tokenizer:
        return self._tokenizer

    def render(self, row: ChatRow | TextRow, *, train_on: TrainOn = TrainOn.ASSISTANT) -> RenderedRow:
        """Render one row the exact way. Raises TemplateRejectedRow, TemplateNotPrefixStable or RowError."""
        [text] = self._texts.make([row], train_on, by_layout=False)
        if text.error is not None:
            raise text.error
        encoding = self._tokenizer.encode(text.text, add_special_tokens=text.is_plain)
        return _row(text, (encoding.ids, ranges_by_offsets(encoding, text.spans)), train_on)

    def render_pair(self, row: PreferenceRow) -> RenderedPair:
        """Render both conversations of a preference; raise as `render` does."""
        return RenderedPair(self.render(row.chosen), self.render(row.rejected))

    def render_many(
        self, rows: Iterable[ChatRow | TextRow], *, batch_size: int = 512, train_on: TrainOn = TrainOn.ASSISTANT
    ) -> Iterator[RenderedRow]:
        """Yield the rows rendered as by `render`, in order and batches; later batches are encoded in the background."""
        batches: deque[tuple[list[Text], Future[list[Encoded]]]] = deque()
        with ThreadPoolExecutor(max_workers=1) as encoder:
            for batch in _batches(rows, batch_size):
                texts = self._texts.make(batch, train_on)
                batches.append((texts, encoder.submit(self._encode, texts)))
                if len(batches) > _BATCHES_AHEAD:
                    yield from _rows(*batches.popleft(), train_on)
            while batches:
                yield from _rows(*batches.popleft(), train_on)

    def require_renderable(self, rows: Iterable[ChatRow | TextRow], *, batch_size: int = 512) -> None:
        """Raise the error that `render_many` would raise, without counting tokens, which takes most of its time."""
        for batch in _batches(rows, batch_size):
            for text in self._texts.make(batch, TrainOn.ASSISTANT):
                if text.error is not None:
                    raise text.error

    def render_pairs(self, rows: Iterable[PreferenceRow], *, batch_size: int = 256) -> Iterator[RenderedPair]:
        """Yield preferences rendered as by `render_pair`, in order."""
        sides = self.render_many((side for row in rows for side in (row.chosen, row.rejected)), batch_size=batch_size)
        for chosen in sides:
            yield RenderedPair(chosen, next(sides))

    def render_prompt(self, messages: Iterable[ChatMessage]) -> str:
        """Return the text at which an inference request with these messages starts."""
        return self._texts.render_prompt(list(messages))

    def token_spans(self, text: str, *, is_plain: bool = False) -> list[Span]:
        """Return the span of each token in a rendered text."""
        return list(self._tokenizer.encode(text, add_special_tokens=is_plain).offsets)

    def control_spans(self, text: str) -> list[Span]:
        """Return the spans of control tokens, such as the end of a turn, in a rendered text."""
        return [found.span() for found in self._texts.control.finditer(text)]

    def _encode(self, texts: list[Text]) -> list[Encoded]:
        """Return ids and trained ranges of each text, the fast way where its plan fits."""
        encoded: list[Encoded | None] = [None] * len(texts)
        quick = [at for at, text in enumerate(texts) if text.plan is not None]
        batch = self._tokenizer.encode_batch_fast([texts[at].text for at in quick], add_special_tokens=False)
        for at, encoding in zip(quick, batch, strict=True):
            ids, plan = encoding.ids, texts[at].plan
            ranges = plan.ranges(ids) if plan is not None else None
            encoded[at] = None if ranges is None else (ids, ranges)
        for is_plain in (False, True):
            rest = [at for at, done in enumerate(encoded) if done is None and texts[at].is_plain is is_plain]
            slow = self._tokenizer.encode_batch([texts[at].text for at in rest], add_special_tokens=is_plain)
            for at, encoding in zip(rest, slow, strict=True):
                encoded[at] = (encoding.ids, ranges_by_offsets(encoding, texts[at].spans))
        return [each for each in encoded if each is not None]


def _batches(rows: Iterable[ChatRow | TextRow], size: int) -> Iterator[list[ChatRow | TextRow]]:
    batch: list[ChatRow | TextRow] = []
    characters = 0
    for row in rows:
        batch.append(row)
        characters += len(row.text) if isinstance(row, TextRow) else sum([len(m.content) for m in row.messages])
        if len(batch) == size or characters > _BATCH_CHARACTERS:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


def _rows(texts: list[Text], encoded: "Future[list[Encoded]]", train_on: TrainOn) -> Iterator[RenderedRow]:
    for text, row in zip(texts, encoded.result(), strict=True):
        if text.error is not None:
            raise text.error
        yield _row(text, row, train_on)


def _row(text: Text, encoded: Encoded, train_on: TrainOn) -> RenderedRow:
    ids, ranges = encoded
    if text.is_plain or train_on is TrainOn.ALL:
        return RenderedRow(text.text, ((0, len(text.text)),), ids, ((0, len(ids)),))
    return RenderedRow(text.text, tuple(text.spans), ids, ranges)
