"""Eigenbases of symmetric matrices: the one guarded `eigh`, and what is carried into and out of a pair of bases."""

import jax
import jax.numpy as jnp

from rekls_jax._types import Eigen


def eigh(S: jax.Array, previous: Eigen) -> tuple[Eigen, jax.Array]:
    """Eigendecomposition of `S` (m, m), eigenvalues descending, and whether it succeeded, () bool.

    `jnp.linalg.eigh` reports failure as NaN. `previous` is returned then: an old basis is still orthonormal, and
    one matrix's bad step must not poison the run.
    """
    values, vectors = jnp.linalg.eigh(S, symmetrize_input=True)
    succeeded = jnp.all(jnp.isfinite(values)) & jnp.all(jnp.isfinite(vectors))
    eigen = Eigen(
        jnp.where(succeeded, values[::-1], previous.values), jnp.where(succeeded, vectors[:, ::-1], previous.vectors)
    )
    return eigen, succeeded


def project(G: jax.Array, Q_L: jax.Array, Q_R: jax.Array) -> jax.Array:
    """`Q_L^T G Q_R`, (m, n): a matrix of the parameter's basis seen in the eigenbasis."""
    return Q_L.T @ G @ Q_R


def restore(G: jax.Array, Q_L: jax.Array, Q_R: jax.Array) -> jax.Array:
    """`Q_L G Q_R^T`, (m, n): back from the eigenbasis."""
    return Q_L @ G @ Q_R.T


def carry_second_moment(nu: jax.Array, old: tuple[Eigen, Eigen], new: tuple[Eigen, Eigen]) -> jax.Array:
    """`(A*A) V (B*B)^T` with `A = Q_L_new^T Q_L_old`, `B = Q_R_new^T Q_R_old`, (m, n).

    The variance of independent entries under a change of basis: A*A and B*B are doubly stochastic, so that V stays
    non-negative and keeps its sum, and a mere change of sign or order of the eigenvectors moves it exactly along.
    """
    A, B = (n.vectors.T @ o.vectors for n, o in zip(new, old, strict=True))
    return (A * A) @ nu @ (B * B).T
