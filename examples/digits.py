"""REKLS on a convolutional network: scikit-learn's handwritten digits, 8 x 8 grey images.

python examples/digits.py

`flax_dimension_numbers` routes the parameters: kernels are matrices (height · width · in) x out; biases, norms and depthwise
kernels go to the fallback.
"""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from sklearn.datasets import load_digits

from rekls_jax import MatrixDimensionNumbers, flax_dimension_numbers, rekls


class ConvNet(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, 8, 8, 1) -> logits (batch, 10)
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.Conv(16, (3, 3), feature_group_count=16, name="depthwise")(x)
        x = nn.relu(nn.LayerNorm()(nn.Conv(32, (3, 3), strides=2)(x)))
        return nn.Dense(10)(x.reshape(len(x), -1))


def data() -> tuple[np.ndarray, np.ndarray]:
    """Images (1797, 8, 8, 1) from 0 to 1, and digits (1797,), shuffled."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return images[order].reshape(-1, 8, 8, 1).astype(np.float32) / 16, labels[order].astype(np.int32)


def main(steps: int = 200, batch_size: int = 128) -> float:
    """Train on 1500 images, and return the accuracy on the other 297."""
    images, labels = data()
    model = ConvNet()
    params = model.init(jax.random.key(0), images[:1])
    numbers = flax_dimension_numbers(params)
    routes = dict(jax.tree.leaves_with_path(numbers, is_leaf=lambda x: isinstance(x, MatrixDimensionNumbers)))
    for path, _ in jax.tree.leaves_with_path(params):
        print(jax.tree_util.keystr(path, simple=True, separator="/"), routes.get(path, "fallback"))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 1e-2, steps // 10, steps)
    tx = rekls(schedule, dimension_numbers=flax_dimension_numbers)

    def loss(params: optax.Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return optax.softmax_cross_entropy_with_integer_labels(model.apply(params, x), y).mean()

    @jax.jit
    def step(
        params: optax.Params, state: optax.OptState, x: jax.Array, y: jax.Array
    ) -> tuple[optax.Params, optax.OptState, jax.Array]:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    state = tx.init(params)
    rng = np.random.default_rng(0)
    for taken in range(1, steps + 1):
        chosen = rng.integers(0, 1500, batch_size)
        params, state, value = step(params, state, images[chosen], labels[chosen])
        if taken % (steps // 5) == 0:
            print(f"step {taken}: loss {value:.4f}")
    return float(jnp.mean(jnp.asarray(model.apply(params, images[1500:])).argmax(-1) == labels[1500:]))


if __name__ == "__main__":
    print(f"accuracy on images not seen in training: {main():.3f}")
