"""A skipped line would not have been an event, and would not have changed another event."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from paceline_agent.collect.kernel_log import Recognizer, records_of
from paceline_agent.collect.kernel_log.recognize import KernelEvent
from paceline_agent.collect.kernel_log.relevance import RelevantLines
from paceline_agent.collect.kernel_log.rules import RULES
from paceline_agent.collect.kernel_log.source import KernelLogFile

FIXTURES = Path(__file__).parents[2] / "fixtures" / "kmsg"
# Every message in the tests of the recognizer, event or not.
MESSAGES = sorted(
    {
        node.value
        for node in ast.walk(ast.parse(Path(__file__).with_name("test_recognize.py").read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and "\n" not in node.value
    }
)
NOISE = [
    "usb 1-1: new high-speed USB device number 2 using xhci_hcd",
    "IPv6: ADDRCONF(NETDEV_CHANGE): eth0: link becomes ready",
    "systemd[1]: Started Session 12 of user root.",
]


def events_of(lines: list[str], recognizer: Recognizer) -> list[KernelEvent]:
    found = [recognizer.recognize(r.message, r.times) for line in lines for r in records_of(line)]
    return [event for event in found if event is not None]


def events_of_file(path: Path) -> list[KernelEvent]:
    """Return the events of a file as the collector reads it."""
    log, recognizer = KernelLogFile(path, RelevantLines(RULES).matches), Recognizer()
    found = []
    while not log.drained:
        for line in log.read_lines(7):
            recognizer.skip(line.skipped)
            found += events_of([line.text], recognizer)
    return found + events_of([line.text for line in log.last_line()], recognizer)


OFF_BUS = "NVRM: GPU 0000:83:00.0: GPU has fallen off the bus."


@settings(max_examples=150)
@example(messages=[OFF_BUS, *[""] * 38, OFF_BUS], raw=False)
@given(st.lists(st.sampled_from([*MESSAGES, *NOISE]), max_size=40), st.booleans())
def test_skipping_lines_changes_no_event(
    tmp_path_factory: pytest.TempPathFactory, messages: list[str], raw: bool
) -> None:
    lines = [f"6,{i},{i},-;{text}" if raw else text for i, text in enumerate(messages)]
    path = tmp_path_factory.mktemp("log") / "kmsg"
    path.write_text("".join(f"{line}\n" for line in lines))
    assert events_of_file(path) == events_of(lines, Recognizer())


@pytest.mark.parametrize("path", sorted(FIXTURES.rglob("*.*")), ids=lambda path: path.name)
def test_real_logs_give_the_same_events(path: Path) -> None:
    try:
        text = path.read_text(errors="replace")
    except OSError:
        pytest.skip("not a file")
    assert events_of_file(path) == events_of(text.split("\n"), Recognizer())


@pytest.mark.parametrize(
    "line",
    [
        json.dumps(
            {"MESSAGE": list(b"NVRM: Xid (PCI:0000:01:00): 48\xff"), "_TRANSPORT": "kernel"}
        ),
        '{"MESSAGE":[78,86,82,77,58,32]}',
        "6,1,1,-;first\\x0aNVRM: Xid (PCI:0000:01:00): 48",
        "kernel: x#012NVRM: Xid (PCI:0000:01:00): 48",
    ],
)
def test_an_encoded_message_is_never_skipped(line: str) -> None:
    assert RelevantLines(RULES).matches(line.encode())


def test_ordinary_lines_are_skipped() -> None:
    lines = RelevantLines(RULES)
    assert [line for line in NOISE if lines.matches(line.encode())] == [NOISE[1]]


@pytest.mark.parametrize("ending", ["", "\n"])
def test_a_long_line_without_an_end_holds_bounded_memory(tmp_path: Path, ending: str) -> None:
    path = tmp_path / "kmsg"
    path.write_bytes(b"\0\xff" * (1 << 20) + ending.encode() + b"NVRM: Xid (PCI:0000:01:00): 48\n")
    log = KernelLogFile(path, RelevantLines(RULES).matches)
    while not log.drained:
        log.read_lines(100)
        assert len(log._partial) <= 1 << 17
