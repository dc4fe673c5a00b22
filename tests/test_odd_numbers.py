"""Any stream of finite gradients leaves a state that is finite, symmetric, orthonormal, and updates of bounded size."""

import functools
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import rms

from rekls_jax import OrthogonalIteration, scale_by_rekls

SHAPES = [(7, 5), (4, 9), (1, 6), (6, 1), (1, 1)]
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
def trajectory(shape, option):
    tx = scale_by_rekls(**OPTIONS[option])

    @jax.jit
    def run(stream):
        def step(state, G):
            update, state = tx.update(G, state)
            return state, (update, state)

        return jax.lax.scan(step, tx.init(jnp.zeros(shape)), stream)[1]

    return run


def check(shape, option, seed, steps):
    stream = stream_of(shape, seed, steps)
    updates, states = jax.tree.map(np.asarray, trajectory(shape, option)(stream))
    for leaf in jax.tree.leaves((updates, states)):
        assert np.isfinite(leaf).all()
    for S, Q in ((states.L, states.Q_L), (states.R, states.Q_R)):
        np.testing.assert_array_equal(S, S.swapaxes(1, 2))
        Q = Q.astype(np.float64)
        assert np.abs(Q.swapaxes(1, 2) @ Q - np.eye(Q.shape[-1])).max() < 1e-4
    assert (states.nu >= 0).all()
    assert (states.eigh_failures == 0).all()
    assert rms(updates, axis=(1, 2)).max() <= MOST.get(option, 1.2)


EXAMPLE = {
    "shape": st.sampled_from(SHAPES),
    "option": st.sampled_from(sorted(OPTIONS)),
    "seed": st.integers(0, 2**32 - 1),
    "steps": st.lists(st.tuples(st.sampled_from(sorted(KINDS)), st.integers(-12, 12)), min_size=1, max_size=STEPS),
}
REPEATABLE = hypothesis.settings(deadline=None, derandomize=True, database=None)


@hypothesis.given(**EXAMPLE)
@hypothesis.settings(REPEATABLE, max_examples=150)
def test_any_stream(shape, option, seed, steps):
    check(shape, option, seed, steps)


@pytest.mark.exhaustive
@hypothesis.given(**EXAMPLE)
@hypothesis.settings(deadline=None, database=None, max_examples=5000)
def test_any_stream_at_length(shape, option, seed, steps):
    check(shape, option, seed, steps)
