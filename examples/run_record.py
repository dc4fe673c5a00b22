"""What a training run of `train_lm.py` measured: kept for a checkpoint, written as a table and drawn as curves."""

import csv
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np


@dataclasses.dataclass
class Run:
    """One training: what it measured, and the parameters it ended with."""

    optimizer: str
    learning_rate: float
    params: Any = None
    losses: list[float] = dataclasses.field(default_factory=list)
    milliseconds: list[float] = dataclasses.field(default_factory=list)
    validation: dict[int, float] = dataclasses.field(default_factory=dict)  # steps taken -> loss
    devices: str = ""

    def final(self) -> float:
        """The last validation loss."""
        return list(self.validation.values())[-1]

    def diverged(self) -> bool:
        return not np.isfinite(self.losses[-1])

    def progress(self, rng: np.random.Generator) -> dict[str, Any]:
        """What a checkpoint keeps beside the arrays; `rng` draws the batches."""
        kept = {name: getattr(self, name) for name in ("losses", "milliseconds")}
        return {**kept, "validation": list(self.validation.items()), "rng": rng.bit_generator.state}

    def go_on(self, progress: dict[str, Any], rng: np.random.Generator) -> None:
        """From `progress`, of the same run, the last step of which `rng` has drawn for."""
        self.losses, self.milliseconds = progress["losses"], progress["milliseconds"]
        self.validation = dict(map(tuple, progress["validation"]))
        rng.bit_generator.state = progress["rng"]


def write_metrics(runs: list[Run], path: Path) -> None:
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["optimizer", "learning_rate", "step", "loss", "validation_loss", "milliseconds"])
        for run in runs:
            for i, (loss, milliseconds) in enumerate(zip(run.losses, run.milliseconds, strict=True), start=1):
                rows.writerow([run.optimizer, run.learning_rate, i, loss, run.validation.get(i, ""), round(milliseconds, 3)])


def write_curve(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4), layout="constrained")
    for run in runs:
        (line,) = axes.plot(range(1, len(run.losses) + 1), run.losses, alpha=0.35, linewidth=0.8)
        label = f"{run.optimizer}, learning rate {run.learning_rate:g}: {run.final():.3f}"
        axes.plot(*zip(*run.validation.items(), strict=True), color=line.get_color(), marker="o", markersize=4, label=label)
    axes.set(
        xlabel="step", ylabel="loss, nats per byte", title="Byte-level transformer: training (thin) and validation loss"
    )
    seen = [loss for run in runs for loss in run.validation.values() if np.isfinite(loss)]
    axes.set_ylim(top=1.2 * max(seen) if seen else None)  # not the steep start
    axes.grid(alpha=0.3)
    axes.legend(title="final validation loss")
    figure.savefig(path, dpi=150)
    plt.close(figure)
