"""`python -m gpu_workers.bench.gpu_check.child MODULE:FUNCTION FOLDER`: run one check and write its finding."""

import importlib
import logging
import sys
from pathlib import Path

import msgspec

from gpu_workers.bench.gpu_check.findings import Finding, Verdict
from gpu_workers.bench.gpu_check.runner import FINDING_FILE
from gpu_workers.common.files import replace_file

log = logging.getLogger("gpu_workers.bench.gpu_check")


def main(target: str, folder: Path) -> None:
    """Write the finding of `target`. An exception is also a finding."""
    module, _, function = target.partition(":")
    try:
        finding: Finding = getattr(importlib.import_module(module), function)(folder)
    except Exception as error:  # process edge: every end must be reported
        log.exception("The check failed")
        said = " ".join(f"{type(error).__name__}: {error}".split())[:400]
        finding = Finding(verdict=Verdict.FAILED, said=said, advice=f"Read {folder / 'log'}.")
    replace_file(folder / FINDING_FILE, msgspec.json.encode(finding))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(message)s")
    main(sys.argv[1], Path(sys.argv[2]))
