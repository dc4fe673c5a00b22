"""The optax contract: wrappers, schedules, derivatives, and trees of every kind."""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import EPS, METHODS, PARAMS, ROUND_OFF, STREAM, assert_same, descend, gradients, rekls_states, structure
from flax.core import FrozenDict
from sharded import eight_devices

from rekls_jax import rekls, scale_by_rekls


@pytest.mark.parametrize("method", METHODS)
def test_schedules_compile_once_and_reach_every_leaf(method):
    schedule, decay = optax.linear_schedule(0.1, 0.0, 10), optax.linear_schedule(0.0, 0.2, 10)
    tx = rekls(schedule, eps=EPS, weight_decay=decay, weight_decay_method=method)
    constant = optax.inject_hyperparams(rekls, static_args="weight_decay_method")(
        0.1, eps=EPS, weight_decay=0.0, weight_decay_method=method
    )
    traces = 0

    @jax.jit
    def update(G, state, params):
        nonlocal traces
        traces += 1
        return tx.update(G, state, params)

    update_constant = jax.jit(constant.update)
    params, state = PARAMS, tx.init(PARAMS)
    expected, constant_state = PARAMS, constant.init(PARAMS)
    for i in range(10):
        G = jax.tree.map(lambda g: jnp.asarray(g[i]), STREAM)  # noqa: B023
        updates, state = update(G, state, params)
        params = optax.apply_updates(params, updates)
        constant_state.hyperparams.update(learning_rate=schedule(i), weight_decay=decay(i))
        updates, constant_state = update_constant(G, constant_state, expected)
        expected = optax.apply_updates(expected, updates)
    assert traces == 1
    assert_same(params, expected, atol=ROUND_OFF)


@pytest.mark.parametrize(("method", "share"), [("decoupled", 0.1 * 0.3), ("independent", 0.3), ("palm", 0.1**2 * 0.3)])
def test_decay_shrinks_every_leaf_alike(method, share):
    with_decay, without = (
        descend(rekls(0.1, weight_decay=wd, weight_decay_method=method), PARAMS, jax.tree.map(lambda g: g[:1], STREAM))[0]
        for wd in (0.3, 0.0)
    )
    for name, p in PARAMS.items():
        np.testing.assert_allclose(without[name] - with_decay[name], share * p, atol=1e-6)


def test_l2_decay_is_part_of_the_gradient_before_the_factors():
    def first_factor(weight_decay):
        tx = rekls(0.1, weight_decay=weight_decay, weight_decay_method="l2")
        _, state = descend(tx, PARAMS, jax.tree.map(lambda g: g[:1], STREAM))
        return rekls_states(state)[0].L["w"]

    decayed = jax.tree.map(lambda g, p: g[:1] + np.float32(0.3) * np.asarray(p)[None], STREAM, PARAMS)
    _, state = descend(rekls(0.1, weight_decay=0.0), PARAMS, decayed)
    np.testing.assert_allclose(first_factor(0.3), rekls_states(state)[0].L["w"], rtol=1e-5)
    assert np.abs(first_factor(0.3) - first_factor(0.0)).max() > 1e-2


@pytest.mark.parametrize(
    "mask",
    [
        {"w": True, "v": False, "b": False, "s": True},
        lambda params: {name: p.shape in ((6, 4), ()) for name, p in params.items()},
    ],
    ids=["tree", "callable"],
)
@pytest.mark.parametrize("method", ["decoupled", "l2"])
def test_mask_says_which_leaves_decay(method, mask):
    def after_one(**options):
        tx = rekls(0.1, weight_decay_method=method, **options)
        return descend(tx, PARAMS, jax.tree.map(lambda g: g[:1], STREAM))[0]

    masked, decayed, plain = after_one(weight_decay=0.3, mask=mask), after_one(weight_decay=0.3), after_one(weight_decay=0.0)
    for name in PARAMS:
        expected, other = (decayed, plain) if name in ("w", "s") else (plain, decayed)
        np.testing.assert_array_equal(masked[name], expected[name])
        if method != "l2" or PARAMS[name].ndim == 2:  # Adam's first step has size lr whatever is added
            assert np.abs(masked[name] - other[name]).max() > 1e-4


def test_a_callable_mask_sees_the_params_as_they_are():
    params = {"w": jnp.ones((3, 2), jnp.bfloat16), "b": jnp.ones(2)}
    seen = []

    def mask(tree):
        seen.append(jax.tree.map(lambda p: p.dtype.name, tree))
        return {"w": True, "b": False}

    tx = rekls(0.1, weight_decay=1.0, mask=mask)
    updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    assert seen == 2 * [{"w": "bfloat16", "b": "float32"}]
    np.testing.assert_array_equal(updates["w"], jnp.full((3, 2), -0.1, jnp.bfloat16))
    np.testing.assert_array_equal(updates["b"], 0)


def test_the_default_fallback_is_adamw():
    params = {"b": PARAMS["b"], "s": PARAMS["s"], "kernel": jnp.ones((2, 3, 4))}
    stream = {name: gradients(p.shape, 6) for name, p in params.items()}
    schedule = optax.cosine_decay_schedule(0.1, 6)
    ours, _ = descend(rekls(schedule, 0.8, 0.9, eps=1e-6, weight_decay=0.2), params, stream)
    adamw, _ = descend(optax.adamw(schedule, 0.8, 0.9, 1e-6, weight_decay=0.2), params, stream)
    assert_same(ours, adamw, atol=1e-6)


def test_a_given_fallback_owns_its_leaves():
    params, _ = descend(rekls(0.1, weight_decay=0.5, fallback=optax.sgd(0.5)), PARAMS, STREAM)
    alone, _ = descend(optax.sgd(0.5), {"b": PARAMS["b"]}, {"b": STREAM["b"]})
    np.testing.assert_allclose(params["b"], alone["b"], atol=1e-5)
    matrices, _ = descend(rekls(0.1, weight_decay=0.5), PARAMS, STREAM)
    np.testing.assert_array_equal(params["w"], matrices["w"])


def test_extra_args_reach_the_fallback():
    def update(updates, state, params=None, *, value, **_):
        return jax.tree.map(lambda g: g * 0 + value, updates), state

    fallback = optax.GradientTransformationExtraArgs(optax.init_empty_state, update)
    tx = optax.chain(rekls(0.1, fallback=fallback), optax.identity())
    updates, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS, value=7.0, unknown=1)
    np.testing.assert_array_equal(updates["b"], 7.0)


def test_inject_hyperparams_traces_every_number_and_equals_constants():
    numbers: dict[str, Any] = {
        "b1": 0.8,
        "b2": 0.9,
        "shampoo_beta": 0.9,
        "eps": EPS,
        "weight_decay": 0.1,
        "max_update_rms": 0.2,
    }
    expected, _ = descend(rekls(0.1, **numbers), PARAMS, STREAM)
    tx = optax.inject_hyperparams(rekls)(0.1, **numbers)
    params, state = descend(tx, PARAMS, STREAM)
    assert_same(params, expected, atol=ROUND_OFF)
    assert set(state.hyperparams) == {"learning_rate", *numbers}
    state.hyperparams["learning_rate"] = jnp.float32(0.0)
    state.hyperparams["weight_decay"] = jnp.float32(0.0)
    unchanged, _ = descend(tx, params, jax.tree.map(lambda g: g[:1], STREAM), state)
    assert_same(unchanged, params)


def test_bf16_params_keep_injected_numbers_exact_with_hyperparam_dtype():
    params = {"w": jnp.ones((6, 4), jnp.bfloat16)}
    stream = {"w": gradients((6, 4), 5)}
    tx = optax.inject_hyperparams(rekls, hyperparam_dtype=jnp.float32)(0.1, b1=0.9, eps=EPS)
    injected, state = descend(tx, params, stream)
    assert float(state.hyperparams["b1"]) == pytest.approx(0.9, abs=1e-7)  # bfloat16 would make it .8984
    constant, constant_state = descend(rekls(0.1, b1=0.9, eps=EPS), params, stream)
    assert_same(injected, constant, rtol=2.0**-7)
    (ours,), (expected,) = rekls_states(state), rekls_states(constant_state)
    assert_same(ours.mu, expected.mu, atol=1e-5)


def test_multisteps_equals_one_step_on_the_mean_gradient():
    stream = jax.tree.map(lambda g: g[:8], STREAM)
    params, _ = descend(optax.MultiSteps(rekls(0.1, eps=EPS), 4), PARAMS, stream)
    means = jax.tree.map(lambda g: g.reshape(2, 4, *g.shape[1:]).mean(1), stream)
    expected, _ = descend(rekls(0.1, eps=EPS), PARAMS, means)
    assert_same(params, expected, atol=ROUND_OFF)


def test_partition_with_two_learning_rates():
    labels = {"w": "slow", "v": "fast", "b": "slow", "s": "fast"}
    tx = optax.partition({"slow": rekls(0.01), "fast": rekls(0.1)}, labels)
    params, _ = descend(tx, PARAMS, STREAM)
    slow, fast = descend(rekls(0.01), PARAMS, STREAM)[0], descend(rekls(0.1), PARAMS, STREAM)[0]
    assert_same(params, {"w": slow["w"], "v": fast["v"], "b": slow["b"], "s": fast["s"]})


@pytest.mark.parametrize(
    "wrap",
    [
        lambda tx: optax.chain(optax.clip_by_global_norm(1.0), tx),
        lambda tx: optax.masked(tx, {"w": True, "v": False, "b": True, "s": False}),
        lambda tx: optax.contrib.schedule_free(tx, 0.1, b1=0.9),
        lambda tx: optax.with_extra_args_support(tx),
    ],
    ids=["chain", "masked", "schedule_free", "extra_args"],
)
def test_wrappers_take_it_and_keep_the_states_types(wrap):
    tx = wrap(rekls(0.1))
    before = jax.tree.map(lambda x: (x.shape, x.dtype), tx.init(PARAMS))
    params, state = descend(tx, PARAMS, STREAM)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), state) == before
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((params, state)))


MASK = {"w": True, "v": False, "b": False, "s": True}


@pytest.mark.parametrize(
    "mask", [None, MASK, lambda params: {name: MASK[name] for name in params}], ids=["none", "tree", "callable"]
)
def test_tree_map_params_sees_the_states_trees(mask):
    tx = rekls(0.1, mask=mask)
    state = tx.init(PARAMS)
    marked = optax.tree_map_params(tx, lambda leaf: leaf + 1, state)
    (before,), (after,) = rekls_states(state), rekls_states(marked)
    assert int(after.count) == 0
    assert_same(after.mu, jax.tree.map(lambda x: x + 1, before.mu))


class Pair(NamedTuple):
    first: Any
    second: Any


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Layer:
    kernel: Any
    bias: Any


W, B = jnp.ones((4, 3)), jnp.ones(3)
TREES = {
    "dict": {"w": W, "b": B},
    "frozen dict": FrozenDict({"w": W, "deep": {"b": B}}),
    "named tuple": Pair(W, B),
    "list": [W, [B, W.T]],
    "dataclass": Layer(W, B),
    "one matrix": W,
    "one scalar": jnp.float32(1.0),
    "None leaves": {"w": W, "frozen": None, "b": [None, B]},
    "empty subtrees": {"w": W, "nothing": {}, "none": []},
    "zero-size arrays": {"w": W, "no rows": jnp.ones((0, 4)), "no entries": jnp.ones(0)},
    "empty": {},
}


@pytest.mark.parametrize("params", TREES.values(), ids=TREES.keys())
@pytest.mark.parametrize(
    ("make", "jit"),
    [
        pytest.param(rekls, False, id="one device, no jit"),
        pytest.param(rekls, True, id="one device"),
        pytest.param(
            functools.partial(eight_devices, rekls),
            True,
            id="eight devices",
            marks=[pytest.mark.slow, pytest.mark.exhaustive],
        ),
    ],
)
def test_params_of_every_structure(params, make, jit):
    tx = make(0.1)
    state = tx.init(params)
    updates, new_state = (jax.jit(tx.update) if jit else tx.update)(params, state, params)
    moved = optax.apply_updates(params, updates)
    assert structure(moved) == structure(params)
    assert structure(new_state) == structure(state)
    assert all(
        np.size(p) == 0 or np.any(p != q) for p, q in zip(jax.tree.leaves(params), jax.tree.leaves(moved), strict=True)
    )


def test_scale_by_rekls_points_along_the_gradient():
    tx, stream = scale_by_rekls(), gradients((6, 4), 8)
    state = tx.init(jnp.zeros((6, 4)))
    for G in stream:
        update, state = tx.update(jnp.asarray(G), state)
        assert np.sum(np.asarray(update) * np.asarray(state.mu)) > 0


def test_the_step_can_be_differentiated():
    tx, G = scale_by_rekls(eps=1e-2), jnp.asarray(gradients((4, 3), 1)[0])

    @jax.jit
    def length(G):
        return jnp.sum(tx.update(G, tx.init(G))[0] ** 2)

    slope, (_, along) = jax.grad(length)(G), jax.jvp(length, (G,), (G,))
    assert float(jnp.sum(slope * G)) == pytest.approx(float(along), rel=1e-4)
    step = 1e-3 * G
    assert float(length(G + step) - length(G - step)) / 2e-3 == pytest.approx(float(along), rel=2e-2)
