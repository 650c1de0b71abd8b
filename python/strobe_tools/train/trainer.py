"""The training loop: AdamW, warm-up and cosine, accumulation, mixed precision, and checkpoints that continue bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import signal
import statistics
import threading
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from strobe._whole_file import replacing
from strobe_tools.train import data
from strobe_tools.train.attention import ATTENTIONS
from strobe_tools.train.config import Config
from strobe_tools.train.data import Corpus
from strobe_tools.train.model import GPT

if TYPE_CHECKING:
    from strobe_tools.train.ranks import Ranks


@dataclass
class History:
    """The record of a run: the training loss of every step, and (step, validation loss) where it was measured."""

    train: list[float] = field(default_factory=list)
    validation: list[tuple[int, float]] = field(default_factory=list)

    @property
    def final(self) -> float:
        return self.validation[-1][1]


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__


def pick_device(config: Config) -> torch.device:
    """ "auto": the GPU if there is one and the attention runs there, else the CPU."""
    wish = config.device
    if wish == "auto":
        wish = "cuda" if torch.cuda.is_available() and _runs_on_gpu(config) else "cpu"
    accepted = "accepted: auto, cpu, cuda, cuda:1, ..."
    try:
        device = torch.empty(0, device=wish).device
    except (RuntimeError, AssertionError) as error:
        raise ValueError(f"device is {config.device!r}, which PyTorch does not have here ({_first_line(error)}); {accepted}") from None
    if device.type not in ("cpu", "cuda"):
        raise ValueError(f"device is {config.device!r}; {accepted}")
    return device


def _runs_on_gpu(config: Config) -> bool:
    if config.attention == "none":
        return True
    q = torch.zeros(1, 16, config.heads, config.head_dim, dtype=torch.float16, device="cuda")
    try:
        ATTENTIONS[config.attention](q, q, q, 0.0, config.block_size)
    except NotImplementedError:
        return False
    return True


def pick_precision(config: Config, device: torch.device) -> str:
    """The precision of the matrix products. "auto": on a GPU bf16 if it has that, else fp16; on a CPU bf16 if it is measurably faster, else
    fp32."""
    if config.precision != "auto":
        return config.precision
    if device.type == "cuda":
        return "bf16" if torch.cuda.is_bf16_supported(including_emulation=False) else "fp16"
    return "bf16" if device.type == "cpu" and _bf16_speedup(config) > 1.5 else "fp32"


def _bf16_speedup(config: Config) -> float:
    """The ratio of fp32's time to bf16's, for the model's own largest kind of product."""

    def seconds(dtype: torch.dtype) -> float:
        a = torch.ones(config.batch * config.sequence, config.d_model, dtype=dtype)
        b = torch.ones(config.d_model, config.d_ff, dtype=dtype)
        times = []
        for _ in range(7):
            start = time.perf_counter()
            a @ b
            times.append(time.perf_counter() - start)
        return min(times)  # other processes only ever add time

    return seconds(torch.float32) / seconds(torch.bfloat16)


@contextlib.contextmanager
def _held_interrupt() -> Iterator[Callable[[], bool]]:
    """Delays Ctrl-C, since half a step could not be resumed bit for bit, and yields a function that reports it. A second Ctrl-C takes
    effect at once."""
    interrupted = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal interrupted
        interrupted = True
        signal.signal(signal.SIGINT, before)

    if threading.current_thread() is not threading.main_thread():  # Python receives no signals there
        yield lambda: False
        return
    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: interrupted
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def _of_a_checkpoint(path: Path) -> Iterator[None]:
    """Turns any error of reading a damaged checkpoint into a ValueError that names it."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"resume: {path} is damaged, or no checkpoint ({_first_line(error)}); accepted: a checkpoint as this version wrote it, or no "
            "--resume, which sets it aside and starts anew"
        ) from None


class Trainer:
    """One run. ``Trainer.load`` continues one from its checkpoint as if it had never stopped.

    If the trainer replays CUDA graphs, it calls ``torch.compiler.cudagraph_mark_step_begin`` before each batch. That holds for the whole
    process: results that other functions compiled with "reduce-overhead" returned before become invalid.
    """

    def __init__(self, config: Config, corpus: Corpus, ranks: Ranks | None = None) -> None:
        self.device = pick_device(config)
        self.ranks = ranks
        precision = pick_precision(config, self.device)  # depends on a measurement, which may differ between ranks
        self.config = config.replace(device=str(self.device), precision=precision if ranks is None else ranks.of_first(precision))
        self.corpus = corpus
        self.step = 0
        self.history = History()
        windows = (len(corpus.train) - 1) // config.sequence - 1  # one less: each epoch begins at an offset of its own
        self.steps_per_epoch = windows // (config.batch * config.accumulation)
        if self.steps_per_epoch < 1:
            raise ValueError(
                f"text: {len(corpus.train)} training tokens, where one step takes "
                f"{self.tokens_per_step}; accepted: a longer text, or a smaller batch, accumulation or sequence"
            )
        self.steps = config.steps or max(1, round((config.epochs or 0) * self.steps_per_epoch))
        self.validation = data.windows(corpus.validation, config.sequence, config.val_tokens)
        torch.manual_seed(config.seed)
        self.model = GPT(config).to(self.device)
        # On a GPU, which would wait for the host, a batch's kernels are replayed as CUDA graphs. Graphs write gradients to the same memory
        # each time, so sums over batches lie elsewhere.
        # Graphs belong to a thread, PyTorch's for now to the main thread (pytorch/pytorch#123177).
        self._replayed = config.compile and self.device.type == "cuda" and threading.current_thread() is threading.main_thread()
        mode = "reduce-overhead" if self._replayed else None
        self.loss: Callable[[Tensor], Tensor] = torch.compile(self.model.loss, mode=mode) if config.compile else self.model.loss
        if ranks is not None:
            ranks.over_ranks(self.model)
            self.loss = partial(ranks.loss, self.model)
        if self._replayed:
            for parameter in self.model.parameters():
                parameter.grad = torch.zeros_like(parameter)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=config.betas, eps=config.eps, weight_decay=config.weight_decay, fused=True
        )
        self.scaler = torch.amp.GradScaler(self.device.type, enabled=self.config.precision == "fp16")
        self._order: tuple[int, Tensor] | None = None  # an epoch and the starts of its windows
        self._seconds: list[float] = []  # seconds of each step since the trainer was made

    @property
    def tokens_per_step(self) -> int:
        return self.config.batch * self.config.accumulation * self.config.sequence

    @property
    def tokens_per_second(self) -> float | None:
        """The rate of the median step. The first two steps of this process, which compile kernels and the model and record graphs, count
        only if there are no others."""
        return self.tokens_per_step / statistics.median(self._seconds[2:] or self._seconds[-1:]) if self._seconds else None

    def learning_rate(self, step: int) -> float:
        """Linear warm-up, then a cosine down to nothing."""
        warmup = min(self.config.warmup, self.steps)
        if step < warmup:
            return self.config.lr * (step + 1) / warmup
        return self.config.lr * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, self.steps - warmup)))

    def _batches(self) -> Iterator[Tensor]:
        """The step's micro-batches (batch, sequence + 1), a function of the seed and the step alone."""
        epoch, index = divmod(self.step, self.steps_per_epoch)
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
            sequence = self.config.sequence
            first = int(torch.randint(sequence, (1,), generator=generator))
            starts = torch.arange(first, len(self.corpus.train) - sequence, sequence)
            self._order = epoch, starts[torch.randperm(len(starts), generator=generator)]
        per_step = self.config.batch * self.config.accumulation
        starts = self._order[1][index * per_step : (index + 1) * per_step]
        for part in starts.split(self.config.batch):
            windows = [self.corpus.train[start : start + self.config.sequence + 1] for start in part.tolist()]
            yield torch.stack(windows).to(self.device, non_blocking=True)

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        dtype = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[self.config.precision]
        return torch.autocast(self.device.type, dtype=dtype, enabled=dtype is not torch.float32)

    def train_step(self) -> float:
        """One step of the optimizer; the mean training loss of its batches."""
        began = time.perf_counter()
        for group in self.optimizer.param_groups:
            group["lr"] = self.learning_rate(self.step)
        total = torch.zeros((), device=self.device)
        if self.ranks is not None:
            self.ranks.seed(self.config.seed, self.step)
        for batch in self._batches():
            if self._replayed:
                torch.compiler.cudagraph_mark_step_begin()
            with self._autocast():
                loss = self.loss(batch)
            self.scaler.scale(loss / self.config.accumulation).backward()
            total += loss.detach() / self.config.accumulation
        if self.ranks is not None:
            self.ranks.add_gradients(self.model.parameters())
            total = self.ranks.total(total)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=not self._replayed)
        self.step += 1
        self.history.train.append(total.item())  # waits for the GPU
        self._seconds.append(time.perf_counter() - began)
        return self.history.train[-1]

    @torch.no_grad()
    def evaluate(self) -> float:
        """The mean loss, in nats per token, on the validation windows."""
        self.model.eval()
        total = 0.0
        for batch in self.validation.split(self.config.batch):
            with self._autocast():
                loss = self.model.loss if self.ranks is None else self.loss
                part = loss(batch.to(self.device))
            total += (part if self.ranks is None else self.ranks.total(part)).item() * len(batch)
        self.model.train()
        self.history.validation.append((self.step, total / len(self.validation)))
        return self.history.final

    def run(self, checkpoint: Path | None = None, on_step: Callable[[Trainer], None] = lambda trainer: None) -> History:
        """Trains to the end, and measures and saves on the way. After Ctrl-C the step ends, the run is saved, and KeyboardInterrupt is
        raised."""
        with _held_interrupt() as held:

            def interrupted() -> bool:
                return held() if self.ranks is None else self.ranks.any(held(), self.device)

            while self.step < self.steps:
                self.train_step()
                if self.step % self.config.evaluate_every == 0 or self.step == self.steps:
                    self.evaluate()
                on_step(self)
                ends = interrupted()
                if checkpoint and (self.step % self.config.save_every == 0 or self.step == self.steps or ends):
                    self.save(checkpoint)
                if ends or (self.ranks is None and held()):
                    raise KeyboardInterrupt
        return self.history

    def save(self, path: Path) -> None:
        """Saves everything that the next step depends on. A crash or a full disk leaves the last checkpoint whole.

        Raises OSError, naming the file, if it cannot be written.
        """
        state = {
            "config": dataclasses.asdict(self.config),
            "corpus": self.corpus.digest,
            "step": self.step,
            "history": dataclasses.asdict(self.history),
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scaler": self.scaler.state_dict(),
            "rng": torch.get_rng_state(),
            "cuda_rng": torch.cuda.get_rng_state(self.device) if self.device.type == "cuda" else None,
        }
        try:
            with replacing(path) as file:
                torch.save(state, file)
        except (OSError, RuntimeError) as error:  # PyTorch raises the latter if a write failed
            raise OSError(f"checkpoint: {path} cannot be written ({_first_line(error)}); accepted: a folder with room, as --out") from None

    @classmethod
    def load(cls, path: Path, config: Config, corpus: Corpus, ranks: Ranks | None = None) -> Trainer:
        """Continues a run. Raises ValueError if the checkpoint is damaged, or of another configuration or text."""
        with _of_a_checkpoint(path):
            with zipfile.ZipFile(path) as archive:
                if damaged := archive.testzip():  # PyTorch does not look at the checksums
                    raise ValueError(f"the checksum of {damaged} is wrong")
            state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
            saved = Config(**state["config"])
            digest = state["corpus"]
        # "auto" means the precision picked at that time, whatever would be picked now
        config = config.replace(
            device=saved.device if config.device == "auto" else str(pick_device(config)),
            precision=saved.precision if config.precision == "auto" else config.precision,
        )
        if ranks is not None:  # each rank has a GPU of its own
            saved = saved.replace(device=config.device)
        differ = [f.name for f in dataclasses.fields(Config) if getattr(saved, f.name) != getattr(config, f.name)]
        if differ:
            told = ", ".join(f"{name} {getattr(saved, name)!r} instead of {getattr(config, name)!r}" for name in differ)
            raise ValueError(f"resume: {path} was trained with {told}; accepted: the same configuration, or another --out")
        if digest != corpus.digest:
            raise ValueError(f"resume: {path} was trained on another text; accepted: the same text, or another --out")
        trainer = cls(config, corpus, ranks)
        with _of_a_checkpoint(path):
            trainer.step = state["step"]
            trainer.history = History(state["history"]["train"], [(step, loss) for step, loss in state["history"]["validation"]])
            trainer.model.load_state_dict(state["model"])
            trainer.optimizer.load_state_dict(state["optimizer"])
            trainer.scaler.load_state_dict(state["scaler"])
            torch.set_rng_state(state["rng"])
            if state["cuda_rng"] is not None:
                torch.cuda.set_rng_state(state["cuda_rng"], trainer.device)
        return trainer
