# SPDX-License-Identifier: Apache-2.0
"""Says what weights_only=True refuses of a file, and what would make torch take it.

What is refused next shows only when torch makes what comes before, which calls what the file names.
So the pickle is followed here as torch's weights-only unpickler would follow it, but with names and
types in the place of objects. Nothing is imported or called, whatever the file says.
"""

from __future__ import annotations

import _compat_pickle
import os
import pickletools
import re
import sys
from typing import Any

import torch

from fastpersist import _core
from fastpersist._errors import WeightsOnlyError

_MOST_SHOWN = 5
_TRUST = "load with weights_only=False, which may run any code that the file asks for"


def explain(error: Exception, file: _core.File, path: bytes | None) -> WeightsOnlyError:
    """An error for `raise ... from error`."""
    reading = _Reading(_allowed())
    reading.follow(file.pickle)
    entries = _refused(file, reading)
    where = "" if path is None else f" on {os.fsdecode(path)}"
    wanted = _expressions(reading, entries)
    refusal = f"load failed{where}: weights_only=True does not make {_shown(entries, reading)}"
    if reading.never:
        text = f"{refusal}, whatever is allowed: {reading.never}; if you trust the file, {_TRUST}"
    elif wanted:
        more = "" if reading.whole else ", and then what the next error names"
        text = (
            f"{refusal}; if you trust the file, allow them with "
            f"torch.serialization.add_safe_globals([{', '.join(wanted)}]){more}, or {_TRUST}"
        )
    else:
        text = (
            f"load failed{where}: weights_only=True refuses it: {error}; if you trust the file, "
            f"{_TRUST}"
        )
    return WeightsOnlyError(text, entries)


def _shown(entries: list[tuple[str, str]], reading: _Reading) -> str:
    outer = _outermost(entries)
    shown = ", ".join(f"'{place}' ({what})" for place, what in outer[:_MOST_SHOWN])
    if len(outer) > _MOST_SHOWN:
        shown += f" and {len(outer) - _MOST_SHOWN} more"
    # Some of what torch refuses has no place, for we understand it: a frozenset.
    return shown or ", ".join(reading.wanted) or "it"


def _outermost(entries: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """Without what lies within another one of them."""
    outer: list[tuple[str, str]] = []
    for place, what in entries:
        if not outer or not place.startswith(outer[-1][0] + "."):
            outer.append((place, what))
    return outer


def _refused(file: _core.File, reading: _Reading) -> list[tuple[str, str]]:
    """(place in the state, "module name") of what weights_only=True would not make."""
    entries = []
    for place, what, opaque in file.values():
        if not opaque:
            continue
        name = _today(*what.partition(" ")[::2])
        known = name in reading.allowed and name not in reading.dead
        if not known or (name == "numpy.dtype" and reading.kinds):
            entries.append((place, what))
    return entries


def _expressions(reading: _Reading, entries: list[tuple[str, str]]) -> list[str]:
    """What to write into the list for add_safe_globals."""
    names = dict(reading.wanted)
    for _, what in entries:
        name = _today(*what.partition(" ")[::2])
        if name not in reading.allowed and _is_plain(name):
            names.setdefault(name, _expression(name))
    return sorted(names.values())


def _today(module: str, name: str) -> str:
    """What a program of today calls "module name", which may be a name of Python 2; as torch does.

    >>> _today("__builtin__", "list")
    'builtins.list'
    """
    module, name = _compat_pickle.NAME_MAPPING.get((module, name), (module, name))
    return f"{_compat_pickle.IMPORT_MAPPING.get(module, module)}.{name}"


def _is_plain(name: str) -> bool:
    """Whether the name, which is the file's, can stand in a program and do no more than name."""
    return all(part.isidentifier() for part in name.split("."))


def _expression(name: str) -> str:
    """How a program names it so that torch finds it by this name: torch asks the object's own."""
    found = _find(name)
    own = f"{getattr(found, '__module__', '')}.{getattr(found, '__qualname__', '')}"
    short = name.removeprefix("builtins.")
    if found is None or own == name:
        return short
    return f'({own if _find(own) is found else short}, "{name}")'


def _takes_pairs() -> bool:
    """Whether add_safe_globals takes an object with another name than its own: since torch 2.6."""
    return hasattr(torch.serialization, "get_unsafe_globals_in_checkpoint")


def _find(name: str) -> Any:
    """The object, if what is imported already has it."""
    # A file of one NumPy is read with another: it was renamed, and the old name imports lazily.
    core = re.sub(r"^numpy\.core\.", "numpy._core.", name)
    parts = core.split(".")
    for length in range(len(parts) - 1, 0, -1):
        found: Any = sys.modules.get(".".join(parts[:length]))
        if found is None:
            continue
        for part in parts[length:]:
            # Not getattr, for which modules may import others.
            found = getattr(found, "__dict__", {}).get(part)
        if found is not None:
            return found
    return None


def _allowed() -> dict[str, Any]:
    """What torch makes anyway and what the user allowed; both are private to torch."""
    names: dict[str, Any] = {}
    for function in ("_get_allowed_globals", "_get_user_allowed_globals"):
        try:
            names.update(getattr(torch._weights_only_unpickler, function)())
        except Exception:  # then more entries are listed than need be
            continue
    return names


# --- The unpickler, with names in the place of objects ---


class _Name:
    """A class or a function, by its name."""

    def __init__(self, name: str) -> None:
        self.name = name


class _Made:
    """An object of this type; "": of one that is not known."""

    def __init__(self, type_name: str = "") -> None:
        self.type_name = type_name


_EMPTY = {
    "EMPTY_LIST": "builtins.list",
    "EMPTY_DICT": "builtins.dict",
    "EMPTY_SET": "builtins.set",
}
_TUPLES = {"EMPTY_TUPLE": 0, "TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}
_TAKES_ITEMS = ("builtins.dict", "collections.OrderedDict", "collections.Counter")
_TAKES_STATE = ("torch.Tensor", "torch.nn.parameter.Parameter", "collections.OrderedDict")
_MAKES_ITS_ARGUMENT = re.compile(
    r"numpy\.(_core|core)\.multiarray\._reconstruct|copyreg\._reconstructor"
    r"|numpy\.random\._pickle\.__bit_generator_ctor"
)
_MAKES = {
    "numpy.random._pickle.__randomstate_ctor": "numpy.random.mtrand.RandomState",
    "numpy.random._pickle.__generator_ctor": "numpy.random._generator.Generator",
}
_DTYPE = re.compile(r"[<>=|]?[A-Za-z]\d{0,9}")


class _Reading:
    """Follows a pickle. `wanted`: name → expression of what must be allowed and is not. `kinds`:
    those of NumPy's types of numbers among them. `never`: why nothing that could be allowed helps.
    `dead`: names of the types that it is about. `whole`: whether all of the pickle was followed."""

    def __init__(self, allowed: dict[str, Any]) -> None:
        self.allowed = allowed
        self.wanted: dict[str, str] = {}
        self.kinds: set[str] = set()
        self.never = ""
        self.dead: set[str] = set()
        self.whole = True
        self._objects = {id(value) for value in allowed.values()}
        self._stack: list[Any] = []
        self._marks: list[int] = []
        self._memo: dict[Any, Any] = {}

    def follow(self, pickle: bytes) -> None:
        unpickler = vars(torch._weights_only_unpickler)
        known = {v for k, v in unpickler.items() if k.isupper() and isinstance(v, bytes)}
        try:
            for opcode, argument, _ in pickletools.genops(pickle):
                if opcode.code.encode("latin-1") not in known:
                    self._give_up(f"torch's unpickler does not know the instruction {opcode.name}")
                    return
                self._step(opcode, argument)
        except (ValueError, LookupError, TypeError, AttributeError):  # not a pickle that torch made
            self.whole = False

    def _give_up(self, why: str, type_name: str = "") -> None:
        self.never = self.never or why
        if type_name:
            self.dead.add(type_name)

    def _step(self, opcode: Any, argument: Any) -> None:
        name, stack = opcode.name, self._stack
        if name in ("PROTO", "STOP"):
            return
        if name == "MARK":
            self._marks.append(len(stack))
        elif name in _EMPTY:
            stack.append(_Made(_EMPTY[name]))
        elif name in _TUPLES:
            stack.append(tuple(self._pop(_TUPLES[name])))
        elif name == "TUPLE":
            stack.append(tuple(self._pop_mark()))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(self._memo[argument])
        elif name in ("APPEND", "APPENDS", "SETITEM", "SETITEMS"):
            self._fill(name)
        elif name == "BINPERSID":
            stack[-1] = _Made()
        elif name in ("GLOBAL", "NEWOBJ", "REDUCE", "BUILD"):
            getattr(self, f"_{name.lower()}")(argument)
        elif not opcode.stack_before and len(opcode.stack_after) == 1:
            stack.append(argument if isinstance(argument, str) else _Made())
        else:
            raise ValueError(name)

    def _pop(self, count: int) -> list[Any]:
        items = self._stack[len(self._stack) - count :]
        del self._stack[len(self._stack) - count :]
        return items

    def _pop_mark(self) -> list[Any]:
        return self._pop(len(self._stack) - self._marks.pop())

    def _fill(self, opcode: str) -> None:
        if opcode.endswith("S"):
            self._pop_mark()
        else:
            self._pop(2 if opcode == "SETITEM" else 1)
        takes = ("builtins.list",) if opcode.startswith("APPEND") else _TAKES_ITEMS
        kind = self._stack[-1].type_name
        if kind and kind not in takes:
            self._give_up(f"torch's unpickler puts no items into a {kind}", kind)
        elif not kind:
            self.whole = False

    def _want(self, name: str) -> None:
        if name in self.wanted:
            return
        expression = _expression(name) if _is_plain(name) else ""
        if not expression:
            self._give_up(f"{name!r} is not the name of anything")
        elif expression.startswith("(") and not _takes_pairs():
            self._give_up(f"what was {name} has moved, and torch before 2.6 asks for its name")
        else:
            self.wanted[name] = expression

    def _want_object(self, name: str) -> None:
        """Of what is called, or the type of what is changed: torch asks for the object itself."""
        if name not in self.allowed and id(_find(name)) not in self._objects:
            self._want(name)

    def _global(self, argument: str) -> None:
        name = _today(*argument.partition(" ")[::2])
        module = name.rpartition(".")[0]
        if module in getattr(torch._weights_only_unpickler, "_blocklisted_modules", ()):
            self._give_up(
                f"torch's unpickler takes nothing from the module {module} ({name})", name
            )
        elif name not in self.allowed:
            self._want(name)
        self._stack.append(_Name(name))

    def _newobj(self, _: None) -> None:
        kind, _arguments = self._pop(2)
        if isinstance(kind, _Name):
            self._want_object(kind.name)
        else:
            self._give_up("it makes objects of a type that is not named")
        self._stack.append(_Made(kind.name if isinstance(kind, _Name) else ""))

    def _reduce(self, _: None) -> None:
        function, arguments = self._pop(2)
        if not isinstance(function, _Name):
            self._give_up("it calls what another call has made")
            self._stack.append(_Made())
            return
        self._want_object(function.name)
        self._stack.append(self._result(function.name, arguments))

    def _result(self, function: str, arguments: tuple[Any, ...]) -> _Made | _Name:
        first = arguments[0] if arguments else None
        if function == "builtins.getattr" and isinstance(first, _Name):
            return _Name(f"{first.name}.{arguments[1]}")  # a class within a class
        if function == "numpy.dtype" and isinstance(first, str):
            return _Made(self._dtype(first))
        if _MAKES_ITS_ARGUMENT.fullmatch(function):
            return _Made(first.name if isinstance(first, _Name) else "")
        found = _find(function)
        known = found is None or isinstance(found, type)
        return _Made(_MAKES.get(function, function if known else ""))

    def _dtype(self, text: str) -> str:
        """The type of numpy.dtype(text): every type of numbers has one of its own."""
        numpy = sys.modules.get("numpy")
        if numpy is None or not _DTYPE.fullmatch(text):
            return ""
        kind = type(numpy.dtype(text))
        name = f"{kind.__module__}.{kind.__qualname__}"
        if name not in self.allowed and id(kind) not in self._objects:
            self.kinds.add(name)
            # NumPy before 1.25 has no names for them.
            self.wanted[name] = name if _find(name) is kind else f'type(numpy.dtype("{text}"))'
        return name

    def _build(self, _: None) -> None:
        self._pop(1)
        made = self._stack[-1]
        kind = made.type_name if isinstance(made, _Made) else ""
        if not kind:
            self.whole = False
        elif kind not in _TAKES_STATE and kind not in self.wanted and kind not in self.kinds:
            self._want_object(kind)
