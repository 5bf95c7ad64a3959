"""Settings that the processes of one data directory share: ports, addresses, lasting secrets, and services."""

import json
import os
import re
import secrets
import shlex
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote, unquote, urlsplit

from apps.contracts.addresses.networks import is_loopback
from scripts.embedded import ROLES, EmbeddedServices, services
from scripts.launch.ports import choose_port, reach
from scripts.processes import PROGRAMS, REPOSITORY, Place, Program

SECRETS = ("ANNEAL_SECRET_KEY", "ANNEAL_KEY_PEPPER", "ANNEAL_SIGNING_KEY")
LOOPBACK, WEB_PORT, INTERNAL_PORT = "127.0.0.1", 8000, 8001
LOCAL_POOL = "local-cpu"
# The demo's matrices cannot use more; the trainer also limits itself to the free cores.
MAX_TRAINER_THREADS = 4
DRAIN_SECONDS = "3"  # Ctrl-C waits this long for unfinished answers

_OURS = re.compile(r"STRIPE_|ANNEAL_|DATABASE_|REDIS_URL|CELERY_|AWS_|DJANGO_SETTINGS_MODULE|FORWARDED_ALLOW_IPS")
_NOT_SETTABLE = frozenset(
    {
        "DATABASE_URL",
        "ANNEAL_HOME",
        "ANNEAL_WORK_DIR",
        "ANNEAL_MAIL_FOLDER",
        "ANNEAL_DEBUG",
        "DJANGO_SETTINGS_MODULE",
    }
)


class EnvironmentIncomplete(Exception):
    """Some but not all variables of an external service are set; the message lists the missing ones."""


@dataclass(frozen=True)
class Prepared:
    """The values for rendering and starting the programs of one data directory."""

    home: Path
    runtime_dir: Path
    place: Place
    programs: tuple[Program, ...]
    known: Mapping[str, str]
    database_urls: Mapping[str, str]
    services: EmbeddedServices | None
    notes: tuple[str, ...] = ()  # unexpected decisions of a launch, in sentences

    @property
    def public_url(self) -> str:
        return self.known["ANNEAL_PUBLIC_URL"]

    def variables(self, program: Program) -> dict[str, str]:
        return self.place.variables(program, self.known, database_urls=self.database_urls)

    def management_variables(self, *, role: str) -> dict[str, str]:
        """Return the variables of `manage.py`, run by hand or by the launcher."""
        return {**self.known, "DATABASE_URL": self.database_urls[role], "ANNEAL_HOME": str(self.home)}


def prepare(home: Path, *, is_debug: bool, is_launch: bool) -> Prepared:
    """Determine ports, addresses and secrets of `home`, and start nothing.

    A launch takes free ports and writes its choice to `env` and `ports.json`. Other callers use the ports of the last
    launch. Variables that are set take precedence. With the five DATABASE_<ROLE>_URL and REDIS_URL set, no embedded
    service is used. Raises EnvironmentIncomplete.
    """
    own = services(home)
    given = _given_variables(home)
    if is_launch:
        _require_public_url(given)
    embedded = None if _is_external(given, own) else own
    runtime_dir = Path(own.runtime_dir)
    last = _read_object(home / "ports.json")
    web, internal = last.get("web"), last.get("internal")
    web = web if isinstance(web, int) else WEB_PORT
    internal = internal if isinstance(internal, int) else INTERNAL_PORT
    ports = wanted = (web, internal)
    if is_launch:
        web = choose_port(web, host=given.get("ANNEAL_WEB_HOST", LOOPBACK), taken=0)
        ports = web, choose_port(internal, host=LOOPBACK, taken=web)
    known = _known_variables(home, runtime_dir, embedded, given, ports=ports, is_debug=is_debug)
    database_urls: dict[str, str] = {role: known.pop(f"DATABASE_{role.upper()}_URL") for role in ROLES}
    if is_launch:
        # For shells: `set -a; . .anneal/env; set +a` makes manage.py work as the role of management commands.
        by_role = {f"DATABASE_{role.upper()}_URL": url for role, url in database_urls.items()}
        values = {"ANNEAL_HOME": str(home), **known, **by_role, "DATABASE_URL": database_urls["sys"]}
        lines = [f"{name}={shlex.quote(value)}\n" for name, value in sorted(values.items())]
        _write_private(home / "env", "".join(lines))
        chosen = {
            "web": int(known["WEB_PORT"]),
            "internal": int(known["INTERNAL_PORT"]),
            "public_url": known["ANNEAL_PUBLIC_URL"],
            "internal_url": known["ANNEAL_INTERNAL_URL"],
        }
        _write_private(home / "ports.json", json.dumps(chosen, indent=1) + "\n")
    return Prepared(
        home=home,
        runtime_dir=runtime_dir,
        place=_embedded_place(home, runtime_dir, known),
        programs=tuple(
            program
            for program in PROGRAMS
            if (embedded or not program.is_embedded_only) and (not program.only_with or known.get(program.only_with))
        ),
        known=known,
        database_urls=database_urls,
        services=embedded,
        notes=tuple(
            f"Port {old} is taken: the {name} uses port {new}."
            for name, old, new in zip(("dashboard", "internal API"), wanted, ports, strict=True)
            if new != old
        ),
    )


def plain_environment() -> dict[str, str]:
    """Return this process's environment without Anneal's variables. Each program gets only those it may know."""
    return {name: value for name, value in os.environ.items() if not _OURS.match(name)}


def _given_variables(home: Path) -> dict[str, str]:
    """Return the caller's variables for us. Those of another data directory (a test run's, a shell's) are ignored."""
    if Path(os.environ.get("ANNEAL_HOME", home)).resolve() != home:
        return {}
    return {name: value for name, value in os.environ.items() if value and _OURS.match(name)}


def _is_external(given: Mapping[str, str], own: EmbeddedServices) -> bool:
    """Return whether the variables name services other than our own. A shell that has read `env` names our own."""
    ours = {f"DATABASE_{role.upper()}_URL": own.database_url(role) for role in ROLES} | {"REDIS_URL": own.redis_url}
    is_plain_ours = given.get("DATABASE_URL", "") in ("", *ours.values())  # sys's URL in a shell that has read `env`
    if is_plain_ours and all(given.get(name, url) == url for name, url in ours.items()):
        return False
    if missing := sorted(ours.keys() - given.keys()):
        raise EnvironmentIncomplete(
            f"For external PostgreSQL and Redis also set: {', '.join(missing)}. Each process has a role of its own, so "
            "that DATABASE_URL alone is not enough."
        )
    return True


def _require_public_url(given: Mapping[str, str]) -> None:
    """Raise EnvironmentIncomplete if others can reach the pages although the default URL implies that they cannot.

    The URL decides whether there is an operator account for the demonstration, and whether operators need a second
    factor.
    """
    host = given.get("ANNEAL_WEB_HOST", LOOPBACK)
    if "ANNEAL_PUBLIC_URL" not in given and not is_loopback(f"//[{host}]" if ":" in host else f"//{host}"):
        raise EnvironmentIncomplete(
            f"ANNEAL_WEB_HOST={host} lets other machines in. Also set ANNEAL_PUBLIC_URL to the address that people use."
        )


def _known_variables(
    home: Path,
    runtime_dir: Path,
    embedded: EmbeddedServices | None,
    given: Mapping[str, str],
    *,
    ports: tuple[int, int],
    is_debug: bool,
) -> dict[str, str]:
    web_port, internal_port = ports
    defaults = _kept_secrets(home) | {
        "ANNEAL_PUBLIC_URL": f"http://{reach(given.get('ANNEAL_WEB_HOST', LOOPBACK), web_port)}",
        "ANNEAL_WEB_HOST": LOOPBACK,
        "ANNEAL_INTERNAL_URL": f"http://{LOOPBACK}:{internal_port}",
        "ANNEAL_GATEWAY_URL": f"unix://{runtime_dir}/web/gateway.sock",
        "ANNEAL_REPLICA_ADDRESSES": f"unix://{runtime_dir}/replica.sock",
        "ANNEAL_OBJECT_STORE": f"file://{quote(str(home))}/objects",
        "ANNEAL_EMAIL_URL": f"file://{quote(str(home))}/mail",
        "ANNEAL_WELCOME_CREDIT_USD": "5",
        "ANNEAL_BASE_MODEL_ROOTS": f"{REPOSITORY}/demo",
        "ANNEAL_BROKER_KEY_PREFIX": "anneal:",
        "ANNEAL_POOL": LOCAL_POOL,
        "ANNEAL_TRAINER_THREADS": str(MAX_TRAINER_THREADS),
        "ANNEAL_ENGINE_THREADS": "1",
        "ANNEAL_ENGINE_DRAIN_SECONDS": DRAIN_SECONDS,
        "ANNEAL_DEBUG": "1" if is_debug else "0",
        "DJANGO_SETTINGS_MODULE": "apps.config.settings.dev",
        "WEB_PORT": str(web_port),
        "INTERNAL_PORT": str(internal_port),
    }
    if embedded:
        defaults |= {f"DATABASE_{role.upper()}_URL": embedded.database_url(role) for role in ROLES}
        defaults |= {"REDIS_URL": embedded.redis_url, "CELERY_BROKER_URL": embedded.broker_url}
        defaults |= {"ANNEAL_TRAINER_BROKER_URL": embedded.trainer_broker_url}
    known = defaults | {name: value for name, value in given.items() if name not in _NOT_SETTABLE}
    own_replica = defaults["ANNEAL_REPLICA_ADDRESSES"]
    if own_replica not in known["ANNEAL_REPLICA_ADDRESSES"].split(","):  # those of other machines join it
        known["ANNEAL_REPLICA_ADDRESSES"] += f",{own_replica}"
    mail = urlsplit(known["ANNEAL_EMAIL_URL"])
    if mail.scheme == "file":  # pages show the folder, but never the URL, which may contain a password
        known["ANNEAL_MAIL_FOLDER"] = unquote(mail.path)
    known.setdefault("CELERY_BROKER_URL", known["REDIS_URL"])
    known.setdefault("ANNEAL_TRAINER_BROKER_URL", known["CELERY_BROKER_URL"])
    return known


def _embedded_place(home: Path, runtime_dir: Path, known: Mapping[str, str]) -> Place:
    # The engine's socket is in the replica's folder, so that folder moves too where paths are too long for sockets.
    replica_dir = home / "replica" if runtime_dir.parent == home else runtime_dir / "replica"
    gateway = known["ANNEAL_GATEWAY_URL"].removeprefix("unix://")
    return Place(
        {
            "home": str(home),
            "settings": known["DJANGO_SETTINGS_MODULE"],
            "web_listen": f"--host {known['ANNEAL_WEB_HOST']} --port {known['WEB_PORT']}",
            "internal_listen": f"--host {LOOPBACK} --port {known['INTERNAL_PORT']}",
            "gateway_listen": f"--uds {shlex.quote(gateway)}",
            "pool": known["ANNEAL_POOL"],
            "trainer_dir": str(home / "trainer"),
            "trainer_broker_url": known["ANNEAL_TRAINER_BROKER_URL"],
            "replica_dir": str(replica_dir),
            "replica_listen": str(runtime_dir / "replica.sock"),
            "engine_threads": known["ANNEAL_ENGINE_THREADS"],
        },
        pythons={venv: str(REPOSITORY / venv / "bin/python") for venv in (".venv", ".venv-engines")},
    )


# --- files kept between runs ------------------------------------------------------------------------------------------


def _kept_secrets(home: Path) -> dict[str, str]:
    path = home / "secrets.json"
    kept = {name: str(value) for name, value in _read_object(path).items()}
    if missing := [name for name in SECRETS if not kept.get(name)]:
        kept |= {name: secrets.token_urlsafe(48) for name in missing}
        _write_private(path, json.dumps(kept, indent=1) + "\n")
    return kept


def _read_object(path: Path) -> dict[str, object]:
    """Return the JSON object in a file; an empty one if the file is missing or unreadable (a full disk)."""
    try:
        found = json.loads(path.read_text())
    except (FileNotFoundError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _write_private(path: Path, text: str) -> None:
    draft = path.with_name(path.name + ".part")
    with os.fdopen(os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    draft.rename(path)
