"""Adapters of random weights for the demo model, in the engines' environment: `python -m … FOLDER COUNT`."""

import sys
from pathlib import Path

from tests.support.engines.adapters import make_arrays, make_files
from tests.support.engines.models import BASE_MODEL

RANK = 8


def main() -> None:
    folder, count = Path(sys.argv[1]), int(sys.argv[2])
    for number in range(count):
        target = folder / str(number)
        target.mkdir(parents=True)
        for name, content in make_files(make_arrays(BASE_MODEL, rank=RANK, seed=number), rank=RANK).items():
            (target / name).write_bytes(content)


if __name__ == "__main__":
    main()
