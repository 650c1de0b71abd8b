"""The output of a training run: the loss curves as a picture, the figures, and whether attention learned."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from strobe_tools.train.trainer import History

# Okabe and Ito's palette: distinct for every kind of colour vision. Line styles say the same in print.
_BLUE, _VERMILLION, _BLACK, _GREY = "#0072B2", "#D55E00", "#000000", "#999999"


@dataclass(frozen=True)
class Result:
    """The figures of a training, in nats per token. ``ablation`` is the same model without attention; None if that was not trained."""

    attention: str
    run: History
    ablation: History | None
    bigram: float
    must_learn: bool = True

    @property
    def learned(self) -> bool | None:
        """Whether the validation loss ended below both the bigram entropy and the run without attention. None without an ablation."""
        if self.ablation is None:
            return None
        return self.run.final < min(self.bigram, self.ablation.final)

    @property
    def verdict(self) -> str:
        val, bigram = self.run.final, self.bigram
        if self.ablation is None:
            relation = "below" if val < bigram else "not below"
            return (
                f"The validation loss {val:.3f} is {relation} the bigram entropy {bigram:.3f}; the run without attention was not asked for."
            )
        without = self.ablation.final
        if self.learned:
            return f"Attention learned: {val:.3f} is below the bigram entropy {bigram:.3f} and below {without:.3f} without attention."
        over = [f"the bigram entropy {bigram:.3f}"] * (not val < bigram) + [f"{without:.3f} without attention"] * (not val < without)
        so = "did NOT learn" if self.must_learn else "did not learn, which this configuration does not ask for"
        return f"Attention {so}: {val:.3f} is not below {' nor below '.join(over)}."


def _smooth(losses: list[float]) -> tuple[list[float], list[float]]:
    """Means over neighbouring steps, at most 100 points: (step, loss)."""
    width = math.ceil(len(losses) / 100)
    parts = [losses[i : i + width] for i in range(0, len(losses), width)]
    return [i * width + (len(part) + 1) / 2 for i, part in enumerate(parts)], [sum(part) / len(part) for part in parts]


def draw(path: Path, result: Result) -> None:
    """The loss curves as a PNG."""
    figure = Figure(figsize=(8, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    runs = [(f"{result.attention} attention", result.run, _BLUE, "o")]
    if result.ablation:
        runs.append(("attention removed", result.ablation, _VERMILLION, "s"))
    for label, history, colour, marker in runs:
        axes.plot(*_smooth(history.train), color=colour, alpha=0.45, linewidth=1.2, label=f"{label}: training")
        axes.plot(
            *zip(*history.validation, strict=True),
            color=colour,
            marker=marker,
            markersize=4,
            label=f"{label}: validation {history.final:.3f}",
        )
    axes.axhline(result.bigram, color=_BLACK, linestyle="--", linewidth=1.2, label=f"bigram entropy of the text {result.bigram:.3f}")
    axes.set(xlabel="step", ylabel="loss (nats per token)", title="A GPT learns real text")
    axes.set_xlim(left=0)
    axes.grid(color=_GREY, alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path)
