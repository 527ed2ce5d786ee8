"""python compile_for_nobody.py: a kernel is listed without a GPU, compiled by real worker processes and found again."""

from __future__ import annotations

import logging
import types

import torch
import triton
from triton.backends.compiler import GPUTarget

from tokenspeed.kernels.triton.compile_monitor import CompileMonitor, KernelList, KernelOrder, load_kernel
from tokenspeed.kernels.triton.pointwise import silu_and_mul
from tokenspeed.runner import compile, compile_folder, compile_start

TARGET = compile_folder.Target("cuda", 90, 32)


def main() -> None:
    logging.basicConfig(level=logging.WARNING)
    driver = types.SimpleNamespace(
        get_current_device=lambda: 0,
        get_current_target=lambda: GPUTarget(TARGET.backend, TARGET.arch, TARGET.warp_size),
        get_current_stream=lambda device: 0,
    )
    triton.runtime.driver.set_active(driver)
    orders: list[KernelOrder] = []
    for dtype in (torch.bfloat16, torch.float16):
        with KernelList(orders.append):
            silu_and_mul(torch.zeros(4, 256, dtype=dtype))
    print("listed", len(orders))
    workers = compile_start.start_workers(2)
    assert workers is not None
    compile_folder.publish(workers.folder / compile_folder.TARGET, TARGET)
    with compile.CompileJob(workers, None) as job:
        for order in orders:
            job.order(order)
        print(job.wait(True))
    monitor = CompileMonitor()
    monitor.install()
    for order in orders:
        load_kernel(order)
    print("loaded", monitor.num_loaded, "compiled", monitor.num_compiled)


if __name__ == "__main__":
    main()
