"""Many symmetric matrices, many devices: who decomposes which, and the exchange of what came out.

Every device enters with all matrices and leaves with all decompositions, having computed its share. Cost of one matrix
(d, d): d³.
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from rekls_jax import _collectives
from rekls_jax._layout import AxisNames
from rekls_jax._stacks import pick
from rekls_jax._types import Eigen, Eigenbasis


class Stack(NamedTuple):
    """Symmetric matrices (k, d, d), the same on all devices but along `batch`, where each device has others."""

    matrices: jax.Array
    previous: Eigen  # (k, d), (k, d, d): the bases they had before
    wanted: jax.Array | None  # (k,) bool: which to decompose, the others keep what they had; None: all
    batch: AxisNames


class Group(NamedTuple):
    """`number` matrices (size, size), whose work is divided over the mesh axes `names`."""

    size: int
    number: int
    names: AxisNames


def assign(groups: Sequence[Group], axis_sizes: Mapping[str, int]) -> list[np.ndarray]:
    """For each group, which of its matrices each worker decomposes: (workers, slots) indices, -1 for none.

    The largest matrix first, each to the worker with the least to do so far. A worker is one place along the group's
    `names`; devices that differ only along other axes hold other matrices of the same kind and take the same share.
    """
    names = list(axis_sizes)
    devices = np.arange(np.prod(list(axis_sizes.values()), dtype=int)).reshape(list(axis_sizes.values()))
    load = np.zeros(devices.size)
    tables: list[np.ndarray] = [np.empty((0, 0), int)] * len(groups)
    for i, group in sorted(enumerate(groups), key=lambda item: -item[1].size):
        order = [names.index(name) for name in group.names]
        workers = int(np.prod([devices.shape[axis] for axis in order], dtype=int))
        # The group's axes in its own order, the first the slowest, as `axis_index` counts.
        workers_devices = np.moveaxis(devices, order, range(len(order))).reshape(workers, -1)
        shares: list[list[int]] = [[] for _ in range(workers)]
        for matrix in range(group.number):
            worker = int(np.argmin(load[workers_devices].max(axis=1)))
            shares[worker].append(matrix)
            load[workers_devices[worker]] += group.size**3
        slots = max(map(len, shares))
        tables[i] = np.array([share + [-1] * (slots - len(share)) for share in shares])
    return tables


def decompose(stacks: Sequence[Stack], eigenbasis: Eigenbasis, first: jax.Array, eigh_axes: AxisNames) -> list[Eigen]:
    """Of each stack, in its order, on every device; NaN where `eigenbasis` fails. Equal sizes travel together."""
    members: dict[tuple[int, jnp.dtype, AxisNames, bool], list[int]] = {}
    for i, stack in enumerate(stacks):
        members.setdefault((stack.matrices.shape[-1], stack.matrices.dtype, stack.batch, stack.wanted is None), []).append(i)
    groups = [
        Group(size, sum(len(stacks[i].matrices) for i in indices), tuple(name for name in eigh_axes if name not in batch))
        for (size, _, batch, _), indices in members.items()
    ]
    tables = assign(groups, {name: _collectives.axis_size((name,)) for name in eigh_axes})
    merged = [jax.tree.map(lambda *x: jnp.concatenate(x), *(stacks[i][:3] for i in indices)) for indices in members.values()]
    # All shares before the first exchange: a device without work of one size goes on with the next.
    shares = [
        _own_share(work, table, group.names, eigenbasis, first)
        for work, table, group in zip(merged, tables, groups, strict=True)
    ]
    results: dict[int, Eigen] = {}
    for indices, share, table, group in zip(members.values(), shares, tables, groups, strict=True):
        eigen = _exchange(share, table, group.names)
        ends = np.cumsum([len(stacks[i].matrices) for i in indices])[:-1]
        values, vectors = jnp.split(eigen.values, ends), jnp.split(eigen.vectors, ends)
        results.update(zip(indices, map(Eigen, values, vectors), strict=True))
    return [results[i] for i in range(len(stacks))]


Work = tuple[jax.Array, Eigen, jax.Array | None]
"""`matrices`, `previous` and `wanted` of a `Stack`."""


def _own_share(work: Work, table: np.ndarray, names: AxisNames, eigenbasis: Eigenbasis, first: jax.Array) -> Eigen:
    """What came of this worker's row of `table`, (slots, …); of a -1 what some matrix had before."""
    if len(table) > 1:
        mine = _collectives.own(jnp.asarray(table), names)[0]
        matrices, previous, wanted = jax.tree.map(lambda x: x[jnp.maximum(mine, 0)], work)
        work = matrices, previous, mine >= 0 if wanted is None else wanted & (mine >= 0)
    # Under the caller's `vmap` a condition around this one makes all its operands vary as the matrices do.
    first = _collectives.varying(first, tuple(_collectives.varies_over(work[0])))
    # On a CPU never the batch: its kernel runs it on the threads that simulated devices wait in, and all wait for good.
    one_by_one, together = (functools.partial(f, eigenbasis) for f in (_one_by_one, _together))
    return jax.lax.platform_dependent(work, first, cpu=one_by_one, default=together)


def _one_by_one(eigenbasis: Eigenbasis, work: Work, first: jax.Array) -> Eigen:
    def one(carry: None, work: Work) -> tuple[None, Eigen]:
        S, previous, wanted = work
        if wanted is None:
            return carry, _alone(eigenbasis, S, previous, first)
        return carry, jax.lax.cond(wanted, lambda: _alone(eigenbasis, S, previous, first), lambda: previous)

    # All at once, which cores that are free share. A program with many calls compiles slowly, and starts a few at a time.
    return jax.lax.scan(one, None, work, unroll=8 if len(work[0]) > 32 else True)[1]


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _alone(eigenbasis: Eigenbasis, S: jax.Array, previous: Eigen, first: jax.Array) -> Eigen:
    """Never in a batch, not even under the caller's `vmap`."""
    return jax.custom_batching.sequential_vmap(eigenbasis.refresh)(S, previous, first)


@_alone.defjvp
def _alone_jvp(eigenbasis: Eigenbasis, arguments: Any, tangents: Any) -> tuple[Eigen, Eigen]:
    return jax.jvp(eigenbasis.refresh, arguments, tangents)  # `sequential_vmap` has no reverse mode


def _together(eigenbasis: Eigenbasis, work: Work, first: jax.Array) -> Eigen:
    def all_of(matrices: jax.Array, previous: Eigen) -> Eigen:
        return jax.vmap(eigenbasis.refresh, in_axes=(0, 0, None))(matrices, previous, first)

    matrices, previous, wanted = work
    if wanted is None:
        return all_of(matrices, previous)
    new = jax.lax.cond(jnp.any(wanted), all_of, lambda _, previous: previous, matrices, previous)
    return jax.vmap(functools.partial(jax.tree.map, jnp.where))(Eigen(wanted, wanted), new, previous)


def _exchange(share: Eigen, table: np.ndarray, names: AxisNames) -> Eigen:
    """All workers' shares in the order of the matrices, (k, …), the same on every device along `names`."""
    place = np.empty(table.max() + 1, int)
    place[table[table >= 0]] = np.flatnonzero(table.ravel() >= 0)
    return jax.tree.map(lambda x: pick(_collectives.gather(x, names), place), share)
