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
        names = _checks.names(argument, given)
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
        bound = {name: entered.shape[name] for name in entered.axis_names if name in entered.manual_axes}
        if mesh is not None and any(mesh.shape.get(name) != size for name, size in bound.items()):
            raise ValueError(f"`shard_map` binds the axes {bound}, which must be of the mesh that was given, {mesh}.")
        return Place(bound, None)
    theirs = {what: other for what, leaf in leaves.items() if (other := mesh_of(leaf)) is not None}
    known = [m for m in (entered, *theirs.values()) if not m.empty and (specs_given or AxisType.Explicit in m.axis_types)]
    chosen = mesh if mesh is not None else next(iter(known), None)
    if chosen is None:
        return Place({}, None)
    if not entered.empty:
        _same_mesh("mesh that is entered is", entered, chosen)
    for what, other in theirs.items():
        _same_mesh(f"{what} lies on", other, chosen)
    if isinstance(chosen, AbstractMesh):
        chosen = next((m for m in theirs.values() if isinstance(m, Mesh)), chosen)
    return Place(dict(chosen.shape), chosen)


def _same_mesh(what: str, other: AnyMesh, chosen: AnyMesh) -> None:
    both = isinstance(other, Mesh) and isinstance(chosen, Mesh)
    if other.shape_tuple != chosen.shape_tuple or (both and other.devices.tolist() != chosen.devices.tolist()):
        raise ValueError(f"The {what} {other}, which must be the mesh that the optimizer was given, {chosen}.")


def specs_of(param_specs: ParamSpecs, params: Any, leaves: Mapping[str, Any], place: Place) -> list[PartitionSpec]:
    """How each leaf of `params` lies: as `param_specs` says, or its own type on a mesh whose axes are Explicit."""
    given: list[Any] = [None] * len(leaves) if param_specs is None else broadcast_specs(param_specs, params)
    return [_spec_of(what, leaf, spec, place) for (what, leaf), spec in zip(leaves.items(), given, strict=True)]


def _spec_of(what: str, leaf: Any, given: PartitionSpec | None, place: Place) -> PartitionSpec:
    typed = None if place.mesh is None else _explicit_spec(leaf, place.mesh)
    spec = given if given is not None else typed or PartitionSpec()
    _layout.check_names(what, leaf.ndim, spec, place.axis_sizes)
    if typed is not None and place.mesh is not None:
        explicit = _explicit_part(spec, leaf.ndim, place.mesh)
        if explicit != typed:
            raise ValueError(
                f"The {what} lies on its mesh, of Explicit axes, as {typed}, `param_specs` says {spec}. `jax.device_put` or "
                "`jax.sharding.reshard` move it."
            )
    _checks.averaged(what, _collectives.varies_over(leaf), sum(_layout.axis_names(spec, leaf.ndim), ()), spec)
    if not place.bound:
        _layout.check_divides(what, leaf.shape, spec, place.axis_sizes)
    return spec


def same_types(gradients: Mapping[str, Any], like: Sequence[Any]) -> None:
    """On Explicit axes a gradient must lie as its parameter does, and so as `like`, the first moments."""
    for (what, G), mu in zip(gradients.items(), like, strict=True):
        a, b = _named_sharding(G), _named_sharding(mu)
        if a is not None and b is not None and AxisType.Explicit in b.mesh.axis_types:
            lies, made_for = (_explicit_part(s.spec, G.ndim, b.mesh) for s in (a, b))
            if lies != made_for:
                raise ValueError(f"The {what} lies on its mesh as {lies}, the state was made for {made_for}.")


def broadcast_specs(param_specs: ParamSpecs, params: Any) -> list[PartitionSpec]:
    """One for each leaf of `params`; None stands for that of an array that is the same on all devices."""
    tree = param_specs(params) if callable(param_specs) else param_specs
    specs = _checks.broadcast("param_specs", tree, params, "PartitionSpecs", lambda x: isinstance(x, PartitionSpec))
    for spec in specs:
        if spec is not None and PartitionSpec.UNCONSTRAINED in spec:
            raise ValueError(f"`param_specs` must name mesh axes or None, got {spec}.")
    return [PartitionSpec() if spec is None else spec for spec in specs]


def layouts(
    leaves: Mapping[str, Any],
    views: Sequence[View | None],
    specs: Sequence[PartitionSpec],
    place: Place,
    max_precond_dim: int,
) -> list[Layout | None]:
    """Of each leaf; None for one that is no matrix, or one with both sides longer than `max_precond_dim`."""

    def each(leaf: Any, view: View | None, spec: PartitionSpec) -> Layout | None:
        if view is None:
            return None
        shape = _layout.whole_shape(leaf.shape, spec, place.axis_sizes) if place.bound else leaf.shape
        found = _layout.layout(shape, view, spec, place.axis_sizes, max_precond_dim)
        return None if found.sides.left is None and found.sides.right is None else found

    return list(map(each, leaves.values(), views, specs))


def mesh_of(leaf: Any) -> AnyMesh | None:
    """That an array, traced or not, or a `jax.ShapeDtypeStruct` lies on."""
    sharding = _named_sharding(leaf)
    return None if sharding is None else sharding.mesh


def _explicit_spec(leaf: Any, mesh: AnyMesh) -> PartitionSpec | None:
    """How the type of an array says it lies, None where `mesh` has no Explicit axes; an array from elsewhere lies whole."""
    if AxisType.Explicit not in mesh.axis_types or not isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)):
        return None
    sharding = _named_sharding(leaf)
    if sharding is None:
        return None if isinstance(leaf, jax.ShapeDtypeStruct) else _explicit_part(PartitionSpec(), leaf.ndim, mesh)
    return _explicit_part(sharding.spec, leaf.ndim, mesh)


def _explicit_part(spec: PartitionSpec, ndim: int, mesh: AnyMesh) -> PartitionSpec:
    """`spec` without the axes of other types, which the type of a traced array does not show."""
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = _layout.axis_names(spec, ndim)
    kept = [tuple(name for name in over if kinds.get(name) == AxisType.Explicit) for over in names]
    return PartitionSpec(*(over or None for over in kept))


def _named_sharding(leaf: Any) -> NamedSharding | None:
    sharding = getattr(jax.typeof(leaf) if isinstance(leaf, jax.core.Tracer) else leaf, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) and not sharding.mesh.empty else None
