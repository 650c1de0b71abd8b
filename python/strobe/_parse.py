"""Turns the caller's arguments, torch tensors or NumPy arrays, into a Call, or into one exception that lists everything wrong.

Types and spellings are checked here, shapes and values in the library, which serves every caller, C and C++ included. Errors are collected
in a list, one exception for each argument, so that a caller sees all of them at once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from typing import Any

from . import _function
from ._abi import BACKWARD, FORWARD, outside_graphs
from ._blockmask import BlockMask
from ._call import ORACLE, Call
from ._checks import Wrong, check_names, is_array, is_whole, of_generator
from ._hints import guesses_layout, is_of_sizes
from ._messages import kind, shown
from ._options import AUX, BLOCKS, ELSEWHERE, FULL_BLOCKS, HYPERBOLIC, INPUTS, INT64_MAX, INT64_MIN, ROWS, SIZES, Blocks, Tensor
from ._part import decoded
from ._refusals import AnyHint, Either, Hint, Name, Refusal, arguments_of, raised_for, refusals_of, refusing
from .arrays.base import Array, Framework
from .arrays.known import known_framework, unfit

_SHAPES = {
    "q": {"bhsd": "(B, H, Sq, D)", "bshd": "(B, Sq, H, D)", "packed": "(Tq, H, D) with {0}"},
    "k": {"bhsd": "(B, Hkv, Sk, D)", "bshd": "(B, Sk, Hkv, D)", "packed": "(Tk, Hkv, D) with {0}"},
    "v": {"bhsd": "(B, Hkv, Sk, Dv)", "bshd": "(B, Sk, Hkv, Dv)", "packed": "(Tk, Hkv, Dv) with {0}"},
}
_PAGED_SHAPES = {
    "k": {"bhsd": "(pages, Hkv, page, D) with {0}", "bshd": "(pages, page, Hkv, D) with {0}"},
    "v": {"bhsd": "(pages, Hkv, page, Dv) with {0}", "bshd": "(pages, page, Hkv, Dv) with {0}"},
}


_OF_BACKWARD = {
    "aux": "leave it out: max_logit and column_sums have no gradient",
    "return_lse": "leave it out: dlse is the gradient of lse, or None if lse was not used",
}
# For functions that take attention()'s options: hints about attention()'s arguments that are no options.
_OF_FUNCTION = {
    "attention_backward": _OF_BACKWARD,
    "reference_backward": _OF_BACKWARD,
    "attention_jvp": {"aux": "leave it out: max_logit and column_sums have no derivative"},
    "reference": {"return_lse": "leave it out: out and lse are returned in any case"},
    "explain": {"return_lse": "leave it out: lse makes no difference to what runs"},
}


def parse(
    function: str,
    q: Array,
    k: Array,
    v: Array,
    options: Mapping[str, Any],
    wrong: Wrong,
    *,
    known: dict[str, Array] | None = None,
    aux: tuple[str, ...] = (),
) -> Call:
    """Returns read()'s call, or raises one exception for everything wrong, the library's refusals included. known: arrays beside q, k and
    v."""
    call, known = read(function, q, k, v, options, wrong), known or {}
    for name, x in known.items():
        is_array(wrong, name, x, call.framework, q)
    if wrong:
        raise _refusal(function, call, wrong, known)
    return Call(call.framework, call.arrays, call.options, aux) if aux else call


def _refusal(function: str, call: Call, wrong: Wrong, known: dict[str, Array]) -> Exception:
    """Collects every refusal, the library's included, into one exception."""
    found: dict[str, Refusal] = {each.argument or each.words: each for error in wrong for each in refusals_of(error)}
    if function.startswith("reference"):
        call.options["engine"] = ORACLE
    operation = BACKWARD if "backward" in function else FORWARD
    reasons = _reasons(*_judgeable(call, {name: x for name, x in known.items() if name not in found}, found.keys()), operation)
    for each in reasons:
        if "k_scale_group" in found and each.argument == "k_scale":
            continue  # k_scale would be checked against another group, or none
        found.setdefault(each.argument or each.words, each)
    if any(map(guesses_layout, reasons)):
        return raised_for(ValueError, [each for each in found.values() if not is_of_sizes(each)])
    if len(found) == 1:
        return wrong[0]
    kinds_alone = len(found) == len(wrong) and all(isinstance(error, TypeError) for error in wrong)
    return raised_for(TypeError if kinds_alone else ValueError, found.values())


@outside_graphs
def _reasons(call: Call, known: dict[str, Array], operation: int) -> list[Refusal]:
    """The library's refusals; none if the framework of the arrays is not known."""
    framework = call.framework or next(filter(None, map(known_framework, (call.arrays | known).values())), None)
    return [] if framework is None else Call(framework, call.arrays, call.options).reasons_against(known, operation)


def _judgeable(call: Call, known: dict[str, Array], wrong: Set[str]) -> tuple[Call, dict[str, Array]]:
    """Drops the arguments that are already refused, and those that cannot be judged without them."""
    of_scores = {"mask", "bias", *BLOCKS, *FULL_BLOCKS, "block_q", "block_k"}
    withheld: set[str] = {*wrong}
    if "layout" in wrong:
        withheld |= {"q", "k", "v"}
    if wrong & {"cu_seqlens_q", "cu_seqlens_k", "page_table"}:  # these determine which axes the other arguments have
        withheld |= {*INPUTS, "max_seqlen_q", "max_seqlen_k", "block_q", "block_k"}
        known = {}
    elif wrong & {"max_seqlen_q", "max_seqlen_k"}:
        withheld |= of_scores
    if "block_mask" in wrong:
        withheld |= {*BLOCKS, *FULL_BLOCKS, "block_q", "block_k"}
    if "score" in wrong:
        withheld |= {"beta", "shift"}
    if wrong & {"score", "mask"}:  # their functions share the captured tensors
        withheld |= {*_function.CAPTURED, *_function.FIELDS.values(), *FULL_BLOCKS}
    if wrong & {"k_scale", "v_scale"}:  # these determine whether k and v are quantised
        withheld |= {"k", "v", "k_scale", "v_scale"}
    withheld |= {name for name in _function.FIELDS.values() if callable(call.options.get(name))}  # under torch.compile
    arrays, options = ({name: x for name, x in given.items() if name not in withheld} for given in (call.arrays, call.options))
    return Call(call.framework, arrays, options), known


def read(
    function: str, q: Array, k: Array, v: Array, given: Mapping[str, Any], wrong: Wrong, whole: Sequence[int | None] | None = None
) -> Call:
    """A call whose shapes and values the library has not checked yet. `given`: AttentionOptions. Errors are added to `wrong`, and the call
    lacks the refused arguments. The call's framework is q's; None if q is no array, which is then among the errors.

    whole: the lengths of the longest whole sequences of queries and keys, where q and k have some of their tokens; None: not known."""
    framework = known_framework(q)
    arrays: dict[str, Array] = {}
    options: dict[str, Any] = {}
    for name, x in (("q", q), ("k", k), ("v", v)):
        if is_array(wrong, name, x, framework, q):
            arrays[name] = x
    given = without_causal_bias(framework, q, k, given, wrong, whole)
    functions = _function.functions_in(given)
    for name, x in given.items():
        row = ROWS.get(name)
        if row is None:
            check_names(function, [name], wrong, ROWS, ELSEWHERE | _OF_FUNCTION.get(function, {}))
        elif x is row.default or name in functions:
            continue
        elif isinstance(row, Tensor):
            host = x
            if row.may_lie_in_host_memory and framework is not None and framework.is_array(x) and framework.unfit(name, x) is None:
                x = framework.beside(q, x)
            if x is not host and framework is not None:
                if framework.is_readable(host):
                    _check_used(wrong, name, host, _lengths(arrays.get("q"), arrays.get("k"), given)[1])
                if host.dtype == framework.xp.int64:  # int64 is accepted in host memory, where the list stays; GPU kernels read int32
                    x = framework.cast(x, framework.xp.int32)
            if is_array(wrong, name, x, framework, q):
                arrays[name] = _exact_sinks(framework, q, x) if name == "sinks" else x
            else:
                wrong[-1] = _with_way_out(wrong[-1], name, host, framework, arrays.get("k"), whole is None)
        elif isinstance(row, Blocks):
            if not isinstance(x, BlockMask):
                wrong.append(refusing(TypeError, name, f"{kind(x)}; accepted is a strobe.BlockMask"))
            elif framework is not None:
                arrays.update(zip(BLOCKS, (framework.own(a) for a in x.arrays), strict=True))
                options["block_q"], options["block_k"] = x.block_q, x.block_k
        else:
            options.update(row.read(wrong, name, x))

    if isinstance(blocks := given.get("block_mask"), BlockMask) and blocks.function is not None:
        functions["mask"] = _function.both(functions.get("mask"), blocks.function)
    if functions:
        _functions(wrong, arrays, options, functions, framework)
        recorded = _function.FIELDS["mask"] in options  # otherwise it was refused
        if framework is not None and isinstance(blocks, BlockMask) and recorded and functions["mask"] is blocks.function:
            arrays.update(zip(FULL_BLOCKS, map(framework.own, blocks.full_arrays), strict=False))
    if options.get("score") == HYPERBOLIC:
        options["beta"] = options.get("beta", 1.0)
    elif (beta := options.pop("beta", None)) is not None and given.get("score", "dot") == "dot":
        wrong.append(refusing(ValueError, "beta", f"{beta} with score 'dot'; accepted is None, or a hyperbolic score"))
    layout = given.get("layout", "bhsd")
    packed, paged = _is_packed(given), given.get("page_table") is not None
    if packed and not paged:
        options.pop("bshd", None)
    if "layout" not in arguments_of(wrong):
        for name in ("q", "k", "v"):
            in_pages = paged and name != "q"
            rank = 3 if packed and not in_pages else 4
            accepted = _PAGED_SHAPES[name][layout] if in_pages else _SHAPES[name]["packed" if packed else layout]
            if name in arrays and arrays[name].ndim != rank:
                hints = (_rank_hint(layout, paged),) if name == "q" and arrays[name].ndim == 3 else ()
                beside = Name("page_table" if in_pages else f"cu_seqlens_{'q' if name == 'q' else 'k'}")
                words = f"shape {tuple(arrays[name].shape)}; accepted is {accepted}"
                wrong.append(refusing(ValueError, name, words, beside, code="rank", hints=hints))
    if isinstance(block_mask := given.get("block_mask"), BlockMask) and SIZES.isdisjoint(arguments_of(wrong)):
        longest = decoded(options["part"]).longest() if "part" in options else whole
        if longest is None:
            lengths = _lengths(arrays.get("q"), arrays.get("k"), given)
        else:
            lengths = [
                None if most is None else max(options.get(f"max_seqlen_{side}", most), most)
                for side, most in zip("qk", longest, strict=True)
            ]
        _fits(wrong, block_mask, lengths, given, whole is not None)
        _serves_all(wrong, block_mask, arrays, given, given.get("part") if "part" in options else None)
    for side, axis in (("q", -2), ("k", -1)):
        name, cu_seqlens = f"max_seqlen_{side}", arrays.get(f"cu_seqlens_{side}")
        if options.get(name) and not packed:
            wrong.append(refusing(ValueError, name, f"{options[name]} without cu_seqlens; accepted is None"))
        elif options.get(name) == 0 and cu_seqlens is not None and framework is not None:
            if n := _longest(framework, cu_seqlens):
                wrong.append(refusing(ValueError, name, f"0, and a sequence has {n} tokens; accepted is {n} or more, or None"))
            elif "part" not in options:
                _without_scores(wrong, framework, arrays, options, name, axis)
    _dropout(wrong, arrays, options, given, framework)
    return Call(framework, arrays, options)  # type: ignore[arg-type]


def _functions(
    wrong: Wrong, arrays: dict[str, Array], options: dict[str, Any], functions: dict[str, Any], framework: Framework | None
) -> None:
    """Records the functions of the score and the mask."""
    if "score" in functions:
        for name in ("softcap", "beta", "shift"):
            if x := options.pop(name, None):
                words = f"{x} beside a function of the score; accepted is None: the function has it"
                wrong.append(refusing(ValueError, name, words.replace("None", "0") if name == "shift" else words))
    if framework is not None and "q" in arrays:
        for name, x in _function.recorded(wrong, functions, framework, arrays["q"]).items():
            (arrays if name in _function.CAPTURED else options)[name] = x


def _exact_sinks(framework: Framework | None, q: Array, sinks: Array) -> Array:
    """The sinks; those of 16 bits, as in a model that was cast, are converted to lse's dtype, which represents them exactly. Their gradient
    comes back in their own dtype."""
    if framework is None or str(sinks.dtype).removeprefix("torch.") not in ("float16", "bfloat16"):
        return sinks
    return framework.cast(sinks, framework.xp.float64 if q.dtype == framework.xp.float64 else framework.xp.float32)


def _with_way_out(error: Exception, name: str, x: Any, framework: Framework | None, k: Array | None, takes_functions: bool) -> Exception:
    """The error that x is no array, with a hint at the array that the caller may have meant."""
    hint = Hint("")
    if name == "mask" and takes_functions and known_framework(x) is None:
        hint = Hint(f", or a function {_function.SIGNATURES[name]}", needs=("score",))  # callers without `score` take no functions
    if name == "rng":
        hint = Hint("; an integer goes into {0}", (Name("seed"),), needs=("seed",)) if is_whole(x) else Hint(of_generator(x))
    if name in ("k_scale", "v_scale") and framework is not None and k is not None and k.ndim > 2:
        hint = Hint(_as_scales(framework, x, k))
    return raised_for(type(error), [each.beside(hint) for each in refusals_of(error)]) if hint.words else error


def _as_scales(framework: Framework, x: Any, k: Array) -> str:
    """A hint for a value that is no array: the scales that the caller may have meant."""
    if "float" in (dtype := str(k.dtype).removeprefix("torch.")) and "float8" not in dtype:
        return f", or None: k of {dtype} has no scales"
    shape = tuple(k.shape[:-1])
    if not isinstance(x, (int, float)):
        return f", of shape {shape}, a scale for each key and head"
    one = f"np.array({x}, np.float32)" if framework.name.startswith("numpy") else f"torch.tensor({x}, device=k.device)"
    return f"; one for all keys is {one}"


def _rank_hint(layout: str, paged: bool) -> AnyHint:
    """A hint for a q with three axes where four are needed."""
    q, cu_q, cu_k = Name("q"), Name("cu_seqlens_q"), Name("cu_seqlens_k")
    if paged:
        one = Hint("{0}[:, None], of one query each" if layout == "bshd" else "{0}[:, :, None], of one query each", (q,), axes_of="q")
        return Either((Hint("{0}, of packed queries", (cu_q,), needs=(cu_q.of,)), one))
    one = Hint("{0}[None], of one sequence", (q,), axes_of="q")
    return Either((Hint("{0} and {1}, of packed sequences", (cu_q, cu_k), needs=(cu_q.of, cu_k.of)), one))


def parse_aux(wrong: Wrong, aux: Any) -> tuple[str, ...]:
    """The names of auxiliary results that are asked for."""
    accepted = f"accepted is a tuple of one or more of {', '.join(map(repr, AUX))}, each once"
    if not isinstance(aux, (tuple, list)) or not all(isinstance(name, str) for name in aux):
        wrong.append(refusing(TypeError, "aux", f"{shown(aux)}; {accepted}"))
    elif not set(aux) <= {*AUX} or len(set(aux)) < len(aux):
        wrong.append(refusing(ValueError, "aux", f"{shown(aux)}; {accepted}"))
    else:
        return tuple(aux)
    return ()


def _longest(framework: Framework, cu_seqlens: Array) -> int:
    """The longest length; 0 if the lengths cannot be read, or are invalid, which the library reports."""
    integers = cu_seqlens.dtype in (framework.xp.int32, framework.xp.int64)
    if cu_seqlens.ndim != 1 or cu_seqlens.shape[0] < 2 or not integers or not framework.is_readable(cu_seqlens):
        return 0
    return max(int((cu_seqlens[1:] - cu_seqlens[:-1]).max()), 0)


def _without_scores(wrong: Wrong, framework: Framework, arrays: dict[str, Array], options: dict[str, Any], name: str, axis: int) -> None:
    """Replaces a tensor of the scores' size if max_seqlen is 0, which means "none" to the library. The new tensor has no scores, and sizes
    that the library can check against the number of tokens, all of which are padding."""
    for of in ("mask", "bias"):
        x = arrays.get(of)
        if x is None or x.ndim < -axis:
            continue
        if x.shape[axis] > 1:
            words = "shape {0}; accepted is one whose axis {1} is {2}, 0, or 1"
            wrong.append(refusing(ValueError, of, words, tuple(x.shape), axis, Name(name), code="shape"))
        elif not x.shape[axis]:
            arrays[of] = framework.cast(x.sum(axis)[..., None], x.dtype).swapaxes(-1, axis)  # size 1, and derived from x for autograd
    if "block_rows" in arrays and "block_mask" not in arguments_of(wrong):
        for of in (*BLOCKS, "block_q", "block_k"):
            (arrays if of in BLOCKS else options).pop(of)
        for of in FULL_BLOCKS:
            arrays.pop(of, None)


def _check_used(wrong: Wrong, name: str, used: Array, most: int | None) -> None:
    """Checks the values of a list in host memory, in the library's words, because the library gets only a copy on the GPU."""
    if used.ndim != 1 or most is None or str(used.dtype).rpartition(".")[2] not in ("int32", "int64"):
        return
    for b, n in enumerate(used.tolist()):
        if not 0 <= n <= most:
            wrong.append(
                refusing(ValueError, name, "{0} at [{1}]; accepted are 0 to {2}, the length of {3}", n, b, most, Name("k"), code="length")
            )
            return


def _lengths(q: Array | None, k: Array | None, given: Mapping[str, Any]) -> list[int | None]:
    """Sq and Sk, for packed sequences from max_seqlen_q and max_seqlen_k; None if that cannot be determined."""
    packed = _is_packed(given)
    row = 1 if given.get("layout") == "bshd" else 2
    axis = 0 if packed else row
    found: list[int | None] = []
    for x, most in ((q, given.get("max_seqlen_q")), (k, given.get("max_seqlen_k"))):
        length = x.shape[axis] if x is not None and x.ndim == (3 if packed else 4) else None
        found.append(most if packed and is_whole(most) else length)
    if (table := given.get("page_table")) is not None:
        known = k is not None and k.ndim == 4 and getattr(table, "ndim", 0) == 2
        found[1] = table.shape[1] * k.shape[row] if known else None  # type: ignore[union-attr]
    return found


def _is_packed(given: Mapping[str, Any]) -> bool:
    return given.get("cu_seqlens_q") is not None or given.get("cu_seqlens_k") is not None


def _has_band(given: Mapping[str, Any]) -> bool:
    """Whether the alignment has an effect."""
    return given.get("causal") is True or any(given.get(name) is not None for name in ("window", "alibi_slopes"))


def without_causal_bias(
    framework: Framework | None, q: Array, k: Array, given: Mapping[str, Any], wrong: Wrong, whole: Sequence[int | None] | None = None
) -> Mapping[str, Any]:
    """The options, with causal and an alignment in place of a mask or bias that only stands for them. whole: as for read()."""
    for name in ("mask", "bias"):
        found = framework.causal_bias(given.get(name)) if framework is not None else None
        if found is None:
            continue
        alignment, *lengths = found
        given = {option: x for option, x in given.items() if option != name}
        arrays = [x if unfit("", x, framework) is None else None for x in (q, k)]
        own = _lengths(arrays[0], arrays[1], given) if whole is None else whole
        aligned = given.get("alignment", "bottom_right")
        said = f"a causal bias of {lengths[0]} x {lengths[1]}, {alignment}"
        if _is_packed(given) or given.get("part") is not None:
            beside = "cu_seqlens" if _is_packed(given) else "part"
            words = f'{said}, with {beside}; accepted is causal=True, alignment="{alignment}"'
            wrong.append(refusing(ValueError, name, words, code="shape"))
        elif any(there is not None and here != there for here, there in zip(lengths, own, strict=True)):
            whose = "{0} and {1}" if whole is None else "the whole sequences"
            words = f"{said}; accepted is one of {own[0]} x {own[1]}, as {whose} have"
            wrong.append(refusing(ValueError, name, words, Name("q"), Name("k"), code="shape"))
        elif lengths[0] != lengths[1] and aligned != alignment and _has_band(given):
            words = f"{said}, beside causal, window or alibi_slopes, {aligned}; accepted is one alignment"
            wrong.append(refusing(ValueError, name, words, code="shape"))
        else:
            given = {**given, "causal": True, "alignment": alignment}
    return given


def _fits(wrong: Wrong, mask: BlockMask, lengths: list[int | None], given: Mapping[str, Any], of_whole: bool) -> None:
    """Checks that the call has the mask's lengths, and its alignment where that has an effect. of_whole: whether the lengths are those of
    whole sequences of which the call has some tokens."""
    if None in lengths:
        return
    aligned = given.get("alignment", "bottom_right")
    if [mask.seqlen_q, mask.seqlen_k] != lengths:
        whose = "the maxima of the sequences" if _is_packed(given) else "{0} and {1}"
        if given.get("page_table") is not None:
            whose = "{0} and a row of {4}"
        if given.get("part") is not None:
            whose = "the longest whole sequences of part"
        elif of_whole and not _is_packed(given):
            whose = "the whole sequences"
        accepted = f"accepted is one of {lengths[0]} queries and {lengths[1]} keys, as {whose} have"
        if _is_packed(given) and given.get("part") is None and not of_whole:
            sides = "q" if given.get("page_table") is not None else "qk"
            if any(given.get(f"max_seqlen_{side}") is None for side in sides):
                without = "{2} this is the number" if sides == "q" else "{2} and {3} these are the numbers"
                accepted += f"; without {without} of tokens"
        names = map(Name, ("q", "k", "max_seqlen_q", "max_seqlen_k", "page_table"))
        words = f"of {mask.seqlen_q} queries and {mask.seqlen_k} keys; {accepted}"
        wrong.append(refusing(ValueError, "block_mask", words, *names, code="shape"))
    elif mask.alignment not in (None, aligned) and "alignment" not in arguments_of(wrong) and _has_band(given):
        accepted = f"accepted beside causal, window or alibi_slopes is the alignment of these, {aligned}"
        wrong.append(refusing(ValueError, "block_mask", f'{mask.alignment}; {accepted}: make it with alignment="{aligned}"'))


def _serves_all(wrong: Wrong, mask: BlockMask, arrays: dict[str, Array], given: Mapping[str, Any], part: Any) -> None:
    """Checks that a mask for one sequence or head is not used for several, if its function depends on them. (The library checks others.)"""
    q, cu_seqlens = arrays.get("q"), arrays.get("cu_seqlens_q")
    if q is None or q.ndim != (4 if cu_seqlens is None else 3):
        return
    heads = q.shape[2 if cu_seqlens is None and given.get("layout") == "bshd" else 1]
    batch = q.shape[0] if cu_seqlens is None else cu_seqlens.shape[0] - 1
    if part is not None:
        batch, heads = part.first_batch + batch, part.heads or part.first_head + heads
    for what, argument, made_for, there in zip(("sequence", "head"), "bh", mask.made_for, (batch, heads), strict=True):
        if made_for == 1 and there > 1:
            whose = "as the whole problem has" if part is not None else "as {0} has"
            words = f"of 1 {what}, and its function depends on {argument}; accepted is one of {there} {what}s, {whose}"
            wrong.append(refusing(ValueError, "block_mask", words, Name("q"), code="shape"))


def is_seed(wrong: Wrong, name: str, x: Any) -> bool:
    if not is_whole(x):
        hints = (Hint("; an array goes into {0}", (Name("rng"),), needs=("rng",)), Hint(of_generator(x)))
        wrong.append(refusing(TypeError, name, f"{kind(x)}; accepted is an integer", hints=hints))
    elif not INT64_MIN <= x < 2**64:
        wrong.append(refusing(ValueError, name, f"{shown(x)}; accepted are integers of 64 bits"))
    else:
        return True
    return False


def _dropout(
    wrong: Wrong, arrays: dict[str, Array], options: dict[str, Any], given: Mapping[str, Any], framework: Framework | None
) -> None:
    """Makes sure that rng, or seed and offset, are present if dropout is, and only then."""
    seed, offset = given.get("seed"), given.get("offset")
    seeded = [is_seed(wrong, name, x) for name, x in (("seed", seed), ("offset", offset)) if x is not None]
    if given.get("rng") is not None and seeded:
        wrong.append(refusing(ValueError, "rng", "given beside seed or offset; accepted is one of the two"))
    elif offset is not None and seed is None and all(seeded):
        wrong.append(refusing(ValueError, "offset", "given without seed; accepted is seed alone, or both"))
    if options.get("dropout", 0.0) == 0.0:
        rng = arrays.get("rng")
        if rng is not None and framework is not None and tuple(rng.shape) == (2,) and rng.dtype == framework.xp.int64:
            del arrays["rng"]  # rng has no effect without dropout; any other value of dropout is left for the library to refuse
    elif seed is not None and all(seeded):
        options.update(seed_options(seed, offset))
    elif "rng" not in arrays and framework is not None and not wrong:
        arrays["rng"] = framework.drawn_rng(arrays["q"])


def seed_options(seed: int | None, offset: int | None) -> dict[str, int]:
    """seed and offset as fields."""
    given = {name: int(x) for name, x in (("seed", seed), ("offset", offset)) if x is not None}
    return {name: x - 2**64 if x > INT64_MAX else x for name, x in given.items() if x}
