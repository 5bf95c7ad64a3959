"""Django's mail settings, read from one URL."""

from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

SUBMISSION_PORT = 587
_PORTS = {"smtp": 25, "smtps": 465}


class UnknownMailScheme(ValueError):
    """The URL's scheme is none of smtp, smtps, file and console."""


@dataclass(frozen=True)
class Mail:
    """Django's mail settings. At most one of `use_tls` (STARTTLS) and `use_ssl` (TLS from the first byte) is set."""

    backend: str
    host: str = "localhost"
    port: int = 25
    user: str = ""
    password: str = ""
    use_tls: bool = False
    use_ssl: bool = False
    folder: str = ""  # the folder that messages are written to instead of being sent


def read_mail_url(url: str) -> Mail:
    """Read `console://`, `file:///folder`, `smtp://user:password@host:587` or `smtps://…`. Raises UnknownMailScheme.

    A password, and mail on the submission port, are never sent in clear: STARTTLS is required (RFC 8314 §3.3).
    """
    parts = urlsplit(url)
    if parts.scheme == "console":
        return Mail(backend="django.core.mail.backends.console.EmailBackend")
    if parts.scheme == "file":
        return Mail(backend="apps.config.mail_folder.EmailBackend", folder=unquote(parts.path))
    if parts.scheme not in _PORTS:
        raise UnknownMailScheme(
            f"ANNEAL_EMAIL_URL begins with smtp://, smtps://, file:// or console://, not {url[:12]!r}."
        )
    port = parts.port or _PORTS[parts.scheme]
    return Mail(
        backend="django.core.mail.backends.smtp.EmailBackend",
        host=parts.hostname or "localhost",
        port=port,
        user=unquote(parts.username or ""),
        password=unquote(parts.password or ""),
        use_tls=parts.scheme == "smtp" and (port == SUBMISSION_PORT or bool(parts.password)),
        use_ssl=parts.scheme == "smtps",
    )
