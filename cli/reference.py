"""Write the reference of the command line, which is the end of docs/cli.md, from the commands themselves.

python -m cli.reference
"""

import re
import sys
from pathlib import Path

import typer
from typer.cli import get_docs_for_click

PAGE = Path(__file__).resolve().parents[1] / "docs/cli.md"
_HEADING = "## Reference\n"
# Options of every command, lists of commands whose sections follow anyway, and what is empty then.
_LEFT_OUT = (
    r"^\* `--(help|install-completion|show-completion)`.*\n",
    r"^\*\*Commands\*\*:\n\n(\* .*\n)+\n",
    r"^\*\*Options\*\*:\n\n(?!\*)",
    r"(?<=\n\n)\n+",
)


def main() -> int:
    PAGE.write_text(page())
    return 0


def page() -> str:
    """Return the page with the reference as it should be."""
    sys.path.insert(0, str(PAGE.parents[1] / "cli/src"))
    from anneal.app import app  # noqa: PLC0415 - from the folder above
    from anneal.failures import MEANINGS  # noqa: PLC0415

    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command, info_name="anneal"), name="anneal", indent=2)
    codes = "".join(f"| {code} | {meaning} |\n" for code, meaning in MEANINGS.items())
    intro = PAGE.read_text().partition(_HEADING)[0]
    for pattern in _LEFT_OUT:
        text = re.sub(pattern, "", text, flags=re.MULTILINE)
    return f"{intro}{_HEADING}\n### Exit codes\n\n| code | meaning |\n|---|---|\n{codes}\n{text.strip()}\n"


if __name__ == "__main__":
    sys.exit(main())
