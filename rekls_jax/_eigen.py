"""What is carried into and out of a pair of eigenbases, and from one pair into the next. A side without one, None, is I."""

import jax
import jax.numpy as jnp

from rekls_jax._types import Division, Eigen, Part

Pair = tuple[Eigen | None, Eigen | None]
"""Of L and of R."""


def guard(new: Eigen, previous: Eigen) -> tuple[Eigen, jax.Array]:
    """`new`, or `previous` where the decomposition failed, and whether it succeeded, () bool.

    `jnp.linalg.eigh` reports failure as NaN. An old basis is still orthonormal, and one matrix's bad step must not
    poison the run.
    """
    # Of every entry: on a CPU the largest of 64 x 64 entries, one of them NaN, is a number.
    succeeded = jnp.all(jnp.isfinite(new.values)) & jnp.all(jnp.isfinite(new.vectors))
    return jax.tree.map(lambda x, y: jnp.where(succeeded, x, y), new, previous), succeeded


def descending(eigen: Eigen) -> tuple[Eigen, jax.Array]:
    """Columns sorted by their eigenvalues, and which column stood at each place before, (m,)."""
    order = jnp.argsort(eigen.values, descending=True)
    return Eigen(eigen.values[order], eigen.vectors[:, order]), order


def project(x: jax.Array, bases: Pair, division: Division) -> jax.Array:
    """`Q_L^T x Q_R`, (m, n): a matrix of the parameter's basis seen in the eigenbasis. Own part of own part."""
    left, right = bases
    return _between(_own(division.rows, left, transposed=True), x, _own(division.columns, right, transposed=True), division)


def restore(x: jax.Array, bases: Pair, division: Division) -> jax.Array:
    """`Q_L x Q_R^T`, (m, n): back from the eigenbasis. Own part of own part."""
    left, right = bases
    return _between(_own(division.rows, left), x, _own(division.columns, right), division)


def carry_second_moment(nu: jax.Array, old: Pair, new: Pair, division: Division) -> jax.Array:
    """`(A*A) V (B*B)^T` with `A = Q_L_new^T Q_L_old`, `B = Q_R_new^T Q_R_old`, (m, n). Own part of own part.

    The variance of independent entries under a change of basis: A*A and B*B are doubly stochastic, so that V stays
    non-negative and keeps its sum, and a mere change of sign or order of the eigenvectors moves it exactly along.
    """

    def overlap(part: Part | None, new: Eigen | None, old: Eigen | None, wanted: Part) -> jax.Array | None:
        if part is None or new is None or old is None:
            return None
        return part.as_part(jnp.square(part.own(new.vectors.T) @ old.vectors), wanted)

    sides = zip((division.left, division.right), new, old, (division.rows, division.columns), strict=True)
    A2, B2 = (overlap(*side) for side in sides)
    return _between(A2, nu, B2, division)


def reorder_second_moment(nu: jax.Array, orders: tuple[jax.Array | None, jax.Array | None], division: Division) -> jax.Array:
    """V with its rows and columns at the new places of the eigenvectors, (m, n). Own part of own part."""
    for axis, (order, part) in enumerate(zip(orders, (division.rows, division.columns), strict=True)):
        if order is not None:
            nu = part.own(jnp.take(part.gather(nu, axis), order, axis), axis)
    return nu


def _own(part: Part, side: Eigen | None, *, transposed: bool = False) -> jax.Array | None:
    """Own rows of the eigenvectors, or of their transpose."""
    return None if side is None else part.own(side.vectors.T if transposed else side.vectors)


def _between(A: jax.Array | None, x: jax.Array, B: jax.Array | None, division: Division) -> jax.Array:
    """Own part of `A X B^T` from own rows of A (m, m) and of B (n, n), and own part of X (m, n)."""
    if B is not None:
        x = division.columns.gather(x, axis=1) @ B.T
    return x if A is None else A @ division.rows.gather(x)
