"""Ask PyPI for known vulnerabilities of every locked version; fail if there are any, or if an answer is missing.

    make audit

pip-audit, in its own folder (requirements/programs/pip-audit.lock), queries the advisory database that PyPI publishes.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from scripts.dependencies.lock import REPOSITORY, REQUIREMENTS, WITHOUT_HASHES
from scripts.installation.installer import pip_command

PROGRAM = REPOSITORY / ".anneal/pip-audit"
_TIMEOUT_SECONDS = 900


class NotAudited(Exception):
    """A lock could not be checked; the message gives the reason."""


def run_pip_audit(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run pip-audit in a Python that has pip. It asks for pip's version even if it is configured not to use pip."""
    python, *_ = pip_command()
    return subprocess.run(
        [python, "-m", "pip_audit", *arguments],
        env=os.environ | {"PYTHONPATH": str(PROGRAM)},
        capture_output=True,
        text=True,
        check=False,
        timeout=_TIMEOUT_SECONDS,
    )


def audit(lock: Path) -> list[str]:
    """Return a line for each known vulnerability of a lock's versions. Raises NotAudited."""
    done = run_pip_audit(
        "--disable-pip", "--require-hashes", "--progress-spinner=off", "--format=json", f"--requirement={lock}"
    )
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except (ValueError, KeyError):
        last = (done.stderr.strip().splitlines() or ["pip-audit said nothing"])[-1]
        raise NotAudited(f"{lock.name} was not audited: {last[:300]}") from None
    if unknown := [package["name"] for package in packages if "skip_reason" in package]:
        count = f"{len(unknown)} of its {len(packages)} packages"
        raise NotAudited(f"{lock.name} was not audited whole: the index says nothing of {count}, such as {unknown[0]}")
    return [
        f"{lock.name}: {package['name']} {package['version']}: {found['id']}, "
        + (f"fixed in {', '.join(found['fix_versions'])}" if found["fix_versions"] else "no fix yet")
        for package in packages
        for found in package["vulns"]
    ]


def main() -> int:
    """Print the findings; return 1 unless every lock got a clean answer."""
    problems = []
    for lock in sorted(REQUIREMENTS.rglob("*.lock")):
        if lock.name in WITHOUT_HASHES:
            continue  # the CPU build of a release that engines-gpu.lock has
        try:
            problems += audit(lock)
        except NotAudited as unanswered:
            problems.append(str(unanswered))
    text = "\n".join(problems) or "No known vulnerability in any locked version."
    sys.stdout.write(f"{text}\n")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
