"""The object store is compared with the rows of one organization after another."""

import datetime
import io
from pathlib import Path
from typing import Any

import pytest

from apps.accounts.models import Organization
from apps.core.database.clock import db_now
from apps.core.objects.store import object_key, store
from apps.interfaces.staff.management.object_check import compare_objects
from tests.factories.datasets import make_version

pytestmark = pytest.mark.django_db


@pytest.fixture(autouse=True)
def _own_store(settings: Any, tmp_path: Path) -> None:
    """Compare with a store of this test alone: the one that tests share has thousands of organizations."""
    settings.OBJECT_STORE = f"file://{tmp_path}/objects"


def test_what_is_missing_and_what_no_row_names_is_found_in_every_organization(
    organization: Organization, rival: Organization
) -> None:
    kept, gone = make_version(organization), make_version(rival)
    store().delete(gone.object_key)  # the only object of this organization
    left = [object_key(organization.pk, "left.bin"), object_key("org_unknown", "left.bin"), "platform/left/left.bin"]
    for key in left:
        store().put_stream(key, io.BytesIO(b"x"))

    today, later = compare_objects(now=db_now()), compare_objects(now=db_now() + datetime.timedelta(days=2))

    assert gone.pk in {each.row_id for each in later.missing} and kept.pk not in {each.row_id for each in later.missing}
    assert set(left) <= set(later.orphans) and not set(left) & set(today.orphans)
    assert kept.object_key not in later.orphans


def test_an_object_that_is_stored_while_others_are_compared_is_not_missing(
    organization: Organization, monkeypatch: pytest.MonkeyPatch
) -> None:
    version = make_version(organization)
    monkeypatch.setattr(type(store()), "list_objects", lambda *_: iter(()))  # it was listed a moment before

    assert version.pk not in {each.row_id for each in compare_objects(now=db_now()).missing}
