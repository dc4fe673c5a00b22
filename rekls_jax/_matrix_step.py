"""One matrix G (m, n), around any eigendecomposition: `accumulate` before it, `apply` after it.

accumulate   L, R from G and the bases of the step before
decompose    elsewhere: eigh(L), eigh(R)
apply        update, mu, nu from G and the new bases

A device computes its own part of each; `division` says which that is, on one device all.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rekls_jax import _eigen, _kl
from rekls_jax._inner import Inner
from rekls_jax._types import Division, Eigen, Hyperparameters, MatrixState, Numerics, Whole


class Rule(NamedTuple):
    """Everything that the step does not change."""

    hyper: Hyperparameters
    numerics: Numerics
    inner: Inner


def accumulate(G: jax.Array, state: MatrixState, rule: Rule, t: jax.Array, division: Division) -> Whole:
    """Both factors moved on by the gradient, of which this device has the part `G`, and what they were made from."""
    hyper, numerics = rule.hyper, rule.numerics
    G = division.rows.gather(division.columns.gather(G, axis=1))
    left = Eigen(state.eig_L, division.left.gather(state.Q_L))
    right = Eigen(state.eig_R, division.right.gather(state.Q_R))
    beta_t = _kl.bias_corrected_beta(hyper.shampoo_beta, t)
    L = _kl.update_factor(state.L, G, right, beta_t, hyper.eps, numerics, division.left)
    R = _kl.update_factor(state.R, G.T, left, beta_t, hyper.eps, numerics, division.right)
    return Whole(G, left, right, L, R)


def apply(
    whole: Whole, left: Eigen, right: Eigen, state: MatrixState, rule: Rule, t: jax.Array, division: Division
) -> tuple[jax.Array, MatrixState]:
    """Own part of the update (m, n), and `state` moved on; `left`, `right` are what `eigh` made of the factors."""
    hyper, numerics, nu = rule.hyper, rule.numerics, state.nu
    left, left_succeeded = _eigen.guard(left, whole.left)
    right, right_succeeded = _eigen.guard(right, whole.right)
    failures = jnp.sum(~jnp.stack([left_succeeded, right_succeeded]), dtype=jnp.int32)
    if numerics.carry_second_moment:
        nu = _eigen.carry_second_moment(nu, (whole.left, whole.right), (left, right), division)
    update, mu, nu = rule.inner(
        division.rows.own(division.columns.own(whole.G, axis=1)),
        state.mu.astype(nu.dtype),
        nu,
        lambda x: _eigen.project(x, left, right, division),
        lambda x: _without_dead_rows(_eigen.restore(x, left, right, division), whole, state.mu, numerics, division),
        hyper._replace(eps=hyper.eps + _round_off(whole.G, numerics)),
        t,
    )
    return update, MatrixState(
        mu=mu.astype(state.mu.dtype),
        nu=nu,
        L=division.left.own(whole.L),
        R=division.right.own(whole.R),
        Q_L=division.left.own(left.vectors),
        Q_R=division.right.own(right.vectors),
        eig_L=left.values,
        eig_R=right.values,
        eigh_failures=state.eigh_failures + failures,
    )


def _round_off(G: jax.Array, numerics: Numerics) -> jax.Array:
    """Size below which an entry of `Q_L^T G Q_R` is round-off, (): the spread of the error over the longer side."""
    norm_over_longer_side = _kl.root_mean_square(G) * min(G.shape) ** 0.5  # ||G||_F / sqrt(max(m, n))
    return numerics.round_off_floor * jnp.finfo(G.dtype).eps * norm_over_longer_side


def _without_dead_rows(update: jax.Array, whole: Whole, mu: jax.Array, numerics: Numerics, division: Division) -> jax.Array:
    """0 in rows and columns that never had a gradient: exact arithmetic gives 0 there, round-off a share of its own.

    Their entry on the diagonal of L or R is a sum of squares of zeros, and no momentum is left of a time before L forgot.
    (An embedding row that no batch touched.) NaN is not 0: it must stay visible in the update.
    """
    if numerics.round_off_floor == 0:
        return update
    rows, columns = division.rows, division.columns
    still = mu == 0
    still_rows = jnp.all(columns.gather(still, axis=1), axis=1)
    still_columns = jnp.all(rows.gather(still), axis=0)
    dead_rows = rows.own(jnp.diag(whole.L) == 0) & still_rows
    dead_columns = columns.own(jnp.diag(whole.R) == 0) & still_columns
    return jnp.where(dead_rows[:, None] | dead_columns[None, :], 0, update)
