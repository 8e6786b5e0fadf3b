"""Output of `nccl-tests`: its tables, checks on them, and comparison of files.

A table looks like this (https://github.com/NVIDIA/nccl-tests, src/common.cu); columns differ
between versions and tests and are found by name:

    #       size         count      type   redop    root     time   algbw   busbw #wrong ...
    #        (B)    (elements)                               (us)  (GB/s)  (GB/s)        ...
         8388608       2097152     float     sum      -1    151.1   55.52  104.10      0 ...
    # Out of bounds values : 0 OK
    # Avg bus bandwidth    : 83.1

The JSON file that `-J FILE` writes is read too.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence

import msgspec

from paceline_cli.preflight.verdict import Check, Status, faults, listing, skipped

_FAIL_RATIO, _WARN_RATIO = 0.8, 0.92
_DIP_RATIO = 0.7  # share of the best so far: bus bandwidth should not fall with the size
_DIP_FROM_BYTES = 1 << 20
_OUT_OF_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(\d+)\s*(\S+)")
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:\s*([0-9.]+)")
_TEST = re.compile(r"\b([a-z]+(?:_[a-z]+)*_perf)\b")
# Prefixes of launchers: `[1,0]<stdout>:`, `[job@1,0]<stdout>:`, `0: `, `node: `, a time.
_PREFIX = re.compile(r"^\s*(?:(?:\[[^\]]*\]|<std\w+>:?|[\w.@-]+:(?=\s)|\d+-\d\d-\d\dT\S+)\s*)+")
_TIMES = ("time", "cputime")
_FAILURE = re.compile(r"Test (?:NCCL|CUDA) failure.*|.*Test failure.*")
_WARNING = re.compile(r".*NCCL WARN.*")


class NcclTestRow(msgspec.Struct, frozen=True):
    size_bytes: int
    in_place: bool
    time_seconds: float
    bus_gigabytes_per_second: float
    wrong: int | None  # None: the check was disabled


class Output(msgspec.Struct, frozen=True):
    test: str | None
    rows: list[NcclTestRow]
    out_of_bounds: int | None
    average_gigabytes_per_second: float | None
    failures: list[str]
    is_whole: bool  # it ends with the summary
    warnings: list[str] = []  # warnings of NCCL; the reason if the run failed

    @property
    def trouble(self) -> list[str]:
        """Return the error that ended the run, if any.

        A warning alone is not one, because NCCL also warns about fallbacks.
        """
        return (self.failures or ([] if self.is_whole else self.warnings))[:1]

    @property
    def best(self) -> float:
        return max((row.bus_gigabytes_per_second for row in self.rows), default=0.0)

    @property
    def is_checked(self) -> bool:
        return any(row.wrong is not None for row in self.rows)

    @property
    def wrong(self) -> int:
        return sum(row.wrong or 0 for row in self.rows) + (self.out_of_bounds or 0)


class _Timing(msgspec.Struct, frozen=True):
    bus_bw: float | str  # "nan"
    time: float | str | None = None
    cpu_time: float | str | None = None
    nwrong: float | None = None

    def row(self, size_bytes: int, in_place: bool) -> NcclTestRow:
        return NcclTestRow(
            size_bytes=size_bytes,
            in_place=in_place,
            time_seconds=float(self.time or self.cpu_time or "nan") / 1e6,
            bus_gigabytes_per_second=float(self.bus_bw),
            wrong=None if self.nwrong is None else int(self.nwrong),
        )


class _Size(msgspec.Struct, frozen=True):
    size: int
    out_of_place: _Timing | None = None
    in_place: _Timing | None = None


class _OutOfBounds(msgspec.Struct, frozen=True):
    count: int


class _Average(msgspec.Struct, frozen=True):
    bandwidth: float | str


class _NcclTestFile(msgspec.Struct, frozen=True):
    """The file that `-J` writes; `NVIDIA/nccl-tests`, src/util.cu."""

    results: list[_Size]
    args: list[str | None] = []
    out_of_bounds: _OutOfBounds | None = None
    average_bus_bandwidth: _Average | None = None
    errors: list[str | None] = []


_decoder = msgspec.json.Decoder(_NcclTestFile)


def parse(text: str) -> Output:
    """Parse what is readable: a log may be truncated, and output of ranks may be mixed."""
    if text.lstrip().startswith("{"):
        try:
            return _from_json(_decoder.decode(text))
        except (msgspec.DecodeError, ValueError, OverflowError) as error:
            return Output(None, [], None, None, [f"is no JSON of nccl-tests: {error}"], False)
    return _from_tables(text)


def _from_json(file: _NcclTestFile) -> Output:
    rows = [
        timing.row(each.size, bool(in_place))
        for each in file.results
        for in_place, timing in enumerate((each.out_of_place, each.in_place))
        if timing is not None
    ]
    test = _TEST.search(" ".join(filter(None, file.args[:1])))
    average = file.average_bus_bandwidth
    return Output(
        test=test[1] if test else None,
        rows=[row for row in rows if math.isfinite(row.bus_gigabytes_per_second)],
        out_of_bounds=file.out_of_bounds.count if file.out_of_bounds else None,
        average_gigabytes_per_second=float(average.bandwidth) if average else None,
        failures=[each for each in file.errors if each],
        is_whole=average is not None,
    )


def _from_tables(text: str) -> Output:
    columns: list[str] = []
    rows: list[NcclTestRow] = []
    for line in text.splitlines():
        words = _after_prefix(line)
        if "busbw" in words and "size" in words:
            columns = words[words.index("size") :]
        elif columns and words and words[0].isdecimal():
            rows += _rows(columns, words)
    bounds, average, test = (p.search(text) for p in (_OUT_OF_BOUNDS, _AVERAGE, _TEST))
    return Output(
        test=test[1] if test else None,
        rows=rows,
        out_of_bounds=int(bounds[1]) if bounds else None,
        average_gigabytes_per_second=float(average[1]) if average else None,
        failures=[each.strip() for each in _FAILURE.findall(text)],
        is_whole="Avg bus bandwidth" in text,
        warnings=[each.strip() for each in _WARNING.findall(text)],
    )


def _after_prefix(line: str) -> list[str]:
    return _PREFIX.sub("", line).replace("#wrong", "wrong").lstrip("# ").split()


def _rows(columns: Sequence[str], words: Sequence[str]) -> Iterator[NcclTestRow]:
    """Yield the out-of-place row, then the in-place row; each begins with its time."""
    starts = [position for position, name in enumerate(columns) if name in _TIMES]
    for number, start in enumerate(starts):
        end = starts[number + 1] if number + 1 < len(starts) else len(columns)
        named = dict(zip(columns[start:end], words[start:end], strict=False))
        try:
            yield NcclTestRow(
                size_bytes=int(words[0]),
                in_place=number == 1,
                time_seconds=float(named[columns[start]]) / 1e6,
                bus_gigabytes_per_second=float(named["busbw"]),
                wrong=_count(named.get("wrong") or named.get("error")),
            )
        except (KeyError, ValueError):  # truncated, or N/A
            continue


def _count(word: str | None) -> int | None:
    """Parse a count such as `0`, `0e+00` or `N/A`."""
    try:
        return None if word is None else int(float(word))
    except (ValueError, OverflowError):
        return None


def checks(outputs: Mapping[str, Output]) -> Iterator[Check]:
    """Yield the checks of all files; `outputs` is by file name."""
    readable = {name: each for name, each in outputs.items() if each.rows}
    empty = {
        name: [*(each.trouble or ["holds no table of nccl-tests"])]
        for name, each in outputs.items()
        if not each.rows
    }
    if empty:
        yield faults("nccl-tests read", empty, "give the whole output of, say, all_reduce_perf", "")
    if not readable:
        return
    wrong = {
        name: [f"{each.wrong} wrong values"] if each.wrong else each.trouble
        for name, each in readable.items()
    }
    fix = "do not train on these nodes: halve the set until the one that computes wrongly is left"
    results = faults("nccl-tests results", wrong, fix, "all values right")
    unchecked = [name for name, each in readable.items() if not each.is_checked]
    if results.status == "pass" and unchecked:
        why = f"values were not checked (-c 0): {listing(unchecked)}"
        results = skipped("nccl-tests results", why)
    yield results
    yield _warnings(readable)
    yield _ends(readable)
    yield _dips(readable)
    yield _compared(readable)


def _warnings(outputs: Mapping[str, Output]) -> Check:
    found = {name: each.warnings[:1] if each.is_whole else [] for name, each in outputs.items()}
    fix = "it ran all the same, perhaps over another network: look for what could not be used"
    return faults("nccl-tests warnings", found, fix, "none of NCCL", status="warn")


def _ends(outputs: Mapping[str, Output]) -> Check:
    found = {
        name: [] if each.is_whole else [f"stops after {each.rows[-1].size_bytes} bytes"]
        for name, each in outputs.items()
    }
    fix = "it was killed, or hangs: run it again, with NCCL_DEBUG=INFO"
    return faults("nccl-tests end", found, fix, "each has its summary", status="warn")


def _dips(outputs: Mapping[str, Output]) -> Check:
    found = {name: list(_dips_of(each)) for name, each in outputs.items()}
    fix = "look at NCCL_ALGO, NCCL_PROTO and buffers, or for congestion: run it again"
    return faults("nccl-tests curve", found, fix, "grows with the size", status="warn")


def _dips_of(output: Output) -> Iterator[str]:
    for in_place in (False, True):
        best, size_bytes = 0.0, 0
        for row in (each for each in output.rows if each.in_place == in_place):
            speed = row.bus_gigabytes_per_second
            if row.size_bytes < size_bytes:
                best = 0.0  # start of another table
            size_bytes = row.size_bytes
            if row.size_bytes >= _DIP_FROM_BYTES and speed < _DIP_RATIO * best:
                where = "in place" if in_place else "out of place"
                yield f"{speed:g} GB/s at {row.size_bytes} bytes {where}, {best:g} before"
                break
            best = max(best, speed)


def _compared(outputs: Mapping[str, Output]) -> Check:
    """Compare files of the same test, for example one per pair of nodes."""
    name = "nccl-tests bandwidth"
    shown = [f"{file}: {each.best:g} GB/s" for file, each in outputs.items()]
    tests = {each.test for each in outputs.values()}
    if len(outputs) == 1:
        return Check(name=name, status="pass", evidence=f"{shown[0]} at best")
    if len(tests) > 1:
        return skipped(name, f"different tests: {listing(shown)}")
    usual = statistics.median_high(each.best for each in outputs.values())
    slow = [file for file, each in outputs.items() if each.best < _WARN_RATIO * usual]
    if not slow:
        return Check(name=name, status="pass", evidence=listing(shown))
    failed = any(outputs[file].best < _FAIL_RATIO * usual for file in slow)
    status: Status = "fail" if failed else "warn"
    words = [f"{file}: {outputs[file].best:g} GB/s" for file in slow]
    return Check(
        name=name,
        status=status,
        evidence=f"{listing(words)}; usual {usual:g} GB/s",
        fix="look at the nodes of these files",
        nodes=slow,
    )
