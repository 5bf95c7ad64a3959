"""The documented command line is the real one."""

from collections.abc import Iterator

import typer
from anneal.app import app

from cli import reference


def commands(command: typer.core.TyperGroup) -> Iterator[tuple[str, list[str]]]:
    for each in command.commands.values():
        if isinstance(each, typer.core.TyperGroup):
            yield from commands(each)
        else:
            yield each.name, [word for option in each.params for word in option.opts]


def test_the_reference_is_that_of_the_commands() -> None:
    assert reference.PAGE.read_text() == reference.page(), "run make cli"


def test_every_command_prints_json_on_request() -> None:
    found = list(commands(typer.main.get_command(app)))

    assert len(found) >= 20
    assert [name for name, options in found if "--json" not in options] == []
