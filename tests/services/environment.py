"""The environment of the processes that a benchmark starts."""

from pathlib import Path

from scripts.embedded import EmbeddedServices, Role


def bench_environment(home: Path, services: EmbeddedServices, role: Role) -> dict[str, str]:
    """Return the settings of a process with the rights of this role in the database."""
    return {
        "ANNEAL_HOME": str(home),
        "ANNEAL_SECRET_KEY": "bench-secret-key-that-is-long-enough-for-django",
        "ANNEAL_KEY_PEPPER": "bench-pepper",
        "ANNEAL_SIGNING_KEY": "bench-signing-key",
        "DATABASE_URL": services.database_url(role),
        "REDIS_URL": services.redis_url,
        "CELERY_BROKER_URL": services.broker_url,
        "DJANGO_SETTINGS_MODULE": "apps.config.settings.dev",
    }
