"""Failures that end a command: one sentence, and an exit code that a script can act on."""

from enum import IntEnum


class ExitCode(IntEnum):
    DONE = 0
    NEGATIVE = 1  # the file has problems, what was started did not succeed, or a question was declined
    USAGE = 2  # Typer's own
    SIGNED_OUT = 3  # no key, a wrong key, or one without the scope
    NOT_FOUND = 4
    REFUSED = 5  # also an import of which no job can be made
    UNREACHABLE = 6  # no connection, or the service kept failing or limiting calls
    LOCAL = 7  # a file on this machine cannot be read or written
    INTERRUPTED = 130


MEANINGS = {
    ExitCode.DONE: "Done.",
    ExitCode.NEGATIVE: (
        "The file has problems, the job, batch or run did not succeed, a gate failed, or you declined."
    ),
    ExitCode.USAGE: "An option or argument is wrong.",
    ExitCode.SIGNED_OUT: "There is no API key, it is not valid, or it lacks a scope.",
    ExitCode.NOT_FOUND: "The object does not exist.",
    ExitCode.REFUSED: "Anneal refused the request, or not all jobs of an import could start. The message says why.",
    ExitCode.UNREACHABLE: "Anneal did not answer, or failed or limited every attempt.",
    ExitCode.LOCAL: "A file or folder on this machine cannot be read or written.",
    ExitCode.INTERRUPTED: "You pressed Ctrl-C. Jobs, batches and runs go on.",
}


class Failure(Exception):
    """A command cannot go on. `details` are the members of OpenAI's error object, if the server sent one."""

    def __init__(self, message: str, exit_code: ExitCode, *, details: dict[str, object] | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.exit_code = exit_code
        self.details = details or {"message": message, "type": "cli_error", "param": None, "code": None}

    @property
    def code(self) -> object:
        return self.details.get("code")


class ConnectionLost(Failure):
    """The connection ended in the middle of an answer."""
