"""What signs the demonstration in is made again where it is missing, cut off, or of another database."""

import stat
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

from apps.accounts.login.addresses import has_verified_address
from apps.accounts.models import User
from apps.catalog.seeding import seed_catalog
from apps.contracts.worker_api import EnrollRequest
from apps.core.database.clock import db_now
from apps.finetuning.pools.operations import enroll
from apps.interfaces.staff.management.seeding import EMAIL, DemoAccount, seed_account, seed_local_workers

Seed = Callable[[], DemoAccount]


@pytest.fixture
def seed(db: None, tmp_path: Path) -> Seed:
    seed_catalog(by="system", now=db_now())

    def both() -> DemoAccount:
        seed_local_workers(home=tmp_path, now=db_now())
        return seed_account(home=tmp_path, now=db_now()).account

    return both


def enroll_trainer(home: Path) -> None:
    token = (home / "trainer/enroll.token").read_text()
    answer = enroll(request=EnrollRequest(token=token, kind="trainer", hostname="here", gpus=(), software={}))[2]
    (home / "trainer/credential.json").write_bytes(msgspec.json.encode(answer))


def test_a_second_start_keeps_the_key_and_the_enrolled_trainer(seed: Seed, tmp_path: Path) -> None:
    first = seed()
    enroll_trainer(tmp_path)
    token = (tmp_path / "trainer/enroll.token").read_text()

    assert seed() == first
    assert (tmp_path / "trainer/credential.json").exists()
    assert (tmp_path / "trainer/enroll.token").read_text() == token


@pytest.mark.parametrize("text", ["", '{"email": "de', '{"email": "demo@anneal.localhost"}'])
def test_a_file_that_was_cut_off_is_written_again_with_a_new_key(seed: Seed, tmp_path: Path, text: str) -> None:
    first = seed()
    (tmp_path / "demo.json").write_text(text)

    again = seed()

    assert again.organization_id == first.organization_id and again.api_key != first.api_key
    assert msgspec.json.decode((tmp_path / "demo.json").read_bytes(), type=DemoAccount) == again


@pytest.mark.parametrize("text", ["", '{"worker_id": "w"', '{"worker_id": "w", "credential": "annw_x", "pool": "p"}'])
def test_a_trainer_with_a_credential_of_no_use_gets_a_new_token(seed: Seed, tmp_path: Path, text: str) -> None:
    seed()
    enroll_trainer(tmp_path)
    token = (tmp_path / "trainer/enroll.token").read_text()
    (tmp_path / "trainer/credential.json").write_text(text)

    seed()

    assert not (tmp_path / "trainer/credential.json").exists()
    assert (tmp_path / "trainer/enroll.token").read_text() != token


def test_each_installation_has_a_password_of_its_own(seed: Seed, tmp_path: Path) -> None:
    first = seed()
    (tmp_path / "demo.json").unlink()
    second = seed()

    user = User.objects.get(email=EMAIL)
    assert len(first.password) >= 16 and first.password != second.password
    assert user.check_password(second.password) and not user.check_password(first.password)
    assert has_verified_address(user=user, email=EMAIL)
    assert stat.S_IMODE((tmp_path / "demo.json").stat().st_mode) == 0o600


def test_a_kept_account_is_readable_for_its_owner_alone(seed: Seed, tmp_path: Path) -> None:
    kept = seed()
    (tmp_path / "demo.json").chmod(0o644)

    assert seed() == kept
    assert stat.S_IMODE((tmp_path / "demo.json").stat().st_mode) == 0o600


def test_the_password_that_every_installation_had_is_replaced(seed: Seed, tmp_path: Path) -> None:
    known = "anneal-demo-password"
    before = msgspec.structs.replace(seed(), password=known)
    (tmp_path / "demo.json").write_bytes(msgspec.json.encode(before))
    user = User.objects.get(email=EMAIL)
    user.set_password(known)
    user.save(update_fields=["password"])

    after = seed()

    user.refresh_from_db()
    assert after.password != known and not user.check_password(known)
