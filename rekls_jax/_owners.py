"""Whole matrices for single devices, where there are enough of them: the rest of their step then crosses no devices.

Of equal matrices of which P devices have a part each, every device is handed whole ones, and hands the others their parts
back in the end: a P-th of the bytes, sent and held, of all matrices whole on every device. Few matrices stay divided: the
two factors of each are then decomposed on two devices, and all take part in the products around them.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rekls_jax import _collectives
from rekls_jax._collectives import Part
from rekls_jax._layout import AxisNames, Side, Sides
from rekls_jax._stacks import Stack, pick
from rekls_jax._types import MatrixState


class Handover(NamedTuple):
    """Of a stack that lies as `sides` says, some matrices to each device along `names`, the mesh axes that divide them."""

    sides: Sides
    names: AxisNames
    table: np.ndarray  # (devices, slots): which of the stack each gets, -1 for none

    def owned(self) -> Sides:
        """How the matrices lie at their owners: whole, the stack divided."""
        return self.sides.undivided(self.sides.batch + self.names)

    def there(self, G: jax.Array, state: MatrixState) -> tuple[jax.Array, MatrixState]:
        """Parts of all matrices, G (k, …) and each field of `state` -> own ones, (slots, …); for -1 some other."""
        order = np.maximum(self.table.ravel(), 0)
        return self._each(lambda x, sides: _to_owners(pick(x, order), sides, self.names), G, state)

    def back(self, G: jax.Array, state: MatrixState) -> tuple[jax.Array, MatrixState]:
        """Own matrices, (slots, …) -> parts of those in the table, in their order in the stack."""
        order = self.table.ravel()
        places = np.argsort(order, stable=True)[np.count_nonzero(order < 0) :]
        return self._each(lambda x, sides: pick(_from_owners(x, sides, self.names), places), G, state)

    def _each(self, hand: Callable[..., jax.Array], G: jax.Array, state: MatrixState) -> tuple[jax.Array, MatrixState]:
        _, rows, columns, left, right = self.sides
        moments = [rows, columns]
        divided = [moments, moments, moments, [left], [right], [left], [right], [], [], []]
        handed = [hand(x, sides) for x, sides in zip((G, *state), divided, strict=True)]
        return handed[0], MatrixState(*handed[1:])


def plan(stacks: Sequence[tuple[Sides, int]], axis_sizes: Mapping[str, int], eigh_axes: AxisNames) -> list[list[Handover]]:
    """For each stack, of so many matrices, how they go to owners; those in no table stay divided.

    As many as divide evenly, and the rest one each to some of the devices, if it is enough for half of them: to those whose
    turn it is, so that the rests of several stacks meet different devices. None where `eigh_axes` leave out a device.
    """
    handovers: list[list[Handover]] = []
    dealt = 0
    for sides, matrices in stacks:
        names = sides.axes()
        devices = math.prod(axis_sizes[name] for name in names)
        slots, rest = divmod(matrices, devices)
        tables = []
        if devices > 1 and set(names) <= set(eigh_axes):
            tables += [np.arange(devices * slots).reshape(devices, slots)] if slots else []
            if rest > 1 and 2 * rest >= devices:
                one_each = np.full((devices, 1), -1)
                one_each[np.arange(dealt, dealt + rest) % devices, 0] = np.arange(devices * slots, matrices)
                tables.append(one_each)
                dealt += rest
        handovers.append([Handover(sides, names, table) for table in tables])
    return handovers


def hand_out(stack: Stack, plan: Sequence[Handover]) -> list[Stack]:
    """The matrices of `stack` that are handed over, each lot a stack, and those that stay divided."""
    shares = []
    for handover in plan:
        G, state = handover.there(stack.G, stack.state)
        turns = None
        if stack.turns is not None or handover.table.min() < 0:  # no slot without a matrix has a turn
            parts = _collectives.axis_size(stack.sides.batch)
            dealt = np.zeros((parts, len(stack.G)), int) if stack.turns is None else stack.turns
            turns = np.where(handover.table < 0, -1, dealt[:, handover.table]).reshape(-1, len(G))
        shares.append(Stack(G, state, handover.owned(), turns))
    handed = sum(np.count_nonzero(handover.table >= 0) for handover in plan)
    if handed < len(stack.G):
        turns = None if stack.turns is None else stack.turns[:, handed:]
        G, state = jax.tree.map(lambda x: x[handed:], (stack.G, stack.state))
        shares.append(Stack(G, state, stack.sides, turns))
    return shares


def take_back(stack: Stack, shares: Sequence[Stack], plan: Sequence[Handover]) -> Stack:
    """`stack` moved on, as the shares that `plan` made of it were."""
    parts = [handover.back(*share[:2]) for handover, share in zip(plan, shares, strict=False)]
    parts += [share[:2] for share in shares[len(plan) :]]
    G, state = jax.tree.map(lambda *x: jnp.concatenate(x), *parts)
    return stack._replace(G=G, state=state)


def _to_owners(x: jax.Array, sides: Sequence[Side | None], names: AxisNames) -> jax.Array:
    divided = _divided(sides)
    for axis, part in divided:
        x = part.exchange(x, axis)
    return x if divided else _collectives.own(x, names)  # what is not divided is on every device


def _from_owners(x: jax.Array, sides: Sequence[Side | None], names: AxisNames) -> jax.Array:
    divided = _divided(sides)
    for axis, part in reversed(divided):
        x = part.exchange_back(x, axis)
    return x if divided else _collectives.gather(x, names)


def _divided(sides: Sequence[Side | None]) -> list[tuple[int, Part]]:
    return [(axis, Part(side)) for axis, side in enumerate(sides, start=1) if side is not None and side.axes()]
