"""Which matrices get new bases at which step, where not all do at every step. Static, and the same on any mesh."""

import math
from collections.abc import Sequence
from typing import NamedTuple

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
        whole = (dealt + np.arange(parts * sizes)) % every
        apart = whole.reshape([n for axis in axes for n in axis])
        turns[i] = apart.transpose([*range(0, apart.ndim, 2), *range(1, apart.ndim, 2)]).reshape(parts, sizes)
        dealt += whole.size
    return [turns[i] for i in range(len(stacks))]


def table(turns: np.ndarray, every: int) -> np.ndarray:
    """Which of the k matrices of each row of `turns` are due at each turn, (rows, every, slots); k for none."""
    due = [[np.flatnonzero(row == turn) for turn in range(every)] for row in turns]
    slots = max(len(indices) for row in due for indices in row)
    return np.array(
        [[np.pad(indices, (0, slots - len(indices)), constant_values=turns.shape[1]) for indices in row] for row in due]
    )
