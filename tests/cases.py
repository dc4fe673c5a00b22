"""The catalogue that tests draw from: shapes, gradients, runs, and ways to look into a state."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from rekls_jax import REFERENCE, Numerics, ReklsState
from rekls_jax import scale_by_rekls as scale_by_rekls

SHAPES = [(5, 3), (3, 7), (6, 6), (1, 4), (4, 1), (1, 1)]
WIDE_AND_TALL = [(64, 64), (128, 64), (16, 256), (96, 200)]
NUMERICS = {"default": Numerics(), "reference": REFERENCE}
METHODS = ["decoupled", "independent", "palm", "l2"]


def gradients(shape: tuple[int, ...], steps: int, seed: int = 0, scale: float = 1.0) -> np.ndarray:
    """N(0, scale²), (steps, *shape) float32."""
    return (scale * np.random.default_rng(seed).standard_normal((steps, *shape))).astype(np.float32)


PARAMS: dict[str, jax.Array] = {
    "w": jnp.ones((6, 4)),
    "v": jnp.full((3, 5), 0.5, jnp.float32),
    "b": jnp.ones(4),
    "s": jnp.float32(2.0),
}
# Large enough that the round-off of the first step, which differs between programs and machines, moves no parameter by more
# than ROUND_OFF in a few steps at a learning rate of .1.
EPS, ROUND_OFF = 1e-2, 1e-4
STREAM: dict[str, np.ndarray] = {name: gradients(p.shape, 12, seed=i) for i, (name, p) in enumerate(PARAMS.items())}


def run(tx: optax.GradientTransformation, gradients: Any, dtype: Any = jnp.float32) -> tuple[np.ndarray, ReklsState]:
    """Updates (steps, m, n) in float64 and the last state of `scale_by_rekls` over a stream of gradients."""
    stream = jnp.asarray(gradients, dtype)

    @jax.jit
    def scan(state: ReklsState, stream: jax.Array) -> tuple[ReklsState, jax.Array]:
        return jax.lax.scan(lambda state, G: tx.update(G, state)[::-1], state, stream)

    state, updates = scan(tx.init(jnp.zeros(stream.shape[1:], dtype)), stream)
    return np.asarray(updates, np.float64), state


def descend(tx: optax.GradientTransformation, params: Any, stream: Any, state: Any = None) -> tuple[Any, Any]:
    """Parameters and state after `tx` went along a tree of gradients, each leaf (steps, ...)."""
    state = tx.init(params) if state is None else state
    update = jax.jit(tx.update)
    for i in range(len(jax.tree.leaves(stream)[0])):
        updates, state = update(jax.tree.map(lambda g: jnp.asarray(g[i]), stream), state, params)  # noqa: B023
        params = optax.apply_updates(params, updates)
    return params, state


def rms(x: Any, axis: Any = None) -> Any:
    return np.sqrt(np.mean(np.square(np.asarray(x, np.float64)), axis=axis))


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.sum(a * b) / np.linalg.norm(a) / np.linalg.norm(b))


def rekls_states(state: Any) -> list[ReklsState]:
    """Every `ReklsState` inside an optax state."""
    found = jax.tree.leaves(state, is_leaf=lambda s: isinstance(s, ReklsState))
    return [s for s in found if isinstance(s, ReklsState)]


def replace_in(state: Any, **fields: Any) -> Any:
    """`state` with these fields of every `ReklsState` inside it replaced."""

    def replace(s: Any) -> Any:
        return s._replace(**fields) if isinstance(s, ReklsState) else s

    return jax.tree.map(replace, state, is_leaf=lambda s: isinstance(s, ReklsState))


def assert_same(a: Any, b: Any, **tolerance: float) -> None:
    """Two trees: the same structure, shapes, dtypes, and values (exactly, or within `numpy.allclose` tolerances)."""
    assert structure(a) == structure(b)
    options: dict[str, Any] = {"rtol": 0.0, "atol": 0.0, **tolerance}
    for (path, x), y in zip(jax.tree.leaves_with_path(a), jax.tree.leaves(b), strict=True):
        assert (x.shape, x.dtype) == (y.shape, y.dtype), jax.tree_util.keystr(path)
        expected, actual = np.asarray(y, np.float64), np.asarray(x, np.float64)
        np.testing.assert_allclose(actual, expected, **options, err_msg=jax.tree_util.keystr(path))


def structure(tree: Any) -> Any:
    return jax.tree.structure(tree)
