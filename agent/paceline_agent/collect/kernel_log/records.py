"""Lines of a kernel log in any format: raw, dmesg, journal, syslog.

Raw records (Documentation/ABI/testing/dev-kmsg) have a sequence number and the microseconds since
boot of a clock that stops during suspend. Text lines have the prefix of the program that wrote
them.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from functools import lru_cache

import msgspec


@dataclass(frozen=True, slots=True)
class Record:
    """One message; `boot_us` is since boot, `wall_ns` is CLOCK_REALTIME if the text has it."""

    message: str
    boot_us: int | None = None
    sequence: int | None = None
    wall_ns: int | None = None
    times: int = 1  # syslog writes a repeated message once, with a count

    @property
    def seconds(self) -> float | None:
        """Seconds on the clock of the record, for intervals between records of one log."""
        if self.boot_us is not None:
            return self.boot_us / 1e6
        return None if self.wall_ns is None else self.wall_ns / 1e9


_RAW = re.compile(r"(\d+),(\d{1,18}),(\d{1,18}),[^;]*;(.*)", re.DOTALL)
# dmesg -J and journalctl -o json-pretty write one line per field.
_OF_PRETTY_JSON = re.compile(r'"(?:msg|MESSAGE)" ?: *(".*"),?')
# Field names of the journal and its forwarders: rsyslog, Vector, Fluent Bit, dmesg through jq.
_PROGRAM = ("_TRANSPORT", "SYSLOG_IDENTIFIER", "program", "programname", "app-name", "appname")
_MESSAGE = ("MESSAGE", "message", "msg")
_NEWLINE_OF_SYSLOG = "#012"  # rsyslog's $EscapeControlCharactersOnReceive
_ESCAPE = re.compile(r"\\x([0-9a-f]{2})")
_DELTA = r"(?: <\s*\d+\.\d+[ *]?>)?"  # dmesg -d, journalctl -o short-delta
_BOOT_SECONDS = re.compile(rf"\[\s*(\d{{1,12}})\.(\d{{1,9}}){_DELTA}\s*\]\s?")
_CTIME = re.compile(  # month names in any language
    rf"\[(\w+\.? \w+\.? [ \d]\d \d\d:\d\d:\d\d \d{{4}}){_DELTA}\] ?"
)
_ISO = re.compile(
    r"(?:\w{3} )?(\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d)(?:[.,](\d{1,9}))?"
    r"(Z| UTC|[+-]\d\d:?\d\d| [+-]\d\d(?:\d\d)?(?= \S+ kernel:))?"
    r"(?: [A-Z]{2,5}(?= \S+ kernel:))?"  # journalctl: name of the local time zone
    r"(?:\]:)?\s+(?=\S)"
)
_UNIX = re.compile(r"(\d{9,11})\.(\d{6}) (?=\S+ kernel: )")
_REPEATED = re.compile(r"message repeated (\d{1,6}) times: \[ ?(?:\[ *\d+\.\d+\] )?(.*)\]")
_ORNAMENTS = re.compile(
    r"<\d+>"  # priority
    r"|\w+ *: ?(?:emerg|alert|crit|err|warn|notice|info|debug) *: "  # dmesg -x
    r"|(?:\S+: )?kern: +\w+: \[(?=\d{4}-)"  # talosctl dmesg
    r"|\[(?:\w{3} ?\d+ \d\d:\d\d|\s*\+\d+\.\d+|\.\.\.)\] ?"  # dmesg -e
    r"|\[<\s*\d+\.\d+>\] ?"  # dmesg -t -d
    r"|\[\s*[TC]\d+\]:? ?"  # the caller, with CONFIG_PRINTK_CALLER
    r"|\w+\.? [ \d]\d \d\d:\d\d:\d\d(?:\.\d+)? "  # syslog: no year; the journal: any language
    r"|\d (?=\d{4}-)"  # version field of RFC 5424
    r"|(?:\S+ )?kernel(?:(?:\[\d+\])?: ?| - \S+ - )"
    r"|MESSAGE="  # journalctl -o export, and verbose
)


def records_of(line: str) -> Iterator[Record]:
    """Yield the records of a line: none, or one for each line of its message."""
    line = line.rstrip("\r\n")
    if not line or line[0] in " \t":  # a raw record's key=value, or an indent
        stripped = line.strip()
        if quoted := _OF_PRETTY_JSON.fullmatch(stripped):
            with contextlib.suppress(msgspec.DecodeError):
                yield Record(msgspec.json.decode(quoted[1], type=str).strip())
        elif stripped and not re.match(r"(SUBSYSTEM|DEVICE)=", stripped):
            yield Record(stripped.removeprefix("MESSAGE="))
        return
    raw = _RAW.match(line)
    if raw is not None:
        message = _ESCAPE.sub(lambda escape: chr(int(escape[1], 16)), raw[4])
        for part in message.split("\n"):
            yield Record(part.strip(), boot_us=int(raw[3]), sequence=int(raw[2]))
    elif line.startswith("{") and line.endswith("}"):
        yield from _of_journal(line)
    else:
        first, *more = line.split(_NEWLINE_OF_SYSLOG)
        record = _of_text(first)
        yield record
        for part in more:
            yield replace(record, message=part.strip())


def _of_text(line: str) -> Record:
    boot_us: int | None = None
    wall_ns: int | None = None
    at = 0
    while True:
        if found := _BOOT_SECONDS.match(line, at):
            boot_us = int(found[1]) * 1_000_000 + int(found[2].ljust(9, "0")) // 1000
        elif found := _CTIME.match(line, at):
            wall_ns = _local_ns(found[1])
        elif found := _ISO.match(line, at):
            wall_ns = _iso_ns(found[1], found[2], found[3])
        elif found := _UNIX.match(line, at):
            wall_ns = int(found[1]) * 1_000_000_000 + int(found[2]) * 1000
        else:
            found = _ORNAMENTS.match(line, at)
        if found is None or found.end() == at:
            message, times = line[at:].strip(), 1
            if repeated := _REPEATED.fullmatch(message):
                times, message = int(repeated[1]), repeated[2]
            return Record(message, boot_us=boot_us, wall_ns=wall_ns, times=times)
        at = found.end()


def _of_journal(line: str) -> Iterator[Record]:
    try:
        fields = msgspec.json.decode(line, type=dict[str, object])
    except msgspec.DecodeError:
        return
    programs = [fields[name] for name in _PROGRAM if name in fields]
    if programs and "kernel" not in programs:
        return  # from a program, which may quote the kernel
    message = next((fields[name] for name in _MESSAGE if name in fields), None)
    stamp = fields.get("__REALTIME_TIMESTAMP")
    wall_ns = int(stamp) * 1000 if isinstance(stamp, str) and stamp.isdecimal() else None
    if isinstance(message, list):  # the journal writes bytes for a message that is not UTF-8
        with contextlib.suppress(TypeError, ValueError):
            message = bytes(message).decode(errors="replace")
    if isinstance(message, str):
        for part in message.split("\n"):
            yield Record(_of_text(part).message, wall_ns=wall_ns)


@lru_cache(maxsize=1024)
def _local_ns(text: str) -> int | None:
    """Parse the local time of `dmesg -T`; the time zone is assumed to be this machine's."""
    try:
        return int(time.mktime(time.strptime(text, "%a %b %d %H:%M:%S %Y"))) * 1_000_000_000
    except (ValueError, OverflowError):
        return None


@lru_cache(maxsize=1024)
def _iso_ns(text: str, fraction: str | None, zone: str | None) -> int | None:
    try:
        offset = (zone or "").strip().replace("UTC", "Z")
        seconds = datetime.fromisoformat(text + offset).timestamp()
    except (ValueError, OverflowError):
        return None
    return int(seconds) * 1_000_000_000 + int((fraction or "0").ljust(9, "0"))
