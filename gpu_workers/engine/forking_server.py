"""vLLM's API server on a CPU: `python -m gpu_workers.engine.forking_server PARTS OPTIONS`.

vLLM's platform for CPUs spawns EngineCore and Worker, because each may get its own threads on certain cores. Each then
imports all of vLLM again, which takes two thirds of the CPU time of a start. Our engines are not bound to cores
(`VLLM_CPU_OMP_THREADS_BIND=nobind`), so the processes are forked here, as vLLM's other platforms allow. This is safe
because no process computes before it forks. A fork lacks the threads of its parent.

Because of these cores, the platform also runs a single worker in a separate process, for which EngineCore waits in a
busy loop. Our single worker runs within EngineCore, as on other platforms.

A forked process can die before the keeper looks for it, so its parent records it in the file PARTS.
"""

import gc
import os
import sys
from multiprocessing.context import ForkContext, ForkProcess
from pathlib import Path

from gpu_workers.common.process_tree import Process, identify
from gpu_workers.engine.state import record_part

gc.disable()  # imports leave almost no garbage, and a seventh of their time is spent looking for it
from vllm.config import VllmConfig  # noqa: E402
from vllm.entrypoints.launchers.api_server.entry import main  # noqa: E402
from vllm.model_executor.layers.fused_moe.config import FusedMoEConfig  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402

from gpu_workers.engine.cpu_adapters import leave_out_rows_without_adapter  # noqa: E402

gc.freeze()
gc.enable()

_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"


def fork_processes() -> None:
    """Make the platform fork EngineCore, with a single worker in it.

    The platform sets both at each check of a configuration.
    """
    platform = type(current_platform)
    check = platform.check_and_update_config

    def check_and_fork(config: VllmConfig) -> None:
        check(config)
        if config.parallel_config.world_size == 1:
            config.parallel_config.distributed_executor_backend = "uni"
        os.environ[_METHOD] = "fork"  # noqa: TID251 - vLLM reads it there

    platform.check_and_update_config = staticmethod(check_and_fork)


def leave_experts_alone() -> None:
    """Make the CPU's kernel compute the experts of a mixture.

    With adapters of any layer, vLLM chooses a Triton kernel, because adapters of experts need one. A CPU has no Triton,
    and our adapters change no experts (apps/contracts/adapter_files/support.py).
    """
    complete = FusedMoEConfig.__post_init__

    def complete_without_adapters(config: FusedMoEConfig) -> None:
        config.is_lora_enabled = False
        complete(config)

    FusedMoEConfig.__post_init__ = complete_without_adapters


def record_processes(file: Path) -> None:
    """Record each process that vLLM forks. Helpers are not recorded, because they are of `multiprocessing.Process`."""

    class Part(ForkProcess):
        def start(self) -> None:
            super().start()
            assert self.pid is not None
            record_part(file, identify(self.pid) or Process(self.pid, started_ticks=0))

    ForkContext.Process = Part


if __name__ == "__main__":
    fork_processes()
    leave_out_rows_without_adapter()
    leave_experts_alone()
    record_processes(Path(sys.argv.pop(1)))
    main()
