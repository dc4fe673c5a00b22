"""One step over a flat list of matrices: each accumulates, is decomposed, and applied."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from rekls_jax import _eigen, _matrix_step
from rekls_jax._matrix_step import Rule
from rekls_jax._types import Hyperparameters, MatrixState, Numerics


def initial_state(
    param: jax.Array, numerics: Numerics, dtype: jax.typing.DTypeLike, mu_dtype: jax.typing.DTypeLike
) -> MatrixState:
    """State of one matrix `param` (m, n) before its first step. No two fields share a buffer: they may be donated."""
    m, n = param.shape
    eigenvalue = numerics.initial_eigenvalue or 0.0  # with None, 0 stands for "not seen yet": see `_kl`
    return MatrixState(
        mu=jnp.zeros_like(param, dtype=mu_dtype),
        nu=jnp.zeros_like(param, dtype=dtype),
        L=jnp.zeros((m, m), dtype),
        R=jnp.zeros((n, n), dtype),
        Q_L=jnp.eye(m, dtype=dtype),
        Q_R=jnp.eye(n, dtype=dtype),
        eig_L=jnp.full(m, eigenvalue, dtype),
        eig_R=jnp.full(n, eigenvalue, dtype),
        eigh_failures=jnp.zeros((), jnp.int32),
    )


def step(
    gradients: Sequence[jax.Array], states: Sequence[MatrixState], rule: Rule, count: jax.Array
) -> tuple[list[jax.Array], list[MatrixState]]:
    """Updates, each of its gradient's shape, and the states after step number `count` = 1, 2, …"""
    updates, new_states = [], []
    for G, old in zip(gradients, states, strict=True):
        t, matrix_rule = count.astype(G.dtype), rule._replace(hyper=_as_dtype(rule.hyper, G.dtype))
        state = _matrix_step.accumulate(G, old, matrix_rule, t)
        left, left_succeeded = _eigen.eigh(state.L, old.left)
        right, right_succeeded = _eigen.eigh(state.R, old.right)
        update, state = _matrix_step.apply(G, state, left, right, matrix_rule, t)
        failures = jnp.sum(~jnp.stack([left_succeeded, right_succeeded]), dtype=jnp.int32)
        updates.append(update)
        new_states.append(state._replace(eigh_failures=old.eigh_failures + failures))
    return updates, new_states


def _as_dtype(hyper: Hyperparameters, dtype: jnp.dtype) -> Hyperparameters:
    """Python numbers stay as they are, exact and weakly typed; arrays must not widen the state (x64) or narrow it."""
    return Hyperparameters(*(float(x) if isinstance(x, (int, float)) else jnp.asarray(x, dtype) for x in hyper))
