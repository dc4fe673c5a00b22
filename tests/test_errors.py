"""Every error of the package: its type and its words."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from rekls_jax import Numerics, rekls, scale_by_rekls

PARAMS = {"layer": {"w": jnp.ones((3, 2))}, "b": jnp.ones(2)}

BAD_ARGUMENTS = [
    ({"b1": 1.0}, ValueError, r"`b1` must lie in \[0, 1\), got 1\.0\."),
    ({"b2": -0.1}, ValueError, r"`b2` must lie in \[0, 1\), got -0\.1\."),
    ({"b2": float("nan")}, ValueError, r"`b2` must lie in \[0, 1\), got nan\."),
    ({"shampoo_beta": 2}, ValueError, r"`shampoo_beta` must lie in \[0, 1\), got 2\."),
    ({"b1": jnp.float32(1.5)}, ValueError, r"`b1` must lie in \[0, 1\), got 1\.5\."),
    ({"eps": -1e-8}, ValueError, r"`eps` must be a finite number >= 0, got -1e-08\."),
    ({"eps": float("inf")}, ValueError, r"`eps` must be a finite number >= 0, got inf\."),
    ({"inner": "sgd"}, ValueError, r"`inner` must be one of 'adam', 'laprop', got 'sgd'\."),
    ({"inner": None}, ValueError, r"`inner` must be one of 'adam', 'laprop', got None\."),
    ({"numerics": "reference"}, TypeError, r"`numerics` must be a Numerics, got 'reference' of type str\."),
    (
        {"mu_dtype": jnp.int8},
        TypeError,
        r"`mu_dtype` must be None or a floating-point dtype, got <class 'jax.numpy.int8'>\.",
    ),
    ({"mu_dtype": "bf17"}, TypeError, r"`mu_dtype` must be None or a floating-point dtype, got 'bf17'\."),
    ({"b1": "0.9"}, TypeError, r"`b1` must be a number, got '0\.9' of type str\."),
    ({"eps": None}, TypeError, r"`eps` must be a number, got None of type NoneType\."),
    ({"b1": jnp.array([0.9, 0.9])}, TypeError, r"`b1` must be a number, got an array of shape \(2,\)\."),
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
]
BAD_NUMERICS = [
    ({"initial_eigenvalue": -1.0}, r"`initial_eigenvalue` must be None or a finite number >= 0, got -1\.0\."),
    ({"eigenvalue_floor": -1e-3}, r"`eigenvalue_floor` must lie in \[0, 1\], got -0\.001\."),
    ({"eigenvalue_floor": 1.5}, r"`eigenvalue_floor` must lie in \[0, 1\], got 1\.5\."),
    ({"round_off_floor": -1.0}, r"`round_off_floor` must be a finite number >= 0, got -1\.0\."),
    ({"precision": "low"}, r"`precision` must be one of highest, high, default, got 'low'\."),
]


@pytest.mark.parametrize(("arguments", "kind", "text"), BAD_ARGUMENTS, ids=str)
def test_bad_arguments(arguments, kind, text):
    with pytest.raises(kind, match=text):
        scale_by_rekls(**arguments)
    with pytest.raises(kind, match=text):
        rekls(0.1, **arguments)


@pytest.mark.parametrize(("arguments", "kind", "text"), BAD_ALIAS_ARGUMENTS, ids=str)
def test_bad_arguments_of_rekls(arguments, kind, text):
    with pytest.raises(kind, match=text):
        rekls(**{"learning_rate": 0.1, **arguments})


@pytest.mark.parametrize(("arguments", "text"), BAD_NUMERICS, ids=str)
def test_bad_numerics(arguments, text):
    with pytest.raises(ValueError, match=text):
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
        ("relu", "str"),
        (1.0, "float"),
    ],
    ids=str,
)
@pytest.mark.parametrize("tx", [rekls(0.1), scale_by_rekls()], ids=["rekls", "scale_by_rekls"])
def test_leaves_that_cannot_be_optimized(tx, leaf, got):
    with pytest.raises(TypeError, match=rf"Parameter \['layer'\]\['x'\] must be a real floating-point array, got {got}\."):
        tx.init({"layer": {"w": jnp.ones((3, 2)), "x": leaf}})


@pytest.mark.parametrize("shape", [(), (3,), (2, 3, 4), (0, 3)], ids=str)
def test_scale_by_rekls_takes_matrices_only(shape):
    with pytest.raises(
        ValueError, match=rf"got shape {str(shape).replace('(', '.').replace(')', '.')} for parameter \['x'\]\."
    ):
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
        {"layer": {"w": jnp.ones((2, 3))}, "b": jnp.ones(2)},
        r"gradient of \['layer'\]\['w'\] has shape \(2, 3\), .* \(3, 2\)",
    ),
    ({"layer": {"w": jnp.ones(6)}, "b": jnp.ones(2)}, r"\['layer'\]\['w'\]"),
    ({"layer": {}, "b": jnp.ones(2)}, r"gradients have no leaf \['layer'\]\['w'\]; the parameter there has shape \(3, 2\)"),
    (
        {"layer": {"w": jnp.ones((3, 2)), "v": jnp.ones((4, 5))}, "b": jnp.ones(2)},
        r"gradients have a leaf \['layer'\]\['v'\] of shape \(4, 5\), the parameters have none there",
    ),
    ({"layer": {"w": None}, "b": jnp.ones(2)}, r"gradients have no leaf \['layer'\]\['w'\]"),
]


@pytest.mark.parametrize(("gradients", "text"), BAD_GRADIENTS, ids=range(len(BAD_GRADIENTS)))
@pytest.mark.parametrize("with_params", [True, False])
def test_gradients_that_do_not_fit(gradients, text, with_params):
    tx = rekls(0.1, weight_decay=0.0)
    with pytest.raises(ValueError, match=text):
        tx.update(gradients, tx.init(PARAMS), PARAMS if with_params else None)


def test_gradients_of_another_container():
    tx = scale_by_rekls()
    with pytest.raises(ValueError, match=r"must have the parameters' tree structure, .*'layer'.*, got .*'layer'"):
        tx.update({"layer": {"w": jnp.ones((3, 2))}, "extra": {}}, tx.init({"layer": PARAMS["layer"]}))


def test_a_bias_gradient_of_another_shape_is_not_broadcast():
    tx = rekls(0.1)
    with pytest.raises(ValueError, match=r"The gradient of \['b'\] has shape \(1,\), its parameter has shape \(2,\)"):
        tx.update({"layer": PARAMS["layer"], "b": np.ones(1, np.float32)}, tx.init(PARAMS), PARAMS)
