"""Connections between ranks: only those that know the secret are served."""

from __future__ import annotations

import errno
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from paceline.checkpoints.errors import CheckpointError
from paceline.checkpoints.memory.directory import CopyDirectory, CopyName
from paceline.checkpoints.memory.file import BLOCK_BYTES, CopyRecord, hashed_part, pack_record
from paceline.checkpoints.memory.held import HeldCopies
from paceline.checkpoints.memory.slots import CopySlot, NodeMemory
from paceline.checkpoints.memory.transfer import (
    BURST_BYTES,
    CopyServer,
    PeerConnection,
    Reply,
    RequestCopy,
    SendCopy,
    TokenBucket,
)

SECRET = b"s" * 32
TOTAL_BYTES = 3 * BLOCK_BYTES
Connect = Callable[..., PeerConnection]


class Holder:
    """A server that holds the copies of rank 1 in generation 5."""

    def __init__(self, root: Path, most_bytes: int = 1 << 20, tls: Path | None = None) -> None:
        self.directory = CopyDirectory(root, "run")
        self.memory = NodeMemory(most_bytes)
        self.held = HeldCopies(self.directory, 5, frozenset({1}), self.memory, threading.Event())
        self.server = CopyServer("127.0.0.1", SECRET, tls, self.held.serve)
        self.address = ("127.0.0.1", self.server.port)

    def connect(self, secret: bytes = SECRET, tls: Path | None = None) -> PeerConnection:
        return PeerConnection.open(self.address, secret, tls)


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[Holder]:
    made = Holder(tmp_path / "holder")
    yield made
    made.server.close()


def copy_of(directory: Path, step: int, *, rank: int = 1, generation: int = 5) -> CopySlot:
    """Return a complete copy, as a sender has it."""
    slot = CopySlot(directory / f"slot-{step}-{rank}-{generation}", TOTAL_BYTES)
    slot.content[BLOCK_BYTES:] = bytes([step]) * (TOTAL_BYTES - BLOCK_BYTES)
    record = CopyRecord(
        run="run",
        generation=generation,
        step=step,
        rank=rank,
        world_size=2,
        disk=None,
        table_bytes=0,
        rests_offset=BLOCK_BYTES,
        total_bytes=TOTAL_BYTES,
        sha256=slot.digest(TOTAL_BYTES),
    )
    slot.complete(record, directory / f"copy-{step}-{rank}-{generation}")
    return slot


def send(connection: PeerConnection, slot: CopySlot, content: bytes | None = None) -> str | None:
    """Send a copy. Return why it was refused."""
    assert slot.record is not None
    connection.send(SendCopy(pack_record(slot.record)))
    reply = connection.receive()
    assert isinstance(reply, Reply)
    if reply.refusal is None:
        sent = hashed_part(slot.content, TOTAL_BYTES) if content is None else memoryview(content)
        connection.send_content(sent, None, threading.Event())
        reply = connection.receive()
        assert isinstance(reply, Reply)
    return reply.refusal


def test_a_copy_is_held_and_given_back(tmp_path: Path, holder: Holder) -> None:
    slot = copy_of(tmp_path, 7)
    with closing(holder.connect()) as connection:
        assert send(connection, slot) is None
    with closing(holder.connect()) as connection:
        connection.send(RequestCopy(5, 7, 1))
        reply = connection.receive()
        assert isinstance(reply, Reply)
        assert slot.record is not None
        assert reply.block == pack_record(slot.record)
        content = bytearray(TOTAL_BYTES - BLOCK_BYTES)
        connection.receive_content(memoryview(content))
    assert bytes(content) == bytes(hashed_part(slot.content, TOTAL_BYTES))


def test_copies_are_taken_again_after_file_descriptors_ran_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    accept, failed = socket.socket.accept, threading.Event()

    def accept_after_an_error(listener: socket.socket) -> object:
        if not failed.is_set():
            failed.set()
            raise OSError(errno.EMFILE, "too many open files")
        return accept(listener)

    monkeypatch.setattr(socket.socket, "accept", accept_after_an_error)
    holder = Holder(tmp_path / "holder")
    with closing(holder.connect()) as connection:
        assert send(connection, copy_of(tmp_path, 7)) is None
    assert failed.is_set()
    holder.server.close()


def test_the_newest_two_copies_are_held_in_two_files(tmp_path: Path, holder: Holder) -> None:
    with closing(holder.connect()) as connection:
        for step in range(1, 6):
            assert send(connection, copy_of(tmp_path, step)) is None
    assert holder.directory.copies() == [CopyName(5, 4, 1), CopyName(5, 5, 1)]
    assert len(list(holder.directory.path.iterdir())) == 2


def test_a_copy_that_was_changed_on_the_way_is_refused(tmp_path: Path, holder: Holder) -> None:
    with closing(holder.connect()) as connection:
        assert send(connection, copy_of(tmp_path, 1)) is None
        changed = bytes(TOTAL_BYTES - BLOCK_BYTES)
        refusal = send(connection, copy_of(tmp_path, 2), changed)
    assert refusal == "the content does not match its SHA-256"
    assert holder.directory.copies() == [CopyName(5, 1, 1)]


def test_copies_of_other_ranks_and_generations_are_refused(tmp_path: Path, holder: Holder) -> None:
    with closing(holder.connect()) as connection:
        for other in (copy_of(tmp_path, 1, rank=0), copy_of(tmp_path, 1, generation=4)):
            assert send(connection, other) == "this rank does not hold such copies"


def test_a_copy_without_room_is_refused_and_the_connection_stays(
    tmp_path: Path, holder: Holder
) -> None:
    holder.memory.most_bytes = TOTAL_BYTES - 1
    with closing(holder.connect()) as connection:
        assert "this rank may use 12,287" in str(send(connection, copy_of(tmp_path, 1)))
        holder.memory.most_bytes = 1 << 20
        assert send(connection, copy_of(tmp_path, 2)) is None


def test_without_the_secret_nothing_is_answered(tmp_path: Path, holder: Holder) -> None:
    with pytest.raises((CheckpointError, OSError)):
        holder.connect(secret=b"x" * 32)
    with socket.create_connection(holder.address) as unknown:
        unknown.sendall(bytes(64))  # a nonce and a wrong proof
        assert len(unknown.recv(1000)) == 32  # the server's nonce
        assert unknown.recv(1000) == b""
    assert holder.directory.copies() == []


def test_a_message_that_was_changed_or_is_too_long_ends_the_connection(holder: Holder) -> None:
    for frame in (b"\x05\0\0\0" + bytes(32) + b"12345", b"\xff\xff\xff\xff"):
        with closing(holder.connect()) as connection:
            connection._socket.sendall(frame)
            with pytest.raises((CheckpointError, OSError)):
                connection.receive()


def test_the_rate_is_limited() -> None:
    bucket = TokenBucket(1000.0, burst_bytes=500)
    assert bucket.take(500, now=0.0) == 0.0
    assert bucket.take(1000, now=0.0) == 1.0
    assert bucket.take(0, now=1.0) == 0.0
    assert bucket.take(500, now=100.0) == 0.0, "no more than the burst is saved up"
    assert bucket.take(100, now=100.0) == pytest.approx(0.1)
    assert TokenBucket(1.0).take(BURST_BYTES, now=0.0) == 0.0


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl to make a certificate")
def test_connections_are_encrypted_if_asked(tmp_path: Path) -> None:
    pem = tmp_path / "copies.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2"
    made = ["-subj", "/CN=copies", "-keyout", tmp_path / "key", "-out", tmp_path / "certificate"]
    subprocess.run([*command.split(), *made], check=True, capture_output=True)
    pem.write_bytes((tmp_path / "key").read_bytes() + (tmp_path / "certificate").read_bytes())
    holder = Holder(tmp_path / "holder", tls=pem)
    with closing(holder.connect(tls=pem)) as connection:
        assert send(connection, copy_of(tmp_path, 3)) is None
    with pytest.raises((CheckpointError, OSError)):
        holder.connect()
    holder.server.close()
