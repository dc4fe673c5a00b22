"""Which matrices get new bases at which step, where not all do at every step: the same on any mesh."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Stack(NamedTuple):
    """Equal matrices, of each axis of the stack the number of devices that divide it and the size of a device's part."""

    axes: Sequence[tuple[int, int]]
    cost: float  # of one matrix


def deal(stacks: Sequence[Stack], every: int) -> list[np.ndarray]:
    """The turn of each matrix, 0 … `every` - 1: (parts, matrices of a part) of each stack.

    Dealt out like cards, the dearest first, so that each turn gets its share of every kind and of the cost.
    """
    turns: dict[int, np.ndarray] = {}
    dealt = 0
    for i, (axes, _) in sorted(enumerate(stacks), key=lambda item: -item[1].cost):
        parts, sizes = math.prod(part for part, _ in axes), math.prod(size for _, size in axes)
        whole = (dealt + np.arange(parts * sizes, dtype=np.int32)) % every
        apart = whole.reshape([n for axis in axes for n in axis])
        turns[i] = apart.transpose([*range(0, apart.ndim, 2), *range(1, apart.ndim, 2)]).reshape(parts, sizes)
        dealt += whole.size
    return [turns[i] for i in range(len(stacks))]


def most_due(turns: np.ndarray) -> int:
    """Of the matrices of one row of `turns`, (rows, k), how many at most are due at once; -1 is no turn."""
    return max(int(np.bincount(row[row >= 0], minlength=1).max()) for row in turns)


def due(turns: jax.Array, turn: jax.Array, slots: int) -> jax.Array:
    """Indices of the matrices whose turn it is, of `turns` (k,), in (slots,); k for none."""
    none = len(turns)
    return jnp.sort(jnp.where(turns == turn, jnp.arange(none, dtype=turns.dtype), none))[:slots]
