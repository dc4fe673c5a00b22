"""Parameters as stacks: matrices of equal shape that lie alike go through a step together."""

import functools
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rekls_jax import _matrix_view
from rekls_jax._layout import Layout, Sides
from rekls_jax._types import MatrixState


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
    turns: np.ndarray | None  # (parts of the stack, k): when each gets new bases; None: at every step


def stack(leaves: Sequence[Leaf], turns: Sequence[np.ndarray | None]) -> Stack:
    """The matrices of leaves that lie alike, one after the other."""
    each = [_as_matrices(*leaf) for leaf in leaves]
    G, state = jax.tree.map(lambda *parts: jnp.concatenate(parts), *each)
    dealt = [each for each in turns if each is not None]
    return Stack(G, state, leaves[0].layout.sides, np.concatenate(dealt, axis=1) if dealt else None)


def unstack(stack: Stack, leaves: Sequence[Leaf], count: jax.Array) -> list[Leaf]:
    """What came of each leaf, in its shapes; `count`, of steps, is not negative."""
    if len(leaves) == 1:
        return [_as_leaf(stack.G, stack.state, leaves[0])]
    sizes = [leaf.state.eigh_failures.size for leaf in leaves]
    starts = [0, *itertools.accumulate(sizes[:-1])]
    known, unknown = (functools.partial(f, starts) for f in (_known, _unknown))
    places, fields = jax.lax.platform_dependent(count, stack[:2], cpu=unknown, default=known)

    def part(leaf: Leaf, place: jax.Array, size: int) -> Leaf:
        cut = functools.partial(_cut, place=place, size=size)
        G, state = jax.tree.map(cut, fields)
        return _as_leaf(G, state, leaf)

    return [part(*each) for each in zip(leaves, places, sizes, strict=True)]


def pick(x: jax.Array, order: np.ndarray) -> jax.Array:
    """`x[order]`; nothing, or a slice, where the places follow one another."""
    if not np.array_equal(order, order[0] + np.arange(len(order))):
        return x[order]
    return x if len(order) == len(x) else x[order[0] : order[0] + len(order)]


def _cut(x: jax.Array, place: jax.Array, size: int) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, place, size, allow_negative_indices=False)


def _known(starts: Sequence[int], count: jax.Array, fields: Any) -> tuple[list[jax.Array], Any]:
    del count
    return [jnp.int32(start) for start in starts], fields


def _unknown(starts: Sequence[int], count: jax.Array, fields: Any) -> tuple[list[jax.Array], Any]:
    """Of two branches, of which only this one is ever taken.

    XLA compiles kernels that are alike once. Those that cut a leaf out of a stack are alike as long as it knows neither
    where they cut nor how to compute what they cut from. (Of 96 matrices it compiled 20 s, and so 5 s.)
    """

    def never() -> tuple[list[jax.Array], Any]:
        return [jnp.int32(0) for _ in starts], jax.tree.map(jnp.zeros_like, fields)

    return jax.lax.cond(count < 0, never, lambda: _known(starts, count, fields))


def _as_matrices(G: jax.Array, state: MatrixState, layout: Layout) -> tuple[jax.Array, MatrixState]:
    axes = len(layout.view.batch)
    moments = [_matrix_view.to_matrices(x, layout.view) for x in (G, state.mu, state.nu)]
    return moments[0], MatrixState(*moments[1:], *(x.reshape(-1, *x.shape[axes:]) for x in state[2:]))


def _as_leaf(G: jax.Array, state: MatrixState, leaf: Leaf) -> Leaf:
    moments = [_matrix_view.from_matrices(x, leaf.layout.view, leaf.G.shape) for x in (G, state.mu, state.nu)]
    others = (x.reshape(old.shape) for x, old in zip(state[2:], leaf.state[2:], strict=True))
    return Leaf(moments[0], MatrixState(*moments[1:], *others), leaf.layout)
