"""The same answer however the step is run: with jit or without, in a scan, over an ensemble, with its arguments donated."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from cases import EPS, NUMERICS, PARAMS, ROUND_OFF, STREAM, assert_same, descend, rekls_states, structure
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import entered

from rekls_jax import rekls


@pytest.mark.slow
@pytest.mark.parametrize("numerics", NUMERICS.values(), ids=NUMERICS.keys())
@pytest.mark.parametrize("inner", ["adam", "laprop"])
def test_jit_agrees_with_no_jit(inner, numerics):
    tx = rekls(0.1, inner=inner, numerics=numerics)
    params, state = PARAMS, tx.init(PARAMS)
    # From step 8 on: with the reference's numerics the steps before are round-off, which XLA's fusion changes.
    params, state = descend(tx, params, STREAM, state)
    G = jax.tree.map(lambda g: jnp.asarray(g[-1]), STREAM)
    compiled, compiled_state = jax.jit(tx.update)(G, state, params)
    with jax.disable_jit():
        plain, plain_state = tx.update(G, state, params)
    assert_same(compiled, plain, atol=2e-5)
    (a,), (b,) = rekls_states(compiled_state), rekls_states(plain_state)
    for field in ("mu", "L", "R", "eig_L", "eig_R"):
        scale = max(float(np.abs(leaf).max()) for leaf in jax.tree.leaves(getattr(b, field)))
        assert_same(getattr(a, field), getattr(b, field), atol=1e-5 * scale)


def test_scan_agrees_with_a_loop():
    tx = rekls(0.1, eps=EPS)
    expected, expected_state = descend(tx, PARAMS, STREAM)

    def step(carry, G):
        params, state = carry
        updates, state = tx.update(G, state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, state), _ = jax.lax.scan(step, (PARAMS, tx.init(PARAMS)), jax.tree.map(jnp.asarray, STREAM))
    assert_same(params, expected, atol=ROUND_OFF)
    assert structure(state) == structure(expected_state)


def test_vmap_over_an_ensemble_agrees_with_each_member():
    tx = rekls(0.1, eps=EPS)
    members = [jax.tree.map(lambda p, s=s: p * s, PARAMS) for s in (0.5, 1.0, 2.0)]
    streams = [jax.tree.map(lambda g, s=s: np.roll(g, s, axis=0), STREAM) for s in range(3)]
    params = jax.tree.map(lambda *leaves: jnp.stack(leaves), *members)
    state = jax.vmap(tx.init)(params)
    update = jax.jit(jax.vmap(tx.update))
    for i in range(6):
        G = jax.tree.map(lambda *leaves: jnp.stack([leaf[i] for leaf in leaves]), *streams)  # noqa: B023
        updates, state = update(G, state, params)
        params = optax.apply_updates(params, updates)
    for k, (member, stream) in enumerate(zip(members, streams, strict=True)):
        expected, _ = descend(tx, member, jax.tree.map(lambda g: g[:6], stream))
        assert_same(jax.tree.map(lambda p: p[k], params), expected, atol=ROUND_OFF)  # noqa: B023


@pytest.mark.parametrize("mode", ["one device", "auto", "explicit"])
def test_params_and_state_can_be_donated_right_after_init(mode):
    spec = P() if mode == "one device" else P("tp")
    with entered(mode, 1 if mode == "one device" else 8) as mesh:
        tx = rekls(0.1) if mode == "explicit" else rekls(0.1, param_specs=spec, mesh=mesh)

        def train(donated):
            params = {"square": jnp.ones((16, 16)), "wide": jnp.ones((4, 6)), "b": jnp.ones(4)}
            params = jax.device_put(params, NamedSharding(mesh, spec))

            def step(params, state):
                updates, state = tx.update(jax.tree.map(jnp.sin, params), state, params)
                return optax.apply_updates(params, updates), state

            step, state = jax.jit(step, donate_argnums=donated), tx.init(params)
            for _ in range(2):
                given, (params, state) = params, step(params, state)
            assert [leaf.is_deleted() for leaf in jax.tree.leaves(given)] == 3 * [bool(donated)]
            return params, state

        assert_same(train((0, 1)), train(()))
