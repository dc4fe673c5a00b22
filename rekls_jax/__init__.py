"""REKLS for JAX: SOAP with Kullback-Leibler factors and an `eigh` on every step, as an optax transformation."""

from rekls_jax._alias import rekls
from rekls_jax._eigenbasis import Eigh, OrthogonalIteration
from rekls_jax._matrix_view import MatrixDimensionNumbers
from rekls_jax._routing import flax_dimension_numbers
from rekls_jax._state_specs import state_partition_specs
from rekls_jax._transform import ReklsState, scale_by_rekls
from rekls_jax._types import REFERENCE, Numerics

__all__ = [
    "REFERENCE",
    "Eigh",
    "MatrixDimensionNumbers",
    "Numerics",
    "OrthogonalIteration",
    "ReklsState",
    "flax_dimension_numbers",
    "rekls",
    "scale_by_rekls",
    "state_partition_specs",
]
