"""The committed results of `make family-matrix`: what is declared was tried, and the docs show the outcome."""

from apps.contracts.adapter_files import SUPPORT
from tests.bench.families.table import DOCS, read_matrix, render


def test_the_table_in_the_docs_shows_the_committed_results() -> None:
    assert render(read_matrix()) in DOCS.read_text(), "make family-matrix writes both"


def test_every_declared_architecture_was_tried_and_does_what_is_declared() -> None:
    rows = read_matrix()

    assert {row.architecture for row in rows} == set(SUPPORT)
    assert {row.family: row.served for row in rows} == {row.family: "adapter" for row in rows}
