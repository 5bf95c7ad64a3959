"""What the tests of the chart share: its folder, compose.yaml beside it, and how to read rendered objects."""

import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import yaml

DEPLOY = Path(__file__).resolve().parents[4] / "deploy"
HELM_FOLDER = DEPLOY / "helm"
SERVICES: dict[str, dict[str, Any]] = yaml.safe_load((DEPLOY / "compose.yaml").read_text())["services"]
Object = dict[str, Any]
Rendering = list[Object]
Helm = Callable[..., "subprocess.CompletedProcess[str]"]
# The example has two pools and two base models: the first of each has every part.
_PODS = {"trainer": "trainer-h100"} | dict.fromkeys(("vllm", "vllm-canary", "serving-agent"), "replica-llama-8b")


def objects_of(done: "subprocess.CompletedProcess[str]") -> Rendering:
    assert done.returncode == 0, done.stderr
    return [each for each in yaml.load_all(done.stdout, Loader=yaml.CSafeLoader) if each]


def pods(rendered: Rendering) -> Iterator[tuple[Object, Object]]:
    """Yield each object that makes pods, with the pod's template."""
    for each in rendered:
        if each["kind"] in ("Deployment", "StatefulSet", "Job"):
            yield each, each["spec"]["template"]


def container_of(rendered: Rendering, program: str) -> tuple[Object, Object]:
    """Return a program's pod and its container."""
    for owner, template in pods(rendered):
        if owner["metadata"]["name"] == _PODS.get(program, program):
            [container] = [each for each in template["spec"]["containers"] if each["name"] == program]
            return template["spec"], container
    raise AssertionError(f"{program} has no pod")


def variables(container: Object) -> Object:
    return {each["name"]: each for each in container["env"]}


def from_secrets(container: Object) -> set[str]:
    return {name for name, each in variables(container).items() if "secretKeyRef" in each.get("valueFrom", {})}
