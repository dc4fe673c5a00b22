"""Where a call runs: on one device, inside the caller's `shard_map`, or on a mesh for which the call opens its own."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from rekls_jax import _checks, _collectives, _layout
from rekls_jax._layout import AxisNames, Layout
from rekls_jax._matrix_view import View

AnyMesh = Mesh | AbstractMesh
ParamSpecs = Any | Callable[[Any], Any] | None
"""A tree of `PartitionSpec` like the params or a prefix of it, or a callable that makes one from the params."""


class Place(NamedTuple):
    """The mesh axes at hand, {} on one device, and the mesh to open a `shard_map` over, None where nothing is to open."""

    axis_sizes: Mapping[str, int]
    mesh: AnyMesh | None

    def run(self, function: Callable[..., Any], *arguments: Any, in_specs: Any, out_specs: Any) -> Any:
        """`function` of each device's part of `arguments`, and the wholes of what it returns."""
        if self.mesh is None:
            return function(*arguments)
        entered = not jax.sharding.get_abstract_mesh().empty
        divided = jax.shard_map(function, mesh=None if entered else self.mesh, in_specs=in_specs, out_specs=out_specs)
        # Outside `jit`, `shard_map` would compile every operation of every call.
        return jax.jit(divided)(*arguments)

    def own_part(self, leaf: Any, spec: PartitionSpec) -> Any:
        """The shape and dtype of each device's part of `leaf`; `leaf` itself where it is a part or there is no other."""
        if self.mesh is None:
            return leaf
        return jax.ShapeDtypeStruct(_layout.own_shape(leaf.shape, spec, self.axis_sizes), leaf.dtype)

    def axes(self, argument: str, given: str | Sequence[str] | None) -> AxisNames:
        """The mesh axes that an argument names, by default all."""
        if given is None:
            return tuple(self.axis_sizes)
        names = (given,) if isinstance(given, str) else tuple(given)
        if not set(names) <= set(self.axis_sizes) or len(set(names)) < len(names):
            axes = ", ".join(map(repr, self.axis_sizes)) or "none"
            raise ValueError(
                f"`{argument}` must name axes of the mesh, each once, got {given!r}; the axes at hand are: {axes}."
            )
        return names

    @property
    def bound(self) -> bool:
        """Whether arrays are parts already."""
        return bool(self.axis_sizes) and self.mesh is None


def find(mesh: AnyMesh | None, leaves: Mapping[str, Any], *, specs_given: bool) -> Place:
    """For `leaves`, arrays under what they are called in errors.

    Axes that a `shard_map` binds come first. Then `mesh`, the mesh that is entered, that of the leaves; the last two only
    where PartitionSpecs are given or the axes' type is Explicit: elsewhere nobody knows how the leaves lie.
    """
    entered = jax.sharding.get_abstract_mesh()
    if entered.manual_axes:
        return Place({name: entered.shape[name] for name in entered.axis_names if name in entered.manual_axes}, None)
    theirs = {what: other for what, leaf in leaves.items() if (other := mesh_of(leaf)) is not None}
    known = [m for m in (entered, *theirs.values()) if not m.empty and (specs_given or AxisType.Explicit in m.axis_types)]
    chosen = mesh if mesh is not None else next(iter(known), None)
    if chosen is None:
        return Place({}, None)
    for what, other in theirs.items():
        _same_mesh(what, other, chosen)
    if not entered.empty and dict(entered.shape) != dict(chosen.shape):
        raise ValueError(f"The mesh that is entered, {entered}, must be the one that the optimizer was given, {chosen}.")
    return Place(dict(chosen.shape), chosen)


def _same_mesh(what: str, other: AnyMesh, chosen: AnyMesh) -> None:
    both = isinstance(other, Mesh) and isinstance(chosen, Mesh)
    if dict(other.shape) != dict(chosen.shape) or (both and other.devices.tolist() != chosen.devices.tolist()):
        raise ValueError(f"The {what} lies on {other}, which must be the mesh that the optimizer was given, {chosen}.")


def layouts(
    param_specs: ParamSpecs, params: Any, leaves: Mapping[str, Any], views: Sequence[View | None], place: Place
) -> list[Layout]:
    """Of each leaf of `params`: as `param_specs` says, or its own type on a mesh whose axes are Explicit."""
    given = [None] * len(leaves) if param_specs is None else broadcast_specs(param_specs, params)
    return [
        _layout_of(what, leaf, view, spec, place)
        for (what, leaf), view, spec in zip(leaves.items(), views, given, strict=True)
    ]


def broadcast_specs(param_specs: ParamSpecs, params: Any) -> list[PartitionSpec]:
    """One for each leaf of `params`; None stands for that of an array that is the same on all devices."""
    tree = param_specs(params) if callable(param_specs) else param_specs
    specs = _checks.broadcast("param_specs", tree, params, "PartitionSpecs", lambda x: isinstance(x, PartitionSpec))
    for spec in specs:
        if spec is not None and PartitionSpec.UNCONSTRAINED in spec:
            raise ValueError(f"`param_specs` must name mesh axes or None, got {spec}.")
    return [PartitionSpec() if spec is None else spec for spec in specs]


def _layout_of(what: str, leaf: Any, view: View | None, given: PartitionSpec | None, place: Place) -> Layout:
    if view is None:
        raise _checks.no_matrix(what, leaf)
    typed = _explicit_spec(leaf) if place.mesh is not None else None
    spec = given if given is not None else typed or PartitionSpec()
    _layout.check_names(what, leaf.ndim, spec, place.axis_sizes)
    names = _layout.axis_names(spec, leaf.ndim)
    if typed is not None and names != _layout.axis_names(typed, leaf.ndim):
        raise ValueError(f"The {what} lies on its mesh as {typed}, `param_specs` says {spec}.")
    _checks.averaged(what, _collectives.varies_over(leaf), sum(names, ()), spec)
    shape = leaf.shape
    if place.bound:
        shape = _layout.whole_shape(shape, spec, place.axis_sizes)
    _layout.check_divides(what, shape, spec, place.axis_sizes)
    return _layout.layout(shape, view, spec, place.axis_sizes)


def mesh_of(leaf: Any) -> AnyMesh | None:
    """That an array, traced or not, or a `jax.ShapeDtypeStruct` lies on."""
    sharding = _named_sharding(leaf)
    return None if sharding is None else sharding.mesh


def _explicit_spec(leaf: Any) -> PartitionSpec | None:
    sharding = _named_sharding(leaf)
    return None if sharding is None or AxisType.Explicit not in sharding.mesh.axis_types else sharding.spec


def _named_sharding(leaf: Any) -> NamedSharding | None:
    sharding = getattr(jax.typeof(leaf) if isinstance(leaf, jax.core.Tracer) else leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None
