"""A new detector needs only what docs/adding-a-detector.md lists."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[3]
DOCUMENT = "docs/adding-a-detector.md"
COPIED = (
    "pyproject.toml",
    DOCUMENT,
    "docs/adding-a-collector.md",
    "agent/paceline_agent/collect/collectors",
    "server/paceline_server",
    "tests/server/simulation",
    "tests/server/detect/conftest.py",
    "tests/server/detect/test_detectors.py",
    "tests/server/detect/test_kinds.py",
    "tests/house/test_distribution.py",
    "web/src/tone.ts",
)
CHECKS = "kind or registered or empty or same_run or optimizer or has_its_row"


def test_the_documented_example_is_a_detector(tmp_path: Path) -> None:
    for name in COPIED:
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if (ROOT / name).is_dir():
            ignored = shutil.ignore_patterns("__pycache__", "static")
            shutil.copytree(ROOT / name, target, ignore=ignored)
        else:
            shutil.copyfile(ROOT / name, target)
    written = _write_example(tmp_path)
    assert written == [
        "server/paceline_server/detect/slow_optimizer/settings.py",
        "server/paceline_server/detect/slow_optimizer/detector.py",
        "server/paceline_server/detect/kinds.py",
        "tests/server/detect/test_slow_optimizer.py",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "server")}
    checks = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", CHECKS]
    checks += ["-p", "no:schemathesis"]  # which takes seconds to import
    result = subprocess.run(
        [*checks, "tests"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert "failed" not in result.stdout


def _write_example(tree: Path) -> list[str]:
    """Write the examples of the document that begin with a path; return the paths."""
    text = (tree / DOCUMENT).read_text(encoding="utf-8")
    examples = re.findall(r"```python\n# (\S+\.py)\n(.*?)```", text, re.DOTALL)
    for name, source in examples:
        path = tree / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.name == "detector.py":
            (path.parent / "__init__.py").touch()
        with path.open("a", encoding="utf-8") as file:
            file.write(source)
    (row,) = re.findall(r"```markdown\n(.*?)```", text, re.DOTALL)
    (tree / DOCUMENT).write_text(text.rstrip("\n") + "\n" + row, encoding="utf-8")
    return [name for name, _ in examples]
