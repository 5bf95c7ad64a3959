"""Seeds of the simulation: under faults in any order, jobs end, bills are right and machines are shared."""

import pytest

from tests.fuzz.simulation.scenario import World, simulate

SEEDS = range(2)


@pytest.fixture
def world(db) -> World:
    return World()


@pytest.mark.slow
@pytest.mark.parametrize("seed", SEEDS)
def test_every_rule_holds(world, seed: int):
    simulate(world, seed)
