"""On many devices the step is that of one device, however parameters lie and whoever opens the `shard_map`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tensor_parallel
from cases import assert_same, gradients, rekls_states, rms
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import EVERY, FEW, MODES, OWNED, Problem, descend, entered, largest_difference, mesh_of

from rekls_jax import (
    REFERENCE,
    MatrixDimensionNumbers,
    Numerics,
    OrthogonalIteration,
    rekls,
    scale_by_rekls,
    state_partition_specs,
)


@functools.cache
def problem_and_answer(names=tuple(EVERY), dtype="float32", **options):
    problem = Problem(names, dtype, **options)
    return problem, jax.tree.map(np.asarray, problem.one_device())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "placement"),
    [
        pytest.param("auto", "split", marks=pytest.mark.exhaustive),
        ("shard_map", "split"),
        pytest.param("explicit", "split", marks=pytest.mark.exhaustive),
        pytest.param("shard_map", "replicated", marks=pytest.mark.exhaustive),
    ],
)
def test_every_layout_equals_one_device(mode, placement):
    with jax.enable_x64(True):
        problem, (params, state) = problem_and_answer(dtype="float64", eps=1e-2)
        got = problem.many(mode, eigh_placement=placement)
        assert largest_difference(got[0], params) < 1e-9
        # Eigenvectors have the sign that LAPACK gave them, on one device as on many; V and L do not depend on it.
        (got_state,), (state,) = rekls_states(got[1]), rekls_states(state)
        for field in ("mu", "nu", "L", "R", "eig_L", "eig_R"):
            assert largest_difference(getattr(got_state, field), getattr(state, field)) < 1e-9, field


OPTIONS = {
    "laprop": {"inner": "laprop", "weight_decay": 0.1, "weight_decay_method": "l2", "eps": 1e-2},
    "reference": {"numerics": REFERENCE, "eps": 1e-2},
}


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("mode", "option"), [("explicit", "laprop"), ("shard_map", "reference")])
def test_options_equal_one_device(mode, option):
    with jax.enable_x64(True):
        problem, (params, _) = problem_and_answer(tuple(FEW), "float64", **OPTIONS[option])
        assert largest_difference(problem.many(mode)[0], params) < 1e-9


FAMILY = {
    "KL-SOAP in turns, one side": {
        "eigenbasis": OrthogonalIteration(),
        "precondition_frequency": 2,
        "max_precond_dim": 40,
        "max_update_rms": 0.3,
        "nesterov": True,
    },
    "SOAP": {
        "eigenbasis": OrthogonalIteration(2),
        "factors": "plain",
        "numerics": Numerics(carry_second_moment=False),
    },
    "in turns": {"precondition_frequency": 3, "inner": "laprop", "nesterov": True},
}


@functools.cache
def warm_problem_and_answer(option):
    # A parameter of 96 x 200 takes three steps to have factors of full rank.
    problem = Problem(EVERY, "float64", steps=8, eps=1e-2, **FAMILY[option]).warm()
    return problem, jax.tree.map(np.asarray, problem.one_device())


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("option", FAMILY)
@pytest.mark.parametrize(("mode", "placement"), [*((mode, "split") for mode in MODES), ("auto", "replicated")])
def test_the_family_equals_one_device(option, mode, placement):
    with jax.enable_x64(True):
        problem, (params, state) = warm_problem_and_answer(option)
        got = problem.many(mode, eigh_placement=placement)
        assert largest_difference(got[0], params) < 1e-9
        (got_state,), (state,) = rekls_states(got[1]), rekls_states(state)
        for field in ("mu", "L", "R", "eig_L", "eig_R"):
            assert largest_difference(getattr(got_state, field), getattr(state, field)) < 1e-9, field


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mode", "option", "names"),
    [
        ("shard_map", "KL-SOAP in turns, one side", ["owned", "stack"]),
        pytest.param("shard_map", "KL-SOAP in turns, one side", OWNED, marks=pytest.mark.exhaustive),
        pytest.param("auto", "laprop", OWNED, marks=pytest.mark.exhaustive),
        pytest.param("explicit", "", OWNED, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
def test_matrices_at_their_owners_equal_one_device(mode, option, names):
    options = {"eps": 1e-2, **(OPTIONS | FAMILY).get(option, {})}
    with jax.enable_x64(True):
        problem = Problem(names, "float64", steps=8, **options).warm()
        params, _ = problem.one_device()
        assert largest_difference(problem.many(mode)[0], params) < 1e-9


@pytest.mark.parametrize("number", [4, 5])
def test_matrices_of_one_owner_take_turns(number):
    # Two and more for each of two devices, some turns with none of an owner's: nothing may happen to those that wait.
    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("tp",)), P(None, "tp")
    tx = functools.partial(scale_by_rekls, eps=1e-2, dimension_numbers=MatrixDimensionNumbers(1, 2))
    with jax.enable_x64(True):
        stream = [jnp.asarray(gradients((number, 8, 8), 1, seed=i)[0], jnp.float64) for i in range(8)]
        warm, one = tx(), tx(precondition_frequency=3)
        many = tx(precondition_frequency=3, param_specs=spec, mesh=mesh)
        _, state = descend(warm.update, stream[0], warm.init(stream[0]), stream[:4])
        shardings = jax.tree.map(lambda s: NamedSharding(mesh, s), state_partition_specs(many, stream[0], spec))
        expected = descend(one.update, stream[0], state, stream[4:])
        got = descend(many.update, stream[0], jax.device_put(state, shardings), stream[4:])
        for field in ("mu", "nu", "L", "eig_L", "eig_R"):
            assert largest_difference(getattr(got[1], field), getattr(expected[1], field)) < 1e-9, field


def test_the_step_can_be_differentiated_where_a_devices_part_is_zero():
    mesh, stream = Mesh(np.array(jax.devices()[:2]), ("tp",)), jnp.asarray(gradients((6, 4), 4))
    slopes = []
    for placed in (scale_by_rekls, functools.partial(scale_by_rekls, param_specs=P("tp"), mesh=mesh)):
        tx = placed(eps=1e-2)
        _, state = descend(tx.update, stream[0], tx.init(stream[0]), list(stream))
        slope = jax.grad(lambda G, tx=tx, state=state: jnp.sum(tx.update(G, state)[0] ** 2))
        slopes.append(jax.jit(slope)(stream[0].at[:3].set(0)))
    assert np.isfinite(slopes[1]).all()
    np.testing.assert_allclose(slopes[1], slopes[0], rtol=0, atol=1e-3 * np.abs(slopes[0]).max())


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_work_may_be_divided_over_axes_in_any_order():
    with jax.enable_x64(True):
        problem, (params, _) = problem_and_answer(tuple(FEW), "float64", eps=1e-2)
        assert largest_difference(problem.many("auto", eigh_axes=("tp", "data"))[0], params) < 1e-9


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize(("devices", "mode"), [(1, "explicit"), (2, "shard_map"), (4, "auto")])
def test_any_number_of_devices_equals_one(devices, mode):
    with jax.enable_x64(True):
        problem, (params, _) = problem_and_answer(tuple(FEW), "float64", eps=1e-2)
        assert largest_difference(problem.many(mode, devices)[0], params) < 1e-9


@pytest.mark.exhaustive
@pytest.mark.slow
def test_float32_from_a_cold_start():
    # Off the diagonal the first update is round-off over (round-off + floor): on one device a gradient that differs by one
    # unit in the last place moves parameters by up to 2.9 % of the largest move, 0.6 % in the root mean square.
    problem, (params, _) = problem_and_answer(("rows", "columns", "replicated"), steps=5)
    got, _ = problem.many("auto")
    for name in params:
        move = np.abs(params[name] - problem.params[name]).max()
        assert rms(got[name] - params[name]) < 1e-2 * move
        assert largest_difference(got[name], params[name]) < 3e-2 * move


@pytest.mark.exhaustive
@pytest.mark.slow
def test_bfloat16_parameters():
    problem, (params, _) = problem_and_answer(tuple(FEW), "bfloat16")
    got, state = problem.many("explicit")
    assert largest_difference(got, params) <= 2.0**-6  # one unit in the last place of 2 to 4
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(got)} == {"bfloat16"}
    (state,) = rekls_states(state)
    assert {str(leaf.dtype) for leaf in jax.tree.leaves(state)} == {"float32", "int32"}


@pytest.mark.slow
@pytest.mark.parametrize("devices", [2, *(pytest.param(n, marks=pytest.mark.exhaustive) for n in (8, 4, 1))])
def test_replicated_equals_one_device_bit_for_bit(devices):
    # Op by op every one is compiled alone: the large ones, and five steps, on request.
    few = devices == 2
    problem, answer = op_by_op(
        ("rows", "replicated") if few else ("rows", "columns", "tall", "wide", "replicated"), 2 if few else 5
    )
    assert_same(problem.many("auto", devices, jit=False, eigh_placement="replicated"), answer)


@functools.cache
def op_by_op(names, steps):
    problem = Problem(names, numerics=REFERENCE, steps=steps)
    return problem, jax.tree.map(np.asarray, problem.one_device(jit=False))


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("mode", MODES)
def test_replicated_equals_one_device_under_jit(mode):
    problem, (params, _) = problem_and_answer(("rows", "columns"), numerics=REFERENCE, eps=1e-2)
    got, _ = problem.many(mode, eigh_placement="replicated")
    assert largest_difference(got, params) <= 1e-6 * max(np.abs(x).max() for x in jax.tree.leaves(params))


@pytest.mark.exhaustive
@pytest.mark.slow
def test_one_optimizer_inside_and_outside():
    problem, (params, _) = problem_and_answer(("rows", "stack"), eps=1e-2, steps=3)
    mesh = mesh_of(8)
    tx = rekls(0.1, param_specs=problem.specs, mesh=mesh, **problem.options)
    specs = state_partition_specs(tx, problem.params, problem.specs)
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    inside = jax.shard_map(
        lambda G, state, params: tx.update(G, state, params),
        mesh=mesh,
        in_specs=(problem.specs, specs, problem.specs),
        out_specs=(problem.specs, specs),
    )
    got, state = problem.params, jax.jit(tx.init, out_shardings=shardings)(problem.params)
    for G, update in zip(problem.stream, [tx.update, inside, tx.update], strict=True):
        updates, state = jax.jit(update, out_shardings=(None, shardings))(G, state, got)
        got = optax.apply_updates(got, updates)
    assert largest_difference(got, params) < 1e-3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_loop_over_steps_inside_shard_map():
    problem, (params, _) = problem_and_answer(("rows", "replicated"), eps=1e-2)
    tx = rekls(0.1, param_specs=problem.specs, **problem.options)

    def train(params, stream):
        def step(carry, G):
            updates, state = tx.update(G, carry[1], carry[0])
            return (optax.apply_updates(carry[0], updates), state), None

        return jax.lax.scan(step, (params, tx.init(params)), stream)[0][0]

    stream = jax.tree.map(lambda *G: jnp.stack(G), *problem.stream)
    stacked = jax.tree.map(lambda spec: P(None, *spec), problem.specs)
    train = jax.shard_map(train, mesh=mesh_of(8), in_specs=(problem.specs, stacked), out_specs=problem.specs)
    assert largest_difference(jax.jit(train)(problem.params, stream), params) < 1e-3


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_two_forms_of_the_example_learn_alike():
    in_shard_map, under_jit = tensor_parallel.main(steps=25)
    np.testing.assert_allclose(in_shard_map, under_jit, rtol=0.05)
    assert in_shard_map[-1] < 0.3 * in_shard_map[0]


def on_eight_shards(function, *arrays):
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    return jax.jit(jax.shard_map(function, mesh=mesh, in_specs=P("tp"), out_specs=(P("tp"), P())))(*arrays)


def test_clipping_by_the_norm_of_the_whole():
    def clipped(G):
        norm = tensor_parallel.global_norm({"w": G}, {"w": P("tp")})
        return G * jnp.minimum(1, 1 / norm), norm

    G = jax.random.normal(jax.random.key(0), (16, 24))
    got, norm = on_eight_shards(clipped, G)
    assert float(norm) == pytest.approx(float(jnp.linalg.norm(G)))
    assert float(jnp.linalg.norm(got)) == pytest.approx(1.0)
    # What it is there for: each part is clipped to norm 1, the whole to the square root of 8.
    clip = optax.clip_by_global_norm(1.0)
    parts, _ = on_eight_shards(lambda G: (clip.update(G, clip.init(G))[0], 0), G)
    assert float(jnp.linalg.norm(parts)) == pytest.approx(8**0.5)


def test_a_nan_on_one_device_makes_all_skip_the_step():
    mesh = Mesh(np.array(jax.devices()), ("tp",))
    tx, params = rekls(0.1, param_specs=P("tp"), mesh=mesh), {"w": jnp.ones((16, 24))}
    specs = ({"w": P("tp")}, state_partition_specs(tx, params, P("tp")))

    def step(G, params, state):
        sound = jnp.isfinite(tensor_parallel.global_norm(G, specs[0]))
        updates, moved = tx.update(G, state, params)
        moved = optax.apply_updates(params, updates), moved
        return jax.tree.map(lambda new, old: jnp.where(sound, new, old), moved, (params, state))

    step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs[0], *specs), out_specs=specs))
    before = step({"w": jax.random.normal(jax.random.key(0), (16, 24))}, params, tx.init(params))
    assert_same(step({"w": jnp.ones((16, 24)).at[13, 5].set(jnp.nan)}, *before), before)


@pytest.mark.exhaustive
@pytest.mark.slow
@pytest.mark.parametrize("spec", [P("data", "tp"), P("tp"), P(None, "tp")], ids=str)
def test_rows_and_columns_without_gradient_stay_put(spec):
    tx = scale_by_rekls(param_specs=spec, mesh=mesh_of(8))
    G = jax.random.normal(jax.random.key(0), (16, 24)).at[13].set(0).at[:, 5].set(0)
    state, update = tx.init({"w": G}), jax.jit(tx.update)
    for _ in range(2):
        updates, state = update({"w": G}, state)
    assert_same(np.asarray(updates["w"]) == 0, np.asarray(G) == 0)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_decomposition_that_fails_on_one_device(monkeypatch):
    tx = scale_by_rekls(param_specs=P("tp"), mesh=mesh_of(8))
    params = {name: jax.random.normal(jax.random.key(i), (16, 24)) for i, name in enumerate("ab")}
    _, before = jax.jit(tx.update)(params, tx.init(params))
    eigh = jnp.linalg.eigh

    def fails_on_the_first_device(S, **options):
        # Of the four factors of size 24 and 16, the first of size 24, R of "a", is the first device's.
        first = (jax.lax.axis_index(("data", "tp")) == 0) & (len(S) == 24)
        return jax.tree.map(lambda x: jnp.where(first, jnp.nan, x), tuple(eigh(S, **options)))

    monkeypatch.setattr(jnp.linalg, "eigh", fails_on_the_first_device)
    jax.clear_caches()  # of functions that were traced with the other `eigh`
    updates, after = jax.jit(lambda G, state: tx.update(G, state))(params, before)
    monkeypatch.undo()
    jax.clear_caches()
    assert {name: int(n) for name, n in after.eigh_failures.items()} == {"a": 1, "b": 0}
    np.testing.assert_array_equal(after.Q_R["a"], before.Q_R["a"])
    np.testing.assert_array_equal(after.eig_R["a"], before.eig_R["a"])
    for field, name in (("Q_L", "a"), ("Q_L", "b"), ("Q_R", "b")):
        assert np.any(np.asarray(getattr(after, field)[name]) != np.asarray(getattr(before, field)[name]))
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves((updates, after)))


def test_injected_hyperparameters_on_explicit_axes():
    with entered("explicit"):
        params = {"w": jax.device_put(jax.random.normal(jax.random.key(0), (16, 24)), P("tp"))}
        tx = optax.inject_hyperparams(rekls)(0.1, b1=optax.constant_schedule(0.8), eps=1e-2)
        state, step = tx.init(params), jax.jit(tx.update)
        for _ in range(2):
            updates, state = step(params, state, params)
    alone, params = rekls(0.1, b1=0.8, eps=1e-2), jax.tree.map(np.asarray, params)
    state, step = alone.init(params), jax.jit(alone.update)
    for _ in range(2):
        expected, state = step(params, state, params)
    assert rms(updates["w"] - expected["w"]) < 1e-2 * rms(expected["w"])


@pytest.mark.parametrize(
    "options",
    [{}, pytest.param(FAMILY["KL-SOAP in turns, one side"], marks=[pytest.mark.slow, pytest.mark.exhaustive])],
    ids=["default", "family"],
)
def test_an_ensemble_on_many_devices_comes_back(options):
    # A batch of decompositions, here of the ensemble, would hang: see `_eigh_split`.
    numbers = MatrixDimensionNumbers(1, 2)
    tx = scale_by_rekls(dimension_numbers=numbers, param_specs=P(None, "tp"), mesh=mesh_of(8), eps=1e-2, **options)
    G = jax.random.normal(jax.random.key(0), (4, 12, 32, 32))
    updates = jax.jit(jax.vmap(lambda G: tx.update(G, tx.init(G))[0]))(G)
    alone = jax.jit(lambda G: tx.update(G, tx.init(G))[0])(G[1])
    assert rms(updates[1] - alone) < 5e-3 * rms(alone)
