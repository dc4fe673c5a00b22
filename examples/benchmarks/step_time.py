"""How long a step takes on one device, against the bare decompositions of its factors and against AdamW.

python examples/benchmarks/step_time.py             # the optimizers alone, on matrices
python examples/benchmarks/step_time.py --model     # whole training steps of the model of examples/train_lm.py too

Every optimizer's time is that of `update` alone, state overwritten. `rekls` here is `scale_by_rekls`; `muon` is
`optax.contrib.muon` and `adamw` is `optax.adamw`, both whole, learning rate and decay included, which weigh little.
"""

import argparse
import itertools
from typing import Any

import matrices
import measuring

# isort: split
import command_line
import jax
import numpy as np
import optax
from measuring import Candidate, Chart, Panel, Row, Times
from reference_way import reference_way

from rekls_jax import scale_by_rekls

CYCLE = 10
AT_ONCE, IN_TURN, EVERY_TENTH = "eighs, all at once", "eighs, in turn", f"rekls, precondition_frequency={CYCLE}"


def matrix_rows(group: matrices.Matrices, repeats: int) -> list[Row]:
    gradients = matrices.gradients(group, None)
    optimizers = {
        "rekls": scale_by_rekls(),
        EVERY_TENTH: scale_by_rekls(precondition_frequency=CYCLE),
        "reference's way": reference_way(),
        "adamw": optax.adamw(1e-3),
        "muon": optax.contrib.muon(1e-3),
    }
    at_once, in_turn = matrices.bare_eighs(group)
    candidates = {AT_ONCE: Candidate(at_once), IN_TURN: Candidate(in_turn)}
    for name, tx in optimizers.items():
        candidates[name] = Candidate(matrices.Step(tx, gradients), CYCLE if name == EVERY_TENTH else 1)
    times = measuring.interleaved(candidates, repeats, str(group))
    return [
        {
            "matrices": str(group),
            "step": name,
            "ms": measured.mean,
            "over eighs at once": measured.mean / times[AT_ONCE].mean,
            "over eighs in turn": measured.mean / times[IN_TURN].mean,
            **unevenness(measured),
            "milliseconds": measured.milliseconds.tolist(),
        }
        for name, measured in times.items()
    ]


def unevenness(times: Times) -> Row:
    return {"slowest / mean": times.slowest} if times.milliseconds.shape[1] > 1 else {}


def model_rows(options: argparse.Namespace) -> list[Row]:
    import language_model as lm
    import train_lm

    defaults = model_options(options.width)
    width, context = defaults.width, defaults.context
    model = lm.Transformer(width, defaults.layers, defaults.heads, context)
    training, _ = lm.split(lm.read_text(None), context)
    rng = np.random.default_rng(0)
    batches = [jax.device_put(lm.batch(training, defaults.batch_size, context, rng)) for _ in range(CYCLE)]
    rates = train_lm.LEARNING_RATES
    optimizers = {
        "adamw": optax.adamw(rates["adamw"], b1=0.9, b2=0.95, weight_decay=0.01),
        "rekls": train_lm.OURS(rates["rekls"], param_specs=None),
        EVERY_TENTH: train_lm.OURS(rates["rekls"], param_specs=None, precondition_frequency=CYCLE),
    }
    candidates = {name: Candidate(training_step(lm, model, tx, batches), CYCLE) for name, tx in optimizers.items()}
    times = measuring.interleaved(candidates, options.repeats, "model")
    return [
        {
            "model": f"width {width}, {defaults.layers} layers",
            "optimizer": name,
            "ms": measured.median,
            "over adamw": measured.median / times["adamw"].median,
            "mean ms of a cycle": measured.mean,
            "slowest / mean": measured.slowest,
            "milliseconds": measured.milliseconds.tolist(),
        }
        for name, measured in times.items()
    ]


def model_options(width: int | None) -> argparse.Namespace:
    """Those of examples/train_lm.py, but for the width, if one is given."""
    import train_lm

    return train_lm.parse([] if width is None else ["--width", str(width)])


def training_step(lm: Any, model: Any, tx: optax.GradientTransformation, batches: list[jax.Array]) -> Any:
    params = model.init(jax.random.key(0), batches[0][:1, :-1])
    carried = params, jax.jit(tx.init)(params)

    def step(carried: tuple[Any, Any], tokens: jax.Array) -> tuple[tuple[Any, Any], jax.Array]:
        params, state = carried
        loss, gradients = jax.value_and_grad(lambda params: lm.loss(model, params, tokens))(params)
        updates, state = tx.update(gradients, state, params)
        return (optax.apply_updates(params, updates), state), loss

    compiled = jax.jit(step, donate_argnums=0).lower(carried, batches[0]).compile()
    given = itertools.cycle(batches)

    def run() -> Any:
        nonlocal carried
        carried, loss = compiled(carried, next(given))
        return carried, loss

    return run


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = measuring.parser("step_time", __doc__, f"repetitions: of a step, or of {CYCLE} where they differ")
    matrices.add_shapes(parser, "4x512x512", "12x512x512", "1x1024x1024")
    parser.add_argument("--model", action="store_true", help="time training steps of a model too; default: not")
    width = "of the model, a multiple of its heads; default: that of examples/train_lm.py"
    parser.add_argument("--width", type=int, help=width)
    options = parser.parse_args(arguments)
    if options.width is not None and not options.model:
        raise ValueError("--width is the model's: give --model with it")
    return options


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    groups = [matrices.parse(text) for text in options.shapes]
    measuring.check(options)
    if options.model:
        model_options(options.width)  # for its errors
    measuring.devices(1)
    rows = [row for group in groups for row in matrix_rows(group, options.repeats)]
    tables = {"Step on one device, median milliseconds": rows}
    panels = [panel(str(group), rows) for group in groups]
    if options.model:
        trained = model_rows(options)
        tables["Training step of a model on one device, median milliseconds"] = trained
        panels.append(Panel("training step", "ms", {row["optimizer"]: row["ms"] for row in trained}))
    measuring.report(options, tables, Chart("A step on one device", panels))
    return 0


def panel(group: str, rows: list[Row]) -> Panel:
    return Panel(group, "ms", {row["step"]: row["ms"] for row in rows if row["matrices"] == group})


if __name__ == "__main__":
    command_line.run("step_time", main)
