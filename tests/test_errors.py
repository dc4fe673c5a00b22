"""Every error of the package: its type and its words."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from sharded import eight_devices, mesh_of

from rekls_jax import Numerics, OrthogonalIteration, rekls, scale_by_rekls

W, B = jnp.ones((3, 2)), jnp.ones(2)
PARAMS = {"layer": {"w": W}, "b": B}


def names(table):
    return [", ".join(arguments) for arguments, _, _ in table]


BAD_ARGUMENTS = [
    ({"b1": 1.0}, ValueError, r"`b1` must lie in \[0, 1\), got 1\.0\."),
    ({"b1": 1 - 1e-9}, ValueError, r"`b1` must lie in \[0, 1\), got 0\.999999999\."),
    ({"b2": -0.1}, ValueError, r"`b2` must lie in \[0, 1\), got -0\.1\."),
    ({"b2": float("nan")}, ValueError, r"`b2` must lie in \[0, 1\), got nan\."),
    ({"shampoo_beta": 2}, ValueError, r"`shampoo_beta` must lie in \[0, 1\), got 2\."),
    ({"b1": jnp.float32(1.5)}, ValueError, r"`b1` must lie in \[0, 1\), got 1\.5\."),
    ({"eps": -1e-8}, ValueError, r"`eps` must be a finite number >= 0, got -1e-08\."),
    ({"eps": float("inf")}, ValueError, r"`eps` must be a finite number >= 0, got inf\."),
    ({"inner": "sgd"}, ValueError, r"`inner` must be one of 'adam', 'laprop', got 'sgd'\."),
    ({"inner": None}, ValueError, r"`inner` must be one of 'adam', 'laprop', got None\."),
    ({"inner": ["adam"]}, ValueError, r"`inner` must be one of 'adam', 'laprop', got \['adam'\]\."),
    ({"nesterov": 1}, TypeError, r"`nesterov` must be a bool, got 1 of type int\."),
    ({"max_update_rms": -1.0}, ValueError, r"`max_update_rms` must be a finite number >= 0, got -1\.0\."),
    ({"factors": "kronecker"}, ValueError, r"`factors` must be one of 'kl', 'plain', got 'kronecker'\."),
    (
        {"eigenbasis": OrthogonalIteration},
        TypeError,
        r"`eigenbasis` must be a Eigh or OrthogonalIteration, got <class .*> of type type\.",
    ),
    ({"precondition_frequency": 0}, ValueError, r"`precondition_frequency` must be an int >= 1, got 0\."),
    ({"precondition_frequency": -3}, ValueError, r"`precondition_frequency` must be an int >= 1, got -3\."),
    ({"precondition_frequency": 2.5}, TypeError, r"`precondition_frequency` must be an int >= 1, got 2\.5 of type float\."),
    ({"precondition_frequency": True}, TypeError, r"`precondition_frequency` must be an int >= 1, got True of type bool\."),
    (
        {"precondition_frequency": jnp.int32(2)},
        TypeError,
        r"must be an int >= 1, got .* Under `optax.inject_hyperparams` pass `static_args='precondition_frequency'`\.",
    ),
    ({"max_precond_dim": 0}, ValueError, r"`max_precond_dim` must be an int >= 1, got 0\."),
    ({"max_precond_dim": None}, TypeError, r"`max_precond_dim` must be an int >= 1, got None of type NoneType\."),
    ({"numerics": "reference"}, TypeError, r"`numerics` must be a Numerics, got 'reference' of type str\."),
    (
        {"mu_dtype": jnp.int8},
        TypeError,
        r"`mu_dtype` must be None or a floating-point dtype .*, got <class 'jax.numpy.int8'>\.",
    ),
    ({"mu_dtype": "bf17"}, TypeError, r"`mu_dtype` must be None or a floating-point dtype .*, got 'bf17'\."),
    ({"mu_dtype": jnp.float8_e4m3fn}, TypeError, r"`mu_dtype` must be .* of 16, 32 or 64 bits, got .*float8_e4m3fn"),
    ({"b1": "0.9"}, TypeError, r"`b1` must be a number, got '0\.9' of type str\."),
    ({"b1": True}, TypeError, r"`b1` must be a number, got True of type bool\."),
    ({"eps": None}, TypeError, r"`eps` must be a number, got None of type NoneType\."),
    ({"b1": jnp.array([0.9, 0.9])}, TypeError, r"`b1` must be a number, got an array of shape \(2,\) and dtype float32\."),
    ({"eps": np.complex64(1)}, TypeError, r"`eps` must be a number, got an array of shape \(\) and dtype complex64\."),
    ({"b1": np.str_("x")}, TypeError, r"`b1` must be a number, got an array of shape \(\) and dtype <U1\."),
]
BAD_ALIAS_ARGUMENTS = [
    ({"weight_decay": -0.1}, ValueError, r"`weight_decay` must be a finite number >= 0, got -0\.1\."),
    (
        {"weight_decay_method": "adamw"},
        ValueError,
        r"`weight_decay_method` must be one of 'decoupled', 'independent', 'palm', 'l2', got 'adamw'\.",
    ),
    ({"fallback": optax.adamw}, TypeError, r"`fallback` must be a GradientTransformation, got <function adamw"),
    ({"learning_rate": "3e-4"}, TypeError, r"`learning_rate` must be a number or a schedule, got '3e-4' of type str\."),
    ({"learning_rate": None}, TypeError, r"`learning_rate` must be a number or a schedule, got None of type NoneType\."),
    ({"learning_rate": float("nan")}, ValueError, r"`learning_rate` must be finite, got nan\."),
]
BAD_NUMERICS = [
    ({"initial_eigenvalue": -1.0}, ValueError, r"`initial_eigenvalue` must be a finite number >= 0, got -1\.0\."),
    ({"initial_eigenvalue": "rms"}, TypeError, r"`initial_eigenvalue` must be a number, got 'rms' of type str\."),
    ({"eigenvalue_floor": -1e-3}, ValueError, r"`eigenvalue_floor` must be a finite number >= 0, got -0\.001\."),
    (
        {"eigenvalue_floor": 1.5},
        ValueError,
        r"`eigenvalue_floor` is a share of the largest eigenvalue, at most 1, got 1\.5\.",
    ),
    ({"carry_second_moment": "no"}, TypeError, r"`carry_second_moment` must be a bool, got 'no' of type str\."),
    ({"round_off_floor": -1.0}, ValueError, r"`round_off_floor` must be a finite number >= 0, got -1\.0\."),
    ({"round_off_floor": None}, TypeError, r"`round_off_floor` must be a number, got None of type NoneType\."),
    ({"precision": "low"}, ValueError, r"`precision` must be one of 'highest', 'high', 'default', got 'low'\."),
]


def test_an_injected_decay_of_zero_is_a_number_that_may_change():
    tx = optax.inject_hyperparams(rekls)(0.1, weight_decay=0.0)
    with pytest.raises(
        ValueError, match=r"needs `params` .*`weight_decay=0\.0`\. Under .* pass `static_args='weight_decay'`"
    ):
        tx.update(PARAMS, tx.init(PARAMS))
    tx = optax.inject_hyperparams(rekls, static_args="weight_decay")(0.1, weight_decay=0.0)
    updates, _ = tx.update(PARAMS, tx.init(PARAMS))
    assert np.isfinite(updates["layer"]["w"]).all()


def test_a_mesh_is_no_schedule():
    tx = optax.inject_hyperparams(rekls)(0.1, mesh=mesh_of(8), param_specs=P())
    with pytest.raises(
        TypeError, match=r"`mesh` must be a Mesh .* Under `optax.inject_hyperparams` pass `static_args='mesh'`"
    ):
        tx.init(PARAMS)


@pytest.mark.parametrize(("given", "kind"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), (True, TypeError)])
def test_power_iterations(given, kind):
    with pytest.raises(kind, match=rf"`power_iterations` must be an int >= 1, got {given}"):
        OrthogonalIteration(given)


@pytest.mark.parametrize(("arguments", "kind", "text"), BAD_ARGUMENTS, ids=names(BAD_ARGUMENTS))
def test_bad_arguments(arguments, kind, text):
    with pytest.raises(kind, match=text):
        scale_by_rekls(**arguments)
    with pytest.raises(kind, match=text):
        rekls(0.1, **arguments)


@pytest.mark.parametrize(("arguments", "kind", "text"), BAD_ALIAS_ARGUMENTS, ids=names(BAD_ALIAS_ARGUMENTS))
def test_bad_arguments_of_rekls(arguments, kind, text):
    with pytest.raises(kind, match=text):
        rekls(**{"learning_rate": 0.1, **arguments})


@pytest.mark.parametrize(("arguments", "kind", "text"), BAD_NUMERICS, ids=names(BAD_NUMERICS))
def test_bad_numerics(arguments, kind, text):
    with pytest.raises(kind, match=text):
        Numerics(**arguments)


def test_traced_numbers_are_not_checked():
    params = {"w": jnp.ones((3, 2))}
    tx = optax.inject_hyperparams(rekls)(0.1)
    jax.jit(lambda p: tx.update(p, tx.init(p), p))(params)


@pytest.mark.parametrize(
    ("leaf", "got"),
    [
        (jnp.ones((3, 2), jnp.int32), "dtype int32"),
        (jnp.ones((3, 2), jnp.complex64), "dtype complex64"),
        (jnp.ones(3, bool), "dtype bool"),
        (jax.random.key(0), "dtype key<fry>"),
        (jnp.ones(3, jnp.float8_e4m3fn), "dtype float8_e4m3fn"),
        (np.ones(3, np.longdouble), "dtype float128"),
        ("relu", "str"),
        (1.0, "float"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
@pytest.mark.parametrize(
    "tx", [rekls(0.1), eight_devices(rekls, 0.1), scale_by_rekls()], ids=["rekls", "eight devices", "scale_by_rekls"]
)
def test_leaves_that_cannot_be_optimized(tx, leaf, got):
    text = r"The {} \['layer'\]\['x'\] must be a real floating-point array of 16, 32 or 64 bits, got {}\."
    with pytest.raises(TypeError, match=text.format("parameter", got)):
        tx.init({"layer": {"w": jnp.ones((3, 2)), "x": leaf}})
    params = {"layer": {"w": jnp.ones((3, 2)), "x": jnp.ones((3, 2))}}
    with pytest.raises(TypeError, match=text.format("gradient", got)):
        tx.update({"layer": {"w": jnp.ones((3, 2)), "x": leaf}}, tx.init(params), params)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 3)], ids=str)
def test_scale_by_rekls_takes_matrices_only(shape):
    with pytest.raises(ValueError, match=rf"got the parameter \['x'\] of shape {re.escape(str(shape))}\."):
        scale_by_rekls().init({"x": jnp.ones(shape)})
    rekls(0.1).init({"x": jnp.ones(shape)})


@pytest.mark.parametrize("method", ["decoupled", "independent", "palm", "l2"])
def test_decay_needs_params(method):
    tx = rekls(0.1, weight_decay_method=method)
    with pytest.raises(ValueError, match="`update` needs `params` for weight decay, got None"):
        tx.update(PARAMS, tx.init(PARAMS))
    tx = rekls(0.1, weight_decay=0.0, weight_decay_method=method)
    tx.update(PARAMS, tx.init(PARAMS))


BAD_GRADIENTS = [
    (
        {"layer": {"w": W.T}, "b": B},
        r"The {} \['layer'\]\['w'\] has shape \(2, 3\), the state was made for shape \(3, 2\)\.",
    ),
    ({"layer": {"w": jnp.ones(6)}, "b": B}, r"The {} \['layer'\]\['w'\] has shape \(6,\), .* for shape \(3, 2\)\."),
    ({"layer": {"w": W}, "b": B[:1]}, r"The {} \['b'\] has shape \(1,\), the state was made for shape \(2,\)\."),
    ({"layer": {"w": W}, "b": B[None]}, r"The {} \['b'\] has shape \(1, 2\), the state was made for shape \(2,\)\."),
    ({"layer": {}, "b": B}, r"There is no {} \['layer'\]\['w'\], for which the state was made\. There are: \['b'\]\."),
    (
        {"layer": {"w": None}, "b": B},
        r"There is no {} \['layer'\]\['w'\], for which the state was made\. There are: \['b'\]\.",
    ),
    (
        {"layer": {"w": W, "v": jnp.ones((4, 5))}, "b": B},
        r"There is a {} \['layer'\]\['v'\] of shape \(4, 5\), for which the state was not made\.",
    ),
    (
        {"layer": {"w": W}, "b": B, "c": {}},
        r"The {}s must have the tree structure that the state was made for, .*, got .*'c'",
    ),
]


@pytest.mark.parametrize(("tree", "text"), BAD_GRADIENTS, ids=range(len(BAD_GRADIENTS)))
def test_gradients_and_params_that_do_not_fit_the_state(tree, text):
    tx = rekls(0.1, weight_decay=0.0)
    state = tx.init(PARAMS)
    for params in (PARAMS, None):
        with pytest.raises(ValueError, match=text.format("gradient")):
            tx.update(tree, state, params)
    with pytest.raises(ValueError, match=text.format("parameter")):
        tx.update(PARAMS, state, tree)


def test_a_given_fallback_judges_the_shapes_of_its_own_leaves():
    tx = rekls(0.1, fallback=optax.sgd(0.1))
    state = tx.init(PARAMS)
    tx.update(PARAMS, state, PARAMS)
    with pytest.raises(ValueError, match=r"There is no gradient \['b'\]"):
        tx.update({"layer": {"w": W}}, state, PARAMS)
    with pytest.raises(ValueError, match=r"The gradient \['layer'\]\['w'\] has shape \(2, 3\)"):
        tx.update({"layer": {"w": W.T}, "b": B}, state, PARAMS)


@pytest.mark.parametrize("tx", [rekls(0.1), scale_by_rekls()], ids=["rekls", "scale_by_rekls"])
def test_a_state_that_is_not_its_own(tx):
    params = {"w": W}
    with pytest.raises(TypeError, match=r"`state` must be what this optimizer's `init` returned, got a dict\."):
        tx.update(params, params, params)
    with pytest.raises(TypeError, match=r"`state` must be what this .*, got a tuple\."):
        tx.update(params, optax.adamw(0.1).init(params), params)


def test_scale_by_rekls_checks_gradients_too():
    tx = scale_by_rekls()
    with pytest.raises(
        ValueError, match=r"The gradient \['w'\] has shape \(2, 3\), the state was made for shape \(3, 2\)\."
    ):
        tx.update({"w": W.T}, tx.init({"w": W}))


@pytest.mark.parametrize(
    ("mask", "kind", "text"),
    [
        (3, TypeError, r"`mask` must be a tree of bools, or a callable that makes one, got 3 at \(the whole tree\)\."),
        ({"layer": True, "b": "no"}, TypeError, r"`mask` must be a tree of bools, .* got 'no' at \['b'\]\."),
        ({"layer": True}, ValueError, r"`mask` must have the params' tree structure, .*, or a prefix of it, got "),
        (
            lambda params: {"layer": 1.0, "b": True},
            TypeError,
            r"`mask` must be a tree of bools, .* got 1\.0 at \['layer'\]\.",
        ),
    ],
    ids=["number", "string", "structure", "callable"],
)
@pytest.mark.parametrize("weight_decay", [0.1, 0.0])
def test_bad_masks(mask, kind, text, weight_decay):
    with pytest.raises(kind, match=text):
        rekls(0.1, mask=mask, weight_decay=weight_decay).init(PARAMS)
