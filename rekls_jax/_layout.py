"""Static: which part of a parameter, of its factors and of its stack lies on which axes of the mesh.

The moments lie as the parameter does. The rows of L and R are divided over all the axes that divide the matrix, so that
no device keeps a whole factor; a factor whose size these do not divide stays whole on every device, one of more than
`max_precond_dim` rows is never made.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from jax.sharding import PartitionSpec

from rekls_jax._matrix_view import View
from rekls_jax._types import MatrixState

AxisNames = tuple[str, ...]


class Side(NamedTuple):
    """One side of a matrix: the sizes of the array axes that make it, as the whole array has them."""

    sizes: tuple[int, ...]
    names: tuple[AxisNames, ...]  # for each array axis, the mesh axes that divide it, the slowest first

    def size(self) -> int:
        return math.prod(self.sizes)

    def axes(self) -> AxisNames:
        """The mesh axes that divide it."""
        return sum(self.names, ())

    def undivided(self) -> "Side":
        return Side((self.size(),), ((),))


class Sides(NamedTuple):
    """How a stack of matrices (m, n) and their factors lie on the mesh."""

    batch: AxisNames  # the mesh axes that divide the stack
    rows: Side  # m, of the parameter and its moments
    columns: Side  # n, of the parameter and its moments
    left: Side | None  # the rows of L and Q_L; None where m is too long for a factor, and stays the identity
    right: Side | None  # the rows of R and Q_R

    def axes(self) -> AxisNames:
        """The mesh axes that divide a matrix."""
        return self.rows.axes() + self.columns.axes()

    def undivided(self, batch: AxisNames) -> "Sides":
        """Of whole matrices, their stack divided over `batch`."""
        left, right = (None if side is None else side.undivided() for side in (self.left, self.right))
        return Sides(batch, self.rows.undivided(), self.columns.undivided(), left, right)


class Layout(NamedTuple):
    """Of one parameter."""

    view: View
    sides: Sides
    specs: Any  # a MatrixState of PartitionSpecs; that of `mu` is the parameter's own

    def state_shapes(self, own: tuple[int, ...], axis_sizes: Mapping[str, int]) -> Any:
        """A MatrixState of shapes: each device's part of each field, where `own` is its part of the parameter."""
        stack = tuple(own[axis] for axis in self.view.batch)

        def square(side: Side | None) -> tuple[int, ...]:
            return (
                (*stack, 1, 1) if side is None else (*stack, side.size() // _devices(side.axes(), axis_sizes), side.size())
            )

        left, right = square(self.sides.left), square(self.sides.right)
        shapes: list[Any] = [own, own, left, right, left, right, (*stack, left[-1]), (*stack, right[-1]), stack]
        return MatrixState(*shapes)

    def undivided(self) -> "Layout":
        """Of the same parameter where every device holds it whole."""
        return Layout(self.view, self.sides.undivided(()), self.specs._make(len(self.specs) * [PartitionSpec()]))


def layout(
    shape: tuple[int, ...], view: View, spec: PartitionSpec, axis_sizes: Mapping[str, int], max_precond_dim: int
) -> Layout:
    """Of a parameter of the (whole) `shape`, under a `spec` that fits it: see `check_names`."""
    names = axis_names(spec, len(shape))
    rows, columns = (_side([(shape[axis], names[axis]) for axis in axes]) for axes in (view.rows, view.columns))
    over = Sides((), rows, columns, None, None).axes()
    left, right = (
        None
        if side.size() > max_precond_dim
        else Side((side.size(),), (over if side.size() % _devices(over, axis_sizes) == 0 else (),))
        for side in (rows, columns)
    )
    stack = [names[axis] or None for axis in view.batch]
    like_param = PartitionSpec(*(over or None for over in names))
    on_left, on_right = (PartitionSpec(*stack, (side.names[0] or None) if side else None, None) for side in (left, right))
    values, counts = PartitionSpec(*stack, None), PartitionSpec(*stack)
    specs: list[Any] = [like_param, like_param, on_left, on_right, on_left, on_right, values, values, counts]
    return Layout(
        view, Sides(sum((names[axis] for axis in view.batch), ()), rows, columns, left, right), MatrixState(*specs)
    )


def _side(axes: list[tuple[int, AxisNames]]) -> Side:
    """Of these array axes. One that nothing divides joins the one before it: matrices that lie alike must look alike."""
    sizes: list[int] = []
    over: list[AxisNames] = []
    for size, names in axes:
        if names or not sizes:
            sizes.append(size)
            over.append(names)
        else:
            sizes[-1] *= size
    return Side(tuple(sizes), tuple(over))


def axis_names(spec: PartitionSpec, ndim: int) -> list[AxisNames]:
    """Of each of `ndim` array axes, the mesh axes that divide it."""
    entries = (*spec, *(None,) * (ndim - len(spec)))
    return [() if entry is None else entry if isinstance(entry, tuple) else (entry,) for entry in entries]


def own_shape(shape: tuple[int, ...], spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of each device's part of an array of `shape`."""
    names = axis_names(spec, len(shape))
    return tuple(size // _devices(over, axis_sizes) for size, over in zip(shape, names, strict=True))


def whole_shape(shape: tuple[int, ...], spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> tuple[int, ...]:
    """The shape of the array of which each device's part has `shape`."""
    names = axis_names(spec, len(shape))
    return tuple(size * _devices(over, axis_sizes) for size, over in zip(shape, names, strict=True))


def check_names(what: str, ndim: int, spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> None:
    """ValueError where `spec` cannot be that of an array of `ndim` axes on a mesh of these axes."""
    if len(spec) > ndim:
        raise ValueError(f"The spec of the {what} must have at most {ndim} entries, one for each axis, got {spec}.")
    over = sum(axis_names(spec, ndim), ())
    for name in over:
        if name not in axis_sizes:
            mesh = ", ".join(map(repr, axis_sizes)) or "none"
            raise ValueError(
                f"The spec of the {what}, {spec}, names the mesh axis {name!r}; the axes at hand are: {mesh}. Pass a `mesh` "
                "that has it, call under `jax.set_mesh(mesh)`, or inside a `shard_map` that binds it."
            )
        if over.count(name) > 1:
            raise ValueError(f"The spec of the {what}, {spec}, names the mesh axis {name!r} more than once.")


def check_divides(what: str, shape: tuple[int, ...], spec: PartitionSpec, axis_sizes: Mapping[str, int]) -> None:
    """ValueError where an axis of the array does not divide by those of the mesh that `spec` names for it."""
    for axis, (size, over) in enumerate(zip(shape, axis_names(spec, len(shape)), strict=True)):
        if size % _devices(over, axis_sizes):
            names = " and ".join(map(repr, over))
            raise ValueError(
                f"Axis {axis} of the {what} of shape {shape} has size {size}, which must be divisible by "
                f"{_devices(over, axis_sizes)}, the size of the mesh axis {names}, for the spec {spec}."
            )


def _devices(names: AxisNames, axis_sizes: Mapping[str, int]) -> int:
    return math.prod(axis_sizes[name] for name in names)
