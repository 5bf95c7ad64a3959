"""Mail by one URL."""

import pytest

from apps.config.mail import UnknownMailScheme, read_mail_url


@pytest.mark.parametrize(
    ("url", "port", "starts_tls", "is_tls"),
    [
        ("smtp://user:p%40ss@mail.example.com:587", 587, True, False),
        ("smtp://user:p%40ss@mail.example.com", 25, True, False),
        ("smtps://user:p%40ss@mail.example.com", 465, False, True),
        ("smtp://relay.internal", 25, False, False),
    ],
)
def test_a_password_never_travels_in_clear(url, port, starts_tls, is_tls):
    mail = read_mail_url(url)

    assert (mail.port, mail.use_tls, mail.use_ssl) == (port, starts_tls, is_tls)
    assert mail.password in ("", "p@ss")


def test_an_unknown_scheme_is_named():
    with pytest.raises(UnknownMailScheme, match="smtps://"):
        read_mail_url("imap://mail.example.com")
