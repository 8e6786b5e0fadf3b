from __future__ import annotations

import json
from typing import Any

import pytest

from paceline_agent.collect.nccl.inspector import SERIES_AT_MOST, Performance

LABELS = {"job": "llm", "rank": "3"}


def line(communicator: str = "0x7f8c", coll: str = "AllReduce", **performance: Any) -> bytes:
    """Return a line as in the Inspector's README."""
    return json.dumps(
        {
            "header": {"id": communicator, "rank": 2, "n_ranks": 8, "nnodes": 1},
            "metadata": {
                "inspector_output_format_version": "v4.0",
                "git_rev": "",
                "rec_mechanism": "profiler_plugin",
                "dump_timestamp_us": 1748030377748202,
                "hostname": "example-hostname",
                "pid": 1639453,
            },
            "coll_perf": {
                "coll": coll,
                "coll_sn": 1407,
                "coll_msg_size_bytes": 17179869184,
                "coll_exec_time_us": 61974,
                "coll_algobw_gbs": 277.210914,
                "coll_busbw_gbs": 485.119099,
                **performance,
            },
        }
    ).encode()


def values(performance: Performance) -> dict[str, float]:
    found = {}
    for sample in performance.samples(1):
        assert {**LABELS, **sample.labels} == sample.labels
        own = {n: v for n, v in sample.labels.items() if n not in LABELS and n != "communicator"}
        name = sample.name.removeprefix("paceline_nccl_")
        found[":".join([name, *own.values()])] = sample.value
    return found


def test_the_line_of_the_readme():
    performance = Performance(LABELS)
    performance.add(line())
    assert values(performance) == {
        "collectives_total:AllReduce": 1,
        "collective_seconds_total:AllReduce": pytest.approx(0.061974),
        "collective_bytes_total:AllReduce": 17179869184,
        "communicator_ranks:AllReduce": 8,
        "bus_bandwidth_bytes_per_second:AllReduce": pytest.approx(485.119099e9),
        "collective_duration_seconds:AllReduce:0.5": pytest.approx(0.061974),
        "collective_duration_seconds:AllReduce:0.99": pytest.approx(0.061974),
        "message_size_bytes:AllReduce:0.5": 17179869184,
        "message_size_bytes:AllReduce:0.99": 17179869184,
        "inspector_unreadable_lines_total": 0,
    }


def parts() -> tuple[dict[str, Any], dict[str, Any]]:
    """Return labels and value of each sample."""
    fields = json.loads(line())
    done = fields.pop("coll_perf")
    return fields, done


def test_sends_and_receives():
    performance = Performance(LABELS)
    whose, done = parts()
    sent = {name.replace("coll", "p2p", 1): value for name, value in done.items()}
    sent |= {"p2p": "Send", "p2p_peer": 5}
    performance.add(json.dumps({**whose, "p2p_perf": sent}).encode())
    found = values(performance)
    assert found["collectives_total:Send"] == 1
    assert found["collective_seconds_total:Send"] == pytest.approx(0.061974)
    assert found["bus_bandwidth_bytes_per_second:Send"] == pytest.approx(485.119099e9)
    assert found["inspector_unreadable_lines_total"] == 0


def test_newer_lines_are_of_the_communicator_that_was_named_before():
    performance = Performance(LABELS)
    whose, done = parts()
    dropped = {"coll_records": 2, "coll_dropped_since_last_dump": 5, "p2p_dropped_total": 9}
    for communicator, ranks in (("0xa", 8), ("0xb", 2)):
        whose["header"] |= {"id": communicator, "n_ranks": ranks}
        performance.add(json.dumps({**whose, "dump_stats": dropped}).encode())
        performance.add(json.dumps({"coll_perf": done}).encode())
        performance.add(json.dumps({"proxy_trace": {"record_type": "proxy_op"}}).encode())
    performance.lose_place()
    performance.add(json.dumps({"coll_perf": done}).encode())
    samples = list(performance.samples(1))
    of = {s.labels["communicator"]: s.value for s in samples if s.name.endswith("ives_total")}
    assert of == {"0xa": 1, "0xb": 1, "other": 1}
    ranks_of = {s.labels["communicator"]: s.value for s in samples if s.name.endswith("_ranks")}
    assert ranks_of == {"0xa": 8, "0xb": 2}
    total = {s.name.removeprefix("paceline_nccl_inspector_"): s.value for s in samples}
    assert (total["dropped_total"], total["unreadable_lines_total"]) == (10, 0)


def test_bandwidth_is_weighed_by_time():
    performance = Performance(LABELS)
    performance.add(line(coll_exec_time_us=1, coll_busbw_gbs=1))
    performance.add(line(coll_exec_time_us=999, coll_busbw_gbs=401))
    found = values(performance)["bus_bandwidth_bytes_per_second:AllReduce"]
    assert found == pytest.approx(400.6e9)


def test_a_sweep_without_collectives_emits_totals_only():
    performance = Performance(LABELS)
    performance.add(line())
    values(performance)
    found = values(performance)
    assert found["collectives_total:AllReduce"] == 1
    assert not any("quantile" in name or "0.5" in name or "bandwidth" in name for name in found)


def test_what_was_not_measured_is_absent():
    performance = Performance(LABELS)
    performance.add(line(coll_exec_time_us=0, coll_busbw_gbs=0))
    found = values(performance)
    assert found["collectives_total:AllReduce"] == 1
    assert not any("bandwidth" in name or "duration" in name for name in found)


def test_series_are_bounded():
    performance = Performance(LABELS)
    for number in range(100):
        performance.add(line(communicator=hex(number)))
    totals = [s for s in performance.samples(1) if s.name.endswith("collectives_total")]
    assert len(totals) == SERIES_AT_MOST + 1
    assert sum(sample.value for sample in totals) == 100


@pytest.mark.parametrize("text", [b"{", b"[]", b"\xff", b'{"header":{}}', line()[:100]])
def test_a_line_that_cannot_be_read_is_counted(text):
    performance = Performance(LABELS)
    performance.add(text)
    performance.add(b"")
    assert values(performance) == {"inspector_unreadable_lines_total": 1}


def test_events_of_the_verbose_form_are_passed_over():
    performance = Performance(LABELS)
    performance.add(line(coll_timing_source="kernel_gpu", event_trace_sn={"coll_start_sn": 1}))
    assert values(performance)["collectives_total:AllReduce"] == 1
