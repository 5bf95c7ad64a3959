"""The process that forks children, with stand-ins for the libraries of training: `python -m
tests.support.engines.light_fork_server FD`.

How it ends, and what ends with it, does not depend on what it imported, which is seconds of work. Its children find the
stand-ins too.
"""

import runpy
import sys
from types import ModuleType

LIBRARIES = (
    "torch",
    "gpu_workers.train.after.examination",
    "gpu_workers.train.after.merge",
    "gpu_workers.train.process",
)

sys.modules |= {name: ModuleType(name) for name in LIBRARIES}
torch = sys.modules["torch"]
torch.set_num_threads = lambda number: None  # type: ignore[attr-defined]
torch.get_num_threads = lambda: 0  # type: ignore[attr-defined]
runpy.run_module("gpu_workers.train.fork_server", run_name="__main__", alter_sys=True)
