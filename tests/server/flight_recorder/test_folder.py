"""Files of any kind in a folder, and the messages about those that are not dumps."""

from __future__ import annotations

import gzip
import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import zstandard
from simulated_incident import Job, Shape

from paceline_server.flight_recorder import report
from paceline_server.flight_recorder.errors import (
    HostileDumpError,
    MalformedDumpError,
    NoDumpsError,
)
from paceline_server.flight_recorder.folder import read_folder

SHAPE = Shape(1, 1, 3)
CULPRIT = 1


def stalled() -> Job:
    job = Job(SHAPE, seed=1)
    job.ranks[CULPRIT].stalls_at = 7
    job.run()
    return job


def as_json(document: Any) -> bytes:
    """Return the JSON that PyTorch writes: 0 for no time, strings for the numbers of the status."""
    document["pg_status"] = {
        local: {key: str(value) for key, value in status.items()}
        for local, status in document["pg_status"].items()
    }
    for entry in document["entries"]:
        for key in ("time_discovered_started_ns", "time_discovered_completed_ns"):
            entry[key] = entry[key] or 0
    return json.dumps(document).encode()


def twice_in_itself(depth: int) -> list[Any]:
    """Return a list that is small as a pickle but 2**depth words long as text."""
    found: list[Any] = []
    for _ in range(depth):
        found = [found, found]
    return found


def write(directory: Path, name: str = "_dump_{}", *, without: int | None = None) -> None:
    job = stalled()
    for rank in range(SHAPE.world_size):
        if rank != without:
            document = job.document(rank)
            data = as_json(document) if name.endswith("json") else pickle.dumps(document, 2)
            path = directory / name.format(rank, rank)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


@pytest.mark.parametrize(
    "name",
    [
        "_dump_{}",
        "nccl_trace_rank_{}",
        "nccl_trace_rank__{}",
        "comm_lib_trace_rank_{}",
        "host7_rank_{}.json",
        "trace{}.pkl",
        "{}",
        "2025.09.22_rank_{}.json",
        "trace_rank{}_20250922.pickle",
        "rank={}.dump",
        "dump.{}",
        "nccl-dump-{}",
        "Rank{}.BIN",
        "trace{}.dump.pt",
        "node7_local_rank_5_dump_{}",
        "rank_{}/dump",
        "rank_{}/nccl_trace.json",
        "{}/dump.pkl",
        "job_2025.09/node0/rank_{}.bin",
        "node-{}/rank_{}.bin",
        "worker{}/dump_20250922",
    ],
)
def test_the_rank_is_in_the_name(tmp_path: Path, name: str) -> None:
    write(tmp_path, name)
    found = report(tmp_path)
    assert (found.culprits, found.kind, found.notes) == ((CULPRIT,), "host", ())


def test_other_files_are_named_and_ignored(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "fault_injection.log").write_text("Fault ranks: [0]\n")
    (tmp_path / "rank_1.log").write_text("cannot go on\n")
    (tmp_path / "empty_1").touch()
    (tmp_path / "dump_v1.5").write_bytes((tmp_path / "_dump_0").read_bytes())
    (tmp_path / "folder_1").mkdir()
    os.mkfifo(tmp_path / "rank_1.pipe")
    found = report(tmp_path)
    assert found.culprits == (CULPRIT,)
    assert found.notes == (
        "folder_1, dump_v1.5, rank_1.pipe, fault_injection.log, empty_1, rank_1.log: "
        "ignored: not a dump of a rank",
    )


def test_of_many_other_files_some_are_named(tmp_path: Path) -> None:
    write(tmp_path)
    for number in range(100):
        (tmp_path / f"{number}.txt").write_text("Fault ranks: [0]\n")
    (note,) = report(tmp_path).notes
    assert note.endswith("6.txt, 7.txt and 92 more: ignored: not a dump of a rank")


def test_two_dumps_of_one_rank_count_once(tmp_path: Path) -> None:
    write(tmp_path)
    write(tmp_path, "trace_rank_{}.json")
    found = report(tmp_path)
    assert found.culprits == (CULPRIT,)
    assert "trace_rank_0.json is ignored: _dump_0 is another dump of rank 0" in found.notes


def test_a_name_that_the_groups_of_the_dump_belie_is_not_believed(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "_dump_0").rename(tmp_path / "_dump_4711")
    found = report(tmp_path)
    assert found.without_dump == (0,)
    assert found.notes == ("_dump_4711 is not of rank 4711: no group in it has that rank: ignored",)


def test_an_empty_file_is_a_rank_without_a_dump(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / f"_dump_{CULPRIT}").write_bytes(b"")
    found = report(tmp_path)
    assert (found.culprits, found.kind, found.without_dump) == ((CULPRIT,), "host", (CULPRIT,))
    assert f"rank {CULPRIT} is treated as having no dump" in found.notes[0]


@pytest.mark.parametrize("name", ["_dump_{}", "trace_rank_{}.json"])
@pytest.mark.parametrize(
    ("suffix", "compress"), [(".gz", gzip.compress), (".zst", zstandard.compress)]
)
def test_dumps_may_be_compressed(
    tmp_path: Path, name: str, suffix: str, compress: Callable[[bytes], bytes]
) -> None:
    write(tmp_path, name)
    for path in list(tmp_path.iterdir()):
        path.with_name(path.name + suffix).write_bytes(compress(path.read_bytes()))
        path.unlink()
    assert report(tmp_path).culprits == (CULPRIT,)


def test_dumps_may_lie_in_folders_of_nodes(tmp_path: Path) -> None:
    write(tmp_path)
    for path in list(tmp_path.iterdir()):
        node = tmp_path / f"node-{path.name[-1]}"
        node.mkdir()
        path.rename(node / path.name)
    (tmp_path / "notes_7").write_text("not of a rank\n")
    assert report(tmp_path).culprits == (CULPRIT,)


def test_several_incidents_are_not_mixed(tmp_path: Path) -> None:
    for incident in ("first", "second"):
        (tmp_path / incident).mkdir()
        write(tmp_path / incident)
    with pytest.raises(MalformedDumpError, match=r"second/_dump_0 .* rank 0 than first/_dump_0"):
        report(tmp_path)


@pytest.mark.parametrize("name", ["_dump_2", "notes_2"])
def test_a_rank_known_only_from_a_truncated_dump_belongs_to_the_job(
    tmp_path: Path, name: str
) -> None:
    """Gloo lists no groups, and rank 2 is the last."""
    job = Job(SHAPE, seed=1)
    job.ranks[2].stalls_at = 7
    job.run()
    for rank in (0, 1):
        data = pickle.dumps(job.document(rank) | {"pg_config": {}})
        (tmp_path / f"_dump_{rank}").write_bytes(data)
    (tmp_path / name).write_bytes(b"\x80\x02}")
    found = report(tmp_path)
    assert found.without_dump == ((2,) if name == "_dump_2" else ())


@pytest.mark.parametrize("compressed", [False, True])
def test_a_dump_that_is_cut_off_does_not_hide_the_others(tmp_path: Path, compressed: bool) -> None:
    write(tmp_path)
    path = tmp_path / f"_dump_{CULPRIT}"
    data = path.read_bytes()
    path.write_bytes((gzip.compress(data) if compressed else data)[:-9])
    found = report(tmp_path)
    assert (found.culprits, found.without_dump) == ((CULPRIT,), (CULPRIT,))
    assert found.notes[0].startswith(f"_dump_{CULPRIT} is incomplete") or not compressed
    assert found.notes[0].endswith(f": rank {CULPRIT} is treated as having no dump")


def test_one_hostile_dump_is_enough_to_refuse_them_all(tmp_path: Path) -> None:
    write(tmp_path)
    (tmp_path / "_dump_2").write_bytes(b"cos\nsystem\n(S'true'\ntR.")
    with pytest.raises(HostileDumpError, match="_dump_2 imports a global"):
        report(tmp_path)


@pytest.mark.parametrize("make", [False, True])
def test_a_folder_without_dumps(tmp_path: Path, make: bool) -> None:
    directory = tmp_path / "dumps"
    if make:
        directory.mkdir()
        (directory / "notes.txt").write_text("nothing")
    with pytest.raises(NoDumpsError, match="Flight Recorder dump"):
        read_folder(directory)


@pytest.mark.parametrize(
    ("content", "error", "says"),
    [
        (b"cos\nsystem\n(S'true'\ntR.", HostileDumpError, "_dump_2 imports a global"),
        (pickle.dumps({"entries": []})[:-3], MalformedDumpError, "_dump_2 is not a whole pickle"),
        (b'{"entries": [', MalformedDumpError, "_dump_2 is incomplete JSON"),
        (b'{"a":' * 100_000, MalformedDumpError, "_dump_2 is incomplete JSON"),
        (pickle.dumps([1, 2]), MalformedDumpError, "_dump_2 is not a Flight Recorder dump"),
        (b"{}", MalformedDumpError, "expected 2.4 to 2.10, found None"),
        (b'{"version": "1.5", "entries": []}', MalformedDumpError, "found 1.5"),
        (b'{"version": "2.9", "entries": [1]}', MalformedDumpError, "dump of version 2.9"),
        (
            pickle.dumps({"version": "2.9", "pg_config": {"0": {"name": twice_in_itself(16)}}}),
            MalformedDumpError,
            "TypeError in it",
        ),
        (
            pickle.dumps({"version": "2.9", "pg_config": {"0": {"ranks": twice_in_itself(16)}}}),
            MalformedDumpError,
            "TypeError in it",
        ),
        (b'{"version": "2.9", "entries": 1}', MalformedDumpError, "has no entries"),
        (b'{"version": "2.9", "pg_status": {"0": 7}}', MalformedDumpError, "of version 2.9"),
        (
            b'{"version": "2.9", "pg_config": {"0": {"ranks": [-1]}}}',
            MalformedDumpError,
            "of version 2.9",
        ),
    ],
)
def test_a_bad_dump_is_one_sentence_that_names_the_file(
    tmp_path: Path, content: bytes, error: type[Exception], says: str
) -> None:
    (tmp_path / "_dump_2").write_bytes(content)
    with pytest.raises(error, match=r"^_dump_2 ") as caught:
        report(tmp_path)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_in_a_dump_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    write(tmp_path)
    for path in tmp_path.iterdir():
        document = pickle.loads(path.read_bytes())
        for entry in document["entries"]:
            entry["process_group"] = (entry["process_group"][0], "x\x1b[31m\n")
        path.write_bytes(pickle.dumps(document))
    assert report(tmp_path).verdict.isprintable()
