"""Named shapes and options that every other module speaks in.

Letters used everywhere: a matrix parameter is `(m, n)`; `L` `(m, m)` and `R` `(n, n)` are its Kronecker
factors; `Q_L`, `Q_R` their eigenvectors as columns; `eig_L` `(m,)`, `eig_R` `(n,)` their eigenvalues, descending.
"""

import dataclasses
from typing import ClassVar, NamedTuple, Protocol

import jax

from rekls_jax import _checks


class Eigen(NamedTuple):
    """Eigendecomposition of one symmetric matrix `(m, m)`."""

    values: jax.Array  # (m,), descending
    vectors: jax.Array  # (m, m), column i belongs to values[i]


class MatrixState(NamedTuple):
    """What a device keeps of one matrix between steps; the same names as `ReklsState`, which holds a tree of each."""

    mu: jax.Array  # own part of (m, n)
    nu: jax.Array  # own part of (m, n)
    L: jax.Array  # own rows of (m, m)
    R: jax.Array  # own rows of (n, n)
    Q_L: jax.Array  # own rows of (m, m)
    Q_R: jax.Array  # own rows of (n, n)
    eig_L: jax.Array  # (m,)
    eig_R: jax.Array  # (n,)
    eigh_failures: jax.Array  # (), int32


class Bases(NamedTuple):
    """Of one matrix, whole on every device, and what changes with them. None for a side that stays the identity."""

    left: Eigen | None  # of L
    right: Eigen | None  # of R
    nu: jax.Array  # own part of (m, n), second moment in these bases
    eigh_failures: jax.Array  # (), int32


class Accumulated(NamedTuple):
    """Of one matrix, whole on every device: what `accumulate` makes for the rest of the step."""

    L: jax.Array | None  # (m, m), symmetric
    R: jax.Array | None  # (n, n), symmetric
    round_off: jax.Array  # (), of an entry of the gradient in another basis


class Part(Protocol):
    """A device's part of one axis of an array. On one device all functions are the identity; `each` adds an axis."""

    def gather(self, x: jax.Array, axis: int = 0) -> jax.Array:
        """The whole array, of which each device has `x`: its part along `axis`."""

    def own(self, x: jax.Array, axis: int = 0) -> jax.Array:
        """This device's part along `axis` of the whole array `x`."""

    def as_part(self, x: jax.Array, other: "Part") -> jax.Array:
        """What `other` owns of the whole of which this part is `x`; both divide the first axis."""

    def each(self, x: jax.Array) -> jax.Array:
        """What each device has as `x`, one after the other along a new first axis."""

    def sum(self, x: jax.Array) -> jax.Array:
        """Of what each device has as `x`."""


class Eigenbasis(Protocol):
    """How a basis is refreshed. Not callable: `optax.inject_hyperparams` would take it for a schedule."""

    continues: ClassVar[bool]
    """Whether column i of a new basis comes out of column i of the one before, so that eigenvalues may be out of order."""

    def refresh(self, S: jax.Array, previous: Eigen, first: jax.Array) -> Eigen:
        """Of `S` (m, m), symmetric, that has the eigenbasis `previous`; `first`, () bool: as yet it has none."""


class Division(NamedTuple):
    """How one matrix (m, n) and its factors are divided over devices."""

    rows: Part  # of m, in the parameter and its moments
    columns: Part  # of n, in the parameter and its moments
    matrix: Part  # of the m n entries
    left: Part | None  # of the rows of L and Q_L; None for a side that stays the identity
    right: Part | None  # of the rows of R and Q_R


class Hyperparameters(NamedTuple):
    """The numbers of the update rule, constant or traced; `rekls` explains each."""

    b1: float | jax.Array
    b2: float | jax.Array
    shampoo_beta: float | jax.Array
    eps: float | jax.Array
    max_update_rms: float | jax.Array


@dataclasses.dataclass(frozen=True)
class Numerics:
    """How the step is kept well-posed in finite precision. The defaults are safe; `REFERENCE` switches them off.

    Args:
      initial_eigenvalue: every eigenvalue of both factors before the first factor update. `None` takes the
        root mean square of the first non-zero gradient, so that the factors have the gradient's own scale from step 1.
      eigenvalue_floor: eigenvalues below this share of the largest are raised to it where a factor is inverted.
      carry_second_moment: rotate the second moment into each new eigenbasis, `V <- (A*A) V (B*B)^T` with
        `A = Q_L_new^T Q_L_old`, `B = Q_R_new^T Q_R_old`. Without it V stays in the basis of the step before.
      round_off_floor: this many machine epsilons of `||G||_F / sqrt(max(m, n))`, or with Adam of a sixteenth of
        `b1 ||mu||_F / (1 - b1^t) / sqrt(max(m, n))` where that is larger, are added to `eps` in the denominator. What lies
        below is round-off of the projection, which would be scaled up to full size, and after a large gradient far beyond.
        For a `mu_dtype` with a larger epsilon, at least a 256th of that many of its epsilons, of mu's root mean square.
      precision: of every matrix product: "highest", "high" or "default", as `jax.default_matmul_precision` names
        them, whatever that is set to outside.
    """

    initial_eigenvalue: float | None = None
    eigenvalue_floor: float = 1e-2
    carry_second_moment: bool = True
    round_off_floor: float = 256.0
    precision: str = "highest"

    def __post_init__(self) -> None:
        if self.initial_eigenvalue is not None:
            _checks.non_negative("initial_eigenvalue", self.initial_eigenvalue)
        _checks.non_negative("eigenvalue_floor", self.eigenvalue_floor)
        if self.eigenvalue_floor > 1:
            raise ValueError(
                f"`eigenvalue_floor` is a share of the largest eigenvalue, at most 1, got {self.eigenvalue_floor}."
            )
        _checks.instance_of("carry_second_moment", self.carry_second_moment, bool)
        _checks.non_negative("round_off_floor", self.round_off_floor)
        _checks.one_of("precision", self.precision, ("highest", "high", "default"))


REFERENCE = Numerics(initial_eigenvalue=0.0, eigenvalue_floor=0.0, carry_second_moment=False, round_off_floor=0.0)
"""`Numerics` of the PyTorch reference: eigenvalues start at zero, nothing is floored but by `eps`, V is not rotated."""
