"""Users who put files into the ring directory can harm only their own rings."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from paceline_agent.collect.processes import process_users
from paceline_agent.forward.outbox import Outbox
from paceline_agent.rings import admission
from paceline_agent.rings.admission import RingFiles, in_turns
from paceline_agent.rings.reader import RankKey, Rings
from paceline_wire import ring
from paceline_wire.ring import Identity, RingFile
from paceline_wire.topology import Coordinates, Topology

Fixture = Callable[..., Any]
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
ALICE, MALLORY = 60_001, 60_002


@pytest.fixture
def rings(tmp_path: Path) -> Iterator[Rings]:
    rings = Rings(tmp_path, Outbox())
    yield rings
    rings.close()


@pytest.fixture
def process_of() -> Iterator[Callable[[int], int]]:
    """Start a process of a user and return its pid."""
    processes = []

    def start(uid: int) -> int:
        processes.append(subprocess.Popen(["sleep", "600"], user=uid, cwd="/"))
        return processes[-1].pid

    yield start
    for process in processes:
        process.kill()
        process.wait()


def create(
    directory: Path,
    owner: int | None = None,
    *,
    pid: int | None = None,
    name: str = "",
    **identity: Any,
) -> RingFile:
    """Create a ring, owned by `owner` if it is another user."""
    claim = {"job": "job", "generation": 0, "rank": 0} | identity
    made = ring.create(
        directory / (name or f"{claim['job']}.g{claim['generation']}.r{claim['rank']}.ring"),
        Identity(
            **claim,
            local_rank=0,
            world_size=8,
            topology=Topology(dp=8),
            coordinates=Coordinates(),
            pid=1 << 22 if pid is None else pid,  # above the largest pid
            host="here",
            clock_offset_ns=0,
            started_ns=time.monotonic_ns(),
        ),
        capacity=64,
    )
    if owner is not None:
        os.chown(made.path, owner, -1)
    return made


def attached(rings: Rings) -> set[tuple[str, int]]:
    rings.poll()
    return {(rank.job, rank.rank) for rank in rings.local_ranks()}


@needs_root
def test_a_ring_of_another_user_cannot_speak_for_a_rank_that_the_agent_started(
    rings: Rings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rings.supervise(RankKey("job", 0, 0), ALICE)
    create(tmp_path, MALLORY)
    assert attached(rings) == set()
    assert f"belongs to user {MALLORY}, but rank 0 of job runs as user {ALICE}" in caplog.text
    create(tmp_path, MALLORY, rank=5)
    assert attached(rings) == set(), "another rank of that job"
    create(tmp_path, ALICE)
    assert attached(rings) == {("job", 0)}


@needs_root
def test_rings_that_were_there_first_give_way_to_the_ranks_of_the_agent(
    rings: Rings, tmp_path: Path
) -> None:
    create(tmp_path, MALLORY, rank=5)
    assert attached(rings) == {("job", 5)}
    rings.supervise(RankKey("job", 0, 0), ALICE)
    create(tmp_path, ALICE)
    assert attached(rings) == {("job", 0)}


@needs_root
def test_a_job_that_the_agent_did_not_start_belongs_to_the_user_of_its_rings(
    rings: Rings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    create(tmp_path, ALICE)
    assert attached(rings) == {("job", 0)}
    create(tmp_path, MALLORY, rank=1)
    create(tmp_path, MALLORY, name="same-rank.ring")
    create(tmp_path, MALLORY, job="another")
    assert attached(rings) == {("job", 0), ("another", 0)}
    assert f"job job on this node belongs to user {ALICE}" in caplog.text


@needs_root
def test_a_ring_cannot_claim_a_process_of_another_user(
    rings: Rings, tmp_path: Path, process_of: Fixture, caplog: pytest.LogCaptureFixture
) -> None:
    """The agent would read its stacks and report its end."""
    victim = process_of(ALICE)
    create(tmp_path, MALLORY, pid=victim)
    assert attached(rings) == set()
    assert f"belongs to user {MALLORY}, but process {victim} to user {ALICE}" in caplog.text
    create(tmp_path, ALICE, rank=1, pid=victim)
    assert attached(rings) == {("job", 1)}
    assert rings.pid("job", 0, 1) == victim


@needs_root
def test_a_pid_that_another_user_has_by_now_is_not_used(
    rings: Rings, tmp_path: Path, process_of: Fixture
) -> None:
    pid = process_of(MALLORY)
    made = create(tmp_path, MALLORY, pid=pid)
    assert attached(rings) == {("job", 0)}
    rings._attached[made.path].pid = process_of(ALICE)
    assert rings.pid("job", 0, 0) is None


@needs_root
def test_a_process_in_a_user_namespace_may_own_rings_as_either_user(
    rings: Rings, tmp_path: Path, wait_for: Fixture
) -> None:
    argv = ["unshare", "--user", f"--map-user={ALICE}", "sleep", "600"]
    with subprocess.Popen(argv, user=MALLORY, cwd="/") as process:
        wait_for(lambda: ALICE in process_users(Path("/proc"), process.pid))
        for rank, owner in enumerate((ALICE, MALLORY, 60_003)):
            create(tmp_path, owner, pid=process.pid, job=f"job-{rank}")
        assert attached(rings) == {("job-0", 0), ("job-1", 0)}
        process.kill()


@needs_root
def test_a_ring_that_cannot_be_removed_is_reported_once(
    rings: Rings, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """In a directory that root prepared, an agent of another user can remove only its own files."""
    made = create(tmp_path)
    made.state[ring.STATE_STATUS] = ring.Status.FINISHED
    if subprocess.run(["chattr", "+i", tmp_path], check=False, capture_output=True).returncode:
        pytest.skip("a directory cannot be made immutable here")
    try:
        for _ in range(3):
            rings._state_due = 0.0
            rings.poll()
    finally:
        subprocess.run(["chattr", "-i", tmp_path], check=True)
    assert len(rings) == 0
    assert caplog.text.count("not removed") == 1


def test_a_ring_with_a_second_name_is_refused(rings: Rings, tmp_path: Path) -> None:
    made = create(tmp_path)
    os.link(made.path, tmp_path / "other.ring")
    assert attached(rings) == set()


def test_a_ring_larger_than_any_real_one_is_refused(rings: Rings, tmp_path: Path) -> None:
    """The ring is a sparse file of 256 MB, whose pages a mapping would have to fill with zeros."""
    made = create(tmp_path)
    capacity = 1 << 22
    with made.path.open("r+b") as file:
        file.seek(16)
        file.write(capacity.to_bytes(8, "little"))
        file.truncate(ring.SPANS_OFFSET + capacity * 64)
    assert attached(rings) == set()


def test_reading_a_sparse_ring_allocates_nothing(rings: Rings, tmp_path: Path) -> None:
    made = create(tmp_path)
    assert attached(rings) == {("job", 0)}
    with made.path.open("r+b") as file:
        file.truncate(ring.SPANS_OFFSET)
        file.truncate(ring.SPANS_OFFSET + 64 * 64)
    blocks = made.path.stat().st_blocks
    made.state[ring.STATE_HEAD] = 60
    rings.poll()
    assert rings.counts.spans == 60
    assert made.path.stat().st_blocks == blocks


_TRUNCATE = """
import os, sys
with open(sys.argv[1], "r+b") as file:
    content = file.read()
    print(flush=True)
    while True:
        file.truncate(0)
        os.pwrite(file.fileno(), content, 0)
"""


def test_a_ring_that_is_truncated_at_any_moment_does_not_end_the_agent(
    rings: Rings, tmp_path: Path
) -> None:
    """Without protection, access to the mapping would raise SIGBUS."""
    made = create(tmp_path, name="truncated.ring", job="bad")
    made.state[ring.STATE_HEAD] = 1 << 40
    create(tmp_path)
    rings.poll()
    argv = [sys.executable, "-S", "-c", _TRUNCATE, str(made.path)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        for _ in range(2_000):
            rings._refused.clear()
            rings._state_due = 0.0
            rings.poll()
        process.kill()
    assert ("job", 0) in attached(rings)


def head_of(made: RingFile, moves: int) -> None:
    made.state[ring.STATE_HEAD] += moves


@needs_root
def test_a_user_who_writes_too_much_delays_only_his_own_rings(
    rings: Rings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "RECORDS_PER_POLL", 10)
    monkeypatch.setattr(admission, "RECORDS_AT_ONCE", 100)
    noisy = [create(tmp_path, MALLORY, job=f"noise-{n}") for n in range(4)]
    quiet = create(tmp_path, ALICE)
    rings.poll()
    for _ in range(20):
        for made in noisy:
            made.state[ring.STATE_HEAD] += 60
        quiet.state[ring.STATE_HEAD] += 9
        before = rings.counts.spans
        rings.poll()
        assert rings.counts.spans - before <= 100 + 9
    own = rings.positions[RankKey("job", 0, 0)]
    assert own == 20 * 9


@needs_root
def test_users_are_attached_in_turns_and_each_only_so_many(
    rings: Rings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "ATTACHED_PER_POLL", 2)
    monkeypatch.setattr(admission, "RINGS_PER_USER", 5)
    for number in range(8):
        create(tmp_path, MALLORY, job=f"noise-{number}").close()
    create(tmp_path, ALICE).close()
    first = attached(rings)
    assert ("job", 0) in first
    assert len(first) == 3
    for _ in range(4):
        found = attached(rings)
    assert len(found) == 5 + 1


def test_files_of_different_users_take_turns() -> None:
    files = [(Path(str(n)), SimpleNamespace(st_uid=uid)) for n, uid in enumerate((1, 1, 1, 2))]
    ordered = in_turns(files, {}, 2)  # type: ignore[arg-type]
    assert [str(path) for path, _ in ordered] == ["0", "3", "1"]
    full = {1: admission.RINGS_PER_USER}
    assert [str(path) for path, _ in in_turns(files, full, 2)] == ["3"]  # type: ignore[arg-type]


def test_a_directory_full_of_files_is_examined_in_parts(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.ring").touch()
    (tmp_path / "directory.ring").mkdir()
    (tmp_path / "link.ring").symlink_to(tmp_path / "0.ring")
    files = RingFiles(tmp_path)
    parts = [files.next(5) for _ in range(3)]
    assert [len(part) <= 5 for part in parts] == [True] * 3
    names = [path.name for part in parts for path, _ in part]
    assert sorted(names) == sorted(f"{number}.ring" for number in range(10))


def test_the_rank_of_the_agent_is_found_among_any_number_of_files(
    rings: Rings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RingFiles, "next", lambda *_: [])
    rings.supervise(RankKey("job", 0, 0), os.geteuid())
    create(tmp_path)
    assert attached(rings) == {("job", 0)}


@needs_root
def test_a_name_that_another_user_took_is_avoided(tmp_path: Path) -> None:
    """In a directory with the sticky bit, nobody can replace it."""
    tmp_path.chmod(0o1777)
    taken = tmp_path / "job.g0.r0.ring"
    taken.write_text("")
    os.chown(taken, MALLORY, -1)
    os.chown(tmp_path, MALLORY, -1)
    within = os.open(tmp_path, os.O_RDONLY)
    child = os.fork()
    if not child:
        try:
            os.fchdir(within)
            os.setuid(ALICE)
            os._exit(0 if create(Path(), ALICE).path.name != taken.name else 1)
        finally:
            os._exit(2)
    os.close(within)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    (own,) = (path for path in tmp_path.iterdir() if path != taken)
    assert (own.stat().st_uid, own.suffix) == (ALICE, ".ring")
