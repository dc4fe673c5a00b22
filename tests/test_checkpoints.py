"""A run can be stopped, moved to other devices and resumed: Orbax's files, read back, go on as if nothing had happened."""

import re
import signal
import time
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
import train_lm
from cases import assert_same, gradients, rekls_states
from checkpoints import Checkpoints
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from sharded import largest_difference
from test_examples import SMALL, rows, start

from rekls_jax import REFERENCE, MatrixDimensionNumbers, OrthogonalIteration, rekls, scale_by_rekls, state_partition_specs

SHAPES = {"tall": (16, 32), "odd": (24, 9), "whole": (6, 10), "square": (6, 6), "bias": (16,)}
SPECS = {"tall": P("tp"), "odd": P("tp", None), "whole": P(), "square": P(), "bias": P("tp")}
PARAMS = {name: jnp.asarray(gradients(shape, 1, seed=9)[0]) for name, shape in SHAPES.items()}
STREAM = [{name: jnp.asarray(gradients(shape, 15)[i]) for name, shape in SHAPES.items()} for i in range(15)]


class Run:
    """Parameters and state of `rekls(0.1, **options)` on the first `devices`, whose mesh axis is called `axis`."""

    def __init__(self, devices=1, axis="tp", axis_type=AxisType.Auto, **options):
        mesh = Mesh(np.array(jax.devices()[:devices]), (axis,), axis_types=(axis_type,))
        specs = {name: P(*(axis if entry else None for entry in spec)) for name, spec in SPECS.items()}
        given: dict[str, Any] = {} if axis_type == AxisType.Explicit else {"param_specs": specs, "mesh": mesh}
        self.tx = rekls(optax.linear_schedule(0.1, 0.0, 20), eps=1e-3, **given, **options)
        self.update, self.mesh = jax.jit(self.tx.update), mesh
        with jax.set_mesh(mesh):
            state_specs = state_partition_specs(self.tx, PARAMS, specs)
            shardings = jax.tree.map(lambda spec: NamedSharding(mesh, spec), {"params": specs, "state": state_specs})
            params = jax.device_put(PARAMS, shardings["params"])
            state = jax.jit(self.tx.init, out_shardings=shardings["state"])(params)
        self.tree = {"params": params, "state": state}

    def go(self, begin, end):
        params, state = self.tree["params"], self.tree["state"]
        with jax.set_mesh(self.mesh):
            for G in STREAM[begin:end]:
                G = jax.tree.map(lambda g, p: jax.device_put(g, p.sharding), G, params)
                updates, state = self.update(G, state, params)
                params = optax.apply_updates(params, updates)
        self.tree = {"params": params, "state": state}
        return self


@pytest.fixture(scope="module")
def step_seven(tmp_path_factory):
    """By number of devices: a folder with the checkpoint of step 7."""
    folders = {}
    for devices in (1, 8):
        folders[devices] = tmp_path_factory.mktemp("checkpoints") / str(devices)
        with Checkpoints(folders[devices], {"--lr": 0.1}) as checkpoints:
            checkpoints.save(7, Run(devices).go(0, 7).tree, {})
    return folders


def restored(folder, run):
    with Checkpoints(folder, {"--lr": 0.1}) as checkpoints:
        run.tree, _ = checkpoints.restore(run.tree)
    return run


@pytest.mark.parametrize("devices", [1, 8])
def test_a_restored_run_equals_one_that_was_not_stopped_bit_for_bit(step_seven, devices):
    resumed, uninterrupted = restored(step_seven[devices], Run(devices)).go(7, 15).tree, Run(devices).go(0, 15).tree
    assert_same(resumed, uninterrupted)
    for a, b in zip(jax.tree.leaves(resumed), jax.tree.leaves(uninterrupted), strict=True):
        assert a.sharding.is_equivalent_to(b.sharding, a.ndim)
    assert [int(state.count) for state in rekls_states(resumed["state"])] == [15]


MOVES = [
    (8, 4, "tp", AxisType.Explicit),
    (8, 2, "tensor", AxisType.Auto),
    (8, 1, "tp", AxisType.Auto),
    (8, 8, "model", AxisType.Explicit),
    (1, 8, "tp", AxisType.Explicit),
]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after", "axis", "axis_type"), MOVES, ids=str)
def test_a_checkpoint_moves_to_other_devices(step_seven, before, after, axis, axis_type):
    moved = restored(step_seven[before], Run(after, axis, axis_type))
    assert_same(moved.tree, restored(step_seven[before], Run(before)).tree)
    assert {len(leaf.sharding.device_set) for leaf in jax.tree.leaves(moved.tree)} == {after}
    expected = restored(step_seven[before], Run(before)).go(7, 8).tree["params"]
    largest = max(float(jnp.abs(p).max()) for p in expected.values())
    assert largest_difference(moved.go(7, 8).tree["params"], expected) <= 1e-6 * largest


OURS = "state.inner_states.rekls.inner_state.0"
LIES = "it was made with other options, or lies otherwise on the mesh."
MEANS = "its arrays would mean something else."
SEEN = "output_axis='{}', reduction_axis='{}'"


def other_way_round(params):
    """The square ones, so that no shape tells."""
    sees = {True: MatrixDimensionNumbers(1, 0), False: MatrixDimensionNumbers()}
    return jax.tree.map(lambda p: sees[p.shape == (6, 6)] if p.ndim == 2 else None, params)


# Options other than those that wrote the file; what is refused; what the optimizer itself says to a state made with them.
OTHERS: dict[str, tuple[dict[str, Any], str, str]] = {
    "max_precond_dim": (
        {"max_precond_dim": 20},
        f"{OURS}.L.odd is an array of shape (24, 24) and dtype float32, in this run an array of shape (1, 1) and",
        f"The state's `R` of the parameter ['tall'] has shape (1, 1), this optimizer expects (32, 32): {LIES}",
    ),
    "mu_dtype": (
        {"mu_dtype": jnp.bfloat16},
        "mu.bias is an array of shape (16,) and dtype float32, in this run an array of shape (16,) and dtype bfloat16",
        f"The state's `mu` of the parameter ['square'] has dtype bfloat16, this optimizer expects float32: {LIES}",
    ),
    "fallback": (
        {"fallback": optax.sgd(0.1)},
        "has state.inner_states.fallback.inner_state.0.count, which this run has not",
        "`state` must be what this optimizer's `init` returned, got a PartitionState with another fallback's.",
    ),
    "inner": (
        {"inner": "laprop"},
        f"has {OURS}.rule.inner.adam, which this run has not",
        f"The state was made with factors='kl', inner='laprop', this optimizer has factors='kl', inner='adam': {MEANS}",
    ),
    "dimension_numbers": (
        {"dimension_numbers": other_way_round},
        f"has no {OURS}.dimension_numbers.square.output_axis.0, which this run has",
        f"The state of the parameter ['square'] was made with {SEEN.format(0, 1)}, this optimizer has {SEEN.format(1, 0)}: "
        f"{MEANS}",
    ),
    "factors": (
        {"factors": "plain"},
        f"has {OURS}.rule.factors.kl, which this run has not",
        f"The state was made with factors='plain', inner='adam', this optimizer has factors='kl', inner='adam': {MEANS}",
    ),
}


@pytest.mark.parametrize("other", OTHERS)
def test_a_checkpoint_of_other_options_is_refused_by_name(step_seven, other):
    options, sentence, _ = OTHERS[other]
    with pytest.raises(ValueError, match=re.escape(sentence)):
        restored(step_seven[1], Run(**options))


def test_a_checkpoint_of_another_shape_is_refused_by_name(step_seven):
    run = Run()
    params = {**PARAMS, "bias": jnp.ones(17)}
    run.tree = {"params": params, "state": run.tx.init(params)}
    sentence = r"\S+\.bias is an array of shape \(16,\) and dtype float32, in this run an array of shape \(17,\) and"
    with pytest.raises(ValueError, match=sentence):
        restored(step_seven[1], run)
    with (
        Checkpoints(step_seven[1], {"--lr": 0.2}) as checkpoints,
        pytest.raises(ValueError, match=r"with --lr 0\.1, got 0\.2"),
    ):
        checkpoints.restore(run.tree)


@pytest.mark.parametrize("other", OTHERS)
def test_the_optimizer_itself_refuses_a_state_of_other_options(other):
    # Whatever read the files: flax.serialization does not look at shapes.
    options, _, sentence = OTHERS[other]
    params = {name: PARAMS[name] for name in ("tall", "whole", "square", "bias")}
    state = rekls(0.1, **options).init(params)
    with pytest.raises((ValueError, TypeError), match=re.escape(sentence)):
        jax.jit(rekls(0.1).update)(params, state, params)


def test_what_may_change_between_two_parts_of_a_run():
    params = {"w": PARAMS["tall"], "b": PARAMS["bias"]}
    state = rekls(0.1).init(params)
    changes: list[dict[str, Any]] = [
        {"learning_rate": 0.3, "b1": 0.8, "b2": 0.9, "shampoo_beta": 0.9, "eps": 1e-6, "weight_decay": 0.0},
        {"learning_rate": 0.1, "precondition_frequency": 5, "eigenbasis": OrthogonalIteration(), "nesterov": True},
        {"learning_rate": 0.1, "numerics": REFERENCE},
    ]
    for options in changes:
        updates, state = jax.jit(rekls(**options).update)(params, state, params)
        assert all(np.isfinite(u).all() for u in updates.values())


def test_flax_serialization_keeps_all_and_the_rule():
    params = {"w": PARAMS["tall"], "b": PARAMS["bias"]}
    _, state = rekls(0.1).update(params, rekls(0.1).init(params), params)
    written = flax.serialization.to_bytes(state)
    assert_same(flax.serialization.from_bytes(rekls(0.1).init(params), written), state)
    with pytest.raises(ValueError, match="rule"):
        flax.serialization.from_bytes(rekls(0.1, inner="laprop").init(params), written)


def test_orbax_alone_keeps_the_rule(tmp_path):
    params = PARAMS["whole"]
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", scale_by_rekls().init(params))
        checkpointer.wait_until_finished()
        back = checkpointer.restore(tmp_path / "state", scale_by_rekls().init(params))
        assert_same(back, scale_by_rekls().init(params))
        with pytest.raises(ValueError, match=r"rule\.inner\.adam"):
            checkpointer.restore(tmp_path / "state", scale_by_rekls(inner="laprop").init(params))


STEPS = ["--steps", "10"]  # a checkpoint after every step


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    out = tmp_path_factory.mktemp("uninterrupted")
    assert train_lm.main([*SMALL, *STEPS, "--out", str(out)]) == 0
    return out


def assert_same_run(a, b):
    for x, y in zip(rows(a), rows(b), strict=True):
        assert {**x, "milliseconds": ""} == {**y, "milliseconds": ""}
    assert (a / "sample.txt").read_text() == (b / "sample.txt").read_text()


@pytest.mark.slow
def test_train_lm_resumes_where_it_was_killed_in_the_middle_of_a_save(tmp_path, uninterrupted):
    saved, out = tmp_path / "saved", tmp_path / "out"
    call = [*SMALL, *STEPS, "--checkpoint", str(saved), "--out", str(out)]
    for _ in range(5):
        process = start([*call, "--resume"])
        kill_in_a_save(process, saved / "rekls")
        process.communicate(timeout=120)
        if process.returncode == -signal.SIGKILL and list((saved / "rekls").glob("*tmp*")):
            break
    assert list((saved / "rekls").glob("*tmp*")), "never killed in the middle of a save"
    assert train_lm.main([*call, "--resume"]) == 0
    assert_same_run(out, uninterrupted)
    assert not list((saved / "rekls").glob("*tmp*"))


def kill_in_a_save(process, folder):
    """As soon as there are a whole checkpoint and a part of another."""
    deadline = time.monotonic() + 120
    while process.poll() is None and time.monotonic() < deadline:
        names = [path.name for path in folder.glob("*")]
        if any(name.isdigit() for name in names) and any("tmp" in name for name in names):
            process.send_signal(signal.SIGKILL)
            return
        time.sleep(0.001)


@pytest.mark.slow
def test_train_lm_goes_on_with_its_own_run_only(tmp_path, uninterrupted, capsys):
    saved, out = tmp_path / "saved", tmp_path / "out"
    call = [*SMALL, *STEPS, "--checkpoint", str(saved), "--out", str(out)]
    assert train_lm.main([*call, "--resume"]) == 0, "nothing there: from the start"
    assert_same_run(out, uninterrupted)
    assert train_lm.main([*call, "--resume"]) == 0, "nothing left to do"
    assert_same_run(out, uninterrupted)
    with pytest.raises(ValueError, match="rekls holds a run of 10 steps: go on with it by --resume, or name another"):
        train_lm.main(call)
    with pytest.raises(ValueError, match=r"10 was written with --lr 0\.03, got 0\.1"):
        train_lm.main([*call, "--resume", "--lr", "0.1"])
    with pytest.raises(ValueError, match="written with --text of checksum"):
        train_lm.main([*call, "--resume", "--text", str(Path(__file__).parent)])
    with pytest.raises(ValueError, match="--resume needs --checkpoint"):
        train_lm.main([*SMALL, "--resume"])
