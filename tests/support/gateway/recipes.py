"""The recipes of docs/cookbook as programs, and what a worker and a replica do while one runs."""

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

from apps.accounts.models import Organization
from apps.batches import worker as batches
from apps.batches.models import Batch
from apps.core.messages.outbox import deliver_due
from apps.datasets.models import DatasetVersion, TokenCount
from apps.datasets.tasks import validate
from apps.finetuning.models import FineTuningJob
from apps.finetuning.runs import claims
from tests.factories.finetuning import TrainingSetup
from tests.factories.serving import load, make_replica, price_inference
from tests.support.attempts import REPORT, Attempt

ROOT = Path(__file__).resolve().parents[3]
COOKBOOK = ROOT / "docs/cookbook"
_BLOCK = re.compile(r"^```(\w+) ?(\S*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SECONDS = 120


class Recipe(NamedTuple):
    """`python` is one program; `shell` are commands, each run by itself; `files` are written before."""

    python: str
    shell: tuple[str, ...]
    files: dict[str, str]


def read_recipe(name: str) -> Recipe:
    """Return what a page says to run. Blocks in `shell` are for the reader alone: they prepare or need a network."""
    blocks = _BLOCK.findall((COOKBOOK / f"{name}.md").read_text())
    python = "\n".join(code for language, file, code in blocks if language == "python" and not file)
    shell = tuple(code for language, _, code in blocks if language == "bash")
    return Recipe(python, shell, {file: code for _, file, code in blocks if file})


class Kitchen:
    """An organization whose files are checked, whose jobs are trained and whose models answer, one look at a time."""

    def __init__(self, organization: Organization, engine_url: str) -> None:
        self._floor = TrainingSetup(organization)
        self._replica = make_replica(self._floor.base_model, engine_url)
        self.model = self._floor.base_model.name
        price_inference(self.model)

    def run(self, recipe: Recipe, folder: Path, environment: dict[str, str]) -> str:
        """Run a recipe to its end and return what it printed. Raises AssertionError with its errors."""
        for name, content in recipe.files.items():
            (folder / name).write_text(content)
        programs = [[sys.executable, "-c", recipe.python]] if recipe.python else []
        programs += [
            ["bash", "-ec", f'anneal() {{ "{sys.executable}" -m anneal "$@"; }}\n{code}'] for code in recipe.shell
        ]
        return "".join(self._run(program, folder, environment) for program in programs)

    def _run(self, program: list[str], folder: Path, environment: dict[str, str]) -> str:
        path = os.pathsep.join([str(ROOT / "cli/src"), str(ROOT)])
        given = os.environ | {"PYTHONPATH": path, "XDG_CONFIG_HOME": str(folder)} | environment
        with (folder / "errors.txt").open("a") as errors, (folder / "printed.txt").open("w+") as printed:
            running = subprocess.Popen(program, cwd=folder, env=given, stdout=printed, stderr=errors)
            for _ in range(_SECONDS * 4):
                self.work()
                try:
                    running.wait(timeout=0.25)
                    break
                except subprocess.TimeoutExpired:
                    continue
            running.kill()
            assert running.wait() == 0, (folder / "errors.txt").read_text()[-3000:]
        return (folder / "printed.txt").read_text()

    def work(self) -> None:
        """Check files, train what waits and load the results, and answer batches."""
        organization, base_model = self._floor.organization, self._floor.base_model
        for version in DatasetVersion.objects.filter(organization=organization, status="uploaded"):
            validate(version.pk)
            TokenCount.objects.get_or_create(
                organization=organization, version=version, base_model=base_model,
                defaults={
                    "chat_template_sha256": base_model.chat_template_sha256, "tokens": 240, "trained_tokens": 60,
                    "longest_row_tokens": 20, "histogram": [[20, 12]], "starts": [[16, 16, 12]],
                },
            )  # fmt: skip
        while claimed := claims.claim(worker=self._floor.worker, base_models=None):
            Attempt(claimed).start().succeed(base_model, report=REPORT)
        for job in FineTuningJob.objects.filter(organization=organization, adapter_version__isnull=False):
            load(job.adapter_version, self._replica)
        if Batch.objects.filter(organization=organization, completed_at=None).exists():
            batches.work(seconds=1)
        deliver_due(lane="control")
