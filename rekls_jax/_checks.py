"""Errors before work: what was given, what was expected, which argument or which parameter."""

from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

PyTree = Any
Named = dict[str, dict[str, dict[str, Any]]]
"""{option: {its value: {}}}: in keys, since those are what a checkpoint keeps and compares."""


def number(name: str, value: Any, expected: str = "a number") -> None:
    """A real Python or NumPy number or an array of shape (), traced or not."""
    if not isinstance(value, (int, float, np.generic, np.ndarray, jax.Array)) or isinstance(value, bool):
        raise TypeError(f"`{name}` must be {expected}, got {value!r} of type {type(value).__name__}.")
    dtype = jnp.result_type(value) if isinstance(value, (int, float)) else value.dtype
    if np.shape(value) != () or not (jnp.issubdtype(dtype, jnp.floating) or jnp.issubdtype(dtype, jnp.integer)):
        raise TypeError(f"`{name}` must be {expected}, got an array of shape {np.shape(value)} and dtype {dtype}.")


def in_unit_interval(name: str, value: Any) -> None:
    number(name, value)
    # As float32: a decay that rounds to 1 makes every bias correction 0/0.
    if not isinstance(value, jax.core.Tracer) and not 0 <= np.float32(value) < 1:
        raise ValueError(f"`{name}` must lie in [0, 1), got {value}.")


def non_negative(name: str, value: Any) -> None:
    number(name, value)
    if not isinstance(value, jax.core.Tracer) and not 0 <= value < float("inf"):
        raise ValueError(f"`{name}` must be a finite number >= 0, got {value}.")


def positive_int(name: str, value: Any) -> int:
    """Python's or NumPy's: the program depends on it."""
    if not isinstance(value, (int, np.integer)) or isinstance(value, bool):
        advice = static_advice(name) if isinstance(value, (jax.Array, np.ndarray)) else ""
        raise TypeError(f"`{name}` must be an int >= 1, got {value!r} of type {type(value).__name__}.{advice}")
    if value < 1:
        raise ValueError(f"`{name}` must be an int >= 1, got {value}.")
    return int(value)


def static_advice(name: str) -> str:
    return f" Under `optax.inject_hyperparams` pass `static_args={name!r}`."


def number_or_schedule(name: str, value: Any) -> None:
    if callable(value):
        return
    number(name, value, "a number or a schedule")
    if not isinstance(value, jax.core.Tracer) and not np.isfinite(value):
        raise ValueError(f"`{name}` must be finite, got {value}.")


def one_of(name: str, value: Any, choices: Collection[str]) -> None:
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"`{name}` must be one of {', '.join(map(repr, choices))}, got {value!r}.")


def instance_of(name: str, value: Any, *kinds: type) -> None:
    if not isinstance(value, kinds):
        expected = " or ".join(kind.__name__ for kind in kinds)
        called = callable(value) and not isinstance(value, type)  # as a schedule: a mesh can be called
        advice = static_advice(name) if called else ""
        raise TypeError(f"`{name}` must be a {expected}, got {value!r} of type {type(value).__name__}.{advice}")


def names(name: str, value: Any) -> tuple[str, ...]:
    """A string, or a list or tuple of strings."""
    given = (value,) if isinstance(value, str) else value
    if not isinstance(given, (list, tuple)) or not all(isinstance(item, str) for item in given):
        raise TypeError(f"`{name}` must be a string or a sequence of strings, got {value!r}.")
    return tuple(given)


def own_state(state: Any, valid: bool, but: str = "") -> None:
    if not valid:
        raise TypeError(f"`state` must be what this optimizer's `init` returned, got a {type(state).__name__}{but}.")


def same_meaning(what: str, given: Named, expected: Named) -> None:
    """`what` is "state", or that of one parameter."""
    if given != expected:
        made, own = (
            ", ".join(f"{option}={value!r}" for option, values in sorted(rule.items()) for value in values)
            for rule in (given, expected)
        )
        raise ValueError(f"The {what} was made with {made}, this optimizer has {own}: its arrays would mean something else.")


def fits(name: str, fields: Mapping[str, Any], shapes: Mapping[str, Any], dtypes: Mapping[str, Any]) -> None:
    """Each field of the state of the parameter `name` must have its shape, and its dtype where one is given."""
    for field, x in fields.items():
        wanted = {"shape": shapes[field], "dtype": dtypes.get(field, x.dtype)}
        for what, expected in wanted.items():
            if getattr(x, what) != expected:
                given = f"`{field}` of the {name} has {what} {getattr(x, what)}"
                raise ValueError(
                    f"The state's {given}, this optimizer expects {expected}: it was made with other options, or lies "
                    "otherwise on the mesh."
                )


def floating_dtype(name: str, dtype: Any) -> None:
    try:
        valid = dtype is None or is_floating(jnp.dtype(dtype))
    except TypeError:
        valid = False
    if not valid:
        raise TypeError(f"`{name}` must be None or a floating-point dtype of 16, 32 or 64 bits, got {dtype!r}.")


def is_floating(dtype: Any) -> bool:
    """Of a width that JAX can convert to float32 without being asked twice."""
    return jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize in (2, 4, 8)


def floating_leaves(what: str, tree: PyTree) -> None:
    """`what` is "parameter" or "gradient". Integers, complex numbers and non-arrays cannot be optimized."""
    for name, leaf in named_leaves(what, tree).items():
        dtype = getattr(leaf, "dtype", None)
        if dtype is None or not is_floating(dtype):
            got = type(leaf).__name__ if dtype is None else f"dtype {dtype}"
            advice = (
                " Leave it out of the params, or put `optax.masked` around the optimizer." if what == "parameter" else ""
            )
            raise TypeError(f"The {name} must be a real floating-point array of 16, 32 or 64 bits, got {got}.{advice}")


def named_leaves(what: str, tree: PyTree) -> dict[str, Any]:
    """Each leaf under what errors call it: "parameter ['w']"."""
    return {f"{what} {path_name(path)}": leaf for path, leaf in jax.tree.leaves_with_path(tree)}


def no_matrix(name: str, leaf: Any, max_precond_dim: int) -> ValueError:
    return ValueError(
        f"`scale_by_rekls` takes matrices with at least one entry, 2-D or named by `dimension_numbers`, with a side of at "
        f"most `max_precond_dim`, {max_precond_dim}; got the {name} of shape {leaf.shape}. `rekls` sends all other leaves "
        "to its `fallback`."
    )


def averaged(name: str, varies_over: Collection[str], spec_axes: Collection[str], spec: Any) -> None:
    """No device may go its own way with a part that others hold too."""
    for axis in sorted(set(varies_over) - set(spec_axes)):
        raise ValueError(
            f"The {name} varies over the mesh axis {axis!r}, over which its spec, {spec}, does not divide it. A gradient "
            f"must be averaged there first, `jax.lax.pmean(gradients, {axis!r})`; a divided parameter needs `param_specs`."
        )


def broadcast(argument: str, prefix: PyTree, params: PyTree, kind: str, is_leaf: Callable[[Any], bool]) -> list[Any]:
    """For each leaf of `params` that of `prefix`, a tree like it or a prefix of it, whose leaves are of `kind` or None.

    What `prefix` has where `params` has a subtree without leaves (None, optax's masked nodes) belongs to no leaf.
    """

    def ends(node: Any) -> bool:
        return node is None or is_leaf(node)

    given = dict(jax.tree.leaves_with_path(prefix, is_leaf=ends))
    for path, leaf in given.items():
        if not ends(leaf):
            raise TypeError(
                f"`{argument}` must be a tree of {kind}, or a callable that makes one, got {leaf!r} at {path_name(path)}."
            )
    wanted = [path for path, _ in jax.tree.leaves_with_path(params)]
    if not wanted:  # `optax.tree_map_params` calls `init` with a tree of its own, without leaves
        return []
    found = [next((path[:i] for i in range(len(path) + 1) if path[:i] in given), None) for path in wanted]
    problems = [f"nothing for the parameter {path_name(path)}" for path, at in zip(wanted, found, strict=True) if at is None]
    nodes = {path for path, _ in jax.tree.leaves_with_path(params, is_leaf=lambda node: not jax.tree.leaves(node))}
    above = {path[:i] for path in nodes for i in range(len(path) + 1)}
    unused = [path for path in given if path not in above and not any(path[:i] in nodes for i in range(len(path)))]
    problems += [f"{path_name(path)}, which is no parameter" for path in unused]
    if problems:
        raise ValueError(
            f"`{argument}` must have the params' tree structure, or be a prefix of it of which each leaf holds for all "
            f"below; got {', and '.join(problems)}."
        )
    return [given[path] for path in found if path is not None]


def decay_mask(mask: PyTree, params: PyTree) -> None:
    """A tree of bools like `params`, or a prefix of it."""
    for path, leaf in jax.tree.leaves_with_path(mask):
        if not isinstance(leaf, (bool, np.bool_)):
            raise TypeError(
                f"`mask` must be a tree of bools, or a callable that makes one, got {leaf!r} at {path_name(path)}."
            )
    try:
        jax.tree.map(lambda *_: None, mask, params)
    except ValueError as error:
        given, expected = jax.tree.structure(mask), jax.tree.structure(params)
        raise ValueError(
            f"`mask` must have the params' tree structure, {expected}, or a prefix of it, got {given}."
        ) from error


ANY_SHAPE = object()
"""A leaf of the expected tree in `same_shapes` of which only the place is known."""


def same_shapes(what: str, tree: PyTree, expected: PyTree) -> None:
    """`tree`, of "gradient" or "parameter", must have the structure and shapes of `expected`, a tree from the state."""
    wanted = {path_name(path): getattr(leaf, "shape", None) for path, leaf in jax.tree.leaves_with_path(expected)}
    given = {path_name(path): leaf.shape for path, leaf in jax.tree.leaves_with_path(tree)}
    for name in wanted.keys() - given.keys():
        raise ValueError(
            f"There is no {what} {name}, for which the state was made. There are: {', '.join(given) or 'none'}."
        )
    for name in given.keys() - wanted.keys():
        raise ValueError(f"There is a {what} {name} of shape {given[name]}, for which the state was not made.")
    for name, shape in wanted.items():
        if shape is not None and given[name] != shape:
            raise ValueError(f"The {what} {name} has shape {given[name]}, the state was made for shape {shape}.")
    got: Any = jax.tree.structure(tree)
    like = jax.tree.structure(expected)
    if got != like:
        raise ValueError(f"The {what}s must have the tree structure that the state was made for, {like}, got {got}.")


def path_name(path: Any) -> str:
    return jax.tree_util.keystr(path) or "(the whole tree)"
