"""`eigh` failing at one step for one matrix."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import gradients, rekls_states

from rekls_jax import rekls
from rekls_jax._eigen import guard
from rekls_jax._types import Eigen

STREAM = {"a": gradients((6, 4), 6), "b": gradients((5, 3), 6, seed=1)}
PARAMS = {"a": jnp.zeros((6, 4)), "b": jnp.zeros((5, 3))}


def fail_for(size):
    """`jnp.linalg.eigh`, giving NaN for matrices of this size."""
    eigh = jnp.linalg.eigh

    def failing(S, **options):
        values, vectors = eigh(S, **options)
        bad = jnp.nan if S.shape[-1] == size else 0.0
        return values + bad, vectors + bad

    return failing


@pytest.mark.parametrize("inner", ["adam", "laprop"])
@pytest.mark.parametrize("size", [6, 4])
def test_the_previous_basis_is_kept_and_all_else_goes_on(monkeypatch, size, inner):
    tx = rekls(0.1, weight_decay=0.0, inner=inner)
    states: dict[str, list[Any]] = {}
    updates: dict[str, list[Any]] = {}
    sound_update = jax.jit(tx.update)
    for run in ("sound", "faulty"):
        state = tx.init(PARAMS)
        states[run], updates[run] = [state], []
        for i in range(6):
            G = jax.tree.map(lambda g: jnp.asarray(g[i]), STREAM)  # noqa: B023
            with monkeypatch.context() as patch:
                if run == "faulty" and i == 3:
                    patch.setattr(jnp.linalg, "eigh", fail_for(size))
                    jax.clear_caches()  # of functions that were traced with the other `eigh`
                    change, state = jax.jit(tx.update)(G, state, PARAMS)
                    jax.clear_caches()
                else:
                    change, state = sound_update(G, state, PARAMS)
            states[run].append(state)
            updates[run].append(change)
    before, after, sound = (rekls_states(s)[0] for s in (states["faulty"][3], states["faulty"][4], states["sound"][4]))
    Q, eig, factor = ("Q_L", "eig_L", "L") if size == 6 else ("Q_R", "eig_R", "R")
    for field in (Q, eig):
        np.testing.assert_array_equal(getattr(after, field)["a"], getattr(before, field)["a"])
    np.testing.assert_array_equal(getattr(after, factor)["a"], getattr(sound, factor)["a"])
    assert np.any(np.asarray(getattr(after, factor)["a"]) != np.asarray(getattr(before, factor)["a"]))
    last = rekls_states(states["faulty"][-1])[0]
    assert {name: int(n) for name, n in last.eigh_failures.items()} == {"a": 1, "b": 0}
    assert int(rekls_states(states["sound"][-1])[0].eigh_failures["a"]) == 0
    for sound_change, faulty_change in zip(updates["sound"], updates["faulty"], strict=True):
        np.testing.assert_array_equal(sound_change["b"], faulty_change["b"])
        assert np.isfinite(faulty_change["a"]).all()
    assert np.any(np.asarray(updates["sound"][3]["a"]) != np.asarray(updates["faulty"][3]["a"]))


@pytest.mark.parametrize(("field", "place"), [("values", 5), ("vectors", (3, 5))])
def test_one_nan_is_a_failure(field, place):
    # 64 x 64: of so many entries the largest may be a number though one is NaN.
    previous = Eigen(jnp.arange(64.0), jnp.eye(64))
    bad = previous._replace(**{field: getattr(previous, field).at[place].set(jnp.nan)})
    new = jax.tree.map(lambda *x: jnp.stack(x), bad, previous._replace(values=previous.values + 1))
    kept, succeeded = jax.jit(jax.vmap(guard, in_axes=(0, None)))(new, previous)
    np.testing.assert_array_equal(succeeded, [False, True])
    np.testing.assert_array_equal(kept.values, [previous.values, previous.values + 1])
    np.testing.assert_array_equal(kept.vectors[0], previous.vectors)
