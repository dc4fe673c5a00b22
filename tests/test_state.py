"""What the state holds, and that no step changes its structure or dtypes."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import SHAPES, assert_same, descend, gradients, rekls_states, run

from rekls_jax import Numerics, ReklsState, rekls, scale_by_rekls


def spec(tree):
    return jax.tree.map(lambda x: (x.shape, str(x.dtype), x.weak_type), tree)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_the_legend(shape):
    (m, n), (L, R) = shape, [(size, size) for size in shape]
    state = scale_by_rekls(mu_dtype=jnp.bfloat16).init({"w": jnp.ones(shape)})
    arrays = ("count", "mu", "nu", "L", "R", "Q_L", "Q_R", "eig_L", "eig_R", "eigh_failures")
    assert ReklsState._fields == (*arrays, "dimension_numbers", "rule")
    expected = [(), (m, n), (m, n), L, R, L, R, (m,), (n,), ()]
    assert [leaf.shape for leaf in jax.tree.leaves(state)] == expected
    assert [str(leaf.dtype) for leaf in jax.tree.leaves(state)] == ["int32", "bfloat16"] + 7 * ["float32"] + ["int32"]
    np.testing.assert_array_equal(state.Q_L["w"], np.eye(m))
    np.testing.assert_array_equal(state.Q_R["w"], np.eye(n))
    for field in ("count", "mu", "nu", "L", "R", "eig_L", "eig_R", "eigh_failures"):
        assert not any(np.any(leaf) for leaf in jax.tree.leaves(getattr(state, field)))


def test_eigenvalues_start_where_numerics_says():
    state = scale_by_rekls(numerics=Numerics(initial_eigenvalue=0.25)).init(jnp.ones((3, 2)))
    np.testing.assert_array_equal(state.eig_L, np.full(3, 0.25))
    np.testing.assert_array_equal(state.eig_R, np.full(2, 0.25))


PAIRS = [
    ("float32", "float32"),
    ("bfloat16", "bfloat16"),
    ("float16", "float16"),
    ("float32", "bfloat16"),
    ("bfloat16", "float32"),
]


@pytest.mark.parametrize(("dtype", "gradient_dtype"), PAIRS, ids=str)
@pytest.mark.parametrize(("inner", "x64", "jit"), [("adam", True, True), ("laprop", True, True), ("adam", False, False)])
def test_state_is_float32_and_updates_have_the_gradients_dtype(dtype, gradient_dtype, inner, jit, x64):
    with jax.enable_x64(x64):
        params = {"w": jnp.ones((6, 4), dtype), "b": jnp.ones(4, dtype)}
        tx = rekls(optax.constant_schedule(np.float64(0.1)), np.float64(0.9), inner=inner, weight_decay=np.float64(0.1))
        state = tx.init(params)
        before = spec(state)
        update = jax.jit(tx.update) if jit else tx.update
        for i in range(2):
            updates, state = update(jax.tree.map(lambda p: jnp.asarray(p, gradient_dtype), params), state, params)
            assert spec(state) == before, f"step {i}"
            assert {leaf.dtype for leaf in jax.tree.leaves(updates)} == {jnp.dtype(gradient_dtype)}
        assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"float32", "int32"}


def test_float64_params_keep_float64_state_next_to_float32_ones():
    with jax.enable_x64(True):
        params = {"wide": jnp.ones((6, 4), jnp.float64), "narrow": jnp.ones((4, 3), jnp.float32)}
        tx = optax.inject_hyperparams(scale_by_rekls)(b1=0.9, eps=1e-8)
        state = tx.init(params)
        before = spec(state)
        updates, state = jax.jit(tx.update)(params, state, params)
        assert spec(state) == before
        assert updates["wide"].dtype == jnp.float64
        assert updates["narrow"].dtype == jnp.float32


def test_16_bit_gradients_are_computed_in_float32():
    tx, stream = scale_by_rekls(), gradients((12, 7), 5).astype(jnp.bfloat16)
    narrow, _ = run(tx, stream, jnp.bfloat16)
    wide, _ = run(tx, stream.astype(np.float32))
    # Only the exit is rounded.
    np.testing.assert_array_equal(narrow, np.asarray(wide.astype(np.float32).astype(jnp.bfloat16), np.float64))


def test_mu_dtype_narrows_only_the_first_moment():
    stream = gradients((12, 7), 20)
    exact, wide = run(scale_by_rekls(), stream)
    close, narrow = run(scale_by_rekls(mu_dtype=jnp.bfloat16), stream)
    assert narrow.mu.dtype == jnp.bfloat16
    assert_same(narrow._replace(mu=wide.mu), wide)
    assert 0 < np.abs(close - exact).max() < 0.05
    state = rekls(0.1, mu_dtype=jnp.bfloat16).init({"w": jnp.ones((3, 2)), "b": jnp.ones(2)})
    moments = [x for path, x in jax.tree.leaves_with_path(state) if ".mu" in jax.tree_util.keystr(path)]
    assert [str(x.dtype) for x in moments] == 2 * ["bfloat16"]


@pytest.mark.parametrize("precision", ["highest", "high"])
def test_every_matrix_product_has_the_precision_of_numerics_whatever_is_set_outside(precision):
    tx = scale_by_rekls(numerics=Numerics(precision=precision))
    params = jnp.ones((3, 2))
    with jax.default_matmul_precision("bfloat16"):
        program = str(jax.make_jaxpr(tx.update)(params, tx.init(params)))
    assert program.count("dot_general") > 6
    assert program.count(f"Precision.{precision.upper()}, Precision.{precision.upper()}") == program.count("dot_general[")


@pytest.mark.parametrize("shape", [(6, 4), (1, 5)], ids=str)
def test_one_eigh_for_each_factor_and_step(shape):
    params = {"a": jnp.ones(shape), "b": jnp.ones(shape), "bias": jnp.ones(3)}
    tx = rekls(0.1)
    compiled = jax.jit(tx.update).lower(params, tx.init(params), params).compile()
    assert len(re.findall(r"custom_call_target=\"lapack_\w+syevd", compiled.as_text() or "")) == 4


def test_init_under_eval_shape_and_from_shapes_alone():
    params = {"w": jnp.ones((6, 4), jnp.bfloat16), "b": jnp.ones(4)}
    tx = rekls(0.1)
    shapes = jax.eval_shape(tx.init, params)
    state = tx.init(params)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes) == jax.tree.map(lambda x: (x.shape, x.dtype), state)
    assert_same(tx.init(jax.eval_shape(lambda: params)), state)


@pytest.mark.parametrize("x64", [False, True])
def test_numpy_params_and_gradients_are_taken_without_a_warning(x64):
    with jax.enable_x64(x64):
        params = {"w": np.ones((3, 2)), "b": np.ones(2)}
        tx = rekls(0.1, mu_dtype="float64")
        updates, state = tx.update(params, tx.init(params), params)
        (inner,) = rekls_states(state)
        assert inner.mu["w"].dtype == inner.L["w"].dtype == updates["w"].dtype == (jnp.float64 if x64 else jnp.float32)


def test_strict_dtype_promotion():
    with jax.numpy_dtype_promotion("strict"):
        tx = scale_by_rekls()
        params = {"w": jnp.ones((3, 2), jnp.bfloat16)}
        updates, _ = jax.jit(tx.update)(params, tx.init(params))
        assert updates["w"].dtype == jnp.bfloat16


def test_count_counts_steps():
    params = {"w": jnp.ones((3, 2)), "b": jnp.ones(2)}
    _, state = descend(rekls(0.1), params, {"w": gradients((3, 2), 4), "b": gradients((2,), 4)})
    assert [int(s.count) for s in rekls_states(state)] == [4]
