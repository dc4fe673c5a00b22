import os
import tempfile

# Two BLAS threads under eight simulated devices starve one another.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# Compiling is most of what the tests do, and many compile the same program: once per session is enough.
_programs = tempfile.TemporaryDirectory(prefix="rekls_jax-programs-")
jax.config.update("jax_compilation_cache_dir", _programs.name)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
