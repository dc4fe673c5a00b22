"""Train a byte-level transformer on real text with REKLS, its relatives, AdamW or Muon, and see the difference.

python examples/train_lm.py                      # REKLS on the Python standard library's own source files
python examples/train_lm.py --compare            # REKLS and AdamW after one another, both curves in one picture
python examples/train_lm.py --text my_notes/     # your text
python examples/train_lm.py --checkpoint saved/ --resume        # goes on where it was stopped, or killed
python examples/train_lm.py --devices 8 --tensor-parallel 4     # model and optimizer divided, data 2 x tensor 4

Several hosts: start it on each with --coordinator HOST:PORT --num-processes N --process-id I.
"""

import argparse
import contextlib
import functools
import io
import statistics
import sys
import time
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import command_line
import devices
import jax
import language_model as lm
import numpy as np
import optax
import run_record
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from run_record import Run
from tqdm import tqdm

if TYPE_CHECKING:
    from checkpoints import Checkpoints

from rekls_jax import REFERENCE, OrthogonalIteration, rekls, state_partition_specs

# b1 = 0.9 and b2 = 0.95 for all: the defaults of `rekls`.
OURS = functools.partial(rekls, dimension_numbers=lm.dimension_numbers, param_specs=lm.param_specs)
OPTIMIZERS: dict[str, Callable[[optax.Schedule], optax.GradientTransformation]] = {
    "rekls": OURS,
    "reference": functools.partial(OURS, numerics=REFERENCE),
    "kl-soap": functools.partial(OURS, eigenbasis=OrthogonalIteration(), precondition_frequency=10),
    "soap": functools.partial(OURS, factors="plain", eigenbasis=OrthogonalIteration(), precondition_frequency=10),
    "adamw": lambda lr: optax.adamw(lr, b1=0.9, b2=0.95, weight_decay=0.01),
    "muon": lambda lr: optax.contrib.muon(lr, adam_b1=0.9, adam_b2=0.95, weight_decay=0.01),
}
# The best of half-decades at the default size.
LEARNING_RATES = {"rekls": 3e-2, "reference": 1e-2, "kl-soap": 1e-2, "soap": 1e-2, "adamw": 1e-2, "muon": 3e-2}


def make_model(options: argparse.Namespace) -> lm.Transformer:
    return lm.Transformer(options.width, options.layers, options.heads, options.context, options.scan)


def start(run: Run, model: lm.Transformer, options: argparse.Namespace, mesh: Mesh) -> tuple[TrainState, TrainState]:
    """The state of step 0, no array of it ever whole where it is divided; and how it lies, as a tree of shardings."""
    warm_up = max(1, options.steps // 10)
    schedule = optax.warmup_cosine_decay_schedule(0.0, run.learning_rate, warm_up, max(options.steps, warm_up + 1))
    tx = OPTIMIZERS[run.optimizer](schedule)

    def create() -> TrainState:
        params = model.init(jax.random.key(options.seed), np.zeros((1, options.context), np.int32))
        return TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    shapes = jax.eval_shape(create)
    specs = shapes.replace(
        step=PartitionSpec(),
        params=lm.param_specs(shapes.params),
        opt_state=state_partition_specs(tx, shapes.params, lm.param_specs),
    )
    shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs)
    return jax.jit(create, out_shardings=shardings)(), shardings


def train(
    name: str,
    options: argparse.Namespace,
    text: np.ndarray,
    mesh: Mesh,
    interrupt: command_line.Interrupt,
    checkpoints: "Checkpoints | None",
) -> Run:
    run = Run(name, learning_rate(name, options))
    model = make_model(options)
    state, shardings = start(run, model, options, mesh)
    training, validation = lm.split(text, options.context)
    windows = lm.batch(validation, 8 * options.batch_size, options.context, np.random.default_rng(0))
    held_out = devices.place(windows, mesh, "data")
    rng = np.random.default_rng(options.seed)
    if checkpoints is not None and checkpoints.latest() is not None:
        state, progress = checkpoints.restore(state)
        run.go_on(progress, rng)

    loss_of = functools.partial(lm.loss, model)

    def step(state: TrainState, tokens: jax.Array) -> tuple[TrainState, jax.Array]:
        loss, gradients = jax.value_and_grad(loss_of)(state.params, tokens)
        return state.apply_gradients(grads=gradients), loss

    # Compiled ahead, so that no step's time is the compiler's.
    everywhere, over_data = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in ((), ("data",)))
    compiled = (
        jax.jit(step, donate_argnums=0, out_shardings=(shardings, everywhere))
        .lower(state, jax.ShapeDtypeStruct((options.batch_size, options.context + 1), np.int32, sharding=over_data))
        .compile()
    )
    evaluate = jax.jit(loss_of, out_shardings=everywhere)
    form = "{desc} {percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}, {remaining} left{postfix}"
    with tqdm(
        total=options.steps,
        initial=len(run.losses),
        desc=f"{name:>9}",
        bar_format=form,
        file=sys.stderr,
        disable=is_helper(),
    ) as bar:
        for taken in range(len(run.losses) + 1, options.steps + 1):
            tokens = devices.place(lm.batch(training, options.batch_size, options.context, rng), mesh, "data")
            begin = time.perf_counter()
            state, loss = compiled(state, tokens)
            run.losses.append(float(loss))
            run.milliseconds.append(1e3 * (time.perf_counter() - begin))
            last = taken == options.steps or interrupt.asked or run.diverged()
            if last or taken % max(1, options.steps // 10) == 0:
                run.validation[taken] = float(evaluate(state.params, held_out))
                if checkpoints is not None and not run.diverged():
                    checkpoints.save(taken, state, run.progress(rng))
            recent = statistics.median(run.milliseconds[-20:])
            bar.set_postfix_str(f"loss {run.losses[-1]:.3f}, {recent:.0f} ms/step", refresh=False)
            bar.update()
            if last:
                break
    if run.diverged() and not is_helper():
        print(f"{name} diverged: the loss was {run.losses[-1]} at step {len(run.losses)}. Try a smaller --lr.")
    run.params = devices.whole(state.params, mesh)
    run.devices = devices.report(state.opt_state, mesh, statistics.median(run.milliseconds))
    return run


def learning_rate(name: str, options: argparse.Namespace) -> float:
    return LEARNING_RATES[name] if options.lr is None else float(options.lr)


SETTINGS = ("steps", "width", "layers", "scan", "heads", "context", "batch_size", "seed")


@contextlib.contextmanager
def checkpoints_of(name: str, options: argparse.Namespace, text: np.ndarray) -> "Iterator[Checkpoints | None]":
    """Of the run with the optimizer `name`; None where none are asked for."""
    if options.checkpoint is None:
        yield None
        return
    from checkpoints import Checkpoints  # Orbax takes a second to import

    settings = {f"--{setting.replace('_', '-')}": getattr(options, setting) for setting in SETTINGS}
    settings |= {"--lr": learning_rate(name, options), "--text of checksum": zlib.crc32(text.tobytes())}
    with Checkpoints(options.checkpoint / name, settings) as checkpoints:
        if checkpoints.latest() is not None and not options.resume:
            raise ValueError(
                f"{checkpoints.folder} holds a run of {checkpoints.latest()} steps: go on with it by --resume, or name "
                "another --checkpoint"
            )
        yield checkpoints


def is_helper() -> bool:
    """Whether another process prints and writes."""
    return jax.process_index() > 0


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add(
        "--text", type=Path, metavar="PATH", help="a file or a folder of text; default: the Python standard library's source"
    )
    add("--optimizer", choices=OPTIMIZERS, help="default: rekls; reference is rekls with the PyTorch reference's numerics")
    add("--compare", action="store_true", help="train with rekls, then with adamw")
    add("--steps", type=int, default=300, help="default: %(default)s")
    rates = ", ".join(f"{rate:g} for {name}" for name, rate in LEARNING_RATES.items())
    add("--lr", type=float, help=f"highest learning rate, after a tenth of the steps; default: {rates}")
    add("--width", type=int, default=96, help="of the model; default: %(default)s")
    add("--layers", type=int, default=2, help="default: %(default)s")
    add("--scan", action="store_true", help="compile one layer and scan over all, their parameters stacked; not with muon")
    add("--heads", type=int, default=4, help="of each attention, a divisor of the width; default: %(default)s")
    add("--context", type=int, default=128, help="bytes the model sees at once; default: %(default)s")
    add("--batch-size", type=int, default=16, help="default: %(default)s")
    add("--seed", type=int, default=0, help="of the parameters, the batches and the sample; default: %(default)s")
    out = "for metrics.csv, loss.png and sample.txt, overwritten; default: %(default)s"
    add("--out", type=Path, default=Path("runs/train_lm"), metavar="FOLDER", help=out)
    folder = "save a tenth of the run at a time in FOLDER, a whole one always there"
    add("--checkpoint", type=Path, metavar="FOLDER", help=folder)
    add("--resume", action="store_true", help="go on from the last of --checkpoint, if there is one")
    devices.add_arguments(parser)
    options = parser.parse_args(arguments)
    devices.check(options)
    if options.scan and options.optimizer == "muon":
        parser.error("--scan stacks the layers' matrices, which --optimizer muon would take for others")
    for name in ("steps", "width", "layers", "heads", "context", "batch_size"):
        if getattr(options, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} must be at least 1, got {getattr(options, name)}")
    if not 0 <= options.seed < 2**32:
        raise ValueError(f"--seed must lie in [0, 2**32), got {options.seed}")
    if options.resume and options.checkpoint is None:
        raise ValueError("--resume needs --checkpoint, the folder of the run to go on with")
    if options.compare and options.optimizer:
        raise ValueError("--compare trains rekls and adamw: leave out --optimizer")
    if options.width % options.heads:
        raise ValueError(f"--width must be divisible by --heads, got {options.width} and {options.heads}")
    if options.width % options.tensor_parallel:
        given = f"{options.width} and {options.tensor_parallel}"
        raise ValueError(f"--width must be divisible by --tensor-parallel, got {given}")
    copies = options.devices // options.tensor_parallel
    if options.batch_size % copies:
        raise ValueError(f"--batch-size must be divisible by the {copies} copies of the model, got {options.batch_size}")
    if options.lr is not None and not 0 < options.lr < float("inf"):
        raise ValueError(f"--lr must be a number above 0, got {options.lr}")
    return options


def report(runs: list[Run], options: argparse.Namespace, text: np.ndarray) -> None:
    run_record.write_metrics(runs, options.out / "metrics.csv")
    run_record.write_curve(runs, options.out / "loss.png")
    _, held_out = lm.split(text, options.context)
    written = lm.sample(make_model(options), runs[0].params, bytes(held_out[:32]), 400, options.seed)
    (options.out / "sample.txt").write_text(written, encoding="utf-8")
    print(f"\n32 bytes of the held-out text, and how the model that {runs[0].optimizer} trained goes on:\n\n{written}\n")
    for run in runs:
        print(
            f"{run.optimizer}, learning rate {run.learning_rate:g}: validation loss {run.final():.3f} nats per byte after "
            f"{len(run.losses)} steps, {statistics.median(run.milliseconds):.0f} ms per step"
        )
        if options.devices > 1:
            print(run.devices)
    print(f"metrics.csv, loss.png and sample.txt are in {options.out}")


def main(arguments: list[str] | None = None) -> int:
    options = parse(arguments)
    text = lm.read_text(options.text)
    lm.split(text, options.context)  # too short a text is an error before anything is compiled
    try:
        options.out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--out must be a folder that can be made, got {options.out}: {error.strerror}") from error
    mesh = devices.start(options)
    if not is_helper():
        print(f"{len(text):,} bytes of text from {options.text or lm.standard_library()}")
    runs: list[Run] = []
    with command_line.Interrupt() as interrupt:
        for name in ("rekls", "adamw") if options.compare else (options.optimizer or "rekls",):
            with jax.set_mesh(mesh), checkpoints_of(name, options, text) as checkpoints:
                runs.append(train(name, options, text, mesh, interrupt, checkpoints))
            if interrupt.asked:
                break
        if not is_helper():
            report(runs, options, text)
    return 130 if interrupt.asked else 0


if __name__ == "__main__":
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # the sample may hold any character, the terminal may not
    command_line.run("train_lm", main)
