"""`eigh` failing at one step for one matrix, and gradients that are not finite."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import PARAMS, STREAM, assert_same, descend, gradients, rekls_states
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import entered

from rekls_jax import rekls
from rekls_jax._eigen import guard
from rekls_jax._types import Eigen

TWO = {"a": jnp.zeros((6, 4)), "b": jnp.zeros((5, 3))}


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
    tx, stream = rekls(0.1, weight_decay=0.0, inner=inner), {"a": gradients((6, 4), 6), "b": gradients((5, 3), 6, seed=1)}
    states: dict[str, list[Any]] = {}
    updates: dict[str, list[Any]] = {}
    sound_update = jax.jit(tx.update)
    for run in ("sound", "faulty"):
        state = tx.init(TWO)
        states[run], updates[run] = [state], []
        for i in range(6):
            G = jax.tree.map(lambda g: jnp.asarray(g[i]), stream)  # noqa: B023
            with monkeypatch.context() as patch:
                if run == "faulty" and i == 3:
                    patch.setattr(jnp.linalg, "eigh", fail_for(size))
                    jax.clear_caches()  # of functions that were traced with the other `eigh`
                    change, state = jax.jit(tx.update)(G, state, TWO)
                    jax.clear_caches()
                else:
                    change, state = sound_update(G, state, TWO)
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


# On many devices the bad entry lies on one of them alone.
@pytest.mark.parametrize("bad", [np.nan, -np.inf], ids=str)
@pytest.mark.parametrize(
    "mode",
    [
        "one device",
        pytest.param("auto", marks=pytest.mark.slow),
        pytest.param("explicit", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
    ],
)
def test_apply_if_finite_leaves_no_trace_of_a_bad_step(mode, bad):
    schedule = optax.linear_schedule(0.1, 0.0, 60)
    with entered(mode, 1 if mode == "one device" else 8) as mesh:
        specs = {"w": P("tp"), "v": P(), "b": P("tp")}
        given: dict[str, Any] = {} if mode == "explicit" else {"param_specs": specs, "mesh": mesh}
        tx = rekls(schedule, weight_decay=0.1, eps=1e-3, **given)
        tx = optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(1.0), tx), max_consecutive_errors=3)
        shapes: dict[str, tuple[int, ...]] = {"w": (16, 6), "v": (5, 3), "b": (4,)}
        shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
        params = jax.device_put({name: jnp.ones(shape) for name, shape in shapes.items()}, shardings)
        sound = {name: gradients(shape, 40, seed=i) for i, (name, shape) in enumerate(shapes.items())}
        faulty = {name: np.insert(stream, 17, stream[0], axis=0) for name, stream in sound.items()}
        faulty["w"][17, 13, 1] = bad

        update, ends = jax.jit(tx.update), []
        for stream in (sound, faulty):
            moved, state = params, jax.jit(tx.init)(params)
            for i in range(len(stream["w"])):
                G = jax.device_put({name: stream[name][i] for name in stream}, shardings)
                updates, state = update(G, state, moved)
                moved = optax.apply_updates(moved, updates)
            ends.append((moved, state))
        (expected, expected_state), (got, state) = ends
        assert [int(state.total_notfinite), int(expected_state.total_notfinite)] == [1, 0]
        assert_same(got, expected)
        assert_same(state.inner_state, expected_state.inner_state)
        assert [int(ours.count) for ours in rekls_states(state)] == [40]


def test_without_the_wrapper_a_bad_gradient_poisons_its_matrix_and_no_other():
    stream = {**STREAM, "w": STREAM["w"].copy()}
    stream["w"][3, 0, 0] = np.nan
    params, state = descend(rekls(0.1), PARAMS, stream)
    assert np.isnan(params["w"]).all()
    expected, _ = descend(rekls(0.1), PARAMS, STREAM)
    assert_same({k: params[k] for k in "vbs"}, {k: expected[k] for k in "vbs"})
    (inner,) = rekls_states(state)
    assert int(inner.eigh_failures["w"]) == 2 * 9  # both factors, from that step on
    assert int(inner.eigh_failures["v"]) == 0
