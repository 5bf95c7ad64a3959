"""Seeds in a process of their own. A process imports this without Django, and sets it up."""

import functools
import logging
import os
from collections import Counter
from typing import TYPE_CHECKING

import django
from django.db import transaction

from tests.services.database import own_database

if TYPE_CHECKING:
    from tests.fuzz.simulation.scenario import World


def prepare() -> None:
    """Set Django up in this process, with a database of its own, which the next run drops."""
    os.environ["DJANGO_SETTINGS_MODULE"] = "apps.config.settings.test"
    django.setup()
    logging.disable(logging.WARNING)  # what the control plane notes of each fault
    own_database().__enter__()
    _world()


@functools.cache
def _world() -> "World":
    from tests.fuzz.simulation.scenario import World

    with transaction.atomic():
        return World()


def run_seeds(seeds: range) -> tuple[list[str], int, Counter[str]]:
    """Return the broken rules of these seeds; of the others, how many jobs were submitted and came to each end."""
    from tests.fuzz.simulation.scenario import BrokenRule, simulate

    broken, submitted, ends = [], 0, Counter[str]()
    for seed in seeds:
        try:
            jobs, came_to = simulate(_world(), seed)
        except BrokenRule as error:
            broken.append(str(error))
        else:
            submitted += jobs
            ends.update(came_to)
    return broken, submitted, ends
