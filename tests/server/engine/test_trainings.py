"""Several trainings, one after the other, in the same processes."""

from __future__ import annotations

from functools import partial

import pytest
from simulated_job import JOB, SimulatedJob

from paceline_server.detect.finding import Finding
from paceline_wire.batch import RankDefined
from paceline_wire.ring import RankDescription
from paceline_wire.topology import Topology


def losses_of_two_trainings(key: str | None) -> list[Finding]:
    """Play a loss that falls to 0.1 and begins at 5 again in step 60.

    `key`: under which rank 0 reports that another training begins.
    """
    job = SimulatedJob(Topology(dp=2))
    state = job.state
    for step in range(120):
        job.state = partial(state, loss=5.0 / (1 + step % 60))  # type: ignore[method-assign]
        if step == 60 and key is not None:
            description = RankDescription(source="optimizer", metadata={key: "60"})
            event = RankDefined(
                time_ns=job.now_ns,
                job=JOB,
                generation=0,
                rank=0,
                definitions=[],
                descriptions=[description],
            )
            job.engine.feed(job.batch(job.node(0), events=[event]), job.now_ns)
        job.advance()
    return [finding for finding in job.findings if finding.kind == "loss"]


@pytest.mark.parametrize("key", ["optimizer_since_step", "trained_since_step"])
def test_the_loss_of_another_training_begins_high(key: str) -> None:
    assert losses_of_two_trainings(None)
    assert losses_of_two_trainings(key) == []
