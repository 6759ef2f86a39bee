"""Every test process computes on one thread: xdist runs one process a core, more threads only wait for each other."""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)
