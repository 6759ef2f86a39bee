"""Every test process computes on one thread: xdist runs one process a core, more threads only wait for each other."""

import os
import signal

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch

torch.set_num_threads(1)

if not torch.cuda.is_available():
    # Triton decides when it is first imported, by whatever test, whether its own functions are interpreted.
    os.environ.setdefault("TRITON_INTERPRET", "1")

if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    # A shell starts what it puts into the background with Ctrl-C ignored; some tests press it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
