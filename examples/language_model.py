"""A byte-level transformer in Flax and the text it reads: what `train_lm.py` trains."""

import sysconfig
from pathlib import Path
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from rekls_jax import flax_dimension_numbers

VOCABULARY = 256
MOST_BYTES = 16_000_000


class Block(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:  # (batch, length, width)
        *batch, width = x.shape
        h = nn.LayerNorm()(x)
        query, key, value = (
            nn.Dense(width, use_bias=False, name=name)(h).reshape(*batch, self.heads, width // self.heads)
            for name in ("query", "key", "value")
        )
        attended = jax.nn.dot_product_attention(query, key, value, is_causal=True)
        x = x + nn.Dense(width, use_bias=False, name="out")(attended.reshape(x.shape))
        h = nn.gelu(nn.Dense(4 * width, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dense(width, name="down")(h)


class Transformer(nn.Module):
    width: int
    layers: int
    heads: int
    context: int
    scan: bool = False  # compile one block, and stack the parameters of all under "layers"

    @nn.compact
    def __call__(self, tokens: jax.Array) -> jax.Array:  # (batch, length) int -> logits (batch, length, 256)
        x = nn.Embed(VOCABULARY, self.width)(tokens)
        x = x + nn.Embed(self.context, self.width)(jnp.arange(tokens.shape[1])[None])
        if self.scan:
            scan = nn.scan(
                lambda block, x, _: (block(x), None),
                variable_axes={"params": 0},
                split_rngs={"params": True},
                length=self.layers,
            )
            x, _ = scan(Block(self.heads, name="layers"), x, None)
        else:
            for _ in range(self.layers):
                x = Block(self.heads)(x)
        return nn.Dense(VOCABULARY, use_bias=False)(nn.LayerNorm()(x))


def loss(model: Transformer, params: optax.Params, tokens: jax.Array) -> jax.Array:
    """Mean loss in nats per byte of predicting each of `tokens` (batch, length) but the first from those before it."""
    logits = model.apply(params, tokens[:, :-1])
    return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()


def param_specs(params: optax.Params) -> optax.Params:
    """How the parameters lie on a mesh (data, tensor): a layer that widens is divided by columns, the next one by rows."""

    def spec(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.Array) -> P:
        *modules, layer, _ = (key.key for key in path)
        stack = (None,) if "layers" in modules else ()
        if leaf.ndim - len(stack) == 1:
            return P(*stack, "tensor") if layer == "up" else P()
        return P(*stack, "tensor", None) if layer in ("out", "down") else P(*stack, None, "tensor")

    return jax.tree.map_with_path(spec, params)


def dimension_numbers(params: optax.Params) -> Any:
    """Embeddings, norms and biases go to the fallback."""
    return flax_dimension_numbers(params, stacked="layers" if "layers" in params["params"] else ())


def standard_library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def read_text(source: Path | None) -> np.ndarray:
    """The bytes of a file, of every text file below a folder, or of the standard library's top-level modules."""
    if source is None:
        files = sorted(standard_library().glob("*.py"))
    elif source.is_dir():
        files = sorted(path for path in source.rglob("*") if path.is_file())
    elif source.is_file():
        files = [source]
    else:
        raise ValueError(f"there is no file or folder {source}")
    pieces, size = [], 0
    for path in files:
        piece = path.read_bytes()
        if b"\0" in piece:
            if source == path:
                raise ValueError(f"{source} is not text: it has bytes that are 0")
            continue
        pieces.append(piece)
        size += len(piece)
        if size > MOST_BYTES:
            break
    return np.frombuffer(b"".join(pieces)[:MOST_BYTES], np.uint8)


def split(text: np.ndarray, context: int) -> tuple[np.ndarray, np.ndarray]:
    """The first nine tenths to train on, the rest to validate."""
    cut = len(text) * 9 // 10
    if len(text) - cut <= context:
        raise ValueError(f"the text has {len(text)} bytes; a context of {context} needs at least {10 * context + 1}")
    return text[:cut], text[cut:]


def batch(text: np.ndarray, size: int, context: int, rng: np.random.Generator) -> np.ndarray:
    """`size` random windows of `context` + 1 bytes, (size, context + 1) int32."""
    starts = rng.integers(0, len(text) - context, size)
    return text[starts[:, None] + np.arange(context + 1)].astype(np.int32)


def sample(model: Transformer, params: optax.Params, prompt: bytes, length: int, seed: int, temperature: float = 0.8) -> str:
    """`prompt` and `length` bytes that the model writes after it."""
    window = np.zeros(model.context, np.int32)
    given = np.frombuffer(prompt, np.uint8)[-model.context :]
    window[: len(given)] = given

    def write_one(carry: tuple[jax.Array, jax.Array], key: jax.Array) -> tuple[tuple[jax.Array, jax.Array], jax.Array]:
        window, filled = carry
        logits = jnp.asarray(model.apply(params, window[None]))[0, filled - 1]
        token = jax.random.categorical(key, logits / temperature).astype(jnp.int32)
        full = filled == model.context
        window = jnp.where(full, jnp.roll(window, -1), window).at[jnp.where(full, filled - 1, filled)].set(token)
        return (window, jnp.minimum(filled + 1, model.context)), token

    keys = jax.random.split(jax.random.key(seed), length)
    _, written = jax.jit(lambda carry: jax.lax.scan(write_one, carry, keys))((jnp.asarray(window), jnp.int32(len(given))))
    text = (prompt + bytes(np.asarray(written, np.uint8))).decode(errors="replace")
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
