"""Trace files: every form read, every bad row named."""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
from simulating import crowd, job

from cotenant.scheduler.simulation.errors import TraceError
from cotenant.scheduler.simulation.published import openb_nodes
from cotenant.scheduler.simulation.tables import GavelTruth, StageTruth, load_pairs, utilisations
from cotenant.scheduler.simulation.traces import FORMATS, load, write_own
from cotenant.scheduler.simulation.workload import GIB, Node, TraceJob, trace_of

MIB = 1 << 20
WEEK = "job_id,user,gpu_num,submit_time,duration,model,batchsize,amp,gpu_util,gmem_util,gmem,estimate_s"
SIA = "timestamp,duration,num_gpus,gpu_time,cluster"
MURI = (
    "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,resource_time_0,"
    "resource_time_1,resource_time_2,priority"
)
OPENB = "name,cpu_milli,memory_mib,num_gpu,gpu_milli,gpu_spec,qos,pod_phase,creation_time,deletion_time,scheduled_time"
TESTBED = (
    "time,job_id,num_gpu,submit_time,start_time,end_time,executed_time,real_executed_time,JCT,duration,pending_time,"
    "job_counter,promote"
)
TIRESIAS = "job_id,num_gpu,submit_time,iterations,model_name,duration,interval"
DLRM = (
    "instance_sn,role,app_name,cpu_request,cpu_limit,gpu_request,gpu_limit,creation_time,scheduled_time,deletion_time"
)
GAVEL_ROW = "ResNet-18 (batch size 128)\tpython3 main.py\tcifar10\t--num_steps\t1\t925982\t4\t1\t-1.000000\t{}"


@pytest.fixture
def write(tmp_path: Path) -> Callable[..., Path]:
    """Write lines into a file."""

    def written(*lines: str, name: str = "made-up.csv") -> Path:
        path = tmp_path / name
        text = "\n".join(lines) + "\n"
        if name.endswith(".gz"):
            path.write_bytes(gzip.compress(text.encode()))
        else:
            path.write_text(text, encoding="utf-8")
        return path

    return written


def test_a_week_of_philly(write: Callable[..., Path]) -> None:
    path = write(
        WEEK,
        "2,u,8,2017-10-01 00:02:00,61,ResNet18,64,1,110.0,34.0,3642.0,",
        "1,u,1,2017-10-01 00:01:00,30,NeuMF,64,0,10.5,2.0,2050.0,19",
        name="week.csv.gz",
    )
    trace = load(path)
    assert trace.name == "week"
    first, second = trace.jobs
    assert first == TraceJob("1", 0.0, 1, 30.0, "NeuMF/64/0", 2050 * MIB, 0.105, 0.02, 19.0, "u")
    assert (second.submit_s, second.util, second.estimate_s, second.gpus) == (60.0, 1.0, None, 8)


def test_the_other_forms(write: Callable[..., Path]) -> None:
    (only,) = load(write(SIA, "2017-10-09 07:01:55,66.0,2,132.0,11cb48")).jobs
    assert only == TraceJob("row-2", 0.0, 2, 66.0, user="11cb48")
    (only,) = load(write(MURI, "0,8,5000,109,gpt2,4,5095000,91000,400,0.6,300,49,0")).jobs
    assert only == TraceJob("0", 0.0, 8, 5095.0, "gpt2/4/x8", util=0.75)
    pods = load(write(OPENB, "a,1,1,0,0,,LS,Running,0,9,0", "b,6000,1,4,1000,V100,LS,Running,5,25,5")).jobs
    assert pods == (TraceJob("b", 0.0, 4, 20.0, "V100", util=1.0, cpus=1.5),)
    (only,) = load(write(TESTBED, "2163.5,1,8,1534.0,1800.0,2163.5,363.5,363.5,629.5,281.0,266.0,1,0")).jobs
    assert only == TraceJob("1", 0.0, 8, 281.0)
    late, early = load(write(TIRESIAS, "0,1,30,606,vgg19,164,30", "1,8,0,133,vgg11,147,23")).jobs[::-1]
    assert (early, late) == (TraceJob("1", 0.0, 8, 147.0, "vgg11/x8"), TraceJob("0", 30.0, 1, 164.0, "vgg19/x1"))
    both = load(write(GAVEL_ROW.format(10), GAVEL_ROW.format(0), name="some.trace")).jobs
    assert [(each.job_id, each.submit_s) for each in both] == [("row-2", 0.0), ("row-1", 10.0)]
    assert (both[0].workload, both[0].duration_s, both[0].gpus) == ("ResNet-18 (batch size 128)/x4", 925982.0, 4)


def test_pods_that_never_ran_are_left_out_and_counted(write: Callable[..., Path]) -> None:
    """Deleted at once, never scheduled; who waited 7 s for its GPU did not run in that time."""
    trace = load(
        write(
            OPENB,
            "ran,1000,1,1,500,,LS,Running,0,107,7",
            "at-once,1000,1,1,500,,LS,Failed,4,4,4",
            "waits,1000,1,1,500,,LS,Pending,5,90,",
            "gone,1000,1,1,500,,LS,Pending,5,5,",
        )
    )
    assert [(job.job_id, job.duration_s) for job in trace.jobs] == [("ran", 100.0)]
    assert trace.left_out == {"pods that never ran": 3}


def test_instances_count_as_long_as_the_log_saw_them(write: Callable[..., Path]) -> None:
    """The log ends at 1000: with the last time in it, here of an instance without a GPU."""
    trace = load(
        write(
            DLRM,
            "always,HN,app_0,12,12,1,1,,,",
            "before,HN,app_1,12,12,1,1,,,400",
            "after,HN,app_1,0,0,1,1,600,700,",
            "whole,HN,app_1,8,8,2,2,100,150,300",
            "at-once,HN,app_1,12,12,1,1,50,60,60",
            "no-gpu,CN,app_1,12,12,0,0,10,10,1000",
        )
    )
    assert {job.job_id: (job.submit_s, job.duration_s) for job in trace.jobs} == {
        "always": (0.0, 1000.0),
        "before": (0.0, 400.0),
        "whole": (100.0, 150.0),
        "after": (600.0, 300.0),
    }
    assert [(job.gpus, job.workload, job.cpus) for job in trace.jobs[2:]] == [(2, "app_1", 4.0), (1, "app_1", None)]
    assert trace.left_out == {"instances that never ran": 1}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((OPENB, "b,1,1,1,460,V100,LS,Running,5,1e300,5"), "deletion_time: '1e300' is not accepted; give a number of"),
        ((OPENB, "b,1,1,1,460,V100,LS,Running,5,25,30"), "scheduled_time: '30' is not accepted; give a time from"),
        ((OPENB, "b,1,1,1,460,V100,LS,Running,5,,5"), "deletion_time: '' is not accepted; give a value"),
        ((DLRM, "a,HN,app,1,1,1,1,50,60,40"), "deletion_time: '40' is not accepted; give a time not before"),
        ((MURI, "0,8,0,109,gpt2,4,1e12,91000,400,0.6,300,49,0"), "and at most 1e+11"),
        ((SIA, "2017-10-09 07:01:55,1e9,1,1,x"), "line 2: duration: '1e9' is not accepted; give a number above 0 and"),
        (
            (TIRESIAS, "0,1,30,606,vgg19,1e9,30"),
            "duration: '1e9' is not accepted; give a number above 0 and at most 1e",
        ),
        ((WEEK, "1,u,1,2017-10-01 00:01:00,30,M,64,0,1,1,1e305,9"), "gmem: '1e305' is not accepted"),
        ((WEEK, "1,u,1,2017-10-01 00:01:00,30,M,64,0,1,1,1,1e300"), "estimate_s: '1e300' is not accepted"),
        (
            (SIA, "2017-10-09 07:01:55,1,1,1,x", "2107-10-09 07:01:55,1,1,1,x"),
            "line 3: submission: '2.84005e+09 s after the first' is not accepted; give a time at most 1e+08 s after",
        ),
        ((GAVEL_ROW.format(1e300),), "line 1: arrival: '1e+300' is not accepted; give a number of at least 0 and at"),
    ],
)
def test_times_no_simulation_comes_to_are_refused(
    write: Callable[..., Path], lines: tuple[str, ...], message: str
) -> None:
    with pytest.raises(TraceError) as caught:
        load(write(*lines))
    assert message in str(caught.value)


def test_the_hosts_of_openb(write: Callable[..., Path]) -> None:
    path = write("sn,cpu_milli,memory_mib,gpu,model", "n0,32000,262144,0,", "n1,96000,393216,8,V100M32")
    assert openb_nodes(path, GIB).nodes == (Node("n1", 8, "V100M32", GIB, 96.0),)


def test_our_own_form_comes_back_equal(tmp_path: Path) -> None:
    trace = crowd(10)
    shifted = trace_of(
        "own", (replace(each, submit_s=each.submit_s - trace.jobs[0].submit_s, cpus=1.5) for each in trace.jobs)
    )
    write_own(shifted, tmp_path / "own.json")
    assert load(tmp_path / "own.json") == shifted


@pytest.mark.parametrize(
    ("column", "value", "message"),
    [
        ("duration", "0", "line 3: duration: '0' is not accepted; give a number above 0"),
        ("duration", "nan", "line 3: duration: 'nan' is not accepted; give a number above 0"),
        ("duration", "-5", "line 3: duration: '-5' is not accepted"),
        ("duration", "soon", "line 3: duration: 'soon' is not accepted"),
        ("gpu_num", "0", "line 3: gpu_num: '0' is not accepted; give a number of at least 1"),
        ("gpu_num", "1.5", "line 3: gpu_num: '1.5' is not accepted; give a whole number of at least 1"),
        ("model", "", "line 3: model: '' is not accepted; give a value"),
        ("submit_time", "yesterday", "line 3: submit_time: 'yesterday' is not accepted; give a date and time"),
        ("submit_time", "", "line 3: submit_time: '' is not accepted"),
        ("gmem", "-1", "line 3: gmem: '-1' is not accepted"),
        ("job_id", "1", "line 3: job_id: '1' is not accepted; give an id that line 2 does not have"),
        ("job_id", "", "line 3: job_id: '' is not accepted"),
        ("estimate_s", "-1", "line 3: estimate_s: '-1' is not accepted"),
    ],
)
def test_bad_rows_are_named(write: Callable[..., Path], column: str, value: str, message: str) -> None:
    good = dict(
        zip(
            WEEK.split(","),
            ["1", "u", "1", "2017-10-01 00:01:00", "30", "NeuMF", "64", "0", "10.5", "2.0", "2050.0", "19"],
            strict=True,
        )
    )
    bad = good | {"job_id": "2"} | {column: value}
    path = write(WEEK, ",".join(good.values()), ",".join(bad.values()))
    with pytest.raises(TraceError) as caught:
        load(path)
    assert str(caught.value).startswith(f"{path}, {message}")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        (("a,b,c", "1,2,3"), "columns: 'a,b,c' is not accepted; give the head of one of cotenant-trace, philly-week"),
        (
            ("job_id,submit_s,duration_s,colour", "a,0,10,red"),
            "line 1: columns: 'colour' is not accepted; give only cpus",
        ),
        (("job_id,submit_s,duration_s,gpus", "a,0,10,1", "b,0,10,x"), "line 3: gpus: 'x' is not accepted"),
        (("job_id,submit_s,duration_s", "a,0,0"), "line 2: duration_s: '0' is not accepted; give a number above 0"),
        (
            ("job_id,submit_s,duration_s", "a,0,1", "a,0,1"),
            "line 3: job_id: 'a' is not accepted; give an id that line 2",
        ),
        ((WEEK,), "rows: 0 is not accepted; give at least one job"),
        ((WEEK, "1,u,1"), "line 2: columns: 'too many or too few' is not accepted; give 12 as in the head"),
        ((OPENB, "b,1,1,1,460,V100,LS,Running,25,5,5"), "line 2: deletion_time: '5' is not accepted"),
        ((OPENB, "b,1,1,1,0,V100,LS,Running,5,25,5"), "line 2: gpu_milli: '0' is not accepted"),
        (("name,num_gpu,gpu_milli", "a,1,500"), "columns: 'creation_time missing' is not accepted"),
        ((MURI, "0,8,-1,109,gpt2,4,5095000,91000,400,0.6,300,49,0"), "line 2: submit_time: '-1' is not accepted"),
        ((GAVEL_ROW.format(-1),), "line 1: arrival: '-1' is not accepted"),
        (("[1, 2]",), "format: 'list' is not accepted; give 'cotenant-trace'"),
        (('{"format": "cotenant-trace", "version": 2}',), "version: 2 is not accepted; give 1"),
        (('{"format": "cotenant-trace", "version": 1, "jobs": 3}',), "jobs: 'int' is not accepted"),
        (("{",), "line 2: file: 'Expecting property name enclosed in double quotes' is not accepted; give JSON"),
    ],
)
def test_bad_files_are_named(write: Callable[..., Path], lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        load(write(*lines))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"duration_s": 0}, "duration_s: '0' is not accepted; give a number above 0"),
        ({"duration_s": 1e300}, "duration_s: '1e+300' is not accepted; give a number above 0 and at most 1e+08"),
        ({"submit_s": 1e300}, "submit_s: '1e+300' is not accepted; give a number of at least 0 and at most 1e+08"),
        ({"submit_s": -1}, "submit_s: '-1' is not accepted"),
        ({"gpus": 0}, "gpus: '0' is not accepted"),
        ({"gpus": True}, "gpus: True is not accepted; give a number or a text"),
        ({"user": ["x"]}, "user: ['x'] is not accepted; give a number or a text"),
        ({"util": 1.5}, "util: 1.5 is not accepted; give a fraction in [0, 1]"),
        ({"max_slowdown": 0.5}, "max_slowdown: '0.5' is not accepted"),
        ({"weight": 0}, "weight: '0' is not accepted"),
        ({"colour": "red"}, "jobs[0]: 'colour' is not accepted; give only cpus, duration_s"),
        ({"job_id": None}, "job_id: None is not accepted"),
    ],
)
def test_bad_jobs_of_our_own_form(write: Callable[..., Path], fields: dict[str, object], message: str) -> None:
    entry = {"job_id": "a", "submit_s": 0, "duration_s": 10} | fields
    path = write(json.dumps({"format": "cotenant-trace", "version": 1, "jobs": [entry]}))
    with pytest.raises(TraceError) as caught:
        load(path)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("fields", "accepted"),
    [
        ({"gpus": 1e300}, "1 and at most 1e+06"),
        ({"duration_s": 1e-300}, "0.001"),
        ({"memory_bytes": 1e25}, "0 and at most 1.15292e+18"),
        ({"weight": 1e-300}, "1e-06 and at most 1e+06"),
        ({"weight": 1e300}, "1e-06 and at most 1e+06"),
        ({"cpus": 1e30}, "0.001 and at most 4096"),
        ({"cpus": 1e-9}, "0.001 and at most 4096"),
    ],
)
def test_numbers_that_no_simulation_can_count_with_are_refused(
    write: Callable[..., Path], fields: dict[str, float], accepted: str
) -> None:
    """Not by a fault in the middle of a simulation, nor when its results are written."""
    entry = {"job_id": "a", "submit_s": 0, "duration_s": 10}
    jobs = [entry, entry | {"job_id": "b"} | fields]
    path = write(json.dumps({"format": "cotenant-trace", "version": 1, "jobs": jobs}))
    (name,) = fields
    with pytest.raises(
        TraceError, match=rf"jobs\[1\]: {name}: .* is not accepted; give a number of at least"
    ) as caught:
        load(path)
    assert str(caught.value).endswith(f"of at least {accepted}")


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ((TIRESIAS, "0,1e300,30,606,vgg19,9,30"), "line 2: gpus: 1"),
        ((TIRESIAS, "0,1,30,606,vgg19,1e-300,30"), "line 2: duration_s: 1e-300 is not accepted; give a number of at"),
        ((OPENB, "b,1e300,1,1,460,V100,LS,Running,5,25,5"), "line 2: cpus: 1e+297 is not accepted"),
    ],
)
def test_so_they_are_in_every_form(write: Callable[..., Path], lines: tuple[str, ...], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        load(write(*lines))
    assert message in str(caught.value)


NOISE = bytes((7 * byte + byte // 256) % 256 for byte in range(3000))
PACKED = gzip.compress(NOISE)
NO_TEXT = {
    "bytes": ("x.csv", NOISE),
    "bytes, by name JSON": ("x.json", NOISE),
    "bytes below a head": ("x.csv", f"{WEEK}\n".encode() + NOISE),
    "bytes in JSON": ("x.json", b"{" + NOISE),
    "not compressed": ("x.csv.gz", NOISE),
    "bytes, compressed": ("x.csv.gz", PACKED),
    "cut off": ("x.csv.gz", PACKED[: len(PACKED) // 2]),
    "damaged": ("x.csv.gz", PACKED[:30] + NOISE),
}


@pytest.mark.parametrize(("name", "content"), NO_TEXT.values(), ids=NO_TEXT.keys())
@pytest.mark.parametrize(
    "read", [load, load_pairs, GavelTruth, StageTruth, *(partial(load, form=form) for form in FORMATS)]
)
def test_a_file_that_is_no_text_is_named(
    tmp_path: Path, read: Callable[[Path], object], name: str, content: bytes
) -> None:
    """Whatever it was to be: a trace of any form, pairs, throughputs."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(TraceError, match=rf"^{re.escape(str(tmp_path / name))}") as caught:
        read(tmp_path / name)
    assert "None" not in str(caught.value)


@pytest.mark.parametrize("text", ["[" * 200_000, '{"format": ' + "1" * 5000 + "}"], ids=["deep", "digits"])
def test_json_that_python_cannot_read_is_named(write: Callable[..., Path], text: str) -> None:
    for read in (load, GavelTruth):
        with pytest.raises(TraceError, match="is not accepted; give"):
            read(write(text, name="x.json"))


def test_a_column_that_the_form_needs_and_the_file_lacks_is_named(write: Callable[..., Path]) -> None:
    with pytest.raises(TraceError) as caught:
        load(write(SIA, "2017-10-09 07:01:55,66.0,2,132.0,11cb48"), "tiresias")
    assert "line 2: num_gpu: 'no such column' is not accepted; give a table that has it" in str(caught.value)
    assert str(caught.value).endswith("the columns are timestamp, duration, num_gpus, gpu_time, cluster")


def test_an_unknown_form_is_refused(write: Callable[..., Path]) -> None:
    with pytest.raises(TraceError, match=f"one of {', '.join(FORMATS)}"):
        load(write(WEEK), "sacct")


def test_measured_pairs(write: Callable[..., Path]) -> None:
    path = write("workload,neighbour,n,guess", "a,b,0.8,0.7", "b,a,1.02,0.9")
    assert load_pairs(path) == {("a", "b"): 0.8, ("b", "a"): 1.0}
    assert load_pairs(path, "guess") == {("a", "b"): 0.7, ("b", "a"): 0.9}
    long = write("model,batchsize,amp,peer,peer_batchsize,peer_amp,n", "BERT,32,0,DCGAN,64,1,0.8")
    assert load_pairs(long) == {("BERT/32/0", "DCGAN/64/1"): 0.8}


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (("a,b,0",), "line 2: n: '0' is not accepted"),
        (("a,b,2",), "line 2: n: 2.0 is not accepted; give a normalised throughput"),
        (("a,b,0.5", "a,b,0.5"), "line 3: pair: 'a beside b' is not accepted; give every ordered pair once"),
        (("a,,0.5",), "line 2: neighbour: '' is not accepted"),
        ((), "rows: 0 is not accepted; give at least one pair"),
    ],
)
def test_bad_pairs_are_named(write: Callable[..., Path], rows: tuple[str, ...], message: str) -> None:
    with pytest.raises(TraceError) as caught:
        load_pairs(write("workload,neighbour,n", *rows))
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("lines", "column", "message"),
    [
        (("workload,neighbour,n,guess", "a,b,1,1"), "told", "column: 'told' is not accepted; give one that it has "),
        (("workload,neighbour,n,guess", "a,b,1,1"), "neighbour", "beside the pair: n, guess"),
        (("model,batchsize,amp,peer,peer_batchsize,peer_amp", "a,1,1,b,1,1"), "n", "beside the pair: none"),
        (("workload,n", "a,1"), "n", "neighbour: 'no such column' is not accepted; give a table that has it; the col"),
        (("n,m", "1,1"), "n", "line 2: model: 'no such column' is not accepted; give a table that has it; the columns"),
    ],
)
def test_columns_that_a_table_lacks_are_named_with_those_it_has(
    write: Callable[..., Path], lines: tuple[str, ...], column: str, message: str
) -> None:
    with pytest.raises(TraceError) as caught:
        load_pairs(write(*lines), column)
    assert message in str(caught.value)


def test_utilisations_are_known_when_every_job_says_it() -> None:
    jobs = [job("a", workload="x", util=0.2), job("b", workload="x", util=0.4), job("c", workload="y")]
    assert utilisations(trace_of("t", jobs)) == pytest.approx({"x": 0.3})


def test_gavel_throughputs(tmp_path: Path) -> None:
    name, other = "('ResNet-18 (batch size 128)', 1)", "('LM (batch size 5)', 1)"
    table = {
        "v100": {name: {"null": 10.0, other: [5.0, 4.0]}, other: {"null": 8.0, name: [4.0, 5.0]}},
        "k80": {name: {"null": 2.0}, other: {"null": 4.0}},
    }
    path = tmp_path / "throughputs.json"
    path.write_text(json.dumps(table))
    truth = GavelTruth(path)
    one, two = "ResNet-18 (batch size 128)/x1", "LM (batch size 5)/x1"
    assert (truth.alone(one, "v100", 1), truth.alone(one, "k80", 1), truth.alone(two, "k80", 1)) == (1.0, 0.2, 0.5)
    assert truth.together((one, two), "v100") == (0.5, 0.5)
    timed = truth.in_seconds(trace_of("t", [job("a", length=100.0, workload=one)]))
    assert timed.jobs[0].duration_s == 10.0
    with pytest.raises(TraceError, match="reference: 'h100' is not accepted; give one of v100, k80"):
        GavelTruth(path, "h100")


def test_jobs_that_use_other_resources_get_along(tmp_path: Path) -> None:
    """Storage 0.2 + 0.7, GPU 0.7 + 0.2: nobody waits. Twice the first wants 1.4 of the GPU."""
    path = tmp_path / "muri.csv"
    head = "job_id,num_gpu,submit_time,iterations,model_name,batch_size,duration,interval,iteration_time,"
    rows = ["0,1,0,9,gpu,8,1000,0,100,20,70,0,0", "1,1,0,9,disk,8,1000,0,100,70,20,0,0"]
    path.write_text("\n".join([head + "resource_time_0,resource_time_1,resource_time_2,priority", *rows]) + "\n")
    truth = StageTruth(path)
    assert [each.workload for each in load(path).jobs] == ["gpu/8/x1", "disk/8/x1"]
    assert truth.together(("gpu/8/x1", "disk/8/x1"), "any") == (1.0, 1.0)
    assert truth.together(("gpu/8/x1", "gpu/8/x1"), "any") == pytest.approx((1 / 1.4, 1 / 1.4))
    assert truth.alone("gpu/8/x1", "any", 1) == 1.0
