"""The spool: order, bounds, damage, and a disk that is full or gone."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import cast

import msgspec
import pytest

from paceline_agent.forward.forwarder import Forwarder
from paceline_agent.forward.server_link import HttpAnswer, ServerLink
from paceline_agent.forward.spool import Spool
from paceline_wire.batch import Batch, DeviceEvent, Sample, SpanBlock, decode
from paceline_wire.spans import RECORD_BYTES, to_columns
from tests.open_files import no_free_descriptors

LIMIT = 1 << 20
HOUR_NS = 3600 * 10**9


def batch(sequence: int, *, samples: int = 0, event: bool = False, boot: str = "boot") -> Batch:
    noise = [Sample("m", {"n": os.urandom(16).hex()}, float(n), n) for n in range(samples)]
    events = [DeviceEvent(time_ns=sequence, kind="xid", device="gpu0")] if event else []
    return Batch(
        agent_id="a",
        boot_id=boot,
        sequence=sequence,
        packed_ns=0,
        samples=noise,
        events=[*events],
    )


def drain(spool: Spool) -> list[Batch]:
    """Return all batches in the order in which they would be sent."""

    async def take() -> list[Batch]:
        found = []
        while len(spool):
            entry = await spool.head()
            payload = spool.read(entry)
            if payload is not None:
                found.append(decode(payload))
                spool.remove(entry)
        return found

    return asyncio.run(take())


def test_batches_outlive_the_agent_and_keep_their_order(tmp_path: Path) -> None:
    first = Spool(tmp_path, LIMIT)
    for sequence in range(12):
        first.append(batch(sequence, boot="old"))
    second = Spool(tmp_path, LIMIT)
    second.append(batch(0, boot="younger"))
    sent = [(batch.boot_id, batch.sequence) for batch in drain(second)]
    assert sent == [("old", sequence) for sequence in range(12)] + [("younger", 0)]
    assert not list(tmp_path.glob("*.batch"))
    assert second.size_bytes == 0


def test_an_overtaking_boot_alternates_with_the_backlog(tmp_path: Path) -> None:
    spool = Spool(tmp_path, LIMIT)
    for sequence in range(4):
        spool.append(batch(sequence, boot="1"))
    spool.overtake("2")
    for sequence in range(2):
        spool.append(batch(sequence, boot="2"))
    spool.append(batch(4, boot="1"))
    sent = [(batch.boot_id, batch.sequence) for batch in drain(spool)]
    assert sent == [("2", 0), ("1", 0), ("2", 1), ("1", 1), ("1", 2), ("1", 3), ("1", 4)]


def test_overtaking_batches_are_backlog_for_the_next_agent(tmp_path: Path) -> None:
    spool = Spool(tmp_path, LIMIT)
    spool.append(batch(0, boot="1"))
    spool.overtake("2")
    spool.append(batch(0, boot="2"))
    spool.overtake("3")
    spool.append(batch(0, boot="3"))
    assert [batch.boot_id for batch in drain(spool)] == ["3", "1", "2"]


def test_boots_sort_in_order_even_if_the_clock_is_set_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    boots = []
    for hours in (0, 1, -3, -3, 2):
        monkeypatch.setattr(
            "paceline_agent.forward.spool.timeline_ns", lambda h=hours: (500 + h) * HOUR_NS
        )
        boots += [Spool(tmp_path, LIMIT).begin_boot(), Spool(tmp_path, LIMIT).begin_boot()]
    assert boots == sorted(set(boots))
    (tmp_path / "newest-boot").write_bytes(b"\xff torn")
    spool = Spool(tmp_path, LIMIT)
    spool.append(batch(0, boot=boots[-1]))
    assert Spool(tmp_path, LIMIT).begin_boot() > boots[-1], "the batches tell as well"


def test_a_full_spool_drops_the_oldest_detail_and_keeps_events(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 64 << 10)
    for sequence in range(40):
        spool.append(batch(sequence, samples=200, event=True))
    assert spool.size_bytes <= 64 << 10
    assert sum(path.stat().st_size for path in tmp_path.glob("*.batch")) <= (64 << 10) + 40 * 16
    remaining = drain(spool)
    assert [batch.sequence for batch in remaining] == list(range(40)), "no event may be lost"
    assert all(batch.events for batch in remaining)
    with_detail = [batch.sequence for batch in remaining if batch.samples]
    assert with_detail[-1] == 39, "the newest detail stays"
    assert 0 < spool.counts.dropped == 40 - len(with_detail)
    assert spool.counts.lost_samples == 200 * spool.counts.dropped


def test_spans_are_dropped_before_samples_and_samples_before_events(tmp_path: Path) -> None:
    def block() -> SpanBlock:
        columns = to_columns(os.urandom(RECORD_BYTES * 64))
        return SpanBlock(job="j", generation=0, rank=0, columns=columns, clock_offset_ns=0)

    spool = Spool(tmp_path, 64 << 10)
    for sequence in range(30):
        whole = batch(sequence, samples=20, event=True)
        spool.append(msgspec.structs.replace(whole, spans=[block()]))
    remaining = drain(spool)
    assert [batch.sequence for batch in remaining] == list(range(30))
    assert all(batch.samples and batch.events for batch in remaining), (
        "spans were enough to give up"
    )
    without = [batch.sequence for batch in remaining if not batch.spans]
    assert without == list(range(len(without))), "the oldest first"
    assert spool.counts.dropped == len(without) > 0
    assert spool.counts.lost_spans == 64 * len(without)
    assert spool.counts.lost_samples == spool.counts.lost_events == 0


def test_a_spool_full_of_events_drops_the_oldest(tmp_path: Path) -> None:
    spool = Spool(tmp_path, 64 << 10)
    spool.append(batch(0, event=True))
    asyncio.run(spool.head())
    for sequence in range(1, 1500):
        spool.append(batch(sequence, event=True))
    remaining = [batch.sequence for batch in drain(spool)]
    assert remaining[0] == 0, "it may be on its way"
    assert remaining[1:] == list(range(1500 - len(remaining) + 1, 1500))
    assert spool.counts.dropped == spool.counts.lost_events == 1500 - len(remaining)


@pytest.mark.parametrize("damage", ["truncate", "flip", "empty", "garbage"])
@pytest.mark.parametrize("which", [0, 1])  # in the slot, in a file
def test_a_damaged_file_is_skipped_and_counted(tmp_path: Path, damage: str, which: int) -> None:
    first = Spool(tmp_path, LIMIT)
    for sequence in range(3):
        first.append(batch(sequence, samples=5))
    victim = sorted(tmp_path.iterdir())[which]
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(
        {
            "truncate": bytes(content[:-9]),
            "flip": bytes(content),
            "empty": b"",
            "garbage": b"x" * 500,
        }[damage]
    )
    spool = Spool(tmp_path, LIMIT)
    assert [batch.sequence for batch in drain(spool)] == [
        index for index in range(3) if index != which
    ]
    assert spool.counts.corrupt == (damage != "empty" or which == 1)


def test_while_the_server_keeps_up_no_file_is_created(tmp_path: Path) -> None:
    spool = Spool(tmp_path, LIMIT)
    for sequence, samples in enumerate((200, 3, 50)):  # old bytes of a longer batch do not matter
        spool.append(batch(sequence, samples=samples))
        assert [path.name for path in tmp_path.iterdir()] == [".slot"]
        found = drain(Spool(tmp_path, LIMIT)) if samples == 50 else drain(spool)
        assert [(batch.sequence, len(batch.samples)) for batch in found] == [(sequence, samples)]
    assert len(Spool(tmp_path, LIMIT)) == 0


@pytest.mark.parametrize(
    ("writes", "part", "sent", "left"),
    [
        (0, 0, [], []),
        (0, 99, [], []),
        (1, 0, [], []),
        (2, 0, [0], [0]),  # duplicates for the server
        (2, 12, [0], []),
        (3, 99, [0], []),
        (4, 0, [0], []),
        (5, 0, [0, 1], [1]),
    ],
)
def test_a_killed_agent_leaves_a_complete_batch_or_none(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    writes: int,
    part: int,
    sent: list[int],
    left: list[int],
) -> None:
    """The agent is killed after some writes, in the middle of the next one."""

    class Killed(BaseException):
        pass

    real, made = os.pwrite, count()

    def pwrite(descriptor: int, content: bytes, offset: int) -> int:
        if next(made) == writes:
            real(descriptor, content[:part], offset)
            raise Killed
        return real(descriptor, content, offset)

    async def send(spool: Spool) -> None:
        for sequence in range(2):
            spool.append(batch(sequence, samples=40 * (2 - sequence)))
            entry = await spool.head()
            found.append(decode(spool.read(entry) or b"").sequence)
            spool.remove(entry)

    found: list[int] = []
    monkeypatch.setattr(os, "pwrite", pwrite)
    with pytest.raises(Killed):
        asyncio.run(send(Spool(tmp_path, LIMIT)))
    following = Spool(tmp_path, LIMIT)
    assert found == sent
    assert [batch.sequence for batch in drain(following)] == left
    assert following.counts.corrupt == 0


def test_a_batch_moving_out_of_the_slot_is_not_sent_twice(tmp_path: Path) -> None:
    Spool(tmp_path, LIMIT).append(batch(0, samples=5))
    slot = (tmp_path / ".slot").read_bytes()
    (tmp_path / f"boot.{0:012d}.batch").write_bytes(slot)
    assert [batch.sequence for batch in drain(Spool(tmp_path, LIMIT))] == [0]
    assert len(Spool(tmp_path, LIMIT)) == 0


@pytest.mark.parametrize("name", ["newest-boot", ".writing"])
def test_a_file_that_cannot_be_read_or_removed_does_not_hide_the_batches(
    tmp_path: Path, name: str
) -> None:
    """A disk with errors, or one that is read-only since; here, a directory of that name."""
    Spool(tmp_path, LIMIT).append(batch(1))
    Spool(tmp_path, LIMIT).append(batch(2))  # into a file: the slot has the first
    (tmp_path / name).mkdir()
    assert [found.sequence for found in drain(Spool(tmp_path, LIMIT))] == [1, 2]


def test_a_file_that_vanishes_is_skipped(tmp_path: Path) -> None:
    spool = Spool(tmp_path, LIMIT)
    spool.append(batch(0))
    spool.append(batch(1))
    next(tmp_path.glob("*.batch")).unlink()
    assert [batch.sequence for batch in drain(spool)] == [0]


def test_a_batch_stays_while_the_process_has_no_file_descriptor_left(
    tmp_path: Path,
) -> None:
    spool = Spool(tmp_path, LIMIT)
    for sequence in range(2):
        spool.append(batch(sequence))
    sent: list[int] = []

    class Link:
        async def post(self, path: str, body: bytes, kind: str) -> HttpAnswer:
            sent.append(decode(body).sequence)
            return HttpAnswer(200, {}, b'{"status": "stored", "sequence": 0}')

    async def forward() -> None:
        forwarder = Forwarder(cast("ServerLink", Link()), spool, lambda: None, lambda: None)
        running = asyncio.create_task(forwarder.run())
        with no_free_descriptors():
            for _ in range(100):
                await asyncio.sleep(0)
        assert (sent, forwarder.counts.retries) == ([0], 1), "the slot is open"
        while len(spool):
            await asyncio.sleep(0.01)
        running.cancel()

    asyncio.run(forward())
    assert (sent, spool.counts.corrupt) == ([0, 1], 0)


def test_rejected_batches_are_set_aside_and_few_are_kept(tmp_path: Path) -> None:
    spool = Spool(tmp_path, LIMIT)

    async def reject_all() -> None:
        for sequence in range(30):
            spool.append(batch(sequence))
            spool.reject(await spool.head())

    asyncio.run(reject_all())
    assert len(spool) == 0
    assert spool.counts.rejected == 30
    remaining = sorted(path.name for path in (tmp_path / "rejected").iterdir())
    assert len(remaining) == 16
    assert remaining[-1].endswith("29.batch")


def test_an_unwritable_directory_keeps_batches_in_bounded_memory(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "spool"
    in_the_way.write_text("a file where the directory should be")
    spool = Spool(in_the_way, LIMIT, memory_bytes=64 << 10)
    for sequence in range(60):
        spool.append(batch(sequence, samples=100, event=True))
    assert spool.size_bytes <= 64 << 10
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert [batch.sequence for batch in drain(spool)] == list(range(60))


def test_a_full_disk_loses_nothing_and_recovers(
    small_disk: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    disk = small_disk("128k")
    spool = Spool(disk / "spool", 8 << 20)
    for sequence in range(40):
        spool.append(batch(sequence, samples=200))
    assert spool.disk_error == "No space left on device"
    assert len([record for record in caplog.records if record.levelname == "ERROR"]) == 1
    assert not list(disk.glob("spool/.writing")), "a torn file takes room"
    assert [batch.sequence for batch in drain(spool)] == list(range(40))
    spool.append(batch(40))
    assert spool.disk_error is None
    assert [batch.sequence for batch in drain(Spool(disk / "spool", 8 << 20))] == [40]


def test_full_disk_and_memory_lose_the_oldest_detail(
    small_disk: Callable[[str], Path],
) -> None:
    disk = small_disk("128k")
    spool = Spool(disk / "spool", 8 << 20, memory_bytes=64 << 10)
    for sequence in range(40):
        spool.append(batch(sequence, samples=400, event=True))
        on_disk = sum(path.stat().st_size for path in (disk / "spool").iterdir())
        assert spool.size_bytes - on_disk <= 64 << 10
    assert spool.disk_error is not None
    remaining = drain(spool)
    assert [batch.sequence for batch in remaining] == list(range(40)), "no event may be lost"
    without = [batch.sequence for batch in remaining if not batch.samples]
    assert without == list(range(len(without))), "the oldest first"
    assert 0 < len(without) < 35, "what was cut made room on the disk"
    assert spool.counts.lost_samples == 400 * len(without)
    assert not list(disk.glob("spool/*.batch")), "nothing is left that was sent"


def test_batches_in_memory_move_to_disk_as_soon_as_it_has_space(
    small_disk: Callable[[str], Path], caplog: pytest.LogCaptureFixture
) -> None:
    disk = small_disk("128k")
    filler = disk / "filler"
    filler.write_bytes(bytes(120 << 10))
    spool = Spool(disk / "spool", 8 << 20)
    for sequence in range(20):
        spool.append(batch(sequence, samples=0 if sequence % 2 else 200))
    assert spool.disk_error is not None
    assert len(caplog.records) == 1, "that a small batch still fits is no news"
    filler.unlink()
    spool.append(batch(20))
    assert len(list(disk.glob("spool/*.batch"))) == 20, "and batch is in the slot"
    assert spool.disk_error is None
    assert [batch.sequence for batch in drain(Spool(disk / "spool", 8 << 20))] == list(range(21))


def test_an_unusable_slot_blocks_nothing(tmp_path: Path) -> None:
    Spool(tmp_path, LIMIT).append(batch(0, samples=5))
    (tmp_path / ".slot").rename(tmp_path / f"boot.{0:012d}.batch")
    (tmp_path / ".slot").mkdir()
    spool = Spool(tmp_path, LIMIT)
    assert [batch.sequence for batch in drain(spool)] == [0]
    spool.append(batch(1))
    assert spool.disk_error is None
    assert [batch.sequence for batch in drain(Spool(tmp_path, LIMIT))] == [1]


@pytest.mark.parametrize("exists", [False, True])
def test_other_users_cannot_read_the_spool(tmp_path: Path, exists: bool) -> None:
    directory = tmp_path / "spool"
    if exists:
        directory.mkdir()
        directory.chmod(0o755)
    Spool(directory, LIMIT).append(batch(0))
    assert directory.stat().st_mode & 0o007 == 0
