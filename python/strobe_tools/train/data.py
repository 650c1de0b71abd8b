"""Real text as tokens: gathered, split by document, cut by a BPE tokenizer that is trained on it, and kept in the cache folder."""

from __future__ import annotations

import contextlib
import hashlib
import os
import random
import sys
import sysconfig
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import tokenizers
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor

from strobe._whole_file import replacing

VALIDATION_SHARE = 0.05
END_OF_DOCUMENT = "<|endoftext|>"
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "__pycache__"}


@dataclass(frozen=True)
class Corpus:
    """Training tokens, validation tokens, and the tokenizer that made them."""

    train: Tensor  # int64
    validation: Tensor
    tokenizer: Tokenizer
    digest: str
    text_bytes: int


def standard_library() -> list[Path]:
    """The running Python's own sources, without its tests and installed packages."""
    return [path for path in _files(Path(sysconfig.get_path("stdlib"))) if path.suffix == ".py"]


def _files(root: Path) -> list[Path]:
    """All files below, sorted, except those in hidden and in skipped folders."""
    found: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [f for f in subfolders if f not in _SKIPPED_FOLDERS and not f.startswith(".")]
        found += [Path(folder, name) for name in names]
    return sorted(found)


def gather(source: Path | None, most_bytes: int | None) -> list[str]:
    """The documents under ``source`` (a file, or a folder with its subfolders; None: the standard library), shuffled by a fixed seed.

    Files that are not UTF-8 are skipped. At most ``most_bytes`` of text are taken, in whole documents except the last.
    Raises FileNotFoundError or ValueError if there is no text.
    """
    if source is None:
        paths = standard_library()
    elif source.is_file():
        paths = [source]
    elif source.is_dir():
        paths = _files(source)
    else:
        raise FileNotFoundError(f"text: {source} does not exist; accepted: a text file or a folder of text files")
    random.Random(0).shuffle(paths)
    documents: list[str] = []
    left = sys.maxsize if most_bytes is None else most_bytes
    for path in paths:
        if left <= 0:
            break
        try:
            raw = path.read_bytes()
            text = raw.decode()
        except (OSError, UnicodeDecodeError):
            continue
        if len(raw) > left:
            text = raw[:left].decode(errors="ignore")
        if text.strip():
            documents.append(text)
            left -= len(raw)
    if not documents:
        raise ValueError(
            f"text: no UTF-8 text found in {source or 'the standard library'}; accepted: a text file or a folder of text files"
        )
    return documents


def split(documents: list[str]) -> tuple[list[str], list[str]]:
    """The last documents, about VALIDATION_SHARE of the text, are for validation. A document too long for that is cut at a line's end."""
    begins = np.cumsum([0, *map(len, documents)])
    total = int(begins[-1])
    cut = int(total * (1 - VALIDATION_SHARE))
    index = int(np.searchsorted(begins, cut, side="right")) - 1  # the document that contains the cut
    if index > 0 and total - begins[index] <= 2 * VALIDATION_SHARE * total:
        return documents[:index], documents[index:]
    at = cut - int(begins[index])
    at = documents[index].find("\n", at) + 1 or at
    return [*documents[:index], documents[index][:at]], [documents[index][at:], *documents[index + 1 :]]


def cache_folder() -> Path:
    """$STROBE_CACHE, or the system's folder for caches."""
    if chosen := os.environ.get("STROBE_CACHE"):
        return Path(chosen)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "strobe"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "strobe"


def train_tokenizer(documents: Iterable[str], vocab_size: int) -> Tokenizer:
    """A byte-level BPE tokenizer: every text can be cut, and cutting loses nothing."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def _tokens(tokenizer: Tokenizer, documents: list[str]) -> NDArray[np.int32]:
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    ids = [np.array([end, *e.ids], dtype=np.int32) for e in tokenizer.encode_batch(documents)]
    return np.concatenate(ids)


def load(source: Path | None, *, vocab_size: int, most_bytes: int | None) -> Corpus:
    """Gathers, splits and cuts the text; the tokenizer and the tokens are cached by the content that they were made from."""
    documents = gather(source, most_bytes)
    digest = hashlib.sha256(f"1 {tokenizers.__version__} {vocab_size} {VALIDATION_SHARE}".encode())
    for document in documents:
        digest.update(f"\0{len(document)}\0".encode())
        digest.update(document.encode())
    key = digest.hexdigest()[:32]
    path = cache_folder() / "text" / f"{key}.npz"
    if stored := _stored(path):
        tokenizer, train, validation = stored
    else:
        train_documents, validation_documents = split(documents)
        tokenizer = train_tokenizer(train_documents, vocab_size)
        train, validation = _tokens(tokenizer, train_documents), _tokens(tokenizer, validation_documents)
        _store(path, tokenizer=np.array(tokenizer.to_str()), train=train, validation=validation)
    return Corpus(
        train=torch.from_numpy(train.astype(np.int64)),
        validation=torch.from_numpy(validation.astype(np.int64)),
        tokenizer=tokenizer,
        digest=key,
        text_bytes=sum(len(d.encode()) for d in documents),
    )


def _stored(path: Path) -> tuple[Tokenizer, NDArray[np.int32], NDArray[np.int32]] | None:
    """The files of _store, if they exist and are whole."""
    if not path.is_file():
        return None
    try:
        with np.load(path) as stored:
            tokenizer = Tokenizer.from_str(str(stored["tokenizer"]))
            train, validation = stored["train"], stored["validation"]
    except Exception:  # a damaged file makes zip, zlib, NumPy and the tokenizer raise exceptions of any kind
        return None
    size = tokenizer.get_vocab_size()
    good = all(x.dtype == np.int32 and x.ndim == 1 and x.size and x.min() >= 0 and x.max() < size for x in (train, validation))
    return (tokenizer, train, validation) if good else None


def _store(path: Path, **arrays: NDArray[np.generic]) -> None:
    """Writes the arrays to the cache, or nothing if it cannot be written."""
    with contextlib.suppress(OSError), replacing(path) as file:
        np.savez_compressed(file, **arrays)  # type: ignore[arg-type]


def windows(tokens: Tensor, length: int, most: int) -> Tensor:
    """(n, length + 1): windows of ``length`` predictions each, evenly spread over the tokens; at most ``most`` predictions in all."""
    fit = (len(tokens) - 1) // length
    if fit < 1:
        raise ValueError(
            f"text: {len(tokens)} tokens where one sequence alone takes {length + 1}; accepted: a longer text or a shorter sequence"
        )
    start = torch.linspace(0, fit - 1, max(1, min(fit, most // length))).round().long() * length
    return tokens[start[:, None] + torch.arange(length + 1)]


def bigram_entropy(train: NDArray[np.int64], windows: NDArray[np.int64], vocab_size: int) -> float:
    """Cross entropy, in nats per token, of a bigram model of the training tokens, on the predictions of the windows (n, length + 1).

    The model is interpolated Kneser-Ney (Chen and Goodman 1999, section 2.7), about the best possible bigram model, with the discount that
    is best on these very windows: a bound that knowledge of the previous token alone does not beat.
    """
    pairs, counts = np.unique(train[:-1] * vocab_size + train[1:], return_counts=True)
    first, second = np.divmod(pairs, vocab_size)
    total = np.bincount(first, weights=counts, minlength=vocab_size)  # how often a token is followed by any
    followers = np.bincount(first, minlength=vocab_size)  # how many different tokens follow it
    preceders = np.bincount(second, minlength=vocab_size)
    backoff = (preceders + 1) / (len(pairs) + vocab_size)  # Kneser-Ney's unigram, add-one smoothed

    a, b = windows[:, :-1].ravel(), windows[:, 1:].ravel()
    at = np.minimum(np.searchsorted(pairs, a * vocab_size + b), len(pairs) - 1)
    count = np.where(pairs[at] == a * vocab_size + b, counts[at], 0)
    seen = np.maximum(total[a], 1)

    def cross_entropy(discount: float) -> float:
        weight = np.where(total[a] > 0, discount * followers[a] / seen, 1.0)
        return float(-np.log(np.maximum(count - discount, 0) / seen + weight * backoff[b]).mean())

    return min(cross_entropy(discount) for discount in np.linspace(0.05, 0.95, 19))
