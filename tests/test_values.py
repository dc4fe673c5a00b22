"""Values against the float64 NumPy reference and the PyTorch reference's trajectories."""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import METHODS, NUMERICS, SHAPES, descend, gradients, rekls_states, replace_in, run
from numpy_reference import NumpyRekls, eigh_descending

from rekls_jax import REFERENCE, Numerics, rekls, scale_by_rekls

GOLDEN = sorted((Path(__file__).parent / "golden").glob("*.npz"))
REFERENCE_OPTIONS = {
    "initial_eigenvalue": 0.0,
    "eigenvalue_floor": 0.0,
    "carry_second_moment": False,
    "round_off_floor": 0.0,
}


@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_the_reference_numerics_follow_the_pytorch_trajectories(path):
    data = np.load(path)
    options: Any = {"weight_decay_method": str(data["weight_decay_method"]), "inner": str(data["inner"])}
    tx = rekls(*map(float, data["hyper"]), **options, numerics=REFERENCE)
    (eig_L, Q_L), (eig_R, Q_R) = eigh_descending(data["L0"]), eigh_descending(data["R0"])
    start = {"mu": data["momentum0"], "nu": data["exp_avg_sq0"], "L": data["L0"], "R": data["R0"]}
    start |= {"Q_L": Q_L, "Q_R": Q_R, "eig_L": eig_L, "eig_R": eig_R}
    params = jnp.asarray(data["param0"])
    state = replace_in(tx.init(params), count=jnp.int32(data["step0"]), **{k: jnp.asarray(v) for k, v in start.items()})
    largest_move = np.abs(data["params"] - data["param0"]).max()
    for i in range(5):
        params, state = descend(tx, params, data["grads"][i : i + 1], state)
        assert np.abs(params - data["params"][i]).max() <= 1e-3 * largest_move
        (inner,) = rekls_states(state)
        for factor in "LR":
            error = np.linalg.norm(getattr(inner, factor) - data[factor][i])
            assert error <= 1e-4 * np.linalg.norm(data[factor][i])
    assert np.abs(inner.nu - data["exp_avg_sq"]).max() <= 1e-4 * data["exp_avg_sq"].max()


def test_golden_files_are_all_there():
    assert len(GOLDEN) == 9


@pytest.mark.parametrize("inner", ["adam", "laprop"])
@pytest.mark.parametrize(("shape", "method"), [(SHAPES[0], m) for m in METHODS] + [(s, "l2") for s in SHAPES[1:]], ids=str)
def test_default_numerics_equal_the_float64_reference(shape, inner, method):
    options: Any = {"b1": 0.8, "b2": 0.97, "shampoo_beta": 0.9, "eps": 1e-6, "weight_decay": 0.3}
    stream, start = gradients(shape, 12), gradients(shape, 1, seed=1)[0]
    reference = NumpyRekls(shape, 0.1, **options, method=method, inner=inner, machine_epsilon=2.0**-52)
    with jax.enable_x64(True):
        tx = rekls(0.1, **options, weight_decay_method=method, inner=inner)
        expected, params = start.astype(np.float64), jnp.asarray(start, jnp.float64)
        state = tx.init(params)
        for G in stream.astype(np.float64):
            expected = reference.step(expected, G)
            params, state = descend(tx, params, G[None], state)
            np.testing.assert_allclose(params, expected, rtol=0, atol=1e-9)
        (inner_state,) = rekls_states(state)
        assert params.dtype == inner_state.L.dtype == jnp.float64
        for field in ("mu", "L", "R", "eig_L", "eig_R"):
            np.testing.assert_allclose(getattr(inner_state, field), getattr(reference, field), rtol=0, atol=1e-9)


@pytest.mark.parametrize("shape", [(5, 3), (3, 7)], ids=str)
@pytest.mark.parametrize("inner", ["adam", "laprop"])
def test_reference_numerics_equal_the_float64_reference(shape, inner):
    # From step 4 on: what comes before rests on round-off, in float64 too. Started warm.
    stream = gradients(shape, 10)
    reference = NumpyRekls(shape, 1.0, inner=inner, **REFERENCE_OPTIONS)
    warm = [G @ G.T for G in (gradients((shape[0],) * 2, 1)[0], gradients((shape[1],) * 2, 1)[0])]
    reference.L, reference.R = (S.astype(np.float64) for S in warm)
    (reference.eig_L, reference.Q_L), (reference.eig_R, reference.Q_R) = map(eigh_descending, (reference.L, reference.R))
    reference.t = 20
    with jax.enable_x64(True):
        tx = scale_by_rekls(inner=inner, numerics=REFERENCE)
        fields = {k: jnp.array(getattr(reference, k)) for k in ("L", "R", "Q_L", "Q_R", "eig_L", "eig_R")}
        state = tx.init(jnp.zeros(shape, jnp.float64))._replace(count=jnp.int32(20), **fields)
        for G in stream.astype(np.float64):
            update, state = tx.update(jnp.asarray(G), state)
            np.testing.assert_allclose(update, reference.direction(G), rtol=0, atol=1e-9)


@pytest.mark.parametrize(
    "option",
    [
        {"initial_eigenvalue": 0.5},
        {"initial_eigenvalue": 0.0},
        {"eigenvalue_floor": 0.3},
        {"eigenvalue_floor": 0.0},
        {"carry_second_moment": False},
        {"round_off_floor": 1e12},
    ],
    ids=str,
)
def test_each_numerics_option_is_the_references(option):
    shape = (6, 4)
    stream = gradients(shape, 8)
    # eps well above the round-off of step 1, which would otherwise be all there is off the diagonal.
    reference = NumpyRekls(shape, 1.0, **option, eps=1e-3, machine_epsilon=2.0**-52)
    default = NumpyRekls(shape, 1.0, eps=1e-3, machine_epsilon=2.0**-52)
    with jax.enable_x64(True):
        updates, _ = run(scale_by_rekls(eps=1e-3, numerics=Numerics(**option)), stream, jnp.float64)
    expected = np.stack([reference.direction(G.astype(np.float64)) for G in stream])
    np.testing.assert_allclose(updates, expected, rtol=0, atol=1e-9)
    others = np.stack([default.direction(G.astype(np.float64)) for G in stream])
    assert np.abs(expected - others).max() > 1e-3, "the option changes nothing here: the test would not see it"


def test_adam_and_laprop_agree_at_step_one_and_differ_from_step_two():
    stream = gradients((6, 4), 5)
    with jax.enable_x64(True):
        (adam, _), (laprop, _) = (run(scale_by_rekls(inner=inner), stream, jnp.float64) for inner in ("adam", "laprop"))
    np.testing.assert_allclose(adam[0], laprop[0], atol=1e-12)
    assert (np.abs(adam - laprop).max(axis=(1, 2))[1:] > 1e-2).all()


@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS.keys())
def test_bases_belong_to_the_factors_in_the_state(numerics):
    tx = scale_by_rekls(numerics=numerics)
    update, state = jax.jit(tx.update), tx.init(jnp.zeros((24, 16)))
    for G in gradients((24, 16), 10):
        _, state = update(jnp.asarray(G), state)
        for S, Q, values in ((state.L, state.Q_L, state.eig_L), (state.R, state.Q_R, state.eig_R)):
            S, Q, values = (np.asarray(x, np.float64) for x in (S, Q, values))
            assert (np.diff(values) <= 0).all()
            assert np.linalg.norm(S @ Q - Q * values) < 1e-5 * np.linalg.norm(S)
            assert np.abs(Q.T @ Q - np.eye(len(Q))).max() < 1e-5


def test_factors_stay_exactly_symmetric():
    _, state = run(scale_by_rekls(), gradients((40, 23), 200))
    np.testing.assert_array_equal(state.L, state.L.T)
    np.testing.assert_array_equal(state.R, state.R.T)


def test_the_order_of_eigenvectors_means_nothing_if_the_second_moment_goes_with_it():
    # The floor would read the largest eigenvalue off the front, so a permuted state is legal only without it.
    tx = scale_by_rekls(numerics=Numerics(initial_eigenvalue=1.0, eigenvalue_floor=0.0))
    stream = gradients((2, 3), 6, seed=2, scale=1e-2)
    stream[::2, 0] += gradients((3,), 3)  # two large rows in turn
    stream[1::2, 1] += gradients((3,), 3, seed=1)
    _, state = run(tx, stream[:5])
    left, right = jnp.array([1, 0]), jnp.array([2, 0, 1])
    permuted = state._replace(
        Q_L=-state.Q_L[:, left], eig_L=state.eig_L[left], Q_R=state.Q_R[:, right], eig_R=state.eig_R[right]
    )
    update = jax.jit(tx.update)
    expected, _ = update(jnp.asarray(stream[5]), state)
    together, _ = update(jnp.asarray(stream[5]), permuted._replace(nu=state.nu[left][:, right]))
    alone, _ = update(jnp.asarray(stream[5]), permuted)
    np.testing.assert_allclose(together, expected, atol=1e-5)
    assert np.abs(alone - expected).max() > 0.1
