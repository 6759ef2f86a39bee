"""Every test process computes on one thread: xdist runs one process a core, more threads only wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Triton decides when it is first imported, by whatever test, whether its own functions are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")
