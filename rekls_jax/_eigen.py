"""Eigenbases of symmetric matrices: the one `eigh`, its guard, and what is carried into and out of a pair of bases."""

import jax
import jax.numpy as jnp

from rekls_jax._types import Division, Eigen


def eigh(S: jax.Array) -> Eigen:
    """Eigendecomposition of `S` (m, m), exactly symmetric; eigenvalues descending. NaN where it fails."""
    values, vectors = jnp.linalg.eigh(S, symmetrize_input=False)
    return Eigen(values[::-1], vectors[:, ::-1])


def guard(new: Eigen, previous: Eigen) -> tuple[Eigen, jax.Array]:
    """`new`, or `previous` where the decomposition failed, and whether it succeeded, () bool.

    `jnp.linalg.eigh` reports failure as NaN. An old basis is still orthonormal, and one matrix's bad step must not
    poison the run.
    """
    succeeded = jnp.all(jnp.isfinite(new.values)) & jnp.all(jnp.isfinite(new.vectors))
    return jax.tree.map(lambda x, y: jnp.where(succeeded, x, y), new, previous), succeeded


def project(x: jax.Array, left: Eigen, right: Eigen, division: Division) -> jax.Array:
    """`Q_L^T x Q_R`, (m, n): a matrix of the parameter's basis seen in the eigenbasis. Own part of own part."""
    return _between(left.vectors.T, x, right.vectors, division)


def restore(x: jax.Array, left: Eigen, right: Eigen, division: Division) -> jax.Array:
    """`Q_L x Q_R^T`, (m, n): back from the eigenbasis. Own part of own part."""
    return _between(left.vectors, x, right.vectors.T, division)


def carry_second_moment(nu: jax.Array, old: tuple[Eigen, Eigen], new: tuple[Eigen, Eigen], division: Division) -> jax.Array:
    """`(A*A) V (B*B)^T` with `A = Q_L_new^T Q_L_old`, `B = Q_R_new^T Q_R_old`, (m, n). Own part of own part.

    The variance of independent entries under a change of basis: A*A and B*B are doubly stochastic, so that V stays
    non-negative and keeps its sum, and a mere change of sign or order of the eigenvectors moves it exactly along.
    """
    A2, B2 = (
        part.gather(jnp.square(part.own(n.vectors.T) @ o.vectors))
        for part, n, o in zip((division.left, division.right), new, old, strict=True)
    )
    return _between(A2, nu, B2.T, division)


def _between(A: jax.Array, x: jax.Array, B: jax.Array, division: Division) -> jax.Array:
    """Own part of `A X B` from whole `A` (m, m), own part `x` of X (m, n) and whole `B` (n, n)."""
    rows, columns = division.rows, division.columns
    return rows.own(A) @ rows.gather(columns.gather(x, axis=1) @ columns.own(B, axis=1))
