"""What a function reads beside its arguments, so that a recording is used again only while all of it is unchanged.

watch() lists the function's code, closure cells, defaults and globals, the attributes of objects and modules that its code names, and, in
the same way, all of the functions that it may call. Numbers and strings are compared by value, arrays by dtype, shape and device: their
numbers are read in each call. What cannot be listed makes the list incomplete, and the function is then recorded in each call."""

from __future__ import annotations

import dis
import enum
import functools
import math
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

_MOST = 400  # steps of a list; a function that reads more is recorded in each call
_MISSING = object()

# Modules whose functions compute the same of the same arguments: what they read is not followed.
_TRUSTED = frozenset(
    ("builtins", "collections", "enum", "functools", "itertools", "math", "ml_dtypes", "numpy", "operator", "scipy", "torch", "typing")
)
# Names by which code may read what is not listed, or what changes by itself.
_UNFOLLOWED = frozenset(
    (
        *("__dict__", "__import__", "currentframe", "default_rng", "dir", "eval", "exec", "getattr", "get_rng_state", "globals", "hasattr"),
        *("id", "initial_seed", "input", "locals", "open", "random", "seed", "vars"),
    )
)


class Names(NamedTuple):
    """What a code object names, with that of the functions within it."""

    of_globals: frozenset[str]
    of_attributes: frozenset[str]
    imports: frozenset[str]


@lru_cache(maxsize=4096)
def names_of(code: types.CodeType) -> Names:
    of_globals, of_attributes, imports = set(), set(), set()
    for x in dis.get_instructions(code):
        if x.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
            of_globals.add(x.argval)
        elif x.opname == "IMPORT_NAME":
            imports.add(x.argval)
        elif x.opname in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"):
            of_attributes.add(x.argval)
    for inner in code.co_consts:
        if isinstance(inner, types.CodeType):
            more = names_of(inner)
            of_globals |= more.of_globals
            of_attributes |= more.of_attributes
            imports |= more.imports
    return Names(frozenset(of_globals), frozenset(of_attributes), frozenset(imports))


def is_trusted(module: object) -> bool:
    return isinstance(module, str) and module.partition(".")[0] in _TRUSTED


# How a step gets its value from that of its parent, and what it compares.


def _cell(function: Any, n: int) -> Any:
    return function.__closure__[n].cell_contents


def _global(function: Any, name: str) -> Any:
    return function.__globals__.get(name, _MISSING)


def _entry(x: Any, key: Any) -> Any:
    return x.get(key, _MISSING)


def _item(x: Any, n: Any) -> Any:
    return x[n]


def _in_class(kind: type, name: str) -> Any:
    for each in kind.__mro__:
        if name in each.__dict__:
            return each.__dict__[name]
    return _MISSING


def _in_module(module: Any, name: str) -> Any:
    return module.__dict__.get(name, _MISSING)


def _attribute(x: Any, name: str) -> Any:
    return getattr(x, name)


def _itself(x: Any, _: Any) -> Any:
    return x


def _type(x: Any, _: Any) -> Any:
    return type(x)


def _is(x: Any, expected: Any) -> bool:
    return x is expected


def _is_of_type(x: Any, expected: Any) -> bool:
    return type(x) is expected


def _has_keys(x: Any, expected: Any) -> bool:
    return type(x) is expected[0] and tuple(x) == expected[1]


def _has_length(x: Any, expected: Any) -> bool:
    return type(x) is expected[0] and len(x) == expected[1]


def _equals(x: Any, expected: Any) -> bool:
    return type(x) is type(expected) and x == expected


def _equals_float(x: Any, expected: Any) -> bool:
    if type(x) is not float:
        return False
    return math.copysign(1, x) == math.copysign(1, expected) if x == expected else x != x and expected != expected


def _has_bytes(x: Any, expected: Any) -> bool:
    return type(x) is expected[0] and x.tobytes() == expected[1]


def _is_like(x: Any, expected: Any) -> bool:
    return type(x) is expected[0] and x.shape == expected[1] and x.dtype == expected[2] and getattr(x, "device", None) == expected[3]


class Step(NamedTuple):
    parent: int  # an earlier step, counted from 1; 0: the function itself
    fetch: Callable[[Any, Any], Any]
    key: Any
    check: Callable[[Any, Any], bool]
    expected: Any


class Watch:
    """arrays: the steps that find arrays, by id."""

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.is_complete = True
        self.arrays: dict[int, int] = {}
        self.found: list[Any] = []  # what the steps found when they were listed

    def compiled(self, wanted: Sequence[int]) -> Callable[[Any], tuple[Any, ...] | None]:
        """A function of the watched one: what the wanted steps find, if all that is watched is unchanged; else None.

        It is compiled, because a step that is interpreted takes ten times as long."""
        lines = ["def values(v0):", " try:"]
        names: dict[str, Any] = {"M": _MISSING, "in_class": _in_class}
        for n, step in enumerate(self.steps, 1):
            names |= {f"k{n}": step.key, f"e{n}": step.expected, f"f{n}": step.fetch, f"c{n}": step.check}
            fetch = _FETCHES.get(step.fetch, "f{n}(v{p}, k{n})")
            check = _CHECKS.get(step.check, "not c{n}(v{n}, e{n})")
            if step.check is _equals_float and not (step.expected < 0 or step.expected > 0):
                check = "not c{n}(v{n}, e{n})"  # a zero with its sign, or NaN
            if step.check is _is_like:
                names |= dict(zip((f"t{n}", f"s{n}", f"d{n}", f"g{n}"), step.expected, strict=True))
                if step.expected[3] is None:
                    check = "type(v{n}) is not t{n} or v{n}.dtype != d{n} or v{n}.shape != s{n}"
            lines.append("  " + f"v{{n}} = {fetch}".format(n=n, p=step.parent, key=step.key))
            lines.append("  " + f"if {check}: return None".format(n=n))
        lines.append("  return ({})".format("".join(f"v{n}, " for n in wanted)))
        lines.append(" except (AttributeError, IndexError, KeyError, TypeError, ValueError): return None")
        exec("\n".join(lines), names)
        found: Callable[[Any], tuple[Any, ...] | None] = names["values"]
        return found


_FETCHES: dict[Any, str] = {
    _itself: "v{p}",
    _type: "type(v{p})",
    _attribute: "v{p}.{key}",
    _cell: "v{p}.__closure__[{key}].cell_contents",
    _global: "v{p}.__globals__.get(k{n}, M)",
    _entry: "v{p}.get(k{n}, M)",
    _item: "v{p}[k{n}]",
    _in_class: "in_class(v{p}, k{n})",
    _in_module: "v{p}.__dict__.get(k{n}, M)",
}
_CHECKS: dict[Any, str] = {
    _is: "v{n} is not e{n}",
    _is_of_type: "type(v{n}) is not e{n}",
    _has_length: "type(v{n}) is not e{n}[0] or len(v{n}) != e{n}[1]",
    _equals: "type(v{n}) is not type(e{n}) or v{n} != e{n}",
    _equals_float: "type(v{n}) is not float or v{n} != e{n}",
    _is_like: "type(v{n}) is not t{n} or v{n}.dtype != d{n} or v{n}.device != g{n} or v{n}.shape != s{n}",
}


class _Walk:
    """One pass over what a function reads, for the attributes of these names."""

    def __init__(self, function: Any, names: frozenset[str]):
        self.watch = Watch()
        self.names = names  # attributes that are followed
        self.seen_names: set[str] = set()
        self._seen: set[int] = set()
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
        if not self.watch.is_complete:
            return
        if isinstance(x, float) and type(x) is float:
            self._step(parent, fetch, key, _equals_float, x, x)
        elif type(x) in (bool, int, str, bytes, complex):
            self._step(parent, fetch, key, _equals, x, x)
        elif x is None or x is _MISSING or x is Ellipsis or x is NotImplemented or isinstance(x, (enum.Enum, types.CodeType)):
            self._step(parent, fetch, key, _is, x, x)
        elif _is_numpy_scalar(x):
            self._step(parent, fetch, key, _has_bytes, (type(x), x.tobytes()), x)
        elif _is_array(x):
            self._array(parent, fetch, key, x)
        elif id(x) in self._seen:  # it is listed; that it is still the same object has to be seen here
            self._step(parent, fetch, key, _is, x, x)
        else:
            self._seen.add(id(x))
            self._object(parent, fetch, key, x)

    def _array(self, parent: int, fetch: Callable[..., Any], key: Any, x: Any) -> None:
        expected = type(x), x.shape, x.dtype, getattr(x, "device", None)
        self.watch.arrays.setdefault(id(x), self._step(parent, fetch, key, _is_like, expected, x))

    def _object(self, parent: int, fetch: Callable[..., Any], key: Any, x: Any) -> None:
        kind = type(x)
        if kind is types.FunctionType:
            if is_trusted(x.__globals__.get("__name__")):
                self._step(parent, fetch, key, _is, x, x)
            else:
                self._function(self._step(parent, fetch, key, _is_of_type, kind, x), x)
        elif kind is types.MethodType:
            at = self._step(parent, fetch, key, _is_of_type, kind, x)
            self._look(at, _attribute, "__func__", x.__func__)
            self._look(at, _attribute, "__self__", x.__self__)
        elif kind is functools.partial:
            at = self._step(parent, fetch, key, _is_of_type, kind, x)
            for name in ("func", "args", "keywords"):
                self._look(at, _attribute, name, getattr(x, name))
        elif isinstance(x, (types.ModuleType, type)):
            self._namespace(parent, fetch, key, x)
        elif kind in (tuple, list) or (isinstance(x, tuple) and hasattr(kind, "_fields")):
            at = self._step(parent, fetch, key, _has_length, (kind, len(x)), x)
            for n, each in enumerate(x):
                self._look(at, _item, n, each)
            if kind not in (tuple, list):
                self._look(at, _type, None, kind)
        elif kind in (dict, OrderedDict):
            at = self._step(parent, fetch, key, _has_keys, (kind, tuple(x)), x)
            for name, each in x.items():
                if not isinstance(name, (str, int, bool, bytes, type(None), tuple)):
                    self.watch.is_complete = False
                self._look(at, _item, name, each)
        elif kind in (set, frozenset) and all(type(each) in (bool, int, str) for each in x):
            self._step(parent, fetch, key, _equals, kind(x), x)
        elif kind in (property, staticmethod, classmethod, functools.cached_property):
            at = self._step(parent, fetch, key, _is, x, x)
            inner = getattr(x, "fget", None) or getattr(x, "func", None) or getattr(x, "__func__", None)
            self._look(at, _itself_of(inner), None, inner)
        elif _is_unchanging(x):
            self._step(parent, fetch, key, _is, x, x)
        elif kind.__flags__ & 1 << 9 or kind is types.SimpleNamespace:  # a class made by Python
            self._instance(parent, fetch, key, x)
        else:
            self.watch.is_complete = False

    def _function(self, at: int, x: types.FunctionType) -> None:
        self._step(at, _attribute, "__code__", _is, x.__code__, x.__code__)
        names = names_of(x.__code__)
        self.seen_names |= names.of_attributes
        known = names.of_globals | names.of_attributes
        if known & _UNFOLLOWED or not all(map(is_trusted, names.imports)):
            self.watch.is_complete = False
            return
        for name, more in (("__defaults__", x.__defaults__), ("__kwdefaults__", x.__kwdefaults__)):
            self._look(at, _attribute, name, more)
        for n, cell in enumerate(x.__closure__ or ()):
            try:
                self._look(at, _cell, n, cell.cell_contents)
            except ValueError:  # it has no value yet
                self.watch.is_complete = False
        for name in sorted(names.of_globals):
            self._look(at, _global, name, _global(x, name))  # a name of builtins has to be missing here

    def _namespace(self, parent: int, fetch: Callable[..., Any], key: Any, x: Any) -> None:
        """A module or a class."""
        at = self._step(parent, fetch, key, _is, x, x)
        if isinstance(x, types.ModuleType):
            if not is_trusted(x.__name__):
                for name in sorted(self.names & x.__dict__.keys()):
                    self._look(at, _in_module, name, x.__dict__[name])
        elif not is_trusted(x.__module__):
            if type(x) is not type and not is_trusted(type(x).__module__):
                self._look(at, _type, None, type(x))
            for name in sorted(self.names | {name for name in dir(x) if name.startswith("__")} - _OF_CLASSES):
                if (found := _in_class(x, name)) is not _MISSING:
                    self._look(at, _in_class, name, found)

    def _instance(self, parent: int, fetch: Callable[..., Any], key: Any, x: Any) -> None:
        """An object, of which the attributes that code names are read, in its dictionary or its class. All are read of an object whose
        class, or a base of it, is a library's, because the library's code is not followed."""
        kind = type(x)
        trusted = any(is_trusted(each.__module__) and not _is_plain(each) for each in kind.__mro__)
        if any(map(_hides_state, kind.__mro__)):
            self.watch.is_complete = False
            return
        at = self._step(parent, fetch, key, _is_of_type, kind, x)
        self._look(at, _type, None, kind)
        for name in sorted({name for each in kind.__mro__ for name in getattr(each, "__slots__", ()) if name in self.names or trusted}):
            if name not in ("__dict__", "__weakref__"):
                self._look(at, _slot, name, _slot(x, name))
        own = getattr(x, "__dict__", None)
        if own is None:
            return
        inside = self._step(at, _attribute, "__dict__", _is_of_type, dict, own)
        is_module = "_parameters" in own and "_modules" in own  # a torch.nn.Module, which finds attributes in dictionaries of its own
        for name in sorted(own if trusted else self.names | _HOOKS if is_module else self.names):
            if name in own or _in_class(kind, name) is not _MISSING:
                self._look(inside, _entry, name, own.get(name, _MISSING))
        for holder in ("_parameters", "_buffers", "_modules") if is_module and not trusted else ():
            held = self._step(inside, _item, holder, _is_of_type, type(own[holder]), own[holder])
            for name in sorted(self.names & own[holder].keys()):
                self._look(held, _entry, name, own[holder][name])


_HOOKS = frozenset({"_forward_hooks", "_forward_pre_hooks"})
# Methods of classes that operators do not call.
_OF_CLASSES = frozenset(dir(type)) | {"__annotations__", "__weakref__", "__orig_bases__", "__parameters__", "__firstlineno__"}
_OF_CLASSES |= {"__static_attributes__", "__setstate__", "__getstate__", "__match_args__", "__dataclass_fields__", "__dataclass_params__"}
_OF_CLASSES -= {"__call__", "__or__", "__ror__"}
_DESCRIPTORS = frozenset(
    (
        *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
        types.ClassMethodDescriptorType,
    )
)
_UNCHANGING = frozenset(
    (
        *("numpy.ufunc", "numpy._ArrayFunctionDispatcher", "torch.dtype", "torch.device", "torch.layout", "torch.memory_format"),
        *("torch._ops.OpOverload", "torch._ops.OpOverloadPacket", "functools._lru_cache_wrapper", "builtins.range", "builtins.slice"),
        "_collections._tuplegetter",
    )
)


def _is_plain(kind: type) -> bool:
    """Whether the class's own code reads nothing of an object but what is listed in any case."""
    return kind in (object, types.SimpleNamespace) or (kind.__module__, kind.__name__) == ("torch.nn.modules.module", "Module")


def _hides_state(kind: type) -> bool:
    """Whether objects of this class have memory that Python does not see, or find attributes in another way."""
    if _is_plain(kind):
        return False
    own = kind.__dict__
    made_in_c = not kind.__flags__ & 1 << 9 or any(isinstance(x, types.MethodDescriptorType) for x in own.values())
    return made_in_c or isinstance(own.get("__new__"), types.BuiltinFunctionType) or "__getattribute__" in own


def _slot(x: Any, name: str) -> Any:
    return getattr(x, name, _MISSING)


def _itself_of(inner: Any) -> Callable[[Any, Any], Any]:
    return lambda _, __: inner


def _is_array(x: Any) -> bool:
    torch, numpy = sys.modules.get("torch"), sys.modules.get("numpy")
    return (torch is not None and isinstance(x, torch.Tensor)) or (numpy is not None and isinstance(x, numpy.ndarray))


def _is_numpy_scalar(x: Any) -> bool:
    numpy = sys.modules.get("numpy")
    return numpy is not None and isinstance(x, numpy.generic) and not isinstance(x, numpy.object_)


def _is_unchanging(x: Any) -> bool:
    """Whether x is a function in C of a library that is trusted, or a value of it without a state, such as a dtype."""
    kind = type(x)
    if kind is types.BuiltinFunctionType:
        of = x.__self__
        if not isinstance(of, (types.ModuleType, type, type(None))):
            return False  # a method of an object
        return is_trusted(x.__module__ or getattr(of, "__name__" if isinstance(of, types.ModuleType) else "__module__", None))
    if kind in _DESCRIPTORS:
        return True
    return f"{kind.__module__}.{kind.__qualname__}" in _UNCHANGING or kind.__module__ == "numpy.dtypes"


def watch(function: Any) -> Watch:
    """What the function reads now."""
    names = frozenset({"forward"})  # which torch.nn.Module calls
    for _ in range(8):
        walk = _Walk(function, names)
        if not walk.watch.is_complete or walk.seen_names <= names:
            return walk.watch
        names |= walk.seen_names
    walk.watch.is_complete = False
    return walk.watch


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
