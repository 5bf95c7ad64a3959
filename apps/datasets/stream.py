"""Byte streams of a dataset's file: hashing, peeking, line offsets, and a limit on expansion."""

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain

from apps.datasets.problems import FileErrorCode, Rejected

CHUNK_BYTES = 256 * 1024
LINES_PER_OFFSET = 256
UTF8_MARK = b"\xef\xbb\xbf"
MAX_BLANKS = 512 * 1024  # bytes in succession, more than a chunk: those within a chunk are not counted
# How much more than its own size a compressed file may hold. Text rarely shrinks to a fifth, bombs to a thousandth.
MAX_EXPANSION = 50
FREE_EXPANSION_BYTES = 64 * 1024 * 1024
MAX_EXPANDED_BYTES = 32 * 1024**3  # also limited by the file's reading time and storage

Chunks = Iterable[bytes]


class Peekable:
    """A stream whose first bytes can be read in advance."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = iter(chunks)
        self._seen: list[bytes] = []
        self._seen_bytes = 0

    def peek(self, size: int) -> bytes:
        """Return the first bytes, fewer where the stream is shorter."""
        while self._seen_bytes < size and (chunk := next(self._chunks, b"")):
            self._seen.append(chunk)
            self._seen_bytes += len(chunk)
        return b"".join(self._seen)[:size]

    def __iter__(self) -> Iterator[bytes]:
        seen, self._seen, self._seen_bytes = self._seen, [], 0
        yield from seen
        yield from self._chunks


class Hashed:
    """A stream that is hashed and counted as it passes."""

    def __init__(self, chunks: Chunks) -> None:
        self._chunks = iter(chunks)
        self._digest = hashlib.sha256()
        self.bytes = 0

    def __iter__(self) -> Iterator[bytes]:
        for chunk in self._chunks:
            self._digest.update(chunk)
            self.bytes += len(chunk)
            yield chunk

    @property
    def sha256(self) -> str:
        return self._digest.hexdigest()


def without_long_blanks(chunks: Chunks) -> Iterator[bytes]:
    """Yield a text while it has few blanks in succession. Raises Rejected.

    A reader of one row also reads the blank lines before it, which nothing else limits.
    """
    blanks = 0
    for chunk in chunks:
        text = chunk.strip()
        blanks += len(chunk) - (len(chunk.lstrip()) if text else 0)
        if blanks > MAX_BLANKS:
            message = f"The file has more than {MAX_BLANKS // 1024} KiB of blank lines or spaces in one place."
            raise Rejected(FileErrorCode.TOO_MANY_BLANKS, message, "Remove them.")
        if text:
            blanks = len(chunk) - len(chunk.rstrip())
        yield chunk


class LineOffsets:
    """The start of every LINES_PER_OFFSET-th line of a stream."""

    def __init__(self) -> None:
        self.offsets: list[int] = [0]
        self._size = self._lines = 0

    def note(self, chunk: bytes) -> bytes:
        """Record the next bytes and return them."""
        left, position = chunk.count(b"\n"), -1
        while left >= (missing := LINES_PER_OFFSET - self._lines):
            for _ in range(missing):
                position = chunk.index(b"\n", position + 1)
            self.offsets.append(self._size + position + 1)
            left, self._lines = left - missing, 0
        self._lines += left
        self._size += len(chunk)
        return chunk


def replace_line(chunks: Chunks, number: int, data: bytes) -> Iterator[bytes]:
    """Yield a stream with `data` in place of one line and its line break. Lines are numbered from 1."""
    line = 1  # in which the rest of the stream begins
    for chunk in chunks:
        rest = chunk
        if line < number:
            skipped = min(number - line, rest.count(b"\n"))
            position = 0
            for _ in range(skipped):
                position = rest.index(b"\n", position) + 1
            line += skipped
            if line < number:
                position = len(rest)
            yield rest[:position]
            rest = rest[position:]
        if line == number:
            end = rest.find(b"\n") + 1
            if not end:
                continue  # more of the old line, which is left out
            yield data
            line, rest = line + 1, rest[end:]
        yield rest
    if line == number:  # the last line has no line break
        yield data


def select_lines(chunks: Chunks, is_selected: Sequence[bool]) -> Iterator[bytes]:
    """Yield the selected lines of a stream, a chunk's at a time. Blank lines are left out and do not count."""
    at, pending = 0, b""
    for chunk in chain(chunks, [b"\n"]):
        *lines, pending = (pending + chunk).split(b"\n")
        kept = []
        for line in lines:
            if line.strip():
                if is_selected[at]:
                    kept.append(line.rstrip(b"\r") + b"\n")
                at += 1
        yield b"".join(kept)


def limited_expansion(expand: Callable[[Chunks], Iterator[bytes]], chunks: Chunks) -> Iterator[bytes]:
    """Yield what `expand` makes of a stream while its size stays in proportion. Raises Rejected."""
    source = Hashed(chunks)
    size = 0
    for piece in expand(source):
        size += len(piece)
        require_proportion(size, source.bytes)
        yield piece


def require_proportion(expanded_bytes: int, source_bytes: int) -> None:
    """Raise Rejected for a bomb: a small file that holds more than any text of its size."""
    allowed = max(FREE_EXPANSION_BYTES, MAX_EXPANSION * source_bytes)
    if expanded_bytes > min(allowed, MAX_EXPANDED_BYTES):
        message = f"The file holds more than {MAX_EXPANSION} times its own size: it looks like an archive bomb."
        raise Rejected(FileErrorCode.TOO_LARGE_INSIDE, message, "Upload the data as plain JSONL.")
