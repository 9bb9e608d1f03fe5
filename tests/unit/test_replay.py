"""Recordings, and playing them with scripted faults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cotenant.actors.devices.base import JobSample, Sample
from cotenant.actors.devices.recording import (
    Fault,
    Levels,
    RecordedGpu,
    RecordedSample,
    Recording,
    RecordingError,
    load_recording,
    save_recording,
)
from cotenant.actors.devices.registry import create_backend
from cotenant.actors.devices.replay import ABSURD_MEMORY_BYTES, ReplayBackend
from cotenant.configs.settings import DeviceSettings
from cotenant.forecasting.types import DeviceActivity

GPU = RecordedGpu("A100", 40 << 30)
HEAD = {"cotenant_replay": 1, "gpus": [{"gpu_type": "A100", "memory_bytes": 40 << 30}]}


class Player:
    """Plays a recording on a clock that the test moves; one job is watched on GPU 0 from the start."""

    def __init__(self, *samples: RecordedSample, faults: tuple[Fault, ...] = (), period_s: float | None = None) -> None:
        self.now = 1000.0
        recording = Recording((GPU, GPU), samples, faults, period_s)
        self.backend = ReplayBackend(recording, "host", clock=lambda: self.now)
        self.gpus = [gpu.gpu_id for gpu in self.backend.discover()]
        self.backend.watch("train-1", self.gpus[:1], root_pid=1)

    def at(self, at_s: float) -> Sample:
        self.now = 1000.0 + at_s
        return self.backend.sample()

    def job(self, at_s: float) -> JobSample:
        return self.at(at_s).jobs[0]


def steady(util: float | None, memory: float | None = 1e9, host: float | None = 0.5) -> RecordedSample:
    return RecordedSample(0.0, (), {"train-*": Levels(util, memory, host)})


def test_counters_are_the_readings_added_up_over_time() -> None:
    play = Player(steady(0.5), RecordedSample(10.0, (), {"train-*": Levels(1.0, 2e9, 0.0)}))
    rows = [(job.busy_s, job.host_busy_s, job.memory_bytes) for job in map(play.job, (0.0, 4.0, 10.0, 12.0))]
    assert rows == [(0.0, 0.0, 1e9), (2.0, 2.0, 1e9), (5.0, 5.0, 2e9), (7.0, 5.0, 2e9)]


def test_the_samples_begin_again_after_the_period() -> None:
    play = Player(steady(1.0), RecordedSample(1.0, (), {"*": Levels(0.0, 2e9)}), period_s=2.0)
    assert [play.job(at_s).busy_s for at_s in (0.5, 1.5, 2.5, 7.0)] == pytest.approx([0.5, 1.0, 1.5, 4.0])
    assert [play.job(at_s).memory_bytes for at_s in (0.5, 1.5, 2.5)] == [1e9, 2e9, 1e9]


def test_a_job_plays_from_the_moment_it_is_watched() -> None:
    play = Player(steady(1.0), RecordedSample(1.0, (), {"*": Levels(0.0)}))
    play.at(100.0)
    play.backend.watch("train-2", play.gpus[1:], root_pid=1)
    assert [job.busy_s for job in play.at(100.5).jobs] == [1.0, 0.5]


def test_the_first_pattern_that_matches_counts_and_no_match_reads_none() -> None:
    play = Player(RecordedSample(0.0, (), {"train-9": Levels(0.9), "train-?": Levels(0.1), "*-1": Levels(0.2)}))
    play.backend.watch("other", play.gpus[:1], root_pid=1)
    matched, unmatched = play.at(10.0).jobs
    assert matched.busy_s == pytest.approx(1.0)
    assert (unmatched.busy_s, unmatched.memory_bytes) == (None, None)


@pytest.mark.parametrize(
    ("devices", "util", "memory"),
    [
        ((), 0.5, 1e9),  # what the jobs add up to
        ((Levels(0.7, 3e9), None), 0.7, 3e9),
        ((None, Levels(0.7, 3e9)), None, None),
    ],
)
def test_device_readings(devices: tuple[Levels | None, ...], util: float | None, memory: float | None) -> None:
    play = Player(RecordedSample(0.0, devices, {"*": Levels(0.5, 1e9)}))
    device = play.at(1.0).devices[0]
    assert (device.util, device.memory_bytes) == (util, memory)


def test_a_driver_that_stays_silent_loses_its_gpu_until_it_answers() -> None:
    play = Player(steady(0.5), faults=(Fault(10.0, "hang", gpu=0, for_s=20.0),))
    lost = [play.at(second).devices[0].lost for second in (9.0, 10.0, 15.0, 15.1, 29.9, 30.0)]
    assert lost == [False, False, False, True, True, False]


@pytest.mark.parametrize(
    ("fault", "during", "after", "device"),
    [
        ("lost", (None, None), (10.0, 1e9), (None, None, True)),
        ("hang", (None, None), (10.0, 1e9), (None, None, False)),
        ("missing", (None, None), (10.0, 1e9), (0.5, 1e9, False)),
        ("absurd", (8.0, ABSURD_MEMORY_BYTES), (15.0, 1e9), (2.5, ABSURD_MEMORY_BYTES, False)),
        ("pid_reuse", (0.5, 1e9), (5.0, 1e9), (0.5, 1e9, False)),
    ],
)
def test_faults(
    fault: Any, during: tuple[float | None, ...], after: tuple[float | None, ...], device: tuple[object, ...]
) -> None:
    """A fault of two seconds at 10, seen at 9, 11 and 20, in a job that uses half of its GPU."""
    play = Player(steady(0.5), faults=(Fault(10.0, fault, gpu=0, for_s=2.0),))
    other = "train-2"
    play.backend.watch(other, play.gpus[1:], root_pid=1)
    assert play.job(9.0).busy_s == 4.5
    sample = play.at(11.0)
    assert (sample.jobs[0].busy_s, sample.jobs[0].memory_bytes) == pytest.approx(during)
    assert (sample.devices[0].util, sample.devices[0].memory_bytes, sample.devices[0].lost) == device
    assert sample.devices[1].lost is False
    assert sample.devices[1].util == 0.5
    job = play.job(20.0)
    assert (job.busy_s, job.memory_bytes) == pytest.approx(after)


def test_a_fault_of_some_jobs_leaves_the_others_and_the_gpu_alone() -> None:
    play = Player(steady(0.5), faults=(Fault(0.0, "missing", job="train-2"), Fault(0.0, "absurd", job="train-2")))
    play.backend.watch("train-2", play.gpus[:1], root_pid=1)
    sample = play.at(1.0)
    assert [job.busy_s for job in sample.jobs] == [0.5, None]
    assert sample.devices[0].util == 1.0


def test_a_hung_driver_says_for_how_long_and_does_not_block() -> None:
    play = Player(steady(0.5), faults=(Fault(10.0, "hang"),))
    assert [device.note for device in play.at(13.5).devices] == ["the driver has not answered for 3.5 s"] * 2


def test_the_same_calls_at_the_same_times_give_the_same_readings() -> None:
    def play() -> list[Sample]:
        player = Player(steady(0.3), faults=(Fault(1.0, "absurd", for_s=0.5), Fault(2.0, "lost", gpu=1)))
        return [player.at(tick / 10) for tick in range(30)]

    assert play() == play()


def test_many_hosts_play_one_file_under_ids_of_their_own() -> None:
    recording = Recording((GPU, GPU), (steady(0.5),))
    ids = [gpu.gpu_id for host in ("a", "b") for gpu in ReplayBackend(recording, host).discover()]
    assert ids == ["replay-a-0", "replay-a-1", "replay-b-0", "replay-b-1"]
    assert len(ReplayBackend(recording, "a", count=1).discover()) == 1
    with pytest.raises(ValueError, match=r"device\.count: 3 is not accepted; give 1 to 2"):
        ReplayBackend(recording, "a", count=3)


def test_a_saved_recording_loads_equal_and_plays(tmp_path: Path) -> None:
    recording = Recording(
        gpus=(GPU, RecordedGpu("H100", 80 << 30)),
        samples=(
            RecordedSample(0.0, (Levels(0.5, 1e9), None), {"a*": Levels(0.5, 1e9, 0.1), "b": Levels()}),
            RecordedSample(2.5, (), {}),
        ),
        faults=(Fault(1.0, "lost", gpu=1), Fault(1.5, "missing", job="a*", for_s=0.5)),
        period_s=5.0,
    )
    file = tmp_path / "recording.jsonl"
    save_recording(recording, file)
    assert load_recording(file) == recording
    backend = create_backend(DeviceSettings(backend="replay", replay_file=str(file)), "h", None)
    assert [gpu.gpu_type for gpu in backend.discover()] == ["A100", "H100"]


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "line 1, file"),
        (["{"], "line 1, column 2: '{' is not accepted; give JSON"),
        (["[]"], "line 1, line: '[]' is not accepted; give a JSON object"),
        ([{"gpus": []}], "line 1, cotenant_replay: None is not accepted; give 1"),
        ([HEAD | {"gpus": []}], "line 1, gpus: [] is not accepted; give at least one GPU"),
        ([HEAD | {"gpus": ["A100"]}], "line 1, gpus[0]: 'A100' is not accepted; give an object"),
        ([HEAD | {"gpus": [{"gpu_type": "x", "memory_bytes": 0}]}], "line 1, gpus[0].memory_bytes: 0 is not"),
        ([HEAD | {"gpus": [{"memory_bytes": 1}]}], "line 1, gpus[0].gpu_type: None is not accepted; give a text"),
        ([HEAD | {"colour": 1}, {"t": 0}], "line 1, colour: 1 is not accepted; give only cotenant_replay, gpus"),
        ([HEAD], "line 1, file: 'no sample' is not accepted"),
        ([HEAD, {"t": 1}], "line 2, t: 1 is not accepted; give 0 in the first sample"),
        ([HEAD, {"t": 0}, {"t": 0}], "line 3, t: 0 is not accepted; give a time after 0"),
        ([HEAD, {"t": "0"}], "line 2, t: '0' is not accepted; give a finite number >= 0"),
        ([HEAD, {"t": 0, "devices": [{}, {}]}], "line 2, devices: [{}, {}] is not accepted; give one entry for each"),
        ([HEAD, {"t": 0, "devices": [{"utl": 1}]}], "line 2, devices[0].utl: 1 is not accepted; give only util"),
        ([HEAD, {"t": 0, "jobs": {"a": {"util": -1}}}], "line 2, jobs.a.util: -1 is not accepted; give a finite"),
        ([HEAD, '{"t": 0, "jobs": {"a": {"util": NaN}}}'], "line 2, jobs.a.util: nan is not accepted"),
        ([HEAD, {"t": 0}, {"t": 1, "fault": "fire"}], "line 3, fault: 'fire' is not accepted; give one of lost, hang"),
        ([HEAD, {"t": 0}, {"t": 1, "fault": "lost", "gpu": 1}], "line 3, gpu: 1 is not accepted; give 0 to 0"),
        ([HEAD | {"period_s": 1}, {"t": 0}, {"t": 1}], "line 1, period_s: 1 is not accepted; give a time after 1"),
    ],
)
def test_errors_name_line_and_field(tmp_path: Path, lines: list[Any], message: str) -> None:
    file = tmp_path / "recording.jsonl"
    file.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    with pytest.raises(RecordingError) as caught:
        load_recording(file)
    assert message in str(caught.value)


def test_what_else_a_device_says_is_played_and_saved(tmp_path: Path) -> None:
    activity = DeviceActivity(membw_util=0.4, power_w=250.0)
    path = tmp_path / "recording.jsonl"
    save_recording(
        Recording(
            (GPU, GPU),
            (RecordedSample(0.0, (Levels(0.5, 1e9, activity=activity), None), {}),),
        ),
        path,
    )
    backend = ReplayBackend(load_recording(path), "h", clock=lambda: 0.0)
    backend.discover()
    assert [device.activity for device in backend.sample().devices] == [activity, None]
