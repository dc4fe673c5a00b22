"""`state_partition_specs`: how an optimizer's state lies on a mesh, read off the types that its `init` gives."""

from typing import Any

import jax
import optax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from rekls_jax import _checks, _layout, _mesh
from rekls_jax._mesh import AnyMesh, ParamSpecs


def state_partition_specs(tx: optax.GradientTransformation, params: optax.Params, param_specs: ParamSpecs) -> Any:
    """PartitionSpecs of every leaf of `tx.init(params)`, of any optax optimizer: REKLS, Adam, or wrappers of them.

    For the `out_shardings` of a jitted `init`, the `in_specs` and `out_specs` of your own `shard_map`, or the restoring of a
    checkpoint. Moments lie as their parameter does, Kronecker factors as `ReklsState` says, scalars on every device.

    Args:
      tx: the optimizer.
      params: arrays or `jax.ShapeDtypeStruct`, as they are outside `shard_map`.
      param_specs: a tree of PartitionSpecs like `params`, a prefix of it, or a callable that makes one from `params`.

    The sizes of the mesh's axes come from `jax.set_mesh`, else from where `params` lie, else from the `mesh` of `tx`.

    Returns:
      A tree with the structure of `tx.init(params)`, a full-length PartitionSpec for each array.

    Raises:
      ValueError: there is no mesh; `param_specs` does not fit `params`, the mesh, or the `param_specs` of `tx`.
      TypeError: `param_specs` holds something else than PartitionSpecs.
    """
    named, treedef = _checks.named_leaves("parameter", params), jax.tree.structure(params)
    mesh = _mesh_of(tx, params).abstract_mesh
    specs = _mesh.broadcast_specs(param_specs, params)
    # With Explicit axes JAX itself carries through `init` how arrays lie.
    explicit = mesh.update(axis_types=(AxisType.Explicit,) * len(mesh.axis_names))
    typed = []
    for (name, leaf), spec in zip(named.items(), specs, strict=True):
        _layout.check_names(name, leaf.ndim, spec, mesh.shape)
        _layout.check_divides(name, leaf.shape, spec, mesh.shape)
        typed.append(jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=NamedSharding(explicit, spec)))
    with jax.sharding.use_abstract_mesh(explicit):
        state = jax.eval_shape(tx.init, jax.tree.unflatten(treedef, typed))
    return jax.tree.map(lambda x: PartitionSpec() if x.sharding is None else x.sharding.spec, state)


def _mesh_of(tx: optax.GradientTransformation, params: optax.Params) -> AnyMesh:
    """That is entered, or that `params` lie on, or that `tx` lays its state on."""
    entered = jax.sharding.get_abstract_mesh()
    if entered.manual_axes:
        raise ValueError("`state_partition_specs` must be called outside `shard_map`, with whole `params`.")
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), params)
    for meshes in (lambda: [entered], lambda: map(_mesh.mesh_of, jax.tree.leaves(params)), lambda: _meshes_made(tx, shapes)):
        for mesh in meshes():
            if mesh is not None and not mesh.empty:
                return mesh
    raise ValueError(
        "There is no mesh: call under `jax.set_mesh(mesh)`, or give the optimizer its `mesh` and `param_specs`."
    )


def _meshes_made(tx: optax.GradientTransformation, shapes: optax.Params) -> list[AnyMesh]:
    return [aval.sharding.mesh for aval in jax.make_jaxpr(tx.init)(shapes).out_avals]
