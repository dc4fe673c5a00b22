"""One matrix G (m, n), around any eigendecomposition.

accumulate   L, R from G and the bases of the step before
decompose    elsewhere: new bases of L and R
refresh      the new bases, and V in them
apply        update, mu, nu from G and the bases

A device computes its own part of each; `division` says which that is, on one device all.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from rekls_jax import _eigen, _factors
from rekls_jax._inner import Inner, Momentum
from rekls_jax._types import Accumulated, Bases, Division, Eigen, Eigenbasis, Hyperparameters, MatrixState, Numerics, Part


class Rule(NamedTuple):
    """Everything that the step does not change."""

    hyper: Hyperparameters
    numerics: Numerics
    between: _factors.Between
    eigenbasis: Eigenbasis
    inner: Inner
    momentum: Momentum


def accumulate(G: jax.Array, state: MatrixState, rule: Rule, t: jax.Array, division: Division) -> tuple[Accumulated, Bases]:
    """Both factors moved on by the gradient, of which this device has the part `G`, and the bases they were made with."""
    sizes = _factors.root_mean_squares(rule.inner.numerators(G, state.mu.astype(G.dtype), rule.hyper.b1, t), division)
    rms = sizes[0]
    G = division.rows.gather(division.columns.gather(G, axis=1))
    left = _whole(state.eig_L, state.Q_L, division.left)
    right = _whole(state.eig_R, state.Q_R, division.right)
    beta_t = _factors.bias_corrected_beta(rule.hyper.shampoo_beta, t)

    def moved(factor: jax.Array, G: jax.Array, other: Eigen | None, part: Part | None) -> jax.Array | None:
        if part is None:
            return None
        return _factors.update_factor(factor, G, rule.between(other), beta_t, rms, rule.hyper.eps, rule.numerics, part)

    L, R = moved(state.L, G, right, division.left), moved(state.R, G.T, left, division.right)
    round_off = _round_off(sizes, G.shape, state.mu.dtype, rule.numerics)
    return Accumulated(L, R, round_off), Bases(left, right, state.nu, state.eigh_failures)


def _whole(values: jax.Array, vectors: jax.Array, part: Part | None) -> Eigen | None:
    return None if part is None else Eigen(values, part.gather(vectors))


def refresh(new: _eigen.Pair, bases: Bases, rule: Rule, t: jax.Array, division: Division) -> Bases:
    """`bases` after the decomposition of the factors gave `new`."""
    del t
    old, sides, orders, failures = (bases.left, bases.right), [], [], bases.eigh_failures
    for side, previous in zip(new, old, strict=True):
        order = None
        if side is not None and previous is not None:
            side, succeeded = _eigen.guard(side, previous)
            failures += (~succeeded).astype(failures.dtype)
            if rule.eigenbasis.continues:
                side, order = _eigen.descending(side)
        sides.append(side)
        orders.append(order)
    (left, right), nu = sides, bases.nu
    if rule.numerics.carry_second_moment:
        nu = _eigen.carry_second_moment(nu, old, (left, right), division)
    else:
        nu = _eigen.reorder_second_moment(nu, (orders[0], orders[1]), division)
    return Bases(left, right, nu, failures)


def apply(
    G: jax.Array, whole: Accumulated, bases: Bases, state: MatrixState, rule: Rule, t: jax.Array, division: Division
) -> tuple[jax.Array, MatrixState]:
    """Own part of the update (m, n), and `state` moved on; `G` is own part of the gradient."""
    hyper = rule.hyper
    left, right, nu, eigh_failures = bases
    update, mu, nu = rule.inner.move(
        G,
        state.mu.astype(nu.dtype),
        nu,
        lambda x: _eigen.project(x, (left, right), division),
        lambda x: _without_dead_rows(_eigen.restore(x, (left, right), division), whole, state.mu, rule.numerics, division),
        hyper._replace(eps=hyper.eps + whole.round_off),
        t,
        rule.momentum,
    )

    def factor(whole: jax.Array | None, old: jax.Array, part: Part | None) -> jax.Array:
        return old if part is None or whole is None else part.own(whole)

    def basis(side: Eigen | None, old: Eigen, part: Part | None) -> Eigen:
        return old if part is None or side is None else Eigen(side.values, part.own(side.vectors))

    eig_L, Q_L = basis(left, Eigen(state.eig_L, state.Q_L), division.left)
    eig_R, Q_R = basis(right, Eigen(state.eig_R, state.Q_R), division.right)
    return _limit(update, hyper.max_update_rms, division), MatrixState(
        mu=mu.astype(state.mu.dtype),
        nu=nu,
        L=factor(whole.L, state.L, division.left),
        R=factor(whole.R, state.R, division.right),
        Q_L=Q_L,
        Q_R=Q_R,
        eig_L=eig_L,
        eig_R=eig_R,
        eigh_failures=eigh_failures,
    )


def _round_off(sizes: jax.Array, shape: tuple[int, ...], mu_dtype: jnp.dtype, numerics: Numerics) -> jax.Array:
    """Size below which entries of `Q_L^T X Q_R` are round-off, (), X having the root mean squares `sizes`: G, the past.

    That of the product is spread over the longer side: `||X||_F / sqrt(max(m, n))`. Of the past a sixteenth: after a large
    gradient its round-off is all there is at some places, and without any floor the update was up to 6e5 there; with the
    whole of it a spike of 1e5 held back the updates that follow (128x64: 30 % for 20 steps). What is stored in a narrower
    dtype has the rounding of each entry besides (bfloat16: updates up to 1.9e3).
    """
    of_product = jnp.finfo(sizes.dtype).eps * min(shape) ** 0.5
    each = [of_product, max(of_product / 16, jnp.finfo(mu_dtype).eps / 256)]
    return numerics.round_off_floor * jnp.max(sizes * jnp.asarray(each[: len(sizes)], sizes.dtype))


def _without_dead_rows(
    update: jax.Array, whole: Accumulated, mu: jax.Array, numerics: Numerics, division: Division
) -> jax.Array:
    """0 in rows and columns that never had a gradient: exact arithmetic gives 0 there, round-off a share of its own.

    Their entry on the diagonal of L or R is a sum of squares of zeros, and no momentum is left of a time before L forgot.
    (An embedding row that no batch touched.) NaN is not 0: it must stay visible in the update. The rows of a side that stays
    the identity are not mixed, and 0 of themselves.
    """
    if numerics.round_off_floor == 0:
        return update
    rows, columns = division.rows, division.columns
    moving = (mu != 0).astype(update.dtype)
    if whole.L is not None:
        dead = rows.own(jnp.diag(whole.L) == 0) & (columns.sum(jnp.max(moving, axis=1)) == 0)
        update = jnp.where(dead[:, None], 0, update)
    if whole.R is not None:
        dead = columns.own(jnp.diag(whole.R) == 0) & (rows.sum(jnp.max(moving, axis=0)) == 0)
        update = jnp.where(dead[None, :], 0, update)
    return update


def _limit(update: jax.Array, max_update_rms: float | jax.Array, division: Division) -> jax.Array:
    """Scaled down to that root mean square, of all entries on all devices, where it has more; 0: left as it is."""
    if isinstance(max_update_rms, float) and max_update_rms == 0:
        return update
    scale = jnp.minimum(1, max_update_rms / (_factors.root_mean_squares((update,), division)[0] + 1e-7))
    return update * jnp.where(max_update_rms == 0, 1, scale)
