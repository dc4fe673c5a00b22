"""`scale_by_rekls`: the step as an optax transformation over a tree of matrices."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from rekls_jax import _checks, _collectives, _factors, _inner, _matrix_view, _mesh, _step
from rekls_jax._dtype import cast_like, state_dtype
from rekls_jax._eigenbasis import Eigh, OrthogonalIteration
from rekls_jax._layout import AxisNames, Layout
from rekls_jax._matrix_step import Rule
from rekls_jax._matrix_view import DimensionNumbers
from rekls_jax._mesh import ParamSpecs, Place
from rekls_jax._stacks import Leaf
from rekls_jax._types import Eigenbasis, Hyperparameters, MatrixState, Numerics

INNER = {"adam": _inner.ADAM, "laprop": _inner.LAPROP}
FACTORS = {"kl": _factors.kullback_leibler, "plain": _factors.plain}
# NumPy's, since `optax.inject_hyperparams` makes arrays of Python's ints, and the program depends on these.
EVERY_STEP, MAX_PRECOND_DIM = np.int64(1), np.int64(8192)
Leaves = tuple[list[jax.Array], list[MatrixState]]  # gradients or updates, and the states, of all parameters


class ReklsState(NamedTuple):
    """State of `scale_by_rekls`. All but `count` are trees with the structure of the params.

    Of a parameter that is a stack of matrices (…, m, n); float32, or float64 where the parameter is, except where said
    otherwise. `mu` and `nu` have the parameter's shape and lie on a mesh as it does. The rows of `L`, `R`, `Q_L`, `Q_R` are
    divided over all mesh axes that divide a matrix, or on every device whole where those do not divide them; the stack lies
    as the parameter's. Of a side longer than `max_precond_dim`, factor, basis and eigenvalue are ones of size 1, which stand
    for the identity. Eigenvalues and counts are the same on all devices, but those of a stack that is divided.
    """

    count: jax.Array  # type: ignore[assignment]  # (), int32: steps taken; optax's name, though tuples have a `count` too
    mu: optax.Updates  # like the parameter, mu_dtype: mean of G (LaProp: of the normalised G), in the parameter's basis
    nu: optax.Updates  # like the parameter: second moment, in the eigenbasis
    L: optax.Updates  # (…, m, m): left Kronecker factor, symmetric
    R: optax.Updates  # (…, n, n): right Kronecker factor, symmetric
    Q_L: optax.Updates  # (…, m, m): eigenvectors, as columns, of L as it was at the last refresh
    Q_R: optax.Updates  # (…, n, n): of R
    eig_L: optax.Updates  # (…, m): eigenvalues with them, descending
    eig_R: optax.Updates  # (…, n): of R
    eigh_failures: optax.Updates  # (…), int32: decompositions that gave NaN, so that the basis before was kept
    dimension_numbers: optax.Params  # no arrays, like the params: of each {field: {its axes: {}}}, which matrix it is
    rule: _checks.Named  # no arrays, {option: {its value: {}}}: the options that give L, R and mu their meaning


def scale_by_rekls(
    b1: float | jax.Array = 0.9,
    b2: float | jax.Array = 0.95,
    shampoo_beta: float | jax.Array = 0.95,
    eps: float | jax.Array = 1e-8,
    *,
    inner: str = "adam",
    nesterov: bool = False,
    max_update_rms: float | jax.Array = 0.0,
    factors: str = "kl",
    eigenbasis: Eigenbasis = Eigh(),
    numerics: Numerics = Numerics(),
    precondition_frequency: int | np.integer = EVERY_STEP,
    max_precond_dim: int | np.integer = MAX_PRECOND_DIM,
    dimension_numbers: DimensionNumbers = None,
    mu_dtype: jax.typing.DTypeLike | None = None,
    param_specs: ParamSpecs = None,
    mesh: Mesh | AbstractMesh | None = None,
    eigh_axes: str | Sequence[str] | None = None,
    eigh_placement: str = "split",
) -> optax.GradientTransformation:
    """Rescale gradients by REKLS: Adam or LaProp in the eigenbases of two Kullback-Leibler Kronecker factors.

    `rekls` without learning rate, weight decay and fallback: it explains the arguments. Every leaf must be a matrix.

    Returns:
      A transformation whose state is a `ReklsState` and whose updates point along the gradient (negate them to descend).

    Raises:
      ValueError: an argument out of range; a leaf that is no matrix, or that cannot lie on the mesh as its spec says; at
        `update`, a state made with other options, gradients whose structure or shapes are not the params', or that differ
        between devices which hold the same part of a parameter.
      TypeError: an argument of the wrong kind; at `init` or `update`, a leaf that is not real floating-point.
    """
    for name, value in {"b1": b1, "b2": b2, "shampoo_beta": shampoo_beta}.items():
        _checks.in_unit_interval(name, value)
    for name, value in {"eps": eps, "max_update_rms": max_update_rms}.items():
        _checks.non_negative(name, value)
    _checks.one_of("inner", inner, INNER)
    _checks.instance_of("nesterov", nesterov, bool)
    _checks.one_of("factors", factors, FACTORS)
    _checks.instance_of("eigenbasis", eigenbasis, Eigh, OrthogonalIteration)
    _checks.instance_of("numerics", numerics, Numerics)
    every = _checks.positive_int("precondition_frequency", precondition_frequency)
    every = min(every, np.iinfo(np.int32).max)  # where the count of steps stays
    longest = _checks.positive_int("max_precond_dim", max_precond_dim)
    _checks.floating_dtype("mu_dtype", mu_dtype)
    _checks.one_of("eigh_placement", eigh_placement, PLACEMENTS)
    if mesh is not None:
        _checks.instance_of("mesh", mesh, Mesh, AbstractMesh)
    if eigh_axes is not None:
        _checks.names("eigh_axes", eigh_axes)
    rule = Rule(
        Hyperparameters(b1, b2, shampoo_beta, eps, max_update_rms),
        numerics,
        FACTORS[factors],
        eigenbasis,
        INNER[inner],
        _inner.nesterov if nesterov else _inner.bias_corrected,
    )
    named: _checks.Named = {"factors": {factors: {}}, "inner": {inner: {}}}

    def survey(what: str, tree: Any) -> tuple[list[Layout], Place, AxisNames]:
        """How each leaf of `tree` lies, where this call runs, and the axes there that share the decompositions."""
        leaves = _checks.named_leaves(what, tree)
        views = _matrix_view.views(dimension_numbers, tree, leaves)
        place = _mesh.find(mesh, leaves, specs_given=param_specs is not None)
        axes = place.axes("eigh_axes", eigh_axes)
        specs = _mesh.specs_of(param_specs, tree, leaves, place)
        found = _mesh.layouts(leaves, views, specs, place, longest)
        for (name, leaf), layout in zip(leaves.items(), found, strict=True):
            if layout is None:
                raise _checks.no_matrix(name, leaf, longest)
        return [layout for layout in found if layout is not None], place, axes

    def first_moment(dtype: jnp.dtype) -> jnp.dtype:
        return jax.dtypes.canonicalize_dtype(mu_dtype or dtype)

    def init(params: optax.Params) -> ReklsState:
        _checks.floating_leaves("parameter", params)
        layouts, place, _ = survey("parameter", params)
        leaves, treedef = jax.tree.flatten(params)
        parts = [place.own_part(leaf, layout.specs.mu) for leaf, layout in zip(leaves, layouts, strict=True)]

        def make() -> tuple[jax.Array, list[MatrixState]]:
            states = []
            for part, layout in zip(parts, layouts, strict=True):
                dtype = state_dtype(part.dtype)
                states.append(_step.initial_state(part, layout, numerics, dtype, first_moment(dtype)))
            return jnp.zeros((), jnp.int32), states

        specs = PartitionSpec(), [layout.specs for layout in layouts]
        count, states = place.run(make, in_specs=(), out_specs=specs)
        return _as_tree(count, states, treedef, layouts, named)

    def update(
        updates: optax.Updates, state: ReklsState, params: optax.Params | None = None
    ) -> tuple[optax.Updates, ReklsState]:
        del params
        _checks.own_state(state, isinstance(state, ReklsState))
        _checks.same_meaning("state", state.rule, named)
        _checks.floating_leaves("gradient", updates)
        _checks.same_shapes("gradient", updates, state.mu)
        layouts, place, axes = survey("gradient", updates)
        _mesh.same_types(_checks.named_leaves("gradient", updates), jax.tree.leaves(state.mu))
        gradients, states = jax.tree.leaves(updates), _of_each(state)
        treedef: Any = jax.tree.structure(updates)
        views = treedef.flatten_up_to(state.dimension_numbers)
        for name, layout, old, view in zip(_checks.named_leaves("parameter", updates), layouts, states, views, strict=True):
            _checks.same_meaning(f"state of the {name}", view, layout.view.named())
            shapes = layout.state_shapes(
                old.mu.shape, place.axis_sizes if place.bound else dict.fromkeys(place.axis_sizes, 1)
            )
            _checks.fits(name, old._asdict(), shapes._asdict(), {"mu": first_moment(old.nu.dtype)})
        count = optax.safe_increment(state.count)
        gradients = [G.astype(old.nu.dtype) for G, old in zip(gradients, states, strict=True)]
        with jax.default_matmul_precision(numerics.precision):
            scaled, states = PLACEMENTS[eigh_placement]((gradients, states), layouts, rule, count, every, place, axes)
        return cast_like(jax.tree.unflatten(treedef, scaled), updates), _as_tree(count, states, treedef, layouts, named)

    return optax.GradientTransformation(init, update)


def _split(
    leaves: Leaves, layouts: list[Layout], rule: Rule, count: jax.Array, every: int, place: Place, eigh_axes: AxisNames
) -> Leaves:
    """Each device does its part of the step and its share of the decompositions."""

    # Arguments, since a `shard_map` on Explicit axes must not close over arrays.
    arrays = {name: x for name, x in rule.hyper._asdict().items() if isinstance(x, jax.Array)}

    def step(numbers: tuple[jax.Array, dict[str, jax.Array]], leaves: Leaves) -> Leaves:
        count, arrays = numbers
        own_rule = rule._replace(hyper=rule.hyper._replace(**arrays))
        each = [Leaf(*leaf) for leaf in zip(*leaves, layouts, strict=True)]
        moved = _step.step(each, own_rule, count, every, eigh_axes)
        return [leaf.G for leaf in moved], [leaf.state for leaf in moved]

    specs = _specs(layouts)
    return place.run(step, (count, arrays), leaves, in_specs=(PartitionSpec(), specs), out_specs=specs)


def _replicated(
    leaves: Leaves, layouts: list[Layout], rule: Rule, count: jax.Array, every: int, place: Place, eigh_axes: AxisNames
) -> Leaves:
    """The reference's way: every device gathers all, takes the whole step, and slices its own part back out."""
    del eigh_axes
    specs, everywhere, one_device = _specs(layouts), PartitionSpec(), Place({}, None)
    gather, own = (functools.partial(f, specs=specs) for f in (_collectives.gather_all, _collectives.own_all))
    whole = place.run(gather, leaves, in_specs=(specs,), out_specs=everywhere)
    moved = _split(whole, [layout.undivided() for layout in layouts], rule, count, every, one_device, ())
    return place.run(own, moved, in_specs=everywhere, out_specs=specs)


def _specs(layouts: list[Layout]) -> tuple[list[PartitionSpec], list[Any]]:
    return [layout.specs.mu for layout in layouts], [layout.specs for layout in layouts]


PLACEMENTS = {"split": _split, "replicated": _replicated}


def _of_each(state: ReklsState) -> list[MatrixState]:
    """Of each parameter."""
    fields = (jax.tree.leaves(getattr(state, name)) for name in MatrixState._fields)
    return [MatrixState(*each) for each in zip(*fields, strict=True)]


def _as_tree(
    count: jax.Array, states: list[MatrixState], treedef: Any, layouts: list[Layout], rule: _checks.Named
) -> ReklsState:
    fields = zip(*states, strict=True) if states else [()] * len(MatrixState._fields)
    trees = (jax.tree.unflatten(treedef, field) for field in fields)
    views = jax.tree.unflatten(treedef, [layout.view.named() for layout in layouts])
    return ReklsState(count, **dict(zip(MatrixState._fields, trees, strict=True)), dimension_numbers=views, rule=rule)
