"""What a command is run with: the service's address, the API key, and where both are stored."""

import json
import os
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import httpx
import typer

from anneal.api import Api
from anneal.failures import ExitCode, Failure

DEFAULT_BASE_URL = "http://127.0.0.1:8000"
_BEGINNINGS_OF_KEYS = ("ann_", "sk-")  # ours, and those of OpenAI
# Tests send the calls to an application in their own process.
transport: httpx.BaseTransport | None = None


def _user_folder() -> Path:
    """Return the folder of this user's files; without a home folder, a place that has none and takes none."""
    found = typer.get_app_dir("anneal")
    return Path(os.devnull, "anneal") if found.startswith("~") else Path(found)


@dataclass
class Session:
    """One run of the command. Options and environment variables take precedence over the stored values."""

    given_url: str | None = None
    given_key: str | None = None
    project: str | None = None
    as_json: bool = False
    folder: Path = field(default_factory=_user_folder)

    @property
    def base_url(self) -> str:
        return clean_url(self.given_url or self._stored.get("current") or DEFAULT_BASE_URL)

    @property
    def key(self) -> str | None:
        """Return the given key, or the one stored for this very address: no other service ever gets it.

        A key that was stored for the project comes before the one that was stored without a project.
        """
        if self.given_key:
            return self.given_key
        stored = self._stored.get("keys", {})
        return stored.get(self._place) or stored.get(self.base_url)

    @property
    def _place(self) -> str:
        """Return the name under which the key is stored."""
        return f"{self.base_url}#{self.project}" if self.project else self.base_url

    def choose_project(self, named: str | None) -> str | None:
        """Work in the project that a file names, or else in the given one, and return it.

        Raises Failure if both are named and differ.
        """
        if named and self.project and named != self.project:
            text = f"The file names the project {named}, and --project or ANNEAL_PROJECT {self.project}. Drop one."
            raise Failure(text, ExitCode.USAGE)
        self.project = named or self.project
        return self.project

    @cached_property
    def api(self) -> Api:
        if not self.key:
            text = f"There is no API key for {self.base_url}. Run `anneal login`, or set ANNEAL_API_KEY."
            raise Failure(text, ExitCode.SIGNED_OUT)
        if not (self.key.isascii() and self.key.isprintable()):
            text = "The API key has invalid characters. Copy all of it, or create a new one on the API keys page."
            raise Failure(text, ExitCode.SIGNED_OUT)
        return Api(self.base_url, self.key, project=self.project, transport=transport)

    def store_key(self, key: str | None) -> None:
        """Store the key of the address, or of the project there, readable by this user only; None removes it.

        The address of a stored key becomes the default one.
        """
        keys = self._stored.get("keys", {}) | {self._place: key}
        kept = {url: each for url, each in keys.items() if each}
        self._write({"current": self.base_url if key else self._stored.get("current"), "keys": kept})

    def _write(self, content: dict[str, Any]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        new = self.credentials_file.with_suffix(".new")
        new.unlink(missing_ok=True)
        with os.fdopen(os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            json.dump(content, file, indent=2)
        new.replace(self.credentials_file)

    @property
    def credentials_file(self) -> Path:
        return self.folder / "credentials.json"

    @property
    def _stored(self) -> dict[str, Any]:
        try:
            found = json.loads(self.credentials_file.read_text())
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError) as error:
            text = f"{self.credentials_file} cannot be read. Delete it and run `anneal login` again."
            raise Failure(text, ExitCode.SIGNED_OUT) from error
        return found if isinstance(found, dict) else {}


def clean_url(text: str) -> str:
    """Return the address without a trailing slash and without `/v1`. Raises Failure for anything but HTTP."""
    url = text.strip().rstrip("/").removesuffix("/v1")
    try:
        parts = httpx.URL(url)
        if parts.scheme in ("http", "https") and parts.host:
            return url
    except httpx.InvalidURL:
        pass
    shown = "An API key" if url.startswith(_BEGINNINGS_OF_KEYS) else repr(text)
    raise Failure(f"{shown} is not an address. Give one such as https://anneal.example.com.", ExitCode.USAGE)


def session_of(context: typer.Context) -> Session:
    return context.find_root().ensure_object(Session)
