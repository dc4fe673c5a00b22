"""Adam and LaProp on one array G whose second moment lives in another basis. Bias-corrected both.

With G' = project(G), v_t = 1 - b2^t, m_t = 1 - b1^t:

    V <- b2 V + (1 - b2) G'^2 ,  D = sqrt(V / v_t) + eps
    Adam (arXiv:1412.6980)     M' = b1 project(M) + (1 - b1) G' ;  update = restore(M' / m_t / D) ;  M <- b1 M + (1 - b1) G
    LaProp (arXiv:2002.04839)  M <- b1 M + (1 - b1) restore(G' / D) ;  update = M / m_t

With Nesterov's momentum (NAdam, arXiv:1412.6980's as Dozat 2016 has it) M'/m_t becomes b1 M'/m_(t+1) + (1 - b1) G'/m_t, and
LaProp's likewise. M stays in the basis of G: it then needs no old basis, and no sign that another `eigh` would choose
otherwise.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp

from rekls_jax._types import Hyperparameters

Transform = Callable[[jax.Array], jax.Array]
Momentum = Callable[[jax.Array, jax.Array, float | jax.Array, jax.Array], jax.Array]
"""(M, the newest term of the average M, b1, t) -> what stands for M / m_t."""


class Inner(NamedTuple):
    """An inner optimizer."""

    move: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    """(G, mu, nu, project, restore, hyperparameters, t, momentum) -> (update, mu, nu), all of G's shape."""
    numerators: Callable[[jax.Array, jax.Array, float | jax.Array, jax.Array], tuple[jax.Array, ...]]
    """(G, mu, b1, t) -> G and the past, whose projections are divided by D: not less than the round-off in them."""


def bias_corrected(M: jax.Array, newest: jax.Array, b1: float | jax.Array, t: jax.Array) -> jax.Array:
    del newest
    return M / (1 - b1**t)


def nesterov(M: jax.Array, newest: jax.Array, b1: float | jax.Array, t: jax.Array) -> jax.Array:
    """M as it will be at the next step, if that brings no gradient: the newest counts twice."""
    return b1 * M / (1 - b1 ** (t + 1)) + (1 - b1) * newest / (1 - b1**t)


def _adam(
    G: jax.Array,
    mu: jax.Array,
    nu: jax.Array,
    project: Transform,
    restore: Transform,
    hyper: Hyperparameters,
    t: jax.Array,
    momentum: Momentum,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Adam: averages the gradient, then normalises."""
    rotated = project(G)
    nu, scale = _second_moment(rotated, nu, hyper, t)
    # Not project(new mu): numerator and denominator must share the round-off of G', which at step 1 is all there is
    # off the diagonal (measured on 128x64: update RMS 3.2 where 0.9 is meant).
    mean = hyper.b1 * project(mu) + (1 - hyper.b1) * rotated
    update = restore(momentum(mean, rotated, hyper.b1, t) / scale)
    return update, hyper.b1 * mu + (1 - hyper.b1) * G, nu


def _laprop(
    G: jax.Array,
    mu: jax.Array,
    nu: jax.Array,
    project: Transform,
    restore: Transform,
    hyper: Hyperparameters,
    t: jax.Array,
    momentum: Momentum,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """LaProp: normalises the gradient, then averages."""
    rotated = project(G)
    nu, scale = _second_moment(rotated, nu, hyper, t)
    normalised = restore(rotated / scale)
    mu = hyper.b1 * mu + (1 - hyper.b1) * normalised
    return momentum(mu, normalised, hyper.b1, t), mu, nu


def _second_moment(rotated: jax.Array, nu: jax.Array, hyper: Hyperparameters, t: jax.Array) -> tuple[jax.Array, jax.Array]:
    nu = hyper.b2 * nu + (1 - hyper.b2) * rotated * rotated
    # The square of a gradient below 1e-19 is 0 in float32: with eps = 0 the quotient would be anything, or 0 / 0.
    return nu, jnp.sqrt(jnp.maximum(nu / (1 - hyper.b2**t), jnp.finfo(nu.dtype).tiny)) + hyper.eps


ADAM = Inner(_adam, lambda G, mu, b1, t: (G, b1 * mu / (1 - b1**t)))
LAPROP = Inner(_laprop, lambda G, mu, b1, t: (G,))
