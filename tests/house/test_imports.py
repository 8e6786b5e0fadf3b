"""Import rules for which import-linter has no contract; the others are in pyproject.toml."""

from __future__ import annotations

import ast
import sys
import tomllib
from graphlib import TopologicalSorter
from pathlib import Path

import grimp

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WIRE_MAY_IMPORT = {"msgspec", "zstandard"}


def imported_packages(source: Path) -> set[str]:
    """Return the top-level packages that a file imports, those under TYPE_CHECKING included."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(source.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{source}: a relative import"
            names.add(node.module or "")
    return {name.partition(".")[0] for name in names}


def test_wire_imports_only_the_standard_library_msgspec_and_zstandard() -> None:
    sources = list((ROOT / "wire" / "paceline_wire").rglob("*.py"))
    assert sources
    allowed = sys.stdlib_module_names | WIRE_MAY_IMPORT | {"paceline_wire"}
    assert {
        str(source.relative_to(ROOT)): sorted(extra)
        for source in sources
        if (extra := imported_packages(source) - allowed)
    } == {}


def test_no_module_imports_itself_indirectly() -> None:
    """This includes imports through its own package, which the contract about siblings does not
    cover."""
    graph = grimp.build_graph(*PROJECT["tool"]["importlinter"]["root_packages"], cache_dir=None)
    imports = {
        module: graph.find_modules_directly_imported_by(module) - {module}
        for module in graph.modules
    }
    list(TopologicalSorter(imports).static_order())  # raises CycleError, which names the modules
