"""Scores of a text against its reference. Texts are a customer's, so the callers bound their lengths."""

import math
from collections import Counter
from collections.abc import Hashable, Sequence

_ORDERS = range(1, 5)  # n-grams of BLEU and GLEU


def check(operation: str, text: str, reference: str) -> bool:
    """Return the result of OpenAI's string check: eq, ne, like (contains the reference), ilike (in any case)."""
    match operation:
        case "ne":
            return text != reference
        case "like":
            return reference in text
        case "ilike":
            return reference.casefold() in text.casefold()
        case _:
            return text == reference


def rouge_l(text: Sequence[Hashable], reference: Sequence[Hashable]) -> float:
    """Return ROUGE-L's F1 over words (Lin 2004, beta 1). Over characters, it is the ratio of fuzzy matching."""
    return _f1(_longest_common(text, reference), len(text), len(reference))


def rouge_n(text: Sequence[str], reference: Sequence[str], n: int) -> float:
    """Return the F1 of common n-grams of words (Lin 2004)."""
    ours, theirs = _grams(text, n), _grams(reference, n)
    return _f1((ours & theirs).total(), ours.total(), theirs.total())


def bleu(text: Sequence[str], reference: Sequence[str]) -> float:
    """Return sentence BLEU up to four words, from 0 to 1 (Papineni 2002).

    As in sacrebleu, the first order without a match counts half a match, the next one a quarter, and so on.
    """
    if not text or not reference:
        return float(not text and not reference)
    logarithms, least = [], 1.0
    for n in _ORDERS[: len(text)]:
        ours = _grams(text, n)
        common = (ours & _grams(reference, n)).total()
        if not common and n == 1:
            return 0.0
        least = least if common else least / 2
        logarithms.append(math.log((common or least) / ours.total()))
    brevity = min(0.0, 1 - len(reference) / len(text))
    return math.exp(brevity + sum(logarithms) / len(logarithms))


def gleu(text: Sequence[str], reference: Sequence[str]) -> float:
    """Return the smaller of precision and recall over all n-grams up to four words (Wu 2016)."""
    ours = Counter[tuple[str, ...]]()
    theirs = Counter[tuple[str, ...]]()
    for n in _ORDERS:
        ours += _grams(text, n)
        theirs += _grams(reference, n)
    longer = max(ours.total(), theirs.total())
    return (ours & theirs).total() / longer if longer else 1.0


def _grams(words: Sequence[str], n: int) -> Counter[tuple[str, ...]]:
    return Counter(tuple(words[at : at + n]) for at in range(len(words) - n + 1))


def _f1(common: int, length: int, other: int) -> float:
    """Return the harmonic mean of precision and recall; 1 if both texts are empty."""
    return 2 * common / (length + other) if length + other else 1.0


def _longest_common(one: Sequence[Hashable], other: Sequence[Hashable]) -> int:
    """Return the length of the longest common subsequence, with one bit per item of `one` (Hyyrö 2004)."""
    places: dict[Hashable, int] = {}
    for at, item in enumerate(one):
        places[item] = places.get(item, 0) | 1 << at
    everything = free = (1 << len(one)) - 1
    for item in other:
        matched = free & places.get(item, 0)
        free = (free + matched | free - matched) & everything
    return len(one) - free.bit_count()
