"""Stored samples of nodes: enough for diagnosis, with bounded memory."""

import random
from itertools import pairwise

import pytest

from paceline_server.detect.telemetry import (
    COARSE_NS,
    POINTS_PER_SERIES,
    SERIES_PER_NODE,
    STORED_METRICS,
    MetricSeries,
    Telemetry,
)
from paceline_wire.batch import Sample

SECOND_NS = 1_000_000_000
START_NS = 1_700_000_000 * SECOND_NS
CLOCK = "DCGM_FI_DEV_SM_CLOCK"


def series(values, seconds: float = 1.0) -> MetricSeries:
    found = MetricSeries()
    for index, value in enumerate(values):
        found.add(START_NS + round(index * seconds * SECOND_NS), value)
    return found


def test_an_unchanged_value_is_stored_as_its_first_and_last_sample():
    found = series([16.0] * 1000)
    assert found.points == [(START_NS, 16.0), (START_NS + 999 * SECOND_NS, 16.0)]
    assert len(series([16.0] * 500 + [8.0] * 500)) == 4


def test_a_series_is_bounded_with_exact_new_and_coarse_old_samples():
    found = series([float(index) for index in range(5000)])
    assert len(found) <= POINTS_PER_SERIES
    newest = [value for _, value in found.points[-16:]]
    assert newest == [float(index) for index in range(4984, 5000)]
    times = [time_ns for time_ns, _ in found.points]
    assert times == sorted(times)
    old = times[: POINTS_PER_SERIES // 8]
    assert all(b - a >= COARSE_NS for a, b in pairwise(old))
    assert 300 * SECOND_NS <= times[-1] - times[0] <= 1300 * SECOND_NS


def test_values_before_and_after_an_onset_survive_ten_minutes():
    chance = random.Random(1)
    values = [1980 + chance.gauss(0, 8) for _ in range(60)]
    values += [795 + chance.gauss(0, 8) for _ in range(600)]
    found = series(values)
    onset_ns = START_NS + 60 * SECOND_NS
    assert found.typical_before(onset_ns) == pytest.approx(1980, abs=20)
    assert found.typical_since(onset_ns) == pytest.approx(795, abs=20)


def test_the_typical_value_is_the_median_over_time():
    """A value that lasted for minutes outweighs a few short-lived samples."""
    found = series([1980.0] * 60 + [700.0, 710.0, 720.0])
    assert found.typical_before(START_NS + 100 * SECOND_NS) == 1980.0


def test_late_samples_are_inserted_and_repeated_ones_dropped():
    found = MetricSeries()
    for second in (0, 1, 2, 6, 7, 4, 3, 5, 4, 7):
        found.add(START_NS + second * SECOND_NS, float(second))
    assert [value for _, value in found.points] == [0, 1, 2, 3, 4, 5, 6, 7]


def test_an_outage_that_is_reported_late_is_stored():
    """Live samples overtake those of the outage, which are still needed to find its cause."""
    found = series([1980.0] * 3)
    found.add(START_NS + 1000 * SECOND_NS, 1990.0)
    for second in range(10, 900):
        found.add(START_NS + second * SECOND_NS, 700.0 + second % 7)
    assert len(found) <= POINTS_PER_SERIES
    assert found.latest() == 1990.0
    assert found.typical_since(START_NS + 100 * SECOND_NS) == pytest.approx(703, abs=5)
    newest = [time_ns for time_ns, value in found.points if value < 800][-1]
    assert newest == START_NS + 899 * SECOND_NS


def test_rates_handle_counter_resets():
    found = series([10.0 * index for index in range(20)])
    onset_ns = START_NS + 10 * SECOND_NS
    assert found.rate_before(onset_ns) == pytest.approx(10)
    assert found.rate_since(onset_ns) == pytest.approx(10)
    reset = series([100.0, 110.0, 0.0, 10.0, 20.0])
    # 30 in 4 s: the reset does not count as growth
    assert reset.rate_since(START_NS) == pytest.approx(7.5)
    assert series([100.0, 0.0]).rate_since(START_NS) is None
    assert series([1.0]).rate_since(START_NS) is None


def test_a_counter_is_constant_until_it_grows():
    """Only the ends of a run of equal samples are stored; rates count the time within it."""
    grows_last = series([0.0] * 60 + [10.0, 20.0, 30.0])
    assert len(grows_last) == 5
    assert grows_last.rate_since(START_NS + 58 * SECOND_NS) == pytest.approx(30 / 4)
    assert grows_last.rate_before(START_NS + 58 * SECOND_NS) == 0.0
    grows_first = series([0.0, 10.0, 20.0] + [30.0] * 60)
    assert grows_first.rate_before(START_NS + 6 * SECOND_NS) == pytest.approx(5)
    assert grows_first.rate_before(START_NS + 60 * SECOND_NS, seconds=5) == 0.0
    assert grows_first.rate_since(START_NS + 6 * SECOND_NS) == 0.0


def test_a_single_low_reading_is_no_reset():
    """If it counted as a reset, the whole counter value would count as growth."""
    dipped = series([1e12, 1e12 + 5, 0.0, 1e12 + 10])
    assert dipped.rate_since(START_NS) == pytest.approx(10 / 3)
    wrapped = series([4294967290.0, 4.0, 14.0])  # a 32-bit counter
    assert wrapped.rate_since(START_NS) == pytest.approx(5)
    saturated = series([250.0, 255.0, 255.0, 255.0])
    assert saturated.rate_since(START_NS + 1 * SECOND_NS) == pytest.approx(5 / 3)


def test_only_identifying_labels_are_stored():
    telemetry = Telemetry()
    labels = {"gpu": "0", "UUID": "GPU-a", "modelName": "H200", "Hostname": "n"}
    telemetry.add("node", Sample(CLOCK, labels, 1980.0, START_NS))
    telemetry.add("node", Sample(CLOCK, {**labels, "Hostname": "m"}, 1970.0, START_NS + 1000))
    assert telemetry.latest("node", CLOCK, gpu="0") == 1970.0
    assert telemetry.latest("node", CLOCK) is None
    assert telemetry.latest("node", CLOCK, gpu="1") is None
    assert telemetry.latest("other", CLOCK, gpu="0") is None
    telemetry.add("node", Sample("node_boot_time_seconds", {}, 1.0, START_NS))
    assert telemetry.latest("node", "node_boot_time_seconds") is None


def test_all_of_a_metric_by_some_of_its_labels():
    telemetry = Telemetry()
    name = "paceline_gpu_throttle_reason"
    for gpu in ("0", "1"):
        for reason in ("sw_power_cap", "hw_slowdown"):
            sample = Sample(name, {"gpu": gpu, "reason": reason}, float(gpu), START_NS)
            telemetry.add("node", sample)
    found = telemetry.throttle_reasons("node", 1)
    assert {reason: series.latest() for reason, series in found.items()} == {
        "sw_power_cap": 1.0,
        "hw_slowdown": 1.0,
    }
    assert len(list(telemetry.all_of("node", name))) == 4


def test_the_number_of_series_of_a_node_is_bounded():
    telemetry = Telemetry()
    for number in range(SERIES_PER_NODE * 2):
        telemetry.add("node", Sample(CLOCK, {"gpu": str(number)}, 1.0, START_NS))
    assert len(list(telemetry.all_of("node", CLOCK))) == SERIES_PER_NODE
    assert telemetry.latest("node", CLOCK, gpu="0") == 1.0


def test_a_clock_shift_moves_the_times():
    telemetry = Telemetry()
    telemetry.add("node", Sample(CLOCK, {"gpu": "0"}, 1.0, START_NS), -5 * SECOND_NS)
    found = telemetry.find("node", CLOCK, gpu="0")
    assert found is not None
    assert found.latest_ns() == START_NS - 5 * SECOND_NS


def test_every_stored_metric_has_few_labels():
    assert all(len(labels) <= 3 for labels in STORED_METRICS.values())
