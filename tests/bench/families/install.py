"""`python -m tests.bench.families.install FOLDER`: read a model's folder as its installation does, and write JSON.

The catalogue belongs to the web environment, which has no engines.
"""

import subprocess
import sys
from pathlib import Path

import msgspec

from apps.estimates.models.architectures import Architecture

ROOT = Path(__file__).resolve().parents[3]
WEB = ROOT / ".venv/bin/python"


class InstalledModel(msgspec.Struct, frozen=True, kw_only=True):
    """What a quote needs of an installed model."""

    architecture: Architecture
    parameter_count: int


class NotInstalled(Exception):
    """The catalogue refused the folder; the message is its error."""


def install(folder: Path) -> InstalledModel:
    """Read a folder in the web environment. Raises NotInstalled."""
    command = [str(WEB), "-m", __spec__.name, str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise NotInstalled(done.stderr.strip().rpartition("\n")[2])
    return msgspec.json.decode(done.stdout, type=InstalledModel)


def main() -> None:
    from django.conf import settings

    from apps.catalog.model_files import read_model_folder

    settings.configure(USE_I18N=False)  # the text of a refusal asks for it
    folder = Path(sys.argv[1])
    model = read_model_folder(folder, roots=[folder.parent])
    found = InstalledModel(architecture=model.architecture, parameter_count=model.parameter_count)
    sys.stdout.write(msgspec.json.encode(found).decode())


if __name__ == "__main__":
    main()
