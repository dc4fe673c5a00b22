"""Thousands of steps: nothing drifts, nothing grows, nothing is compiled twice."""

import gc

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import gradients, rekls_states, rms
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import FEW, LAYOUTS, mesh_of

from rekls_jax import rekls

# On one device nothing is divided; "replicated" and "odd" have factors that every device holds whole.
RUNS = [
    pytest.param(("rows", "odd", "bias"), 1, 10_000, id="one device, 10,000 steps"),
    pytest.param(("odd", "replicated"), 8, 100, id="eight devices, 100 steps", marks=pytest.mark.slow),
    pytest.param(FEW, 8, 10_000, id="eight devices, 10,000 steps", marks=[pytest.mark.slow, pytest.mark.exhaustive]),
]


@pytest.mark.parametrize(("names", "devices", "steps"), RUNS)
def test_a_long_run(names, devices, steps):
    """Down to a target through noise, at a learning rate that falls to a hundredth, decay along the way."""
    mesh, specs = mesh_of(devices), {name: LAYOUTS[name][1] for name in names}
    schedule = optax.cosine_decay_schedule(0.03, steps, alpha=0.01)
    tx = rekls(schedule, weight_decay=1e-3, param_specs=specs, mesh=mesh)
    target = {name: jnp.asarray(gradients(LAYOUTS[name][0], 1, seed=i)[0]) for i, name in enumerate(names)}
    compiled = []

    @jax.jit
    def step(params, state, key):
        compiled.append(key)
        keys = dict(zip(names, jax.random.split(key, len(names)), strict=True))
        G = {name: params[name] - target[name] + jax.random.normal(keys[name], target[name].shape) for name in names}
        updates, state = tx.update(G, state, params)
        return optax.apply_updates(params, updates), state

    shardings = {name: NamedSharding(mesh, spec) for name, spec in specs.items()}
    params = jax.device_put(jax.tree.map(jnp.zeros_like, target), shardings)
    state, key = jax.jit(tx.init)(params), jax.random.key(0)
    alive = []
    for i in range(1, steps + 1):
        params, state = step(params, state, jax.random.fold_in(key, i))
        if i % (steps // 10) == 0:
            gc.collect()
            alive.append(sum(x.nbytes for x in jax.live_arrays()))
            check(params, state, i)
    assert len(compiled) == 1
    assert len(set(alive)) == 1, "bytes of the arrays that are alive"
    if steps == 10_000:
        assert all(rms(params[name] - target[name]) < 0.05 for name in names)


def check(params, state, steps):
    (ours,) = rekls_states(state)
    assert int(ours.count) == steps
    for leaf in jax.tree.leaves((params, state)):
        assert np.isfinite(leaf).all()
        same_on_all_devices(leaf)
    for factors, bases in ((ours.L, ours.Q_L), (ours.R, ours.Q_R)):
        for S, Q in zip(*map(jax.tree.leaves, (factors, bases)), strict=True):
            S, Q = np.asarray(S), np.asarray(Q, np.float64)
            np.testing.assert_array_equal(S, S.swapaxes(-1, -2))
            assert np.abs(Q.swapaxes(-1, -2) @ Q - np.eye(Q.shape[-1])).max() < 1e-4
    assert all((leaf >= 0).all() for leaf in jax.tree.leaves(ours.nu))
    assert not any(np.any(leaf) for leaf in jax.tree.leaves(ours.eigh_failures))


def same_on_all_devices(leaf):
    """Copies of one part are equal, bit for bit."""
    copies: dict[str, list[np.ndarray]] = {}
    for shard in leaf.addressable_shards:
        copies.setdefault(str(shard.index), []).append(np.asarray(shard.data))
    for first, *others in copies.values():
        for other in others:
            np.testing.assert_array_equal(other, first)


def test_copies_that_differ_are_told_from_equal_ones():
    mesh = mesh_of(2)
    leaf = jax.make_array_from_single_device_arrays(
        (3,), NamedSharding(mesh, P()), [jax.device_put(jnp.full(3, i), d) for i, d in enumerate(mesh.devices.flat)]
    )
    with pytest.raises(AssertionError):
        same_on_all_devices(leaf)
