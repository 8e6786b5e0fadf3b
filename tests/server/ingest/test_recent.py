"""Recent batches are bounded, whatever is put in."""

from paceline_server.ingest.recent import RecentBatches
from paceline_wire.batch import Batch, Sample


def batch(sequence: int, samples: int = 10) -> Batch:
    return Batch(
        agent_id="node-0",
        boot_id="boot",
        sequence=sequence,
        packed_ns=1,
        samples=[Sample("up", {}, 1.0, 1)] * samples,
    )


def test_the_oldest_make_room_and_what_is_not_there_is_none():
    recent = RecentBatches(limit_bytes=3 * 10 * 400)
    for sequence in range(100):
        recent.put(batch(sequence))
        recent.put(batch(sequence))
    assert len(recent) == 3
    assert recent.get(("node-0", "boot", 98)) == batch(98)
    assert recent.get(("node-0", "boot", 3)) is None


def test_one_that_is_too_large_is_not_kept():
    recent = RecentBatches(limit_bytes=4000)
    recent.put(batch(0, samples=1000))
    assert len(recent) == 0
    recent.put(batch(1))
    assert len(recent) == 1
