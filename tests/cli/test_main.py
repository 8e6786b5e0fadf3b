"""The command line: its help, missing extras, and invalid input reported in one sentence."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from paceline_cli import render
from paceline_cli.commands.run import describe
from paceline_cli.main import COMMANDS, LazyCommands, main


def invoke(*arguments: str) -> str:
    result = CliRunner().invoke(main, list(arguments))
    return result.output


def test_help_names_every_command_and_where_to_begin() -> None:
    shown = invoke("--help")
    assert all(name in shown for name in COMMANDS)
    assert "Begin with `paceline demo`" in shown


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str) -> None:
    result = CliRunner().invoke(main, [name, "--help"])
    assert result.exit_code == 0, result.output
    assert "Usage:" in result.output


@pytest.mark.parametrize("arguments", [["--help"], ["evaluate", "--help"], ["--version"]])
def test_a_full_disk_is_one_sentence(arguments: list[str]) -> None:
    with Path("/dev/full").open("w") as full:
        ended = subprocess.run(
            [sys.executable, "-m", "paceline_cli", *arguments],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert ended.returncode == 1
    assert ended.stderr == "Error: not everything could be printed: No space left on device\n"


def test_letters_that_a_locale_lacks_are_replaced() -> None:
    code = (
        "import click; from paceline_cli.main import LazyCommands, main\n"
        "show = click.Command('show', callback=lambda: click.echo('Z\u00fcrich \u65e5'))\n"
        "LazyCommands.get_command = lambda *_: show; main(['show'])"
    )
    environment = os.environ | {"PYTHONIOENCODING": "latin-1"}
    ended = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True)
    assert (ended.stdout, ended.stderr) == (b"Z\xfcrich ?\n", b"")


@pytest.mark.parametrize("words", ["jobs show", "jobs stop", "incidents show", "nodes release"])
@pytest.mark.parametrize("name", ["", "..", "../jobs", "a/b"])
def test_an_id_is_one_part_of_an_address(words: str, name: str) -> None:
    shown = invoke(*words.split(), name)
    assert f"expected an id as the list shows it, got {name!r}" in shown


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_whoever_wants_no_colours_gets_none(
    monkeypatch: pytest.MonkeyPatch, no_color: str, is_coloured: bool
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    show = click.Command("show", callback=lambda: render.show_table(["A", "B"], [["x", "y"]], ""))
    monkeypatch.setattr(LazyCommands, "get_command", lambda *_: show)
    shown = CliRunner().invoke(main, ["show"], color=True).output
    assert ("\x1b" in shown) == is_coloured


def test_a_missing_extra_is_named() -> None:
    code = (
        "import sys; sys.modules['fastapi'] = None\n"
        "from paceline_cli.main import run_main; run_main(['server', '--help'])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "pip install 'paceline[server]'" in ended.stderr


def test_the_thin_client_loads_no_server_or_agent() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom paceline_cli.main import main\n"
        "CliRunner().invoke(main, ['jobs', '--help'])\n"
        "print([m for m in ('fastapi', 'sqlalchemy', 'numpy', 'torch', 'pynvml') "
        "if m in sys.modules])"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (("--tp", "3"), "expected 1, 2, 4 or 8"),
        (("--dp", "8", "--pp", "8"), "the demo runs at most 32"),
        (("--faults", "crash:8"), "RANK must be a number from 0 to 7"),
        (("--port", "70000"), "70000 is not in the range"),
        (("--seed", "-1"), "-1 is not in the range"),
    ],
)
def test_the_demo_refuses_what_it_cannot_do_before_it_starts(
    options: tuple[str, ...], message: str
) -> None:
    assert message in invoke("demo", *options)


def test_run_wants_name_equals_value() -> None:
    shown = invoke("run", "--environment", "DEBUG", "--", "python", "train.py")
    assert "expected NAME=VALUE, got 'DEBUG'" in shown


def test_run_wants_each_policy_field_once_as_key_equals_value() -> None:
    command = ("--", "python", "train.py")
    assert "expected KEY=VALUE, got 'auto'" in invoke("run", "--policy", "auto", *command)
    twice = invoke("run", "--mode", "auto", "--policy", "mode=observe", *command)
    assert "mode is also given by --mode" in twice


@pytest.mark.parametrize(
    ("module", "command", "message"),
    [
        ("to rch", "python train.py", "expected a module's name such as torch, got 'to rch'"),
        ("torch,numpy", "python train.py", "expected a module's name such as torch"),
        ("torch", "accelerate launch train.py", "expected a command like python train.py"),
        ("torch", "python -c pass", "expected a command like python train.py"),
    ],
)
def test_run_says_what_cannot_be_preloaded(module: str, command: str, message: str) -> None:
    assert message in invoke("run", "--preload", module, "--", *command.split())


def test_jobs_without_a_server_fails_in_one_sentence() -> None:
    result = CliRunner().invoke(main, ["jobs", "--server", "http://127.0.0.1:9"])
    assert result.exit_code == 1
    assert result.output.startswith("Error: no answer from http://127.0.0.1:9")


def test_a_job_is_described_in_one_line() -> None:
    job = {"state": "running", "step": 7, "loss": 2.5, "verdict": {"text": "All ranks are even."}}
    assert describe(job) == "[running]  step 7  loss 2.5000  All ranks are even."


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, None),
        (0.34, "340 ms"),
        (0.9996, "1.00 s"),
        (5.254, "5.25 s"),
        (9.996, "10.0 s"),
        (59.96, "1 min 00 s"),
        (65.7, "1 min 06 s"),
        (3599.7, "1 h 00 min"),
        (7300, "2 h 02 min"),
    ],
)
def test_seconds_are_readable(value: float | None, shown: str | None) -> None:
    assert render.seconds(value) == shown


@pytest.mark.parametrize(
    ("state", "status", "shown"),
    [
        ("started", None, "started"),
        ("attached", "running", "running"),
        ("exited", "running", "exited"),
    ],
)
def test_a_rank_is_what_it_says_while_it_lives(state: str, status: str | None, shown: str) -> None:
    assert render.rank_state({"state": state, "status": status}) == shown


def test_no_cause_is_certain() -> None:
    shown = [render.likelihood(ratio) for ratio in (0.9997, 0.62, 0.001)]
    assert shown == [">99%", "62%", "<1%"]


def test_an_empty_table_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    render.show_table(("A",), [], "Nothing yet. Start one.")
    assert capsys.readouterr().out == "Nothing yet. Start one.\n"


def test_data_cannot_command_the_terminal() -> None:
    assert render.cell("[red]x[/red]\x1b[31m\ny") == "[red]x[/red] [31m y"


def test_on_a_narrow_terminal_the_sentence_stands_below_its_row() -> None:
    columns = ("JOB", "STATE", "VERDICT")
    rows = [("job-1", "running", "All 8 ranks are even."), ("job-22", None, "Finished at step 9.")]
    wide = [click.unstyle(line) for line in render.table_lines(columns, rows, None)]
    assert wide == [
        "JOB     STATE    VERDICT",
        "job-1   running  All 8 ranks are even.",
        "job-22  -        Finished at step 9.",
    ]
    assert [click.unstyle(line) for line in render.table_lines(columns, rows, 38)] == wide
    narrow = [click.unstyle(line) for line in render.table_lines(columns, rows, 20)]
    assert narrow == [
        "JOB     STATE",
        "job-1   running",
        "    All 8 ranks are",
        "    even.",
        "job-22  -",
        "    Finished at step",
        "    9.",
    ]


def test_numbers_in_a_row_are_a_range() -> None:
    assert render.ranges([5, 0, 1, 2]) == "0-2, 5"
    assert render.ranges([]) is None
