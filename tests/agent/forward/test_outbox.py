"""The outbox: what is packed, and when."""

from __future__ import annotations

from paceline_agent.forward.outbox import SAMPLES_PER_BATCH, Outbox
from paceline_wire.batch import Sample


def test_a_full_batch_is_packed_before_its_interval() -> None:
    outbox = Outbox()
    sample = Sample("paceline_test", {}, 1.0, 1)
    outbox.put_samples([sample] * (SAMPLES_PER_BATCH - 1))
    assert not outbox.urgent.is_set()
    outbox.put_samples([sample] * 2)
    assert outbox.urgent.is_set()
    assert [len(samples) for _, _, samples, _ in outbox.take()] == [SAMPLES_PER_BATCH, 1]
    assert not outbox.urgent.is_set()
