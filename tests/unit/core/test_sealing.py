"""Sealed secrets open in their place alone, and survive the replacement of the secret key."""

from io import StringIO

import pytest
from django.core.management import CommandError, call_command

from apps.core.secrets.resealing import sealed_columns
from apps.core.secrets.sealing import SealBroken, _cipher, is_current, place_of, seal, unseal
from apps.serving.operations import token_of
from tests.factories.serving import make_served_model
from tests.twins.scripted_engine import TOKEN

PLACE = place_of(table="t", column="c", row_id="1")


def rotate(settings, key: str, *, fallbacks: list[str]) -> None:
    settings.SECRET_KEY, settings.SECRET_KEY_FALLBACKS = key, fallbacks


def test_a_value_opens_in_its_place_alone_and_not_when_altered():
    sealed = seal("secret", place=PLACE)

    assert unseal(sealed, place=PLACE) == "secret" and b"secret" not in sealed
    for broken in (sealed[:-1] + bytes([sealed[-1] ^ 1]), sealed[:5], b"", b"\x07" + sealed[1:]):
        with pytest.raises(SealBroken):
            unseal(broken, place=PLACE)
    with pytest.raises(SealBroken):
        unseal(sealed, place=place_of(table="t", column="c", row_id="2"))


def test_an_older_key_opens_while_it_is_kept(settings):
    rotate(settings, "old", fallbacks=[])
    sealed = seal("secret", place=PLACE)

    rotate(settings, "new", fallbacks=["older", "old"])
    assert (unseal(sealed, place=PLACE), is_current(sealed)) == ("secret", False)
    assert is_current(seal("secret", place=PLACE))
    rotate(settings, "new", fallbacks=[])
    with pytest.raises(SealBroken, match="not known any more"):
        unseal(sealed, place=PLACE)


def test_a_value_from_before_key_ids_opens_with_any_known_key(settings):
    nonce = b"n" * 12
    sealed = b"\x01" + nonce + _cipher("old").encrypt(nonce, b"secret", PLACE)

    rotate(settings, "new", fallbacks=["old"])
    assert (unseal(sealed, place=PLACE), is_current(sealed)) == ("secret", False)


@pytest.mark.django_db
def test_every_stored_secret_moves_to_the_present_key_or_none(settings):
    rotate(settings, "old", fallbacks=[])
    replica = make_served_model("small", "unix:///a", is_priced=False).replicas.get()
    rotate(settings, "lost", fallbacks=[])
    lost = make_served_model("other", "unix:///b", is_priced=False).replicas.get()

    rotate(settings, "new", fallbacks=["old"])
    with pytest.raises(CommandError, match=lost.pk):
        call_command("reseal")
    lost.delete()
    said = StringIO()
    call_command("reseal", stdout=said)
    rotate(settings, "new", fallbacks=[])

    replica.refresh_from_db()
    assert said.getvalue() == "1 secrets were sealed anew.\n"
    assert token_of(replica=replica) == TOKEN and is_current(replica.token.token_sealed)
    assert len({model for model, _ in sealed_columns()}) >= 3
