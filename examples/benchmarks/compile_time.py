"""How long an update takes to trace, lower and compile, of many matrices of a few shapes, against AdamW.

python examples/benchmarks/compile_time.py

The shapes are those of a transformer's layers. Nothing is run: arrays are described, not made. Everything that jax has kept
from one compilation is dropped before the next. Instructions are those of the program that XLA has optimized.
"""

import argparse
import time
from typing import Any, NamedTuple

import measuring

# isort: split
import command_line
import jax
import jax.numpy as jnp
import numpy as np
import optax
from measuring import Chart, Panel, Row

from rekls_jax import rekls


class Compiled(NamedTuple):
    """Seconds of each stage, and what came of it."""

    trace: float
    lower: float
    compile: float
    instructions: int


def tree(count: int, width: int) -> dict[str, jax.ShapeDtypeStruct]:
    shapes = [(width, width), (width, 3 * width), (width, 4 * width), (4 * width, width)]
    return {f"w{i:04}": jax.ShapeDtypeStruct(shapes[i % len(shapes)], jnp.float32) for i in range(count)}


def compile_update(tx: optax.GradientTransformation, params: Any) -> Compiled:
    state = jax.eval_shape(tx.init, params)
    jax.clear_caches()
    times = [time.perf_counter()]
    traced = jax.jit(tx.update, donate_argnums=1).trace(params, state, params)
    times.append(time.perf_counter())
    lowered = traced.lower()
    times.append(time.perf_counter())
    compiled = lowered.compile()
    times.append(time.perf_counter())
    text = compiled.as_text() or ""
    trace, lower, compile_ = np.diff(times).tolist()
    return Compiled(trace, lower, compile_, sum(" = " in line for line in text.splitlines()))


def measure(options: argparse.Namespace) -> list[Row]:
    optimizers = {"adamw": optax.adamw(0.1), "rekls": rekls(0.1)}
    cases = [(count, name) for count in options.counts for name in optimizers]
    kept: dict[tuple[int, str], list[Compiled]] = {case: [] for case in cases}
    for tx in optimizers.values():
        compile_update(tx, tree(1, options.width))  # loads what the first compilation loads
    with measuring.progress("compile", options.repeats * len(cases)) as bar:
        for _ in range(options.repeats):
            for count, name in cases:
                kept[count, name].append(compile_update(optimizers[name], tree(count, options.width)))
                bar.update()
    rows: list[Row] = []
    total = {case: float(np.median([sum(each[:3]) for each in runs])) for case, runs in kept.items()}
    fewest = options.counts[0]
    for (count, name), runs in kept.items():
        row: Row = {"matrices": count, "optimizer": name, "seconds": total[count, name]}
        row |= {stage: float(np.median([getattr(each, stage) for each in runs])) for stage in Compiled._fields[:3]}
        row["over adamw"] = total[count, name] / total[count, "adamw"]
        if count != fewest:
            row[f"over {fewest} matrices"] = total[count, name] / total[fewest, name]
        rows.append({**row, "instructions": runs[-1].instructions, "stages": [list(each[:3]) for each in runs]})
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = measuring.parser("compile_time", __doc__, "compilations of each")
    counts = "numbers of matrices; default: 96 192"
    parser.add_argument("--counts", type=int, nargs="+", default=[96, 192], metavar="N", help=counts)
    parser.add_argument("--width", type=int, default=64, help="of the transformer; default: %(default)s")
    options = parser.parse_args(arguments)
    measuring.at_least_one("--counts", *options.counts)
    measuring.at_least_one("--width", options.width)
    options.counts = sorted(set(options.counts))
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    measuring.check(options)
    measuring.devices(1)
    rows = measure(options)
    bars = {f"{row['optimizer']}, {row['matrices']}": row["seconds"] for row in rows}
    chart = Chart("Trace, lower and compile", [Panel("optimizer, number of matrices", "seconds", bars)])
    measuring.report(options, {"Update of a tree of matrices, median seconds": rows}, chart)
    return 0


if __name__ == "__main__":
    jax.config.update("jax_enable_compilation_cache", False)  # no programs that another process left on disk
    command_line.run("compile_time", main)
