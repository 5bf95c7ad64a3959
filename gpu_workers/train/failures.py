"""The exceptions that end an attempt in order."""

from apps.contracts.failures import FailureCode


class TrainingFailed(Exception):
    """An anticipated failure: `code` is stable, `message` is for the customer (no paths, no host names)."""

    def __init__(self, code: FailureCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class StopRequested(Exception):
    """SIGTERM arrived before there was anything to save."""
