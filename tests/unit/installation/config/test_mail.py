"""Mail by one URL."""

import os
import stat

import pytest
from django.core.mail import EmailMessage, get_connection

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


def test_mail_is_written_to_files_for_their_owner_alone(tmp_path, settings):
    parsed = read_mail_url(f"file://{tmp_path}/a%20folder")
    settings.EMAIL_BACKEND, settings.EMAIL_FILE_PATH = parsed.backend, parsed.folder
    umask = os.umask(0o022)
    try:
        with get_connection() as connection:
            connection.send_messages([EmailMessage("Hello", "a link", "a@example.com", ["b@example.com"])])
    finally:
        os.umask(umask)

    (written,) = (tmp_path / "a folder").iterdir()
    assert "a link" in written.read_text()
    assert [stat.S_IMODE(path.stat().st_mode) for path in (written.parent, written)] == [0o700, 0o600]
