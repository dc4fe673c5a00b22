"""`scale_by_rekls`: the step as an optax transformation over a tree of matrices."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from rekls_jax import _checks, _inner, _step
from rekls_jax._dtype import cast_like, state_dtype
from rekls_jax._matrix_step import Rule
from rekls_jax._types import Hyperparameters, MatrixState, Numerics

INNER = {"adam": _inner.adam, "laprop": _inner.laprop}


class ReklsState(NamedTuple):
    """State of `scale_by_rekls`. All but `count` are trees with the structure of the params, a leaf per matrix (m, n).

    float32, or float64 where the parameter is, except where said otherwise.
    """

    count: jax.Array  # type: ignore[assignment]  # (), int32: steps taken; optax's name, though tuples have a `count` too
    mu: optax.Updates  # (m, n), mu_dtype: mean of G (LaProp: of the normalised G), in the parameter's basis
    nu: optax.Updates  # (m, n): second moment, in the eigenbasis
    L: optax.Updates  # (m, m): left Kronecker factor, symmetric
    R: optax.Updates  # (n, n): right Kronecker factor, symmetric
    Q_L: optax.Updates  # (m, m): eigenvectors of L, as columns
    Q_R: optax.Updates  # (n, n): eigenvectors of R, as columns
    eig_L: optax.Updates  # (m,): eigenvalues of L, descending
    eig_R: optax.Updates  # (n,): eigenvalues of R, descending
    eigh_failures: optax.Updates  # (), int32: decompositions that gave NaN, so that the basis before was kept


def scale_by_rekls(
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.95,
    shampoo_beta: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    *,
    inner: str = "adam",
    numerics: Numerics = Numerics(),
    mu_dtype: jax.typing.DTypeLike | None = None,
) -> optax.GradientTransformation:
    """Rescale gradients by REKLS: Adam or LaProp in the eigenbases of two Kullback-Leibler Kronecker factors.

    `rekls` without learning rate, weight decay and fallback: it explains the arguments. Every leaf must be a matrix.

    Returns:
      A transformation whose state is a `ReklsState` and whose updates point along the gradient (negate them to descend).

    Raises:
      ValueError: an argument out of range; at `init`, a leaf that is no matrix or is empty; at `update`, gradients whose
        structure or shapes are not the params'.
      TypeError: an argument of the wrong kind; at `init` or `update`, a leaf that is not real floating-point.
    """
    for name, value in {"b1": b1, "b2": b2, "shampoo_beta": shampoo_beta}.items():
        _checks.in_unit_interval(name, value)
    _checks.non_negative("eps", eps)
    _checks.one_of("inner", inner, INNER)
    _checks.instance_of("numerics", numerics, Numerics)
    _checks.floating_dtype("mu_dtype", mu_dtype)

    rule = Rule(Hyperparameters(b1, b2, shampoo_beta, eps), numerics, INNER[inner])

    def init(params: optax.Params) -> ReklsState:
        _checks.floating_leaves("Parameter", params)
        _checks.matrices(params)
        leaves, treedef = jax.tree.flatten(params)
        states = []
        for leaf in leaves:
            dtype = state_dtype(leaf.dtype)
            states.append(_step.initial_state(leaf, numerics, dtype, jax.dtypes.canonicalize_dtype(mu_dtype or dtype)))
        return _as_tree(jnp.zeros((), jnp.int32), states, treedef)

    def update(
        updates: optax.Updates, state: ReklsState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ReklsState]:
        del params
        _checks.own_state(state, isinstance(state, ReklsState))
        _checks.floating_leaves("Gradient", updates)
        _checks.same_shapes("gradient", updates, state.mu)
        gradients, treedef = jax.tree.flatten(updates)
        states = [MatrixState(*fields) for fields in zip(*map(jax.tree.leaves, state[1:]), strict=True)]
        count = optax.safe_increment(state.count)
        with jax.default_matmul_precision(numerics.precision):
            scaled, states = _step.step(
                [G.astype(old.nu.dtype) for G, old in zip(gradients, states, strict=True)],
                states,
                rule,
                count,
            )
        return cast_like(jax.tree.unflatten(treedef, scaled), updates), _as_tree(count, states, treedef)

    return optax.GradientTransformation(init, update)


def _as_tree(count: jax.Array, states: list[MatrixState], treedef: Any) -> ReklsState:
    fields = zip(*states, strict=True) if states else [()] * len(MatrixState._fields)
    return ReklsState(count, *(jax.tree.unflatten(treedef, field) for field in fields))
