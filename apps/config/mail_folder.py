"""A mail backend that writes files, for an installation without a mail server.

Only the owner of the files may read them, because messages contain links that reset passwords.
"""

import os
from typing import Any

from django.conf import settings
from django.core.mail.backends import filebased


class EmailBackend(filebased.EmailBackend):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        os.makedirs(str(settings.EMAIL_FILE_PATH), mode=0o700, exist_ok=True)
        super().__init__(*args, **kwargs)

    def open(self) -> bool:
        """Open a file of mode 0600 for this connection's messages, unless one is open; return whether it was opened."""
        if self.stream is not None:
            return False
        path = self._get_filename()
        self.stream = os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), "ab")
        return True
