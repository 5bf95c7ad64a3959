"""The page of faults is current, and each test that it counts on exists."""

import json
import re

from scripts.assets.faults import FIGURES, PAGE, read_groups, render
from scripts.processes import REPOSITORY

GROUPS = read_groups()
TESTS = {test for group in GROUPS for fault in group.faults for test in fault.tests}


def test_the_page_is_current() -> None:
    assert PAGE.read_text() == render(GROUPS, json.loads(FIGURES.read_text()))


def test_each_test_exists() -> None:
    for test in TESTS:
        file, _, function = test.partition("::")
        assert re.search(rf"^ *def {function}\(", (REPOSITORY / file).read_text(), re.MULTILINE), test


def test_each_figure_is_of_a_test_that_passed() -> None:
    figures = json.loads(FIGURES.read_text())

    assert figures.keys() <= TESTS
    assert all(each["cases"] > 0 for each in figures.values())
