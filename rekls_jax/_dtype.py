"""The one dtype policy: compute and keep state in float32, or float64 for float64 parameters; hand updates back in
the gradient's dtype. `eigh` has no 16-bit kernels, and averages kept in 16 bits stall."""

from typing import Any

import jax
import jax.numpy as jnp
import optax


def state_dtype(dtype: jax.typing.DTypeLike) -> jnp.dtype:
    """The dtype that a leaf of this dtype is computed in."""
    wide = jax.dtypes.canonicalize_dtype(dtype) == jnp.float64  # NumPy's float64 is float32 without x64
    return jnp.dtype(jnp.float64 if wide else jnp.float32)


def in_state_dtype(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """`tx` seeing params and gradients in the params' `state_dtype`, its updates cast back to the gradients' dtype."""
    tx = optax.with_extra_args_support(tx)

    def init(params: optax.Params) -> optax.OptState:
        return tx.init(jax.tree.map(_widen, params))

    def update(
        updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None, **extra_args: Any
    ) -> tuple[optax.Updates, optax.OptState]:
        like = updates if params is None else params
        wide = jax.tree.map(lambda G, p: G.astype(state_dtype(p.dtype)), updates, like)
        wide, new_state = tx.update(wide, state, jax.tree.map(_widen, params), **extra_args)
        # Under x64 a float64 hyperparameter would widen float32 moments, and a loop over steps would not compile.
        return cast_like(wide, updates), cast_like(new_state, state)

    return optax.GradientTransformationExtraArgs(init, update)


def _widen(leaf: Any) -> Any:
    dtype = state_dtype(leaf.dtype)
    return leaf.update(dtype=dtype) if isinstance(leaf, jax.ShapeDtypeStruct) else leaf.astype(dtype)


def cast_like(tree: Any, like: Any) -> Any:
    """`tree` with the dtypes of `like`; without x64, NumPy's float64 stands for float32."""
    return jax.tree.map(lambda x, y: x.astype(jax.dtypes.canonicalize_dtype(y.dtype)), tree, like)
