"""Any stream of finite gradients leaves a state that is finite, symmetric, orthonormal, and updates of bounded size.

With `optax.apply_if_finite` any stream whatever does, and the steps that are not finite leave no trace.
"""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import assert_same, rms
from sharded import on_eight_devices

from rekls_jax import OrthogonalIteration, scale_by_rekls

SHAPES = [(7, 5), (4, 9), (1, 6), (6, 1), (1, 1)]  # without "at length", where compiling is most of it, a few
DIVIDED = [(16, 5), (3, 8), (8, 8), (1, 8), (5, 3)]  # the last lies whole on each of the eight devices
STEPS = 16


def one_hot(rng, shape):
    G = np.zeros(shape)
    G[tuple(rng.integers(shape))] = 1
    return G


KINDS: dict[str, Any] = {
    "normal": lambda rng, shape: rng.standard_normal(shape),
    "zero": lambda rng, shape: np.zeros(shape),
    "one-hot": one_hot,
    "rank 1": lambda rng, shape: rng.standard_normal((shape[0], 1)) @ rng.standard_normal((1, shape[1])),
    "duplicate rows": lambda rng, shape: np.broadcast_to(rng.standard_normal((1, shape[1])), shape),
    "duplicate columns": lambda rng, shape: np.broadcast_to(rng.standard_normal((shape[0], 1)), shape),
    "constant": lambda rng, shape: np.ones(shape),
    "the same again": lambda rng, shape: np.random.default_rng(0).standard_normal(shape),
    "dead row": lambda rng, shape: rng.standard_normal(shape) * (np.arange(shape[0]) > 0)[:, None],
    "dead column": lambda rng, shape: rng.standard_normal(shape) * (np.arange(shape[1]) > 0),
    "one large row": lambda rng, shape: rng.standard_normal(shape) * 10.0 ** rng.integers(-8, 1, (shape[0], 1)),
    "denormal": lambda rng, shape: 1e-40 * rng.standard_normal(shape),
}
BAD = {"inf": np.inf, "-inf": -np.inf, "nan": np.nan}
OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "laprop": {"inner": "laprop"},
    "eps 0": {"eps": 0.0},
    "mu bfloat16": {"mu_dtype": jnp.bfloat16},
    "plain factors": {"factors": "plain"},
    "nesterov": {"nesterov": True},
    "KL-SOAP": {"eigenbasis": OrthogonalIteration(), "precondition_frequency": 3},
}
# Root mean square of an update. Adam's quotient is at most 1.17 in one basis, by Cauchy and Schwarz; LaProp's terms
# 1 / sqrt(1 - b2); Nesterov's momentum makes 1.47 of the first 1.
MOST = {"laprop": 4.48, "nesterov": 1.6}


def stream_of(shape, seed, steps):
    """(STEPS, m, n) float32: the (kind, power of ten) of `steps` over and over."""
    rng = np.random.default_rng(seed)
    drawn = [10.0**power * KINDS[kind](rng, shape) for kind, power in (steps * STEPS)[:STEPS]]
    return np.stack(drawn).astype(np.float32)


@functools.cache
def trajectory(tx):
    """Of a stream of gradients: the updates and states of each step."""

    @jax.jit
    def run(stream):
        def step(state, G):
            update, state = tx.update(G, state)
            return state, (update, state)

        return jax.lax.scan(step, tx.init(jnp.zeros(stream.shape[1:])), stream)[1]

    return lambda stream: jax.tree.map(np.asarray, run(stream))


@functools.cache
def optimizer(direction, option):
    return direction(**OPTIONS[option])


@functools.cache
def guarded(option):
    return optax.apply_if_finite(optimizer(scale_by_rekls, option), max_consecutive_errors=STEPS)


def check(updates, states, most):
    for leaf in jax.tree.leaves((updates, states)):
        assert np.isfinite(leaf).all()
    for S, Q in ((states.L, states.Q_L), (states.R, states.Q_R)):
        np.testing.assert_array_equal(S, S.swapaxes(1, 2))
        Q = Q.astype(np.float64)
        assert np.abs(Q.swapaxes(1, 2) @ Q - np.eye(Q.shape[-1])).max() < 1e-4
    assert (states.nu >= 0).all()
    assert (states.eigh_failures == 0).all()
    assert rms(updates, axis=(1, 2)).max() <= most


STREAM = {
    "option": st.sampled_from(sorted(OPTIONS)),
    "seed": st.integers(0, 2**32 - 1),
    "steps": st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(-12, 12)), min_size=1, max_size=STEPS),
}
BAD_STEPS = st.dictionaries(st.integers(0, STEPS - 1), st.sampled_from(sorted(BAD)), min_size=1, max_size=6)
REPEATABLE = hypothesis.settings(deadline=None, derandomize=True, database=None)
AT_LENGTH = hypothesis.settings(deadline=None, database=None)


def any_stream(shape, option, seed, steps, direction=scale_by_rekls):
    stream = stream_of(shape, seed, steps)
    updates, states = trajectory(optimizer(direction, option))(stream)
    check(updates, states, MOST.get(option, 1.2))


def any_stream_with_bad_steps(shape, option, seed, steps, bad):
    stream, rng = stream_of(shape, seed, steps), np.random.default_rng(seed)
    without = np.concatenate([np.delete(stream, list(bad), axis=0), np.zeros_like(stream[: len(bad)])])
    for i, kind in bad.items():
        stream[i][tuple(rng.integers(shape))] = BAD[kind]
    run, last_good = trajectory(guarded(option)), STEPS - len(bad) - 1
    updates, states = run(stream)
    np.testing.assert_array_equal(updates[list(bad)], 0)
    np.testing.assert_array_equal(states.total_notfinite[-1], len(bad))
    last, expected = (
        jax.tree.map(lambda x: x[i], s.inner_state)  # noqa: B023
        for s, i in ((states, -1), (run(without)[1], last_good))
    )
    assert_same(last, expected)


@hypothesis.given(shape=st.sampled_from(SHAPES[1:3]), **STREAM)
@hypothesis.settings(REPEATABLE, max_examples=150)
def test_any_stream(shape, option, seed, steps):
    any_stream(shape, option, seed, steps)


@hypothesis.given(shape=st.sampled_from(SHAPES[:1]), **STREAM, bad=BAD_STEPS)
@hypothesis.settings(REPEATABLE, max_examples=40)
def test_any_stream_with_bad_steps(shape, option, seed, steps, bad):
    any_stream_with_bad_steps(shape, option, seed, steps, bad)


@pytest.mark.slow
@pytest.mark.exhaustive
@hypothesis.given(shape=st.sampled_from(SHAPES), **STREAM)
@hypothesis.settings(AT_LENGTH, max_examples=5000)
def test_any_stream_at_length(shape, option, seed, steps):
    any_stream(shape, option, seed, steps)


@pytest.mark.slow
@pytest.mark.exhaustive
@hypothesis.given(shape=st.sampled_from(SHAPES), **STREAM, bad=BAD_STEPS)
@hypothesis.settings(AT_LENGTH, max_examples=2000)
def test_any_stream_with_bad_steps_at_length(shape, option, seed, steps, bad):
    any_stream_with_bad_steps(shape, option, seed, steps, bad)


@pytest.mark.slow
@pytest.mark.exhaustive
@hypothesis.given(shape=st.sampled_from(DIVIDED), **STREAM)
@hypothesis.settings(AT_LENGTH, max_examples=1000)
def test_any_stream_on_eight_devices(shape, option, seed, steps):
    any_stream(shape, option, seed, steps, on_eight_devices)


# A decomposition of 4096 x 4096 takes ten seconds of a CPU.
LONG = [
    pytest.param({"max_precond_dim": 1024}, STEPS),
    pytest.param({}, 2, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
]


@pytest.mark.parametrize(("options", "steps"), LONG, ids=str)
def test_one_row_of_four_thousand(options, steps):
    stream = stream_of((1, 4096), 0, [("normal", 0), ("one-hot", 12), ("normal", -12), ("zero", 0)])
    updates, states = trajectory(scale_by_rekls(**options))(stream[:steps])
    check(updates, states, 1.2)
