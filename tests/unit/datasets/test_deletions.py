"""A dataset is deleted with its last version, and gets no new one meanwhile."""

from collections.abc import Callable

import pytest

from apps.core.database.clock import db_now
from apps.datasets.models import Dataset, DatasetVersion
from apps.datasets.operations import delete_version
from tests.factories.datasets import make_version
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
