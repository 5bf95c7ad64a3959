"""Quantities with their units, as operators write and read them."""

import pytest
from django.core.exceptions import ValidationError
from django.utils.translation import override
from hypothesis import given
from hypothesis import strategies as st

from apps.interfaces.staff.quantities import BYTES, GPU_TIME, Units, count_of

JOBS = count_of("jobs", example="20 jobs", tails=("at a time",))


@pytest.mark.parametrize(
    ("units", "text", "value"),
    [
        (BYTES, "20 GB", 20 * 10**9),
        (BYTES, "1.5tb", 1_500 * 10**9),
        (BYTES, "2 GiB", 2 * 2**30),
        (BYTES, "1,000 bytes", 1000),
        (GPU_TIME, "100 GPU-hours a month", 360_000),
        (GPU_TIME, "90 min", 5400),
        (JOBS, "3 jobs at a time", 3),
        (JOBS, "3", 3),
        (JOBS, "2 million", 2_000_000),
        (JOBS, "1.5k", 1500),
        (BYTES, "1,5 TB", 1_500 * 10**9),
        (BYTES, "1.234.567,5 KB", 1_234_567_500),
    ],
)
def test_a_quantity_is_read_with_its_unit(units: Units, text: str, value: int) -> None:
    assert units.parse(text) == value


@pytest.mark.parametrize(
    ("units", "text", "words"),
    [
        (BYTES, "20", "The unit is missing: write it like 20 GB."),
        (BYTES, "20 parsecs", "'parsecs' is not a unit here"),
        (BYTES, "1,2,3 GB", "Write a number with its unit"),
        (BYTES, "much", "Write a number with its unit, such as 20 GB."),
        (BYTES, "-5 GB", "Write a number"),
        (BYTES, "99999999999 TB", "Write at most"),
        (GPU_TIME, "100 hours a week", "is not a unit here"),
        (JOBS, "0.5 jobs", "Write a whole number, such as 20 jobs."),
        (JOBS, "3000000000", "Write at most 2,147,483,647 jobs."),
    ],
)
def test_what_cannot_be_read_is_refused_with_an_example(units: Units, text: str, words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        units.parse(text)


@pytest.mark.parametrize(
    ("units", "value", "words"),
    [
        (BYTES, 20_000_000_000, "20 GB"),
        (BYTES, 1_234_567, "1,234.567 KB"),
        (BYTES, 0, "0 bytes"),
        (GPU_TIME, 360_000, "100 hours"),
        (GPU_TIME, 5400, "1.5 hours"),
        (JOBS, 1, "1 job"),
        (JOBS, 6000, "6,000 jobs"),
    ],
)
def test_a_quantity_is_shown_in_a_unit_that_fits(units: Units, value: int, words: str) -> None:
    assert units.words(value) == words


@pytest.mark.parametrize(
    ("units", "text", "value"),
    [
        (BYTES, "1,5 TB", 1_500 * 10**9),
        (BYTES, "1.5 TB", 1_500 * 10**9),
        (BYTES, "1.234.567 Bytes", 1_234_567),
        (GPU_TIME, "100 Stunden pro Monat", 360_000),
        (GPU_TIME, "1,5 GPU-Stunden", 5400),
        (GPU_TIME, "100 hours", 360_000),
        (JOBS, "2 Millionen Jobs", 2_000_000),
        (JOBS, "1 Million Jobs", 1_000_000),
        (JOBS, "1 Milliarde", 10**9),
        (BYTES, "0,125 GB", 125_000_000),
    ],
)
def test_a_quantity_is_read_as_germans_write_it(units: Units, text: str, value: int) -> None:
    with override("de"):
        assert units.parse(text) == value


def test_a_number_that_readers_take_for_different_ones_is_refused_with_both() -> None:
    with override("de"):
        for text in ("1.500 GB", "1,500 GB"):
            with pytest.raises(ValidationError, match="schreiben Sie 1500 oder 1,5"):
                BYTES.parse(text)
        assert (JOBS.words(6000), GPU_TIME.words(5400)) == ("6000 Jobs", "1,5 Stunden")
        with pytest.raises(ValidationError, match="100 Stunden"):
            GPU_TIME.parse("viel")
        for text in ("1 Billion", "1 billion Jobs"):  # 10^12 in German
            with pytest.raises(ValidationError, match="keine Einheit"):
                JOBS.parse(text)


@given(units=st.sampled_from([BYTES, GPU_TIME, JOBS]), value=st.integers(0, 2**31 - 1))
def test_what_is_shown_in_german_is_read_as_the_same(units: Units, value: int) -> None:
    with override("de"):
        assert units.parse(units.words(value)) == value


@given(units=st.sampled_from([BYTES, GPU_TIME, JOBS]), value=st.integers(0, 2**31 - 1))
def test_what_is_shown_is_read_as_the_same(units: Units, value: int) -> None:
    assert units.parse(units.words(value)) == value
