"""Language of the project: standard terms, US spelling (codespell), unique class names."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
PRODUCT = ("agent", "cli", "lab", "server", "trainer_hooks", "wire")
RULES = tomllib.loads(Path(__file__).with_name("language.toml").read_text())
WORDS: dict[str, str] = RULES["identifiers"]
PHRASES = {re.compile(pattern, re.IGNORECASE): use for pattern, use in RULES["phrases"].items()}
ANY_PHRASE = re.compile("|".join(f"(?:{pattern})" for pattern in RULES["phrases"]), re.IGNORECASE)
OPENINGS = {re.compile(pattern): use for pattern, use in RULES["openings"].items()}
# In Python source. `tokenize` takes twenty times as long.
COMMENT_OR_STRING = re.compile(
    r"""#[^\n]*|(?:\b[rbfuRBFU]{1,2})?(?:"{3}(?:\\.|[^\\])*?"{3}|'{3}(?:\\.|[^\\])*?'{3}"""
    r"""|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*')""",
    re.DOTALL,
)
# Recorded data of other programs, generated files, and the list of banned words itself.
EXCLUDED = (
    "fixtures/",
    "/data/",
    "/static/",
    "openapi.",
    "package-lock",
    "tests/house/",
    "LICENSE",
)


class Text(NamedTuple):
    """A piece of prose in a file."""

    line: int
    text: str
    opens: bool  # whether it is a docstring or comment, not a message or a table cell


def tracked(*patterns: str) -> list[Path]:
    """Return the files of the project that match, without those written by others."""
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard", *patterns],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    return [
        ROOT / name
        for name in listed
        if not any(part in f"/{name}" for part in EXCLUDED) and (ROOT / name).is_file()
    ]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


class Definitions(NamedTuple):
    """The lines of a module's docstrings, and the names it defines, each with its line."""

    docstrings: set[int]
    classes: list[tuple[int, str]]
    names: list[tuple[int, str]]  # of functions, parameters, variables and attributes too


def definitions(source: str) -> Definitions:
    found = Definitions(set(), [], [])
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if node.body and _is_text(node.body[0]):
                found.docstrings.add(node.body[0].lineno)
            if not isinstance(node, ast.Module):
                found.names.append((node.lineno, node.name))
            if isinstance(node, ast.ClassDef):
                found.classes.append((node.lineno, node.name))
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.names.append((node.lineno, node.id))
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            found.names.append((node.lineno, node.attr))
        elif isinstance(node, ast.arg):
            found.names.append((node.lineno, node.arg))
    return found


def _is_text(statement: ast.stmt) -> bool:
    value = statement.value if isinstance(statement, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


@cache
def definitions_in(path: Path) -> Definitions:
    return definitions(path.read_text())


def python_prose(source: str, docstrings: set[int]) -> Iterator[Text]:
    """Yield docstrings, comments (line by line) and string literals."""
    line, counted = 1, 0  # the line at this position
    previous = 0
    for found in COMMENT_OR_STRING.finditer(source):
        token, begin = found.group(), found.start()
        line += source.count("\n", counted, begin)
        counted = begin
        if token.startswith("#"):
            indentation = source[source.rfind("\n", 0, begin) + 1 : begin]
            continues = line == previous + 1 and not indentation.strip()
            previous = line
            yield Text(line, token.lstrip("#!: "), opens=not continues)
        else:
            text = token.strip("rbfuRBFU").strip("\"'")
            yield Text(line, text, opens=line in docstrings)


def other_prose(path: Path) -> Iterator[Text]:
    """Yield all lines of documents, and the comments and strings of other sources."""
    in_block = False
    for number, line in enumerate(path.read_text().splitlines(), 1):
        if path.suffix == ".md":
            in_block ^= line.startswith("```")
            yield Text(number, re.sub(r"`[^`]*`", "", line), opens=False)
        else:
            comment = re.search(r"(?:^|\s)(?://|/\*\*?|\*|#)\s+(.*)", line)
            if comment is not None:
                yield Text(number, comment.group(1), opens=False)
            for literal in re.findall(r'"([^"]*)"|>([^<>{}]+)<', line):
                yield Text(number, " ".join(literal), opens=False)


@cache
def prose(path: Path) -> list[Text]:
    if path.suffix == ".py":
        return list(python_prose(path.read_text(), definitions_in(path).docstrings))
    return list(other_prose(path))


def sources() -> list[Path]:
    return tracked("*.py", "*.ts", "*.tsx", "*.c", "*.md", "*.toml", "*.yml", "*.yaml", "Makefile")


def test_prose_uses_standard_terms() -> None:
    found = [
        f"{name_of(path)}:{text.line}: {match.group()!r}; use: {use}"
        for path in sources()
        for text in prose(path)
        if ANY_PHRASE.search(text.text)
        for pattern, use in PHRASES.items()
        if (match := pattern.search(text.text)) is not None
    ]
    assert found == []


def test_docstrings_and_comments_open_with_the_thing_they_describe() -> None:
    found = [
        f"{name_of(path)}:{text.line}: {text.text.splitlines()[0][:60]!r}; {use}"
        for path in tracked("*.py")
        for text in prose(path)
        for pattern, use in OPENINGS.items()
        if text.opens and pattern.match(text.text)
    ]
    assert found == []


def words(name: str) -> list[str]:
    return [word.lower() for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)]


def stored_names() -> set[str]:
    """Return names that stored data contains, which stay until the format changes."""
    return set(RULES.get("stored", {}).get("names", []))


def test_identifiers_use_standard_terms() -> None:
    stored = stored_names()
    found = [
        f"{name_of(path)}:{line}: {name}; use: {WORDS[word]}"
        for path in tracked("*.py")
        for line, name in definitions_in(path).names
        for word in words(name)
        if word in WORDS and name not in stored
    ]
    assert found == []


def test_no_class_name_is_used_twice() -> None:
    places: dict[str, list[str]] = defaultdict(list)
    for path in tracked(*(f"{folder}/*.py" for folder in PRODUCT)):
        for line, name in definitions_in(path).classes:
            places[name].append(f"{name_of(path)}:{line}")
    assert {name: where for name, where in places.items() if len(where) > 1} == {}


def test_spelling_is_us_english() -> None:
    checked = subprocess.run(
        [sys.executable, "-m", "codespell_lib", *map(str, sources())],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ('"""Of a rank."""', "Of a rank."),
        ("x = 1  # Of a rank", "Of a rank"),
        ('def f():\n    """What it is."""', "What it is."),
    ],
)
def test_the_check_itself_finds_an_opening(source: str, expected: str) -> None:
    found = python_prose(source, definitions(source).docstrings)
    [text] = [text for text in found if text.opens]
    assert text.text == expected
    assert any(pattern.match(text.text) for pattern in OPENINGS)


def test_the_check_itself_splits_names() -> None:
    assert words("_was_told") == ["was", "told"]
    assert words("CollectorCrew") == ["collector", "crew"]
