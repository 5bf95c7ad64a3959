"""The chart of deploy/helm, rendered by Helm itself with deploy/helm/example.yaml."""

import subprocess

import pytest

from scripts.installation.clients import find_helm
from tests.integration.deploy.helm.chart import HELM_FOLDER, Helm, Rendering, objects_of


@pytest.fixture(scope="session")
def helm(tmp_path_factory: pytest.TempPathFactory) -> Helm:
    """Return what runs Helm on the chart: a command, then options. It knows no cluster and no settings of ours."""
    home = tmp_path_factory.mktemp("helm")

    def run(command: str, *options: str) -> "subprocess.CompletedProcess[str]":
        name = ["anneal"] if command == "template" else []
        return subprocess.run(
            [str(find_helm()), command, *name, str(HELM_FOLDER / "anneal"), "--namespace=platform", *options],
            env={"HOME": str(home), "PATH": "/usr/bin:/bin"}, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip

    return run


@pytest.fixture(scope="session")
def rendered(helm: Helm) -> Rendering:
    """Return every object of the example."""
    return objects_of(helm("template", f"--values={HELM_FOLDER / 'example.yaml'}"))
