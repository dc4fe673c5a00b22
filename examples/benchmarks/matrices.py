"""Matrices to step, and the steps that are compared: the reference's way and both placements of `scale_by_rekls`."""

import re
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from reference_way import AXIS, STATE_SPECS, reference_way

from rekls_jax import scale_by_rekls, state_partition_specs

REFERENCE_WAY, REPLICATED, SPLIT = "reference's way", "replicated", "split"


class Matrices(NamedTuple):
    """So many gradients (m, n)."""

    number: int
    m: int
    n: int

    def __str__(self) -> str:
        return f"{self.number}x{self.m}x{self.n}"


def parse(text: str) -> Matrices:
    if not re.fullmatch(r"[1-9]\d*x[1-9]\d*x[1-9]\d*", text):
        raise ValueError(f"--shapes must be like 4x512x512, which is four matrices (512, 512), got {text}")
    return Matrices(*map(int, text.split("x")))


def add_shapes(parser: Any, *default: str) -> None:
    what = f"groups of matrices, each as NUMBERxROWSxCOLUMNS; default: {' '.join(default)}"
    parser.add_argument("--shapes", nargs="+", default=list(default), metavar="GROUP", help=what)


def check_divides(group: Matrices, devices: int) -> None:
    for side in (group.m, group.n):
        if side % devices:
            raise ValueError(f"--shapes must have sides divisible by the {devices} devices, got {group}")


def mesh_of(devices: list[jax.Device]) -> Mesh | None:
    """None for one device: nothing is divided."""
    return Mesh(np.array(devices), (AXIS,)) if len(devices) > 1 else None


def gradients(group: Matrices, mesh: Mesh | None) -> list[optax.Updates]:
    """Of three steps, N(0, 1), rows divided over the mesh."""
    where = SingleDeviceSharding(jax.devices()[0]) if mesh is None else NamedSharding(mesh, PartitionSpec(AXIS))
    rng = np.random.default_rng(0)
    return [
        {f"w{i:03}": jax.device_put(rng.standard_normal((group.m, group.n), np.float32), where) for i in range(group.number)}
        for _ in range(3)
    ]


class Step:
    """An optimizer's update, compiled, and the state that it goes on from, which it may overwrite."""

    def __init__(self, tx: optax.GradientTransformation, gradients: list[optax.Updates], shardings: Any = None) -> None:
        self.gradients, self.taken = gradients, 0
        params = jax.tree.map(jnp.zeros_like, gradients[0])
        self.params = params
        self.state = jax.jit(tx.init, out_shardings=shardings)(params)
        lowered = jax.jit(tx.update, donate_argnums=1).lower(gradients[0], self.state, params)
        self.compiled = lowered.compile()

    def __call__(self) -> Any:
        G = self.gradients[self.taken % len(self.gradients)]
        self.taken += 1
        updates, self.state = self.compiled(G, self.state, self.params)
        return updates, self.state


def steps(gradients: list[optax.Updates], mesh: Mesh | None) -> dict[str, Step]:
    """The reference's way and both placements, on one device or divided over a mesh."""
    spec = PartitionSpec(AXIS) if mesh is not None else None
    ours = {
        placement: scale_by_rekls(param_specs=spec, mesh=mesh, eigh_placement=placement) for placement in (REPLICATED, SPLIT)
    }
    if mesh is None:
        return {name: Step(tx, gradients) for name, tx in {REFERENCE_WAY: reference_way(), **ours}.items()}
    lie = {name: state_partition_specs(tx, gradients[0], spec) for name, tx in ours.items()}

    def on_mesh(specs: Any) -> Any:
        return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)

    made = {REFERENCE_WAY: Step(reference_way(mesh), gradients, on_mesh(STATE_SPECS))}
    return made | {name: Step(tx, gradients, on_mesh(lie[name])) for name, tx in ours.items()}


def bare_eighs(group: Matrices) -> tuple[Callable[[], Any], Callable[[], Any]]:
    """Nothing but the `eigh` of every factor, on one device: all in one program, and one after the other.

    All in one program, a CPU does as many at once as it has threads. Never a batch of them: under several simulated devices
    a CPU's `eigh` of a batch waits for threads that wait for it.
    """
    rng = np.random.default_rng(1)
    sizes = Counter((group.m, group.n))
    stacks = []
    for size, times in sizes.items():
        X = rng.standard_normal((times * group.number, size, size), np.float32)
        stacks.append(jax.device_put(X @ X.transpose(0, 2, 1), jax.devices()[0]))
    factors = [S for stack in stacks for S in stack]

    def eigh(S: jax.Array) -> Any:
        return jnp.linalg.eigh(S, symmetrize_input=False)

    together = jax.jit(lambda factors: [eigh(S) for S in factors])
    in_turn = jax.jit(lambda stack: jax.lax.map(eigh, stack))
    return lambda: together(factors), lambda: [jax.block_until_ready(in_turn(stack)) for stack in stacks]


def state_bytes(state: Any) -> int:
    """That the fullest device holds."""
    held: Counter[jax.Device] = Counter()
    for leaf in jax.tree.leaves(state):
        for shard in leaf.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return max(held.values())
