"""A parameter of any rank seen as a stack of matrices: nD <-> (batch, m, n)."""

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax

from rekls_jax import _checks


class MatrixDimensionNumbers(NamedTuple):
    """Which axes of a parameter make the matrix that REKLS sees, as in `optax.contrib.MuonDimensionNumbers`.

    Axes that neither names are batch axes: every matrix of the stack is treated on its own. For a Flax attention
    kernel (width, heads, head_width) take `MatrixDimensionNumbers(0, (1, 2))`; for stacked layers (layers, in, out)
    `MatrixDimensionNumbers(1, 2)`.

    Args:
      reduction_axis: the axes that become the rows, m: those that the layer's input is summed over.
      output_axis: the axes that become the columns, n.
    """

    reduction_axis: Sequence[int] | int = 0
    output_axis: Sequence[int] | int = 1


class View(NamedTuple):
    """Axes of a parameter, each once: those of the stack, of the rows and of the columns."""

    batch: tuple[int, ...]
    rows: tuple[int, ...]
    columns: tuple[int, ...]

    def named(self) -> _checks.Named:
        """{field of `MatrixDimensionNumbers`: {its axes: {}}}"""
        sides = zip(MatrixDimensionNumbers._fields, (self.rows, self.columns), strict=True)
        return {field: {", ".join(map(str, axes)): {}} for field, axes in sides}


DimensionNumbers = Any | Callable[[Any], Any] | None
"""A tree of `MatrixDimensionNumbers` like the params or a prefix of it, or a callable that makes one from the params."""


def views(dimension_numbers: DimensionNumbers, params: Any, names: Iterable[str]) -> list[View | None]:
    """Of each leaf of `params`, called `names` in errors; None for one that is no matrix."""
    leaves = jax.tree.leaves(params)
    if dimension_numbers is None:
        numbers = [MatrixDimensionNumbers() if leaf.ndim == 2 else None for leaf in leaves]
    else:
        tree = dimension_numbers(params) if callable(dimension_numbers) else dimension_numbers
        numbers = _checks.broadcast("dimension_numbers", tree, params, "MatrixDimensionNumbers", _is_numbers)
    return [
        _view(name, leaf.shape, given) if given is not None and leaf.size > 0 else None
        for name, leaf, given in zip(names, leaves, numbers, strict=True)
    ]


def _is_numbers(node: Any) -> bool:
    return all(hasattr(node, name) for name in MatrixDimensionNumbers._fields)  # optax's too


def _view(what: str, shape: tuple[int, ...], numbers: MatrixDimensionNumbers) -> View:
    given = f"{what} of shape {shape} got {tuple(getattr(numbers, name) for name in numbers._fields)}."
    sides = [
        tuple(axes) if isinstance(axes, Sequence) else (axes,) for axes in (numbers.reduction_axis, numbers.output_axis)
    ]
    for axes in sides:
        if not axes or not all(type(axis) is int and -len(shape) <= axis < len(shape) for axis in axes):
            raise ValueError(
                f"`dimension_numbers` must name axes of the array, at least one as each of rows and columns; {given}"
            )
    rows, columns = (tuple(axis % len(shape) for axis in axes) for axes in sides)
    if len(set(rows + columns)) < len(rows + columns):
        raise ValueError(f"`dimension_numbers` must name an axis at most once; {given}")
    return View(tuple(axis for axis in range(len(shape)) if axis not in rows + columns), rows, columns)


def to_matrices(x: jax.Array, view: View) -> jax.Array:
    """(batch, m, n) of `x`, a parameter or a device's part of it."""
    stack, m, n = (math.prod(x.shape[axis] for axis in axes) for axes in view)
    return x.transpose(*view.batch, *view.rows, *view.columns).reshape(stack, m, n)


def from_matrices(x: jax.Array, view: View, shape: tuple[int, ...]) -> jax.Array:
    """`x` (batch, m, n) in the parameter's, or a device's part's, `shape`."""
    order = view.batch + view.rows + view.columns
    x = x.reshape([shape[axis] for axis in order])
    return x.transpose([order.index(axis) for axis in range(len(order))])
