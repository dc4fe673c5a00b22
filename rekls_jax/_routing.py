"""Which leaves of a Flax model are matrices, read off the names that Flax gives them."""

from collections.abc import Sequence
from typing import Any

import jax

from rekls_jax import _checks
from rekls_jax._matrix_view import MatrixDimensionNumbers

ATTENTION_INPUTS = ("query", "key", "value")
NEVER = ("bias", "scale", "embed")  # in the name of the array itself


def flax_dimension_numbers(params: Any, stacked: str | Sequence[str] = ()) -> Any:
    """The `dimension_numbers` of the parameters of a Flax model, linen or nnx, the way practitioners route them.

    | array | shape | seen as |
    |---|---|---|
    | kernel of Dense, Linear | (in, out) | the matrix |
    | kernel of an attention's query, key, value | (width, heads, head_width) | width x (heads · head_width) |
    | kernel of its out | (heads, head_width, width) | (heads · head_width) x width |
    | kernel of Conv | (height, width, in, out), any number of dimensions | (height · width · in) x out |
    | any other array of two axes | (m, n) | the matrix |
    | kernel of one input channel: a depthwise Conv, or the first layer on grey images | (…, 1, out) | fallback |
    | bias, scale, embedding (any array with these in its name), and all else | | fallback |

    The output layer is a matrix too, of which `max_precond_dim` leaves out the side of a large vocabulary. To route
    otherwise, change the tree that this returns, or write a callable of your own.

    Args:
      params: the parameters. Shapes count: call it on whole arrays, not inside `shard_map`, where a part of a Conv may look
        like one of one channel; there pass `rekls` the tree it returned.
      stacked: names of modules (or of arrays) whose parameters have one more axis in front, as `nn.scan` and `nn.vmap` make
        them: layers, experts. One axis for each time that a name of these stands in an array's path.

    Returns:
      A tree like `params` of `MatrixDimensionNumbers`, and None for leaves that go to the fallback.

    Raises:
      TypeError: `stacked` is no string or sequence of strings.
      ValueError: a name of `stacked` is in no path; a norm's scale or the kernel of a Dense or Linear has more axes than
        such a layer gives it, as those of stacked layers do.

    Example:
      >>> import functools, jax.numpy as jnp
      >>> from rekls_jax import flax_dimension_numbers, rekls
      >>> params = {"Dense_0": {"kernel": jnp.ones((8, 4)), "bias": jnp.ones(4)}}
      >>> flax_dimension_numbers(params)["Dense_0"]
      {'bias': None, 'kernel': MatrixDimensionNumbers(reduction_axis=(0,), output_axis=(1,))}
      >>> tx = rekls(1e-2, dimension_numbers=flax_dimension_numbers)
      >>> tx = rekls(1e-2, dimension_numbers=functools.partial(flax_dimension_numbers, stacked="layers"))
    """
    stacks = _checks.names("stacked", stacked)
    paths = [_names(path) for path, _ in jax.tree.leaves_with_path(params)]
    for name in stacks:
        if paths and not any(name in path for path in paths):
            raise ValueError(f"`stacked` must name modules of the params, got {name!r}, which is in no parameter's path.")

    def numbers(path: Any, leaf: Any) -> MatrixDimensionNumbers | None:
        names = _names(path)
        in_front = sum(name in stacks for name in names)
        module, name = ["", "", *names][-2:]
        return _numbers(_checks.path_name(path), module, name, leaf.shape, in_front)

    return jax.tree.map_with_path(numbers, params)


def _names(path: Any) -> list[str]:
    """Without nnx's `.value` of a variable."""
    keys = [getattr(key, "key", getattr(key, "name", getattr(key, "idx", None))) for key in path]
    return [str(key) for key in (keys[:-1] if path and str(path[-1]) == ".value" else keys)]


def _numbers(what: str, module: str, name: str, shape: tuple[int, ...], in_front: int) -> MatrixDimensionNumbers | None:
    axes = tuple(range(in_front, len(shape)))
    dense = name == "kernel" and module.lower().split("_")[0] in ("dense", "linear")
    if (dense and len(axes) > 2) or (name == "scale" and len(axes) > 1):
        raise ValueError(
            f"The array {what} of shape {shape} has more axes than a {'dense layer' if dense else 'norm'} gives it, behind "
            f"the {in_front} of `stacked`: name there the module above it that `nn.scan` or `nn.vmap` made."
        )
    if len(axes) < 2 or any(never in name.lower() for never in NEVER):
        return None
    kernel = name == "kernel"
    if len(axes) == 2 or (kernel and module in ATTENTION_INPUTS):
        return MatrixDimensionNumbers(axes[:1], axes[1:])
    return MatrixDimensionNumbers(axes[:-1], axes[-1:]) if kernel and shape[-2] > 1 else None
