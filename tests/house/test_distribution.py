"""The distribution: what a bare install provides, and whether the documents match it."""

from __future__ import annotations

import ast
import builtins
import re
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment that contains only `pip install .`."""
    directory = tmp_path_factory.mktemp("bare")
    venv.create(directory, with_pip=False)  # a pip of its own takes as long as the rest
    python = directory / "bin" / "python"
    pip = (sys.executable, "-m", "pip", "--python", python, "--disable-pip-version-check")
    subprocess.run([*pip, "install", "--quiet", "--no-compile", str(ROOT)], check=True)
    return python


def run(python: Path, code: str) -> str:
    ended = subprocess.run(
        [python, "-I", "-c", code], capture_output=True, text=True, check=False, cwd="/"
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout.strip()


def test_a_bare_install_imports_the_hooks_without_torch_fastapi_or_numpy(bare: Path) -> None:
    code = (
        "import importlib.util as u, paceline\n"
        "wanted = 'torch fastapi numpy pynvml sqlalchemy'.split()\n"
        "print([name for name in wanted if u.find_spec(name)])"
    )
    assert run(bare, code) == "[]"


def test_a_bare_install_trains_with_inert_hooks(bare: Path) -> None:
    code = (
        "import paceline\npaceline.init()\n"
        "print([batch for batch in paceline.steps([1, 2, 3])])\n"
        "with paceline.section('x'): pass"
    )
    assert run(bare, code) == "[1, 2, 3]"


def test_a_bare_install_has_the_command_and_its_types(bare: Path) -> None:
    shown = subprocess.run([bare.parent / "paceline", "--help"], capture_output=True, text=True)
    assert "Begin with `paceline demo`" in shown.stdout
    code = (
        "import pathlib, importlib.util as u\n"
        "names = 'paceline paceline_wire paceline_trainer paceline_agent paceline_server "
        "paceline_web paceline_cli paceline_demo paceline_evaluation'.split()\n"
        "print(all((pathlib.Path(u.find_spec(n).origin).parent / 'py.typed').exists() "
        "for n in names))"
    )
    assert run(bare, code) == "True"


def documents() -> list[Path]:
    return [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")]


@pytest.mark.parametrize("document", documents(), ids=lambda path: str(path.relative_to(ROOT)))
def test_links_of_a_document_lead_somewhere(document: Path) -> None:
    targets = re.findall(r"\]\(([^)#]+)", document.read_text())
    local = [target for target in targets if not target.startswith("http")]
    assert [target for target in local if not (document.parent / target).exists()] == []


def test_every_make_target_that_is_spoken_of_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    spoken = {
        name
        for document in documents()
        for name in re.findall(r"`make ([a-z]+)", document.read_text())
    }
    assert spoken <= targets


def test_every_collector_and_detector_has_its_row() -> None:
    agent, server = ROOT / "agent/paceline_agent", ROOT / "server/paceline_server"
    collectors = {path.stem for path in (agent / "collect/collectors").glob("*.py")}
    detectors = {path.parent.name for path in server.glob("detect/*/detector.py")}
    for document, names in (
        ("docs/adding-a-collector.md", collectors - {"__init__"}),
        ("docs/adding-a-detector.md", detectors),
    ):
        rows = re.findall(r"^\| `([\w.]+)`", (ROOT / document).read_text(), re.MULTILINE)
        assert names
        assert names - set(rows) == set()


PACKAGES = ("agent", "cli", "lab", "server", "trainer_hooks", "wire")


@pytest.mark.parametrize("package", PACKAGES)
def test_types_are_decoded_by_decoders_that_were_made_at_import(package: str) -> None:
    """msgspec analyzes a type on first use; it crashes if two threads do so at the same time."""
    sources = [*(ROOT / package).rglob("*.py")]
    assert sources
    assert [
        f"{source.relative_to(ROOT)}:{call.lineno}: make a Decoder({ast.unparse(kind)})"
        for source in sources
        for call in ast.walk(ast.parse(source.read_text()))
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith(".decode")
        for kind in (keyword.value for keyword in call.keywords if keyword.arg == "type")
        if not set(re.findall(r"\w+", ast.unparse(kind))) <= set(dir(builtins))
    ] == []


def test_ci_runs_the_test_command_of_the_readme() -> None:
    assert "exec make test" in (ROOT / ".ci" / "run").read_text()
    assert re.search(r"^make test ", (ROOT / "README.md").read_text(), re.MULTILINE)
