"""The search of the help: every page, the quickstart, and every call of the API, passage by passage."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from apps.interfaces.web.help.markdown import Passage
from apps.interfaces.web.help.pages import PAGES, QUICKSTART, REFERENCE, Audience, read_page, read_title
from apps.interfaces.web.help.reference import api_groups, list_passages

_MAX_SHOWN = 3  # passages of each page
_QUICKSTART = "Ask a model and train your own, in curl, Python and JavaScript"
_REFERENCE = "Every call with its parameters, body, answer and errors"


@dataclass(frozen=True)
class Document:
    """The text of a page that the search reads."""

    slug: str
    title: str
    summary: str
    passages: tuple[Passage, ...]


@dataclass(frozen=True)
class Found:
    """A page with every word, and its passages with every word. Passages with the words in their title come first."""

    document: Document
    passages: tuple[Passage, ...]
    is_in_title: bool


@cache
def list_documents() -> tuple[Document, ...]:
    """Return all pages. The quickstart has no text of its own: its samples hold the reader's key and model."""
    pages = [(page, read_page(page.slug)) for page in PAGES]
    return (
        Document(QUICKSTART, "Quickstart", _QUICKSTART, ()),
        Document(REFERENCE, "API reference", _REFERENCE, tuple(list_passages(api_groups()))),
        *(Document(page.slug, rendered.title, page.summary, rendered.passages) for page, rendered in pages),
    )


def search(words: str) -> list[Found]:
    """Return the pages that contain every word, those with all of them in their titles first."""
    wanted = words.lower().split()
    return sorted(_find(wanted), key=lambda found: not found.is_in_title)


@cache
def list_titles() -> tuple[tuple[str, str, str], ...]:
    """Return the slug, title and summary of each page for customers and operators, without rendering any."""
    made = (QUICKSTART, "Quickstart", _QUICKSTART), (REFERENCE, "API reference", _REFERENCE)
    inside = (Audience.CONTRIBUTORS, Audience.DECISIONS)
    return *made, *((page.slug, read_title(page), page.summary) for page in PAGES if page.audience not in inside)


def find_titles(words: list[str]) -> list[tuple[str, str, str]]:
    """Return the pages whose title or summary has every word, as `list_titles` does."""
    wanted = [word.lower() for word in words]
    return [page for page in list_titles() if _has(f"{page[1]} {page[2]}", wanted)]


def _find(wanted: list[str]) -> Iterator[Found]:
    for document in list_documents():
        titles = " ".join([document.title, document.summary, *(passage.title for passage in document.passages)])
        texts = " ".join(passage.text for passage in document.passages)
        if _has(f"{titles} {texts}", wanted):
            fitting = [each for each in document.passages if each.title and _has(f"{each.title} {each.text}", wanted)]
            fitting.sort(key=lambda passage: not _has(passage.title, wanted))
            yield Found(document, tuple(fitting[:_MAX_SHOWN]), is_in_title=_has(titles, wanted))


def _has(text: str, wanted: list[str]) -> bool:
    lower = text.lower()
    return all(word in lower for word in wanted)
