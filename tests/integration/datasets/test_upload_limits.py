"""What an upload may take: of one file, of storage, of rows."""

from typing import Any

import pytest
from django.db import connection
from django.test import override_settings

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.core.errors import InvalidValue, QuotaExceeded
from apps.datasets.intake import uploads
from apps.datasets.intake.parts import sign_parts
from apps.datasets.intake.uploads import add_part
from apps.datasets.intake.versions import FileTooLarge, StorageFull
from apps.datasets.queries import storage_used_bytes
from tests.factories.datasets import make_upload
from tests.integration.datasets.upload_calls import CONTENT, PART, cancel, complete, limit_storage, put, send

pytestmark = pytest.mark.django_db


class TestLimits:
    @pytest.mark.parametrize(
        ("wrong", "error"),
        [
            ({"bytes": 0}, InvalidValue),
            ({"bytes": 8 * 1024**3 + 1}, FileTooLarge),
            ({"purpose": "vision"}, InvalidValue),
            ({"expires_after_seconds": 5}, InvalidValue),
            ({"bytes": 1_000_001}, StorageFull),
        ],
    )
    def test_an_upload_we_would_not_take_is_refused_at_once(self, organization, wrong: dict, error: type) -> None:
        limit_storage(organization, 1_000_000)

        with pytest.raises(error):
            make_upload(organization, **wrong)

    @override_settings(MAX_UPLOAD_BYTES=1_000)
    def test_the_longest_file_is_the_operators_to_set_and_the_refusal_says_what_to_do(self, organization) -> None:
        make_upload(organization, bytes=1_000)

        with pytest.raises(
            FileTooLarge, match=r"1,001 bytes; one file may have up to 1,000 .* Send it as gzip"
        ) as refused:
            make_upload(organization, bytes=1_001)

        assert refused.value.param == "bytes"

    def test_an_upload_under_way_counts_as_stored_and_once(self, organization: Organization) -> None:
        upload = make_upload(organization, bytes=len(CONTENT))
        assert storage_used_bytes(organizations=[organization.pk]).total() == len(CONTENT)
        limit_storage(organization, len(CONTENT) + 5)
        with pytest.raises(StorageFull):
            make_upload(organization, bytes=len(CONTENT))

        limit_storage(organization, len(CONTENT))
        complete(upload, part_ids=send(upload))

        assert storage_used_bytes(organizations=[organization.pk]).total() == len(CONTENT)

    def test_parts_sent_beyond_what_was_announced_count_too(self, organization: Organization) -> None:
        upload = make_upload(organization, bytes=PART)
        limit_storage(organization, PART + 500)

        add_part(upload=upload, chunks=[b"x" * PART], by="user_1", now=db_now())
        with pytest.raises(StorageFull):
            add_part(upload=upload, chunks=[b"x" * PART], by="user_1", now=db_now())
        add_part(upload=upload, chunks=[b"x" * 400], by="user_1", now=db_now())

        assert storage_used_bytes(organizations=[organization.pk]).total() == PART + 400

    def test_parts_wait_for_other_uploads_of_the_organization_before_they_are_counted(
        self, organization: Organization
    ) -> None:
        """Otherwise two parts at a time could each take the last free bytes."""
        upload = make_upload(organization, bytes=PART)
        seen: list[str] = []

        def note(execute: Any, sql: str, params: Any, many: bool, context: Any) -> Any:
            seen.extend(f"{word} {params}" for word in ("advisory", "uploadpart") if word in sql)
            return execute(sql, params, many, context)

        with connection.execute_wrapper(note):
            add_part(upload=upload, chunks=[b"x"], by="user_1", now=db_now())

        assert seen[0].startswith("advisory") and f"uploads:{organization.founded_by_id or organization.pk}" in seen[0]

    def test_uploads_and_their_parts_are_counted_too(
        self, organization: Organization, rival: Organization, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Empty parts and announced bytes take no storage, but each has an object or a row."""
        monkeypatch.setattr(uploads, "MAX_PARTS", 2)
        monkeypatch.setattr(uploads, "MAX_OPEN", 2)
        upload, other = make_upload(organization), make_upload(organization)
        for _ in range(2):
            add_part(upload=upload, chunks=[], by="user_1", now=db_now())

        with pytest.raises(InvalidValue, match="at most 2 parts"):
            add_part(upload=upload, chunks=[], by="user_1", now=db_now())
        with pytest.raises(QuotaExceeded, match="2 uploads open"):
            make_upload(organization)
        assert make_upload(rival)
        cancel(other)

        assert make_upload(organization)

    def test_a_large_planned_upload_fits_its_own_quota(self, organization: Organization, any_store: str) -> None:
        limit_storage(organization, len(CONTENT))
        upload = make_upload(organization, bytes=len(CONTENT), is_planned=True)
        put(sign_parts(upload=upload, numbers=[1], by="user_1", now=db_now())[1], CONTENT)

        assert complete(upload).status == "completed"
