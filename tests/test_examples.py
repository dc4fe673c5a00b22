"""The README's code and the examples run, and wrong calls end in one sentence."""

import csv
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import language_model as lm
import numpy as np
import pytest
import quickstart
import train_lm

ROOT = Path(__file__).parent.parent
SMALL = ["--width", "16", "--layers", "1", "--heads", "2", "--context", "16", "--batch-size", "4"]


def blocks(language):
    return re.findall(rf"```{language}\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


@pytest.mark.parametrize("block", blocks("python"), ids=range(len(blocks("python"))))
def test_the_readmes_python_runs(block):
    exec(compile(block, "README.md", "exec"), {})


def test_the_readme_names_two_commands_that_set_themselves_up():
    commands = blocks("sh")
    assert len(commands) == 2
    assert all(command.startswith("python3 -m venv .venv && .venv/bin/pip install") for command in commands)
    assert "examples/train_lm.py --compare" in commands[0]
    assert "-m pytest" in commands[1]
    assert len((ROOT / "README.md").read_text().splitlines()) <= 180
    assert len((ROOT / "examples/quickstart.py").read_text().splitlines()) <= 60
    assert len((ROOT / "examples/tensor_parallel.py").read_text().splitlines()) <= 100


@pytest.mark.slow
def test_quickstart_learns():
    assert quickstart.main(steps=150) > 0.9


def rows(out):
    with (out / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", ["rekls", pytest.param("muon", marks=pytest.mark.exhaustive)])
def test_train_lm_trains_and_writes_what_it_learned(tmp_path, capsys, optimizer):
    text = tmp_path / "text.txt"
    text.write_bytes(b"the cat sat on the mat. " * 400)
    held_out = text.read_text()[8640 : 8640 + 32]
    options = [
        "--text",
        str(text),
        "--optimizer",
        optimizer,
        "--steps",
        "30",
        "--lr",
        "0.02",
        "--out",
        str(tmp_path / "a/b"),
    ]
    assert train_lm.main(SMALL + options) == 0
    metrics = rows(tmp_path / "a/b")
    assert [int(row["step"]) for row in metrics] == list(range(1, 31))
    assert {row["optimizer"] for row in metrics} == {optimizer}
    assert float(metrics[-1]["loss"]) < 0.8 * float(metrics[0]["loss"])
    validation = [float(row["validation_loss"]) for row in metrics if row["validation_loss"]]
    assert len(validation) == 10
    assert validation[-1] < validation[0]
    assert (tmp_path / "a/b/loss.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "a/b/sample.txt").read_text(encoding="utf-8").startswith(held_out)
    printed = capsys.readouterr()
    assert (
        f"{optimizer}, learning rate 0.02: validation loss {validation[-1]:.3f} nats per byte after 30 steps" in printed.out
    )
    assert "ms/step" in printed.err
    assert "left" in printed.err


@pytest.mark.slow
def test_compare_trains_both(tmp_path):
    assert train_lm.main([*SMALL, "--compare", "--steps", "3", "--out", str(tmp_path)]) == 0
    assert [row["optimizer"] for row in rows(tmp_path)] == 3 * ["rekls"] + 3 * ["adamw"]


@pytest.mark.slow
def test_a_run_that_diverges_says_so_and_writes_what_it_saw(tmp_path, capsys):
    options = ["--optimizer", "adamw", "--lr", "1e30", "--steps", "20", "--out", str(tmp_path)]
    assert train_lm.main(SMALL + options) == 0
    assert "adamw diverged: the loss was nan at step " in capsys.readouterr().out
    assert len(rows(tmp_path)) < 20
    assert (tmp_path / "loss.png").exists()
    assert (tmp_path / "sample.txt").exists()


@pytest.mark.exhaustive
@pytest.mark.slow
def test_the_seed_decides_the_run(tmp_path):
    losses = []
    for i, seed in enumerate(["1", "1", "2"]):
        assert train_lm.main([*SMALL, "--steps", "3", "--seed", seed, "--out", str(tmp_path / str(i))]) == 0
        losses.append([row["loss"] for row in rows(tmp_path / str(i))])
    assert losses[0] == losses[1] != losses[2]


@pytest.mark.exhaustive
@pytest.mark.slow
def test_sharded_training_follows_the_same_curve(tmp_path, capsys):
    curves = {}
    for name, options in {"one": [], "eight": ["--devices", "8", "--tensor-parallel", "4"]}.items():
        assert train_lm.main([*SMALL, *options, "--steps", "10", "--lr", "0.01", "--out", str(tmp_path / name)]) == 0
        curves[name] = [float(row["loss"]) for row in rows(tmp_path / name)]
    np.testing.assert_allclose(curves["one"], curves["eight"], rtol=2e-3)
    reports = [line for line in capsys.readouterr().out.splitlines() if line.startswith("device")]
    pattern = r"device (\d): optimizer state [\d.]+ MB, eigh (\d+)% of the work, \d+ ms per step"
    found = [re.fullmatch(pattern, line) for line in reports]
    assert [int(match[1]) for match in found if match] == list(range(8))
    assert sum(int(match[2]) for match in found if match) == pytest.approx(100, abs=4)


def start(arguments, **options):
    command = [sys.executable, str(ROOT / "examples/train_lm.py"), *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **options)


@pytest.mark.slow
def test_ctrl_c_keeps_what_was_learned(tmp_path):
    process = start([*SMALL, "--steps", "100000", "--out", str(tmp_path)])
    try:
        seen, deadline = "", time.monotonic() + 120
        while "ms/step" not in seen and time.monotonic() < deadline:
            seen += process.stderr.read(64)
        process.send_signal(signal.SIGINT)
        out, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == 130
    assert "Traceback" not in seen + errors
    assert "metrics.csv, loss.png and sample.txt are in" in out
    assert 0 < len(rows(tmp_path)) < 100000
    assert rows(tmp_path)[-1]["validation_loss"]
    assert (tmp_path / "loss.png").exists()
    assert (tmp_path / "sample.txt").exists()


WRONG_CALLS = [
    (["--text", "nowhere.txt"], "there is no file or folder nowhere.txt"),
    (["--text", "empty"], "the text has 0 bytes; a context of 128 needs at least 1281"),
    (["--text", "folder"], "the text has 0 bytes; a context of 128 needs at least 1281"),
    (["--width", "30"], "--width must be divisible by --heads, got 30 and 4"),
    (["--steps", "0"], "--steps must be at least 1, got 0"),
    (["--batch-size", "-1"], "--batch-size must be at least 1, got -1"),
    (["--lr", "nan"], "--lr must be a number above 0, got nan"),
    (["--lr", "0"], "--lr must be a number above 0, got 0.0"),
    (["--seed", "-1"], "--seed must lie in [0, 2**32), got -1"),
    (["--seed", "99999999999"], "--seed must lie in [0, 2**32), got 99999999999"),
    (["--compare", "--optimizer", "muon"], "--compare trains rekls and adamw: leave out --optimizer"),
    (["--text", "folder/binary"], "folder/binary is not text: it has bytes that are 0"),
    (["--devices", "0"], "--devices must be at least 1, got 0"),
    (["--devices", "16"], "--devices must be at most the 8 that there are, got 16"),
    (["--devices", "8", "--tensor-parallel", "3"], "--devices must be divisible by --tensor-parallel, got 8 and 3"),
    (["--tensor-parallel", "5"], "--width must be divisible by --tensor-parallel, got 96 and 5"),
    (["--devices", "8", "--batch-size", "6"], "--batch-size must be divisible by the 8 copies of the model, got 6"),
    (["--num-processes", "2"], "--num-processes above 1 needs --coordinator, where process 0 listens"),
    (["--process-id", "1"], "--process-id must lie in [0, 1), got 1"),
    (["--out", "empty/deeper"], "--out must be a folder that can be made, got empty/deeper: Not a directory"),
    (["--out", "empty"], "--out must be a folder that can be made, got empty: File exists"),
]


@pytest.mark.parametrize(("arguments", "sentence"), WRONG_CALLS, ids=str)
def test_a_wrong_call_is_one_sentence(tmp_path, monkeypatch, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    Path("empty").touch()
    Path("folder").mkdir()
    Path("folder/binary").write_bytes(b"\0" * 10000)
    with pytest.raises(ValueError, match=re.escape(sentence)):
        train_lm.main(arguments)


def test_the_sentence_is_all_that_is_printed(tmp_path):
    process = start(["--width", "30"], cwd=tmp_path)
    out, errors = process.communicate(timeout=120)
    assert (process.returncode, out) == (1, "")
    assert errors == "train_lm: --width must be divisible by --heads, got 30 and 4\n"


def test_text_of_a_folder_is_its_text_files_in_order(tmp_path):
    (tmp_path / "deep").mkdir()
    (tmp_path / "b.txt").write_text("second")
    (tmp_path / "a.txt").write_text("first ")
    (tmp_path / "deep/picture").write_bytes(b"\0not text")
    assert bytes(lm.read_text(tmp_path)) == b"first second"


def test_a_sample_holds_no_control_characters():
    model = lm.Transformer(8, 1, 2, 8)
    params = model.init(jax.random.key(0), np.zeros((1, 8), np.int32))
    written = lm.sample(model, params, b"\x1b[ab\x00c\n", 300, seed=0)
    assert all(c.isprintable() or c in "\n\t" for c in written)
    assert written.startswith("\N{REPLACEMENT CHARACTER}[ab\N{REPLACEMENT CHARACTER}c\n")


def test_the_shortest_text_that_splits():
    training, validation = lm.split(np.zeros(161, np.uint8), 16)
    assert (len(training), len(validation)) == (144, 17)
    assert lm.batch(validation, 5, 16, np.random.default_rng(0)).shape == (5, 17)
    with pytest.raises(ValueError, match="the text has 160 bytes; a context of 16 needs at least 161"):
        lm.split(np.zeros(160, np.uint8), 16)
