"""Every code of an error has an entry in docs/errors.md, which the code itself and its table of words make."""

import ast
from collections.abc import Iterator

from apps.contracts.chat.errors import RowErrorCode
from apps.datasets.problems import FileErrorCode
from scripts.assets.error_codes import PAGE, REPOSITORY, page, raised_codes
from scripts.assets.error_texts import ERRORS
from scripts.assets.problem_texts import BATCH_LINES, FILES, ROWS


def codes_of_batches() -> Iterator[str]:
    """Yield codes of lines and of whole batches: the first argument of `BadLine`, and "code" in objects."""
    for name in ("validation", "worker"):
        for node in ast.walk(ast.parse((REPOSITORY / f"apps/batches/{name}.py").read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "BadLine":
                yield ast.literal_eval(node.args[0])
            if isinstance(node, ast.Dict):
                keys = [getattr(key, "value", None) for key in node.keys]
                values = [value for key, value in zip(keys, node.values, strict=True) if key == "code"]
                yield from (value.value for value in values if isinstance(value, ast.Constant))


def test_every_code_of_an_error_object_has_words_and_every_entry_a_code() -> None:
    codes = {raised.code for raised in raised_codes()}

    assert codes - set(ERRORS) == set(), "add these to scripts/assets/error_texts.py and run `make errors`"
    assert set(ERRORS) - codes == set(), "nothing raises these any more"
    assert len(codes) > 70


def test_every_code_of_a_row_a_file_and_a_batch_has_words() -> None:
    assert (set(ROWS), set(FILES)) == (set(RowErrorCode), set(FileErrorCode))
    assert set(codes_of_batches()) - set(ERRORS) - set(BATCH_LINES) == set()


def test_the_page_about_errors_is_current() -> None:
    """If it is not, `make errors` writes it."""
    assert PAGE.read_text() == page()
