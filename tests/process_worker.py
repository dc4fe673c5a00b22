"""One of two processes of four CPU devices each: what `test_processes.py` starts.

python process_worker.py PORT PROCESS_ID OUT
"""

import sys

import jax
import numpy as np


def main(port: str, process_id: str, out: str) -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(process_id))
    from jax.experimental.multihost_utils import process_allgather
    from sharded import FEW, Problem

    assert len(jax.devices()) == 8
    params, _ = Problem(FEW, eps=1e-2).many("auto")
    assert not jax.tree.leaves(params)[0].is_fully_addressable
    whole = process_allgather(params, tiled=True)
    if process_id == "0":
        np.savez(f"{out}/params.npz", **whole)


if __name__ == "__main__":
    main(*sys.argv[1:])
