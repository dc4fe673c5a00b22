"""How the PyTorch reference takes a step, in plain JAX: the yardstick of the benchmarks, not an optimizer to train with.

NVIDIA's Emerging-Optimizers (`TpRekls`) gathers the gradient and both factors on every device and repeats everything there.
It keeps no eigenbases, so that it decomposes each factor twice per step: as it was, for the bases and eigenvalues that the
factor update and the first moment need, and as it became. Both moments stay whole on every device. Of a matrix G (m, n):

    (λ_L, Q_L), (λ_R, Q_R) = eigh(L), eigh(R)
    L ← β_t L + (1-β_t)/n · G Q_R diag(1/λ_R) Q_Rᵀ Gᵀ          β_t = 1 - (1-β)/(1-βᵗ)
    R ← β_t R + (1-β_t)/m · Gᵀ Q_L diag(1/λ_L) Q_Lᵀ G
    P_L, P_R = the bases of eigh(L), eigh(R)
    M ← P_Lᵀ Q_L M Q_Rᵀ P_R                                      out of the old bases, into the new ones
    Adam on (P_Lᵀ G P_R, M, V) → U' ;   U = P_L U' P_Rᵀ
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

AXIS = "tp"


class ReferenceState(NamedTuple):
    """All but `count` are trees like the params."""

    count: Any  # (), int32: steps taken
    L: Any  # (m, m), rows divided: left factor
    R: Any  # (n, n), rows divided: right factor
    M: Any  # (m, n), on every device whole: first moment, in the eigenbasis
    V: Any  # (m, n), on every device whole: second moment, in the eigenbasis


STATE_SPECS = ReferenceState(P(), P(AXIS), P(AXIS), P(), P())
"""How the state lies on a mesh of the axis "tp", which divides the rows of the parameters: a prefix of it."""


def reference_way(
    mesh: Mesh | None = None, b1: float = 0.9, b2: float = 0.95, shampoo_beta: float = 0.95, eps: float = 1e-8
) -> optax.GradientTransformation:
    """The counterpart of `scale_by_rekls(param_specs=P("tp"), mesh=mesh)`; without a mesh, of `scale_by_rekls()`."""

    def init(params: optax.Params) -> ReferenceState:
        def factors(side: int) -> Any:
            return jax.tree.map(lambda p: jnp.zeros((p.shape[side],) * 2, p.dtype), params)

        def moments() -> Any:
            return jax.tree.map(jnp.zeros_like, params)

        return ReferenceState(jnp.zeros((), jnp.int32), factors(0), factors(1), moments(), moments())

    def step_all(gradients: optax.Updates, state: tuple[Any, ...], t: jax.Array) -> tuple[Any, tuple[Any, ...]]:
        """On one device, of its part of every matrix."""
        leaves, treedef = jax.tree.flatten(gradients)
        each = zip(leaves, *map(jax.tree.leaves, state), strict=True)
        U, *moved = zip(*(step(t, *matrix) for matrix in each), strict=True)
        return jax.tree.unflatten(treedef, U), tuple(jax.tree.unflatten(treedef, field) for field in moved)

    def step(t: jax.Array, G: jax.Array, L: jax.Array, R: jax.Array, M: jax.Array, V: jax.Array) -> tuple[jax.Array, ...]:
        G, L, R = (gather(x, mesh) for x in (G, L, R))
        m, n = G.shape
        (eig_L, Q_L), (eig_R, Q_R) = eigh(L), eigh(R)
        beta = 1 - (1 - shampoo_beta) / (1 - shampoo_beta**t)
        A, B = G @ Q_R, G.T @ Q_L
        L = beta * L + (1 - beta) / n * (A / jnp.maximum(eig_R, eps)[None]) @ A.T
        R = beta * R + (1 - beta) / m * (B / jnp.maximum(eig_L, eps)[None]) @ B.T
        (_, P_L), (_, P_R) = eigh(L), eigh(R)
        M = P_L.T @ (Q_L @ M @ Q_R.T) @ P_R
        G = P_L.T @ G @ P_R
        M = b1 * M + (1 - b1) * G
        V = b2 * V + (1 - b2) * G**2
        U = P_L @ ((M / (1 - b1**t)) / (jnp.sqrt(V / (1 - b2**t)) + eps)) @ P_R.T
        return *(own_rows(x, mesh) for x in (U, L, R)), M, V

    def update(gradients: optax.Updates, state: Any, params: Any = None) -> tuple[optax.Updates, ReferenceState]:
        del params
        specs = P(AXIS), tuple(STATE_SPECS[1:])
        run = step_all if mesh is None else jax.shard_map(step_all, mesh=mesh, in_specs=(*specs, P()), out_specs=specs)
        count = optax.safe_increment(state.count)
        with jax.default_matmul_precision("highest"):
            updates, moved = run(gradients, tuple(state[1:]), count.astype(jax.tree.leaves(gradients)[0].dtype))
        return updates, ReferenceState(count, *moved)

    return optax.GradientTransformation(init, update)


def eigh(S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Eigenvalues, descending, (m,), and eigenvectors as columns, (m, m)."""
    values, vectors = jnp.linalg.eigh(S, symmetrize_input=False)
    return values[::-1], vectors[:, ::-1]


def gather(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """All rows of what each device has some of."""
    return x if mesh is None else jax.lax.all_gather(x, AXIS, axis=0, tiled=True, to="invarying")


def own_rows(x: jax.Array, mesh: Mesh | None) -> jax.Array:
    """This device's rows of what all have whole."""
    if mesh is None:
        return x
    rows = x.shape[0] // mesh.shape[AXIS]
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(AXIS) * rows, rows)
