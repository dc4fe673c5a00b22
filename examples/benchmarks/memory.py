"""How much memory a step needs on each device: what XLA plans for the compiled program, parameters' rows divided.

python examples/benchmarks/memory.py

The state is donated: its new bytes lie where the old ones were (aliased), and both its arguments and its outputs count. At
its most a step holds arguments + outputs + temporary - aliased. Nothing is run but the optimizers' `init`. State bytes per
parameter are those of all devices together, copies included, by the number of the parameters' entries.
"""

import argparse

import matrices
import measuring

# isort: split
import command_line
import jax
from jax.sharding import Mesh
from measuring import Chart, Panel, Row


def rows_of(group: matrices.Matrices, mesh: Mesh | None) -> list[Row]:
    rows = []
    count = 1 if mesh is None else mesh.size
    for name, step in matrices.steps(matrices.gradients(group, mesh), mesh).items():
        if mesh is None and name == matrices.REPLICATED:
            continue  # on one device the same program as split
        planned = step.compiled.memory_analysis()
        if planned is None:
            raise ValueError(f"jax tells nothing about the memory of a program on {jax.default_backend()}")
        in_mb = {
            "arguments": planned.argument_size_in_bytes / 1e6,
            "outputs": planned.output_size_in_bytes / 1e6,
            "aliased": planned.alias_size_in_bytes / 1e6,
            "temporary": planned.temp_size_in_bytes / 1e6,
        }
        held = sum(shard.data.nbytes for leaf in jax.tree.leaves(step.state) for shard in leaf.addressable_shards)
        rows.append(
            {
                "matrices": str(group),
                "devices": count,
                "step": name if mesh is not None or name == matrices.REFERENCE_WAY else "rekls",
                **in_mb,
                "at most": in_mb["arguments"] + in_mb["outputs"] + in_mb["temporary"] - in_mb["aliased"],
                "state": matrices.state_bytes(step.state) / 1e6,
                "state bytes / parameter": held / (group.number * group.m * group.n),
            }
        )
    return rows


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = measuring.parser("memory", __doc__, repeats=None)
    matrices.add_shapes(parser, "4x512x512", "12x512x512")
    count = "how many, besides one, or all of a smaller number; a CPU plays as many as asked; default: %(default)s"
    parser.add_argument("--devices", type=int, default=8, metavar="N", help=count)
    options = parser.parse_args(arguments)
    measuring.at_least_one("--devices", options.devices)
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    groups = [matrices.parse(text) for text in options.shapes]
    measuring.check(options)
    mesh = matrices.mesh_of(measuring.devices(options.devices))
    count = 1 if mesh is None else mesh.size
    for group in groups:
        matrices.check_divides(group, count)
    places = [None] if mesh is None else [None, mesh]
    rows: list[Row] = []
    with measuring.progress("compile", len(groups) * len(places)) as bar:
        for group in groups:
            for place in places:
                rows += rows_of(group, place)
                bar.update()
    panels = [
        Panel(
            str(group),
            "MB per device, at most",
            {f"{row['step']}, {row['devices']}": row["at most"] for row in rows if row["matrices"] == str(group)},
        )
        for group in groups
    ]
    measuring.report(options, {"Memory of a step, MB per device": rows}, Chart("Memory of a step: step, devices", panels))
    return 0


if __name__ == "__main__":
    command_line.run("memory", main)
