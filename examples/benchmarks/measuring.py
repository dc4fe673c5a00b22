"""What the benchmarks share: devices, times that can be compared, and the results as a table, a file and a picture.

Import it before jax: OpenBLAS reads how many threads it may use when it is loaded, and several make one small `eigh` slower.
"""

import os
import sys
from pathlib import Path

os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent.parent))  # where the other examples are

import argparse
import contextlib
import importlib.metadata
import json
import platform
import time
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
import numpy as np
from tqdm import tqdm

Row = dict[str, Any]
"""Of a table: numbers and names by column. Lists are kept in the file and left out of the table."""


class Candidate(NamedTuple):
    """What is timed: each call of `run` does the work once, and returns the arrays to wait for."""

    run: Callable[[], Any]
    cycle: int = 1  # calls that make one repetition, where not every call does the same work


class Times(NamedTuple):
    """Milliseconds of one candidate, (repetitions, calls of a cycle)."""

    milliseconds: np.ndarray

    @property
    def mean(self) -> float:
        """Over a cycle; of each place in it the median, so that what disturbs one repetition does not count."""
        return float(np.median(self.milliseconds, axis=0).mean())

    @property
    def slowest(self) -> float:
        """The slowest place of a cycle, over the mean: 1 where all are equally long."""
        return float(np.median(self.milliseconds, axis=0).max()) / self.mean

    @property
    def median(self) -> float:
        """Of all calls."""
        return float(np.median(self.milliseconds))


def interleaved(candidates: dict[str, Candidate], repeats: int, title: str) -> dict[str, Times]:
    """Times of all candidates, each in turn in every repetition, so that what slows the machine slows all of them.

    Two repetitions more come first and do not count: a state that starts with zeros has decompositions that cost less.
    """
    kept: dict[str, list[list[float]]] = {name: [] for name in candidates}
    with progress(title, (repeats + 2) * len(candidates)) as bar:
        for repetition in range(-2, repeats):
            for name, candidate in candidates.items():
                times = [_milliseconds(candidate.run) for _ in range(candidate.cycle)]
                if repetition >= 0:
                    kept[name].append(times)
                bar.set_postfix_str(name, refresh=False)
                bar.update()
    return {name: Times(np.array(times)) for name, times in kept.items()}


def _milliseconds(run: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(run())
    return 1e3 * (time.perf_counter() - begin)


def progress(title: str, total: int) -> tqdm:
    form = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}, {remaining} left{postfix}"
    return tqdm(total=total, desc=title, bar_format=form, file=sys.stderr, leave=False)


def devices(wanted: int) -> list[jax.Device]:
    """The first `wanted` devices, or all, if there are fewer GPUs or TPUs. Where there are none, the CPU plays `wanted`."""
    with contextlib.suppress(RuntimeError):  # a backend that runs already has the devices it has
        jax.config.update("jax_num_cpu_devices", wanted)  # of the CPU alone: GPUs and TPUs stay as they are
    return jax.devices()[:wanted]


def environment() -> Row:
    """Where the numbers come from."""
    return {
        **{name: importlib.metadata.version(name) for name in ("jax", "jaxlib", "optax", "rekls_jax")},
        "python": platform.python_version(),
        "platform": jax.default_backend(),
        "device_kind": jax.devices()[0].device_kind,
        "device_count": jax.device_count(),
        "cores": os.cpu_count(),
        "openblas_num_threads": os.environ["OPENBLAS_NUM_THREADS"],
    }


def parser(name: str, doc: str | None, repeats: str | None = "repetitions of each measurement") -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    if repeats is not None:
        made.add_argument("--repeats", type=int, default=5, help=f"{repeats}; default: %(default)s")
    folder = "for results.json and chart.png, overwritten; default: %(default)s"
    made.add_argument("--output", type=Path, default=Path("benchmark_results") / name, metavar="FOLDER", help=folder)
    return made


def check(options: argparse.Namespace) -> None:
    """Before anything is measured; makes the folder of the results."""
    at_least_one("--repeats", getattr(options, "repeats", 1))
    try:
        options.output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output must be a folder that can be made, got {options.output}: {error.strerror}") from error


def at_least_one(option: str, *values: int) -> None:
    for value in values:
        if value < 1:
            raise ValueError(f"{option} must be at least 1, got {value}")


def report(options: argparse.Namespace, tables: dict[str, list[Row]], chart: "Chart", where: Row | None = None) -> None:
    """Print the tables, and write them and the chart. `where` they were measured, if in another process."""
    where = where or environment()
    arguments = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    for title, rows in tables.items():
        print(f"{title}\n\n{table(rows)}\n")
    results = {"environment": where, "arguments": arguments, "tables": tables}
    (options.output / "results.json").write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")
    chart.write(options.output / "chart.png")
    machine = f"{where['device_count']} x {where['device_kind']}, {where['cores']} cores"
    print(f"jax {where['jax']}, rekls_jax {where['rekls_jax']}, {machine}")
    print(f"results.json and chart.png are in {options.output}")


def table(rows: list[Row]) -> str:
    """Columns of equal width; what is missing in a row is left empty."""
    names = list(dict.fromkeys(name for row in rows for name, value in row.items() if not isinstance(value, list)))
    lines = [names, *([_text(row.get(name)) for name in names] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    right = [any(isinstance(row.get(name), int | float) for row in rows) for name in names]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if number else cell.ljust(width)
            for cell, width, number in zip(line, widths, right, strict=True)
        ).rstrip()
        for line in lines
    )


def _text(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
    return f"{value:,}" if isinstance(value, int) else str(value)


class Panel(NamedTuple):
    """One picture of a chart: bars, one for each name; or a line for each name, over the numbers on the x-axis."""

    title: str
    label: str  # of the values' axis
    bars: Mapping[str, float] = MappingProxyType({})
    lines: Mapping[str, Mapping[int, float]] = MappingProxyType({})
    over: str = ""  # what is on the x-axis of lines


class Chart(NamedTuple):
    """Panels beside one another."""

    title: str
    panels: list[Panel]

    def write(self, path: Path) -> None:
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        most = max(len(panel.bars) for panel in self.panels)
        size = (5.5 * len(self.panels), max(3.5, 1.2 + 0.35 * most))
        figure, places = plt.subplots(1, len(self.panels), figsize=size, layout="constrained", squeeze=False)
        figure.suptitle(self.title)
        for panel, axes in zip(self.panels, places[0], strict=True):
            _draw(panel, axes)
        figure.savefig(path, dpi=120)
        plt.close(figure)


def _draw(panel: Panel, axes: Any) -> None:
    if panel.bars:
        drawn = axes.barh(list(panel.bars), list(panel.bars.values()), color="tab:blue")
        axes.bar_label(drawn, [_text(value) for value in panel.bars.values()], padding=3)
        axes.invert_yaxis()
        axes.margins(x=0.15)
        axes.set_xlabel(panel.label)
    for name, points in panel.lines.items():
        axes.plot(list(points), list(points.values()), marker="o", label=name)
    if panel.lines:
        numbers = sorted({x for points in panel.lines.values() for x in points})
        axes.set_xscale("log", base=2)
        axes.set_xticks(numbers, [str(number) for number in numbers])
        axes.set_yscale("log")
        axes.yaxis.set_major_formatter("{x:g}")
        axes.yaxis.set_minor_formatter("{x:g}")
        axes.set(xlabel=panel.over, ylabel=panel.label)
        axes.legend()
    axes.set_title(panel.title)
    axes.set_axisbelow(True)
    axes.grid(alpha=0.3, axis="both" if panel.lines else "x")
