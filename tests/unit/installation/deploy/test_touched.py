"""`make test-quick` finds the tests near a change: by imports, by names, and through templates."""

from pathlib import Path

import pytest

from scripts.touched import measure_distances

FILES = {
    "apps/billing/ledger.py": "",
    "apps/billing/rating.py": "from apps.billing import ledger",
    "apps/web/usage.py": 'def page():\n    from apps.billing.rating import rate\n    return "usage/show.html"',
    "tests/support/books.py": "from apps.billing.ledger import post",
    "tests/unit/billing/test_ledger.py": "",
    "tests/unit/billing/test_prices.py": "",
    "tests/unit/payments/test_topups.py": "from tests.support.books import post",
    "tests/web/test_usage.py": "",
    "tests/web/conftest.py": "",
    "tests/unit/core/test_clock.py": "",
    "tests/e2e/test_platform.py": "from apps.billing import ledger",
    "templates/usage/show.html": '<c-two-words label="x" />',
    "templates/cotton/two_words.html": "",
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


@pytest.mark.parametrize(
    ("changed", "near"),
    [
        (
            "apps/billing/ledger.py",
            {
                "tests/unit/billing/test_ledger.py": 1,
                "tests/unit/billing/test_prices.py": 2,
                "tests/unit/payments/test_topups.py": 2,
            },
        ),
        ("tests/unit/core/test_clock.py", {"tests/unit/core/test_clock.py": 0}),
        ("tests/web/conftest.py", {"tests/web/test_usage.py": 1}),
        ("templates/cotton/two_words.html", {"tests/web/test_usage.py": 1}),  # through a template and its view
        ("README.md", {}),
    ],
)
def test_the_nearest_way_from_a_change_to_a_test_counts(root: Path, changed: str, near: dict[str, int]) -> None:
    assert measure_distances(root, {changed}) == near
