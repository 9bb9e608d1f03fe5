"""The shim inside a job. The job's torch is a stand-in of a few lines: what counts is what the shim does around it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from support import wait_until

import cotenant.actors.shim
from cotenant.actors.shim import bootstrap
from cotenant.actors.shim.process import Config, DeviceProcess
from cotenant.actors.shim.reportfile import Controls, ProcessReport, read_reports
from cotenant.actors.shim.shareword import ShareRecord, create
from cotenant.actors.shim.throttle import CREDIT_S

SITE = Path(cotenant.actors.shim.__file__).parent / "site"
CORES = sorted(os.sched_getaffinity(0))
DEVICE = CORES[0]
TORCH = """
hooks = []
def register_optimizer_step_post_hook(hook):
    hooks.append(hook)
class Optimizer:
    def step(self):
        for hook in hooks:
            hook(self, (), {})
"""
needs_two_cores = pytest.mark.skipif(len(CORES) < 2, reason="a device and a host need two cores to differ")


class Job:
    """A job directory and what a host agent would put into the environment."""

    def __init__(self, path: Path, shares: int = 1, compute: float = 1.0, memory_bytes: int = 1 << 40) -> None:
        self.dir = path / "job"
        self.dir.mkdir()
        self.lib = path / "lib"
        (self.lib / "torch/optim").mkdir(parents=True)
        (self.lib / "torch/__init__.py").write_text("")
        (self.lib / "torch/optim/__init__.py").write_text("from torch.optim.optimizer import Optimizer\n")
        (self.lib / "torch/optim/optimizer.py").write_text(TORCH)
        self.started: list[subprocess.Popen[str]] = []
        self.share = ShareRecord(1, 0, compute, memory_bytes)
        self.writer = create(str(self.dir / "share"), [self.share] * shares)
        self.env = {
            "PATH": os.environ["PATH"],
            "PYTHONPATH": f"{SITE}:{self.lib}",
            "COTENANT_JOB_DIR": str(self.dir),
            "COTENANT_DEVICE": "cpu",
            "COTENANT_CORES": ";".join(str(CORES[i % len(CORES)]) for i in range(shares)),
            "COTENANT_HOST_CORES": ",".join(map(str, CORES)),
        }

    def start(self, code: str, *command: str, **env: str) -> subprocess.Popen[str]:
        script = self.lib / "script.py"
        script.write_text("import os, sys, time\n" + textwrap.dedent(code))
        process = subprocess.Popen(
            command or [sys.executable, str(script)],
            env=self.env | env,
            cwd=self.lib,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.started.append(process)
        return process

    def close(self) -> None:
        for process in self.started:
            process.kill()
            process.communicate()

    def run(self, code: str, *command: str, **env: str) -> str:
        process = self.start(code, *command, **env)
        out, err = process.communicate(timeout=30)
        assert (process.returncode, err) == (0, ""), err
        return out.strip()

    def reports(self) -> list[ProcessReport]:
        return read_reports(str(self.dir))


@pytest.fixture
def new_job(tmp_path):
    jobs = []

    def make(**options) -> Job:
        jobs.append(Job(tmp_path, **options))
        return jobs[-1]

    yield make
    for job in jobs:
        job.close()


@pytest.fixture
def job(new_job):
    return new_job()


STEPS = "import torch.optim\noptimizer = torch.optim.Optimizer()\nfor _ in range(3): optimizer.step()\n"


# -- loading --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command",
    [
        (sys.executable, "script.py"),
        (sys.executable, "-m", "script"),
        (sys.executable, "-c", "import script"),
        ("bash", "-c", f"true && {sys.executable} script.py"),
    ],
    ids=["script", "module", "inline", "shell"],
)
def test_steps_are_counted_however_python_is_started(job, command):
    job.run(STEPS, *command)
    assert [report.steps for report in job.reports()] == [3]


def test_a_program_sees_nothing_of_the_shim(job):
    assert job.run(f"print({str(SITE)!r} in sys.path)") == "False"


def test_the_users_own_sitecustomize_runs_as_ever(job):
    (job.lib / "sitecustomize.py").write_text("import sys\nsys.mine = __file__\n")
    out = job.run(STEPS + "import sitecustomize; print(sys.mine, sitecustomize.__file__)")
    assert out == f"{job.lib}/sitecustomize.py {job.lib}/sitecustomize.py"
    assert [report.steps for report in job.reports()] == [3]


def test_an_error_in_the_users_sitecustomize_is_the_users(job):
    (job.lib / "sitecustomize.py").write_text("raise RuntimeError('mine')\n")
    process = job.start("print('on')")
    out, err = process.communicate(timeout=30)
    assert out == "on\n"
    assert "RuntimeError: mine" in err
    assert "cotenant" not in err


def test_outside_a_job_it_does_nothing(job):
    job.env = {"PYTHONPATH": job.env["PYTHONPATH"]}
    assert job.run(STEPS + "print(sorted(m for m in sys.modules if 'cotenant' in m))") == "[]"


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({"COTENANT_JOB_DIR": "/no/such/directory"}, "No such file or directory"),
        ({"COTENANT_DEVICE": "tpu"}, "COTENANT_DEVICE: 'tpu' is not accepted"),
        ({"COTENANT_CORES": "0;1"}, "COTENANT_CORES: names 2 devices, the share word has 1"),
        ({"COTENANT_CORES": "first"}, "invalid literal"),
    ],
)
def test_a_broken_environment_costs_one_line_and_no_more(job, env, says):
    code = "import subprocess; subprocess.run([sys.executable, '-c', 'pass'])\n" + STEPS + "print('done')"
    process = job.start(code, **env)
    out, err = process.communicate(timeout=30)
    assert (process.returncode, out) == (0, "done\n")
    assert err.count("\n") == 1, err
    assert err.startswith("cotenant: this process runs without its share being enforced: ")
    assert says in err


def test_a_program_without_torch_does_not_even_notice_a_broken_environment(job):
    assert job.run("print('done')", COTENANT_JOB_DIR="/no/such/directory") == "done"


def test_a_broken_share_word_costs_one_line(job):
    (job.dir / "share").write_bytes(b"nonsense")
    process = job.start(STEPS)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 0
    assert err.count("\n") == 1, err


def test_a_job_directory_that_goes_away_costs_nothing(job):
    job.writer.write(0, job.share._replace(compute=0.9))
    job.run(STEPS + f"import shutil; shutil.rmtree({str(job.dir)!r})\nfor _ in range(3): optimizer.step()")


def test_looking_for_torch_is_not_importing_it(job):
    job.run("import importlib.util; importlib.util.find_spec('torch.optim.optimizer')\n" + STEPS)
    assert [report.steps for report in job.reports()] == [3]


# -- counting -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fired", "steps"),
    [("a", 1), ("aaa", 3), ("ab", 1), ("abab", 2), ("ababa", 3), ("aab", 2), ("abcabc", 2), ("aaabaaab", 6)],
)
def test_a_step_is_one_round_of_the_optimizers(new_job, fired, steps):
    job = new_job()
    optimizers = {name: object() for name in "abc"}
    before = os.sched_getaffinity(0)
    everywhere = frozenset(before)
    process = DeviceProcess(Config(str(job.dir), (everywhere,), everywhere, 0))
    try:
        for name in fired:
            process.on_step(optimizers[name])
    finally:
        process.release()
    assert job.reports()[0].steps == steps


def test_the_report_says_when_the_last_step_was_and_what_is_controlled(job):
    before = time.monotonic()
    job.run(STEPS)
    report = job.reports()[0]
    assert before < report.last_step_s < time.monotonic()
    assert Controls(report.controls) == Controls.PINNED | Controls.STEPS | Controls.MEMORY


def test_a_program_that_never_steps_is_reported_as_such(job):
    job.run("import torch.optim")
    report = job.reports()[0]
    assert (report.steps, Controls(report.controls)) == (0, Controls.PINNED)


def test_a_program_without_torch_reports_nothing(job):
    assert job.run("print(len(os.sched_getaffinity(0)))") == str(len(CORES))
    assert job.reports() == []


# -- where processes run --------------------------------------------------------------------------------------------

WHERE = "sorted(os.sched_getaffinity(0))"
CHILD = """
import multiprocessing, torch.optim
def child(queue): queue.put((sorted(os.sched_getaffinity(0)), resource.getrlimit(resource.RLIMIT_DATA)[0]))
if __name__ == "__main__":
    optimizer = torch.optim.Optimizer()
    optimizer.step()
    context = multiprocessing.get_context({method!r})
    queue = context.SimpleQueue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    print(sorted(os.sched_getaffinity(0)), *queue.get())
    process.join()
"""


@needs_two_cores
@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_helper_processes_are_off_the_device(job, method):
    out = job.run("import resource\n" + CHILD.format(method=method))
    assert out == f"[{DEVICE}] {CORES} -1"
    assert len(job.reports()) == 1, "a helper reports nothing"


@needs_two_cores
def test_every_thread_is_on_the_device(job):
    out = job.run(
        """
        import threading
        seen = []
        go = threading.Event()
        thread = threading.Thread(target=lambda: (go.wait(), seen.append(sorted(os.sched_getaffinity(0)))))
        thread.start()
        import torch.optim
        go.set(); thread.join()
        print(seen)
        """
    )
    assert out == f"[[{DEVICE}]]"


@needs_two_cores
@pytest.mark.parametrize("method", ["fork", "spawn"])
def test_a_child_that_trains_is_a_device_process_of_its_own(job, method):
    code = CHILD.format(method=method).replace("def child(queue): ", "def child(queue): main.optimizer_steps(); ")
    code = code.replace(
        "def child",
        "class main:\n    def optimizer_steps():\n        o = torch.optim.Optimizer()\n"
        "        for _ in range(5): o.step()\ndef child",
    )
    out = job.run("import resource\n" + code)
    assert out.startswith(f"[{DEVICE}] [{DEVICE}] ")
    assert sorted(report.steps for report in job.reports()) == [1, 5]


def test_a_forked_process_does_not_write_its_parents_report(job):
    job.run(
        STEPS
        + "if os.fork() == 0:\n    for _ in range(4): optimizer.step()\n    os._exit(0)\nos.wait(); optimizer.step()"
    )
    assert sorted(report.steps for report in job.reports()) == [4, 4]


@needs_two_cores
def test_the_local_rank_picks_the_share(new_job):
    job = new_job(shares=2)
    for rank in "01":
        out = job.run(STEPS + f"print({WHERE})", LOCAL_RANK=rank)
        assert out == f"[{CORES[int(rank)]}]"
    assert sorted(report.share_index for report in job.reports()) == [0, 1]


@needs_two_cores
def test_a_rank_that_is_chosen_after_torch_is_imported_counts_too(new_job):
    job = new_job(shares=2)
    out = job.run("import torch.optim\nos.environ['LOCAL_RANK'] = '1'\n" + STEPS + f"print({WHERE})")
    assert out == f"[{CORES[1]}]"
    assert [report.share_index for report in job.reports()] == [1]


def test_a_process_the_agent_did_not_start_leaves_a_marker_and_its_children_do_not(job):
    out = job.run(
        "import subprocess; print(os.getpid()); subprocess.run([sys.executable, '-c', 'pass'])", COTENANT_ATTACH="1"
    )
    assert [path.name for path in job.dir.glob("attach-*")] == [f"attach-{out}"]
    assert (job.dir / f"attach-{out}").read_text().split()[1] == "started"


@needs_two_cores
def test_a_program_can_put_itself_under_a_share_and_leave_it(job):
    src = Path(cotenant.actors.shim.__file__).parents[2]
    env = {k: v for k, v in job.env.items() if k.startswith("COTENANT")}
    job.env = {"PYTHONPATH": f"{src}:{job.lib}"}
    out = job.run(
        STEPS
        + f"import glob; from cotenant.actors import shim; job = {str(job.dir)!r}\n"
        + f"stay = shim.attach({env!r}); optimizer.step(); print({WHERE}, len(glob.glob(job + '/attach-*')))\n"
        + "try: shim.attach({})\nexcept RuntimeError as error: print('already under a share' in str(error))\n"
        + f"stay.detach(); stay.detach(); optimizer.step(); print({WHERE}, len(glob.glob(job + '/attach-*')))\n"
        + f"stay = shim.attach({env!r}); optimizer.step(); optimizer.step()\n"
    )
    assert out.splitlines() == [f"[{DEVICE}] 1", "True", f"{CORES} 0"]
    assert [report.steps for report in job.reports()] == [2]


# -- holding to the share -------------------------------------------------------------------------------------------


BURN = """
import torch.optim
optimizer = torch.optim.Optimizer()
end = time.monotonic() + {seconds}
while time.monotonic() < end:
    until = time.thread_time() + 0.005
    while time.thread_time() < until: pass
    optimizer.step()
"""


def test_a_real_process_is_held_to_its_share_and_says_so(new_job):
    job = new_job(compute=0.1)
    out = job.run(
        "started = time.monotonic(), time.process_time()\n"
        + BURN.format(seconds=1.5)
        + "print(time.process_time() - started[1], time.monotonic() - started[0])"
    )
    used_s, wall_s = map(float, out.split())
    assert used_s / wall_s < 0.1 + CREDIT_S / 1.5 + 0.03  # a busy machine lets it save up credit
    report = job.reports()[0]
    assert 0.0 < report.throttled_s < wall_s
    assert Controls.COMPUTE in Controls(report.controls)


def test_two_processes_on_one_share_divide_it(new_job):
    job = new_job(compute=0.5)
    code = BURN.format(seconds=3.0).replace("end =", "started = time.monotonic(), time.process_time()\nend =")
    code += "print((time.process_time() - started[1]) / (time.monotonic() - started[0]))"
    both = [job.start(code) for _ in range(2)]
    used = [float(process.communicate(timeout=30)[0]) for process in both]
    assert sum(used) < 0.5 + 2 * CREDIT_S / 3.0 + 0.05, used


def test_a_grown_share_wakes_a_process_that_is_held(new_job):
    job = new_job(compute=0.01)
    process = job.start(
        "import torch.optim\noptimizer = torch.optim.Optimizer(); optimizer.step()\n"
        "until = time.process_time() + 0.3\nwhile time.process_time() < until: pass\n"
        "print('held', flush=True); optimizer.step(); print('free')"
    )
    assert process.stdout.readline() == "held\n"
    time.sleep(0.2)
    assert process.poll() is None
    grown = time.monotonic()
    job.writer.write(0, job.share._replace(revision=1, compute=1.0))
    assert process.communicate(timeout=10)[0] == "free\n"
    assert time.monotonic() - grown < 2.0


def test_a_held_process_takes_signals(new_job):
    job = new_job(compute=0.02)
    process = job.start(
        "import torch.optim\noptimizer = torch.optim.Optimizer(); optimizer.step()\n"
        "until = time.process_time() + 0.1\nwhile time.process_time() < until: pass\n"
        "print('held', flush=True)\n"
        "try: optimizer.step()\nexcept KeyboardInterrupt: print('interrupted')"
    )
    assert process.stdout.readline() == "held\n"
    before = job.reports()[0].throttled_s
    wait_until(lambda: job.reports()[0].throttled_s > before, 5, "the process is held")
    process.send_signal(signal.SIGINT)
    assert process.communicate(timeout=5)[0] == "interrupted\n"


MIB = 1 << 20


def test_an_allocation_beyond_the_memory_share_fails_in_the_job(new_job):
    job = new_job(memory_bytes=200 * MIB)
    out = job.run(
        STEPS
        + "mine = bytearray(100 << 20)\ntry: more = bytearray(500 << 20)\nexcept MemoryError: print('refused')\n"
        + "del mine; mine = bytearray(150 << 20); print('within')"
    )
    assert out.split() == ["refused", "within"]


def test_a_share_below_what_is_used_takes_nothing_away(new_job):
    job = new_job(memory_bytes=MIB)
    out = job.run("mine = bytearray(100 << 20)\n" + STEPS + "print(sum(mine), len([0] * 1000))")
    assert out == "0 1000"


def test_a_grown_memory_share_is_taken_up_at_the_next_step(new_job):
    job = new_job(memory_bytes=50 * MIB)
    out = job.start(
        STEPS + "try: bytearray(500 << 20)\nexcept MemoryError: print('refused', flush=True)\n"
        "time.sleep(0.5); optimizer.step(); bytearray(500 << 20); print('granted')"
    )
    assert out.stdout.readline() == "refused\n"
    job.writer.write(0, job.share._replace(revision=1, memory_bytes=1000 * MIB))
    assert out.communicate(timeout=10)[0] == "granted\n"


def test_memory_is_not_limited_before_the_first_step(new_job):
    job = new_job(memory_bytes=MIB)
    assert job.run("import torch.optim\nprint(len(bytearray(100 << 20)))") == str(100 * MIB)


def test_a_subprocess_does_not_keep_the_limit_it_was_born_with(new_job):
    job = new_job(memory_bytes=MIB)
    (job.lib / "child.py").write_text(STEPS + "bytearray(60 << 20); print('fits')")
    process = job.start(
        "import subprocess\n" + STEPS + "print('limited', flush=True); time.sleep(0.3)\n"
        "subprocess.run([sys.executable, 'child.py'], check=True)"
    )
    assert process.stdout.readline() == "limited\n"
    job.writer.write(0, job.share._replace(revision=1, memory_bytes=400 * MIB))
    assert process.communicate(timeout=10) == ("fits\n", "")


TORCH_OOM = type("OutOfMemoryError", (RuntimeError,), {})


@pytest.mark.parametrize(
    ("error", "on_cores", "on_a_gpu"),
    [
        (TORCH_OOM("CUDA out of memory. Tried to allocate 2.00 GiB"), True, True),
        (RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB"), False, True),  # torch before 1.13
        (RuntimeError("CUDA error: out of memory"), False, True),
        (MemoryError(), True, False),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True, False),
        (RuntimeError("nan"), False, False),
        (ValueError("CUDA out of memory"), False, False),
    ],
)
def test_on_a_gpu_only_its_own_memory_counts(tmp_path, monkeypatch, error, on_cores, on_a_gpu):
    """The host's is no part of a share of a GPU: more of the GPU would not help."""
    for device, counts in (("cpu", on_cores), ("cuda", on_a_gpu)):
        (tmp_path / device).mkdir()
        monkeypatch.setenv("COTENANT_DEVICE", device)
        monkeypatch.setattr(sys, "excepthook", lambda *_: None)
        bootstrap._tell_of_want_of_memory(str(tmp_path / device))
        sys.excepthook(type(error), error, None)
        assert (tmp_path / device / bootstrap.OUT_OF_MEMORY).exists() == counts
