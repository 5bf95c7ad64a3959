"""The command `anneal`: its groups, its global options, and failures as one sentence with an exit code."""

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from anneal import __version__
from anneal.commands import (
    account,
    apply,
    batches,
    chat,
    estimates,
    evals,
    files,
    imports,
    jobs,
    keys,
    models,
    projects,
    retrain,
    webhooks,
)
from anneal.failures import ExitCode, Failure
from anneal.output import notice
from anneal.session import session_of


class Commands(TyperGroup):
    """Runs a command, and prints a failure in place of a traceback."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse arguments that are not text, because they cannot be sent as JSON."""
        session_of(ctx).as_json = "--json" in args  # until the option is read, which a usage error may prevent
        with _usage_as_json(ctx):
            return self._parse(ctx, args)

    def _parse(self, ctx: Any, args: list[str]) -> list[str]:
        for word in args:
            try:
                word.encode()
            except UnicodeEncodeError:
                shown = os.fsencode(word).decode(errors="backslashreplace")
                raise typer.BadParameter("It is not UTF-8 text.", ctx, param_hint=f"'{shown}'") from None
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            with _usage_as_json(ctx):
                return super().invoke(ctx)
        except Failure as failure:
            raise _ended(ctx, failure) from failure
        except BrokenPipeError:  # Typer ends quietly: the reader has seen enough
            raise
        except UnicodeError as error:
            raise _ended(ctx, _unwritable(error)) from error
        except OSError as error:
            place = f"{error.filename}: " if error.filename else ""
            raise _ended(ctx, Failure(f"{place}{error.strerror or error}.", ExitCode.LOCAL)) from error
        except typer.Abort:  # of a prompt, whose line has not ended
            sys.stderr.write("\n")
            raise typer.Exit(ExitCode.INTERRUPTED) from None
        except KeyboardInterrupt:
            raise typer.Exit(ExitCode.INTERRUPTED) from None


@contextlib.contextmanager
def _usage_as_json(context: Any) -> Iterator[None]:
    """Print an error in the arguments as JSON if that was asked for; else Typer prints it with the usage."""
    try:
        yield
    except typer.TyperException as error:
        if not session_of(context).as_json or not hasattr(error, "format_message"):
            raise
        raise _ended(context, Failure(error.format_message(), ExitCode(error.exit_code))) from error


def _unwritable(error: UnicodeError) -> Failure:
    """Return the failure for text that was typed or given and cannot be sent, or that the terminal cannot show."""
    encoding = getattr(error, "encoding", "utf-8")
    if isinstance(error, UnicodeEncodeError) and encoding not in ("utf-8", "utf8"):
        return Failure(f"The output is not UTF-8 but {encoding}. Set PYTHONIOENCODING=utf-8.", ExitCode.LOCAL)
    return Failure("What you typed or gave is not UTF-8 text. Enter it as UTF-8.", ExitCode.USAGE)


def _ended(context: Any, failure: Failure) -> typer.Exit:
    """Print a failure and return the exception that ends the command."""
    if session_of(context).as_json:
        sys.stderr.write(json.dumps({"error": failure.details}) + "\n")
    else:
        notice(failure.message)
    return typer.Exit(failure.exit_code)


app = typer.Typer(cls=Commands, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


def _print_version(is_asked: bool) -> None:
    if is_asked:
        sys.stdout.write(f"anneal {__version__}\n")
        raise typer.Exit


@app.callback()
def main(
    context: typer.Context,
    base_url: Annotated[str | None, typer.Option(envvar="ANNEAL_BASE_URL", help="The installation's address.")] = None,
    api_key: Annotated[str | None, typer.Option(envvar="ANNEAL_API_KEY", hidden=True)] = None,
    project: Annotated[
        str | None, typer.Option(envvar="ANNEAL_PROJECT", help="The id of the project to work in: that of your key.")
    ] = None,
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Fine-tune models with Anneal: files, jobs, models and chat from the command line."""
    session = session_of(context)
    session.given_url, session.given_key, session.project = base_url or None, api_key or None, project or None


for command in (account.login, account.logout, account.usage, account.costs, account.audit, chat.chat, apply.apply):
    app.command()(command)
app.command(context_settings=estimates.OFFLINE)(estimates.estimate)
app.add_typer(files.app, name="files")
app.add_typer(jobs.app, name="jobs")
app.add_typer(models.app, name="models")
app.add_typer(retrain.app, name="retrain")
app.add_typer(batches.app, name="batches")
app.add_typer(evals.app, name="evals")
app.add_typer(imports.app, name="import")
app.add_typer(keys.app, name="keys")
app.add_typer(projects.app, name="projects")
app.add_typer(webhooks.app, name="webhooks")
