"""What crosses devices: the whole of what each device has a part of, and a device's part of what all have whole.

All of it inside `shard_map`. Without mesh axes each function is the identity: one device needs no path of its own.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import PartitionSpec

from rekls_jax._layout import AxisNames, Side, Sides, axis_names
from rekls_jax._types import Division


def axis_size(names: AxisNames) -> int:
    """Over how many devices these mesh axes divide."""
    return math.prod(jax.lax.axis_size(name) for name in names)


def gather(x: jax.Array, names: AxisNames, axis: int = 0) -> jax.Array:
    """The parts of all devices along `names`, one after the other along `axis`; the same on each of them."""
    return jax.lax.all_gather(x, names, axis=axis, tiled=True, to="invarying") if names else x


def own(x: jax.Array, names: AxisNames, axis: int = 0) -> jax.Array:
    """What `gather` would put at this device's place."""
    if not names:
        return x
    size = x.shape[axis] // axis_size(names)
    return jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(names) * size, size, axis)


def _all_to_all(x: jax.Array, names: AxisNames, split_axis: int, concat_axis: int) -> jax.Array:
    return jax.lax.all_to_all(x, names, split_axis, concat_axis, tiled=True) if names else x


def varying(x: jax.Array, names: AxisNames) -> jax.Array:
    """`x` typed as one device's part, though made the same on all: a loop over steps wants one type throughout."""
    names = tuple(name for name in names if name not in varies_over(x))
    return jax.lax.pcast(x, names, to="varying") if names else x


def varies_over(x: jax.Array) -> frozenset[str]:
    """The mesh axes along which devices may hold different `x`; none is known under `check_vma=False`."""
    return jax.typeof(x).manual_axis_type.varying


class Part(NamedTuple):
    """A `rekls_jax._types.Part`: of a side that several array axes make, each divided over its own mesh axes."""

    side: Side

    def gather(self, x: jax.Array, axis: int = 0) -> jax.Array:
        return self._along(gather, x, axis, self._own_sizes())

    def own(self, x: jax.Array, axis: int = 0) -> jax.Array:
        return self._along(own, x, axis, self.side.sizes)

    def exchange(self, x: jax.Array, axis: int) -> jax.Array:
        """Of a stack `x`, each device's part along `axis` -> for each device some of the stack, whole along `axis`."""
        return self._along(lambda x, names, i: _all_to_all(x, names, 0, i), x, axis, self._own_sizes())

    def exchange_back(self, x: jax.Array, axis: int) -> jax.Array:
        """What `exchange` made of it -> `x`."""
        return self._along(lambda x, names, i: _all_to_all(x, names, i, 0), x, axis, self.side.sizes, last_first=True)

    def as_part(self, x: jax.Array, other: Any) -> jax.Array:
        return x if self == other else other.own(self.gather(x))

    def each(self, x: jax.Array) -> jax.Array:
        return gather(x[None], self.side.axes())

    def sum(self, x: jax.Array) -> jax.Array:
        names = self.side.axes()
        return jax.lax.psum(x, names) if names else x

    def _own_sizes(self) -> list[int]:
        return [size // axis_size(over) for size, over in zip(*self.side, strict=True)]

    def _along(
        self, function: Callable[..., jax.Array], x: jax.Array, axis: int, sizes: Sequence[int], last_first: bool = False
    ) -> jax.Array:
        if not self.side.axes():
            return x
        before, after = x.shape[:axis], x.shape[axis + 1 :]
        x = x.reshape(*before, *sizes, *after)
        places = list(enumerate(self.side.names, start=axis))
        for i, names in reversed(places) if last_first else places:
            x = function(x, names, i)
        return x.reshape(*x.shape[:axis], -1, *after)


def division(sides: Sides) -> Division:
    left, right = (None if side is None else Part(side) for side in (sides.left, sides.right))
    entries = Side((sides.rows.size() * sides.columns.size(),), (sides.axes(),))
    return Division(Part(sides.rows), Part(sides.columns), Part(entries), left, right)


def gather_all(arrays: Any, specs: Any) -> Any:
    """Whole arrays, of which each device has its part under `specs`, a tree of PartitionSpecs like `arrays`."""
    return _by_spec(gather, arrays, specs)


def own_all(arrays: Any, specs: Any) -> Any:
    """This device's parts of whole arrays."""
    return _by_spec(own, arrays, specs)


def _by_spec(function: Callable[..., jax.Array], arrays: Any, specs: Any) -> Any:
    def each(x: jax.Array, spec: PartitionSpec) -> jax.Array:
        for axis, names in enumerate(axis_names(spec, x.ndim)):
            x = function(x, names, axis)
        return x

    return jax.tree.map(each, arrays, specs)
