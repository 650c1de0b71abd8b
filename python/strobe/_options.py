"""The one table of the options of strobe.attention(): the rows are the keys of AttentionOptions, each with its type and its Row.

A row has the default, the words of help() and the conversion of a value to fields of the C ABI. The table determines the signature, the
docstring, the defaults, the operators' schemas and the arguments of the library. So a new option is a field at the end of a C struct, with
its row in include/strobe/fields.inc, a row here, and the code that computes it. Tests compare the table with the other places that must
know the option:

- the structs of include/strobe/strobe.h and strobe.hpp, and the options that the contract combines (tests/python/cases.py):
  tests/python/test_options.py;
- the table of docs/reference.md and docs/api.md, which `make api` writes: tests/python/test_docs.py.

Random calls know an option once tests/python/random_draw.py draws it and tests/python/random_formulas.py computes it.
"""

import inspect
from collections.abc import Iterator, Mapping
from textwrap import fill
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple, TypedDict

from ._checks import Wrong, flag, is_choice, is_integer, is_whole, number, plain
from ._core import ffi, lib
from ._function import CAPTURED, SIGNATURES
from ._function import FIELDS as FUNCTIONS
from ._messages import kind, shown
from ._part import Part
from ._refusals import refusing

if TYPE_CHECKING:
    from collections.abc import Callable

    from ._blockmask import BlockMask
    from .arrays.base import Array

    Function = Callable[..., Any]

INT32_MAX, INT64_MIN, INT64_MAX = 2**31 - 1, -(2**63), 2**63 - 1
MAX_HEAD_DIM, MAX_HEAD_DIM_V = 576, 512  # src/attention/validate.cpp
_UNDOCUMENTED = ""  # described together with the previous row


class Field(NamedTuple):
    """A number, flag or name that the operators and the library get besides the tensors."""

    type: Any
    default: Any
    in_struct: bool = True  # a field of strobe_attention

    @property
    def may_be_absent(self) -> bool:
        """Whether the field is a number without a default; a has_... flag of strobe_attention then says whether it is given."""
        return self.type in (int | None, float | None)


class Row:
    """An option. Its subclasses differ in the values that they accept and in the fields that they give."""

    def __init__(self, default: Any, doc: str):
        self.default = default
        self.doc = doc

    def fields(self, name: str) -> dict[str, Field]:
        """The fields that the option becomes."""
        return {}

    def tensors(self, name: str) -> tuple[str, ...]:
        """The tensors of strobe_tensors that the option becomes."""
        return ()

    def read(self, wrong: Wrong, name: str, x: Any) -> dict[str, Any]:
        """The fields of an x that is not the default; errors are added to `wrong`."""
        return {}

    def written(self, name: str, fields: Mapping[str, Any]) -> Any:
        """The value that the caller may have written, from the fields that are not at their default: the inverse of read()."""
        return fields.get(name, self.default)


class Flag(Row):
    def __init__(self, doc: str):
        super().__init__(False, doc)

    def fields(self, name: str) -> dict[str, Field]:
        return {name: Field(bool, False)}

    def read(self, wrong: Wrong, name: str, x: Any) -> dict[str, Any]:
        return {name: True} if flag(wrong, name, x) else {}


class Number(Row):
    """A number. absent: the field's value for None, if the library has no has_... flag; or_none: None means the default, too."""

    def __init__(self, default: float | None, doc: str, absent: float | None = None, or_none: bool = False):
        super().__init__(default, doc)
        self.absent = default if absent is None else absent
        self.or_none = or_none

    def fields(self, name: str) -> dict[str, Field]:
        return {name: Field(float | None, None) if self.absent is None else Field(float, self.absent)}

    def read(self, wrong: Wrong, name: str, x: Any) -> dict[str, Any]:
        if x is None and self.or_none:
            return {}
        found: Wrong = []
        value = number(found, name, x)
        wrong += found
        return {} if found else {name: value}


class Whole(Row):
    """An integer from `least` to `most`. None becomes 0, which leaves the choice to the library."""

    def __init__(self, least: int, most: int, doc: str, in_struct: bool = True):
        super().__init__(None, doc)
        self.least, self.most, self.in_struct = least, most, in_struct

    def fields(self, name: str) -> dict[str, Field]:
        return {name: Field(int, 0, in_struct=self.in_struct)}

    def read(self, wrong: Wrong, name: str, x: Any) -> dict[str, Any]:
        return {name: plain(x)} if is_integer(wrong, name, x, self.least, self.most) else {}


class Multiple(Whole):
    """A multiple of `least` up to `most`. None becomes 0, which leaves the choice to the library."""

    def read(self, wrong: Wrong, name: str, x: Any) -> dict[str, Any]:
        if not is_whole(x) or (0 < x <= self.most and x % self.least == 0):
            return super().read(wrong, name, x)
        end = f"2^{self.most.bit_length()}"
        wrong.append(refusing(ValueError, name, f"{shown(x)}; accepted are the multiples of {self.least} below {end}, or None"))
        return {}


class Choice(Row):
    """One of several words, of which the first is the default."""

    def __init__(self, choices: dict[str, int], doc: str):
        super().__init__(next(iter(choices)), doc)
        self.choices = choices

    def fields(self, name: str) -> dict[str, Field]:
        return {name: Field(int, self.choices[self.default])}

    def read(self, wrong: Wrong, name: str, x: Any) -> dict[str, Any]:
        return {name: self.choices[x]} if is_choice(wrong, name, x, self.choices) else {}

    def written(self, name: str, fields: Mapping[str, Any]) -> str:
        return next(word for word, number in self.choices.items() if number == fields.get(name, self.choices[self.default]))


class Score(Choice):
    """A word, or a function, which _function.py records."""

    def read(self, wrong: Wrong, name: str, x: Any) -> dict[str, Any]:
        found: Wrong = []
        fields = super().read(found, name, x)
        wrong += [
            refusing(ValueError, name, f"{shown(x)}; accepted is 'dot', 'hyperbolic' or a function {SIGNATURES[name]}") for _ in found
        ]
        return fields


class Layout(Choice):
    """The layout. The library knows only "bhsd": tensors of layout "bshd" are passed as transposed views."""

    def fields(self, name: str) -> dict[str, Field]:
        return {"bshd": Field(bool, False, in_struct=False)}

    def read(self, wrong: Wrong, name: str, x: Any) -> dict[str, Any]:
        return {"bshd": True} if is_choice(wrong, name, x, self.choices) and self.choices[x] else {}

    def written(self, name: str, fields: Mapping[str, Any]) -> str:
        return "bshd" if fields.get("bshd") else "bhsd"


class ResultType(Row):
    """The dtype of out where that is not q's: an object that prints as one of the two. The library sees it in out itself."""

    _CHOICES = "bfloat16", "float16"

    def __init__(self, doc: str):
        super().__init__(None, doc)

    def fields(self, name: str) -> dict[str, Field]:
        return {name: Field(str | None, None, in_struct=False)}

    def read(self, wrong: Wrong, name: str, x: Any) -> dict[str, Any]:
        if (word := str(getattr(x, "__name__", x)).removeprefix("torch.")) in self._CHOICES:
            return {name: word}
        wrong.append(refusing(ValueError, name, f"{shown(x)}; accepted is bfloat16, float16, or None"))
        return {}


class Window(Row):
    _SIDES = "window_left", "window_right"

    def __init__(self, doc: str):
        super().__init__(None, doc)

    def fields(self, name: str) -> dict[str, Field]:
        return dict.fromkeys(self._SIDES, Field(int | None, None))

    def read(self, wrong: Wrong, name: str, x: Any) -> dict[str, Any]:
        sides = x if isinstance(x, (tuple, list)) else (x, x)
        whole = all(side is None or is_whole(side) for side in sides)
        if len(sides) != 2 or not whole or not all(side is None or 0 <= side <= INT64_MAX for side in sides):
            error = ValueError if whole else TypeError
            accepted = "(left, right), each None (no bound) or an integer from 0 on, in 64 bits, or one integer for both"
            wrong.append(refusing(error, name, f"{shown(x)}; accepted is {accepted}"))
            return {}
        return {field: plain(side) for field, side in zip(self._SIDES, sides, strict=True) if side is not None}

    def written(self, name: str, fields: Mapping[str, Any]) -> tuple[int | None, int | None] | None:
        left, right = (fields.get(side) for side in self._SIDES)
        return None if left is right is None else (left, right)


class Seed(Row):
    """A 64-bit integer. read() leaves it to _parse.py, which handles seed, offset and rng together."""

    def __init__(self, doc: str):
        super().__init__(None, doc)

    def fields(self, name: str) -> dict[str, Field]:
        return {name: Field(int, 0)}  # signed, because PyTorch's operators take signed integers


class Name(Row):
    def __init__(self, doc: str):
        super().__init__(None, doc)

    def fields(self, name: str) -> dict[str, Field]:
        return {name: Field(str | None, None)}

    def read(self, wrong: Wrong, name: str, x: Any) -> dict[str, Any]:
        if isinstance(x, str) and x.isprintable() and 0 < len(x) < 80:
            return {name: x}
        error = ValueError if isinstance(x, str) else TypeError
        wrong.append(refusing(error, name, f"{shown(x)}; accepted is a name out of strobe.engines(), or None"))
        return {}


class Tensor(Row):
    """An array of q's kind, on q's device. Where that is stated it may be in host memory, and is then copied to q's device."""

    def __init__(
        self,
        doc: str,
        has_gradient: bool = False,
        may_lie_in_host_memory: bool = False,
        broadcasts_to_scores: bool = False,
        has_rows_of: str | None = None,
    ):
        """broadcasts_to_scores: it broadcasts to (B, H, Sq, Sk); if it has fewer axes, the first ones are missing, as in NumPy.
        has_rows_of: its axes are those of this tensor, q or k, without the last one, in its layout."""
        super().__init__(None, doc)
        self.has_gradient = has_gradient
        self.may_lie_in_host_memory = may_lie_in_host_memory
        self.broadcasts_to_scores = broadcasts_to_scores
        self.has_rows_of = has_rows_of

    def tensors(self, name: str) -> tuple[str, ...]:
        return (name,)


class Blocks(Row):
    """A BlockMask: its four arrays, the size of a block and, if its function is the only one, which blocks are full."""

    def __init__(self, doc: str):
        super().__init__(None, doc)

    def fields(self, name: str) -> dict[str, Field]:
        return dict.fromkeys(("block_q", "block_k"), Field(int, 0))

    def tensors(self, name: str) -> tuple[str, ...]:
        return ("block_rows", "block_cols", "block_rows_t", "block_cols_t", "block_full", "block_full_t")


class PartOfProblem(Row):
    """A Part, which the operators take as integers."""

    def __init__(self, doc: str):
        super().__init__(None, doc)

    def fields(self, name: str) -> dict[str, Field]:
        return {name: Field(tuple[int, ...] | None, None)}

    def read(self, wrong: Wrong, name: str, x: Any) -> dict[str, Any]:
        if isinstance(x, Part):
            return {name: x.encoded()}
        wrong.append(refusing(TypeError, name, f"{kind(x)}; accepted is a strobe.Part"))
        return {}


class AttentionOptions(TypedDict, total=False):
    """The options of strobe.attention(), which documents them."""

    causal: Annotated["bool", Flag("query i sees the keys j <= i + offset, where alignment gives the offset.")]
    window: Annotated[
        "int | tuple[int | None, int | None] | None",
        Window(
            "(left, right): query i sees the keys i + offset - left <= j <= i + offset + right. None: no bound. One integer: both sides."
        ),
    ]
    alignment: Annotated[
        "str",
        Choice(
            {"bottom_right": lib.STROBE_BOTTOM_RIGHT, "top_left": lib.STROBE_TOP_LEFT},
            'places queries against keys for causal, window and alibi_slopes. "bottom_right": the last query stands at the last key, '
            'offset = Sk - Sq. "top_left": the first query stands at the first key, offset = 0.',
        ),
    ]
    scale: Annotated["float | None", Number(None, "the factor of q·k. None: 1/sqrt(D), or 1 with a hyperbolic score.")]
    softcap: Annotated[
        "float | None",
        Number(0.0, "c > 0 turns each score into c · tanh(score / c), before ALiBi and bias are added. 0 or None: none.", or_none=True),
    ]
    score: Annotated[
        "str | Function",
        Score(
            {"dot": lib.STROBE_DOT, "hyperbolic": lib.STROBE_HYPERBOLIC},
            '"dot": scale · q·k, or its softcap. "hyperbolic": -beta · arccosh(max(-x, 1)) - shift, where x = scale · q·k has to be a '
            "Lorentz product; hyperbolic_attention() makes it one. A function f(score, b, h, i, j) → score of scale · q·k, for sequence b, "
            "query head h, query i and key j, as FlexAttention's score_mod: docs/functions.md. softcap, beta and shift are then refused.",
        ),
    ]
    beta: Annotated["float | None", Number(None, "the factor of a hyperbolic score, > 0. None means 1.", absent=0.0)]
    shift: Annotated["float", Number(0.0, "what is subtracted from a hyperbolic score.")]
    mask: Annotated[
        "Array | Function | None",
        Tensor(
            "bool, True = attend. It broadcasts to (B, H, Sq, Sk) and is never expanded in memory. Missing axes are the first ones, so a "
            "padding mask (B, Sk) is written mask[:, None, None, :]; as it is, it would be read as (Sq, Sk) if B = Sq. Or a function "
            "g(b, h, i, j) → bool, True = attend, as FlexAttention's mask_mod: docs/functions.md.",
            broadcasts_to_scores=True,
        ),
    ]
    bias: Annotated[
        "Array | None",
        Tensor(
            "is added to the scores. It broadcasts likewise, in q's dtype or float32. Its gradient is summed over what was broadcast.",
            has_gradient=True,
            broadcasts_to_scores=True,
        ),
    ]
    alibi_slopes: Annotated[
        "Array | None",
        Tensor("float32 (H,) or (B, H): -slope · |i + offset - j| is added to the scores. Slopes have no gradient."),
    ]
    sinks: Annotated[
        "Array | None",
        Tensor(
            "(H,), float32, or float64 if q is: a logit per head that joins the softmax's denominator and no value. Those of a model in "
            "float16 or bfloat16 are cast, which takes nothing from them, and their gradient is cast back.",
            True,
        ),
    ]
    dropout: Annotated[
        "float",
        Number(
            0.0,
            "the probability of dropping an element of the softmax, 0 <= p < 1, in steps of 1/256. Any p above 0 means at least one "
            "step. What is kept is scaled up.",
        ),
    ]
    seed: Annotated[
        "int | None",
        Seed(
            "integers that choose the dropout mask; seed alone means offset 0, and offset alone is refused. If neither they nor rng are "
            "given, they are drawn from the default generator of torch (torch.manual_seed) or NumPy (np.random.seed)."
        ),
    ]
    offset: Annotated["int | None", Seed(_UNDOCUMENTED)]
    rng: Annotated["Array | None", Tensor("seed and offset as an int64 tensor (2,) on q's device.")]
    cu_seqlens_q: Annotated[
        "Array | None",
        Tensor(
            "int32 (B + 1,), in host memory int64 as well: sequences of various lengths are packed, and sequence b holds the tokens "
            "[cu_seqlens[b], cu_seqlens[b + 1]). "
            "What follows the last sequence is padding: its out is 0 and its lse -inf. q is then (Tq, H, D), k (Tk, Hkv, D) and v "
            "(Tk, Hkv, Dv), whatever layout says."
        ),
    ]
    cu_seqlens_k: Annotated["Array | None", Tensor(_UNDOCUMENTED)]
    max_seqlen_q: Annotated[
        "int | None",
        Whole(
            0,
            INT32_MAX,
            "upper bounds of the packed lengths, and the sizes of mask and bias. None: Tq and Tk. On the CPU the work is then still that "
            "of the longest sequence; on a GPU the host does not read the lengths, and launches as much work as the bounds say.",
        ),
    ]
    max_seqlen_k: Annotated["int | None", Whole(0, INT32_MAX, _UNDOCUMENTED)]
    seqused_k: Annotated[
        "Array | None",
        Tensor(
            "int32 (B,), in host memory int64 as well: of sequence b the first seqused_k[b] keys count, as if k and v ended there: the "
            "last query stands at the last of "
            "them. The others may hold anything, and their gradients are 0. mask, bias and block_mask keep their sizes. On a GPU it is "
            "read when the work runs; a tensor in host memory is copied there.",
            may_lie_in_host_memory=True,
        ),
    ]
    page_table: Annotated[
        "Array | None",
        Tensor(
            "int32 (B, n), in host memory int64 as well: k and v are pools of pages, (pages, Hkv, page, D) and (pages, Hkv, page, Dv), "
            "or (pages, page, Hkv, D) with "
            'layout "bshd". Key j of sequence b is row j % page of the page page_table[b, j // page]; Sk is n · page, of which seqused_k '
            "says how many count. The entries behind these are not read. q is dense, or packed with cu_seqlens_q alone. There are no "
            "gradients."
        ),
    ]
    k_scale: Annotated[
        "Array | None",
        Tensor(
            "k and v are quantised: int8, float8_e4m3fn, float8_e5m2, or INT4 as uint8 of half the width, column 2c in the low nibble of "
            "byte c. Each stands for what is stored times its scale. Scales are float16 or float32, one for each key and head: (B, Hkv, "
            'Sk), (Tk, Hkv) or (pages, Hkv, page), heads and keys exchanged in layout "bshd"; one for each head, (Hkv,); or one for all, '
            "() or (1,). q is float32, float16 or bfloat16, and out has its dtype; q of FP8 has q_scale. There are no gradients. "
            "strobe.kv.quantise makes data and scales.",
            has_rows_of="k",
        ),
    ]
    v_scale: Annotated["Array | None", Tensor(_UNDOCUMENTED, has_rows_of="k")]
    q_scale: Annotated[
        "Array | None",
        Tensor(
            "FP8 queries: q is float8_e4m3fn, and so are k and v, whose k_scale and v_scale are required. q stands for what is stored "
            "times its scale, float16 or float32, one for each query and head, (B, H, Sq) or (Tq, H), one for each head, (H,), or one for "
            "all. out is then of out_dtype, and bias of that or float32. On Hopper products may be of FP8, with P rounded to E4M3.",
            has_rows_of="q",
        ),
    ]
    out_dtype: Annotated["object | None", ResultType("with q_scale, the dtype of out: bfloat16 or float16. None: bfloat16.")]
    k_scale_group: Annotated[
        "int | None",
        Multiple(
            32,
            INT32_MAX,
            "G, a multiple of 32: k_scale has one scale for each column and G rows of k, (B, Hkv, ceil(Sk / G), D), (ceil(Tk / G), Hkv, D) "
            "or (pages, Hkv, ceil(page / G), D). None: one for each key and head.",
        ),
    ]
    block_mask: Annotated[
        "BlockMask | None",
        Blocks(
            "a BlockMask of the call's lengths (for packed sequences, of their maxima): blocks that it drops are not computed. The "
            "function that one was made from hides keys in the others, too."
        ),
    ]
    part: Annotated[
        "Part | None",
        PartOfProblem(
            "a Part: the tensors hold some rows, heads and sequences of a larger problem, to whose positions, heads and sequences the "
            "options refer."
        ),
    ]
    layout: Annotated[
        "str",
        Layout(
            {"bhsd": False, "bshd": True},
            'the order of the axes of q, k, v and the output: "bhsd", or "bshd" as in flash-attn and xFormers. A wrong one goes unnoticed '
            "if the shapes fit, and H and S then change places.",
        ),
    ]
    deterministic: Annotated[
        "bool",
        Flag("gradients have the same bits in every run. On the CPU, and under torch.use_deterministic_algorithms, they always have."),
    ]
    exact_max: Annotated[
        "bool", Flag("follow the softmax's running maximum where an engine would let it lag, and compute the exact tanh of softcap.")
    ]
    allow_tf32: Annotated["bool", Flag("let a GPU compute float32 by single TF32 products.")]
    invariant: Annotated[
        "bool",
        Flag(
            "the bits of a row of the output, lse and dq follow from its query, the keys that it sees and the options alone: not from the "
            "batch, other heads, the number of queries, packing, strides, threads or the GPU's load. Those of dk and dv follow from "
            "their sequence and head. The engine is then the first one that takes the dtype, head dimensions and options."
        ),
    ]
    tile_q: Annotated[
        "int | None",
        Whole(
            1,
            lib.STROBE_MAX_TILE,
            "the tile (Br, Bc) that you wish for; explain() names the tile that runs. A tile_k of 64 or 128 also says how many keys a "
            "block of threads of the Hopper backward owns, where either would do.",
        ),
    ]
    tile_k: Annotated["int | None", Whole(1, lib.STROBE_MAX_TILE, _UNDOCUMENTED)]
    engine: Annotated[
        "str | None", Name("the name of the engine to run on, out of strobe.engines(). None: the one with the least predicted time.")
    ]
    strict: Annotated[
        "bool", Flag("raise an error if an option of the call keeps it from the engine here that is fastest for its dtype and shape.")
    ]
    check: Annotated[
        "bool",
        Flag(
            "check values in device memory (cu_seqlens, seqused_k, page_table, block_mask) first, which synchronises. Those in host memory "
            "always are."
        ),
    ]
    threads: Annotated[
        "int | None",
        Whole(
            1,
            lib.STROBE_MAX_THREADS,
            "the number of CPU threads. None: torch.get_num_threads(), or for NumPy as many as the process may run on.",
            in_struct=False,
        ),
    ]
    reserved_sms: Annotated[
        "int | None",
        Whole(
            0,
            INT32_MAX,
            "how many multiprocessors of the GPU are left to others, such as communication: kernels whose grid is as large as the GPU "
            "shrink by these, and work is shared out for the rest. None: 0.",
            in_struct=False,
        ),
    ]


ROWS: dict[str, Row] = {name: x.__metadata__[0] for name, x in AttentionOptions.__annotations__.items()}
DEFAULTS: dict[str, Any] = {name: row.default for name, row in ROWS.items()}

# The last arguments of the operators' schemas.
_LAST = (
    *("tile_q", "tile_k", "deterministic", "exact_max", "allow_tf32", "invariant"),
    *("strict", "check", "engine", "bshd", "threads", "reserved_sms"),
)
_GIVEN = {field: x for name, row in ROWS.items() for field, x in row.fields(name).items()}
_GIVEN |= {field: Field(str | None, None) for field in FUNCTIONS.values()}  # the text of a graph: _graph.py
# The values of a call beside its tensors: the fields of strobe_attention, and three that say how the call is made.
FIELDS: dict[str, Field] = {name: x for name, x in _GIVEN.items() if name not in _LAST} | {name: _GIVEN[name] for name in _LAST}
_IN_STRUCT = [name for name, _ in ffi.typeof("strobe_tensors").fields]
_TENSORS = ["q", "k", "v", *(tensor for name, row in ROWS.items() for tensor in row.tensors(name)), *CAPTURED]
# The tensors that a call reads, by their names in strobe_tensors and in its order, which the operators' arguments have, too.
INPUTS = tuple(sorted(_TENSORS, key=lambda name: _IN_STRUCT.index(name) if name in _IN_STRUCT else len(_IN_STRUCT)))
BLOCKS, FULL_BLOCKS = (ROWS["block_mask"].tensors("block_mask")[part] for part in (slice(4), slice(4, None)))
# The gradients that a backward may be asked for, and their inputs, in the order of the operators.
GRADIENTS = {f"d{name}": name for name in INPUTS if name in ("q", "k", "v", *CAPTURED) or getattr(ROWS.get(name), "has_gradient", False)}
# The tangents that derivatives in a direction may be given, and their inputs; those of dout and dlse, for the derivatives of gradients; and
# the derivatives of out and lse.
TANGENTS = {f"t{name}": name for name in GRADIENTS.values()}
COTANGENTS = {"tdout": "dout", "tdlse": "dlse"}
DERIVATIVES = {"tout": "out", "tlse": "lse"}
# The results of attention() and reference() beside out and lse, if asked for.
AUX = ("max_logit", "column_sums")
# The tensors and gradients whose axes the layout names: (B, S, H, D) with "bshd".
TOKENS = frozenset({"q", "k", "v", "out", "dout", "dq", "dk", "dv", "tq", "tk", "tv", "tout", "tdout"})
# The tensors whose rows of the table set broadcasts_to_scores, with their gradients; and those whose rows set has_rows_of.
_SCORES = [name for name, row in ROWS.items() if isinstance(row, Tensor) and row.broadcasts_to_scores]
SCORES = frozenset({*_SCORES, *(name for name, of in (GRADIENTS | TANGENTS).items() if of in _SCORES)})
SCALES = {name: row.has_rows_of for name, row in ROWS.items() if isinstance(row, Tensor) and row.has_rows_of}

HYPERBOLIC: int = lib.STROBE_HYPERBOLIC

# Hints for arguments that other attention functions have.
_MASK_OR_BIAS = "did you mean mask (bool, True = attend) or bias (added to the scores)?"
_PAGES = "did you mean page_table?"
_HEADS = 'the heads are an axis of q, k and v, the second one, or the third with layout="bshd"'
ELSEWHERE = {
    "alibi": "did you mean alibi_slopes?",
    "attention_mask": _MASK_OR_BIAS + " A padding mask (B, Sk) is mask=(attention_mask != 0)[:, None, None, :]",
    "attn_bias": "did you mean bias?",
    "attn_mask": _MASK_OR_BIAS,
    "block_table": _PAGES,
    "block_tables": _PAGES,
    "cache_seqlens": "did you mean seqused_k?",
    "dropout_p": "did you mean dropout?",
    "enable_gqa": "k and v may have fewer heads than q without it",
    "is_causal": 'did you mean causal? Where Sq and Sk differ, beside alignment="top_left", as PyTorch counts',
    "key_padding_mask": "did you mean mask=~key_padding_mask[:, None, None, :]? There True hides, here True = attend",
    "learnable_sink": "did you mean sinks?",
    "mask_mod": "did you mean mask?",
    "need_weights": "the probabilities are never made",
    "num_heads": _HEADS,
    "num_kv_heads": _HEADS,
    "p": "did you mean dropout?",
    "return_attn_probs": "did you mean return_lse? The probabilities are never made",
    "return_softmax_lse": "did you mean return_lse?",
    "rng_state": "did you mean rng?",
    "s_aux": "did you mean sinks?",
    "score_mod": "did you mean score?",
    "seqused_q": "the queries behind a sequence's end may hold anything; leave out their rows of the result, or pack them with cu_seqlens",
    "sliding_window": "did you mean window?",
    "sm_scale": "did you mean scale?",
    "softmax_scale": "did you mean scale?",
    "window_size": "did you mean window?",
}

# If one of these is wrong, no other argument's shape can be judged.
SIZES = frozenset({"q", "k", "v", "layout", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k"})


def written(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The options that are no tensors, as a caller writes them, from the fields of a call that are not at their default."""
    return {name: row.written(name, fields) for name, row in ROWS.items() if not row.tensors(name)}


def parameters(kind: Any = inspect.Parameter.KEYWORD_ONLY) -> Iterator[inspect.Parameter]:
    """The parameters of a signature that shows every option with its type and default."""
    for name, x in AttentionOptions.__annotations__.items():
        yield inspect.Parameter(name, kind, default=ROWS[name].default, annotation=x.__origin__.__forward_arg__)


def documentation(indent: str) -> str:
    """The options for the Args of a docstring."""
    together: list[list[str]] = []
    for name, row in ROWS.items():
        if row.doc == _UNDOCUMENTED:
            together[-1].append(name)
        else:
            together.append([name])
    lines = (f"{', '.join(names)}: {ROWS[names[0]].doc}" for names in together)
    return "\n".join(fill(line, 136, initial_indent=indent, subsequent_indent=indent + "    ", break_on_hyphens=False) for line in lines)
