"""Several processes, each of which sees its own devices only, train as one does."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from sharded import FEW, Problem, largest_difference

TESTS = Path(__file__).parent
TRAIN_LM = TESTS.parent / "examples/train_lm.py"
TIME_LIMIT = 240


def free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_together(commands):
    """Standard outputs of processes that need one another; all are gone at the end, whatever happens."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OPENBLAS_NUM_THREADS": "1", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)
        for command in commands
    ]
    try:
        outputs = [process.communicate(timeout=TIME_LIMIT) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    for process, (_, errors) in zip(processes, outputs, strict=True):
        assert process.returncode == 0, errors[-2000:]
    return [out for out, _ in outputs]


@pytest.mark.slow
def test_two_processes_of_four_devices_equal_one_of_eight(tmp_path):
    port = free_port()
    run_together([sys.executable, str(TESTS / "process_worker.py"), str(port), str(i), str(tmp_path)] for i in range(2))
    expected, _ = Problem(FEW, eps=1e-2).many("auto")
    with np.load(tmp_path / "params.npz") as got:
        assert largest_difference(dict(got), expected) < 1e-6


@pytest.mark.exhaustive
@pytest.mark.slow
def test_train_lm_runs_in_two_processes(tmp_path):
    text = tmp_path / "text.txt"
    text.write_bytes(b"the cat sat on the mat. " * 400)
    options = ["--text", text, "--width", "16", "--layers", "1", "--heads", "2", "--context", "16", "--batch-size", "4"]
    options += ["--steps", "5", "--devices", "4", "--tensor-parallel", "2", "--num-processes", "2"]
    options += ["--coordinator", f"127.0.0.1:{free_port()}"]
    first, second = run_together(
        [sys.executable, TRAIN_LM, *options, "--process-id", str(i), "--out", tmp_path / str(i)] for i in range(2)
    )
    assert "after 5 steps" in first
    assert [line.split(":")[0] for line in first.splitlines() if line.startswith("device")] == ["device 0", "device 1"]
    assert (tmp_path / "0/loss.png").exists()
    assert "steps" not in second
    assert not (tmp_path / "1/loss.png").exists()
