"""The commands of the documents exist: every option, file, make target and benchmark they name."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import click
import pytest
from click.testing import CliRunner

from paceline_cli.main import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("deploy/**/*.md")]
BENCHMARKS = {path.stem for path in (ROOT / "benchmarks").glob("*.py")}
CONTINUES = {"|", "&&", ";", "||", ">", "2>&1"}


class Documented(NamedTuple):
    where: str
    words: list[str]


def lines_of_shell(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines of ```sh blocks and inline code that begins with a command."""
    in_shell = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.startswith("```"):
            in_shell = line.strip() in ("```sh", "```console", "```bash")
        elif in_shell:
            yield number, line.removeprefix("$ ")
        else:
            for code in re.findall(r"`([^`]+)`", line):
                yield number, code


def commands(text: str) -> Iterator[tuple[int, list[str]]]:
    """Yield the words of each command, without environment variables and comments."""
    for number, line in lines_of_shell(text):
        try:
            words = shlex.split(line, comments=True)
        except ValueError:  # prose in backticks
            continue
        command: list[str] = []
        for word in [*words, ";"]:
            ends = word in CONTINUES or word.endswith(";")
            if ends:
                command += [word.rstrip(";")] if word.rstrip(";") not in ("", *CONTINUES) else []
                while command and re.fullmatch(r"[A-Z_]+=.*", command[0]):
                    command.pop(0)
                if command:
                    yield number, command
                command = []
            else:
                command.append(word)


def documented(program: str) -> list[Documented]:
    return [
        Documented(f"{path.relative_to(ROOT)}:{number}", words[1:])
        for path in DOCUMENTS
        for number, words in commands(path.read_text())
        if Path(words[0]).name == program
    ]


def trouble_of(words: list[str]) -> str | None:
    """Return why the command line would be rejected, or None."""
    command: click.Command = main
    context = click.Context(main)
    while isinstance(command, click.Group) and words:
        name, *rest = words
        if name.startswith("-"):
            break
        found = command.get_command(context, name)
        if found is None:
            return f"{command.name} has no command {name}"
        command, words = found, rest
        context = click.Context(command, parent=context)
    known = {option for parameter in command.params for option in parameter.opts}
    known |= {option for parameter in command.params for option in parameter.secondary_opts}
    known |= {"--help", "-h"}
    for word in words:
        if word == "--":
            break
        option = word.split("=")[0]
        if re.fullmatch(r"--?[a-z][a-z0-9-]*", option) and option not in known:
            return f"{command.name} has no option {option}"
    return None


def test_documented_paceline_commands_exist() -> None:
    found = documented("paceline")
    assert len(found) > 30
    troubles = [f"{where}: {trouble_of(words)}" for where, words in found if trouble_of(words)]
    assert troubles == []


def test_documented_test_files_exist() -> None:
    found = [
        (where, word)
        for where, words in documented("pytest")
        for word in words
        if word.startswith("tests/")
    ]
    assert found
    missing = [(where, word) for where, word in found if not (ROOT / word.split("::")[0]).exists()]
    assert missing == []


def test_documented_benchmarks_exist() -> None:
    named = [
        (where, name)
        for where, words in documented("make")
        for word in words
        if word.startswith("ONLY=")
        for name in re.split(r"[ ,]", word.removeprefix("ONLY="))
    ]
    assert named
    assert [(where, name) for where, name in named if name not in {*BENCHMARKS, "NAME"}] == []


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["jobs"], None),
        (["jobs", "--nonexistent"], "jobs has no option --nonexistent"),
        (["no-such"], "paceline has no command no-such"),
        (["run", "--dp", "4", "--", "python", "--whatever"], None),
    ],
)
def test_the_check_itself_refuses_what_click_would(words: list[str], expected: str | None) -> None:
    assert (trouble_of(words) or "").replace("main ", "paceline ") == (expected or "")


@pytest.mark.parametrize("name", sorted(main.list_commands(click.Context(main))))
def test_every_command_shows_its_help(name: str) -> None:
    shown = CliRunner().invoke(main, [name, "--help"])
    assert shown.exit_code == 0, shown.output
