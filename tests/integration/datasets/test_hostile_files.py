"""Files made to exhaust their reader are refused, with no more memory than an ordinary file needs."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("gzip_bomb", "too_many_blanks"),
        ("gzip_line_bomb", "too_large_inside"),
        ("long_line", "line_too_long"),
        ("nested", "too_deep"),
        ("nested_array", "invalid_array"),
        ("open_quote", "invalid_table"),
        ("endless_row", "invalid_table"),
        ("wide_table", "invalid_table"),
        ("parquet_bomb", "too_large_inside"),
        ("parquet_page_bomb", "too_large_inside"),
    ],
)
def test_a_hostile_file_is_refused_with_little_memory(name: str, code: str) -> None:
    session = Path(__file__).with_name("hostile_session.py")

    done = subprocess.run(
        [sys.executable, str(session), name], cwd=ROOT, env={"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=120
    )

    assert done.returncode == 0, done.stderr.decode()
    seen = json.loads(done.stdout)
    assert seen["code"] == code
    assert seen["grown_mib"] < 64
    if not name.startswith("parquet"):  # making that bomb takes more than reading it
        assert seen["rss_mib"] < 300
