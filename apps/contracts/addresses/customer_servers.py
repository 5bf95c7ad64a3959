"""Servers that a customer may name for us to call: public ones, in any notation of their address."""

import re
from urllib.parse import SplitResult, urlsplit

from apps.contracts.addresses.networks import is_public

PORT = 443
MAX_URL = 400

_NAME = re.compile(r"(?=.{1,253}\.?$)([a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?\.)+[a-z]([a-z0-9-]{0,61}[a-z0-9])\.?")
# RFC 6761, RFC 6762, RFC 9476, and names in common use on private networks.
_PRIVATE_NAMES = (
    "localhost", "localdomain", "local", "internal", "intranet", "lan", "home", "corp", "alt", "test", "invalid",
    "arpa",
)  # fmt: skip


def check_server(url: str, *, example: str = "mlflow.example.com", may_have_query: bool = False) -> SplitResult:
    """Return the parts of a server's URL. Raises ValueError with a sentence that describes a valid one.

    A name is resolved again at each call; here only a name that cannot be public is refused.
    """
    try:
        parts = urlsplit(url)
        host, port = parts.hostname or "", parts.port
    except ValueError:
        parts, host, port = urlsplit(""), "", None
    if len(url) > MAX_URL or not (url.isascii() and url.isprintable()):
        raise ValueError(f"An address has at most {MAX_URL} ASCII characters.")
    if parts.scheme != "https" or not host or parts.username is not None or parts.fragment:
        raise ValueError(f"Give an https address, such as https://{example}, without a user.")
    if parts.query and not may_have_query:
        raise ValueError(f"Give an https address, such as https://{example}, without a query.")
    if port not in (None, PORT):
        raise ValueError(f"Only port {PORT} is called: leave the port out.")
    is_name = _NAME.fullmatch(host) is not None and host.rstrip(".").rsplit(".", 1)[-1] not in _PRIVATE_NAMES
    if not (is_name or is_public(host)):
        raise ValueError("Give a server of the public internet: this address is a private one.")
    return parts
