"""How a symmetric matrix gets its eigenbasis: the one `eigh`, or orthogonal iteration from the basis it had before."""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp

from rekls_jax import _checks
from rekls_jax._types import Eigen


def eigh(S: jax.Array) -> Eigen:
    """Eigendecomposition of `S` (m, m), exactly symmetric; eigenvalues descending. NaN where it fails."""
    values, vectors = jnp.linalg.eigh(S, symmetrize_input=False)
    return Eigen(values[::-1], vectors[:, ::-1])


@dataclasses.dataclass(frozen=True)
class Eigh:
    """A full eigendecomposition, `jnp.linalg.eigh`, at each refresh of a basis."""

    continues: ClassVar[bool] = False

    def refresh(self, S: jax.Array, previous: Eigen, first: jax.Array) -> Eigen:
        """Of `S` (m, m); needs nothing of what was."""
        del previous, first
        return eigh(S)


@dataclasses.dataclass(frozen=True)
class OrthogonalIteration:
    """Power steps from the basis before, `Q <- qr(S Q)`, as in SOAP (arXiv:2409.11321); the first refresh is an `eigh`.

    Eigenvalues are the Rayleigh quotients `diag(Q^T S Q)`. The columns are sorted by them, descending, and the second moment
    with the columns.

    Args:
      power_iterations: how many steps at each refresh, at least 1. Each costs a matrix product and a QR decomposition.
    """

    power_iterations: int = 1
    continues: ClassVar[bool] = True

    def __post_init__(self) -> None:
        _checks.positive_int("power_iterations", self.power_iterations)

    def refresh(self, S: jax.Array, previous: Eigen, first: jax.Array) -> Eigen:
        """Of `S` (m, m); column i continues column i of `previous`."""
        return jax.lax.cond(first, eigh, lambda S: self._iterate(S, previous.vectors), S)

    def _iterate(self, S: jax.Array, Q: jax.Array) -> Eigen:
        for _ in range(self.power_iterations):
            Q, _ = jnp.linalg.qr(S @ Q)
        return Eigen(jnp.sum(Q * (S @ Q), axis=0), Q)
