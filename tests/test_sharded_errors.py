"""What cannot lie on a mesh, or is not there, is refused in a sentence that names the leaf."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import mesh_of

from rekls_jax import MatrixDimensionNumbers, rekls, scale_by_rekls, state_partition_specs

PARAMS = {"layer": {"w": jnp.ones((16, 24))}, "b": jnp.ones(16)}
MESH = mesh_of(8)


def mesh_16():
    return jax.sharding.AbstractMesh((16,), ("tp",), axis_types=(AxisType.Auto,))


SPECS = [
    (
        {"layer": P("model"), "b": P()},
        r"parameter \['layer'\]\['w'\], P\('model',\), names the mesh axis 'model'; the",
    ),
    (
        {"layer": {"w": P("tp")}},
        r"`param_specs` must have the params' tree .* got nothing for the parameter \['b'\]",
    ),
    (
        {"layer": {"w": P("tp"), "kernel": P()}, "b": P()},
        r"got \['layer'\]\['kernel'\], which is no parameter",
    ),
    (
        {"layer": P("tp", None, None), "b": P()},
        r"parameter \['layer'\]\['w'\] must have at most 2 entries, .*, None",
    ),
    (
        {"layer": P("tp", "tp"), "b": P()},
        r"parameter \['layer'\]\['w'\], P\('tp', 'tp'\), names .* more than",
    ),
    ({"layer": P(P.UNCONSTRAINED), "b": P()}, r"`param_specs` must name mesh axes or None, got P\(UNCONSTRAINED"),
]


@pytest.mark.parametrize(("specs", "text"), SPECS, ids=range(len(SPECS)))
def test_specs_that_do_not_fit(specs, text):
    tx = rekls(0.1, param_specs=specs, mesh=MESH)
    with pytest.raises(ValueError, match=text):
        tx.init(PARAMS)
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(tx.init, PARAMS)
    with pytest.raises(ValueError, match=text):
        state_partition_specs(rekls(0.1, mesh=MESH, param_specs=P()), PARAMS, specs)


def test_specs_of_another_kind():
    with pytest.raises(TypeError, match=r"`param_specs` must be a tree of PartitionSpecs, .* got 'tp' at \['b'\]"):
        rekls(0.1, param_specs={"layer": P(), "b": "tp"}, mesh=MESH).init(PARAMS)


@pytest.mark.parametrize("make", [rekls, scale_by_rekls])
def test_a_parameter_that_does_not_divide(make):
    tx = make(**({"learning_rate": 0.1} if make is rekls else {}), param_specs=P("tp", None), mesh=mesh_16())
    text = (
        r"Axis 0 of the parameter \['w'\] of shape \(72, 40\) has size 72, which must be divisible by 16, the size of the "
        r"mesh axis 'tp', for the spec P\('tp', None\)\."
    )
    with pytest.raises(ValueError, match=text):
        tx.init({"w": jnp.ones((72, 40))})


def test_no_mesh_for_specs():
    text = r"spec of the parameter \['layer'\]\['w'\], P\('tp',\), names the mesh axis 'tp'; the axes at hand are: none"
    tx = rekls(0.1, param_specs={"layer": P("tp"), "b": P()})
    with pytest.raises(ValueError, match=text):
        tx.init(PARAMS)
    with pytest.raises(ValueError, match=text):
        state_partition_specs(tx, PARAMS, {"layer": P("tp"), "b": P()})
    with pytest.raises(ValueError, match="There is no mesh: call under"):
        state_partition_specs(rekls(0.1), PARAMS, P())


def test_another_mesh_than_the_parameters():
    other = Mesh(np.array(jax.devices()[:4]), ("tp",))
    params = jax.device_put(PARAMS, NamedSharding(other, P()))
    tx = rekls(0.1, param_specs=P("tp"), mesh=MESH)
    with pytest.raises(ValueError, match=r"The parameter \['b'\] lies on Mesh\('tp': 4.*'data': 2, 'tp'"):
        tx.init(params)
    reversed_devices = Mesh(MESH.devices[::-1], MESH.axis_names)
    with pytest.raises(ValueError, match=r"The parameter \['b'\] lies on Mesh"):
        tx.init(jax.device_put(PARAMS, NamedSharding(reversed_devices, P())))
    with (
        jax.set_mesh(other),
        pytest.raises(ValueError, match=r"The mesh that is entered is .*'tp': 4.* must be"),
    ):
        tx.init(PARAMS)


def test_specs_against_the_types():
    mesh = mesh_of(8, AxisType.Explicit)
    params = {"w": jax.device_put(jnp.ones((16, 24)), NamedSharding(mesh, P("tp")))}
    text = r"The parameter \['w'\] lies on its mesh, of Explicit axes, as P\('tp', None\), `param_specs` says P\(None"
    with pytest.raises(ValueError, match=text):
        rekls(0.1, param_specs=P(None, "tp")).init(params)


def test_an_axis_that_shard_map_does_not_bind():
    tx = rekls(0.1, param_specs=P("model"), mesh=MESH)
    init = jax.shard_map(tx.init, mesh=MESH, in_specs=P("tp"), out_specs=P())
    with pytest.raises(ValueError, match=r"\['w'\], P\('model',\), names .* 'model'; the axes at hand are: 'data', 'tp'"):
        jax.eval_shape(init, {"w": jnp.ones((16, 24))})


def in_shard_map(tx, change, specs):
    state_specs = state_partition_specs(tx, PARAMS, specs)

    def update(G, state, params):
        return tx.update(jax.tree.map(change, G), state, params)

    update = jax.shard_map(update, mesh=MESH, in_specs=(specs, state_specs, specs), out_specs=(specs, state_specs))
    return jax.eval_shape(update, PARAMS, jax.eval_shape(tx.init, PARAMS), PARAMS)


def test_gradients_that_nobody_averaged():
    specs = {"layer": {"w": P("tp")}, "b": P()}
    tx = rekls(0.1, param_specs=specs, mesh=MESH)
    text = r"The gradient \['b'\] varies over the mesh axis 'data'.*`jax.lax.pmean\(gradients, 'data'\)`"
    with pytest.raises(ValueError, match=text):
        in_shard_map(tx, lambda G: G * jax.lax.axis_index("data"), specs)
    in_shard_map(tx, lambda G: jax.lax.pmean(G * jax.lax.axis_index("data"), "data"), specs)


def test_specs_forgotten_inside_shard_map():
    init = jax.shard_map(scale_by_rekls().init, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"))
    with pytest.raises(ValueError, match=r"The parameter \['w'\] varies over .* 'tp', over which its spec, P\(\)"):
        jax.eval_shape(init, {"w": jnp.ones((16, 24))})


BAD_ARGUMENTS = [
    ({"eigh_placement": "shared"}, ValueError, "`eigh_placement` must be one of 'split', 'replicated', got 'shared'"),
    ({"mesh": "tp"}, TypeError, "`mesh` must be a Mesh or AbstractMesh, got 'tp' of type str"),
    (
        {"eigh_axes": "model", "mesh": MESH},
        ValueError,
        "`eigh_axes` must name .* once, got 'model'; .*: 'data', 'tp'",
    ),
    (
        {"eigh_axes": ("tp", "tp"), "mesh": MESH},
        ValueError,
        r"`eigh_axes` must name .* once, got \('tp', 'tp'\)",
    ),
]


@pytest.mark.parametrize(("arguments", "kind", "text"), BAD_ARGUMENTS, ids=str)
def test_bad_arguments(arguments, kind, text):
    with pytest.raises(kind, match=text):
        rekls(0.1, **arguments).init(PARAMS)


NUMBERS = [
    (
        MatrixDimensionNumbers(0, 3),
        ValueError,
        r"must name axes of .* parameter \['w'\] of shape \(2, 3, 4\) got \(0, 3\)",
    ),
    (MatrixDimensionNumbers(0, ()), ValueError, r"at least one as each of rows and columns; parameter \['w'\]"),
    (
        MatrixDimensionNumbers(0, 1.0),  # type: ignore[arg-type]
        ValueError,
        r"must name axes of the array.* got \(0, 1\.0\)",
    ),
    (MatrixDimensionNumbers((0, -3), 1), ValueError, r"must name an axis at most once; .* got \(\(0, -3\), 1\)"),
    (MatrixDimensionNumbers(1, (0, 1)), ValueError, r"must name an axis at most once; .* got \(1, \(0, 1\)\)"),
    (
        {"v": None},
        ValueError,
        r"`dimension_numbers` must have .* nothing for the parameter \['w'\], and \['v'\], which is no",
    ),
    ({"w": (0, 1)}, TypeError, r"`dimension_numbers` must be a tree of MatrixDimensionNumbers, .* got 0 at \['w'\]\[0\]"),
]


@pytest.mark.parametrize(("numbers", "kind", "text"), NUMBERS, ids=range(len(NUMBERS)))
def test_dimension_numbers_that_do_not_fit(numbers, kind, text):
    with pytest.raises(kind, match=text):
        rekls(0.1, dimension_numbers=numbers).init({"w": jnp.ones((2, 3, 4))})


def test_optaxs_dimension_numbers_and_callables_are_taken():
    params = {"w": jnp.ones((2, 3, 4)), "v": jnp.ones((3, 4)), "empty": jnp.ones((0, 2, 3))}
    theirs = {"w": optax.contrib.MuonDimensionNumbers(0, (1, 2)), "v": None, "empty": optax.contrib.MuonDimensionNumbers()}
    for numbers in (theirs, lambda params: theirs):
        state = rekls(0.1, dimension_numbers=numbers).init(params)
        ours = state.inner_states["rekls"].inner_state[0]
        assert ours.L["w"].shape == (2, 2)
        assert ours.R["w"].shape == (12, 12)
        assert len(jax.tree.leaves(ours.L)) == 1


def test_the_texts_say_what_to_do():
    with pytest.raises(ValueError, match=re.escape("Pass a `mesh` that has it, call under `jax.set_mesh(mesh)`")):
        scale_by_rekls(param_specs=P("tp")).init({"w": jnp.ones((2, 2))})


def test_specs_of_the_fallbacks_leaves_are_checked_too():
    params = {"w": jnp.ones((16, 24)), "b": jnp.ones(15)}
    for spec, text in [
        (P("model"), r"The spec of the parameter \['b'\], P\('model',\), names the mesh axis 'model'"),
        (P("tp"), r"Axis 0 of the parameter \['b'\] of shape \(15,\) has size 15, which must be divisible by 4"),
        (P(None, "tp"), r"The spec of the parameter \['b'\] must have at most 1 entries"),
    ]:
        with pytest.raises(ValueError, match=text):
            rekls(0.1, param_specs={"w": P("tp"), "b": spec}, mesh=MESH).init(params)


def test_a_subtree_without_leaves_needs_no_specs_and_may_have_some():
    params = {"emb": {"w": jnp.ones((8, 16)), "v": jnp.ones((8, 16))}, "body": {"w": jnp.ones((8, 16)), "none": None}}
    specs = {"emb": {"w": P("tp"), "v": P("tp")}, "body": {"w": P("tp"), "none": P()}}
    tx = rekls(0.1, param_specs=specs, mesh=MESH, dimension_numbers=MatrixDimensionNumbers())
    tx.init(params)
    rekls(0.1, param_specs=P("tp"), mesh=MESH).init(params)
    optax.masked(tx, {"emb": False, "body": True}).init(params)
    optax.partition({"ours": tx, "none": optax.set_to_zero()}, {"emb": "none", "body": "ours"}).init(params)


def test_gradients_that_lie_otherwise_than_the_parameter():
    with jax.set_mesh(mesh_of(8, AxisType.Explicit)):
        params, tx = {"w": jax.device_put(jnp.ones((16, 24)), P("tp"))}, rekls(0.1)
        state = tx.init(params)
        text = r"The gradient \['w'\] lies on its mesh as P\(None, None\), the state was made for P\('tp', None\)\."
        with pytest.raises(ValueError, match=text):
            jax.eval_shape(tx.update, {"w": jnp.ones((16, 24))}, state, params)


def test_parameters_that_were_not_put_on_the_explicit_mesh():
    tx = rekls(0.1, param_specs=P("tp"), mesh=mesh_of(8, AxisType.Explicit))
    with pytest.raises(ValueError, match=r"\['w'\] lies on its mesh, .*, as P\(None, None\), `param_specs` says"):
        tx.init({"w": jnp.ones((16, 24))})
    tx.init({"w": jax.ShapeDtypeStruct((16, 24), jnp.float32)})


def test_a_mesh_that_shard_map_does_not_run_on():
    tx = rekls(0.1, param_specs=P("tp"), mesh=MESH)
    init = jax.shard_map(tx.init, mesh=Mesh(np.array(jax.devices()), ("tp",)), in_specs=P("tp"), out_specs=P("tp"))
    with pytest.raises(ValueError, match=r"`shard_map` binds the axes {'tp': 8}, which must be of the mesh that was given"):
        jax.eval_shape(init, {"w": jnp.ones((16, 24))})


def test_explicit_and_auto_axes_in_one_mesh():
    mesh = Mesh(MESH.devices, MESH.axis_names, axis_types=(AxisType.Explicit, AxisType.Auto))
    spec = P("data", "tp")
    params = {"w": jax.device_put(jnp.ones((16, 24)), NamedSharding(mesh, spec))}
    tx = rekls(0.1, param_specs=spec, mesh=mesh)
    updates, _ = jax.jit(tx.update)(params, tx.init(params), params)
    assert np.isfinite(updates["w"]).all()
