"""A node with two NVIDIA GPUs, played by the stand-in for the driver's library."""

from __future__ import annotations

import pytest
from cluster_support import GPUS
from support import wait_until

from cotenant.scheduler.core.model import Hints

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(240)]

SAY_AND_STAY = "import os, time; print(os.environ['CUDA_VISIBLE_DEVICES'], flush=True); time.sleep(100)"


def test_a_job_is_taken_off_a_lost_gpu_and_runs_on_another(nvidia, nvidia_standin):
    host, standin = nvidia, nvidia_standin
    standin.set(*GPUS)
    assert {gpu.gpu_id: gpu.gpu_type for gpu in host.client.gpus()} == {"GPU-a": "NVIDIA H100", "GPU-b": "NVIDIA H100"}
    job = host.reach(host.run(SAY_AND_STAY, hints=Hints(gpu_memory=1 << 30)), "RUNNING")
    (share,) = job.shares
    lost, other = share.gpu_id, {"GPU-a": "GPU-b", "GPU-b": "GPU-a"}[share.gpu_id]
    standin.set(*GPUS, f"fault * 15 {['GPU-a', 'GPU-b'].index(lost)}")

    def moved() -> bool:
        view = host.client.job(job.job_id)
        return view.state == "RUNNING" and [share.gpu_id for share in view.shares] == [other]

    wait_until(moved, 30, "the job to run on the other GPU")
    view = host.client.job(job.job_id)
    assert (view.restarts, view.epoch) == (0, 2)
    (gpu,) = [gpu for gpu in host.client.gpus() if gpu.gpu_id == lost]
    assert not gpu.healthy
    assert gpu.note.startswith("the GPU is lost (")
    standin.set(*GPUS)
    wait_until(lambda: all(gpu.healthy for gpu in host.client.gpus()), 20, "the GPU to be used again")
    wait_until(lambda: host.client.logs(job.job_id).data.split() == [other.encode()], 20, "it says which GPU it sees")
    host.client.stop(job.job_id, "end of test")
    host.finish(job)
