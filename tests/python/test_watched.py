"""What a function of the score reads may change between calls: a table of ways, each of which the next call has to see. And what the list
of things that are read (strobe._watched) leaves out, keeps and costs."""

from __future__ import annotations

import builtins
import functools
import gc
import math
import sys
import threading
import types
import weakref
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import nodes
import strobe
from strobe import _function
from strobe._watched import names_of, watch
from strobe.arrays.numpy import NUMPY
from strobe.arrays.torch import TORCH

FRAMEWORKS = {"torch": TORCH, "numpy": NUMPY}


def q_of(framework: Any) -> Any:
    return torch.zeros(1, dtype=torch.float64) if framework is TORCH else np.zeros(1)


def outcome(function: Callable[..., Any], framework: Any) -> list[float]:
    """What the recording that a call would use computes, at some scores and positions."""
    wrong: list[Exception] = []
    found = _function.recorded(wrong, {"score": function}, framework, q_of(framework))
    assert not wrong, wrong
    text = found.pop("score_function")
    captured = [x.tolist() for x in found.values()]
    places = [(1.0, 0, 0, 1, 0), (-0.5, 0, 1, 2, 2), (3.0, 1, 0, 0, 3)]
    return [nodes.evaluate(text, dict(zip(nodes.ARGUMENTS, place, strict=True)), captured) for place in places]


def is_known(function: Callable[..., Any], framework: Any) -> bool:
    return _function.as_fields({"score": function}, framework, q_of(framework)) is not None


class Change(NamedTuple):
    """setup: makes f, which reads 2.0 somewhere; change: makes that 3.0 or something else; both are Python. is_followed: the recording is
    used again before the change (None: in one of the libraries)."""

    setup: str
    change: str
    is_followed: bool | None = True


F = "f = lambda s, b, h, i, j: "
CELL = "def of(x):\n  def change():\n    nonlocal x\n    x = 3.0\n"
OBJECT = "class C:\n  pass\nc = C()\n"

CHANGES = {
    # names
    "global": Change(F + "s * x\nx = 2.0", "x = 3.0"),
    "global of another type": Change(F + "s * x\nx = 2", "x = -2.0"),
    "global that becomes a tensor": Change(F + "s * x\nx = 2.0", "x = array([3.0])[0]"),
    "global that hides a function of builtins": Change(F + "s * abs(-2.0)", "abs = lambda x: 3.0"),
    "function that is added to builtins": Change("builtins.added = 2.0\n" + F + "s * added", "builtins.added = 3.0", False),
    "global of another module": Change("x = 2.0\nf = module('def f(s, b, h, i, j): return s * x', x=2.0).f", "f.__globals__['x'] = 3.0"),
    "cell": Change(CELL + "  return lambda s, b, h, i, j: s * x, change\nf, g = of(2.0)", "g()"),
    "cell of a function within": Change(
        CELL + "  def f(s, b, h, i, j):\n    def inner():\n      return [x for _ in (1,)][0]\n"
        "    return s * inner()\n  return f, change\nf, g = of(2.0)",
        "g()",
    ),
    "cell of a generator expression": Change(
        CELL + "  return lambda s, b, h, i, j: s * sum(x for _ in (1,)), change\nf, g = of(2.0)",
        "g()",
    ),
    "cell that a function in a list has": Change(
        CELL + "  return lambda: x, change\nx, g = of(2.0)\nl = [x]\n" + F + "s * l[0]()",
        "g()",
    ),
    "default": Change("def f(s, b, h, i, j, x=2.0):\n  return s * x", "f.__defaults__ = (3.0,)"),
    "default, in place": Change("def f(s, b, h, i, j, x=[2.0]):\n  return s * x[0]", "f.__defaults__[0][0] = 3.0"),
    "keyword default": Change("def f(s, b, h, i, j, *, x=2.0):\n  return s * x", "f.__kwdefaults__['x'] = 3.0"),
    "keyword defaults": Change("def f(s, b, h, i, j, *, x=2.0):\n  return s * x", "f.__kwdefaults__ = {'x': 3.0}"),
    "keyword default, in place": Change("def f(s, b, h, i, j, *, x={'a': 2.0}):\n  return s * x['a']", "f.__kwdefaults__['x']['a'] = 3.0"),
    "code": Change("def f(s, b, h, i, j):\n  return s * 2.0", "f.__code__ = (lambda s, b, h, i, j: s * 3.0).__code__"),
    "attribute of the function": Change("def f(s, b, h, i, j):\n  return s * f.x\nf.x = 2.0", "f.x = 3.0"),
    # helpers
    "helper's code": Change("def g(x):\n  return x * 2.0\n" + F + "g(s)", "g.__code__ = (lambda x: x * 3.0).__code__"),
    "helper's default": Change("def g(x, y=2.0):\n  return x * y\n" + F + "g(s)", "g.__defaults__ = (3.0,)"),
    "helper's global": Change("def g(x):\n  return x * y\ny = 2.0\n" + F + "g(s)", "y = 3.0"),
    "helper of a helper": Change("def g(x):\n  return k(x)\ndef k(x):\n  return x * y\ny = 2.0\n" + F + "g(s)", "y = 3.0"),
    "monkeypatched helper": Change("def g(x):\n  return x * 2.0\n" + F + "g(s)", "def g(x):\n  return x * 3.0"),
    "monkeypatched helper of a module": Change("m = module('def g(x): return x * 2.0')\n" + F + "m.g(s)", "m.g = lambda x: x * 3.0"),
    "monkeypatched function of a library": Change(F + "s * math.sqrt(4.0)", "patch(math, 'sqrt', lambda x: 3.0)"),
    "monkeypatched function of the framework": Change(F + "xp.tanh(s)", "patch(xp, 'tanh', lambda x: x * 3.0)"),
    "attribute that is given to a library": Change("patch(math, 'mine', 2.0)\n" + F + "s * math.mine", "math.mine = 3.0"),
    "helper that recursion calls": Change("def g(x, n):\n  return g(x, n - 1) * y if n else x\ny = 2.0\n" + F + "g(s, 2)", "y = 3.0"),
    # modules, classes and objects
    "attribute of a module": Change("m = module('x = 2.0')\n" + F + "s * m.x", "m.x = 3.0"),
    "attribute of a module in a module": Change("m = module('')\nm.n = module('x = 2.0')\n" + F + "s * m.n.x", "m.n.x = 3.0"),
    "module that is replaced": Change("m = module('x = 2.0')\n" + F + "s * m.x", "m = module('x = 3.0')"),
    "attribute that a module computes": Change(
        "m = module('y = 2.0\\ndef __getattr__(name):\\n  return y')\n" + F + "s * m.x", "m.y = 3.0", False
    ),
    "attribute of an object": Change(OBJECT + "c.x = 2.0\n" + F + "s * c.x", "c.x = 3.0"),
    "nested attribute": Change(OBJECT + "c.d = C()\nc.d.x = 2.0\n" + F + "s * c.d.x", "c.d.x = 3.0"),
    "object that is replaced": Change(OBJECT + "c.x = 2.0\n" + F + "s * c.x", "c = C()\nc.x = 3.0"),
    "class of an object": Change(OBJECT + "class D:\n  x = 3.0\nC.x = 2.0\n" + F + "s * c.x", "c.__class__ = D"),
    "attribute of a class": Change("class C:\n  x = 2.0\n" + F + "s * C.x", "C.x = 3.0"),
    "attribute of a base": Change("class B:\n  x = 2.0\nclass C(B):\n  pass\n" + F + "s * C.x", "B.x = 3.0"),
    "attribute of a class through an object": Change("class C:\n  x = 2.0\nc = C()\n" + F + "s * c.x", "C.x = 3.0"),
    "attribute of a base that a class gets": Change("class B:\n  x = 2.0\nclass C(B):\n  pass\nc = C()\n" + F + "s * c.x", "C.x = 3.0"),
    "attribute of a class that an object gets": Change("class C:\n  x = 2.0\nc = C()\n" + F + "s * c.x", "c.x = 3.0"),
    "bases": Change("class A:\n  x = 2.0\nclass B:\n  x = 3.0\nclass C(A):\n  pass\n" + F + "s * C.x", "C.__bases__ = (B,)"),
    "attribute of a metaclass": Change("class M(type):\n  x = 2.0\nclass C(metaclass=M):\n  pass\n" + F + "s * C.x", "M.x = 3.0"),
    "property": Change("class C:\n  y = 2.0\n  @property\n  def x(self):\n    return self.y\nc = C()\n" + F + "s * c.x", "c.y = 3.0"),
    "property that is replaced": Change(
        "class C:\n  @property\n  def x(self):\n    return 2.0\nc = C()\n" + F + "s * c.x", "C.x = property(lambda self: 3.0)"
    ),
    "cached property": Change(
        "class C:\n  y = 2.0\n  @functools.cached_property\n  def x(self):\n    return self.y\nc = C()\n" + F + "s * c.x",
        "c.y = 3.0\ndel c.x",
    ),
    "descriptor": Change(
        "class D:\n  y = 2.0\n  def __get__(self, c, kind):\n    return self.y\nclass C:\n  x = D()\nc = C()\n" + F + "s * c.x", "D.y = 3.0"
    ),
    "descriptor with a dictionary": Change(
        "class D:\n  def __init__(self):\n    self.of = {}\n  def __get__(self, c, kind):\n    return self.of[c.key]\n"
        "class C:\n  x = D()\n  key = 'a'\nd = vars(C)['x']\nd.of['a'] = 2.0\nc = C()\n" + F + "s * c.x",
        "d.of['a'] = 3.0",
    ),
    "slot": Change("class C:\n  __slots__ = ('x',)\nc = C()\nc.x = 2.0\n" + F + "s * c.x", "c.x = 3.0"),
    "slot that is named by a string": Change("class C:\n  __slots__ = 'xy'\nc = C()\nc.xy = 2.0\n" + F + "s * c.xy", "c.xy = 3.0"),
    "private slot": Change(
        "class C:\n  __slots__ = ('__x',)\n  def __init__(self, x):\n    self.__x = x\n  def get(self):\n    return self.__x\nc = C(2.0)\n"
        + F
        + "s * c.get()",
        "c.__init__(3.0)",
    ),
    "slot of a base": Change(
        "class B:\n  __slots__ = ('x',)\nclass C(B):\n  __slots__ = ()\nc = C()\nc.x = 2.0\n" + F + "s * c.x", "c.x = 3.0"
    ),
    "attribute that is missing": Change(
        "class C:\n  def __getattr__(self, name):\n    return values[name]\nvalues = {'x': 2.0}\nc = C()\n" + F + "s * c.x",
        "values['x'] = 3.0",
    ),
    "attribute that was missing": Change(
        "class C:\n  def __getattr__(self, name):\n    return 2.0\nc = C()\n" + F + "s * c.x", "c.x = 3.0"
    ),
    "every attribute": Change(
        "class C:\n  y = 2.0\n  def __getattribute__(self, name):\n    return object.__getattribute__(self, 'y')\nc = C()\n"
        + F
        + "s * c.x",
        "C.y = 3.0",
        False,
    ),
    "method": Change("class C:\n  def x(self):\n    return 2.0\nc = C()\n" + F + "s * c.x()", "C.x = lambda self: 3.0"),
    "method of an object": Change("class C:\n  def x(self):\n    return 2.0\nc = C()\n" + F + "s * c.x()", "c.x = lambda: 3.0"),
    "super": Change(
        "class B:\n  def x(self):\n    return y\nclass C(B):\n  def x(self):\n    return super().x()\ny = 2.0\nc = C()\n" + F + "s * c.x()",
        "y = 3.0",
    ),
    "method that an operator calls": Change(
        "class C:\n  def __rmul__(self, s):\n    return s * y\ny = 2.0\nc = C()\n" + F + "1.0 * c * s", "y = 3.0"
    ),
    "method that a comparison calls": Change(
        "class C:\n  def __eq__(self, x):\n    return y == x\ny = 2.0\nc = C()\n" + F + "s * (c == 2.0)", "y = 3.0"
    ),
    "method that an index calls": Change(
        "class C:\n  def __getitem__(self, n):\n    return y\ny = 2.0\nc = C()\n" + F + "s * c[0]", "y = 3.0"
    ),
    "method that becomes one of bool": Change(
        "class C:\n  pass\nc = C()\n" + F + "s * 2.0 if c else s * 3.0", "C.__bool__ = lambda self: False"
    ),
    "method that a conversion calls": Change(
        "class C:\n  def __float__(self):\n    return y\ny = 2.0\nc = C()\n" + F + "s * float(c)", "y = 3.0"
    ),
    "method that a string calls": Change(
        "class C:\n  def __repr__(self):\n    return y\ny = '2.0'\nc = C()\n" + F + "s * float(f'{c}')", "y = '3.0'"
    ),
    "constructor": Change("class C:\n  def __init__(self):\n    self.x = y\ny = 2.0\n" + F + "s * C().x", "y = 3.0"),
    "constructor of an object's class": Change(
        "class C:\n  def __init__(self):\n    self.x = y\ny = 2.0\nc = C()\n" + F + "s * type(c)().x", "y = 3.0"
    ),
    "callable": Change("class C:\n  x = 2.0\n  def __call__(self, s, b, h, i, j):\n    return s * self.x\nf = C()", "f.x = 3.0"),
    "callable within": Change("class C:\n  x = 2.0\n  def __call__(self, s):\n    return s * self.x\nc = C()\n" + F + "c(s)", "C.x = 3.0"),
    "method as the function": Change(
        "class C:\n  x = 2.0\n  def g(self, s, b, h, i, j):\n    return s * self.x\nc = C()\nf = c.g", "c.x = 3.0"
    ),
    "class method": Change("class C:\n  x = 2.0\n  @classmethod\n  def g(cls, s):\n    return s * cls.x\n" + F + "C.g(s)", "C.x = 3.0"),
    "static method": Change("class C:\n  @staticmethod\n  def g(s):\n    return s * x\nx = 2.0\n" + F + "C.g(s)", "x = 3.0"),
    "data class": Change("@dataclasses.dataclass\nclass C:\n  x: float = 2.0\nc = C()\n" + F + "s * c.x", "c.x = 3.0"),
    "data class as a whole": Change(
        "@dataclasses.dataclass\nclass C:\n  x: float = 2.0\nc = C()\n" + F + "s * dataclasses.astuple(c)[0]", "c.x = 3.0", False
    ),
    "data class that is compared": Change(
        "@dataclasses.dataclass\nclass C:\n  x: float = 2.0\nc, d = C(), C()\n" + F + "s * (c == d)", "c.x = 3.0"
    ),
    "data class that the function makes": Change(
        "@dataclasses.dataclass\nclass C:\n  x: float\n  def __post_init__(self):\n    self.x = y\ny = 2.0\n" + F + "s * C(1.0).x",
        "y = 3.0",
    ),
    "member of an enumeration": Change(
        "class E(enum.Enum):\n  A = 1\n  def __init__(self, n):\n    self.x = 2.0\n" + F + "s * E.A.x", "E.A.x = 3.0"
    ),
    "method of an enumeration": Change(
        "class E(enum.Enum):\n  A = 1\n  def g(self):\n    return y\ny = 2.0\n" + F + "s * E.A.g()", "y = 3.0"
    ),
    "value of an enumeration": Change("class E(enum.Enum):\n  A = [2.0]\n" + F + "s * E.A.value[0]", "E.A.value[0] = 3.0"),
    "named tuple": Change("P = collections.namedtuple('P', 'x y')\np = P(2.0, 1.0)\n" + F + "s * p.x", "p = P(3.0, 1.0)"),
    "attribute by name": Change(OBJECT + "c.x = 2.0\n" + F + "s * getattr(c, 'x')", "c.x = 3.0", False),
    "attribute by another name": Change(OBJECT + "c.x = 2.0\ng = getattr\n" + F + "s * g(c, 'x')", "c.x = 3.0", False),
    "attribute by operator": Change(OBJECT + "c.x = 2.0\n" + F + "s * operator.attrgetter('x')(c)", "c.x = 3.0", False),
    "attribute by a getter": Change(OBJECT + "c.x = 2.0\ng = operator.attrgetter('x')\n" + F + "s * g(c)", "c.x = 3.0", False),
    "attribute by a caller": Change(
        "class C:\n  def x(self):\n    return y\ny = 2.0\nc = C()\ng = operator.methodcaller\n" + F + "s * g('x')(c)", "y = 3.0", False
    ),
    "item by a getter": Change("l = [2.0]\n" + F + "s * operator.itemgetter(0)(l)", "l[0] = 3.0"),
    "attribute by its dictionary": Change(OBJECT + "c.x = 2.0\n" + F + "s * c.__dict__['x']", "c.x = 3.0", False),
    "attribute by vars": Change(OBJECT + "c.x = 2.0\n" + F + "s * vars(c)['x']", "c.x = 3.0", False),
    "attribute by a pattern": Change(
        OBJECT + "c.x = 2.0\ndef f(s, b, h, i, j):\n  match c:\n    case C(x=x):\n      return s * x", "c.x = 3.0", False
    ),
    "attribute by the place in a pattern": Change(
        OBJECT + "C.__match_args__ = ('x',)\nc.x = 2.0\ndef f(s, b, h, i, j):\n  match c:\n    case C(x):\n      return s * x",
        "c.x = 3.0",
        False,
    ),
    "item by a pattern": Change(
        "d = {'x': 2.0}\ndef f(s, b, h, i, j):\n  match d:\n    case {'x': x}:\n      return s * x", "d['x'] = 3.0", False
    ),
    "sequence by a pattern": Change("l = [2.0]\ndef f(s, b, h, i, j):\n  match l:\n    case [x]:\n      return s * x", "l[0] = 3.0"),
    "attribute that may be missing": Change(
        OBJECT + "def f(s, b, h, i, j):\n  try:\n    return s * c.x\n  except AttributeError:\n    return s * 2.0", "c.x = 3.0", False
    ),
    "attribute that may be missing, in a context": Change(
        OBJECT + "def f(s, b, h, i, j):\n  x = 2.0\n  with contextlib.suppress(AttributeError):\n    x = c.x\n  return s * x",
        "c.x = 3.0",
        False,
    ),
    # containers
    "element of a list": Change("l = [2.0]\n" + F + "s * l[0]", "l[0] = 3.0"),
    "element of a list in a list": Change("l = [[1.0, 2.0]]\n" + F + "s * l[0][1]", "l[0][1] = 3.0"),
    "length of a list": Change("l = [2.0]\n" + F + "s * sum(l)", "l.append(3.0)"),
    "element of a tuple": Change("l = ([2.0],)\n" + F + "s * l[0][0]", "l[0][0] = 3.0"),
    "value of a dictionary": Change("d = {'x': 2.0}\n" + F + "s * d['x']", "d['x'] = 3.0"),
    "key of a dictionary": Change("d = {1: 2.0}\n" + F + "sum([s * k for k in d])", "del d[1]\nd[2] = 2.0"),
    "key of a dictionary of another type": Change(
        "d = {1: 2.0}\n" + F + "i // sum(k / 3 if type(k) is int else 1 for k in d)", "del d[1]\nd[True] = 2.0"
    ),
    "attribute of a key": Change(
        "class E(enum.Enum):\n  A = 1\nE.A.x = 2.0\nd = {E.A: 1.0}\n" + F + "s * sum(e.x for e in d)", "[*d][0].x = 3.0"
    ),
    "attribute of a member of a set": Change(
        "class E(enum.Enum):\n  A = 1\nE.A.x = 2.0\nd = {E.A}\n" + F + "s * sum(e.x for e in d)", "[*d][0].x = 3.0"
    ),
    "order of a dictionary": Change("d = {'x': 2.0, 'y': 3.0}\n" + F + "s * [*d.values()][0]", "d['x'] = d.pop('x')"),
    "ordered dictionary": Change("d = collections.OrderedDict(x=2.0)\n" + F + "s * d['x']", "d['x'] = 3.0"),
    "default of a dictionary": Change("d = collections.defaultdict(lambda: y)\ny = 2.0\n" + F + "s * d[h]", "d.clear()\ny = 3.0", False),
    "member of a set": Change("d = {2}\n" + F + "s * sum(d)", "d.add(3)"),
    "member of a set of another type": Change(
        "d = {1}\n" + F + "s * (2.0 if [type(x) for x in d] == [int] else 3.0)", "d.clear()\nd.add(True)"
    ),
    "deque": Change("d = collections.deque([2.0])\n" + F + "s * d[0]", "d[0] = 3.0", False),
    "bytearray": Change("d = bytearray([2])\n" + F + "s * d[0]", "d[0] = 3", False),
    "mapping proxy": Change("e = {'x': 2.0}\nd = types.MappingProxyType(e)\n" + F + "s * d['x']", "e['x'] = 3.0", False),
    "subclass of dict": Change("class D(dict):\n  pass\nd = D(x=2.0)\n" + F + "s * d['x']", "d['x'] = 3.0", False),
    "subclass of float": Change("class N(float):\n  pass\nx = N(2.0)\nx.y = 2.0\n" + F + "s * x.y", "x.y = 3.0", False),
    "simple namespace": Change("n = types.SimpleNamespace(x=2.0)\n" + F + "s * n.x", "n.x = 3.0"),
    "iterator": Change("n = iter(range(2, 99))\n" + F + "s * next(n)", "next(n)", False),
    "generator": Change("n = (x for x in range(2, 99))\n" + F + "s * next(n)", "next(n)", False),
    "weak reference": Change(OBJECT + "c.x = 2.0\nr = weakref.ref(c)\n" + F + "s * r().x", "c.x = 3.0", False),
    "variable of a context": Change("v = contextvars.ContextVar('v')\nv.set(2.0)\n" + F + "s * v.get()", "v.set(3.0)", False),
    "variable of a thread": Change("v = threading.local()\nv.x = 2.0\n" + F + "s * v.x", "v.x = 3.0", False),
    "variable of the environment": Change(
        "os.environ['OF_THE_TEST'] = '2'\n" + F + "s * float(os.environ['OF_THE_TEST'])", "os.environ['OF_THE_TEST'] = '3'", None
    ),
    # wrappers
    "partial's arguments": Change("def g(x, s, b, h, i, j):\n  return s * x[0]\nl = [2.0]\nf = functools.partial(g, l)", "l[0] = 3.0"),
    "partial's keywords": Change("def f(s, b, h, i, j, x):\n  return s * x\nf = functools.partial(f, x=2.0)", "f.keywords['x'] = 3.0"),
    "partial's function": Change("def g(s, b, h, i, j):\n  return s * x\nx = 2.0\nf = functools.partial(g)", "x = 3.0"),
    "partial's attribute": Change("def g(s, b, h, i, j):\n  return s * f.x\nf = functools.partial(g)\nf.x = 2.0", "f.x = 3.0"),
    "partial of getattr": Change(OBJECT + "c.x = 2.0\ng = functools.partial(getattr, c)\n" + F + "s * g('x')", "c.x = 3.0", False),
    "partial method": Change(
        "class C:\n  def g(self, s, l):\n    return s * l[0]\n  k = functools.partialmethod(g, l=[2.0])\nc = C()\n" + F + "c.k(s)",
        "vars(C)['k'].keywords['l'][0] = 3.0",
        None,
    ),
    "wrapped function": Change(
        "def d(g):\n  @functools.wraps(g)\n  def w(*a):\n    return g(*a)\n  return w\n@d\ndef f(s, b, h, i, j):\n  return s * x\nx = 2.0",
        "x = 3.0",
    ),
    "no_grad as a decorator": Change("@torch.no_grad()\ndef f(s, b, h, i, j):\n  return s * x\nx = 2.0", "x = 3.0"),
    "no_grad as a decorator of a helper": Change("@torch.no_grad()\ndef g(s):\n  return s * x\nx = 2.0\n" + F + "g(s)", "x = 3.0"),
    "inference_mode as a decorator": Change("@torch.inference_mode()\ndef g(s):\n  return s * x\nx = 2.0\n" + F + "g(s)", "x = 3.0"),
    "cache": Change("@functools.cache\ndef g():\n  return x\nx = 2.0\n" + F + "s * g()", "x = 3.0\ng.cache_clear()", False),
    "cache that is cleared later": Change(
        "@functools.lru_cache(8)\ndef g():\n  return x\nx = 2.0\ng()\nx = 3.0\n" + F + "s * g()", "g.cache_clear()", False
    ),
    "cached method": Change(
        "class C:\n  @functools.lru_cache\n  def g(self):\n    return x\nx = 2.0\nc = C()\n" + F + "s * c.g()",
        "x = 3.0\nC.g.cache_clear()",
        False,
    ),
    "single dispatch": Change(
        "@functools.singledispatch\ndef g(n):\n  return 1.0\n@g.register\ndef _(n: int):\n  return x\nx = 2.0\n" + F + "s * g(1)",
        "x = 3.0",
        False,
    ),
    "single dispatch that is registered": Change(
        "@functools.singledispatch\ndef g(n):\n  return 2.0\n" + F + "s * g(1)", "g.register(int, lambda n: 3.0)", False
    ),
    "single dispatch of a method": Change(
        "class C:\n  @functools.singledispatchmethod\n  def g(self, n):\n    return x\nx = 2.0\nc = C()\n" + F + "s * c.g(1)",
        "x = 3.0",
        False,
    ),
    "context as a decorator": Change(
        "@contextlib.contextmanager\ndef c():\n  yield\n@c()\ndef g(s):\n  return s * x\nx = 2.0\n" + F + "g(s)", "x = 3.0", False
    ),
    "function of functions": Change("def g(a, n):\n  return a * x + n\nx = 2.0\n" + F + "s * functools.reduce(g, [1.0, 1.0])", "x = 3.0"),
    "vectorized function": Change("g = np.vectorize(lambda n: x)\nx = 2.0\n" + F + "s * float(g(1.0))", "x = 3.0", None),
    "universal function of Python": Change("g = np.frompyfunc(lambda n: x, 1, 1)\nx = 2.0\n" + F + "s * float(g(1.0))", "x = 3.0", False),
    "vmap": Change("g = torch.func.functionalize(lambda n: n * x)\nx = 2.0\n" + F + "g(s)", "x = 3.0", None),
    # what an import in the function reads
    "import": Change(
        "sys.modules['of_the_test'] = module('x = 2.0')\ndef f(s, b, h, i, j):\n  import of_the_test\n  return s * of_the_test.x",
        "sys.modules['of_the_test'].x = 3.0",
        False,
    ),
    "clock": Change(F + "s * float(time.perf_counter())", "", False),
    "date": Change(F + "s * (1 + datetime.datetime.now().timestamp() % 1)", "", False),
    "random number": Change(F + "s * random.random()", "", False),
    "identity": Change(OBJECT + "k = id(c)\n" + F + "s * (2.0 if id(c) == k else 3.0)", "c = C()\nkept = c", False),
    # state of the libraries
    "default dtype": Change(
        F + "s * (2.0 if torch.get_default_dtype() == torch.float32 else 3.0)",
        "undo(torch.set_default_dtype, torch.float32)\ntorch.set_default_dtype(torch.float64)",
        False,
    ),
    "grad mode": Change(
        "from torch import is_grad_enabled\n" + F + "s * (2.0 if is_grad_enabled() else 3.0)",
        "undo(torch.set_grad_enabled, True)\ntorch.set_grad_enabled(False)",
        False,
    ),
    "flag of a backend": Change(
        F + "s * (2.0 if torch.backends.cudnn.benchmark else 3.0)",
        "undo(setattr, torch.backends.cudnn, 'benchmark', torch.backends.cudnn.benchmark)\ntorch.backends.cudnn.benchmark ^= True",
        False,
    ),
    # arrays
    "elements of an array": Change("t = array([2.0, 2.0])\n" + F + "s * t[h]", "t[0] = t[1] = 3.0"),
    "array that is replaced": Change("t = array([2.0, 2.0])\n" + F + "s * t[h]", "t = array([3.0, 3.0])"),
    "shape of an array": Change("t = array([2.0, 2.0])\n" + F + "s * len(t)", "t = array([2.0, 2.0, 2.0])"),
    "attribute of an array": Change("t = subclassed([1.0, 1.0])\nt.x = 2.0\n" + F + "s * t.x", "t.x = 3.0", None),
    "one of two names of an array": Change("t = array([2.0, 2.0])\nl = [t]\n" + F + "s * l[0][h] + t[h]", "t = array([3.0, 3.0])"),
    "one of two names of an array, the other way": Change(
        "t = array([2.0, 2.0])\nl = [t]\n" + F + "s * l[0][h] + t[h]", "l[0] = array([3.0, 3.0])"
    ),
    "one of two names of an object": Change(OBJECT + "c.x = 2.0\nl = [c]\n" + F + "s * l[0].x * c.x", "c = C()\nc.x = 3.0"),
    "one of two names of an object, the other way": Change(
        OBJECT + "c.x = 2.0\nl = [c]\n" + F + "s * l[0].x * c.x", "l[0] = C()\nl[0].x = 3.0"
    ),
    "array in a data class": Change(
        "@dataclasses.dataclass\nclass C:\n  t: object\nc = C(array([2.0, 2.0]))\n" + F + "s * c.t[h]", "c.t[0] = c.t[1] = 3.0"
    ),
    "array in a namespace": Change("n = types.SimpleNamespace(t=array([2.0, 2.0]))\n" + F + "s * n.t[h]", "n.t[0] = n.t[1] = 3.0"),
    "array in an ordered dictionary": Change("d = collections.OrderedDict(t=array([2.0, 2.0]))\n" + F + "s * d['t'][h]", "d['t'][:] = 3.0"),
    "array in a named tuple": Change("P = collections.namedtuple('P', 't')\np = P(array([2.0, 2.0]))\n" + F + "s * p.t[h]", "p.t[:] = 3.0"),
    "array in a callable": Change(
        "class C:\n  def __init__(self):\n    self.t = array([2.0, 2.0])\n  def __call__(self, s, b, h, i, j):\n    return self.k(s, h)\n"
        "  def k(self, s, h):\n    return s * self.t[h]\nf = C()",
        "f.t[:] = 3.0",
    ),
    "array of a method's global": Change(
        "class C:\n  def __call__(self, s, b, h, i, j):\n    return s * t[h]\nt = array([2.0, 2.0])\nf = C()", "t[:] = 3.0"
    ),
    "array of NumPy, by a number": Change("n = module('')\nn.t = np.array([2.0, 1.0])\n" + F + "s * float(n.t[0])", "n.t[0] = 3.0", False),
    "array of NumPy, as a tensor": Change("t = np.array([2.0])\n" + F + "s * torch.as_tensor(t)[0]", "t[0] = 3.0", False),
    "array of NumPy, as a sum": Change("n = module('')\nn.t = np.array([1.0, 1.0])\n" + F + "s * float(n.t.sum())", "n.t[0] = 2.0", False),
    "strides of a tensor": Change("t = torch.zeros(2, 2)\n" + F + "s * t.stride(0)", "t = t.T", False),
    "whether a tensor has a gradient": Change(
        "t = torch.zeros(2)\n" + F + "s * (2.0 if t.requires_grad else 3.0)", "t.requires_grad_()", False
    ),
    "gradient of a tensor": Change("t = torch.zeros(2)\n" + F + "s * (2.0 if t.grad is None else 3.0)", "t.grad = torch.ones(2)", False),
    "operator of Python": Change(
        "l = torch.library.Library('of_the_test', 'FRAGMENT')\nl.define('g(Tensor x) -> Tensor')\n"
        "l.impl('g', lambda n: n * x, 'CompositeImplicitAutograd')\nx = 2.0\nundo(l._destroy)\n" + F + "torch.ops.of_the_test.g(s)",
        "x = 3.0",
        False,
    ),
    "scalar of NumPy": Change("t = np.float64(2.0)\n" + F + "s * t.item()", "t = np.float64(3.0)"),
}

IN_TORCH = {
    "no_grad as a decorator", "no_grad as a decorator of a helper", "inference_mode as a decorator", "vmap", "array of NumPy, as a tensor",
    "attribute of an array", "strides of a tensor", "whether a tensor has a gradient", "gradient of a tensor",
    "operator of Python",
}  # fmt: skip


LIBRARIES = (
    *("collections", "contextlib", "contextvars", "dataclasses", "datetime", "enum", "functools", "math", "operator", "os", "random"),
    *("sys", "threading", "time", "types", "weakref"),
)


def scope_of(name: str, cleanup: list[Callable[[], Any]]) -> dict[str, Any]:
    """The globals of a case."""
    torch_s = name == "torch"

    def array(x: Any) -> Any:
        return torch.tensor(x, dtype=torch.float64) if torch_s else np.array(x)

    def subclassed(x: Any) -> Any:
        return array(x) if torch_s else array(x).view(type("Own", (np.ndarray,), {}))

    def module(code: str, **names: Any) -> types.ModuleType:
        found = types.ModuleType("of_the_test")
        found.__dict__.update(names)
        exec(code, found.__dict__)
        return found

    def undo(function: Callable[..., Any], *arguments: Any) -> None:
        cleanup.append(functools.partial(function, *arguments))

    def patch(of: Any, attribute: str, x: Any) -> None:
        undo(*((setattr, of, attribute, getattr(of, attribute)) if hasattr(of, attribute) else (delattr, of, attribute)))
        setattr(of, attribute, x)

    scope: dict[str, Any] = {"__name__": "of_the_test", "xp": torch if torch_s else np, "torch": torch, "np": np, "builtins": builtins}
    for each in LIBRARIES:
        scope[each] = __import__(each)
    return scope | {"array": array, "subclassed": subclassed, "module": module, "undo": undo, "patch": patch}


@pytest.fixture
def cleanup(monkeypatch):
    _function._recordings.clear()
    functions: list[Callable[[], Any]] = []
    monkeypatch.setenv("OF_THE_TEST", "")
    yield functions
    for each in functions[::-1]:
        each()
    sys.modules.pop("of_the_test", None)
    vars(builtins).pop("added", None)


@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("library", FRAMEWORKS)
def test_every_change_is_seen(name, library, cleanup):
    if library == "numpy" and name in IN_TORCH:
        pytest.skip("a function of torch alone")
    framework, case, scope = FRAMEWORKS[library], CHANGES[name], scope_of(library, cleanup)
    sys.modules["of_the_test"] = types.ModuleType("of_the_test")  # where a data class looks for its types
    exec(case.setup, scope)
    first = outcome(scope["f"], framework)
    again = outcome(scope["f"], framework)
    assert first == again or case.is_followed is False
    if case.is_followed is not None:
        assert is_known(scope["f"], framework) == case.is_followed
    exec(case.change, scope)
    got = [outcome(scope["f"], framework) for _ in range(3)]
    _function._recordings.clear()
    expected = outcome(scope["f"], framework)
    assert expected != first  # the case changes something
    if case.change and name not in ("iterator", "generator"):
        assert got == 3 * [expected]
    else:  # it changes by itself
        assert len({*map(tuple, [first, again, *got, expected])}) == 6


@pytest.mark.parametrize("library", FRAMEWORKS)
def test_many_changes_in_turn(library, cleanup):
    """Numbers that come again find their recordings, in whatever order, and functions of one code do not mix."""
    framework, scope = FRAMEWORKS[library], scope_of(library, cleanup)
    exec("def of(x, l, t):\n  return lambda s, b, h, i, j: s * x + l[0] * t[h] + y\ny = 0.0", scope)
    rng = np.random.default_rng(1)
    functions = [(x, l, scope["of"](x, [l], scope["array"]([1.0, t]))) for x in (1.0, 2.0) for l in (3.0, 4.0) for t in (5.0, 6.0)]
    for _ in range(100):
        scope["y"] = float(rng.integers(3))
        x, l, function = functions[rng.integers(len(functions))]
        ones = outcome(function, framework)[0]
        assert ones == x + l + scope["y"]
    (entry,) = [each for each in _function._recordings.values() if each.code is functions[0][2].__code__]
    assert len(entry.known) == 12  # the tensors' numbers are read in each call


def made(n: int) -> Callable[..., Any]:
    """A function with a code of its own."""
    scope: dict[str, Any] = {}
    exec(f"f = lambda s, b, h, i, j: s + {n}", scope)
    return scope["f"]


def test_the_recordings_that_are_used_stay(monkeypatch):
    monkeypatch.setattr(_function, "_MOST_CODES", 4)
    monkeypatch.setattr(_function, "_MOST_RECORDINGS", 3)
    _function._recordings.clear()
    used, others = made(0), [made(n) for n in range(1, 9)]
    outcome(used, TORCH)
    for each in others:
        outcome(each, TORCH)
        assert is_known(used, TORCH)
    assert [is_known(each, TORCH) for each in others] == [False] * 5 + [True] * 3

    def of(x: float) -> Callable[..., Any]:
        return lambda s, b, h, i, j: s * x

    outcome(of(0.0), TORCH)
    for n in range(1, 9):
        outcome(of(float(n)), TORCH)
        assert is_known(of(0.0), TORCH)
    assert [is_known(of(float(n)), TORCH) for n in range(9)] == [True] + [False] * 6 + [True] * 2


def test_threads_record_and_find_at_once(monkeypatch):
    monkeypatch.setattr(_function, "_MOST_CODES", 5)  # so that recordings are dropped and made again
    _function._recordings.clear()
    interval, failed = sys.getswitchinterval(), []
    tables = {TORCH: torch.arange(2, dtype=torch.float64), NUMPY: np.arange(2.0)}

    def run(own: int) -> None:
        try:
            for n in range(60):
                framework = (TORCH, NUMPY)[(own + n) % 2]
                x, table = float(n % 3), tables[framework]
                given = made(own), made(n % 7), lambda s, b, h, i, j: s * x + table[h]  # noqa: B023
                assert [outcome(function, framework)[1] for function in given] == [own - 0.5, n % 7 - 0.5, 1 - 0.5 * x]
        except BaseException as error:
            failed.append(error)

    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=run, args=(n,)) for n in range(6)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
    finally:
        sys.setswitchinterval(interval)
    assert not failed, failed
    assert len(_function._recordings) <= 5
    assert outcome(made(3), TORCH)[0] == 4.0  # no mode of another thread is left


def test_a_cache_keeps_no_tensor_of_a_recording():
    """Such a tensor has no numbers."""

    @functools.cache
    def slopes() -> torch.Tensor:
        return 2.0 ** -torch.arange(1, 3)

    for _ in range(3):
        assert outcome(lambda s, b, h, i, j: s * slopes()[h], TORCH)[:2] == [0.5, -0.125]
    assert slopes().tolist() == [0.5, 0.25]


@pytest.mark.parametrize("library", FRAMEWORKS)
def test_what_the_function_keeps_is_refused(library):
    kept: list[Any] = []

    def keeps(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        kept.append(s)
        return kept[0] * 2 if b is None else kept[0] * s

    def returns(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        kept.append(s)
        return kept[0]

    for function in (keeps, returns):
        kept.clear()
        outcome(function, FRAMEWORKS[library])
        with pytest.raises(AssertionError, match="kept when it was recorded before; accepted"):
            outcome(function, FRAMEWORKS[library])


def test_what_changes_while_the_function_runs_is_not_kept():
    values = [1.0]

    def function(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        values[0] += 1
        return s * values[0]

    assert [outcome(function, TORCH)[0] for _ in range(3)] == [2.0, 3.0, 4.0]


class Holder:
    table: Any
    again: Any


def test_no_object_is_kept():
    """Neither the arrays nor the objects that hold them, though they are found in several ways."""

    def call() -> list[weakref.ref[Any]]:
        table = torch.zeros(2, dtype=torch.float64)
        holder = Holder()
        holder.table, holder.again = table, [table]
        holders = [holder]
        function = lambda s, b, h, i, j: s + table[h] + holder.table[h] + holders[0].again[0][h]  # noqa: E731
        outcome(function, TORCH)
        assert is_known(function, TORCH)
        return [weakref.ref(table), weakref.ref(holder)]

    kept = call()
    gc.collect()
    assert [each() for each in kept] == [None, None]


def test_the_list_is_short():
    """A repeated call goes through it: a name of a library costs one step."""
    slopes, cap = torch.zeros(2), 3.0

    def function(s: Any, b: Any, h: Any, i: Any, j: Any) -> Any:
        return torch.where(i >= j, cap * torch.tanh(s / cap) - slopes[h], -math.inf)

    assert len(watch(function).steps) <= 16


@pytest.mark.parametrize("library", FRAMEWORKS)
def test_the_array_of_a_function_that_is_not_followed_is_found(library):
    """The blocks of a mask lie where it lies, and are made by its library."""
    xp = torch if library == "torch" else np
    names = types.SimpleNamespace(documents=xp.arange(4) // 2)

    def mask(b: Any, h: Any, i: Any, j: Any) -> Any:
        try:
            return helper(i) == helper(j)
        finally:
            pass

    def helper(n: Any) -> Any:
        return names.documents[n]

    blocks = strobe.BlockMask.from_function(mask, 1, 1, 4, 4, block=2)
    assert [type(x) for x in blocks.arrays] == [type(names.documents)] * 4
    assert blocks.plot(0, 0).split() == ["█·", "·█"]


def test_names_are_those_of_this_version():
    """The instructions differ from version to version."""

    def function(x: Any) -> Any:
        class Inner:
            y = x.of_class + FRAMEWORKS

            def method(self) -> Any:
                return super().of_super, [each.of_comprehension for each in x if each.of_condition]

        x.of_store = Inner().of_call()
        return (lambda: x.of_lambda)(), [*(each.of_generator for each in x)]

    names = names_of(function.__code__)
    found = {"class", "super", "comprehension", "condition", "store", "call", "lambda", "generator"}
    assert {f"of_{name}" for name in found} <= names.of_attributes
    assert names.of_globals >= {"FRAMEWORKS", "super"}
    assert names.is_followed
    assert not names_of(compile("try:\n  x\nexcept A:\n  pass", "", "exec")).is_followed
    assert not names_of(compile("with x:\n  pass", "", "exec")).is_followed
    assert not names_of(compile("match x:\n  case A(b=c):\n    pass", "", "exec")).is_followed


class Base:
    scale = 2.0


def test_a_name_that_comes_to_hide_that_of_a_base():
    class Derived(Base):
        unused = 7

    held = Derived()

    def function(s, b, h, i, j):
        return s * held.scale

    q = torch.randn(1, 1, 3, 4)
    before = strobe.attention(q, q, q, score=function)
    del Derived.unused
    Derived.scale = 3.0
    found = strobe.attention(q, q, q, score=function)
    assert torch.equal(found, strobe.attention(q, q, q, score=lambda s, b, h, i, j: s * 3.0))
    assert not torch.equal(found, before)


def test_two_objects_that_become_one():
    held = types.SimpleNamespace(a=[1.0], b=[1.0])

    def function(s, b, h, i, j):
        return s * (2.0 if held.a is held.b else 1.0)

    q = torch.randn(1, 1, 3, 4)
    before = strobe.attention(q, q, q, score=function)
    held.b = held.a
    assert not torch.equal(strobe.attention(q, q, q, score=function), before)


def test_another_default_dtype():
    def function(s, b, h, i, j):
        return s * (64 / torch.finfo().bits)

    q = torch.randn(1, 1, 3, 4)
    before = strobe.attention(q, q, q, score=function)
    torch.set_default_dtype(torch.float64)
    try:
        found = strobe.attention(q, q, q, score=function)
    finally:
        torch.set_default_dtype(torch.float32)
    assert not torch.equal(found, before)
