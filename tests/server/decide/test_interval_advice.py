"""The advice on the interval between checkpoints, with figures computed by hand."""

from __future__ import annotations

from typing import Literal

import pytest
from msgspec.structs import replace

from paceline_server.decide.interval_advice import (
    gamma_quantile,
    interval_advice,
    overhead_ratio,
)
from paceline_server.decide.types import Experience, FailureHistory
from paceline_server.policy import Policy
from paceline_wire.commands import StartRanks
from paceline_wire.intervals import best_interval_seconds

from .simulator import World

# With the prior of 3,692.3 node hours 12,845.3: a failure of 100 nodes every 32.1 h.
SHOWN = Experience(
    checkpoint_interval_steps=10,
    checkpoint_seconds=9.0,
    nodes=100,
    fleet=FailureHistory(3, 9153 * 3600.0),
)


def test_the_best_interval_is_that_of_young_and_daly() -> None:
    assert best_interval_seconds(9.0, 115_600.0) == pytest.approx(1433.5, abs=0.1)
    assert overhead_ratio(9.0, 1433.5, 115_600.0) == pytest.approx(0.01248, abs=1e-5)
    assert best_interval_seconds(100.0, 150.0) == 150.0


@pytest.mark.parametrize("interval", ["script", "advised"])
def test_ranks_get_the_mean_time_between_failures_if_the_policy_allows_it(
    world: World, interval: Literal["script", "advised"]
) -> None:
    world.policy = Policy(mode="auto", checkpoint_interval=interval)
    world.crash(3)
    world.until_running(2)
    commands = [one.command for one in world.commands if isinstance(one.command, StartRanks)]
    newest = [command for command in commands if command.generation == 2]
    expected = {"PACELINE_MTTF_SECONDS": f"{1000 * 86_400 / 6.5 / 4:.0f}"}
    assert len(newest) == 4, "one per node"
    for command in newest:
        assert command.environment == (expected if interval == "advised" else {})


@pytest.mark.parametrize("factor", [0.5, 0.8, 1.25, 2.0])
def test_any_other_interval_costs_more(factor: float) -> None:
    best = best_interval_seconds(9.0, 115_600.0)
    assert overhead_ratio(9.0, best * factor, 115_600.0) > overhead_ratio(9.0, best, 115_600.0)


def test_the_cost_is_a_share_of_the_time() -> None:
    assert overhead_ratio(9.0, 1.0, 115_600.0) == pytest.approx(0.9, abs=1e-3)
    assert overhead_ratio(9.0, 1e6, 115_600.0) == 1.0


@pytest.mark.parametrize(
    ("shape", "z", "expected"),
    [(1.0, 1.6449, 2.9957), (4.0, -1.6449, 1.3663), (4.0, 1.6449, 7.7537), (50.0, 0.0, 49.667)],
)
def test_the_quantiles_are_those_of_tables(shape: float, z: float, expected: float) -> None:
    assert gamma_quantile(shape, z) == pytest.approx(expected, rel=0.01)


def test_the_advice_has_its_figures() -> None:
    found = interval_advice(SHOWN, 1.31)
    assert found is not None
    assert found.interval_steps == 1094
    assert found.mttf_seconds == pytest.approx(115_608, abs=10)
    assert found.mttf_low_seconds == pytest.approx(115_608 * 4 / 7.7537, rel=0.01)
    assert found.mttf_high_seconds == pytest.approx(115_608 * 4 / 1.3663, rel=0.01)
    assert found.text == (
        "Saving every 1,094 steps (23.9 min) instead of every 10 steps would cost 1.2% of the time "
        "instead of 40.7%: a checkpoint takes 9.0 s, and a failure is expected every 32.1 h "
        "(90%: 16.6 h to 94.4 h; 3 failures in 9,153 node hours of this fleet)."
    )


def test_an_interval_that_costs_nearly_the_same_is_right() -> None:
    found = interval_advice(replace(SHOWN, checkpoint_interval_steps=900), 1.31)
    assert found is not None
    assert found.text.startswith("The interval of 900 steps is about right: a checkpoint takes ")


@pytest.mark.parametrize(
    "missing", ["checkpoint_interval_steps", "checkpoint_seconds", "nodes", "fleet"]
)
def test_without_a_figure_there_is_no_advice(missing: str) -> None:
    shown = replace(SHOWN, **{missing: 0 if missing == "nodes" else None})
    assert interval_advice(shown, 1.31) is None
    assert interval_advice(SHOWN, None) is None
