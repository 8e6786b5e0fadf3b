"""Invariants that hold for any sequence of events (see `World._check`)."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
from hypothesis import given, settings
from hypothesis import strategies as st

from paceline_server.decide.decide import decide
from paceline_server.policy import Mode, Policy

from .simulator import ENDED, World

Event = tuple[str, int, float]

# fmt: off
NAMES = [
    "crash", "clean exit", "hang", "lose", "cut off", "reconnected", "ignores stop", "obeys stop",
    "straggler", "old finding", "cleared", "refuses start", "starts", "crashes at start",
    "cannot save", "can save", "approve", "reject", "repeat answers", "release", "sleep",
]
# fmt: on
EVENTS = st.lists(
    st.tuples(
        st.sampled_from(NAMES),
        st.integers(0, 7),
        st.sampled_from([0.1, 0.1, 0.3, 1.0, 4.0, 7.0, 20.0]),
    ),
    max_size=25,
)


def happen(world: World, event: str, index: int) -> None:
    node = world.nodes[f"node-{index % len(world.nodes)}"]
    there = [one.rank for one in world._current()]
    proposed = [one for one in world.actions.values() if one.state == "proposed"]
    rank = there[index % len(there)] if there else None
    if event in _ON_RANKS and rank is not None:
        _ON_RANKS[event](world, rank)
    elif event == "straggler" and world.ranks:
        suspect = world.finding(rank=index % len(world.ranks), node=node.agent_id)
        world.tick((suspect,))
    elif event == "old finding":
        world.tick((world.finding(generation=max(0, world.generation - 1)),))
    elif event == "cleared":
        world.tick((world.finding(rank=index, cleared=True),))
    elif event in ("approve", "reject") and proposed:
        world.people(proposed[0], "approved" if event == "approve" else "rejected")
    elif event == "lose":
        world.lose(node.agent_id)
    elif event == "repeat answers":
        world.acknowledged *= 2
    elif event == "sleep":
        world.now_ns += index * 2_000_000_000
    elif event in _ON_NODES:
        name, value = _ON_NODES[event]
        assert hasattr(node, name)
        setattr(node, name, value)
    elif event in ("can save", "cannot save"):
        world.can_save = event == "can save"


_ON_RANKS: dict[str, Callable[[World, int], None]] = {
    "crash": World.crash,
    "clean exit": lambda world, rank: world.crash(rank, exit_code=0),
    "hang": World.hang,
}
_ON_NODES: dict[str, tuple[str, object]] = {
    "cut off": ("connected", False),
    "reconnected": ("connected", True),
    "ignores stop": ("obeys_stop", False),
    "obeys stop": ("obeys_stop", True),
    "refuses start": ("fails_to_start", True),
    "starts": ("fails_to_start", False),
    "crashes at start": ("crashes_at_start", 1),
    "release": ("quarantined", False),
}


def live_through(events: list[Event], mode: Mode, nodes: int) -> World:
    world = World(nodes=nodes, policy=Policy(mode=mode, checkpoint_timeout_seconds=10.0))
    world.run(3.0)
    for event, index, seconds in events:
        happen(world, event, index)
        world.run(seconds)
    return world


@settings(max_examples=40)
@given(
    EVENTS, st.sampled_from(["auto", "auto", "approve", "dry-run", "observe"]), st.integers(4, 6)
)
def test_no_sequence_of_events_breaks_the_invariants(
    events: list[Event], mode: Mode, nodes: int
) -> None:
    live_through(events, mode, nodes)


def is_at_rest(world: World) -> bool:
    """Return whether all ranks train without an action in progress, or the job has ended cleanly.

    A repair that was called off because no checkpoint could be saved is proposed to a person, and
    waits.
    """
    under_way = [one for one in world.actions.values() if one.finished_ns is None]
    if any(one.state != "proposed" for one in under_way):
        return False
    if world.state == "running":
        there = len(world._current())
        return there == world.topology.world_size and not any(one.hung for one in world._current())
    obedient = [one for one in world.nodes.values() if not one.was_paused]
    return world.state in ENDED and not any(one.processes for one in obedient)


@settings(max_examples=40)
@given(EVENTS)
def test_after_all_faults_are_gone_the_job_runs_or_has_ended(events: list[Event]) -> None:
    world = live_through(events, "auto", 5)
    world.can_save = True
    for node in world.nodes.values():
        node.connected = node.obeys_stop = True
        node.quarantined = node.fails_to_start = False
        node.crashes_at_start = 0
    world.until(lambda: is_at_rest(world), seconds=400)


@settings(max_examples=25)
@given(EVENTS)
def test_a_stop_is_always_obeyed(events: list[Event]) -> None:
    world = live_through(events, "auto", 5)
    world.stop_requested = True
    world.until(lambda: world.state in ENDED, seconds=120)
    world.run(10.0)
    unreachable = [one for one in world.nodes.values() if not (one.obeys_stop and one.connected)]
    assert unreachable or not world.processes()


@settings(max_examples=20)
@given(EVENTS)
def test_the_same_input_gives_the_same_decision(events: list[Event]) -> None:
    """A worker may crash before the commit and decide again."""
    world = live_through(events, "auto", 5)
    view = world.view()
    finding = world.finding()
    answers = []
    for _ in range(2):
        ids = iter(range(1000, 2000))
        answers.append(
            decide(
                view,
                [finding],
                world.policy,
                world.now_ns,
                next_command_id=lambda ids=ids: next(ids),  # type: ignore[misc]
                new_id=lambda prefix, ids=ids: f"{prefix}-{next(ids)}",  # type: ignore[misc]
            )
        )
    assert msgspec.json.encode(answers[0]) == msgspec.json.encode(answers[1])
    assert world.view() == view
