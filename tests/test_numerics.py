"""What the default numerics promise, and what they mend: sizes and directions of updates in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import WIDE_AND_TALL, cosine, gradients, rms, run
from numpy_reference import NumpyRekls
from sharded import EVERYWHERE

from rekls_jax import REFERENCE, Numerics

# shape: update RMS at steps 1-4, N(0, 1) gradients
FIXED = {
    (64, 64): (0.13, 0.70, 0.57, 0.50),
    (128, 64): (0.09, 0.70, 0.57, 0.50),
    (16, 256): (0.07, 0.25, 0.25, 0.25),
    (96, 200): (0.07, 0.68, 0.58, 0.51),
}


def in_both_precisions(tx, stream):
    single, _ = run(tx, stream)
    with jax.enable_x64(True):
        double, _ = run(tx, stream, jnp.float64)
    return single, double


@pytest.mark.parametrize("direction", EVERYWHERE)
@pytest.mark.slow
@pytest.mark.parametrize("inner", ["adam", "laprop"])
@pytest.mark.parametrize("shape", WIDE_AND_TALL, ids=str)
def test_early_updates_are_bounded_and_float32_finds_their_direction(direction, shape, inner):
    single, double = in_both_precisions(direction(inner=inner), gradients(shape, 8))
    sizes = rms(single, axis=(1, 2))
    assert (sizes <= 1).all()
    if inner == "adam":
        np.testing.assert_allclose(sizes[:4], FIXED[shape], atol=0.021)
    cosines = [cosine(a, b) for a, b in zip(single, double, strict=True)]
    assert cosines[0] >= 0.9
    assert min(cosines[1:]) >= 0.99


@pytest.mark.parametrize("direction", EVERYWHERE)
@pytest.mark.slow
def test_the_reference_numerics_keep_the_references_faults(direction):
    sizes, cosines = {}, {}
    for shape in WIDE_AND_TALL:
        single, double = in_both_precisions(direction(numerics=REFERENCE), gradients(shape, 2))
        sizes[shape] = rms(single, axis=(1, 2))
        cosines[shape] = [cosine(a, b) for a, b in zip(single, double, strict=True)]
    for shape in WIDE_AND_TALL:
        assert 0.85 < sizes[shape][0] < 1.01, "step 1 is round-off scaled to full size"
        assert cosines[shape][0] < 0.2
    for shape in WIDE_AND_TALL[1:]:
        assert sizes[shape][1] > 2, "step 2 jumps: V stayed in the old basis"
        assert cosines[shape][1] < 0.3
    assert sizes[(64, 64)][1] < 1, "but not where neither factor has a null space"


@pytest.mark.parametrize("direction", EVERYWHERE)
@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 1e3])
def test_the_update_settles_at_one_size_for_every_gradient_scale(direction, scale):
    updates, _ = run(direction(), gradients((128, 64), 200, scale=scale))
    assert rms(updates[150:]) == pytest.approx(0.22, abs=0.03)


@pytest.mark.parametrize("direction", EVERYWHERE)
@pytest.mark.parametrize("inner", ["adam", "laprop"])
@pytest.mark.parametrize("shape", [(24, 16), (5, 40)], ids=str)
def test_updates_do_not_depend_on_the_gradients_scale(direction, shape, inner):
    # An even power of two changes no rounding, square roots included: what is not equivariant by formula shows. Not 2**-12:
    # the null eigenvalues of (24, 16), squared, then come below the smallest normal number, where LAPACK stops iterating.
    tx, stream = direction(eps=0.0, inner=inner), gradients(shape, 20)
    expected, _ = run(tx, stream)
    for scale in (2.0**-10, 2.0**12):
        np.testing.assert_array_equal(run(tx, np.float32(scale) * stream)[0], expected)


@pytest.mark.parametrize("direction", EVERYWHERE)
@pytest.mark.parametrize("scale", [1e-4, 1e-2, 1e2, 1e4])
def test_a_scale_that_changes_the_rounding_changes_only_step_one(direction, scale):
    # Step 1 lies off the gradient's own diagonal only by round-off; what is left of it is bounded by its cosine.
    tx, stream = direction(eps=0.0), gradients((24, 16), 20)
    (plain, _), (scaled, _) = run(tx, stream), run(tx, np.float32(scale) * stream)
    assert cosine(plain[0], scaled[0]) > 0.95
    errors = np.linalg.norm(plain - scaled, axis=(1, 2)) / np.linalg.norm(plain, axis=(1, 2))
    assert errors[1:].max() < 1e-3


@pytest.mark.parametrize("direction", EVERYWHERE)
@pytest.mark.parametrize("inner", ["adam", "laprop"])
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_zero_gradients_give_zero_updates_and_leave_no_trace(direction, eps, inner):
    tx, stream = direction(eps=eps, inner=inner), gradients((12, 7), 6)
    zeros = np.zeros((3, 12, 7), np.float32)
    updates, state = run(tx, np.concatenate([zeros, stream]))
    np.testing.assert_array_equal(updates[:3], 0)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    sizes = rms(updates[3:], axis=(1, 2))
    assert (sizes > 0.01).all()
    assert (sizes < 1.5).all()
    _, state = run(tx, np.zeros((50, 12, 7), np.float32))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("direction", EVERYWHERE)
def test_a_long_pause_does_not_make_the_next_gradient_dominate(direction):
    stream = gradients((12, 7), 480)
    stream[60:460] = 0  # .95^400 is 1e-9: the factors have all but vanished
    updates, state = run(direction(), stream)
    assert rms(updates[460:], axis=(1, 2)).max() < 1
    assert max(state.L.max(), state.R.max()) < 100


@pytest.mark.parametrize("direction", EVERYWHERE)
@pytest.mark.parametrize("inner", ["adam", "laprop"])
def test_dead_rows_and_columns_get_no_update(direction, inner):
    stream = gradients((12, 9), 1000)
    stream[:, 4, :], stream[:, :, 7] = 0, 0
    updates, _ = run(direction(inner=inner), stream)
    np.testing.assert_array_equal(updates[:, 4, :], 0)
    np.testing.assert_array_equal(updates[:, :, 7], 0)
    assert rms(updates[-1]) > 0.1


@pytest.mark.parametrize("direction", EVERYWHERE)
def test_a_row_that_dies_keeps_its_momentum(direction):
    # With shampoo_beta 0 the factors forget the row at once; its momentum does not. Square: no other null direction.
    stream = gradients((4, 4), 4)
    stream[3, 0] = 0
    with jax.enable_x64(True):
        updates, _ = run(direction(shampoo_beta=0.0), stream, jnp.float64)
    reference = NumpyRekls((4, 4), 1.0, shampoo_beta=0.0, machine_epsilon=2.0**-52)
    expected = np.stack([reference.direction(G.astype(np.float64)) for G in stream])
    assert np.abs(expected[3, 0]).max() > 0.1
    np.testing.assert_allclose(updates[3], expected[3], atol=1e-6)


@pytest.mark.parametrize("direction", EVERYWHERE)
@pytest.mark.parametrize("scale", [1e12, 1e17])
def test_large_gradients_do_not_overflow_a_norm(direction, scale):
    updates, state = run(direction(), gradients((256, 512), 3, scale=scale))
    plain, _ = run(direction(), gradients((256, 512), 3))
    np.testing.assert_allclose(rms(updates, axis=(1, 2)), rms(plain, axis=(1, 2)), rtol=0.1)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))


@pytest.mark.parametrize("direction", EVERYWHERE)
@pytest.mark.slow
@pytest.mark.parametrize("eps", [1e-12, 1e-8, 1e-4])
@pytest.mark.parametrize(("shape", "steps"), [((64, 32), 50), ((512, 512), 10)], ids=str)
def test_rank_one_gradients_are_harmless(direction, shape, steps, eps):
    columns, rows = gradients((shape[0], 1), steps), gradients((1, shape[1]), steps, seed=1)
    updates, state = run(direction(eps=eps), columns @ rows)
    assert np.isfinite(updates).all()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    for Q, S in ((state.Q_L, state.L), (state.Q_R, state.R)):
        assert np.abs(Q.T @ Q - np.eye(len(Q))).max() < 1e-4
        assert np.abs(S).max() < 1e12


@pytest.mark.parametrize("direction", EVERYWHERE)
@pytest.mark.parametrize(("scale", "most"), [(1e2, 10), (1e3, 15), (1e4, 20), (1e5, 25)])
def test_a_spike_is_forgotten_soon(direction, scale, most):
    """Back within 10 % for five steps after `most` steps; the PyTorch reference takes 26, 54, 77 and 98."""
    stream = gradients((128, 64), 200)
    stream[50] *= scale
    sizes = rms(run(direction(), stream)[0], axis=(1, 2))
    steady = rms(run(direction(), gradients((128, 64), 200))[0][150:])
    near = np.abs(sizes - steady) <= 0.1 * steady
    back = next(i for i in range(51, 95) if near[i : i + 5].all())
    assert back - 50 <= most
    assert sizes[50:].max() < 0.4
    assert sizes[50:].min() > 0.15


@pytest.mark.parametrize("direction", EVERYWHERE)
@pytest.mark.parametrize("inner", ["adam", "laprop"])
@pytest.mark.parametrize("shape", [(8, 5), (3, 7)], ids=str)
def test_the_floor_follows_the_gradient_and_a_sixteenth_of_the_past(direction, inner, shape):
    # 2^48 machine epsilons of float64, a sixteenth, show in every digit. After step 4 the past is 1e3 times the rest.
    stream = gradients(shape, 12)
    stream[4] *= 1e3
    with jax.enable_x64(True):
        tx = direction(inner=inner, eps=1e-6, numerics=Numerics(round_off_floor=2.0**48))
        updates, _ = run(tx, stream, jnp.float64)
    reference = NumpyRekls(shape, 1.0, eps=1e-6, inner=inner, round_off_floor=2.0**48, machine_epsilon=2.0**-52)
    expected = [reference.direction(G.astype(np.float64)) for G in stream]
    np.testing.assert_allclose(updates, expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize("direction", EVERYWHERE)
@pytest.mark.parametrize("inner", ["adam", "laprop"])
@pytest.mark.parametrize("scale", [1e-20, 1e-25, 1e-30])
def test_gradients_whose_squares_vanish_give_no_large_updates(direction, inner, scale):
    # Their square is 0 or denormal in float32, and with eps = 0 nothing else is in the denominator but round-off: 1.5e4.
    updates, _ = run(direction(inner=inner, eps=0.0), gradients((8, 5), 20, scale=scale))
    assert np.abs(updates).max() > 0
    assert rms(updates, axis=(1, 2)).max() < 1.2


@pytest.mark.parametrize("direction", EVERYWHERE)
@pytest.mark.parametrize("eps", [0.0, 1e-8])
def test_round_off_of_a_large_past_is_not_scaled_up(direction, eps):
    # What is left of 1 at 1e-7 of a gradient of 1e8, where all that comes after is zero or tiny: updates reached 18 and 6e5.
    for now in (0.0, 1e-9):
        stream = np.zeros((6, 8, 5), np.float32)
        stream[0], stream[1:] = 1e8 * gradients((1, 5), 1), now * gradients((1, 5), 1, seed=1)
        assert rms(run(direction(eps=eps), stream)[0], axis=(1, 2)).max() < 1.2
