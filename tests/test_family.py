"""The options beside the default: SOAP and KL-SOAP, sides too long for a factor, turns, momentum, clipping."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from cases import gradients, rekls_states, rms, run
from numpy_reference import NumpyRekls, eigh_descending

from rekls_jax import Eigh, Numerics, OrthogonalIteration, rekls, scale_by_rekls

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
    """With factors of full rank and their bases. After fewer gradients than it takes, null directions are anyone's choice."""
    m, n = reference.mu.shape
    reference.t, (G, H) = 21, gradients((max(m, n),) * 2, 2, seed=9).astype(np.float64)
    factors = {"L": (G @ G.T)[:m, :m], "R": (H @ H.T)[:n, :n]}
    for name, S in (item for item, present in zip(factors.items(), reference.both, strict=True) if present):
        eig, Q = eigh_descending(S)
        setattr(reference, name, S), setattr(reference, f"eig_{name}", eig), setattr(reference, f"Q_{name}", Q)
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
