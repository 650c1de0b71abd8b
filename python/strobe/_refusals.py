"""Refusals as data: the argument, what is wrong, and what is accepted, in parts. This module makes a line of text from a refusal, with the
argument names of the function that was called.

The library gives refusals as records (strobe_last_refusal); Python's own checks make them with refusing(). An exception carries its
refusals, so that a function with names of its own can word them again."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Set
from contextvars import ContextVar
from typing import Any, NamedTuple, TypeVar

from ._abi import DTYPES, NO_DTYPE, exception_for, last_failure, text
from ._core import ffi, lib

ErrorT = TypeVar("ErrorT", bound=Exception)

# The kinds of the library's refusals, by their number: "shape", "dtype", ...
CODES: dict[int, str] = {number: name.removeprefix("STROBE_CODE_").lower() for number, name in ffi.typeof("strobe_code").elements.items()}
_DTYPE_NAMES = {number: name for name, number in DTYPES.items()}


class Name(NamedTuple):
    """An argument of strobe.attention(), for which the caller's function may have another name."""

    of: str


class Absent(NamedTuple):
    """What a C caller writes for Python's None."""

    in_c: str


class Sizes(NamedTuple):
    """The size, or the stride, of each axis."""

    sizes: tuple[int, ...]

    def __str__(self) -> str:
        return f"({', '.join(map(str, self.sizes))})"


class Axes(NamedTuple):
    """Accepted axes: their names, their sizes (-1: any), and whether size 1 is accepted as well."""

    roles: tuple[str, ...]
    sizes: tuple[int, ...]
    or_one: tuple[bool, ...]

    def __str__(self) -> str:
        ones = ["|1" if one else "" for one in self.or_one]
        roles = ", ".join(role + one for role, one in zip(self.roles, ones, strict=True))
        sizes = ", ".join("any" if size < 0 else f"{size}{one}" for size, one in zip(self.sizes, ones, strict=True))
        return f"({roles})" + ("" if all(size < 0 for size in self.sizes) else f" = ({sizes})")


class AxisOf(NamedTuple):
    """An axis of the refused tensor."""

    axis: int

    def __str__(self) -> str:
        return ("first", "second", "third", "fourth")[self.axis]


class Types(NamedTuple):
    """One or more dtypes."""

    names: tuple[str, ...]

    def __str__(self) -> str:
        return ", ".join(self.names)


class Hint(NamedTuple):
    """What the caller may have meant, as the end of the line. It is left out if the caller's function lacks an argument in `needs`."""

    words: str
    values: tuple[Any, ...] = ()
    needs: tuple[str, ...] = ()  # arguments of strobe.attention() beside the refused one
    axes_of: str = ""  # the tensor of whose axes the hint speaks


class Either(NamedTuple):
    """Alternative hints."""

    hints: tuple[Hint, ...]


class OtherLayout(NamedTuple):
    """The tensors would fit in this layout."""

    layout: str


AnyHint = Hint | Either | OtherLayout


class Refusal(NamedTuple):
    argument: str | None  # None: the words name it
    words: str  # {0} is the place of the first value
    values: tuple[Any, ...] = ()
    code: str = ""  # one of CODES
    hints: tuple[AnyHint, ...] = ()

    def beside(self, *hints: AnyHint) -> Refusal:
        return self._replace(hints=(*self.hints, *hints))


_WITHOUT_LAYOUT = {"bhsd": "(B, S, H, D)", "bshd": "(B, H, S, D)"}  # layout in which the tensors would fit → the function's own axes


class Words:
    """The words of a function. names: strobe.attention()'s arguments → the function's own; known: the arguments of strobe.attention() that
    the function has, None for all; parts: those of q, k and v that are views of another tensor of the caller's, so that a hint about axes
    would mislead."""

    def __init__(self, names: Mapping[str, str] | None = None, known: Set[str] | None = None, parts: Set[str] = frozenset()):
        self._names, self._known, self._parts = names or {}, known, parts

    def name(self, argument: str) -> str:
        return self._names.get(argument, argument)

    def line(self, refusal: Refusal) -> str:
        said = self.said(refusal)
        return said.words if said.argument is None else f"{said.argument}: {said.words}"

    def said(self, refusal: Refusal) -> Refusal:
        """The refusal in this function's names, with all values filled in."""
        argument = None if refusal.argument is None else self.name(refusal.argument)
        words = self._filled(refusal.words, refusal.values) + "".join(self._hint(each, argument) for each in refusal.hints)
        return Refusal(argument, words, code=refusal.code)

    def _filled(self, words: str, values: tuple[Any, ...]) -> str:
        return words.format(*map(self._value, values)) if values else words

    def _value(self, value: Any) -> str:
        if isinstance(value, Name):
            return self.name(value.of)
        if isinstance(value, Absent):
            return "None"
        return f"{value:.6g}" if isinstance(value, float) else str(value)

    def _hint(self, hint: AnyHint, argument: str | None) -> str:
        if isinstance(hint, OtherLayout):
            return self._layout(hint.layout)
        if isinstance(hint, Either):
            fit = [self._filled(each.words, each.values) for each in hint.hints if self._applies(each, argument)]
            return f"; did you mean {', or '.join(fit)}?" if fit else ""
        return self._filled(hint.words, hint.values) if self._applies(hint, argument) else ""

    def _applies(self, hint: Hint, argument: str | None) -> bool:
        known = all((self._known is None or name in self._known) and self.name(name) != argument for name in hint.needs)
        return known and hint.axes_of not in self._parts

    def _layout(self, layout: str) -> str:
        if self._known is None or "layout" in self._known:
            return f'; did you mean layout="{layout}"?'
        if not self._parts.isdisjoint("qkv"):
            return ""
        q, k, v = map(self.name, "qkv")
        return f"; {q}, {k}, {v} are {_WITHOUT_LAYOUT[layout]} here; did you mean {q}.transpose(1, 2)?"


OWN = Words()  # strobe.attention() itself
# The words of the function that the caller called, for a refusal that comes only in the backward.
CALLER: ContextVar[Callable[[], Words]] = ContextVar("caller", default=lambda: OWN)


def refusing(kind: type[ErrorT], argument: str | None, words: str, *values: Any, code: str = "", hints: tuple[AnyHint, ...] = ()) -> ErrorT:
    """An exception for one refusal. words: literal if there are no values."""
    return raised_for(kind, [Refusal(argument, words, values, code, hints)])


def raised_for(kind: type[ErrorT], refusals: Iterable[Refusal]) -> ErrorT:
    """One exception for all refusals: a line for each, no line twice."""
    found = list(refusals)
    error = kind("\n".join(dict.fromkeys(map(OWN.line, found))))
    error.refusals = tuple(found)  # type: ignore[attr-defined]
    return error


def refusals_of(error: BaseException) -> tuple[Refusal, ...]:
    """The refusals that an exception carries; if it carries none, its lines as they are."""
    found: tuple[Refusal, ...] | None = getattr(error, "refusals", None)
    return tuple(Refusal(None, line) for line in str(error).splitlines()) if found is None else found


def in_callers_words(error: Exception) -> Exception:
    """The error in the words of the function that the caller called, for those who get its text alone."""
    words = CALLER.get()()
    return error if words is OWN else raised_for(type(error), map(words.said, refusals_of(error)))


def arguments_of(errors: Iterable[BaseException]) -> list[str | None]:
    """The arguments that are refused."""
    return [refusal.argument for error in errors for refusal in refusals_of(error)]


def first_of_each(refusals: Iterable[Refusal]) -> list[Refusal]:
    """The first refusal of each argument."""
    found: dict[str, Refusal] = {}
    for refusal in refusals:
        found.setdefault(refusal.argument or refusal.words, refusal)
    return list(found.values())


def failure(status: int, of_call: Callable[[Refusal], Refusal | None] = lambda refusal: refusal) -> Exception:
    """The exception for a failed call. of_call: the library's refusal in terms of the Python call; None if that is no argument of it."""
    if status == lib.STROBE_INVALID_ARGUMENT and (said := last_refusals()):
        of_caller = [each for each in map(of_call, said) if each is not None]
        return raised_for(exception_for(status), first_of_each(of_caller or said))
    return last_failure(status)


def last_refusals() -> list[Refusal]:
    """The library's refusals in this thread's last failure."""
    found: list[Refusal] = []
    while (record := lib.strobe_last_refusal(len(found))) != ffi.NULL:
        values = tuple(_value(record.values[n]) for n in range(record.n_values))
        found.append(Refusal(text(record.argument), text(record.words), values, CODES[record.code]))
    return found


def _value(v: Any) -> Any:
    if v.kind == lib.STROBE_VALUE_INTEGER:
        return v.integer
    if v.kind == lib.STROBE_VALUE_NUMBER:
        return v.number
    if v.kind == lib.STROBE_VALUE_AXIS:
        return AxisOf(v.integer)
    if v.kind == lib.STROBE_VALUE_ARGUMENT:
        return Name(text(v.text))
    if v.kind == lib.STROBE_VALUE_ABSENT:
        return Absent(text(v.text))
    if v.kind == lib.STROBE_VALUE_TEXT:
        return text(v.text)
    sizes = tuple(v.sizes[n] for n in range(v.count))
    if v.kind == lib.STROBE_VALUE_SIZES:
        return Sizes(sizes)
    if v.kind == lib.STROBE_VALUE_AXES:
        return Axes(tuple(text(v.roles[n]) for n in range(v.count)), sizes, tuple(bool(v.or_one >> n & 1) for n in range(v.count)))
    return Types(tuple(_DTYPE_NAMES.get(n, f"{n} (none)" if n == NO_DTYPE else f"{n} (unknown)") for n in sizes))
