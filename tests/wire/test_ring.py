"""Both ends of the ring file, with real files: overruns, corruption, full disks."""

from __future__ import annotations

import contextlib
import os
import struct
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from paceline_wire import ring as layout
from paceline_wire.ring import (
    DEFINITIONS_BYTES,
    DEFINITIONS_OFFSET,
    LAYOUT_VERSION,
    STATE_HEAD,
    Acknowledgement,
    GroupDefinition,
    Identity,
    RankDescription,
    RingError,
    RingFile,
    RingReader,
    SectionDefinition,
    create,
    define,
    describe,
    reserve,
)
from paceline_wire.spans import RECORD, RECORD_BYTES, unpack
from paceline_wire.topology import Coordinates, Topology

from .conftest import CAPACITY

reuse = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def test_a_ring_is_private_unless_its_directory_sets_a_group(
    tmp_path: Path, identity: Identity
) -> None:
    own, shared = tmp_path / "own.ring", tmp_path / "shared" / "rank.ring"
    shared.parent.mkdir()
    shared.parent.chmod(0o3777)
    for path, mode in ((own, 0o600), (shared, 0o660)):
        create(path, identity, CAPACITY)
        assert path.stat().st_mode & 0o7777 == mode
        path.unlink()
        reserve(path, identity)
        assert path.stat().st_mode & 0o7777 == mode


def test_a_reserved_ring_gives_way_to_the_ranks_own_and_never_replaces_it(
    tmp_path: Path, identity: Identity
) -> None:
    path = tmp_path / "rank.ring"
    reserve(path, identity)
    reader = RingReader(path)
    assert (reader.identity, reader.view().status, reader.read()) == (identity, "loading", b"")
    create(path, identity, CAPACITY).close()
    with pytest.raises(FileExistsError):
        reserve(path, identity)
    assert RingReader(path).view().status == "starting"
    assert [each.name for each in tmp_path.iterdir()] == ["rank.ring"]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give its own rights up")
def test_an_agent_without_root_reads_a_ring_that_another_user_shares(
    tmp_path: Path, identity: Identity
) -> None:
    """For example root without capabilities in a container, or a service account under Slurm."""
    rings = tmp_path / "rings"
    rings.mkdir()
    program = "import sys; from paceline_wire.ring import RingReader; RingReader(sys.argv[1])"
    command = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", sys.executable]
    for mode, found in ((0o1777, 1), (0o3777, 0)):
        rings.chmod(mode)
        path = rings / f"{mode:o}.ring"
        create(path, identity, CAPACITY)
        os.chown(path, 65534, -1)
        done = subprocess.run([*command, "-c", program, path], capture_output=True, check=False)
        assert done.returncode == found, done.stderr


def write(ring: RingFile, count: int) -> None:
    for _ in range(count):
        head = ring.state[STATE_HEAD]
        row = (head, 1, 0, 0, 0, 0, 0, 0, 0, 0, 0, head * 10, 1)
        RECORD.pack_into(ring.spans, head % ring.capacity * RECORD_BYTES, *row)
        ring.state[STATE_HEAD] = head + 1


def indices(records: bytes) -> list[int]:
    return [span.index for span in unpack(records)]


def test_the_reader_has_the_writers_identity(ring: RingFile, identity: Identity) -> None:
    assert RingReader(ring.path).identity == identity


def test_the_thread_of_a_writer_of_an_earlier_version_is_unknown(identity: Identity) -> None:
    fields = msgspec.to_builtins(msgspec.structs.replace(identity, native_thread_id=5))
    assert fields.pop("native_thread_id") == 5
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(fields), type=Identity) == identity


def test_records_are_read_once_in_order(ring: RingFile) -> None:
    reader = RingReader(ring.path)
    assert reader.read() == b""
    write(ring, 5)
    assert indices(reader.read()) == [0, 1, 2, 3, 4]
    assert reader.read() == b""
    write(ring, CAPACITY - 2)  # wraps around the end of the file
    assert indices(reader.read()) == list(range(5, CAPACITY + 3))
    assert reader.lost == 0


def test_a_limit_leaves_the_rest_for_the_next_read(ring: RingFile) -> None:
    reader = RingReader(ring.path)
    write(ring, 10)
    assert indices(reader.read(limit=4)) == [0, 1, 2, 3]
    assert indices(reader.read(limit=100)) == [4, 5, 6, 7, 8, 9]


@reuse
@given(st.lists(st.integers(0, 3 * CAPACITY), max_size=12))
def test_read_and_lost_records_add_up(
    tmp_path: Path, identity: Identity, bursts: list[int]
) -> None:
    ring = create(tmp_path / "some.ring", identity, CAPACITY)
    reader = RingReader(ring.path)
    seen: list[int] = []
    for burst in bursts:
        write(ring, burst)
        seen += indices(reader.read())
    assert seen == sorted(set(seen))
    assert len(seen) + reader.lost == sum(bursts)
    if bursts and bursts[-1]:
        assert seen[-1] == sum(bursts) - 1
    reader.close()
    ring.close()


def test_records_overwritten_during_the_read_are_dropped(
    ring: RingFile, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The writer overtakes the reader between the reader's copy and its second read of the head."""
    reader = RingReader(ring.path)
    write(ring, CAPACITY - 1)

    class Lapping:
        """A state page whose head moves after the first read."""

        looks = 0

        def __getitem__(self, word: int) -> int:
            self.looks += 1
            if self.looks == 2:
                write(ring, 10)
            return ring.state[word]

    reader.state = Lapping()  # type: ignore[assignment]
    assert indices(reader.read()) == list(range(10, CAPACITY - 1))
    assert reader.lost == 10


@pytest.mark.parametrize("head", [2**63, 3])
def test_an_implausible_head_is_corruption(ring: RingFile, head: int) -> None:
    reader = RingReader(ring.path)
    write(ring, 5)
    reader.read()
    ring.state[STATE_HEAD] = head
    with pytest.raises(RingError, match="head"):
        reader.read()


def test_definitions_are_read_once_in_order(ring: RingFile) -> None:
    reader = RingReader(ring.path)
    first, second = SectionDefinition(0, "attention"), GroupDefinition(1, "tp", [2, 3], "tp")
    assert define(ring, first)
    assert reader.new_definitions() == [first]
    assert define(ring, second)
    assert reader.new_definitions() == [second]
    assert reader.new_definitions() == []
    assert RingReader(ring.path).new_definitions() == [first, second]


def test_descriptions_are_read_once_in_order(ring: RingFile) -> None:
    reader = RingReader(ring.path)
    first = RankDescription(source="DeviceMesh", metadata={"schedule": "1f1b"})
    second = RankDescription(
        source="DeviceMesh", topology=Topology(2, 2), coordinates=Coordinates(1, 0)
    )
    assert reader.new_descriptions() == []
    assert describe(ring, first)
    assert reader.new_descriptions() == [first]
    assert describe(ring, second)
    assert reader.new_descriptions() == [second]
    assert reader.new_descriptions() == []
    assert reader.new_definitions() == []
    assert RingReader(ring.path).new_descriptions() == [first, second]


def test_a_full_descriptions_area_refuses(ring: RingFile) -> None:
    long = RankDescription(source="x", metadata={"key": "x" * 1000})
    accepted = [describe(ring, long) for _ in range(10)].count(True)
    assert 5 < accepted < 10
    assert RingReader(ring.path).new_descriptions() == [long] * accepted


def test_a_writer_of_an_earlier_version_may_fill_the_pages_with_definitions(
    ring: RingFile,
) -> None:
    ring.map[layout.DESCRIPTIONS_OFFSET : layout.DESCRIPTIONS_OFFSET + 8] = b"\xff" * 8
    ring.state[layout.STATE_DEFINITIONS] = DEFINITIONS_BYTES + 100
    assert RingReader(ring.path).new_descriptions() == []


@reuse
@given(noise=st.binary(min_size=1, max_size=200))
def test_corrupt_descriptions_raise_a_ring_error(
    tmp_path: Path, identity: Identity, noise: bytes
) -> None:
    ring = create(tmp_path / "noise.ring", identity, CAPACITY)
    ring.descriptions[: len(noise)] = noise
    reader = RingReader(ring.path)
    with contextlib.suppress(RingError):  # any other error fails the test
        assert isinstance(reader.new_descriptions(), list)
    reader.close()
    ring.close()


def test_a_full_definitions_area_refuses_and_counts(ring: RingFile) -> None:
    name = "x" * 1000
    sections = [SectionDefinition(number, name) for number in range(70)]
    results = [define(ring, section) for section in sections]
    accepted = results.count(True)
    assert results == [True] * accepted + [False] * (70 - accepted)
    assert accepted == DEFINITIONS_BYTES // (4 + len(msgspec.msgpack.encode(sections[0])))
    assert ring.state[layout.STATE_LOST_DEFINITIONS] == 70 - accepted
    assert len(RingReader(ring.path).new_definitions()) == accepted


def test_the_state_page_is_decoded(ring: RingFile) -> None:
    state, floats = ring.state, ring.state_floats
    state[layout.STATE_STEP] = 12
    state[layout.STATE_MICROBATCH] = 4
    state[layout.STATE_STATUS] = 1
    state[layout.STATE_DEPTH] = 1
    for word, value in enumerate((16, 1000, 2 << 32 | 0xFFFF_FFFF, 7)):
        state[layout.STATE_FRAMES + word] = value
    for word, value in enumerate((7, 6, 1000, 16)):
        state[layout.STATE_GROUPS + 2 * layout.GROUP_WORDS + word] = value
    for word, value in enumerate((6, 3, 2, 1, 1, 900)):
        state[layout.STATE_PEERS + word] = value
    state[layout.STATE_LOSS_STEP] = 12
    floats[layout.STATE_LOSS] = 0.5
    floats[layout.STATE_GRADIENT_NORM] = float("nan")
    view = RingReader(ring.path).view()
    assert (view.step, view.microbatch, view.status) == (12, 3, "running")
    (frame,) = view.frames
    assert (frame.op, frame.start_ns, frame.group, frame.peer, frame.sequence) == (
        16,
        1000,
        2,
        None,
        7,
    )
    (group,) = view.groups
    assert (group.group, group.entered, group.left, group.entered_ns, group.op) == (
        2,
        7,
        6,
        1000,
        16,
    )
    (peer,) = view.peers
    assert (peer.peer, peer.send_entered, peer.send_left) == (5, 3, 2)
    assert (view.loss_step, view.loss, view.gradient_norm) == (11, 0.5, None)
    assert (view.evaluation_step, view.evaluation_loss) == (None, None)


@reuse
@given(words=st.lists(st.integers(0, 2**64 - 1), min_size=512, max_size=512))
def test_any_state_page_can_be_decoded(ring: RingFile, words: list[int]) -> None:
    """A rank may corrupt its own memory: the view is then wrong, but never an error."""
    ring.state[:] = memoryview(struct.pack("<512Q", *words)).cast("Q")
    reader = RingReader(ring.path)
    view = reader.view()
    assert len(view.frames) <= layout.FRAMES
    reader.close()


@reuse
@given(noise=st.binary(min_size=1, max_size=200), used=st.integers(0, 2**64 - 1))
def test_corrupt_definitions_raise_a_ring_error(
    tmp_path: Path, identity: Identity, noise: bytes, used: int
) -> None:
    ring = create(tmp_path / "noise.ring", identity, CAPACITY)
    ring.definitions[: len(noise)] = noise
    ring.state[layout.STATE_DEFINITIONS] = used
    reader = RingReader(ring.path)
    with contextlib.suppress(RingError):  # any other error fails the test
        assert isinstance(reader.new_definitions(), list)
    reader.close()
    ring.close()


def test_commands_reach_the_writer_and_answers_the_reader(ring: RingFile) -> None:
    reader = RingReader(ring.path)
    reader.command(9, 2, 140)
    assert ring.control[layout.CONTROL_COMMAND] == 9
    assert reader.acknowledgement() is None
    ring.control[layout.ACK_STATUS] = 2
    ring.control[layout.ACK_STEP] = 140
    ring.control[layout.ACK_COMMAND] = 9
    assert reader.acknowledgement() == Acknowledgement(9, 2, 140)


def test_a_ring_appears_complete_or_not_at_all(tmp_path: Path, identity: Identity) -> None:
    create(tmp_path / "a.ring", identity, CAPACITY).close()
    assert [entry.name for entry in tmp_path.iterdir()] == ["a.ring"]
    assert (tmp_path / "a.ring").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("capacity", [0, 63, 100, 1 << 25])
def test_a_capacity_is_a_power_of_two_within_limits(
    tmp_path: Path, identity: Identity, capacity: int
) -> None:
    with pytest.raises(ValueError, match="power of two"):
        create(tmp_path / "a.ring", identity, capacity)
    assert list(tmp_path.iterdir()) == []


def test_an_identity_larger_than_a_page_is_refused(tmp_path: Path, identity: Identity) -> None:
    big = msgspec.structs.replace(identity, metadata={"note": "x" * 5000})
    with pytest.raises(ValueError, match="more than one page"):
        create(tmp_path / "a.ring", big, CAPACITY)


def test_a_missing_directory_raises_an_os_error(tmp_path: Path, identity: Identity) -> None:
    with pytest.raises(FileNotFoundError):
        create(tmp_path / "missing" / "a.ring", identity, CAPACITY)


def test_a_file_that_cannot_be_opened_is_a_ring_error(tmp_path: Path) -> None:
    with pytest.raises(RingError, match="No such file"):
        RingReader(tmp_path / "none.ring")


def damage(path: Path, at: int, content: bytes) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        file.write(content)


@pytest.mark.parametrize(
    ("at", "content", "complaint"),
    [
        (0, b"NOT A RING", "not a Paceline ring"),
        (8, (LAYOUT_VERSION + 1).to_bytes(4, "little"), f"layout {LAYOUT_VERSION + 1}"),
        (16, (128).to_bytes(8, "little"), "do not fit a capacity of 128"),
        (24, (7).to_bytes(4, "little"), "corrupt identity"),
        (28, b"\xc1" * 20, "corrupt identity"),
    ],
)
def test_a_damaged_header_is_refused(
    ring: RingFile, at: int, content: bytes, complaint: str
) -> None:
    damage(ring.path, at, content)
    with pytest.raises(RingError, match=complaint):
        RingReader(ring.path)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("rank", -1),
        ("generation", 1 << 31),
        ("pid", -7),
        ("native_thread_id", -1),
        ("native_thread_id", 1 << 31),
        ("started_ns", 1 << 63),
    ],
)
def test_numbers_too_large_for_a_batch_are_refused(
    tmp_path: Path, identity: Identity, name: str, value: int
) -> None:
    """The server would reject the whole batch, with data of all ranks of the node."""
    path = tmp_path / "any.ring"
    create(path, msgspec.structs.replace(identity, **{name: value}), CAPACITY).close()
    with pytest.raises(RingError, match=f"{name} of {value}"):
        RingReader(path)


@reuse
@given(page=st.binary(min_size=28, max_size=300))
def test_any_first_page_is_read_or_refused(tmp_path: Path, identity: Identity, page: bytes) -> None:
    path = tmp_path / "any.ring"
    create(path, identity, CAPACITY).close()
    damage(path, 0, b"PACELINE" + page)
    with contextlib.suppress(RingError):  # any other error fails the test
        RingReader(path).close()


@pytest.mark.parametrize("size", [0, 1, DEFINITIONS_OFFSET, layout.SPANS_OFFSET])
def test_a_truncated_file_is_refused(ring: RingFile, tmp_path: Path, size: int) -> None:
    short = tmp_path / "short.ring"
    short.write_bytes(ring.path.read_bytes()[:size])
    with pytest.raises(RingError):
        RingReader(short)


def test_a_failed_creation_leaves_no_file(
    tmp_path: Path, identity: Identity, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        create(tmp_path / "a.ring", identity, CAPACITY)
    assert list(tmp_path.iterdir()) == []


def test_a_link_to_a_ring_is_refused(tmp_path: Path, identity: Identity) -> None:
    """Any user can create files in a ring directory."""
    create(tmp_path / "real.ring", identity, CAPACITY).close()
    (tmp_path / "link.ring").symlink_to(tmp_path / "real.ring")
    os.mkfifo(tmp_path / "fifo.ring")
    for name in ("link.ring", "fifo.ring"):
        with pytest.raises(RingError):
            RingReader(tmp_path / name)
