"""One matrix G (m, n), around any eigendecomposition: `accumulate` before it, `apply` after it.

accumulate   L, R from G and the bases of the step before
decompose    elsewhere: eigh(L), eigh(R)
apply        update, mu, nu from G and the new bases
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rekls_jax import _eigen, _kl
from rekls_jax._inner import Inner
from rekls_jax._types import Eigen, Hyperparameters, MatrixState, Numerics


class Rule(NamedTuple):
    """Everything that the step does not change."""

    hyper: Hyperparameters
    numerics: Numerics
    inner: Inner


def accumulate(G: jax.Array, state: MatrixState, rule: Rule, t: jax.Array) -> MatrixState:
    """`state` with both factors moved on by the gradient."""
    hyper, numerics = rule.hyper, rule.numerics
    beta_t = _kl.bias_corrected_beta(hyper.shampoo_beta, t)
    L = _kl.update_factor(state.L, G, state.right, beta_t, hyper.eps, numerics)
    R = _kl.update_factor(state.R, G.T, state.left, beta_t, hyper.eps, numerics)
    return state._replace(L=L, R=R)


def apply(
    G: jax.Array, state: MatrixState, left: Eigen, right: Eigen, rule: Rule, t: jax.Array
) -> tuple[jax.Array, MatrixState]:
    """The update (m, n), and `state` with the moments moved on and `left`, `right` in the place of the old bases."""
    hyper, numerics, nu = rule.hyper, rule.numerics, state.nu
    if numerics.carry_second_moment:
        nu = _eigen.carry_second_moment(nu, (state.left, state.right), (left, right))
    update, mu, nu = rule.inner(
        G,
        state.mu.astype(G.dtype),
        nu,
        lambda x: _eigen.project(x, left.vectors, right.vectors),
        lambda x: _without_dead_rows(_eigen.restore(x, left.vectors, right.vectors), state, numerics),
        hyper._replace(eps=hyper.eps + _round_off(G, numerics)),
        t,
    )
    state = state._replace(
        mu=mu.astype(state.mu.dtype), nu=nu, Q_L=left.vectors, Q_R=right.vectors, eig_L=left.values, eig_R=right.values
    )
    return update, state


def _round_off(G: jax.Array, numerics: Numerics) -> jax.Array:
    """Size below which an entry of `Q_L^T G Q_R` is round-off, (): the spread of the error over the longer side."""
    norm_over_longer_side = _kl.root_mean_square(G) * min(G.shape) ** 0.5  # ||G||_F / sqrt(max(m, n))
    return numerics.round_off_floor * jnp.finfo(G.dtype).eps * norm_over_longer_side


def _without_dead_rows(update: jax.Array, state: MatrixState, numerics: Numerics) -> jax.Array:
    """0 in rows and columns that never had a gradient: exact arithmetic gives 0 there, round-off a share of its own.

    Their entry on the diagonal of L or R is a sum of squares of zeros, and no momentum is left of a time before L forgot.
    (An embedding row that no batch touched.) NaN is not 0: it must stay visible in the update.
    """
    if numerics.round_off_floor == 0:
        return update
    rows, columns = (
        (jnp.diag(factor) == 0) & jnp.all(state.mu == 0, axis=axis) for factor, axis in ((state.L, 1), (state.R, 0))
    )
    return jnp.where(rows[:, None] | columns[None, :], 0, update)
