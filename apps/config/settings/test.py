"""Settings of the unit, API and browser tests: real PostgreSQL and Redis, cheap password hashing, mail in memory."""

from apps.config.settings.base import *  # noqa: F403
from apps.config.settings.base import DATABASES, STORAGES
from apps.contracts.addresses.replicas import AddressRules

DATABASES["default"]["OPTIONS"].pop("pool", None)
PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
EMAIL_BACKEND = "django.core.mail.backends.locmem.EmailBackend"
STORAGES = STORAGES | {"staticfiles": {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}}
ACCOUNT_RATE_LIMITS = False  # type: ignore[assignment]
OPERATOR_MFA, OPERATOR_IDLE_SECONDS = False, 0
REPLICA_ADDRESSES = AddressRules.read(["unix:///", "127.0.0.0/8"])
# Each process has its own cache: clearing one in Redis would empty that Redis, with the queues of all other processes.
CACHES = {"default": {"BACKEND": "django.core.cache.backends.locmem.LocMemCache"}}
ESTIMATE_FACTS_SECONDS, QUEUE_RANKING_SECONDS = 0.0, 0.0
