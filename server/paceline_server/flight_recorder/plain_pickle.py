"""Read a pickle that is plain data, without Python's unpickler.

A Flight Recorder dump is a pickle of dicts, lists, tuples, strings and numbers. This reader
implements only the opcodes for those: none imports, calls, builds an object or looks up an
extension or persistent id, so a hostile pickle cannot run anything. Lengths and memo indexes, for
which Python's unpickler allocates memory, are checked against the available bytes. Opcodes:
`pickletools` in the standard library.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from itertools import islice
from typing import Any

from paceline_server.flight_recorder.errors import HostileDumpError, MalformedDumpError

# Limit of opcodes: 20,000 entries with 30 frames have 8 million. An opcode of one byte may take
# a hundred bytes of memory, and a microsecond.
_OPCODES_LIMIT = 1 << 24
# Limit of simultaneously open marks; a real dump needs six.
_OPEN_MARKS_LIMIT = 64
# Integers of a dump are at most 64 bits wide, signed or not.
_INTEGER_BYTES_LIMIT = 9
_INTEGER_DIGITS_LIMIT = 20

# Opcodes that occur only in pickles of objects, with their names for the error message.
_REFUSED = {
    0x63: "imports a global (GLOBAL)",
    0x93: "imports a global (STACK_GLOBAL)",
    0x69: "makes an instance (INST)",
    0x6F: "makes an instance (OBJ)",
    0x81: "makes an instance (NEWOBJ)",
    0x92: "makes an instance (NEWOBJ_EX)",
    0x52: "calls a function (REDUCE)",
    0x62: "sets an object's state (BUILD)",
    0x50: "asks for a persistent object (PERSID)",
    0x51: "asks for a persistent object (BINPERSID)",
    0x82: "asks for an extension (EXT1)",
    0x83: "asks for an extension (EXT2)",
    0x84: "asks for an extension (EXT4)",
    0x8F: "makes a set (EMPTY_SET)",
    0x90: "makes a set (ADDITEMS)",
    0x91: "makes a set (FROZENSET)",
    0x96: "makes a byte array (BYTEARRAY8)",
    0x97: "asks for an outside buffer (NEXT_BUFFER)",
    0x98: "asks for an outside buffer (READONLY_BUFFER)",
}


def load(data: bytes) -> Any:
    """Return the plain data in `data`.

    Raises HostileDumpError if it needs anything but data, MalformedDumpError if it is not a
    pickle or is truncated. The messages continue a sentence that begins with the file's name.
    """
    try:
        return _Machine(data).run()
    except (StopIteration, IndexError, struct.error, ValueError, TypeError, KeyError) as error:
        raise MalformedDumpError("is not a whole pickle") from error


class _Machine:
    def __init__(self, data: bytes) -> None:
        self._bytes = iter(data)  # takes a third of the time of indexing
        self._stack: list[Any] = []
        self._below: list[list[Any]] = []  # the stacks under each open mark
        self._memo: dict[int, Any] = {}

    def run(self) -> Any:
        """Execute the pickle.

        The most frequent opcodes are handled here, the others with a table.
        """
        following, memo, stack = self._bytes, self._memo, self._stack
        for opcode in islice(following, _OPCODES_LIMIT):
            if opcode == 0x68:  # BINGET
                stack.append(memo[next(following)])
            elif opcode == 0x4B:  # BININT1
                stack.append(next(following))
            elif opcode == 0x28:  # MARK
                self._open_mark()
                stack = self._stack
            elif opcode == 0x5D:  # EMPTY_LIST
                stack.append([])
            elif opcode == 0x65:  # APPENDS
                self._extend(self._close_mark())
                stack = self._stack
            elif opcode == 0x7D:  # EMPTY_DICT
                stack.append({})
            elif opcode == 0x75:  # SETITEMS
                self._set(self._close_mark())
                stack = self._stack
            elif opcode == 0x72:  # LONG_BINPUT
                self.put(self.number(4))
            elif opcode == 0x4E:  # NONE
                stack.append(None)
            elif opcode in _VALUES:
                stack.append(_VALUES[opcode](self))
            elif opcode in _CHANGES:
                _CHANGES[opcode](self)
                stack = self._stack
            elif opcode == 0x2E:  # STOP
                if self._below or len(stack) != 1:
                    raise ValueError("values left over")
                return stack[0]
            elif opcode in _REFUSED:
                raise HostileDumpError(
                    f"{_REFUSED[opcode]}; a dump never does, so it was not executed"
                )
            else:
                raise ValueError(f"no such opcode: {opcode:#x}")
        if next(following, None) is not None:
            raise HostileDumpError(f"has more than {_OPCODES_LIMIT} opcodes; a dump never does")
        raise IndexError("no STOP")

    def take(self, size: int) -> bytes:
        taken = bytes(islice(self._bytes, size))
        if len(taken) < size:
            raise IndexError("past the end")
        return taken

    def line(self) -> bytes:
        return bytes(iter(self._bytes.__next__, 0x0A))

    def number(self, size: int, *, signed: bool = False) -> int:
        # A truncated argument is harmless, because the next opcode is missing.
        return int.from_bytes(islice(self._bytes, size), "little", signed=signed)

    def text(self, size: int) -> str:
        return self.take(size).decode("utf-8", "replace")

    def quoted(self) -> str:
        line = self.line().strip()
        if len(line) < 2 or line[:1] != line[-1:] or line[:1] not in (b"'", b'"'):
            raise ValueError("a string without quotes")
        return line[1:-1].decode("utf-8", "replace")

    def long(self, size: int) -> int:
        if size > _INTEGER_BYTES_LIMIT:
            raise HostileDumpError(f"contains an integer of {size} bytes; a dump never does")
        return self.number(size, signed=True)

    def decimal(self) -> int:
        """Read INT and LONG of protocol 0, which writes booleans as `I01` and `I00`."""
        line = self.line().rstrip(b"L")
        if len(line) > _INTEGER_DIGITS_LIMIT:
            raise HostileDumpError(f"contains an integer of {len(line)} digits; a dump never does")
        return {b"01": True, b"00": False}.get(line, int(line))

    def gotten(self, index: int) -> Any:
        return self._memo[index]

    def put(self, index: int | None = None) -> None:
        self._memo[len(self._memo) if index is None else index] = self._stack[-1]

    def pop(self) -> None:
        self._stack.pop()

    def pop_mark(self) -> None:
        self._close_mark()

    def tuple_of(self, count: int) -> None:
        if len(self._stack) < count:
            raise IndexError("nothing to put into a tuple")
        self._stack[-count:] = [tuple(self._stack[-count:])]

    def gather(self, kind: type[tuple[Any, ...]] | type[list[Any]]) -> None:
        items = self._close_mark()
        self._stack.append(kind(items))

    def append(self) -> None:
        item = self._stack.pop()
        self._extend([item])

    def set_one(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._set([key, value])

    def new_dict(self) -> None:
        items = self._close_mark()
        self._stack.append({})
        self._set(items)

    def _open_mark(self) -> None:
        if len(self._below) >= _OPEN_MARKS_LIMIT:
            raise HostileDumpError(f"nests more than {_OPEN_MARKS_LIMIT} levels; a dump never does")
        self._below.append(self._stack)
        self._stack = []

    def _close_mark(self) -> list[Any]:
        items, self._stack = self._stack, self._below.pop()
        return items

    def _extend(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not list:
            raise TypeError("appends to what is not a list")
        target.extend(items)

    def _set(self, items: list[Any]) -> None:
        target = self._stack[-1]
        if type(target) is not dict or len(items) % 2:
            raise TypeError("sets items of what is not a dict")
        following = iter(items)
        for key in following:
            # A tuple as a key would be hashed, which is exponential in its nesting.
            if type(key) is not str and type(key) not in (int, bytes):
                raise HostileDumpError(
                    "has a key that is not a string or number; a dump never does"
                )
            target[key] = next(following)


# The opcodes that push a value onto the stack, and the functions that read it.
_VALUES: Mapping[int, Callable[[_Machine], Any]] = {
    0x88: lambda m: True,  # NEWTRUE
    0x89: lambda m: False,  # NEWFALSE
    0x29: lambda m: (),  # EMPTY_TUPLE
    0x4D: lambda m: m.number(2),  # BININT2
    0x4A: lambda m: m.number(4, signed=True),  # BININT
    0x8A: lambda m: m.long(m.number(1)),  # LONG1
    0x8B: lambda m: m.long(m.number(4, signed=True)),  # LONG4
    0x47: lambda m: struct.unpack(">d", m.take(8))[0],  # BINFLOAT
    0x58: lambda m: m.text(m.number(4)),  # BINUNICODE
    0x8C: lambda m: m.text(m.number(1)),  # SHORT_BINUNICODE
    0x8D: lambda m: m.text(m.number(8)),  # BINUNICODE8
    0x54: lambda m: m.text(m.number(4)),  # BINSTRING
    0x55: lambda m: m.text(m.number(1)),  # SHORT_BINSTRING
    0x42: lambda m: m.take(m.number(4)),  # BINBYTES
    0x43: lambda m: m.take(m.number(1)),  # SHORT_BINBYTES
    0x8E: lambda m: m.take(m.number(8)),  # BINBYTES8
    0x6A: lambda m: m.gotten(m.number(4)),  # LONG_BINGET
    0x67: lambda m: m.gotten(int(m.line())),  # GET
    0x49: lambda m: m.decimal(),  # INT
    0x4C: lambda m: m.decimal(),  # LONG
    0x46: lambda m: float(m.line()),  # FLOAT
    0x56: lambda m: m.line().decode("raw-unicode-escape"),  # UNICODE
    0x53: lambda m: m.quoted(),  # STRING
}
# Opcodes that change the values on the stack.
_CHANGES: Mapping[int, Callable[[_Machine], object]] = {
    0x71: lambda m: m.put(m.number(1)),  # BINPUT
    0x94: lambda m: m.put(),  # MEMOIZE
    0x70: lambda m: m.put(int(m.line())),  # PUT
    0x61: lambda m: m.append(),  # APPEND
    0x73: lambda m: m.set_one(),  # SETITEM
    0x85: lambda m: m.tuple_of(1),  # TUPLE1
    0x86: lambda m: m.tuple_of(2),  # TUPLE2
    0x87: lambda m: m.tuple_of(3),  # TUPLE3
    0x74: lambda m: m.gather(tuple),  # TUPLE
    0x6C: lambda m: m.gather(list),  # LIST
    0x64: lambda m: m.new_dict(),  # DICT
    0x30: lambda m: m.pop(),  # POP
    0x31: lambda m: m.pop_mark(),  # POP_MARK
    0x80: lambda m: m.take(1),  # PROTO
    0x95: lambda m: m.take(8),  # FRAME: only a hint for stream readers
}
