"""Any model: which leaves are matrices, sides too long for a factor, convolutions, scanned layers."""

import functools

import digits
import flax.linen as nn
import jax
import jax.numpy as jnp
import language_model as lm
import numpy as np
import optax
import pytest
from cases import gradients, rekls_states
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import mesh_of

from rekls_jax import MatrixDimensionNumbers, flax_dimension_numbers, rekls, scale_by_rekls, state_partition_specs


class Everything(nn.Module):
    """Of each kind of layer that Flax users have."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(50, 16)(tokens)
        x = x + self.param("pos_embedding", nn.initializers.zeros, (1, 5, 16))
        x = nn.LayerNorm()(nn.MultiHeadDotProductAttention(4)(x))
        layer = nn.scan(
            lambda dense, x, _: (dense(x), None), variable_axes={"params": 0}, split_rngs={"params": True}, length=3
        )
        x, _ = layer(nn.Dense(16, name="stack"), x, None)
        x = nn.Conv(16, (3,), feature_group_count=16, name="depthwise")(nn.Conv(16, (3,))(x))
        return x * self.param("gain", nn.initializers.ones, (3, 4, 2)).sum()


ATTENTION = "MultiHeadDotProductAttention_0"
ROUTES = {
    ("Embed_0", "embedding"): None,
    ("pos_embedding",): None,
    (ATTENTION, "query", "kernel"): ((0,), (1, 2)),
    (ATTENTION, "key", "kernel"): ((0,), (1, 2)),
    (ATTENTION, "value", "kernel"): ((0,), (1, 2)),
    (ATTENTION, "out", "kernel"): ((0, 1), (2,)),
    (ATTENTION, "query", "bias"): None,
    (ATTENTION, "key", "bias"): None,
    (ATTENTION, "value", "bias"): None,
    (ATTENTION, "out", "bias"): None,
    ("LayerNorm_0", "scale"): None,
    ("LayerNorm_0", "bias"): None,
    ("stack", "kernel"): ((1,), (2,)),
    ("stack", "bias"): None,
    ("Conv_0", "kernel"): ((0, 1), (2,)),
    ("Conv_0", "bias"): None,
    ("depthwise", "kernel"): None,
    ("depthwise", "bias"): None,
    ("gain",): None,
}


def test_the_routes_of_every_kind_of_layer():
    params = Everything().init(jax.random.key(0), jnp.zeros((2, 5), int))["params"]
    tree = flax_dimension_numbers(params, stacked=["stack"])
    found = jax.tree.leaves_with_path(tree, is_leaf=lambda x: x is None or isinstance(x, MatrixDimensionNumbers))
    assert {tuple(key.key for key in path): numbers for path, numbers in found} == ROUTES
    route = functools.partial(flax_dimension_numbers, stacked="stack")
    (state,) = rekls_states(rekls(0.1, dimension_numbers=route).init(params))
    assert state.L["stack"]["kernel"].shape == (3, 16, 16)
    assert state.L["Conv_0"]["kernel"].shape == (48, 48)
    assert state.R[ATTENTION]["query"]["kernel"].shape == (16, 16)


def test_the_routes_of_nnx_models():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.attention = nnx.MultiHeadAttention(4, 16, decode=False, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(16, 8, rngs=rngs), nnx.Conv(3, 8, (3, 3), rngs=rngs)])

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, rekls(0.1, dimension_numbers=flax_dimension_numbers), wrt=nnx.Param)
    before = nnx.state(model, nnx.Param)
    nnx.jit(lambda optimizer, model, G: optimizer.update(model, G))(optimizer, model, jax.tree.map(jnp.ones_like, before))
    (state,) = rekls_states(optimizer.opt_state)
    factors = {jax.tree_util.keystr(path).removesuffix(".value"): x.shape for path, x in jax.tree.leaves_with_path(state.L)}
    attention = {f"['attention']['{name}']['kernel']": (16, 16) for name in ("query", "key", "value", "out")}
    assert factors == {**attention, "['layers'][0]['kernel']": (16, 16), "['layers'][1]['kernel']": (27, 27)}


@pytest.mark.parametrize(
    ("params", "stacked", "kind", "text"),
    [
        ({"a": {"kernel": (3, 2)}}, "layers", ValueError, r"`stacked` must name modules of the params, got 'layers'"),
        ({"a": {"kernel": (3, 2)}}, [1], TypeError, r"`stacked` must be a string or a sequence of strings, got \[1\]"),
        (
            {"Dense_0": {"kernel": (4, 3, 2)}},
            (),
            ValueError,
            r"\['Dense_0'\]\['kernel'\] of shape \(4, 3, 2\) has more axes than a dense layer gives it, behind the 0 of",
        ),
        (
            {"layers": {"LayerNorm_0": {"scale": (2, 4, 3)}}},
            "layers",
            ValueError,
            r"\['scale'\] of shape \(2, 4, 3\) has more axes than a norm gives it, behind the 1 of `stacked`: name there",
        ),
    ],
)
def test_what_routing_refuses(params, stacked, kind, text):
    arrays = jax.tree.map(jnp.zeros, params, is_leaf=lambda x: isinstance(x, tuple))
    with pytest.raises(kind, match=text):
        flax_dimension_numbers(arrays, stacked)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_convolutional_network_learns_digits():
    assert digits.main(steps=60) > 0.95


@pytest.mark.exhaustive
@pytest.mark.slow
def test_a_scanned_transformer_learns():
    model = lm.Transformer(width=16, layers=3, heads=2, context=16, scan=True)
    text = np.frombuffer(b"the cat sat on the mat. " * 200, np.uint8)
    params = model.init(jax.random.key(0), np.zeros((1, 16), np.int32))
    tx = rekls(3e-2, dimension_numbers=lm.dimension_numbers)

    @jax.jit
    def step(params, state, tokens):
        loss, gradients = jax.value_and_grad(functools.partial(lm.loss, model))(params, tokens)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, rng = tx.init(params), np.random.default_rng(0)
    losses = []
    for _ in range(40):
        params, state, loss = step(params, state, lm.batch(text, 8, 16, rng))
        losses.append(float(loss))
    assert losses[0] > 5
    assert losses[-1] < 0.5
    (inner,) = rekls_states(state)
    layers = inner.R["params"]["layers"]
    assert {name: layers[name]["kernel"].shape for name in ("up", "down")} == {"up": (3, 64, 64), "down": (3, 16, 16)}


@pytest.mark.parametrize("spec", [None, P(None, "tp"), P()], ids=str)
def test_a_vocabulary_of_fifty_thousand_has_no_factor_and_the_step_little_memory(spec):
    mesh, leaf = mesh_of(8), jax.ShapeDtypeStruct((50257, 768), jnp.float32)
    tx = rekls(1e-3, param_specs=spec, mesh=None if spec is None else mesh)
    state = jax.eval_shape(tx.init, leaf)
    (inner,) = rekls_states(state)
    assert (inner.L.shape, inner.Q_L.shape, inner.eig_L.shape, inner.R.shape) == ((1, 1), (1, 1), (1,), (768, 768))
    arguments = (leaf, state, leaf)
    if spec is not None:
        specs = (spec, state_partition_specs(tx, leaf, spec), spec)
        put = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec))  # noqa: E731
        arguments = jax.tree.map(put, arguments, specs)
    memory = jax.jit(tx.update).lower(*arguments).compile().memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes <= 6 * leaf.size * leaf.dtype.itemsize  # a factor would have 65 times the leaf's


def test_both_sides_too_long_go_to_the_fallback():
    params = {"w": jnp.ones((6, 8)), "v": jnp.ones((6, 5))}
    state = rekls(0.1, max_precond_dim=5).init(params)
    (inner,) = rekls_states(state)
    assert isinstance(inner.L["w"], optax.MaskedNode)
    assert inner.R["v"].shape == (5, 5)
    with pytest.raises(ValueError, match=r"with a side of at most `max_precond_dim`, 5; got the parameter \['w'\] of shape"):
        scale_by_rekls(max_precond_dim=5).init(params)
    # A side counts as the whole array has it, inside `shard_map` too.
    mesh = mesh_of(4)
    tx = rekls(0.1, max_precond_dim=5, param_specs=P("tp"), mesh=mesh)
    inside = jax.shard_map(
        tx.init, mesh=mesh, in_specs=P("tp"), out_specs=state_partition_specs(tx, jnp.ones((8, 8)), P("tp"))
    )
    assert not jax.tree.leaves(rekls_states(jax.jit(inside)(jnp.ones((8, 8))))[0].L)


@pytest.mark.parametrize("numbers", [MatrixDimensionNumbers, optax.contrib.MuonDimensionNumbers])
def test_a_parameter_of_many_axes_is_the_matrices_it_is_seen_as(numbers):
    # Shape, its dimension numbers, and how to see it as (matrices, m, n).
    kinds = {
        "attention": ((6, 2, 5), numbers(0, (1, 2)), lambda x: x.reshape(1, 6, 10)),
        "out": ((2, 5, 6), numbers((0, 1), 2), lambda x: x.reshape(1, 10, 6)),
        "convolution": ((3, 3, 2, 5), numbers((0, 1, 2), 3), lambda x: x.reshape(1, 18, 5)),
        "layers": ((3, 4, 5), numbers(-2, -1), lambda x: x),
        "heads of layers": ((4, 2, 6, 3), numbers(2, (0, 3)), lambda x: x.transpose(1, 2, 0, 3).reshape(2, 6, 12)),
    }
    params = {name: jnp.zeros(shape) for name, (shape, _, _) in kinds.items()}
    views = {name: view for name, (_, _, view) in kinds.items()}
    tx = scale_by_rekls(eps=1e-3, dimension_numbers={name: given for name, (_, given, _) in kinds.items()})
    alone = scale_by_rekls(eps=1e-3)
    each = {name: list(view(params[name])) for name, view in views.items()}
    state, states = tx.init(params), alone.init(each)
    for i in range(4):
        G = {name: jnp.asarray(gradients(x.shape, 1, seed=i)[0]) for name, x in params.items()}
        updates, state = jax.jit(tx.update)(G, state)
        each, states = jax.jit(alone.update)({name: list(view(G[name])) for name, view in views.items()}, states)
        for name, view in views.items():
            np.testing.assert_allclose(view(updates[name]), np.stack(each[name]), atol=1e-4)
            np.testing.assert_allclose(
                state.L[name].reshape(len(each[name]), *states.L[name][0].shape), states.L[name], atol=1e-4
            )
