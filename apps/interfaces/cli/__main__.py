"""`anneal`: commands that need no server. Also `python -m apps.interfaces.cli`."""

import argparse
import sys
from collections.abc import Sequence

from apps.interfaces.cli import estimate, output
from apps.interfaces.cli.errors import BadOption

WRONG_INPUT = 2  # the same as argparse's own exit status


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return the exit status: 0, or 2 for input that cannot be answered."""
    parser = argparse.ArgumentParser(prog="anneal", description="Fine-tuning on GPUs you run.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    estimate.add_command(commands)
    given = parser.parse_args(arguments)
    try:
        sys.stdout.write(given.run(given))
    except BadOption as error:
        sys.stderr.write(output.error_text(error, as_json=given.json))
        return WRONG_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
