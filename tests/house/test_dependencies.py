"""Every dependency of the product is listed in `docs/dependencies.md` with its license.

    PACELINE_WRITE_GOLDEN=1 .venv/bin/pytest tests/house/test_dependencies.py

updates the table; read the diff before committing it.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
DOCUMENT = ROOT / "docs" / "dependencies.md"
EXTRAS = ("", "agent", "server")
# License texts and classifiers as SPDX expressions.
SPDX = {
    "BSD": "BSD-3-Clause",
    "MIT License": "MIT",
    "Apache Software License": "Apache-2.0",
    "Python Software Foundation License": "PSF-2.0",
}
# Licenses that require only a notice.
PERMISSIVE = {"0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "CC0-1.0", "MIT", "PSF-2.0"}
PERMISSIVE |= {"Zlib"}
# Licenses of libraries that users install unchanged from their own distributions.
WEAK_COPYLEFT = {"LGPL-3.0-only", "MPL-2.0"}


def required(name: str, extras: tuple[str, ...]) -> Iterator[Requirement]:
    """Yield what a distribution requires on this platform with these extras."""
    for text in metadata.requires(name) or []:
        requirement = Requirement(text)
        marker = requirement.marker
        if marker is None or any(marker.evaluate({"extra": extra}) for extra in ("", *extras)):
            yield requirement


def needed_by() -> dict[str, set[str]]:
    """Map each dependency, direct or not, to the extras of the project that need it."""
    found: dict[str, set[str]] = {}
    for extra in EXTRAS:
        open_ones = [("paceline", (extra,))]
        while open_ones:
            name, extras = open_ones.pop()
            for requirement in required(name, extras):
                key = canonicalize_name(requirement.name)
                if extra not in found.setdefault(key, set()):
                    found[key].add(extra)
                    open_ones.append((key, tuple(requirement.extras)))
    return found


def license_of(name: str) -> str:
    """Return the license of an installed distribution as an SPDX expression."""
    about = metadata.metadata(name)
    if about["License-Expression"]:
        return str(about["License-Expression"])
    prefix = "License :: OSI Approved :: "
    classifiers = [
        each.removeprefix(prefix)
        for each in about.get_all("Classifier", [])
        if each.startswith(prefix)
    ]
    if len(classifiers) > 1:
        return " OR ".join(SPDX[each] for each in classifiers)
    stated = about["License"] or classifiers[0]
    return SPDX.get(stated, stated)


def rows() -> list[tuple[str, str, str]]:
    """Return the name, the license and the users of each dependency."""
    found = []
    for name, extras in needed_by().items():
        users = "all" if "" in extras else " and ".join(sorted(extras))
        found.append((name, license_of(name), users))
    lock = json.loads((ROOT / "web" / "package-lock.json").read_text())
    for path, package in lock["packages"].items():
        if path and not package.get("dev"):
            found.append((path.removeprefix("node_modules/"), package["license"], "web page"))
    return sorted(found)


def written_table(text: str) -> str:
    """Return the table of the document."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return "\n".join(lines)


def test_every_dependency_is_listed_with_its_license() -> None:
    lines = [("Package", "License", "Needed by"), ("---",) * 3, *rows()]
    table = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    text = DOCUMENT.read_text()
    if os.environ.get("PACELINE_WRITE_GOLDEN"):
        DOCUMENT.write_text(text := text.replace(written_table(text), table))
    assert written_table(text) == table, __doc__


def test_every_license_allows_what_the_project_does() -> None:
    for name, license_, users in rows():
        names = set(re.split(r" AND | OR ", license_))
        allowed = PERMISSIVE if users == "web page" else PERMISSIVE | WEAK_COPYLEFT
        assert names <= allowed, f"{name}: {license_}"
