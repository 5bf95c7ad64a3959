"""How the trees of processes are read."""

import os
from typing import Any

import pytest

from gpu_workers.common import process_tree


def test_a_process_of_another_account_may_be_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the mount option hidepid=1 of /proc."""

    def open_own(path: str, *arguments: Any, **options: Any) -> Any:
        if path.startswith("/proc/1/"):
            raise PermissionError(path)
        return open(path, *arguments, **options)

    monkeypatch.setattr(process_tree, "open", open_own, raising=False)

    assert process_tree.identify(1) is None
    assert os.getpid() in {process.pid for process in process_tree.list_descendants(os.getppid())}
