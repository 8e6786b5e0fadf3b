"""A rank's row reflects its own events, in any order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from paceline_server.decide.types import RankView
from paceline_server.engine.types import RankProgress
from paceline_server.worker.ranks import CHANGING_COLUMNS, RankRows, new_rank_rows
from paceline_wire.batch import RankExited, RankStarted

EVENTS = [
    RankStarted(time_ns=1, job="job", generation=2, rank=0, pid=10),
    RankExited(time_ns=2, job="job", generation=2, rank=0, pid=10, signal=9),
]


def ranks() -> RankRows:
    views = [RankView(rank=rank, agent_id="node-0", local_rank=rank, gpu=None) for rank in (0, 1)]
    return RankRows(2, new_rank_rows("job", 2, views))


@given(st.lists(st.sampled_from(EVENTS), min_size=1))
def test_an_exit_is_final_in_any_order(order: list[RankStarted | RankExited]) -> None:
    watched = ranks()
    for event in order:
        watched.apply("node-0", event)
    state = watched.views()[0].state
    assert state == ("exited" if EVENTS[1] in order else "started")


def test_everything_that_an_exit_changes_is_stored() -> None:
    watched = ranks()
    before = dict(watched._rows[0])
    watched.apply(
        "node-0",
        RankExited(
            time_ns=2,
            job="job",
            generation=2,
            rank=0,
            pid=10,
            exit_code=1,
            signal=9,
            commanded=True,
            launcher_signal=15,
            launcher_gone=True,
        ),
    )
    (after,) = watched.changed()
    assert {name for name in after if after[name] != before[name]} <= set(CHANGING_COLUMNS)
    assert (after["launcher_signal"], after["launcher_gone"]) == (15, True)


def test_other_generations_and_other_nodes_change_nothing() -> None:
    watched = ranks()
    watched.apply("node-1", EVENTS[1])
    watched.apply(
        "node-0", RankExited(time_ns=1, job="job", generation=1, rank=0, pid=1, exit_code=0)
    )
    watched.apply("node-0", RankStarted(time_ns=1, job="job", generation=2, rank=7, pid=1))
    assert watched.changed() == []


def test_only_visible_changes_are_urgent() -> None:
    watched = ranks()
    watched.update_progress([RankProgress(0, 5, "all_reduce tp#1", 0.1, "S", "running")])
    assert watched.changed_visibly()
    watched.committed()
    watched.update_progress([RankProgress(0, 5, "all_reduce tp#1", 0.3, "S", "running")])
    assert watched.changed()
    assert not watched.changed_visibly()


def test_text_of_agents_fits_its_column() -> None:
    watched = ranks()
    watched.update_progress([RankProgress(0, 5, "a\0" * 500, 0.1, "\0" + "S" * 50, "r" * 99)])
    (row,) = watched.changed()
    assert "\0" not in str(row)
    assert len(row["process_state"]) <= 8
    assert len(row["status"]) <= 32


def test_the_progress_of_a_rank_can_wait_but_not_its_end() -> None:
    watched = ranks()
    watched.update_progress([RankProgress(0, 5, "all_reduce tp#1", 0.1, "S", "running")])
    assert watched.changed_visibly()
    assert not watched.changed_state()
    watched.apply("node-0", EVENTS[1])
    assert watched.changed_state()
