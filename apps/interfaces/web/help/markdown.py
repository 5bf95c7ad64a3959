"""Markdown of the repository as HTML for the help pages: safe, without inline styles, with linked headings."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from django.utils.safestring import SafeString, mark_safe
from django.utils.text import slugify
from markdown_it import MarkdownIt
from markdown_it.token import Token

_ALIGNED = re.compile(r"text-align:(left|center|right)")
# HTML in a page stays text: only what Markdown itself writes reaches the browser.
_PARSER = MarkdownIt("commonmark", {"html": False}).enable(["table", "strikethrough"])

Resolve = Callable[[str], str]


@dataclass(frozen=True)
class Heading:
    """A section of a page: its title and the id to link to."""

    title: str
    anchor: str


@dataclass(frozen=True)
class Passage(Heading):
    """The plain text under a heading of any level. The text before the first one has neither title nor anchor."""

    text: str


@dataclass(frozen=True)
class Rendered:
    """A page as HTML, without its first heading, which is its title. `sections` are its headings of level 2."""

    title: str
    html: SafeString
    sections: tuple[Heading, ...]
    passages: tuple[Passage, ...]


def render(source: str, *, resolve: Resolve) -> Rendered:
    """Render a page. `resolve` returns the address of a link's target; "" keeps the link's text alone."""
    tokens = _PARSER.parse(source)
    title, sections, seen = "", [], set[str]()
    for index, token in enumerate(tokens):
        style = token.attrs.pop("style", None)  # of an aligned cell; the Content-Security-Policy forbids it
        if style and (found := _ALIGNED.search(str(style))):
            token.attrSet("class", f"align-{found[1]}")
        if token.type != "heading_open":
            continue
        words = _plain(tokens[index + 1])
        if token.tag == "h1" and not title:
            title = words
            continue
        anchor = _anchor(words, seen)
        token.attrSet("id", anchor)
        if token.tag == "h2":
            sections.append(Heading(words, anchor))
    body = _without_title(tokens)
    for token in body:
        if token.type == "inline":
            _resolve_links(token.children or [], resolve)
    html = _PARSER.renderer.render(body, _PARSER.options, {})
    for tag in ("pre", "table"):  # they scroll, so the keyboard must reach them
        html = html.replace(f"<{tag}>", f'<{tag} tabindex="0">')
    safe = mark_safe(html)  # noqa: S308 - escaped by the renderer
    return Rendered(title, safe, tuple(sections), tuple(_passages(body)))


def _passages(body: Sequence[Token]) -> Iterator[Passage]:
    title, anchor, texts = "", "", list[str]()
    is_heading = False
    for token in body:
        if token.type == "heading_open":
            if texts or title:
                yield Passage(title, anchor, " ".join(texts))
            anchor, texts, is_heading = str(token.attrGet("id")), [], True
        elif token.type == "inline" and is_heading:
            title, is_heading = _plain(token), False
        elif token.type in ("inline", "fence", "code_block"):
            texts.append(_plain(token) if token.type == "inline" else token.content)
    yield Passage(title, anchor, " ".join(texts))


def _plain(token: Token) -> str:
    return "".join(child.content or " " for child in token.children or []).strip()


def _anchor(words: str, seen: set[str]) -> str:
    """Return a heading's id as GitHub makes it; a repeated heading gets a number."""
    base = anchor = slugify(words) or "section"
    number = 0
    while anchor in seen:
        number += 1
        anchor = f"{base}-{number}"
    seen.add(anchor)
    return anchor


def _without_title(tokens: Sequence[Token]) -> list[Token]:
    for index, token in enumerate(tokens):
        if token.type == "heading_open" and token.tag == "h1":
            return [*tokens[:index], *tokens[index + 3 :]]
    return list(tokens)


def _resolve_links(children: list[Token], resolve: Resolve) -> None:
    is_dropped = False
    for child in children:
        if child.type == "link_open":
            address = resolve(str(child.attrGet("href") or ""))
            is_dropped = not address
            child.attrSet("href", address)
            if address.startswith(("http:", "https:")):
                child.attrSet("rel", "noreferrer")
        if child.type in ("link_open", "link_close") and is_dropped:
            child.tag, child.attrs, child.hidden = "", {}, True
            child.type = "text"
            child.content = ""
