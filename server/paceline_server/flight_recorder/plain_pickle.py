"""Read a pickle that is plain data, without Python's unpickler.

A Flight Recorder dump is a pickle of dicts, lists, tuples, strings and numbers. This machine knows
the opcodes for those and no others: there is none that imports, calls, builds an object or looks
up an extension or a persistent id, so a hostile pickle has nothing to ask for. What Python's own
unpickler allocates on the pickle's word (a length, a memo index) is checked against the bytes that
are there. Opcodes: `pickletools` in the standard library.
"""

from __future__ import annotations

import struct
from typing import Any

from paceline_server.flight_recorder.errors import HostileDumpError, MalformedDumpError

# More marks open at once than this is not a dump: a real one needs six.
_OPEN_MARKS_LIMIT = 64
# Integers of a dump are at most 64 bits wide, signed or not.
_INTEGER_BYTES_LIMIT = 9
_INTEGER_DIGITS_LIMIT = 20

_CONSTANTS = {b"N": None, b"\x88": True, b"\x89": False}
_EMPTY = {b"]": list, b"}": dict, b")": tuple}
# opcode -> (format of the number that follows, as `struct` writes it)
_NUMBERS = {b"J": "<i", b"K": "<B", b"M": "<H", b"G": ">d"}
# opcode -> (format of the length that precedes the bytes, whether they are text)
_STRINGS = {
    b"X": ("<I", True),
    b"\x8c": ("<B", True),
    b"\x8d": ("<Q", True),
    b"T": ("<i", True),
    b"U": ("<B", True),
    b"B": ("<I", False),
    b"C": ("<B", False),
    b"\x8e": ("<Q", False),
}
_LONGS = {b"\x8a": "<B", b"\x8b": "<i"}
_GETS = {b"h": "<B", b"j": "<I"}
_PUTS = {b"q": "<B", b"r": "<I"}
_TUPLES = {b"\x85": 1, b"\x86": 2, b"\x87": 3}
# What only a pickle of objects holds, by name for the sentence that refuses it.
_REFUSED = {
    b"c": "imports a global (GLOBAL)",
    b"\x93": "imports a global (STACK_GLOBAL)",
    b"i": "makes an instance (INST)",
    b"o": "makes an instance (OBJ)",
    b"\x81": "makes an instance (NEWOBJ)",
    b"\x92": "makes an instance (NEWOBJ_EX)",
    b"R": "calls a function (REDUCE)",
    b"b": "sets an object's state (BUILD)",
    b"P": "asks for a persistent object (PERSID)",
    b"Q": "asks for a persistent object (BINPERSID)",
    b"\x82": "asks for an extension (EXT1)",
    b"\x83": "asks for an extension (EXT2)",
    b"\x84": "asks for an extension (EXT4)",
    b"\x8f": "makes a set (EMPTY_SET)",
    b"\x90": "makes a set (ADDITEMS)",
    b"\x91": "makes a set (FROZENSET)",
    b"\x96": "makes a byte array (BYTEARRAY8)",
    b"\x97": "asks for an outside buffer (NEXT_BUFFER)",
    b"\x98": "asks for an outside buffer (READONLY_BUFFER)",
}


def load(data: bytes) -> Any:
    """The plain data in `data`.

    Raises HostileDumpError if it asks for anything but data, MalformedDumpError if it is no
    pickle or is cut off. The messages continue a sentence that begins with the file's name.
    """
    try:
        return _Machine(data).run()
    except (IndexError, struct.error, ValueError, TypeError, KeyError) as error:
        raise MalformedDumpError("is not a whole pickle") from error


class _Machine:
    def __init__(self, data: bytes) -> None:
        self._data = data
        self._at = 0
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each open mark
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        data = self._data
        while True:
            opcode = data[self._at : self._at + 1]
            self._at += 1
            if opcode == b".":
                if self._below or len(self._stack) != 1:
                    raise ValueError("values left over")
                return self._stack[0]
            self._step(opcode)

    def _step(self, opcode: bytes) -> None:
        # Ordered by how often a dump holds them.
        stack = self._stack
        if opcode in _GETS:
            stack.append(self._memo[self._number(_GETS[opcode])])
        elif opcode in _NUMBERS:
            stack.append(self._number(_NUMBERS[opcode]))
        elif opcode in _STRINGS:
            stack.append(self._string(*_STRINGS[opcode]))
        elif opcode in _PUTS:
            self._memo[self._number(_PUTS[opcode])] = stack[-1]
        elif opcode == b"\x94":
            self._memo[len(self._memo)] = stack[-1]
        elif opcode in _CONSTANTS:
            stack.append(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            stack.append(_EMPTY[opcode]())
        elif opcode == b"(":
            self._open_mark()
        elif opcode in _TUPLES:
            count = _TUPLES[opcode]
            if len(stack) < count:
                raise IndexError("nothing to put into a tuple")
            stack[-count:] = [tuple(stack[-count:])]
        elif opcode in _LONGS:
            stack.append(self._long(_LONGS[opcode]))
        elif opcode in _COLLECT:
            _COLLECT[opcode](self)
        elif opcode in _REFUSED:
            raise HostileDumpError(f"{_REFUSED[opcode]}, which no dump does: refused, not executed")
        else:
            raise ValueError(f"no such opcode: {opcode!r}")

    def _take(self, size: int) -> bytes:
        if size < 0 or self._at + size > len(self._data):
            raise IndexError("past the end")
        taken = self._data[self._at : self._at + size]
        self._at += size
        return taken

    def _line(self) -> bytes:
        end = self._data.index(b"\n", self._at)
        return self._take(end + 1 - self._at)[:-1]

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def _string(self, form: str, text: bool) -> str | bytes:
        taken = self._take(self._number(form))
        return taken.decode("utf-8", "replace") if text else taken

    def _long(self, form: str) -> int:
        size = self._number(form)
        if size > _INTEGER_BYTES_LIMIT:
            raise HostileDumpError(f"holds an integer of {size} bytes, which no dump does: refused")
        return int.from_bytes(self._take(size), "little", signed=True)

    def _decimal(self) -> None:
        """INT and LONG of protocol 0; `I01` and `I00` are how it writes booleans."""
        line = self._line().rstrip(b"L")
        if len(line) > _INTEGER_DIGITS_LIMIT:
            raise HostileDumpError(
                f"holds an integer of {len(line)} digits, which no dump does: refused"
            )
        self._stack.append({b"01": True, b"00": False}.get(line, int(line)))

    def _open_mark(self) -> None:
        if len(self._below) >= _OPEN_MARKS_LIMIT:
            raise HostileDumpError(
                f"nests more than {_OPEN_MARKS_LIMIT} levels, which no dump does: refused"
            )
        self._below.append(self._stack)
        self._stack = []

    def _close_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _gather(self, kind: type[tuple[Any, ...]] | type[list[Any]]) -> None:
        items = self._close_mark()
        self._stack.append(kind(items))

    def _append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError("appends to what is not a list")
        target.extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise TypeError("sets items of what is not a dict")
        for key, value in zip(items[::2], items[1::2], strict=True):
            # A tuple as a key would be hashed, which is exponential in its nesting.
            if type(key) not in (str, int, bytes):
                raise HostileDumpError("has a key that is no string or number: refused")
            target[key] = value

    def _set_one(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def _new_dict(self) -> None:
        items = self._close_mark()
        self._stack.append({})
        self._set(items)

    def _text_line(self) -> None:
        self._stack.append(self._line().decode("raw-unicode-escape"))

    def _quoted_line(self) -> None:
        line = self._line().strip()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise ValueError("a string without quotes")
        self._stack.append(line[1:-1].decode("utf-8", "replace"))


# The opcodes that gather, or that only protocol 0 writes.
_COLLECT = {
    b"\x80": lambda m: m._take(1),  # PROTO
    b"\x95": lambda m: m._take(8),  # FRAME: only a hint to readers of streams
    b"a": lambda m: m._append(),
    b"e": lambda m: m._extend(m._close_mark()),
    b"s": lambda m: m._set_one(),
    b"u": lambda m: m._set(m._close_mark()),
    b"t": lambda m: m._gather(tuple),
    b"l": lambda m: m._gather(list),
    b"d": lambda m: m._new_dict(),
    b"0": lambda m: m._stack.pop(),
    b"1": lambda m: m._close_mark(),
    b"I": lambda m: m._decimal(),
    b"L": lambda m: m._decimal(),
    b"F": lambda m: m._stack.append(float(m._line())),
    b"V": lambda m: m._text_line(),
    b"S": lambda m: m._quoted_line(),
    b"p": lambda m: m._memo.__setitem__(int(m._line()), m._stack[-1]),
    b"g": lambda m: m._stack.append(m._memo[int(m._line())]),
}
