"""No secret stands in a tracked file: keys and tokens are found by the shapes that their issuers give them.

A scanner of entropy would report thousands of hashes here; the shapes below match usable secrets alone.
"""

import re
from pathlib import Path

import pytest

from tests.guards.code.tracked import list_tracked

REPOSITORY = Path(__file__).resolve().parents[2]
# Each begins with its literal, by which the search is fast.
SHAPES = {
    "a private key": r"-----BEGIN (?:[A-Z]+ ){0,2}PRIVATE KEY",
    "an AWS access key": r"AKIA[0-9A-Z]{16}\b",
    "a temporary AWS access key": r"ASIA[0-9A-Z]{16}\b",
    "a Google API key": r"AIza[0-9A-Za-z_-]{35}\b",
    "a GitHub token": r"gh[pousr]_[0-9A-Za-z]{36}",
    "a fine-grained GitHub token": r"github_pat_[0-9A-Za-z_]{60}",
    "a GitLab token": r"glpat-[0-9A-Za-z_-]{20}",
    "a Hugging Face token": r"hf_[A-Za-z]{34}\b",
    "an OpenAI or Anthropic key": r"sk-[0-9A-Za-z_-]{40}",
    "a Stripe key": r"[rs]k_live_[0-9A-Za-z]{24}",
    "a Stripe test key": r"[rs]k_test_[0-9A-Za-z]{24}",
    "a Stripe webhook secret": r"whsec_[0-9A-Za-z]{24}",
    "a Slack token": r"xox[abeprs]-[0-9A-Za-z-]{20}",
    "an npm token": r"npm_[0-9A-Za-z]{36}\b",
    "a PyPI token": r"pypi-AgEI[0-9A-Za-z_-]{50}",
    "a key of this platform": r"ann_(?:live|web)_[0-9A-Za-z]{36}",
    "a signed token": r"eyJ[0-9A-Za-z_-]{15,}\.eyJ[0-9A-Za-z_-]{15,}\.[0-9A-Za-z_-]{20}",
    "a password in a URL": r"://[^\s:/@\"'`<>(){}$*\\]{1,40}:[^\s:/@\"'`<>(){}$*\\…]{12,80}@",
}
# Tests of what finds and hides such values need some; each says which of the shapes it has.
EXAMPLES = {
    "tests/e2e/test_external_services.py": {"a password in a URL"},  # of a server of the test's own, on loopback
    "tests/unit/datasets/test_inspection.py": {"an AWS access key", "a private key"},
    "tests/unit/gpu_workers/test_redaction.py": {"an AWS access key", "a private key"},
}


def secrets_in(text: str) -> dict[str, int]:
    """Return what kinds of secret a text has, and on which line first; never the value."""
    found = {kind: re.search(shape, text) for kind, shape in SHAPES.items()}
    return {kind: text.count("\n", 0, match.start()) + 1 for kind, match in found.items() if match}


@pytest.mark.slow
def test_no_tracked_file_holds_a_secret() -> None:
    names = [name for name in list_tracked(REPOSITORY) if (REPOSITORY / name).is_file()]

    found = {name: secrets_in((REPOSITORY / name).read_text(errors="replace")) for name in names}

    assert len(names) > 1000
    assert {name: lines for name, lines in found.items() if set(lines) - EXAMPLES.get(name, set())} == {}


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("-----BEGIN RSA " + "PRIVATE KEY-----", "a private key"),
        ("AKIA" + "IOSFODNN7EXAMPLE", "an AWS access key"),
        ("token=ghp_" + "a1B2" * 9, "a GitHub token"),
        ("hf_" + "aB" * 17, "a Hugging Face token"),
        ("sk_live_" + "a1B2" * 6, "a Stripe key"),
        ("'ann_live_" + "a1B2" * 9 + "'", "a key of this platform"),
        ("smtp://user:" + "hunter2hunter2@mail.example.com", "a password in a URL"),
    ],
)
def test_a_secret_is_found_by_its_shape(text: str, kind: str) -> None:
    assert secrets_in(f"one\n{text}\n") == {kind: 2}
    assert secrets_in(f"one\n{text[:-20]}\n") == {}
