"""The commands that set-up runs silently, and the program that `make audit` runs."""

import pytest

from scripts.dependencies.audit import run_pip_audit
from scripts.installation.commands import SetupFailed, run


def test_output_in_another_encoding_is_shown_as_far_as_it_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")

    with pytest.raises(SetupFailed, match="dur� stop…"):
        run(["sh", "-c", r"printf 'dur\351 stop\342\200\246'; exit 1"])


@pytest.mark.slow
def test_the_audits_program_starts_although_the_web_environment_has_no_pip() -> None:
    started = run_pip_audit("--version")

    assert started.stdout.startswith("pip-audit "), started.stderr
