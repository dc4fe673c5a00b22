"""REKLS in a Flax training loop: a small classifier on two interleaved spirals.

python examples/quickstart.py
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

from rekls_jax import rekls


class Classifier(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        for width in (32, 32):
            x = nn.tanh(nn.Dense(width)(x))
        return nn.Dense(2)(x)


def spirals(points: int, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Points in the plane, (points, 2), and which of two arms each lies on, (points,)."""
    turn, noise = jax.random.split(key)
    t = jnp.sqrt(jax.random.uniform(turn, (points,), minval=0.05)) * 3 * jnp.pi
    arm = jnp.arange(points) % 2
    x = jnp.stack([jnp.cos(t + arm * jnp.pi), jnp.sin(t + arm * jnp.pi)], axis=1) * t[:, None] / 5
    return x + 0.05 * jax.random.normal(noise, x.shape), arm


@jax.jit
def train_step(state: TrainState, x: jax.Array, labels: jax.Array) -> tuple[TrainState, jax.Array]:
    def loss(params: optax.Params) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(state.apply_fn(params, x), labels).mean()

    value, gradients = jax.value_and_grad(loss)(state.params)
    return state.apply_gradients(grads=gradients), value


def main(steps: int = 400) -> float:
    """Train, and return the accuracy on points not seen in training."""
    model = Classifier()
    x, labels = spirals(512, jax.random.key(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 0.03, 20, steps)
    tx = optax.chain(optax.clip_by_global_norm(1.0), rekls(schedule))
    state = TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(1), x), tx=tx)
    for step in range(1, steps + 1):
        state, loss = train_step(state, x, labels)
        if step % 100 == 0:
            print(f"step {step}: loss {loss:.4f}")
    x, labels = spirals(512, jax.random.key(2))
    return float(jnp.mean(state.apply_fn(state.params, x).argmax(-1) == labels))


if __name__ == "__main__":
    print(f"accuracy on new points: {main():.3f}")
