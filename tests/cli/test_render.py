"""Texts of the command line."""

import pytest

from paceline_cli import render


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1023, "1,020 B"),
        (1024, "1 KiB"),
        (1_044_484, "1,020 KiB"),
        (1_023_500, "1,000 KiB"),
        (809 << 20, "809 MiB"),
        (54 << 30, "54 GiB"),
        (5000 << 40, "5,000 TiB"),
    ],
)
def test_sizes_have_three_digits_and_no_exponent(value, text):
    assert render.size(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.012, "0.012"), (24.44, "24.4"), (999.4, "999"), (999.7, "1,000"), (7200.3, "7,200")],
)
def test_numbers_have_no_exponent(value, text):
    assert render.number(value) == text


def test_a_line_from_the_log_of_a_job_cannot_control_the_terminal(capsys):
    render.show_line("Rank 3 ended: \x1b]0;title\x07 \x1b[31mboom\n  at é")
    assert capsys.readouterr().out == "Rank 3 ended:  ]0;title   [31mboom   at é\n"
    frame = {"function": "f\x1b[2J", "file": "a.py", "line": 1}
    thread = {"name": "main\r", "holds_gil": False, "frames": [frame]}
    render.show_stacks({"rank": 0, "threads": [thread]})
    assert not {"\x1b", "\r"} & set(capsys.readouterr().out)


def test_a_table_without_a_standard_output_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)  # as in `paceline jobs >&-`, or below a daemon
    render.show_table(("JOB",), [("job-1",)], "No job.")
