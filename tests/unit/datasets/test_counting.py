"""Token counts of files: when they are made, what they hold, and what refuses them."""

import functools
import gzip
import tracemalloc
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from apps.accounts.models import Organization
from apps.catalog.queries import chat_renderer
from apps.core.errors import DomainError
from apps.core.models import OutboxMessage
from apps.datasets import operations
from apps.datasets.intake.lanes import ReadingTime
from apps.datasets.models import TokenCount
from apps.datasets.operations import NotReady, RowRefused, count_tokens
from apps.datasets.queries import find_token_count, read_rows
from apps.datasets.tasks import count, validate
from apps.datasets.token_counts import HISTOGRAM_BARS, LIMITS, bars_of_starts, histogram_of
from tests.factories.catalog import make_base_model, make_listed_model
from tests.factories.datasets import jsonl, make_ready_version, make_version

pytestmark = pytest.mark.django_db


class TestCounting:
    def test_follows_validation_at_once_or_in_a_task_of_its_own(
        self, organization: Organization, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base_model = make_base_model()
        small, large = make_version(organization), make_version(organization, jsonl(500))
        packed = make_version(organization, gzip.compress(jsonl(500)), filename="rows.jsonl.gz")
        assert packed.bytes < 10_000
        monkeypatch.setattr(operations, "COUNT_NOW_BYTES", 10_000)

        for version in (small, large, packed):
            validate(version.pk)

        assert find_token_count(version=small, base_model=base_model)
        for version in (large, packed):
            assert find_token_count(version=version, base_model=base_model) is None
            payload = OutboxMessage.objects.get(topic="dataset.count", payload__version_id=version.pk).payload
            count(**payload)
            assert find_token_count(version=version, base_model=base_model)

    def test_of_a_small_file_leaves_its_lane_after_a_second(
        self, organization: Organization, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The files of other tenants wait for it there."""
        base_model = make_base_model()
        monkeypatch.setattr("apps.datasets.tasks.SMALL_SECONDS", -1.0)
        version = make_version(organization)

        validate(version.pk)

        assert find_token_count(version=version, base_model=base_model) is None
        [message] = OutboxMessage.objects.filter(topic="dataset.count")
        count(**message.payload)
        assert find_token_count(version=version, base_model=base_model)

    def test_that_takes_longer_than_the_size_allows_is_a_refusal(
        self, organization: Organization, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        base_model, version = make_base_model(), make_ready_version(organization)
        ticks = iter(range(0, 10_000, 10))
        monkeypatch.setattr(operations, "ReadingTime", functools.partial(ReadingTime, clock=lambda: next(ticks)))

        for _ in range(2):
            with pytest.raises(RowRefused, match="took longer than 5 seconds"):
                count_tokens(version=version, base_model=base_model)

        assert TokenCount.objects.count() == 1

    def test_counts_what_the_model_would_see_and_train_on(self, organization: Organization) -> None:
        base_model = make_base_model()
        version = make_ready_version(organization)

        count = count_tokens(version=version, base_model=base_model)

        renderer = chat_renderer(base_model=base_model)
        rendered = [renderer.render(preview.row) for preview in read_rows(version=version, limit=50)]
        assert count.tokens == sum(row.n_tokens for row in rendered)
        assert count.trained_tokens == sum(row.n_trained for row in rendered) > 0
        assert count.longest_row_tokens == max(row.n_tokens for row in rendered)
        assert sum(rows for _, rows in count.histogram) == 12
        least = count.starts[0][0]
        assert any(row.truncate(least).n_trained for row in rendered)
        assert not any(row.truncate(least - 1).n_trained for row in rendered)
        assert count_tokens(version=version, base_model=base_model) == count, "counted once"

    def test_waits_for_validation(self, organization: Organization) -> None:
        with pytest.raises(NotReady):
            count_tokens(version=make_version(organization), base_model=make_base_model())

    def test_needs_the_models_tokenizer(self, organization: Organization) -> None:
        with pytest.raises(DomainError, match="not installed"):
            count_tokens(version=make_ready_version(organization), base_model=make_listed_model())

    def test_says_which_row_the_template_refuses(self, organization: Organization) -> None:
        content = jsonl() + jsonl(1).replace(b"Where", b"<|end|>")

        with pytest.raises(RowRefused, match="Line 13") as refused:
            count_tokens(version=make_ready_version(organization, content), base_model=make_base_model())

        assert refused.value.param == "training_file"
        assert refused.value.data["row_code"] == "control_token_in_content"

    def test_of_a_large_file_takes_little_memory(self, organization: Organization) -> None:
        base_model = make_base_model()
        version = make_ready_version(organization, jsonl(5_000))

        tracemalloc.start()
        count_tokens(version=version, base_model=base_model)
        _, peak_bytes = tracemalloc.get_traced_memory()
        tracemalloc.stop()

        assert peak_bytes < 8 * 1024 * 1024

    @pytest.mark.parametrize(
        "lengths",
        [
            Counter({7: 3}),
            Counter(dict.fromkeys(range(1, 400), 1)),
            Counter({90: 1000, 6311: 2}),
            Counter({0: 1, 1: 1}),
        ],
    )
    def test_a_histogram_holds_every_row_in_ascending_bars(self, lengths: Counter[int]) -> None:
        pairs = histogram_of(lengths)

        bounds = [bound for bound, _ in pairs]
        assert bounds == sorted(set(bounds)) and len(bounds) <= 24
        assert sum(rows for _, rows in pairs) == lengths.total()
        assert bounds[-1] >= max(lengths)

    @given(st.dictionaries(st.integers(1, 3_000), st.integers(1, 50), max_size=300))
    def test_bars_of_first_trained_tokens_are_exact_at_the_limits(self, rows: dict[int, int]) -> None:
        bars = bars_of_starts(Counter(rows))

        assert len(bars) <= 2 * HISTOGRAM_BARS + len(LIMITS) + 1
        ends = [end for first, last, _ in bars for end in (first, last)]
        assert ends == sorted(ends) and set(ends) <= set(rows)
        for limit in (*LIMITS, *rows):
            least = sum(number for _, last, number in bars if last <= limit)
            most = sum(number for first, _, number in bars if first <= limit)
            within = sum(number for start, number in rows.items() if start <= limit)
            assert least <= within <= most
            assert limit not in LIMITS or least == most
