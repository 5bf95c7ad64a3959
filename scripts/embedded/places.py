"""The addresses of a data directory's servers, and the private directories and secrets that they share.

Imports no Django, like the whole package.
"""

import hashlib
import os
import pwd
import re
import secrets
import stat
from pathlib import Path
from typing import Literal
from urllib.parse import quote, urlencode

import msgspec

from scripts.embedded.servers import EmbeddedServiceError, postgres_account

DATABASE = "anneal"
POSTGRES_PORT = 5432  # part of the socket's name; nothing listens on it unless a TCP port is requested
Role = Literal["owner", "app", "sys", "internal", "gateway"]
ROLES: tuple[Role, ...] = ("owner", "app", "sys", "internal", "gateway")
REPOSITORY = Path(__file__).resolve().parents[2]
# sun_path is 108 bytes with the closing NUL; the longest name below the runtime directory is pg/.s.PGSQL.5432.lock.
SOCKET_PATH_LIMIT_BYTES = 107
MAX_SOCKET_NAME_BYTES = 32


class EmbeddedServices(msgspec.Struct, frozen=True):
    """The addresses of one data directory's embedded servers."""

    data_dir: str
    runtime_dir: str
    postgres_socket_dir: str
    postgres_port: int
    redis_socket: str
    trainer_password: str

    def database_url(self, role: Role) -> str:
        """Return the libpq URL of `role` on the shared database; the private socket directory replaces a password."""
        place = {"host": self.postgres_socket_dir, "port": self.postgres_port}
        return f"postgresql://anneal_{role}@/{DATABASE}?{urlencode(place)}"

    @property
    def redis_url(self) -> str:
        """Return the control plane's Redis URL for redis-py."""
        return f"unix://{quote(self.redis_socket)}?db=0"

    @property
    def broker_url(self) -> str:
        """Return the control plane's Redis URL for Celery."""
        return f"redis+socket://{quote(self.redis_socket)}?virtual_host=0"

    @property
    def trainer_broker_url(self) -> str:
        """Return the broker URL of a GPU worker. Its user may only consume its own queue."""
        return f"redis+socket://anneal_trainer:{self.trainer_password}@{quote(self.redis_socket)}?virtual_host=0"


def runtime_dir(data_dir: Path) -> Path:
    """Return the directory of the sockets of `data_dir`: inside it, or a private one under /tmp.

    It is under /tmp if the path is too long for a socket or would need quoting in the URLs and files that contain it.
    """
    inside = data_dir.resolve() / "run"
    is_short = len(os.fsencode(inside)) + MAX_SOCKET_NAME_BYTES <= SOCKET_PATH_LIMIT_BYTES
    if is_short and re.fullmatch(r"[\w./-]+", str(inside), re.ASCII):
        return inside
    key = hashlib.sha256(os.fsencode(data_dir.resolve())).hexdigest()[:16]
    return Path("/tmp") / f"anneal-{os.getuid()}-{key}"  # noqa: S108  made private and checked by private_dir


def services(data_dir: Path, *, postgres_port: int = POSTGRES_PORT) -> EmbeddedServices:
    """Return the addresses of `data_dir`'s servers. Starts nothing, but creates the directories."""
    run = _prepare_directories(data_dir)
    return EmbeddedServices(
        data_dir=str(data_dir.resolve()),
        runtime_dir=str(run),
        postgres_socket_dir=str(run / "pg"),
        postgres_port=postgres_port,
        redis_socket=str(run / "redis/redis.sock"),
        trainer_password=kept_secret(data_dir / "redis-trainer-password"),
    )


def _prepare_directories(data_dir: Path) -> Path:
    # As root, the server's account must be able to walk through the directory, but not to list it.
    walkable = 0o711 if os.getuid() == 0 else 0o700
    data_dir.mkdir(parents=True, exist_ok=True)
    data_dir.chmod(walkable)
    run = private_dir(runtime_dir(data_dir), mode=walkable)
    private_dir(run / "pg", mode=0o700, owner=postgres_account())
    private_dir(run / "redis", mode=0o700)
    private_dir(run / "web", mode=0o700)  # uvicorn makes its socket world-accessible: the folder protects it
    return run


def private_dir(path: Path, *, mode: int, owner: pwd.struct_passwd | None = None) -> Path:
    path.mkdir(mode=mode, exist_ok=True)
    found = path.lstat()
    trusted = {os.getuid()} | ({owner.pw_uid} if owner else set())
    if not stat.S_ISDIR(found.st_mode) or found.st_uid not in trusted:
        raise EmbeddedServiceError(f"{path} belongs to another account. Remove it and try again.")
    if owner:
        os.chown(path, owner.pw_uid, owner.pw_gid)
    path.chmod(mode)
    return path


def kept_secret(path: Path) -> str:
    """Return the secret in `path`, which is created once. Two processes that start together read the same one."""
    if not path.exists():
        draft = path.with_name(f"{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(secrets.token_urlsafe(32))
        try:
            os.link(draft, path)
        except FileExistsError:
            pass
        finally:
            draft.unlink()
    return path.read_text()


def users_lock(data_dir: Path) -> Path:
    return data_dir / "users.lock"
