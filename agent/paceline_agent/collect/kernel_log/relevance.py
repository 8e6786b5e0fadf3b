"""Which lines of a kernel log can matter: a quick check before a line is parsed.

Kernels repeat themselves. With its digits removed, a line has one of a few thousand shapes, so most
answers come from a cache. It is exact in one direction: a line that is not relevant holds no text
that any rule looks for.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from paceline_agent.collect.kernel_log.rules import Rule

_DIGITS = b"0123456789"
_SHAPES_AT_MOST = 1 << 14
# Text that `Recognizer` searches for besides the hints of the rules.
_OTHER_HINTS = (
    *("Xid", "Machine Check", "NVRM: GPU at ", "erial ", "NVRM: The NVIDIA GPU "),
    *("fallen off the bus", "pci ", "Kill process "),
    *(": renamed from ", ": firmware version: ", "ink ", "Cable plugged"),
)
# A hint may be escaped, or a message may be written as a list of bytes.
_ENCODED = ("\\x", "\\u", ", , , ", ",,,,", "#")


class RelevantLines:
    """Remembers the shapes of lines that were seen, and whether they are relevant."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        hints = {*(rule.hint for rule in rules), *_OTHER_HINTS, *_ENCODED}
        self._hints = sorted({_shape(hint.encode()) for hint in hints}, key=len)
        self._known: dict[bytes, bool] = {}

    def matches(self, line: bytes) -> bool:
        """Return whether the line may hold something that a rule looks for."""
        shape = line.translate(None, _DIGITS)
        known = self._known.get(shape)
        if known is None:
            if len(self._known) >= _SHAPES_AT_MOST:
                self._known.clear()
            known = self._known[shape] = any(hint in shape for hint in self._hints)
        return known


class RuleMatcher:
    """Finds the rule of a message; remembers the answer, because messages repeat."""

    def __init__(self, rules: Iterable[Rule]) -> None:
        self._rules = [(_shape(rule.hint.encode()), rule) for rule in rules]
        self._candidates: dict[bytes, tuple[Rule, ...]] = {}  # by the shape of a message
        self.find = lru_cache(maxsize=4096)(self._find)

    def _find(self, message: str) -> tuple[Rule, dict[str, str | None]] | None:
        """Return the first rule that matches, with its named groups."""
        shape = _shape(message.encode(errors="replace"))
        candidates = self._candidates.get(shape)
        if candidates is None:
            if len(self._candidates) >= _SHAPES_AT_MOST:
                self._candidates.clear()
            candidates = tuple(rule for hint, rule in self._rules if hint in shape)
            self._candidates[shape] = candidates
        for rule in candidates:
            if rule.hint in message and (match := rule.pattern.match(message)) is not None:
                return rule, match.groupdict()
        return None


def _shape(text: bytes) -> bytes:
    return text.translate(None, _DIGITS)
