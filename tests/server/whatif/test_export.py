"""The analysis of an exported job equals the replay of the running job."""

from __future__ import annotations

from typing import Any

import pytest
from played_run import PlayedRun
from synthetic_trace import coded

from paceline_server.whatif.analysis import Analysis, analyze
from paceline_server.whatif.export import Export, export
from paceline_server.whatif.online import RunReplay
from paceline_server.whatif.trace import align
from paceline_wire.topology import Topology

RUNS = [
    (Topology(2, 4, 1), {"schedule": "gpipe"}),
    (Topology(2, 4, 1), {"schedule": "1f1b"}),
    (Topology(2, 4, 2), {"schedule": "interleaved", "chunks": 2}),
    (Topology(2, 4, 1), {"schedule": "zero_bubble"}),
    (Topology(1, 3, 1), {}),
    (Topology(4, 1, 1), {}),
    (Topology(), {}),
]


def exported(topology: Topology, **run: Any) -> tuple[Export, Analysis, float]:
    timings, seconds = PlayedRun(topology, jitter=0.02, **run).play()
    replay = RunReplay(timings, topology, {})
    assert replay.built is not None
    assert replay.analysis is not None
    began = {timing.step: 1000.0 * timing.step for timing in timings}
    return export(replay.built, began), replay.analysis, float(seconds.mean())


@pytest.mark.parametrize(("topology", "run"), RUNS)
def test_trace_has_the_slowdown_of_the_job(topology: Topology, run: dict[str, Any]) -> None:
    slow = topology.world_size - 1
    found, online, seconds = exported(topology, slow={slow: 1.4}, **run)
    offline = analyze(align(*coded(found.columns)))
    # The analysis of a trace ignores pauses of the host; the replay of the job includes them.
    assert offline.original_seconds == pytest.approx(online.original_seconds, rel=0.03)
    assert offline.original_seconds * offline.launch_slowdown == pytest.approx(seconds, rel=0.01)
    assert offline.slowdown == pytest.approx(online.slowdown, abs=0.02)
    assert offline.slowest_workers == online.slowest_workers == (slow - slow % topology.tp,)


def test_clock_skew_does_not_change_the_trace() -> None:
    topology = Topology(2, 4, 1)
    plain, _, _ = exported(topology)
    skewed, _, _ = exported(topology, skew_seconds=lambda rank: 0.2 * rank)
    assert skewed.columns["start_ts"] == pytest.approx(plain.columns["start_ts"], abs=1e-6)


def test_export_includes_the_sizes() -> None:
    found, _, _ = exported(Topology(2, 2, 2), schedule="interleaved", chunks=2)
    assert found.sizes == {
        "dp_size": 2,
        "pp_size": 2,
        "tp_size": 2,
        "dsp_size": 1,
        "vpp_size": 2,
        "world_size": 8,
    }
