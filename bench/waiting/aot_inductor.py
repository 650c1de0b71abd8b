"""Where AOTInductor stops on a GPU, within 60 s. python aot_inductor.py control|strobe [cpu]

Steps are printed as they begin. After 50 s, or at a crash, Python's stacks of all threads are printed, then child processes (a compiler?)
and, if gdb is there, the C++ stacks; then the process ends."""

import faulthandler
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

os.environ.setdefault("TORCH_SHOW_CPP_STACKTRACES", "1")
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # no pool of compiling processes, whose start may hang
os.environ["TORCHINDUCTOR_CACHE_DIR"] = tempfile.mkdtemp()
faulthandler.enable(all_threads=True)
for number in (signal.SIGTERM, signal.SIGUSR1):
    faulthandler.register(number, all_threads=True, chain=number == signal.SIGTERM)
began = time.monotonic()
at = "start"


def step(name: str) -> None:
    global at
    at = name
    print(f"{time.monotonic() - began:6.1f} s  {name}", flush=True)


def stop() -> None:
    print(f"*** still in step `{at}` after {time.monotonic() - began:.0f} s", flush=True)
    faulthandler.dump_traceback(all_threads=True)
    sys.stderr.flush()
    own = str(os.getpid())
    subprocess.run(["ps", "--ppid", own, "-o", "pid,etimes,stat,args", "--cols", "200"], check=False)
    subprocess.run(
        "ps -eo pid,ppid,etimes,stat,args --cols 160 | grep -E 'cc1plus|nvcc|ptxas|triton|ninja' | grep -v grep", shell=True, check=False
    )
    for task in Path("/proc/self/task").iterdir():
        with (task / "wchan").open() as where, (task / "comm").open() as name:
            print(f"thread {task.name} {name.read().strip()}: waits in {where.read() or 'nothing'}", flush=True)
    try:
        subprocess.run(["gdb", "-batch", "-p", own, "-ex", "thread apply all bt 12"], timeout=8, check=False)
    except (OSError, subprocess.TimeoutExpired) as why:
        print(f"no C++ stacks: {why}", flush=True)
    os._exit(3)


watch = threading.Timer(50, stop)
watch.daemon = True
watch.start()

step("import torch")
import torch  # noqa: E402

step("import strobe")
import strobe  # noqa: E402

what, device = sys.argv[1], sys.argv[2] if len(sys.argv) > 2 else "cuda"


class Attends(torch.nn.Module):
    def forward(self, q, k, v):
        if what == "control":
            return torch.nn.functional.softmax(q @ k.transpose(-1, -2), -1) @ v
        return strobe.attention(q, k, v, causal=True) + 1


q, k, v = (torch.randn(1, 2, 64, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
model = Attends()
step("eager call")
expected = model(q, k, v)
if device == "cuda":
    torch.cuda.synchronize()
step("export")
program = torch.export.export(model, (q, k, v))
step("compile (Inductor, then the C++ compiler)")
path = torch._inductor.aoti_compile_and_package(program, package_path=str(Path(tempfile.mkdtemp()) / "x.pt2"))
step("load")
runs = torch._inductor.aoti_load_package(path)
step("run")
found = runs(q, k, v)
if device == "cuda":
    step("synchronize")
    torch.cuda.synchronize()
step(f"done: error {(found.float() - expected.float()).abs().max().item():.2g}")
step("free the package")
del runs, program
step("end")
