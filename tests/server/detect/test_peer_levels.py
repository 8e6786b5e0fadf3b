"""Levels of ranks: a jump that noise hid is distinguished from a steady rise."""

import numpy as np
import pytest

from paceline_server.detect.statistics.peer_levels import PeerLevels

SIZE = 0.3


def levels(course, seed: int, scatter: float) -> PeerLevels:
    """Return the levels of four ranks of which the first one follows `course`."""
    chance = np.random.default_rng(seed)
    found = PeerLevels(4, smallest=0.02, false_alarms=1e-6, resolution=0.004)
    for step in range(120):
        row = chance.laplace(0.0, scatter, 4)
        row[0] += course(step)
        found.push(row)
    return found


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scatter", [0.01, 0.05])
def test_a_jump_has_the_step_of_its_onset(seed, scatter):
    found = levels(lambda step: SIZE * (step >= 80), seed, scatter)
    assert found.steps_since_jump(0, SIZE) == pytest.approx(40, abs=3)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("scatter", [0.01, 0.05])
def test_a_steady_rise_is_no_jump(seed, scatter):
    found = levels(lambda step: SIZE * max(step - 50, 0) / 70, seed, scatter)
    assert found.steps_since_jump(0, SIZE) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_creep_over_hundreds_of_steps_lasts_until_it_is_over(seed):
    chance = np.random.default_rng(seed)
    found = PeerLevels(4, smallest=0.02, false_alarms=1e-6, resolution=0.004)
    rise, courses = None, []
    for step in range(560):
        row = chance.normal(0.0, 0.01, 4)
        row[0] += 0.001 * step if step < 550 else 0.0
        found.push(row)
        if step == 400:
            rise = found.assume_creep((0,), float(found.moved()[0][0]))
        if rise is not None and "over" not in courses:
            courses.append(found.follow(rise))
    assert set(courses[:-1]) == {"lasts"}
    assert (courses[-1], 400 + len(courses)) == ("over", 553)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("inertia", [0.0, 0.6])
def test_scatter_hides_smaller_rises_and_no_larger_ones(inertia, seed):
    found = dict.fromkeys((0.4, 1.6), 0)
    for share in found:
        chance = np.random.default_rng(seed)
        levels, noise, hidden = (
            PeerLevels(4, smallest=0.02, false_alarms=1e-6, resolution=0.004),
            np.zeros(4),
            0.0,
        )
        assert levels.hidden == np.inf
        for step in range(150):
            noise = inertia * noise + chance.normal(0.0, 0.1, 4)
            if step == 100:
                hidden = levels.hidden
            levels.push(noise + np.array([share * hidden * (step >= 100), 0.0, 0.0, 0.0]))
            found[share] += any(shift.series == 0 for shift in levels.rises())
    assert found[0.4] == 0 < found[1.6]


def risen(ranks: int, seed: int, size: float, until: int, steps: int) -> list[tuple[str, float]]:
    """Return, by step, the course and the size of a rise of the first rank from step 80 on."""
    chance = np.random.default_rng(seed)
    found = PeerLevels(ranks, smallest=0.05, false_alarms=1e-6, resolution=0.004)
    rise, courses = None, []
    for step in range(steps):
        row = chance.normal(0.0, size / 3.0, ranks)
        row[0] += size if 80 <= step < until else 0.0
        found.push(row)
        if rise is None:
            [rise] = [found.begin((0,), one.steps) for one in found.rises()] or [None]
            courses.append(("none", 0.0))
        elif courses[-1][0] != "over":
            if step % 10 == 0:
                found.correct(rise)
            courses.append((found.follow(rise), rise.size))
    return courses


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [2, 4])
def test_few_of_widely_scattered_steps_end_or_reduce_no_rise(ranks, seed):
    courses = risen(ranks, seed, SIZE, 300, 300)
    first = next(step for step, (course, _) in enumerate(courses) if course != "none")
    assert 80 < first < 125
    assert {course for course, _ in courses[first:]} == {"lasts"}
    sizes = [size for _, size in courses[first + 40 :]]
    assert sizes == pytest.approx([SIZE] * len(sizes), rel=0.35)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("ranks", [2, 4])
def test_the_end_of_a_rise_of_widely_scattered_steps_is_found_soon(ranks, seed):
    courses = risen(ranks, seed, SIZE, 200, 240)
    assert courses[-1][0] == "over"
    assert 200 < len(courses) < 230


@pytest.mark.parametrize(
    ("shared", "own", "exceeds"),
    [
        ([0.06, 0.02, 0.0, 0.0, 0.06], [0.0, 0.0, 0.3, 0.3, 0.0], False),  # and two long steps
        ([0.06, 0.02, 0.0, 0.0, 0.06], [0.06] * 5, True),
        ([0.06] * 5, [0.0] * 5, True),  # the others joined it: all of them are slow
    ],
)
def test_what_others_share_in_single_steps_is_no_rise_of_one(shared, own, exceeds):
    chance = np.random.default_rng(1)
    found = PeerLevels(16, smallest=0.05, false_alarms=1e-6, resolution=0.004)
    for step in range(45):
        row = chance.normal(0.0, 0.005, 16)
        if step >= 40:
            row[:4] += shared[step - 40]
            row[0] += own[step - 40]
        found.push(row)
    shift = next(one for one in found.rises() if one.series == 0)
    assert found.exceeds(shift, range(4)) is exceeds


def of_two(course, seed: int) -> list[tuple[int, int]]:
    """Return (step, series) of each rise of two series of which the first one follows `course`."""
    chance = np.random.default_rng(seed)
    found, rises = PeerLevels(2, smallest=0.05, false_alarms=1e-6, resolution=0.004), []
    for step in range(400):
        row = chance.normal(0.0, SIZE / 6.0, 2)
        row[0] += course(step)
        found.push(row)
        for shift in found.rises():
            rises.append((step, shift.series))
            found.begin((shift.series,), shift.steps)
    return rises


@pytest.mark.parametrize("seed", range(5))
def test_one_of_two_that_was_fast_for_a_moment_has_not_become_slow(seed):
    assert of_two(lambda step: -SIZE if 200 <= step < 230 else 0.0, seed) == []


@pytest.mark.parametrize("seed", range(5))
def test_one_of_two_that_becomes_slower_than_before_it_was_fast_is_found(seed):
    rises = of_two(lambda step: -SIZE if 200 <= step < 230 else SIZE * (step >= 230), seed)
    assert [series for _, series in rises] == [0]
    assert 230 < rises[0][0] < 250


@pytest.mark.parametrize("seed", range(5))
def test_one_of_two_that_becomes_slow_long_after_its_recovery_is_found(seed):
    rises = of_two(lambda step: 0.0 if 100 <= step < 300 else SIZE, seed)
    assert [series for _, series in rises] == [0]
    assert 300 < rises[0][0] < 320


@pytest.mark.parametrize("kind", ["jump", "creep"])
@pytest.mark.parametrize("seed", range(5))
def test_rises_of_both_of_two_do_not_enlarge_each_other_without_limit(seed, kind):
    """Both are explained, because noise hid the end of one, and each was the faster one before it
    rose, as after a burst of the other: they cannot both be as before."""
    chance = np.random.default_rng(seed)
    found = PeerLevels(2, smallest=0.02, false_alarms=1e-6, resolution=0.004)
    for _ in range(80):
        found.push(chance.laplace(0.0, 0.1, 2))
    rises = []
    for rank in (0, 1):
        rise = found.assume((rank,), 8, 0.7) if kind == "jump" else found.assume_creep((rank,), 0.7)
        rise.before -= 0.15
        rises.append(rise)
    largest = 0.0
    for step in range(400):
        found.push(chance.laplace(0.0, 0.1, 2))
        for rise in list(rises):
            if found.follow(rise) == "over":
                rises.remove(rise)
            elif step % 8 == 0:
                found.correct(rise)
        largest = max([largest, *(rise.size for rise in rises)])
    assert len(rises) < 2
    assert largest < 2.5


def of_three(course, seed: int, assumed: tuple[float, ...] = ()) -> set[int]:
    """Return which of three series have a rise at the end; of `assumed` sizes from step 80 on."""
    chance = np.random.default_rng(seed)
    found = PeerLevels(3, smallest=0.05, false_alarms=1e-6, resolution=0.004)
    rises = []
    for step in range(300):
        found.push(chance.normal(0.0, 0.03, 3) + course(step))
        if step == 80:
            rises += [found.assume((one,), 8, size) for one, size in enumerate(assumed)]
        rises += [found.begin((shift.series,), shift.steps) for shift in found.rises()[:1]]
        rises = [rise for rise in rises if found.follow(rise) != "over"]
    return {rise.series[0] for rise in rises}


@pytest.mark.parametrize("seed", range(5))
def test_rises_of_all_of_three_are_over_where_none_is_slower_than_another(seed):
    """Each waited for a CPU for a moment, so that each is explained by what the others seem."""
    assert of_three(lambda step: 0.0, seed, assumed=(0.95, 0.9, 0.85)) == set()


@pytest.mark.parametrize("seed", range(5))
def test_two_of_three_that_became_slow_are_both_found(seed):
    def course(step):
        return np.array([0.7 * (step >= 100), 0.5 * (step >= 150), 0.0])

    assert of_three(course, seed) == {0, 1}


@pytest.mark.parametrize("before", [5, 6, 8])
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_rise_after_few_steps_has_its_whole_size(ranks, before):
    """Two steps are not known, and a rise is found once more steps show it than do not."""
    chance = np.random.default_rng(before)
    found = PeerLevels(ranks, smallest=0.05, false_alarms=1e-6, resolution=0.004)
    for step in range(20):
        row = chance.normal(0.0, 0.001, ranks)
        row[1] += 0.5 * (step >= before)
        found.push(row if step >= 2 else np.full(ranks, np.nan))
        shifts = found.rises()
        if shifts:
            break
    rise = found.begin((1,), shifts[0].steps)
    assert (shifts[0].series, rise.since) == (1, before)
    assert rise.size == pytest.approx(0.5, abs=0.01)
    found.correct(rise)
    assert rise.size == pytest.approx(0.5, abs=0.01)
