"""A function in a process of its own, with its times and its peak memory.

For the benchmarks of this folder; Linux only, since it reads /proc.
"""

import contextlib
import json
import os
import time
from pathlib import Path


def memory(name: str) -> int:
    """VmRSS (memory now) or VmHWM (its peak) of this process, in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(x.split()[1]) for x in lines if x.startswith(name + ":"))


def apart(function, *arguments) -> dict:
    """Run a function in a process of its own.

    Returns:
        Its answer (as JSON holds it), its seconds by the clock and of the processor
        (all threads together), and its peak memory in MB above what was there before.
    """
    read, write = os.pipe()
    process = os.fork()
    if not process:
        status = 1
        try:
            with contextlib.suppress(OSError):
                Path("/proc/self/clear_refs").write_text("5")  # forget the peak so far
            before = memory("VmRSS")
            began, busy = time.perf_counter(), time.process_time()
            answer = function(*arguments)
            figures = {
                "answer": answer,
                "seconds": time.perf_counter() - began,
                "cpu_seconds": time.process_time() - busy,
                "peak_mb": (memory("VmHWM") - before) / 1e6,
            }
            os.write(write, json.dumps(figures).encode())
            status = 0
        finally:
            os._exit(status)
    os.close(write)
    with open(read, "rb") as pipe:
        said = pipe.read()
    if os.waitpid(process, 0)[1]:
        raise RuntimeError(f"{function.__name__} failed")
    return json.loads(said)
