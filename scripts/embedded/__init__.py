"""A real PostgreSQL and a real Redis (Valkey, same protocol) from wheels, for a machine that has neither.

`python -m scripts.embedded postgres|redis --data-dir DIR` runs one server in the foreground for a supervisor.
`ensure_running(data_dir)` starts both for tests and management commands and shares them between processes. They stop
when the last user has ended, even by kill -9. Both listen only on Unix sockets in private directories. Imports no
Django.
"""

from scripts.embedded.places import REPOSITORY, ROLES, EmbeddedServices, Role, runtime_dir, services
from scripts.embedded.postgres import is_postgres_ready, serve_postgres, tcp_passwords
from scripts.embedded.redis import is_redis_ready, redis_server, serve_redis
from scripts.embedded.servers import EmbeddedServiceError
from scripts.embedded.sharing import ensure_running

__all__ = [
    "REPOSITORY",
    "ROLES",
    "EmbeddedServiceError",
    "EmbeddedServices",
    "Role",
    "ensure_running",
    "is_postgres_ready",
    "is_redis_ready",
    "redis_server",
    "runtime_dir",
    "serve_postgres",
    "serve_redis",
    "services",
    "tcp_passwords",
]
