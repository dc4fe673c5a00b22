"""The options beside the default: SOAP and KL-SOAP, sides too long for a factor, turns, momentum, clipping."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import assert_same, gradients, run
from numpy_reference import NumpyRekls, eigh_descending

from rekls_jax import Eigh, Numerics, OrthogonalIteration, _turns, scale_by_rekls

# Name: options of `scale_by_rekls`, and the same of the reference.
FAMILY: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "KL-SOAP": ({"eigenbasis": OrthogonalIteration()}, {"power_iterations": 1}),
    "SOAP": (
        {"eigenbasis": OrthogonalIteration(), "factors": "plain"},
        {"power_iterations": 1, "factors": "plain"},
    ),
    "SOAP, V reordered": (
        {
            "eigenbasis": OrthogonalIteration(2),
            "factors": "plain",
            "numerics": Numerics(carry_second_moment=False),
        },
        {"power_iterations": 2, "factors": "plain", "carry_second_moment": False},
    ),
    "SOAP, eigh": ({"eigenbasis": Eigh(), "factors": "plain"}, {"factors": "plain"}),
    "one side": ({"max_precond_dim": 5}, {"max_precond_dim": 5}),
    "every third step": ({"precondition_frequency": 3}, {"every": 3}),
    "KL-SOAP, every third step": (
        {"eigenbasis": OrthogonalIteration(), "precondition_frequency": 3},
        {"power_iterations": 1, "every": 3},
    ),
    "nesterov": ({"nesterov": True}, {"nesterov": True}),
    "nesterov, laprop": ({"nesterov": True, "inner": "laprop"}, {"nesterov": True, "inner": "laprop"}),
    "clipped": ({"max_update_rms": 0.1}, {"max_update_rms": 0.1}),
}


STATE = ("L", "R", "Q_L", "Q_R", "eig_L", "eig_R")


def warm(reference: NumpyRekls) -> NumpyRekls:
    """With factors of full rank and their bases: before there are any, null directions are anyone's choice."""
    m, n = reference.mu.shape
    reference.t, (G, H) = 21, gradients((max(m, n),) * 2, 2, seed=9).astype(np.float64)
    factors = {"L": (G @ G.T)[:m, :m], "R": (H @ H.T)[:n, :n]}
    for name, S in (item for item, present in zip(factors.items(), reference.both, strict=True) if present):
        eig, Q = eigh_descending(S)
        vars(reference).update({name: S, f"eig_{name}": eig, f"Q_{name}": Q})
    return reference


@pytest.mark.parametrize(
    ("name", "shape"), [(k, s) for k in FAMILY for s in [(6, 4), (3, 7), (5, 5)] if (k, s) != ("one side", (5, 5))], ids=str
)
def test_each_member_equals_its_float64_reference(name, shape):
    options, expected = FAMILY[name]
    stream = gradients(shape, 30)
    # eps well above the round-off of step 1, which would otherwise be all there is off the diagonal.
    references = [NumpyRekls(shape, **given, eps=1e-3, machine_epsilon=2.0**-52) for given in (expected, {})]
    with jax.enable_x64(True):
        tx = scale_by_rekls(eps=1e-3, **options)
        state = tx.init(jnp.zeros(shape, jnp.float64))
        if shape[0] != shape[1]:
            reference, default = map(warm, references)
            fields = {k: jnp.array(getattr(reference, k)) for k in STATE if reference.both["R" in k]}
            state = state._replace(count=jnp.int32(reference.t), **fields)
        reference, default = references
        update = jax.jit(tx.update)
        for G in stream.astype(np.float64):
            actual, state = update(jnp.asarray(G), state)
            wanted, other = reference.direction(G), default.direction(G)
            np.testing.assert_allclose(actual, wanted, rtol=0, atol=1e-9)
    assert np.abs(wanted - other).max() > 1e-3, "the option changes nothing here: the test would not see it"
    for field in ("mu", *(k for k in STATE[:2] + STATE[4:] if reference.both["R" in k])):
        np.testing.assert_allclose(getattr(state, field), getattr(reference, field), rtol=0, atol=1e-9)


@pytest.mark.parametrize("every", [1, 2, 3, 10])
def test_each_turn_has_its_share_of_every_shape_and_of_the_cost(every):
    # GPT-2's matrices, the layers of one block stacked or not.
    stacks = [_turns.Stack([(1, 12), (1, 4)], 2 * 768**3), _turns.Stack([(2, 6)], 768**3 + 3072**3)]
    stacks += [_turns.Stack([], cost) for cost in (768**3, 10.0, 20.0, 30.0)] + [_turns.Stack([(1, 2), (3, 2)], 40.0)]
    turns = _turns.deal(stacks, every)
    assert [t.shape for t in turns] == [(1, 48), (2, 6), (1, 1), (1, 1), (1, 1), (1, 1), (3, 4)]
    counts = np.array([np.bincount(t.ravel(), minlength=every) for t in turns])
    numbers = np.array([t.size for t in turns])
    assert (counts.sum(axis=1) == numbers).all()
    assert (counts.max(axis=1) <= -(-numbers // every)).all()
    costs = np.array([stack.cost for stack in stacks])
    assert (costs @ counts).max() - (costs @ counts).min() <= costs.max()
    for turn in turns:
        slots = _turns.most_due(turn)
        for row in turn:
            part = np.array([_turns.due(jnp.asarray(row), jnp.int32(t), slots) for t in range(every)])
            assert sorted(i for i in part.ravel() if i < len(row)) == list(range(len(row)))
            assert all((row[indices[indices < len(row)]] == t).all() for t, indices in enumerate(part))


def test_the_turns_are_the_same_on_any_mesh():
    (whole,), (divided,) = (_turns.deal([_turns.Stack(axes, 1.0)], 3) for axes in ([(1, 4), (1, 6)], [(2, 2), (3, 2)]))
    blocks = whole.reshape(4, 6)
    np.testing.assert_array_equal(divided[0], blocks[:2, :2].ravel())
    np.testing.assert_array_equal(divided[4], blocks[2:, 2:4].ravel())


@pytest.mark.parametrize(
    ("every", "shapes", "turns"),
    [
        (3, [(5, 4)] * 4 + [(3, 6)], [1, 2, 0, 1, 0]),  # the dearest is dealt first
        (2, [(5, 4), (4, 5), (5, 4), (5, 4)], [0, 1, 0, 1]),  # of the equal ones the last is alone in its turn
    ],
)
def test_bases_change_in_turn_and_one_by_one(every, shapes, turns):
    tx = scale_by_rekls(precondition_frequency=every)
    state, update = tx.init([jnp.zeros(shape) for shape in shapes]), jax.jit(tx.update)
    for step in range(2 * every + 1):
        before = state
        _, state = update([jnp.asarray(gradients(s, 1, seed=10 * step + i)[0]) for i, s in enumerate(shapes)], state)
        pairs = [zip(getattr(before, q), getattr(state, q), strict=True) for q in ("Q_L", "Q_R", "eig_L", "eig_R", "L")]
        Q_L, Q_R, eig_L, eig_R, L = ([bool((x != y).any()) for x, y in pair] for pair in pairs)
        assert Q_L == Q_R == eig_L == eig_R == [(step - turn) % every == 0 for turn in turns]
        assert all(L), "the factors move at every step"


def test_a_frequency_beyond_any_run_costs_nothing():
    tx = scale_by_rekls(precondition_frequency=2**40)
    state, update = tx.init([jnp.zeros((5, 4))] * 2), jax.jit(tx.update)
    moved = []
    for step in range(3):
        before = state
        _, state = update([jnp.asarray(gradients((5, 4), 1, seed=step)[0])] * 2, state)
        moved.append([bool((x != y).any()) for x, y in zip(before.Q_L, state.Q_L, strict=True)])
    assert moved == [[True, False], [False, True], [False, False]]


def test_a_frequency_of_one_is_that_of_no_option():
    with_it, without = (run(tx, gradients((6, 4), 5)) for tx in (scale_by_rekls(precondition_frequency=1), scale_by_rekls()))
    assert_same(with_it, without)


@pytest.mark.parametrize("eigenbasis", [Eigh(), OrthogonalIteration()])
def test_a_failure_at_a_refresh_keeps_the_basis_and_its_order(eigenbasis):
    tx = scale_by_rekls(eigenbasis=eigenbasis, numerics=Numerics(carry_second_moment=False))
    _, state = run(tx, gradients((6, 4), 5))
    _, after = jax.jit(tx.update)(jnp.full((6, 4), jnp.nan), state)
    assert int(after.eigh_failures) == 2
    assert_same((after.Q_L, after.eig_R), (state.Q_L, state.eig_R))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"precondition_frequency": 3}, marks=[pytest.mark.slow, pytest.mark.exhaustive]),
        {"eigenbasis": OrthogonalIteration()},
    ],
)
def test_the_family_runs_without_jit_and_over_an_ensemble(options):
    tx = scale_by_rekls(eps=1e-3, **options)
    stream = jnp.asarray(gradients((4, 5, 5), 2))  # four steps, two members
    members = [run(tx, member) for member in np.asarray(stream)]
    state = jax.vmap(tx.init)(jnp.zeros((2, 5, 5)))
    alone = tx.init(jnp.zeros((5, 5)))
    for i in range(4):
        updates, state = jax.jit(jax.vmap(tx.update))(stream[:, i], state)
        update, alone = tx.update(stream[0, i], alone)
        np.testing.assert_allclose(updates, [u[i] for u, _ in members], atol=1e-4)
        np.testing.assert_allclose(update, members[0][0][i], atol=1e-4)
