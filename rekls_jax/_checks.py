"""Errors before work: what was given, what was expected, which argument or which parameter."""

from collections.abc import Collection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any


def in_unit_interval(name: str, value: Any) -> None:
    number(name, value)
    if not isinstance(value, jax.core.Tracer) and not 0 <= value < 1:
        raise ValueError(f"`{name}` must lie in [0, 1), got {value}.")


def non_negative(name: str, value: Any) -> None:
    number(name, value)
    if not isinstance(value, jax.core.Tracer) and not 0 <= value < float("inf"):
        raise ValueError(f"`{name}` must be a finite number >= 0, got {value}.")


def number(name: str, value: Any, expected: str = "a number") -> None:
    """A Python or NumPy number or an array of shape (), traced or not."""
    if not isinstance(value, (int, float, np.generic, np.ndarray, jax.Array)):
        raise TypeError(f"`{name}` must be {expected}, got {value!r} of type {type(value).__name__}.")
    if np.shape(value) != ():
        raise TypeError(f"`{name}` must be {expected}, got an array of shape {np.shape(value)}.")


def number_or_schedule(name: str, value: Any) -> None:
    if not callable(value):
        number(name, value, "a number or a schedule")


def one_of(name: str, value: Any, choices: Collection[str]) -> None:
    if value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def instance_of(name: str, value: Any, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"`{name}` must be a {kind.__name__}, got {value!r} of type {type(value).__name__}.")


def floating_dtype(name: str, dtype: Any) -> None:
    if dtype is None:
        return
    try:
        floating = jnp.issubdtype(jnp.dtype(dtype), jnp.floating)
    except TypeError:
        floating = False
    if not floating:
        raise TypeError(f"`{name}` must be None or a floating-point dtype, got {dtype!r}.")


def floating_leaves(params: PyTree) -> None:
    """Every leaf must be a real floating-point array; integers, complex numbers and non-arrays cannot be optimized."""
    for path, leaf in jax.tree.leaves_with_path(params):
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not jnp.issubdtype(dtype, jnp.floating):
            got = type(leaf).__name__ if dtype is None else f"dtype {dtype}"
            raise TypeError(
                f"Parameter {_name(path)} must be a real floating-point array, got {got}. Leave it out of the params, or "
                "put `optax.masked` around the optimizer."
            )


def matrices(params: PyTree) -> None:
    for path, leaf in jax.tree.leaves_with_path(params):
        if not is_matrix(leaf):
            raise ValueError(
                f"`scale_by_rekls` takes matrices with at least one entry, got shape {leaf.shape} for parameter "
                f"{_name(path)}. `rekls` sends all other leaves to its `fallback`."
            )


def is_matrix(leaf: Any) -> bool:
    return leaf.ndim == 2 and leaf.size > 0


def same_shapes(gradients: PyTree, expected: PyTree) -> None:
    """The gradients must have the tree structure and the shapes of `expected`, the params or a tree like them."""
    given = {_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(gradients)}
    wanted = {_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(expected)}
    for name in wanted:
        if name not in given:
            raise ValueError(f"The gradients have no leaf {name}; the parameter there has shape {wanted[name]}.")
        if given[name] != wanted[name]:
            raise ValueError(f"The gradient of {name} has shape {given[name]}, its parameter has shape {wanted[name]}.")
    for name in given:
        if name not in wanted:
            raise ValueError(f"The gradients have a leaf {name} of shape {given[name]}, the parameters have none there.")
    got: Any = jax.tree.structure(gradients)
    if got != jax.tree.structure(expected):
        raise ValueError(
            f"The gradients must have the parameters' tree structure, {jax.tree.structure(expected)}, got {got}."
        )


def _name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "(the whole tree)"
