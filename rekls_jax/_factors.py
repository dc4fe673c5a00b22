"""The factor update of one matrix G (m, n): Kullback-Leibler, arXiv:2509.03378, or plain, SOAP's, arXiv:2409.11321.

    beta_t = 1 - (1 - beta) / (1 - beta^t)                                   beta_1 = 0
    L <- beta_t L + (1 - beta_t)/n  G   Q_R diag(1/eig_R) Q_R^T G^T
    R <- beta_t R + (1 - beta_t)/m  G^T Q_L diag(1/eig_L) Q_L^T G

Both lines use the bases and eigenvalues of the step before. Plain factors, and those beside a side that stays the identity,
have the identity in the middle: the mean of G G^T / n and of G^T G / m.
"""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

from rekls_jax._types import Division, Eigen, Numerics, Part

Between = Callable[[Eigen | None], Eigen | None]
"""The other side's decomposition -> the one whose inverse stands between G and G^T; None for the identity."""


def kullback_leibler(other: Eigen | None) -> Eigen | None:
    return other


def plain(other: Eigen | None) -> Eigen | None:
    del other
    return None


def bias_corrected_beta(shampoo_beta: float | jax.Array, t: jax.Array) -> jax.Array:
    """Weight of the old factor at step `t` = 1, 2, …: the plain mean at first, `shampoo_beta` in the long run."""
    return 1 - (1 - shampoo_beta) / (1 - shampoo_beta**t)


def root_mean_squares(matrices: Sequence[jax.Array], division: Division) -> jax.Array:
    """Of all entries of each matrix, (k,) on every device, of which this one has these equal parts."""
    own = jnp.stack(list(map(_root_mean_square, matrices)))
    return jax.vmap(_root_mean_square, in_axes=1)(division.matrix.each(own))


def _root_mean_square(G: jax.Array) -> jax.Array:
    """Of the scaled array: in float32 the squares of large gradients sum to infinity."""
    largest = jnp.max(jnp.abs(G))
    scale = jnp.where(largest == 0, 1, largest)
    # Of zeros no square root: its derivative is infinite there, and a device's part may be 0 where the whole is not.
    mean_square = jnp.where(largest == 0, 1, jnp.mean(jnp.square(G / scale)))
    return jnp.where(largest == 0, 0, scale * jnp.sqrt(mean_square))


def inverse_eigenvalues(values: jax.Array, rms: jax.Array, eps: float | jax.Array, numerics: Numerics) -> jax.Array:
    """`1/eig` of a factor `(m,)`, floored; eigenvalues that hold nothing yet are taken as `rms`, the gradient's."""
    dtype = jnp.finfo(values.dtype)
    if numerics.initial_eigenvalue is None:
        # Not only at step 1: a matrix without gradients for hundreds of steps (an idle expert) has factors near zero,
        # whose inverse would make the next gradient dominate for as long again.
        values = jnp.where(values[0] > dtype.eps * rms, values, rms)
    # `tiny` keeps 1/0 out when eps is 0 and no gradient has come yet.
    floor = jnp.maximum(jnp.maximum(numerics.eigenvalue_floor * values[0], eps), dtype.tiny)
    return 1 / jnp.maximum(values, floor)


def update_factor(
    factor: jax.Array,
    G: jax.Array,
    between: Eigen | None,
    beta_t: jax.Array,
    rms: jax.Array,
    eps: float | jax.Array,
    numerics: Numerics,
    part: Part,
) -> jax.Array:
    """The line for L (m, m), of which this device has the rows `factor`; `between` is the decomposition of R, None for I.

    For R pass `G.T` and the decomposition of L. Each device computes its own rows; the whole comes back, symmetric.
    """
    if between is None:
        half, whole_half = part.own(G), G
    else:
        half = (part.own(G) @ between.vectors) * jnp.sqrt(inverse_eigenvalues(between.values, rms, eps, numerics))[None, :]
        whole_half = part.gather(half)
    factor = part.gather(beta_t * factor + (1 - beta_t) / G.shape[1] * (half @ whole_half.T))
    # A matrix product may round (i, j) and (j, i) differently; over many steps that would show in the factor.
    return (factor + factor.T) / 2
