"""REKLS for JAX: SOAP with Kullback-Leibler factors and an `eigh` on every step, as an optax transformation."""

from rekls_jax._alias import rekls
from rekls_jax._transform import ReklsState, scale_by_rekls
from rekls_jax._types import REFERENCE, Numerics

__all__ = ["REFERENCE", "Numerics", "ReklsState", "rekls", "scale_by_rekls"]
