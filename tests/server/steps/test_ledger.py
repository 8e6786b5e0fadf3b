"""The ledger's parts sum to the wall time, for any input."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from paceline_server.steps.ledger import GoodputLedger, LedgerState
from paceline_server.steps.types import Ledger, RankStep, StepGoodput, StepSummary

SECOND = 1_000_000_000
T0 = 1_700_000_000 * SECOND


def step(
    number: int, start: float, seconds: float, *, generation: int = 0, compute: float | None = None
) -> StepSummary:
    compute = seconds * 0.6 if compute is None else compute
    parts = RankStep(
        rank=0,
        step_seconds=seconds,
        self_seconds=compute,
        compute_seconds=compute,
        communication_seconds=seconds * 0.1,
        wait_seconds=0.0,
        bubble_seconds=seconds * 0.1,
        data_wait_seconds=seconds * 0.05,
        optimizer_seconds=seconds * 0.05,
        checkpoint_seconds=0.0,
        gc_seconds=0.0,
        slowdown=None,
    )
    return StepSummary(
        generation=generation,
        step=number,
        started_ns=T0 + int(start * SECOND),
        duration_seconds=seconds,
        ranks=[parts],
    )


def at(seconds: float) -> int:
    return T0 + int(seconds * SECOND)


def parts_sum(ledger: Ledger) -> float:
    names = [name for name in ledger.__struct_fields__ if name.endswith("_seconds")]
    return sum(getattr(ledger, name) for name in names if name != "wall_seconds")


def test_ettr_counts_steps_that_are_not_repeated_without_their_checkpoints() -> None:
    ledger = GoodputLedger()
    ledger.begin(0, at(0), None)
    first = step(0, 10, 10)
    saved = [replace(one, checkpoint_seconds=2.0, compute_seconds=4.0) for one in first.ranks]
    ledger.add(replace(first, ranks=saved), at(20))
    ledger.add(step(1, 20, 10), at(30))
    ledger.begin(1, at(35), None)
    ledger.add(step(1, 40, 10, generation=1), at(50))
    found = ledger.read(at(60))
    assert (found.startup_seconds, found.lost_seconds, found.restart_seconds) == (10, 10, 10)
    assert found.ettr_ratio == pytest.approx((8 + 10) / 60)


def test_the_beginning_of_a_job_may_move_back_before_its_first_step():
    ledger = GoodputLedger()
    ledger.begin(0, at(50), None)
    ledger.extend_back(at(10))
    ledger.extend_back(at(20))
    ledger.add(step(0, 14, 2), at(60))
    ledger.extend_back(at(0))
    ledger = ledger.read(at(60))
    assert (ledger.wall_seconds, ledger.startup_seconds) == (50, 4)
    assert parts_sum(ledger) == pytest.approx(50)


def test_startup_steps_and_idle_time():
    ledger = GoodputLedger()
    assert ledger.read(at(0)) == Ledger()
    ledger.begin(0, at(0), None)
    assert ledger.read(at(3)).startup_seconds == 3
    for number in range(4):
        ledger.add(step(number, 5 + number, 1), at(20))
    ledger = ledger.read(at(12))
    assert (ledger.wall_seconds, ledger.startup_seconds, ledger.useful_steps) == (12, 5, 4)
    assert ledger.compute_seconds == pytest.approx(2.4)
    assert ledger.idle_seconds == pytest.approx(3 + 4 * 0.1)
    assert ledger.goodput_ratio == pytest.approx(4 * 0.85 / 12)


def test_steps_that_were_dropped_count_like_the_next_one():
    """100 steps of 10 ms, of which only each tenth arrives; then a pause, and steps of a script
    that numbers every 64th."""
    ledger = GoodputLedger()
    ledger.begin(0, at(0), None)
    for number in range(0, 100, 10):
        ledger.add(step(number, number / 100, 0.01), at(20))
    found = ledger.read(at(0.91))
    assert found.useful_steps == 91
    assert found.compute_seconds == pytest.approx(0.91 * 0.6)
    assert found.idle_seconds == pytest.approx(0.91 * 0.1, abs=1e-6)
    ledger.add(step(100, 10, 0.01), at(20))
    for number in (164, 228):
        ledger.add(step(number, 10.01 + (number - 164) / 6400, 0.01), at(20))
    found = ledger.read(at(10.03))
    assert found.useful_steps == 91 + 10 + 2
    assert found.idle_seconds == pytest.approx(1.03 * 0.1 + 10 - 1, abs=1e-6)
    assert parts_sum(found) == pytest.approx(10.03)
    ledger.begin(1, at(11), 50)
    found = ledger.read(at(12))
    assert (found.useful_steps, found.lost_steps) == (50, 53)


def test_steps_that_were_not_analyzed_count_like_the_next_one():
    """Steps of 5 ms, of which each eighth, which took 4 ms, was analyzed; and then a pause."""
    ledger = GoodputLedger()
    ledger.begin(0, at(0), None)
    ledger.add(step(0, 0, 0.005), at(20))
    for number in range(8, 800, 8):
        analyzed = step(number, number * 0.005 + 0.001, 0.004)
        ledger.add(replace(analyzed, skipped=7, skipped_seconds=0.036, samples=32), at(20))
    found = ledger.read(at(792 * 0.005 + 0.005))
    assert found.useful_steps == 793
    assert found.samples == 792 * 32
    assert found.compute_seconds == pytest.approx(793 * 0.005 * 0.6, rel=1e-4)
    assert found.idle_seconds == pytest.approx(793 * 0.005 * 0.1, rel=1e-3)
    assert parts_sum(found) == pytest.approx(793 * 0.005)
    ledger.add(replace(step(800, 14, 0.005), skipped=7, skipped_seconds=0.035), at(20))
    assert ledger.read(at(14.005)).idle_seconds - found.idle_seconds == pytest.approx(10, abs=0.01)


def split(**seconds: float) -> StepGoodput:
    """Return the parts of a step in seconds; those that are not given are 0."""
    parts = ("compute", "communication", "bubble", "straggler", "peer_wait", "bubble_excess")
    known = dict.fromkeys(parts, 0.0) | seconds
    return StepGoodput(**{f"{part}_seconds": value for part, value in known.items()})


def test_lost_time_is_not_goodput():
    """Compute 0.6, communication 0.1 and bubble 0.1 of a step, of which 0.34 s are lost."""
    parts = split(
        compute=0.4,
        communication=0.04,
        bubble=0.02,
        straggler=0.25,
        peer_wait=0.05,
        bubble_excess=0.04,
    )
    ledger = GoodputLedger()
    ledger.begin(0, at(0), None)
    ledger.add(replace(step(0, 0, 1), goodput=parts), at(20))
    ledger = ledger.read(at(1))
    assert parts_sum(ledger) == pytest.approx(1)
    assert ledger.straggler_seconds == pytest.approx(0.25)
    assert ledger.peer_wait_seconds == pytest.approx(0.05)
    assert ledger.bubble_excess_seconds == pytest.approx(0.04)
    assert ledger.goodput_ratio == pytest.approx(0.4 + 0.04 + 0.02 + 0.05)


def test_what_a_straggler_cost_before_it_was_found_is_its_cost():
    parts = split(compute=0.4, communication=0.1, bubble=0.1, imbalance=0.2)
    ledger = GoodputLedger()
    ledger.begin(0, at(0), None)
    for number in range(5):
        ledger.add(replace(step(number, number, 1), goodput=parts), at(20))
    ledger.blame_straggler(3)
    found = ledger.read(at(5))
    assert found.straggler_seconds == pytest.approx(2 * 0.2)
    assert found.imbalance_seconds == pytest.approx(3 * 0.2)
    ledger.begin(1, at(5), 3)  # the steps are repeated
    assert ledger.read(at(5)).straggler_seconds == 0.0


def test_a_single_pause_of_a_rank_is_no_imbalance_unless_it_recurs():
    even = split(compute=0.6, communication=0.1, peer_wait=0.01)
    paused = replace(even, imbalance_seconds=12.0)
    ledger = GoodputLedger()
    ledger.begin(0, at(0), None)
    start = 0.0
    lost = []
    for number in range(40):
        seconds = 13.0 if number in (10, 30) else 1.0
        parts = paused if number in (10, 30) else even
        ledger.add(replace(step(number, start, seconds), goodput=parts), at(100))
        start += seconds
        read = ledger.read(at(start))
        lost.append((round(read.imbalance_seconds), round(read.peer_wait_seconds)))
        assert parts_sum(read) == pytest.approx(start)
    assert (lost[9], lost[29], lost[39]) == ((0, 0), (0, 11), (22, 0))
    assert GoodputLedger(ledger.state()).read(at(start)) == ledger.read(at(start))


def test_the_memory_of_an_earlier_server_is_read() -> None:
    """It has no time of evaluations, imbalances and pauses."""
    ledger = GoodputLedger()
    ledger.begin(0, at(0), None)
    ledger.add(step(0, 0, 1), at(20))
    stored = msgspec.msgpack.decode(msgspec.msgpack.encode(ledger.state()))
    stored["sums"] = stored["sums"][:-3]
    stored["revocable"] = [[number, times[:-3]] for number, times in stored["revocable"]]
    state = msgspec.convert(stored, LedgerState)
    assert GoodputLedger(state).read(at(1)) == ledger.read(at(1))


def test_steps_repeated_by_a_restart_are_lost_and_the_gap_is_restart():
    ledger = GoodputLedger()
    ledger.begin(0, at(0), None)
    for number in range(5):
        ledger.add(step(number, number, 1), at(20))
    ledger.begin(1, at(8), None)
    assert ledger.read(at(9)).restart_seconds == 4
    ledger.add(step(3, 10, 1, generation=1), at(20))
    ledger = ledger.read(at(11))
    assert (ledger.lost_steps, ledger.useful_steps) == (2, 4)
    assert (ledger.lost_seconds, ledger.restart_seconds) == (2, 5)
    assert parts_sum(ledger) == pytest.approx(11)


def test_a_planned_restart_loses_nothing():
    ledger = GoodputLedger()
    ledger.begin(0, at(0), None)
    for number in range(5):
        ledger.add(step(number, number, 1), at(20))
    ledger.begin(1, at(8), 5)
    ledger.add(step(5, 10, 1, generation=1), at(20))
    ledger = ledger.read(at(11))
    assert (ledger.lost_steps, ledger.useful_steps, ledger.restart_seconds) == (0, 6, 5)


def test_steps_of_the_old_generation_and_repeated_steps_change_nothing():
    ledger = GoodputLedger()
    ledger.begin(0, at(0), None)
    ledger.add(step(0, 0, 1), at(20))
    ledger.add(step(0, 1, 1), at(20))
    ledger.begin(1, at(3), None)
    ledger.add(step(1, 3, 1), at(20))
    assert ledger.read(at(4)).useful_steps == 1


def test_a_step_cannot_take_more_time_than_has_passed():
    ledger = GoodputLedger()
    ledger.begin(0, at(0), None)
    ledger.add(step(0, 0, 86_400), at(10))
    ledger = ledger.read(at(10))
    assert ledger.wall_seconds == 10
    assert parts_sum(ledger) == pytest.approx(10)


def test_a_new_worker_continues_with_the_same_ledger():
    ledger = GoodputLedger()
    ledger.begin(0, at(0), None)
    for number in range(3):
        ledger.add(step(number, number, 1), at(20))
    heir = GoodputLedger(ledger.state())
    for each in (ledger, heir):
        each.add(step(3, 3, 1), at(20))
    assert heir.read(at(9)) == ledger.read(at(9))


@given(
    st.lists(
        st.one_of(
            st.tuples(
                st.just("step"),
                st.integers(0, 30),
                st.floats(-5, 200),
                st.floats(0, 20),
                st.floats(0, 40),
            ),
            st.tuples(st.just("begin"), st.one_of(st.none(), st.integers(0, 30))),
        ),
        max_size=40,
    ),
    st.floats(0, 300),
)
def test_the_parts_sum_to_the_wall_time_for_any_input(actions, until):
    ledger = GoodputLedger()
    generation = 0
    ledger.begin(generation, at(0), None)
    for action in actions:
        if action[0] == "begin":
            generation += 1
            ledger.begin(generation, at(0), action[1])
        else:
            _, number, start, seconds, compute = action
            ledger.add(
                step(number, start, seconds, generation=generation, compute=compute), at(until)
            )
    ledger = ledger.read(at(until))
    assert parts_sum(ledger) == pytest.approx(ledger.wall_seconds, abs=1e-6)
    assert ledger.wall_seconds == pytest.approx(at(until) / SECOND - T0 / SECOND, abs=1e-6)
    assert all(
        getattr(ledger, name) >= 0 for name in ledger.__struct_fields__ if name.endswith("_seconds")
    )
