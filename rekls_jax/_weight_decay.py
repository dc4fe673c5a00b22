"""How a direction, a learning rate and a weight decay make an optimizer. `rekls` says what each method subtracts."""

from collections.abc import Callable
from typing import Any

import numpy as np
import optax

Mask = Any | Callable[[optax.Params], Any] | None


def _decoupled(direction: Any, lr: Any, weight_decay: Any, mask: Mask) -> optax.GradientTransformation:
    return optax.chain(direction, _decay(weight_decay, mask), optax.scale_by_learning_rate(lr))


def _independent(direction: Any, lr: Any, weight_decay: Any, mask: Mask) -> optax.GradientTransformation:
    return optax.chain(direction, optax.scale_by_learning_rate(lr), _decay(_product(-1.0, weight_decay), mask))


def _palm(direction: Any, lr: Any, weight_decay: Any, mask: Mask) -> optax.GradientTransformation:
    return _decoupled(direction, lr, _product(lr, weight_decay), mask)


def _l2(direction: Any, lr: Any, weight_decay: Any, mask: Mask) -> optax.GradientTransformation:
    return optax.chain(_decay(weight_decay, mask), direction, optax.scale_by_learning_rate(lr))


METHODS = {"decoupled": _decoupled, "independent": _independent, "palm": _palm, "l2": _l2}


def _decay(weight_decay: Any, mask: Mask) -> optax.GradientTransformation:
    # optax asks for params even where the decay is 0.
    return optax.identity() if is_zero(weight_decay) else optax.add_decayed_weights(weight_decay, mask)


def _product(a: Any, b: Any) -> Any:
    """Of two numbers or schedules."""
    if callable(a) or callable(b):
        return lambda count: (a(count) if callable(a) else a) * (b(count) if callable(b) else b)
    return a * b


def is_zero(number: Any) -> bool:
    # Never an array: `inject_hyperparams` gives one to `init` and traces it in `update`, and the state must be the same.
    return isinstance(number, (int, float, np.generic)) and number == 0
