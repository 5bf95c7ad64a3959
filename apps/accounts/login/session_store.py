"""Django's sessions in the database, which take only keys that Django makes."""

from django.contrib.sessions.backends.db import SessionStore as DatabaseSessions

_MIN_LENGTH = 8  # as in Django


class SessionStore(DatabaseSessions):
    """A cookie with another key, such as one with NUL, which PostgreSQL refuses, belongs to no session."""

    def _validate_session_key(self, key: str | None) -> bool:
        return key is not None and len(key) >= _MIN_LENGTH and key.isascii() and key.isalnum()
