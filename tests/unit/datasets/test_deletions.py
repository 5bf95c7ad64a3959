"""A dataset is deleted with its last version, and gets no new one meanwhile. A file stays while one is made from it."""

from collections.abc import Callable

import pytest

from apps.core.database.clock import db_now
from apps.core.errors import InvalidState
from apps.datasets.intake.edits import restore_version
from apps.datasets.intake.revisions import remap_version, repair_version
from apps.datasets.models import Dataset, DatasetVersion
from apps.datasets.operations import delete_dataset, delete_version
from apps.datasets.validation.formats import Format, Mapping
from apps.datasets.validation.leases import validate_version
from apps.datasets.validation.repair import RepairMode
from tests.factories.datasets import jsonl, make_ready_version, make_version
from tests.support.database import beside


@pytest.mark.parametrize("is_upload_first", [True, False])
@pytest.mark.django_db(transaction=True)
def test_a_file_that_is_uploaded_while_the_last_of_its_dataset_is_deleted_is_in_a_dataset(
    organization, is_upload_first
) -> None:
    last = make_version(organization, dataset_name="support")

    def upload() -> DatasetVersion:
        return make_version(organization, dataset_name="support")

    def delete() -> DatasetVersion:
        return delete_version(version=last, by="user_1", now=db_now())

    acts: list[Callable[[], DatasetVersion]] = [upload, delete] if is_upload_first else [delete, upload]
    results = beside(*acts)

    uploaded = results[0 if is_upload_first else 1]
    assert Dataset.objects.get(versions=uploaded).deleted_at is None


@pytest.fixture
def bad(organization) -> DatasetVersion:
    return make_ready_version(organization, jsonl() + b"{}\n")


@pytest.mark.django_db
def test_a_file_is_neither_deleted_nor_read_again_until_the_version_made_from_it_is_written(bad) -> None:
    made = repair_version(version=bad, mode=RepairMode.DROP, by="user_1", now=db_now())
    mapping = Mapping(format=Format.TEXT, columns={"text": "messages"})

    for change in (
        lambda: delete_version(version=bad, by="user_1", now=db_now()),
        lambda: remap_version(version=bad, mapping=mapping, by="user_1", now=db_now()),
    ):
        with pytest.raises(InvalidState, match=r"Version 2 of train is being made from this file\."):
            change()
    written = validate_version(version_id=made.pk, now=db_now())

    assert written and written.status == "ready"
    assert delete_version(version=bad, by="user_1", now=db_now()).status == "deleted"


@pytest.mark.django_db
def test_a_dataset_is_deleted_with_a_version_that_is_not_written_yet(organization, bad) -> None:
    repair_version(version=bad, mode=RepairMode.DROP, by="user_1", now=db_now())

    delete_dataset(organization=organization, dataset_id=bad.dataset_id, by="user_1", now=db_now())

    assert set(DatasetVersion.objects.values_list("status", flat=True)) == {"deleted"}


@pytest.mark.django_db
def test_a_file_that_was_deleted_meanwhile_becomes_no_version(bad) -> None:
    make_version(bad.organization, dataset_name="train")
    delete_version(version=DatasetVersion.objects.get(pk=bad.pk), by="user_1", now=db_now())

    for derive in (restore_version, lambda **told: repair_version(mode=RepairMode.DROP, **told)):
        with pytest.raises(InvalidState, match="changed or deleted meanwhile"):
            derive(version=bad, by="user_1", now=db_now())
    assert DatasetVersion.objects.count() == 2
