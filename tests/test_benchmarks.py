"""The benchmarks run, and what they measure against is the reference's way."""

import json
from pathlib import Path

import compile_time
import jax
import jax.numpy as jnp
import memory
import numpy as np
import pytest
import scaling
import step_time
from jax.sharding import Mesh, NamedSharding
from reference_way import STATE_SPECS, eigh, reference_way

GOLDEN = Path(__file__).parent / "golden"


@pytest.fixture(autouse=True, scope="module")
def eight_devices():
    assert len(jax.devices()) == 8  # which are there for good, before a benchmark asks for fewer


@pytest.mark.parametrize(("name", "devices"), [("betas", 1), ("square", 1), ("tall", 1), ("wide", 2)])
def test_the_yardstick_follows_the_pytorch_trajectories(name, devices):
    data = np.load(GOLDEN / f"{name}.npz")
    learning_rate, b1, b2, shampoo_beta, eps, weight_decay = map(float, data["hyper"])
    mesh = Mesh(np.array(jax.devices()[:devices]), ("tp",)) if devices > 1 else None
    tx = reference_way(mesh, b1, b2, shampoo_beta, eps)
    # It keeps the first moment in the eigenbasis, as this very `eigh` chooses its signs.
    (_, Q_L), (_, Q_R) = (eigh(jnp.asarray(data[factor])) for factor in ("L0", "R0"))
    M = Q_L.T @ data["momentum0"] @ Q_R
    state = tx.init(jnp.asarray(data["param0"]))
    state = state._replace(count=jnp.int32(data["step0"]), L=data["L0"], R=data["R0"], M=M, V=data["exp_avg_sq0"])
    if mesh is not None:
        state = jax.device_put(state, jax.tree.map(lambda spec: NamedSharding(mesh, spec), STATE_SPECS))
    params, update = np.array(data["param0"]), jax.jit(tx.update)
    for G, expected in zip(data["grads"], data["params"], strict=True):
        updates, state = update(jnp.asarray(G), state)
        params = params * (1 - learning_rate * weight_decay) - learning_rate * np.asarray(updates)
        assert np.abs(params - expected).max() <= 1e-3 * np.abs(data["params"] - data["param0"]).max()


def results(folder):
    assert (folder / "chart.png").stat().st_size > 10_000
    return json.loads((folder / "results.json").read_text())["tables"].values()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_step_time(tmp_path, capsys):
    assert step_time.main(["--shapes", "2x16x24", "--output", str(tmp_path), "--repeats", "1"]) == 0
    ((*rows,),) = results(tmp_path)
    assert [row["step"] for row in rows] == [
        "eighs, all at once",
        "eighs, in turn",
        "rekls",
        "rekls, precondition_frequency=10",
        "reference's way",
        "adamw",
        "muon",
    ]
    assert all(row["ms"] > 0 for row in rows)
    assert len(rows[3]["milliseconds"][0]) == 10
    assert "rekls, precondition_frequency=10" in capsys.readouterr().out


@pytest.mark.exhaustive
@pytest.mark.slow
def test_memory(tmp_path):
    assert memory.main(["--shapes", "2x16x24", "--output", str(tmp_path)]) == 0
    ((*rows,),) = results(tmp_path)
    assert [(row["devices"], row["step"]) for row in rows] == [
        (1, "reference's way"),
        (1, "rekls"),
        (8, "reference's way"),
        (8, "replicated"),
        (8, "split"),
    ]
    # L, R, Q_L, Q_R of (16, 24), both moments, eigenvalues and a count; in float32.
    entries = 2 * (2 * (16**2 + 24**2) + 2 * 16 * 24 + 16 + 24 + 1) + 1
    assert rows[1]["state"] == pytest.approx(4 * entries / 1e6)
    assert rows[4]["aliased"] >= 0.9 * rows[4]["state"]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_compile_time(tmp_path):
    assert compile_time.main(["--counts", "4", "5", "--width", "4", "--repeats", "1", "--output", str(tmp_path)]) == 0
    ((*rows,),) = results(tmp_path)
    assert [(row["matrices"], row["optimizer"]) for row in rows] == [(n, tx) for n in (4, 5) for tx in ("adamw", "rekls")]
    assert all(row["seconds"] > 0 < row["instructions"] for row in rows)


@pytest.mark.exhaustive
@pytest.mark.slow
def test_scaling(tmp_path):
    arguments = ["--shapes", "2x16x24", "--devices", "1", "2", "--repeats", "1", "--output", str(tmp_path)]
    assert scaling.main(arguments) == 0
    ((*rows,),) = results(tmp_path)
    split = [row for row in rows if row["step"] == "split"]
    assert [row["devices"] for row in split] == [1, 2]
    assert split[1]["Gflop / one's"] < 0.7
    assert split[1]["state MB / one's"] < 0.6


@pytest.mark.parametrize(
    ("main", "arguments", "text"),
    [
        (step_time.main, ["--shapes", "4x512"], "--shapes must be like 4x512x512, which is four matrices .*, got 4x512"),
        (step_time.main, ["--repeats", "0"], "--repeats must be at least 1, got 0"),
        (step_time.main, ["--width", "64"], "--width is the model's: give --model with it"),
        (step_time.main, ["--model", "--width", "90"], "--width must be divisible by --heads, got 90 and 4"),
        (step_time.main, ["--model", "--width", "0"], "--width must be at least 1, got 0"),
        (memory.main, ["--shapes", "2x12x16"], "--shapes must have sides divisible by the 8 devices, got 2x12x16"),
        (scaling.main, ["--devices", "0"], "--devices must be at least 1, got 0"),
        (compile_time.main, ["--counts", "0"], "--counts must be at least 1, got 0"),
    ],
)
def test_wrong_calls_say_what_was_expected(main, arguments, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        main([*arguments, "--output", str(tmp_path)])
