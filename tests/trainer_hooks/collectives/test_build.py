"""The library that records process groups: built once per torch version, and never loaded from
other users' files."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from paceline.collectives import build as building
from paceline.collectives.build import BuildError, build, find_library


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A directory for the source, and the user's cache."""
    package, cache = tmp_path / "package", tmp_path / "cache" / "paceline"
    package.mkdir(mode=0o755)
    cache.mkdir(parents=True, mode=0o700)
    source = package / building.SOURCE.name
    source.write_text('extern "C" int answer() { return 42; }\n')
    monkeypatch.setattr(building, "SOURCE", source)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return package, cache


needs_compiler = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler here")


@needs_compiler
def test_it_is_built_beside_its_source_and_found(places: tuple[Path, Path]) -> None:
    assert find_library() is None
    built = build()
    assert built.parent == places[0]
    assert find_library() == built


@needs_compiler
def test_a_build_of_an_older_source_is_replaced(places: tuple[Path, Path]) -> None:
    older = build()
    building.SOURCE.write_text('extern "C" int answer() { return 43; }\n')
    assert find_library() is None
    assert build() != older
    assert not older.exists()


@needs_compiler
def test_a_compiler_error_is_one_sentence(places: tuple[Path, Path]) -> None:
    building.SOURCE.write_text("this is not C++\n")
    with pytest.raises(BuildError, match=r"failed: .*error"):
        build()
    assert [path.name for path in places[0].iterdir()] == [building.SOURCE.name]


@needs_compiler
@pytest.mark.parametrize("mode", [0o775, 0o757])
def test_a_file_that_others_could_have_written_is_not_loaded(
    places: tuple[Path, Path], mode: int
) -> None:
    built = build()
    built.chmod(mode)
    assert find_library() is None
    built.chmod(0o755)
    places[0].chmod(mode)
    assert find_library() is None


@needs_compiler
def test_it_is_built_in_the_cache_if_the_package_is_not_ours_alone(
    places: tuple[Path, Path],
) -> None:
    places[0].chmod(0o777)
    assert build().parent == places[1]
    assert find_library() is not None


def test_without_a_compiler_the_error_says_what_to_install(
    places: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    with pytest.raises(BuildError, match=r"install g\+\+"):
        build()


def test_the_command_prints_where_the_library_is(library_of_process_groups: None) -> None:
    if shutil.which("c++") is None:
        pytest.skip("no C++ compiler here")
    finished = subprocess.run(
        [sys.executable, "-m", "paceline.collectives"], capture_output=True, text=True
    )
    assert Path(finished.stdout.strip()) == find_library()
