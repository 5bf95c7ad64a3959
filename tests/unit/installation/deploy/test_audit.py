"""The audit of locked versions says what is vulnerable, and never calls clean what no answer came for."""

import json
from types import SimpleNamespace
from typing import Any

import pytest

from scripts.dependencies import audit
from scripts.dependencies.lock import ENGINES

CLEAN = {"name": "alpha", "version": "1.0", "vulns": []}
VULNERABLE = {"name": "beta", "version": "2.0", "vulns": [{"id": "PYSEC-1", "fix_versions": ["2.1"]}]}
UNKNOWN = {"name": "gamma", "skip_reason": "Dependency not found on PyPI"}


@pytest.mark.parametrize(
    ("packages", "status", "words"),
    [
        ([CLEAN], 0, "No known vulnerability"),
        ([CLEAN, VULNERABLE], 1, "web.lock: beta 2.0: PYSEC-1, fixed in 2.1"),
        ([CLEAN, UNKNOWN], 1, "web.lock was not audited whole: the index says nothing of 1 of its 2 packages"),
        (None, 1, "web.lock was not audited: ConnectionError: no route to pypi.org"),
    ],
)
def test_only_a_whole_answer_without_findings_is_clean(
    packages: list[dict[str, Any]] | None,
    status: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = "" if packages is None else json.dumps({"dependencies": packages})
    answer = SimpleNamespace(stdout=said, stderr="Traceback\nConnectionError: no route to pypi.org\n", returncode=1)
    monkeypatch.setattr(audit, "run_pip_audit", lambda *_: answer)

    assert audit.main() == status
    assert words in capsys.readouterr().out


def test_the_release_whose_cpu_build_pypi_does_not_have_is_in_another_lock() -> None:
    [line] = (ENGINES / "torch-cpu.lock").read_text().split()

    assert f"{line.removesuffix('+cpu')} " in (ENGINES / "engines-gpu.lock").read_text()
