"""Devices for the examples: one process or several, real devices or such as the CPU plays; and what each of them holds."""

import argparse
import contextlib
from collections import Counter
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from rekls_jax import ReklsState
from rekls_jax._eigh_split import Group, assign


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--devices", type=int, help="how many, of all processes together; a CPU plays as many as asked; default: 1")
    add("--tensor-parallel", type=int, default=1, help="devices that share one copy of the model; default: %(default)s")
    add("--coordinator", metavar="HOST:PORT", help="of process 0, where there are several; start each with the same options")
    add("--num-processes", type=int, default=1, help="default: %(default)s")
    add("--process-id", type=int, default=0, help="which of them this is, from 0; default: %(default)s")


def check(options: argparse.Namespace) -> None:
    if options.devices is None:
        options.devices = options.num_processes * options.tensor_parallel
    for name in ("devices", "tensor_parallel", "num_processes"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    for name in ("tensor_parallel", "num_processes"):
        if options.devices % getattr(options, name):
            other = f"--{name.replace('_', '-')}"
            raise ValueError(f"--devices must be divisible by {other}, got {options.devices} and {getattr(options, name)}")
    if not 0 <= options.process_id < options.num_processes:
        raise ValueError(f"--process-id must lie in [0, {options.num_processes}), got {options.process_id}")
    if options.num_processes > 1 and options.coordinator is None:
        raise ValueError("--num-processes above 1 needs --coordinator, where process 0 listens")


def start(options: argparse.Namespace) -> Mesh:
    """The mesh of all devices, (data, tensor)."""
    with contextlib.suppress(RuntimeError):  # a backend that runs already has the devices it has
        jax.config.update("jax_num_cpu_devices", options.devices // options.num_processes)
    if options.num_processes > 1:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(options.coordinator, options.num_processes, options.process_id)
    if len(jax.devices()) < options.devices:
        raise ValueError(f"--devices must be at most the {len(jax.devices())} that there are, got {options.devices}")
    devices = np.array(jax.devices()[: options.devices]).reshape(-1, options.tensor_parallel)
    return Mesh(devices, ("data", "tensor"))


def place(array: np.ndarray, mesh: Mesh, *spec: str | None) -> jax.Array:
    """An array that every process has whole, each device taking its part."""
    return jax.make_array_from_callback(array.shape, NamedSharding(mesh, PartitionSpec(*spec)), lambda index: array[index])


def whole(tree: Any, mesh: Mesh) -> Any:
    """NumPy arrays of all of `tree`, on every process."""
    everywhere = jax.jit(lambda tree: tree, out_shardings=NamedSharding(mesh, PartitionSpec()))(tree)
    return jax.tree.map(np.asarray, everywhere)


def report(optimizer_state: Any, mesh: Mesh, milliseconds: float) -> str:
    """A line for each device of this process: bytes of state, share of the decompositions' work, time of a step."""
    held: Counter[jax.Device] = Counter()
    for leaf in jax.tree.leaves(optimizer_state):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    share = eigh_share(optimizer_state, mesh)
    lines = [
        f"device {device.id}: optimizer state {held[device] / 1e6:.2f} MB, eigh {share[device]:.0%} of the work, "
        f"{milliseconds:.0f} ms per step"
        for device in mesh.devices.flat
        if device in held
    ]
    return "\n".join(lines)


def eigh_share(optimizer_state: Any, mesh: Mesh) -> dict[Any, float]:
    """Of each device, by n³."""
    states = jax.tree.leaves(optimizer_state, is_leaf=lambda node: isinstance(node, ReklsState))
    states = [state for state in states if isinstance(state, ReklsState)]
    sizes = Counter(len(eig) for state in states for eig in jax.tree.leaves((state.eig_L, state.eig_R)))
    groups = [Group(size, count, tuple(mesh.axis_names)) for size, count in sizes.items()]
    work = np.zeros(mesh.size)
    for group, table in zip(groups, assign(groups, mesh.shape), strict=True):
        work += group.size**3 * (table >= 0).sum(axis=1)
    return dict(zip(mesh.devices.flat, work / max(work.sum(), 1), strict=True))
