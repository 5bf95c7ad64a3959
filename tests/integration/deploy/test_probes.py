"""The address that Kubernetes asks whether a process answers, in the processes as they start."""

import os
import subprocess
import sys

import pytest

from scripts.processes import REPOSITORY

PROBE = """
import asyncio, importlib, json, sys

application = importlib.import_module(sys.argv[1]).application
seen = []
async def send(message): seen.append(message)
asyncio.run(application({"type": "http", "method": "GET", "path": "/healthz", "headers": []}, None, send))
print(json.dumps([seen[0]["status"], seen[1]["body"].decode()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("process", "settings"), [("asgi", "dev"), ("asgi_internal", "internal")])
def test_a_process_answers_probes(process: str, settings: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROBE, f"apps.config.{process}"],
        env=os.environ | {"DJANGO_SETTINGS_MODULE": f"apps.config.settings.{settings}"},
        cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == '[200, "{\\"status\\":\\"ok\\"}"]'
