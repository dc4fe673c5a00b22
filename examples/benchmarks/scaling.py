"""How a step's time, work and state shrink with the number of devices that the parameters' rows are divided over.

python examples/benchmarks/scaling.py

Simulated devices share the cores of one CPU, so that with them only the work is divided, and the time is that of all work
together: the reference's way repeats everything on each. Gflop and MB of state are those of one of the devices, and their
shares of what one device has that does all; flops as XLA counts them, without the `eigh`s, which it only calls. `eighs` are
those of all factors on one device, one after the other.
"""

import argparse
import json
import subprocess
import sys
from typing import Any

import matrices
import measuring

# isort: split
import command_line
from matrices import REFERENCE_WAY
from measuring import Candidate, Chart, Panel, Row

IN_TURN = "eighs, in turn, one device"


def measure(group: matrices.Matrices, count: int, repeats: int) -> list[Row]:
    """In a process of its own."""
    mesh = matrices.mesh_of(measuring.devices(count))
    steps = matrices.steps(matrices.gradients(group, mesh), mesh)
    _, in_turn = matrices.bare_eighs(group)
    candidates = {IN_TURN: Candidate(in_turn), **{name: Candidate(step) for name, step in steps.items()}}
    times = measuring.interleaved(candidates, repeats, f"{count} devices, {group}")
    return [
        {
            "matrices": str(group),
            "devices": count,
            "step": name,
            "ms": times[name].median,
            "reference / ms": times[REFERENCE_WAY].median / times[name].median,
            "ms / eighs": times[name].median / times[IN_TURN].median,
            "Gflop": gigaflops(step),
            "state MB": matrices.state_bytes(step.state) / 1e6,
            "milliseconds": times[name].milliseconds[:, 0].tolist(),
        }
        for name, step in steps.items()
    ]


def gigaflops(step: matrices.Step) -> float | None:
    """Of one device."""
    flops = (step.compiled.cost_analysis() or {}).get("flops")
    return None if flops is None else flops / 1e9


def child(count: int, groups: list[matrices.Matrices], repeats: int) -> Any:
    """What one process tells the one that started it: nothing measured where there are fewer devices."""
    found = len(measuring.devices(count))
    rows = [row for group in groups for row in measure(group, count, repeats)] if found == count else []
    return {"found": found, "rows": rows, "environment": measuring.environment()}


def run_child(count: int, options: argparse.Namespace) -> Any:
    command = [sys.executable, __file__, "--child", str(count), "--repeats", str(options.repeats)]
    done = subprocess.run([*command, "--shapes", *options.shapes], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise ValueError(f"the process of {count} devices ended with exit status {done.returncode}")
    return json.loads(done.stdout)


def against_one_device(rows: list[Row]) -> list[Row]:
    """Shares of what one device has of the same step, if that was measured."""
    one = {(row["matrices"], row["step"]): row for row in rows if row["devices"] == 1}
    completed = []
    for row in rows:
        alone = one.get((row["matrices"], row["step"]), {})
        shares = {
            f"{what} / one's": row[what] / alone[what] for what in ("Gflop", "state MB") if row[what] and alone.get(what)
        }
        completed.append({**row, **shares})
    return completed


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = measuring.parser("scaling", __doc__, "steps of each")
    matrices.add_shapes(parser, "4x512x512", "12x512x512")
    counts = "numbers of devices, each in a process of its own; a CPU plays as many as asked; default: 1 2 4 8"
    parser.add_argument("--devices", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help=counts)
    parser.add_argument("--child", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    measuring.at_least_one("--devices", *options.devices)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    groups = [matrices.parse(text) for text in options.shapes]
    if options.child is not None:
        print(json.dumps(child(options.child, groups, options.repeats)))
        return 0
    for group in groups:
        for count in options.devices:
            matrices.check_divides(group, count)
    measuring.check(options)
    del options.child
    told = []
    for count in sorted(set(options.devices)):
        told.append(run_child(count, options))
        if told[-1]["found"] < count:
            print(f"{count} devices are left out: there are {told[-1]['found']}")
    rows = against_one_device([row for each in told for row in each["rows"]])
    if not rows:
        raise ValueError(f"--devices must be at most the {told[-1]['found']} that there are, got {options.devices}")
    rows.sort(key=lambda row: options.shapes.index(row["matrices"]))
    panels = [Panel(str(group), "ms per step", lines=lines(group, rows), over="devices") for group in groups]
    tables = {"Step of parameters whose rows are divided, median milliseconds": rows}
    where = [each["environment"] for each in told if each["rows"]][-1]
    measuring.report(options, tables, Chart("A step over devices", panels), where)
    return 0


def lines(group: matrices.Matrices, rows: list[Row]) -> dict[str, dict[int, float]]:
    drawn: dict[str, dict[int, float]] = {}
    for row in rows:
        if row["matrices"] == str(group):
            drawn.setdefault(row["step"], {})[row["devices"]] = row["ms"]
    return drawn


if __name__ == "__main__":
    command_line.run("scaling", main)
