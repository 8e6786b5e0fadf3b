"""Adding a collector takes its file, test, fixture and documentation row; the rest is derived."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("agent", "cli", "lab", "server", "trainer_hooks", "web/paceline_web", "wire")
# Without plugins that take longer to import than the tests.
PYTEST = ("-m", "pytest", "-q", *("-p", "no:cacheprovider", "-p", "no:schemathesis"))
ROOTS = ("wire", "trainer_hooks", "agent", "server", "web", "cli", "lab")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources, tests and documents."""
    copy = tmp_path_factory.mktemp("copy")
    # A build beside this test renames its libraries; these tests run in Python without them.
    libraries = ("_native.abi3.*", "_process_groups.[0-9]*")
    ignored = shutil.ignore_patterns("__pycache__", "node_modules", ".venv", "*.png", *libraries)
    for folder in (*PACKAGES, "docs", "tests", "benchmarks", "deploy"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=ignored)
    for file in ("pyproject.toml", "Makefile", "README.md", "CONTRIBUTING.md", "CHANGELOG.md"):
        shutil.copy(ROOT / file, copy / file)
    return copy


def run(project: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run Python with the packages of the copy."""
    path = os.pathsep.join(str(project / root) for root in ROOTS)
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=project,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_collector_is_four_things(project: Path) -> None:
    page = project / "docs/adding-a-collector.md"
    (example,) = re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)
    tests = project / "tests/agent/collect/collectors"
    # 1. its file
    (project / "agent/paceline_agent/collect/collectors/swap.py").write_text(example)
    # 2. its test, and 3. the fixture that it reads
    (project / "tests/agent/fixtures/swaps").write_text(
        "Filename Type Size Used Priority\n/dev/sda2 partition 100 25 -2\n"
    )
    (tests / "test_swap.py").write_text(
        "from pathlib import Path\n"
        "from paceline_agent.collect.collectors.swap import SwapCollector\n"
        "SWAPS = Path(__file__).parents[2] / 'fixtures' / 'swaps'\n"
        "def test_used_bytes(context, procfs, series):\n"
        "    (procfs / 'swaps').write_text(SWAPS.read_text())\n"
        "    found = series(SwapCollector(context).collect(1))\n"
        "    assert found == {'node_swap_used_bytes{device=/dev/sda2}': 25 * 1024}\n"
    )
    # 4. its row
    text = page.read_text()
    row = "| `swap` | 10 s | `node_swap_used_bytes{device}` |\n"
    page.write_text(re.sub(r"(?=^\| `tcp` \|)", row, text, flags=re.MULTILINE))

    checks = (str(tests / "test_swap.py"), str(tests / "test_documentation.py"))
    catalog = "tests/agent/expose/test_catalog.py"
    checked = run(project, *PYTEST, *checks, catalog)
    assert checked.returncode == 0, checked.stdout + checked.stderr
    shown = run(
        project,
        *("-m", "paceline_agent", "--once", "--agent-id", "node-0"),
        *("--procfs", str(tmp_proc(project)), "--node-directory", str(project)),
    )
    assert "# HELP node_swap_used_bytes Swap space in use." in shown.stdout, shown.stderr
    assert "# TYPE node_swap_used_bytes gauge" in shown.stdout


def tmp_proc(project: Path) -> Path:
    """Return a /proc that contains only swaps."""
    proc = project / "frozen-proc"
    proc.mkdir()
    shutil.copy(project / "tests/agent/fixtures/swaps", proc / "swaps")
    return proc


def test_a_collector_without_its_row_is_noticed(project: Path) -> None:
    (project / "agent/paceline_agent/collect/collectors/unnamed.py").write_text(
        (project / "agent/paceline_agent/collect/collectors/ranks.py")
        .read_text()
        .replace('"ranks"', '"unnamed"')
        .replace("paceline_rank_info", "paceline_unnamed_info")
    )
    page = "tests/agent/collect/collectors/test_documentation.py"
    checked = run(project, *PYTEST, page)
    assert checked.returncode == 1
    assert "test_every_collector_has_its_row" in checked.stdout
