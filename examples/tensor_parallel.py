"""REKLS on a mesh, data parallel and tensor parallel, in two forms: your own `shard_map`, and `jit`.

python examples/tensor_parallel.py      # on the devices there are, or eight that the CPU plays
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from rekls_jax import rekls, state_partition_specs

SPECS, BATCH = {"up": P(None, "tensor"), "down": P("tensor", None)}, P("data")  # how parameters and data lie
Moved = tuple[optax.Params, optax.OptState, jax.Array]


def init_params() -> optax.Params:
    up, down = jax.random.split(jax.random.key(0))
    return {"up": jax.random.normal(up, (16, 32)) / 4, "down": jax.random.normal(down, (32, 8)) / 6}


def batch(step: int) -> tuple[jax.Array, jax.Array]:
    x = jax.random.normal(jax.random.key(step), (64, 16))
    return x, jnp.tanh(x[:, :8] + x[:, 8:])


def global_norm(parts: optax.Params, specs: dict[str, P]) -> jax.Array:
    """Inside `shard_map`, of whole arrays; `optax.clip_by_global_norm` takes the norm of each device's part."""
    return jnp.sqrt(sum(jax.lax.psum(jnp.sum(G**2), [a for a in specs[name] if a]) for name, G in parts.items()))


def with_shard_map(mesh: Mesh, steps: int, max_norm: float = 1.0) -> list[float]:
    """Every array that the code sees is a device's part; what must be the same on several devices is made so."""
    tx = rekls(0.02, param_specs=SPECS, mesh=mesh)
    params = init_params()
    state_specs = state_partition_specs(tx, params, SPECS)

    def loss(params: optax.Params, x: jax.Array, y: jax.Array) -> jax.Array:
        out = jax.lax.psum(jnp.tanh(x @ params["up"]) @ params["down"], "tensor")
        return jax.lax.pmean(jnp.mean((out - y) ** 2), "data")  # also averages the gradient

    def step(params: optax.Params, state: optax.OptState, x: jax.Array, y: jax.Array) -> Moved:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        norm = global_norm(gradients, SPECS)
        gradients = jax.tree.map(lambda G: G * jnp.minimum(1, max_norm / norm), gradients)
        updates, new_state = tx.update(gradients, state, params)
        moved = optax.apply_updates(params, updates), new_state
        # A NaN on one device is in everybody's norm: all skip the step, or none. (`optax.apply_if_finite` would ask each.)
        kept = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(norm), new, old), moved, (params, state))
        return *kept, value

    both = (SPECS, state_specs)
    init = jax.shard_map(tx.init, mesh=mesh, in_specs=(SPECS,), out_specs=state_specs)
    step = jax.shard_map(step, mesh=mesh, in_specs=(*both, BATCH, BATCH), out_specs=(*both, P()))
    return train(params, jax.jit(init)(params), jax.jit(step), steps)


def with_jit(mesh: Mesh, steps: int, max_norm: float = 1.0) -> list[float]:
    """Every array that the code sees is whole, and the compiler divides the model. optax's wrappers just work."""
    tx = optax.chain(optax.clip_by_global_norm(max_norm), rekls(0.02, param_specs=SPECS, mesh=mesh))
    tx = optax.apply_if_finite(tx, max_consecutive_errors=5)

    def loss(params: optax.Params, x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.mean((jnp.tanh(x @ params["up"]) @ params["down"] - y) ** 2)

    def step(params: optax.Params, state: optax.OptState, x: jax.Array, y: jax.Array) -> Moved:
        value, gradients = jax.value_and_grad(loss)(params, x, y)
        updates, state = tx.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    params = jax.device_put(init_params(), {name: NamedSharding(mesh, spec) for name, spec in SPECS.items()})
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_partition_specs(tx, params, SPECS))
    return train(params, jax.jit(tx.init, out_shardings=shardings)(params), jax.jit(step), steps)


def train(params: optax.Params, state: optax.OptState, step: Callable[..., Moved], steps: int) -> list[float]:
    losses = []
    for i in range(steps):
        params, state, value = step(params, state, *batch(i))
        losses.append(float(value))
    return losses


def main(steps: int = 100) -> tuple[list[float], list[float]]:
    devices = np.array(jax.devices())
    mesh = Mesh(devices.reshape(-1, 4 if devices.size % 4 == 0 else 1), ("data", "tensor"))
    print(f"mesh {dict(mesh.shape)}")
    curves = with_shard_map(mesh, steps), with_jit(mesh, steps)
    for i, (mine, theirs) in list(enumerate(zip(*curves, strict=True)))[::20]:
        print(f"step {i:3}: loss {mine:.4f} in shard_map, {theirs:.4f} under jit")
    return curves


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 8)  # where there is nothing but a CPU, it plays eight
    main()
