"""Ways to run an optimizer on many devices, and a parameter for every way in which one may lie on a mesh."""

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import gradients
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rekls_jax import MatrixDimensionNumbers, rekls, scale_by_rekls, state_partition_specs

MODES = ["auto", "explicit", "shard_map"]
LAYOUTS: dict[str, tuple[tuple[int, ...], P]] = {
    "rows": ((16, 32), P("tp")),
    "columns": ((32, 16), P(None, "tp")),
    "tall": ((96, 200), P("tp", None)),
    "wide": ((96, 200), P(None, "tp")),
    "replicated": ((24, 40), P()),
    "both": ((8, 24), P("data", "tp")),
    "several": ((32, 24), P(("data", "tp"))),
    "odd": ((16, 33), P("tp", None)),
    "stack": ((4, 12, 16), P("data", None, "tp")),
    "heads": ((12, 8, 6), P(None, "tp", None)),
    "inner": ((12, 3, 8), P(None, None, "tp")),
    "bias": ((16,), P("tp")),
    "owned": ((6, 12, 20), P(None, None, "tp")),  # one to each of four devices, two more to two of them
    "owned heads": ((9, 6, 8, 6), P(None, "data", "tp")),  # one to each of eight, the ninth stays divided
}
NUMBERS = {
    name: {1: None, 2: MatrixDimensionNumbers()}.get(len(shape), MatrixDimensionNumbers(0, (1, 2)))
    for name, (shape, _) in LAYOUTS.items()
} | {
    "stack": MatrixDimensionNumbers(1, 2),
    "owned": MatrixDimensionNumbers(1, 2),
    "owned heads": MatrixDimensionNumbers(1, (2, 3)),
}
EVERY = [name for name in LAYOUTS if name not in ("rows", "columns", "owned", "owned heads")]  # two lie as "tall", "wide"
OWNED = ["owned", "owned heads", "stack", "several"]
FEW = ["rows", "columns", "replicated", "odd", "bias"]


def mesh_of(devices: int, axis_type: AxisType = AxisType.Auto) -> Mesh:
    """(data, tp), of 8 devices 2 x 4."""
    shape = (2, devices // 2) if devices == 8 else (1, devices)
    return Mesh(np.array(jax.devices()[:devices]).reshape(shape), ("data", "tp"), axis_types=(axis_type,) * 2)


class Problem:
    """Parameters, a stream of gradients and options of `rekls` for some of `LAYOUTS`."""

    def __init__(self, names: Any = tuple(EVERY), dtype: Any = jnp.float32, steps: int = 2, **options: Any) -> None:
        def draw(steps: int, seed: int) -> list[Any]:
            arrays = {name: gradients(LAYOUTS[name][0], steps, seed=seed + i) for i, name in enumerate(names)}
            return [{name: jnp.asarray(array[i], dtype) for name, array in arrays.items()} for i in range(steps)]

        (self.params,), self.stream = draw(1, seed=100), draw(steps, seed=0)
        self.specs = {name: LAYOUTS[name][1] for name in names}
        self.options = {"dimension_numbers": {name: NUMBERS[name] for name in names}, **options}
        self.state: Any = None

    def warm(self) -> "Problem":
        """Half way along the stream, with new bases at every step: factors of full rank, whose bases are no one's choice."""
        half = len(self.stream) // 2
        tx = rekls(0.1, **{**self.options, "precondition_frequency": 1})
        self.params, self.state = descend(tx.update, self.params, tx.init(self.params), self.stream[:half])
        self.stream = self.stream[half:]
        return self

    def one_device(self, jit: bool = True) -> Any:
        """Parameters and state at the end."""
        tx = rekls(0.1, **self.options)
        return descend(tx.update, self.params, self.state or tx.init(self.params), self.stream, jit)

    def many(self, mode: str, devices: int = 8, jit: bool = True, **options: Any) -> Any:
        with entered(mode, devices) as mesh:
            given: dict[str, Any] = {} if mode == "explicit" else {"param_specs": self.specs, "mesh": mesh}
            tx = rekls(0.1, **self.options, **given, **options)

            def put(tree: Any) -> Any:
                return {name: jax.device_put(x, NamedSharding(mesh, self.specs[name])) for name, x in tree.items()}

            params, stream = put(self.params), [put(G) for G in self.stream]
            state_specs = state_partition_specs(tx, params, self.specs)
            shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs)
            state = None if self.state is None else jax.device_put(self.state, shardings)
            if mode != "shard_map":
                return descend(tx.update, params, state or tx.init(params), stream, jit)
            everywhere = jax.shard_map(tx.init, mesh=mesh, in_specs=(self.specs,), out_specs=state_specs)
            update = jax.shard_map(
                tx.update,
                mesh=mesh,
                in_specs=(self.specs, state_specs, self.specs),
                out_specs=(self.specs, state_specs),
            )
            return descend(update, params, state or jax.jit(everywhere)(params), stream, jit)


def eight_devices(optimizer: Any, *args: Any, **options: Any) -> optax.GradientTransformation:
    """Of parameters that lie divided over eight devices, or four, where these divide one of their sides."""

    def spec(p: Any) -> P:
        return next(filter(None, map(_spec, p.shape, ((), (None,)))), P())

    def _spec(size: int, before: tuple[None, ...]) -> P | None:
        return P(*before, ("data", "tp")) if size % 8 == 0 else P(*before, "tp") if size % 4 == 0 else None

    return optimizer(*args, param_specs=lambda params: jax.tree.map(spec, params), mesh=mesh_of(8), **options)


on_eight_devices = functools.partial(eight_devices, scale_by_rekls)
EVERYWHERE = [
    pytest.param(scale_by_rekls, id="one device"),
    pytest.param(on_eight_devices, id="eight devices", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
]
"""To parametrize a test with `direction`, used as `scale_by_rekls` is."""


def descend(update: Any, params: Any, state: Any, stream: list[Any], jit: bool = True) -> Any:
    update = jax.jit(update) if jit else update
    for G in stream:
        updates, state = update(G, state, params)
        params = optax.apply_updates(params, updates)
    return params, state


@contextlib.contextmanager
def entered(mode: str, devices: int = 8) -> Iterator[Mesh]:
    """A mesh; with `mode` "explicit" one of Explicit axes, entered."""
    if mode != "explicit":
        yield mesh_of(devices)
        return
    mesh = mesh_of(devices, AxisType.Explicit)
    with jax.set_mesh(mesh):
        yield mesh


def largest_difference(a: Any, b: Any) -> float:
    def difference(x: Any, y: Any) -> float:
        return float(np.abs(np.asarray(x, np.float64) - np.asarray(y, np.float64)).max(initial=0.0))

    return max(jax.tree.leaves(jax.tree.map(difference, a, b)))
