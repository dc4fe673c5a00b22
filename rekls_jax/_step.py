"""One step over a flat list of parameters: their matrices accumulate, are decomposed, and applied.

Matrices of equal shape that lie alike go through it together, as one stack.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rekls_jax import _collectives, _eigh_split, _matrix_step, _matrix_view
from rekls_jax._layout import AxisNames, Layout, Sides
from rekls_jax._matrix_step import Rule
from rekls_jax._types import Hyperparameters, MatrixState, Numerics


class Leaf(NamedTuple):
    """A device's part of one parameter: `G` is its gradient or update."""

    G: jax.Array
    state: MatrixState
    layout: Layout


class Stack(NamedTuple):
    """A device's part of equal matrices: `G` (k, m, n) is their gradient or update, `state` has k of each field."""

    G: jax.Array
    state: MatrixState
    sides: Sides


def initial_state(
    param: jax.Array | jax.ShapeDtypeStruct,
    layout: Layout,
    numerics: Numerics,
    dtype: jax.typing.DTypeLike,
    mu_dtype: jax.typing.DTypeLike,
) -> MatrixState:
    """State before the first step of a device's part `param`. No two fields share a buffer: they may be donated."""
    eigenvalue = numerics.initial_eigenvalue or 0.0  # with None, 0 stands for "not seen yet": see `_kl`
    stack, sides = tuple(param.shape[axis] for axis in layout.view.batch), layout.sides
    on_stack = functools.partial(_collectives.varying, names=sides.batch)
    on_matrix = functools.partial(_collectives.varying, names=sides.batch + sum(sides.rows.names + sides.columns.names, ()))

    def identity(part: _collectives.Part) -> jax.Array:
        """Own rows of it; the whole is never made."""
        index = jnp.arange(part.side.size())
        rows = part.own(index)[:, None] == index[None, :]
        return on_stack(jnp.broadcast_to(rows, stack + rows.shape)).astype(dtype)

    Q_L, Q_R = (identity(_collectives.Part(side)) for side in (sides.left, sides.right))
    return MatrixState(
        mu=on_matrix(jnp.zeros_like(param, dtype=mu_dtype)),
        nu=on_matrix(jnp.zeros_like(param, dtype=dtype)),
        L=jnp.zeros_like(Q_L),
        R=jnp.zeros_like(Q_R),
        Q_L=Q_L,
        Q_R=Q_R,
        eig_L=on_stack(jnp.full((*stack, sides.left.size()), eigenvalue, dtype)),
        eig_R=on_stack(jnp.full((*stack, sides.right.size()), eigenvalue, dtype)),
        eigh_failures=on_stack(jnp.zeros(stack, jnp.int32)),
    )


def step(leaves: Sequence[Leaf], rule: Rule, count: jax.Array, eigh_axes: AxisNames) -> list[Leaf]:
    """The updates and the states after step number `count` = 1, 2, …

    Each device computes its own part of everything, and its share of the decompositions, divided over `eigh_axes`.
    """
    alike: dict[tuple[Sides, jnp.dtype], list[int]] = {}
    for i, leaf in enumerate(leaves):
        alike.setdefault((leaf.layout.sides, leaf.G.dtype), []).append(i)
    buckets = [[leaves[i] for i in indices] for indices in alike.values()]
    moved = map(_unstack, _move([_stack(bucket) for bucket in buckets], rule, count, eigh_axes), buckets)
    results = {i: leaf for bucket in zip(alike.values(), moved, strict=True) for i, leaf in zip(*bucket, strict=True)}
    return [results[i] for i in range(len(leaves))]


def _move(stacks: Sequence[Stack], rule: Rule, count: jax.Array, eigh_axes: AxisNames) -> list[Stack]:
    wholes = [_each(_matrix_step.accumulate, stack, rule, count)(stack.G, stack.state) for stack in stacks]
    factors = [
        _eigh_split.Stack(S, stack.sides.batch)
        for stack, whole in zip(stacks, wholes, strict=True)
        for S in (whole.L, whole.R)
    ]
    eigens = _eigh_split.decompose(factors, eigh_axes)
    moved = []
    for stack, whole, left, right in zip(stacks, wholes, eigens[::2], eigens[1::2], strict=True):
        update, state = _each(_matrix_step.apply, stack, rule, count)(whole, left, right, stack.state)
        moved.append(Stack(update, state, stack.sides))
    return moved


def _each(phase: Callable[..., Any], stack: Stack, rule: Rule, count: jax.Array) -> Callable[..., Any]:
    """`phase` of `_matrix_step`, of each matrix of the stack."""
    dtype = stack.G.dtype
    division = _collectives.division(stack.sides)
    rule = rule._replace(hyper=_as_dtype(rule.hyper, dtype))
    return jax.vmap(functools.partial(phase, rule=rule, t=count.astype(dtype), division=division))


def _stack(leaves: Sequence[Leaf]) -> Stack:
    """The matrices of leaves that lie alike, one after the other."""
    each = [_as_matrices(*leaf) for leaf in leaves]
    G, state = jax.tree.map(lambda *parts: jnp.concatenate(parts), *each)
    return Stack(G, state, leaves[0].layout.sides)


def _unstack(stack: Stack, leaves: Sequence[Leaf]) -> list[Leaf]:
    """What came of each leaf, in its shapes."""
    ends = np.cumsum([leaf.state.eigh_failures.size for leaf in leaves])[:-1]
    fields = [jnp.split(x, ends) for x in (stack.G, *stack.state)]
    return [_as_leaf(G, MatrixState(*state), leaf) for leaf, G, *state in zip(leaves, *fields, strict=True)]


def _as_matrices(G: jax.Array, state: MatrixState, layout: Layout) -> tuple[jax.Array, MatrixState]:
    axes = len(layout.view.batch)
    moments = [_matrix_view.to_matrices(x, layout.view) for x in (G, state.mu, state.nu)]
    return moments[0], MatrixState(*moments[1:], *(x.reshape(-1, *x.shape[axes:]) for x in state[2:]))


def _as_leaf(G: jax.Array, state: MatrixState, leaf: Leaf) -> Leaf:
    moments = [_matrix_view.from_matrices(x, leaf.layout.view, leaf.G.shape) for x in (G, state.mu, state.nu)]
    others = (x.reshape(old.shape) for x, old in zip(state[2:], leaf.state[2:], strict=True))
    return Leaf(moments[0], MatrixState(*moments[1:], *others), leaf.layout)


def _as_dtype(hyper: Hyperparameters, dtype: jnp.dtype) -> Hyperparameters:
    """Python numbers stay as they are, exact and weakly typed; arrays must not widen the state (x64) or narrow it."""
    return Hyperparameters(*(float(x) if isinstance(x, (int, float)) else jnp.asarray(x, dtype) for x in hyper))
