"""Types that several threads use for the first time at once."""

import subprocess
import sys

import pytest

_CODE = """
import sys, threading, msgspec
from apps.contracts.struct import prepare_types

def define():
    class Inner(msgspec.Struct):
        names: dict[str, float]

    class Outer(msgspec.Struct):
        one: Inner
        more: list[Inner]

    return Outer

sys.setswitchinterval(1e-6)
kinds = [define() for _ in range(400)]
if sys.argv[1] == "prepared":
    prepare_types()
sent = {"one": {"names": {}}, "more": [{"names": {"a": 1.0}}]}
for kind in kinds:
    together = threading.Barrier(8)
    def use():
        together.wait()
        msgspec.convert(sent, kind)
    threads = [threading.Thread(target=use) for _ in range(8)]
    for thread in threads: thread.start()
    for thread in threads: thread.join()
"""


def _exit_code(how: str) -> int:
    return subprocess.run([sys.executable, "-c", _CODE, how], capture_output=True, timeout=60, check=False).returncode


@pytest.mark.slow
def test_prepared_types_may_be_used_by_many_threads_at_once() -> None:
    assert _exit_code("prepared") == 0


@pytest.mark.nightly
def test_msgspec_still_ends_the_process_without_it() -> None:
    """If this fails, msgspec is fixed: remove `prepare_types`."""
    assert _exit_code("unprepared") < 0
