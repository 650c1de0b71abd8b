"""What a function reads beside its arguments, so that a recording is used again only while all of it is unchanged.

watch() lists the function's code, closure cells, defaults and globals, the attributes of objects and modules that its code names, and, in
the same way, all of the functions that it may call. Numbers and strings are compared by value, arrays by dtype, shape and device: their
numbers are read in each call. What cannot be listed makes the list incomplete, and the function is then recorded in each call.

Functions of the modules in _TRUSTED are compared by identity. What they were made of, as torch.no_grad() is of the function that it
decorates, lies in their closure cells, and is listed."""

from __future__ import annotations

import builtins
import dataclasses
import dis
import enum
import functools
import inspect
import math
import operator
import re
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

_MOST = 400  # steps of a list; a function that reads more is recorded in each call
_MISSING = object()

# Modules whose functions compute the same of the same arguments: what they read is not followed.
_TRUSTED = frozenset(
    (
        *("_abc", "_collections", "_collections_abc", "_functools", "_operator", "abc", "builtins", "collections", "dataclasses", "enum"),
        *("functools", "itertools", "math", "ml_dtypes", "numpy", "operator", "reprlib", "scipy", "torch", "typing"),
    )
)
# Functions of those modules that read what is not listed, or what changes by itself: the first ones by their names.
_READS_STATE = re.compile(
    r"_?(get|current|default|initial|manual)_?|are_|is_.*(enabled|available|compiling|scripting|tracing)|(has|in)_\w+_mode|rand|seed|print"
)
_READ_STATE = (
    *(__import__, dir, eval, exec, getattr, globals, hasattr, id, input, locals, open, print, vars, object.__getattribute__),
    *(dataclasses.asdict, dataclasses.astuple, dataclasses.fields, dataclasses.replace, operator.attrgetter, operator.methodcaller),
    *(inspect.currentframe, inspect.getattr_static, sys._getframe),
)
_READ_STATE_BY_ID = frozenset(map(id, _READ_STATE))
# Names by which code may read what is not listed.
_UNFOLLOWED = frozenset(
    (
        *(each.__name__ for each in _READ_STATE if each not in (dataclasses.fields, dataclasses.replace)),
        *("__annotations__", "__bases__", "__closure__", "__code__", "__defaults__", "__dict__", "__doc__", "__func__", "__getattr__"),
        *("__get__", "__globals__", "__kwdefaults__", "__module__", "__mro__", "__name__", "__qualname__", "__self__", "__subclasses__"),
        *("default_rng", "get_rng_state", "initial_seed", "mro", "random", "seed"),
    )
)
# Instructions that read attributes without naming them, or let a function go on after something was missing.
_UNFOLLOWED_INSTRUCTIONS = frozenset(
    ("MATCH_CLASS", "MATCH_KEYS", "MATCH_MAPPING", "PUSH_EXC_INFO", "SETUP_ASYNC_WITH", "SETUP_FINALLY", "SETUP_WITH", "IMPORT_STAR")
)
_BUILTINS = frozenset(vars(builtins))
# Methods that run only where code makes an object of a class, or writes one as a string. The first of each stands for them among names.
_OF_CONSTRUCTION = frozenset(("__class__", "__class_getitem__", "__init__", "__init_subclass__", "__new__", "__set_name__"))
_OF_STRINGS = frozenset(("__repr__", "__format__", "__str__"))


class Names(NamedTuple):
    """What a code object names, with that of the functions within it."""

    of_globals: frozenset[str]
    of_attributes: frozenset[str]
    imports: frozenset[str]
    is_followed: bool  # no instruction reads in another way


@lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> Names:
    of_globals: set[str] = set()
    of_attributes: set[str] = set()
    imports: set[str] = set()
    is_followed = True
    last: dis.Instruction | None = None
    for x in dis.get_instructions(code):
        is_known = last is not None and (last.opname == "LOAD_CONST" or last.argval == "__class__" or last.argval in _BUILTINS)
        last = x
        if x.opname in _UNFOLLOWED_INSTRUCTIONS or (x.opname == "IS_OP" and not is_known):  # two objects may become one
            is_followed = False
        elif x.opname == "IMPORT_NAME":
            imports.add(x.argval)
        elif x.opcode in dis.hasname:
            is_global = x.opname.startswith("LOAD_") and ("GLOBAL" in x.opname or x.opname == "LOAD_NAME")
            (of_globals if is_global else of_attributes).add(x.argval)
        elif x.opname.startswith(("FORMAT_", "CONVERT_VALUE")) or (type(x.argval) is str and "%" in x.argval):
            of_attributes.add("__repr__")
    if of_globals & {"ascii", "format", "repr", "str"} or of_attributes & {"format", "format_map"}:
        of_attributes.add("__repr__")
    if "type" in of_globals or ("__class__" in code.co_freevars and "super" not in of_globals):
        of_attributes.add("__class__")
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more = names_of(inner)
            of_globals |= more.of_globals
            of_attributes |= more.of_attributes
            imports |= more.imports
            is_followed &= more.is_followed
    return Names(frozenset(of_globals), frozenset(of_attributes), frozenset(imports), is_followed)


def is_trusted(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _TRUSTED


# How a step gets its value from that of its parent, and what it compares.


def _cell(closure: Any, n: int) -> Any:
    return closure[n].cell_contents


def _class_cell(closure: Any, n: int) -> Any:
    """The class that super() needs."""
    return closure[n].cell_contents


def _entry(x: Any, key: Any) -> Any:
    return x.get(key, _MISSING)


def _item(x: Any, n: Any) -> Any:
    return x[n]


def names_of_class(kind: type, n: int) -> Any:
    return kind.__mro__[n].__dict__


def _attribute(x: Any, name: str) -> Any:
    return getattr(x, name)


def _slot(x: Any, name: str) -> Any:
    return getattr(x, name, _MISSING)


def _itself(x: Any, _: Any) -> Any:
    return x


def _type(x: Any, _: Any) -> Any:
    return type(x)


def _any(x: Any, expected: Any) -> bool:
    return True


def _is(x: Any, expected: Any) -> bool:
    return x is expected


def _is_of_type(x: Any, expected: Any) -> bool:
    return type(x) is expected


def _has_size(x: Any, expected: Any) -> bool:
    return len(x) == expected


def _has_length(x: Any, expected: Any) -> bool:
    return type(x) is expected[0] and len(x) == expected[1]


def _has_members(x: Any, expected: Any) -> bool:
    """Members, or keys, of the same types and values in the same order."""
    return type(x) is expected[0] and [*x] == expected[1] and [*map(type, x)] == expected[2]


def _equals(x: Any, expected: Any) -> bool:
    return type(x) is type(expected) and x == expected


def _equals_float(x: Any, expected: Any) -> bool:
    if type(x) is not float:
        return False
    return math.copysign(1, x) == math.copysign(1, expected) if x == expected else x != x and expected != expected


def _is_written(x: Any, expected: Any) -> bool:
    return type(x) is expected[0] and repr(x) == expected[1]


def _has_bytes(x: Any, expected: Any) -> bool:
    return type(x) is expected[0] and x.dtype == expected[1] and x.tobytes() == expected[2]


def _is_like(x: Any, expected: Any) -> bool:
    return type(x) is expected[0] and x.shape == expected[1] and x.dtype == expected[2] and getattr(x, "device", None) == expected[3]


def _same(x: Any, step: int) -> bool:
    """Expects what an earlier step found."""
    raise NotImplementedError("compiled() has it")


class Step(NamedTuple):
    parent: int  # an earlier step, counted from 1; 0: the function itself
    fetch: Callable[[Any, Any], Any]
    key: Any
    check: Callable[[Any, Any], bool]
    expected: Any


class Watch:
    """arrays: the steps that find arrays, by id; caches: functions of functools.cache, with how often each has called its own function."""

    def __init__(self, is_complete: bool = True) -> None:
        self.steps: list[Step] = []
        self.caches: list[tuple[Any, int]] = []
        self.is_complete = is_complete
        self.arrays: dict[int, int] = {}
        self.found: list[Any] = []  # what the steps found when they were listed; the first is the function

    def compiled(self, wanted: Sequence[int]) -> Callable[[Any], tuple[Any, ...] | None]:
        """A function of the watched one: what the wanted steps find, if all that is watched is unchanged; else None.

        It is compiled, because a step that is interpreted takes ten times as long."""
        lines = ["def values(v0):", " try:"]
        names: dict[str, Any] = {"M": _MISSING}
        for n, step in enumerate(self.steps, 1):
            names |= {f"k{n}": step.key, f"e{n}": step.expected, f"f{n}": step.fetch, f"c{n}": step.check}
            fetch = _FETCHES.get(step.fetch, "f{n}(v{p}, k{n})")
            if step.fetch is _entry and self.found[n] is not _MISSING:
                fetch = _FETCHES[_item]
            check = _CHECKS.get(step.check, "not c{n}(v{n}, e{n})")
            if step.check is _equals_float and not (step.expected < 0 or step.expected > 0):
                check = "not c{n}(v{n}, e{n})"  # a zero with its sign, or NaN
            if step.check is _is_like:
                names |= dict(zip((f"t{n}", f"s{n}", f"d{n}", f"g{n}"), step.expected, strict=True))
                if step.expected[3] is None:
                    check = "type(v{n}) is not t{n} or v{n}.dtype != d{n} or v{n}.shape != s{n}"
            lines.append("  " + f"v{{n}} = {fetch}".format(n=n, p=step.parent, key=step.key))
            if step.check is not _any:
                lines.append("  " + f"if {check}: return None".format(n=n, expected=step.expected))
        lines.append("  return ({})".format("".join(f"v{n}, " for n in wanted)))
        lines.append(" except (AttributeError, IndexError, KeyError, TypeError, ValueError): return None")
        exec("\n".join(lines), names)
        found: Callable[[Any], tuple[Any, ...] | None] = names["values"]
        return found


_FETCHES: dict[Any, str] = {
    _itself: "v{p}",
    _type: "type(v{p})",
    _attribute: "v{p}.{key}",
    _cell: "v{p}[{key}].cell_contents",
    _class_cell: "v{p}[{key}].cell_contents",
    _entry: "v{p}.get(k{n}, M)",
    _item: "v{p}[k{n}]",
    names_of_class: "v{p}.__mro__[{key}].__dict__",
}
_CHECKS: dict[Any, str] = {
    _is: "v{n} is not e{n}",
    _is_of_type: "type(v{n}) is not e{n}",
    _same: "v{n} is not v{expected}",
    _has_size: "len(v{n}) != e{n}",
    _has_length: "type(v{n}) is not e{n}[0] or len(v{n}) != e{n}[1]",
    _equals: "type(v{n}) is not type(e{n}) or v{n} != e{n}",
    _equals_float: "type(v{n}) is not float or v{n} != e{n}",
    _is_like: "type(v{n}) is not t{n} or v{n}.dtype != d{n} or v{n}.device != g{n} or v{n}.shape != s{n}",
}


class _Walk:
    """One pass over what a function reads, for the attributes of these names."""

    def __init__(self, function: Any, names: frozenset[str], made: frozenset[int], to_the_end: bool):
        self.watch = Watch()
        self.to_the_end = to_the_end  # also of a list that is incomplete
        self.names, self.made = names, made  # attributes that are followed, and classes, by id, of which the code may make objects
        self.seen_names: set[str] = set()
        self.seen_classes: set[int] = set()
        self._seen: dict[int, int] = {}  # the steps of objects, by id
        self.watch.found.append(function)
        self._look(0, _itself, None, function)

    def _step(self, parent: int, fetch: Callable[..., Any], key: Any, check: Callable[..., bool], expected: Any, x: Any) -> int:
        watch = self.watch
        if len(watch.steps) >= _MOST:
            watch.is_complete = False
            return 0
        watch.steps.append(Step(parent, fetch, key, check, expected))
        watch.found.append(x)
        return len(watch.steps)

    def _look(self, parent: int, fetch: Callable[..., Any], key: Any, x: Any) -> None:
        """Adds x, which is fetch(value of the parent, key), and what it reads."""
        if len(self.watch.steps) >= _MOST:
            self.watch.is_complete = False
        if not self.watch.is_complete and (not self.to_the_end or len(self.watch.steps) >= _MOST):
            return
        kind = type(x)
        if isinstance(x, type) and fetch not in (_type, _class_cell):
            self.seen_classes.add(id(x))
        if kind is float:
            self._step(parent, fetch, key, _equals_float, x, x)
        elif kind in (bool, int, str, bytes):
            self._step(parent, fetch, key, _equals, x, x)
        elif kind is complex:
            self._step(parent, fetch, key, _is_written, (kind, repr(x)), x)
        elif x is None or x is _MISSING or x is Ellipsis or x is NotImplemented or kind is types.CodeType:
            self._step(parent, fetch, key, _is, x, x)
        elif _is_numpy_scalar(kind):
            self._step(parent, fetch, key, _has_bytes, (kind, x.dtype, x.tobytes()), x)
        elif id(x) in self._seen:  # it is listed; that it is the same object as there has to be seen here
            self._step(parent, fetch, key, _same, self._seen[id(x)], x)
        else:
            self._seen[id(x)] = len(self.watch.steps) + 1
            if is_array(x):
                self._array(parent, fetch, key, x)
            else:
                self._object(parent, fetch, key, x)

    def _array(self, parent: int, fetch: Callable[..., Any], key: Any, x: Any) -> None:
        if getattr(x, "is_nested", False):  # it has no shape, and the recorder refuses it
            self.watch.is_complete = False
            return
        at = self._step(parent, fetch, key, _is_like, (type(x), x.shape, x.dtype, getattr(x, "device", None)), x)
        self.watch.arrays[id(x)] = at
        if not is_trusted(type(x).__module__):
            self._look(at, _type, None, type(x))
        if own := getattr(x, "__dict__", None):
            self._entries(self._step(at, _attribute, "__dict__", _any, None, own), own, self.names)

    def _object(self, parent: int, fetch: Callable[..., Any], key: Any, x: Any) -> None:
        kind = type(x)
        if id(x) in _READ_STATE_BY_ID or (_is_function_of_trusted(x) and _READS_STATE.match(getattr(x, "__name__", ""))):
            self.watch.is_complete = False
        elif kind is types.FunctionType:
            if is_trusted(x.__globals__.get("__name__")):
                self._cells(self._step(parent, fetch, key, _is, x, x), x)
            else:
                self._function(self._step(parent, fetch, key, _is_of_type, kind, x), x)
        elif kind is types.MethodType:
            at = self._step(parent, fetch, key, _is_of_type, kind, x)
            self._look(at, _attribute, "__func__", x.__func__)
            self._look(at, _attribute, "__self__", x.__self__)
        elif kind is functools.partial:
            at = self._step(parent, fetch, key, _is_of_type, kind, x)
            for name in ("func", "args", "keywords", "__dict__"):
                self._look(at, _attribute, name, getattr(x, name))
        elif isinstance(x, types.ModuleType):
            self._module(parent, fetch, key, x)
        elif isinstance(x, type):
            self._class(parent, fetch, key, x)
        elif kind in (tuple, list) or (isinstance(x, tuple) and (hasattr(kind, "_fields") or kind.__module__ == "torch")):
            at = self._step(parent, fetch, key, _has_length, (kind, len(x)), x)
            for n, each in enumerate(x):
                self._look(at, _item, n, each)
            if hasattr(kind, "_fields"):
                self._look(at, _type, None, kind)
        elif kind in (dict, OrderedDict) and all(map(_is_plain_key, x)):
            at = self._step(parent, fetch, key, _has_members, (kind, [*x], [*map(type, x)]), x)
            self._keys(at, x)
            for name, each in x.items():
                self._look(at, _item, name, each)
        elif kind in (set, frozenset) and all(map(_is_plain_key, x)):
            self._keys(self._step(parent, fetch, key, _has_members, (kind, [*x], [*map(type, x)]), x), x)
        elif kind in (property, staticmethod, classmethod, functools.cached_property):
            at = self._step(parent, fetch, key, _is, x, x)
            inner = getattr(x, "fget", None) or getattr(x, "func", None) or getattr(x, "__func__", None)
            self._look(at, _itself_of(inner), None, inner)
        elif _is_unchanging(x):
            self._step(parent, fetch, key, _is, x, x)
        elif kind is _CACHE:  # what it keeps may have been computed of anything: watch() makes the list incomplete
            self.watch.caches.append((x, x.cache_info().misses))
            self._look(self._step(parent, fetch, key, _is, x, x), _attribute, "__wrapped__", x.__wrapped__)
        elif kind.__flags__ & 1 << 9 or kind is types.SimpleNamespace:  # a class made by Python
            self._instance(parent, fetch, key, x)
        else:
            self.watch.is_complete = False

    def _function(self, at: int, x: types.FunctionType) -> None:
        self._step(at, _attribute, "__code__", _is, x.__code__, x.__code__)
        names = names_of(x.__code__)
        self.seen_names |= names.of_attributes
        missing = {name for name in names.of_globals if name not in x.__globals__}
        if (
            not names.is_followed
            or (names.of_globals | names.of_attributes) & _UNFOLLOWED
            or not all(map(is_trusted, names.imports))
            or (missing and (missing - _BUILTINS or cast(Any, x).__builtins__ is not vars(builtins)))
        ):
            self.watch.is_complete = False
            if not self.to_the_end:
                return
        self._look(at, _attribute, "__defaults__", x.__defaults__)
        if x.__code__.co_kwonlyargcount:
            self._look(at, _attribute, "__kwdefaults__", x.__kwdefaults__)
        self._cells(at, x)
        if x.__dict__:
            self._entries(self._step(at, _attribute, "__dict__", _any, None, x.__dict__), x.__dict__, self.names)
        if names.of_globals:
            inside = self._step(at, _attribute, "__globals__", _any, None, x.__globals__)
            for name in sorted(names.of_globals):  # a name of builtins has to be missing here
                self._look(inside, _entry, name, x.__globals__.get(name, _MISSING))

    def _cells(self, at: int, x: types.FunctionType) -> None:
        inside = self._step(at, _attribute, "__closure__", _any, None, x.__closure__) if x.__closure__ else 0
        for n, (name, cell) in enumerate(zip(x.__code__.co_freevars, x.__closure__ or (), strict=True)):
            try:
                self._look(inside, _cell if name != "__class__" else _class_cell, n, cell.cell_contents)
            except ValueError:  # it has no value yet
                self.watch.is_complete = False

    def _entries(self, at: int, x: Any, names: Iterable[str]) -> None:
        """Those of the names that a dictionary has."""
        for name in sorted(name for name in names if name in x):
            self._look(at, _entry, name, x[name])

    def _keys(self, at: int, x: Iterable[Any]) -> None:
        """What is read of keys, or of a set's members, which are known to be the same ones."""
        for each in x:
            if isinstance(each, enum.Enum):
                self._look(at, _itself_of(each), None, each)

    def _module(self, parent: int, fetch: Callable[..., Any], key: Any, x: types.ModuleType) -> None:
        at = self._step(parent, fetch, key, _is, x, x)
        if x.__name__.startswith("torch.ops"):
            return  # where the recorder sees operators that are not PyTorch's
        if type(x) is not types.ModuleType or ("__getattr__" in x.__dict__ and not is_trusted(x.__name__)):
            self.watch.is_complete = False
            return
        for name in sorted(self.names & x.__dict__.keys()):
            self._look(at, _attribute, name, x.__dict__[name])

    def _class(self, parent: int, fetch: Callable[..., Any], key: Any, x: type) -> None:
        """A class: what code names of it and of its bases, and the methods that operators call."""
        at = self._step(parent, fetch, key, _is, x, x)
        if is_trusted(x.__module__) or _is_plain(x):
            return
        if not is_trusted(type(x).__module__):
            self._look(at, _type, None, type(x))
        if issubclass(x, enum.Enum):
            self._look(at, _attribute, "_member_map_", x._member_map_)
        left_out = _OF_CLASSES if "__repr__" in self.names else _OF_CLASSES | _OF_STRINGS
        if id(x) not in self.made and "__class__" not in self.names:
            left_out |= _OF_CONSTRUCTION
        self._step(at, _attribute, "__mro__", _is, x.__mro__, x.__mro__)
        for n, each in enumerate(x.__mro__):
            if is_trusted(each.__module__) or _is_plain(each):
                continue
            if not _is_made_by_python(each):
                self.watch.is_complete = False
                return
            inside = self._step(at, names_of_class, n, _has_size, len(each.__dict__), each.__dict__)
            of_operators = {name for name in each.__dict__ if name.startswith("__") and name.endswith("__")} - left_out
            self._entries(inside, each.__dict__, self.names | of_operators)
            later = {name for other in x.__mro__[n + 1 :] for name in vars(other)}
            for name in sorted((self.names & later) - each.__dict__.keys()):  # it may hide that of a base
                self._step(inside, _entry, name, _is, _MISSING, _MISSING)

    def _instance(self, parent: int, fetch: Callable[..., Any], key: Any, x: Any) -> None:
        """An object, of which the attributes that code names are read, in its dictionary or its class. All are read of an object whose
        class, or a base of it, is a library's, because the library's code is not followed."""
        kind = type(x)
        is_member = isinstance(x, enum.Enum)
        trusted = any(is_trusted(each.__module__) and not _is_plain(each) for each in kind.__mro__)
        if not is_member and any(map(hides_state, kind.__mro__)):
            self.watch.is_complete = False
            return
        at = self._step(parent, fetch, key, _is if is_member else _is_of_type, x if is_member else kind, x)
        self._look(at, _type, None, kind)
        slots = {
            name for each in kind.__mro__ for name, found in vars(each).items() if type(found) is types.MemberDescriptorType
        }  # of which one is found by its name, if no class after it has another
        for name in sorted(slots if trusted else slots & self.names):
            self._look(at, _slot, name, _slot(x, name))
        own = getattr(x, "__dict__", None)
        if own is None:
            return
        inside = self._step(at, _attribute, "__dict__", _has_size if trusted else _any, len(own), own)
        is_module = "_parameters" in own and "_modules" in own  # a torch.nn.Module, which finds attributes in dictionaries of its own
        asks = any("__getattr__" in vars(each) and not is_trusted(each.__module__) for each in kind.__mro__)  # for a name that is missing
        for name in sorted(own if trusted else self.names | _HOOKS if is_module else self.names):
            if name in own or asks or any(name in vars(each) for each in kind.__mro__):
                self._look(inside, _entry, name, own.get(name, _MISSING))
        for holder in ("_parameters", "_buffers", "_modules") if is_module and not trusted else ():
            held = self._step(inside, _item, holder, _is_of_type, type(own[holder]), own[holder])
            self._entries(held, own[holder], self.names)


_CACHE = type(names_of)
_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks"})
# Attributes of classes that neither operators nor calls read.
_OF_CLASSES = frozenset(
    (
        *("__abstractmethods__", "__annotate__", "__annotate_func__", "__annotations__", "__annotations_cache__", "__classcell__"),
        *("__conditional_annotations__", "__copy__", "__dataclass_fields__", "__dataclass_params__", "__deepcopy__", "__del__", "__dict__"),
        *("__dir__", "__doc__", "__firstlineno__", "__getstate__", "__match_args__", "__module__", "__orig_bases__", "__parameters__"),
        *("__qualname__", "__reduce__", "__reduce_ex__", "__replace__", "__setstate__", "__sizeof__", "__slots__"),
        *("__static_attributes__", "__type_params__", "__weakref__"),
    )
)
_UNCHANGING = frozenset(
    (
        *("numpy._ArrayFunctionDispatcher", "torch.dtype", "torch.device", "torch.layout", "torch.memory_format"),
        *("builtins.range", "_collections._tuplegetter", "collections._tuplegetter"),
    )
)


def _is_plain(kind: type) -> bool:
    """Whether the class's own code reads nothing of an object but what is listed in any case."""
    return kind in (object, types.SimpleNamespace) or (kind.__module__, kind.__name__) == ("torch.nn.modules.module", "Module")


def _is_made_by_python(kind: type) -> bool:
    """Whether objects of this class have no memory but their attributes."""
    if not kind.__flags__ & 1 << 9:
        return False
    own = kind.__dict__
    in_c = types.MethodDescriptorType, types.ClassMethodDescriptorType, types.WrapperDescriptorType
    return not isinstance(own.get("__new__"), types.BuiltinFunctionType) and not any(
        isinstance(x, in_c) and x.__objclass__ is kind for x in own.values()
    )


def hides_state(kind: type) -> bool:
    """Whether objects of this class have memory that Python does not see, or find attributes in another way."""
    return not _is_plain(kind) and (not _is_made_by_python(kind) or "__getattribute__" in kind.__dict__)


def _itself_of(inner: Any) -> Callable[[Any, Any], Any]:
    return lambda _, __: inner


def is_array(x: Any) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch is not None and issubclass(type(x), torch.Tensor)) or (numpy is not None and issubclass(type(x), numpy.ndarray))


def _is_numpy_scalar(kind: type) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and issubclass(kind, numpy.generic) and not issubclass(kind, (numpy.object_, numpy.void))


def _is_plain_key(x: Any) -> bool:
    """Whether x equals another object of its type only if it is the same to every reader."""
    return type(x) in (bool, int, str, bytes, type(None)) or isinstance(x, enum.Enum)


def _is_function_of_trusted(x: Any) -> bool:
    """Whether x is a function, or one in C, of a library that is trusted."""
    if type(x) is types.FunctionType:
        return is_trusted(x.__globals__.get("__name__"))
    if type(x) is not types.BuiltinFunctionType:
        return False
    of = x.__self__
    if not isinstance(of, (types.ModuleType, type, type(None))):
        return False  # a method of an object
    return is_trusted(x.__module__ or getattr(of, "__name__" if isinstance(of, types.ModuleType) else "__module__", None))


def _is_unchanging(x: Any) -> bool:
    """Whether x is a function in C of a library that is trusted, or a value of it without a state, such as a dtype."""
    kind = type(x)
    if kind is types.BuiltinFunctionType:
        return _is_function_of_trusted(x)
    if kind in (types.MethodDescriptorType, types.WrapperDescriptorType, types.ClassMethodDescriptorType):
        return is_trusted(x.__objclass__.__module__)
    if kind in (types.GetSetDescriptorType, types.MemberDescriptorType):
        return True  # what they read belongs to the object
    name = f"{kind.__module__}.{kind.__qualname__}"
    if kind is _CACHE:
        return _is_function_of_trusted(x.__wrapped__)
    if name == "numpy.ufunc":  # not one that was made of a function of Python
        return any(getattr(sys.modules.get(of), x.__name__, None) is x for of in ("numpy", "scipy.special"))
    if name in ("torch._ops.OpOverload", "torch._ops.OpOverloadPacket"):
        return True  # the recorder sees those that are not PyTorch's
    return name in _UNCHANGING or kind.__module__ == "numpy.dtypes"


def watch(function: Any, to_the_end: bool = False) -> Watch:
    """What the function reads now. to_the_end: does not stop where the list becomes incomplete."""
    made: frozenset[int] = frozenset()
    names = frozenset({"forward"})  # which torch.nn.Module calls
    for _ in range(8):
        walk = _Walk(function, names, made, to_the_end)
        if not (walk.watch.is_complete or to_the_end) or (walk.seen_names <= names and walk.seen_classes <= made):
            walk.watch.is_complete &= not walk.watch.caches
            return walk.watch
        names |= walk.seen_names
        made |= walk.seen_classes
    walk.watch.is_complete = False
    return walk.watch


def forget_recorded(seen: Watch) -> None:
    """Clears the caches that have kept something since the list was made: tensors of a recording, which have no numbers."""
    for cache, misses in seen.caches:
        if cache.cache_info().misses != misses:
            cache.cache_clear()


def key_of(x: Any) -> Any:
    """The object by which recordings of x are looked up: the code of a function, or the class of a callable object."""
    for _ in range(16):
        if isinstance(x, types.FunctionType):
            return x.__code__
        if isinstance(x, types.MethodType):
            x = x.__func__
        elif isinstance(x, functools.partial):
            x = x.func
        else:
            break
    return type(x)
