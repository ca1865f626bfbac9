# SPDX-License-Identifier: Apache-2.0
"""Runs and sweeps: their results, their errors, and that they can be interrupted."""

import json
import os
import signal
import subprocess
import sys
import threading

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pagetide


def test_outcome_has_every_figure_of_the_run(small):
    outcome = pagetide.run(small, preset="hypertrio", settings={"devtlb.entries": 128, "ptb": {"entries": 16}})
    assert outcome.requests == 6000 and outcome.packets == 2000
    assert 0 < outcome.link_share <= 1
    assert outcome.config["devtlb"]["entries"] == 128 and outcome.config["ptb"]["entries"] == 16
    assert outcome.caches.devtlb.lookups == outcome.requests
    assert 0 <= outcome.caches.devtlb.hit_rate <= 1
    assert outcome.latency.p50_ns <= outcome.latency.max_ns
    assert outcome.faults is None
    assert len(outcome.tenants) == 40 and sum(outcome.tenants.column("requests")) == 6000
    assert pa.table(outcome.tenants).num_rows == 40
    assert pagetide.run(small, preset="hypertrio").id != outcome.id


def test_outcome_with_page_faults(small):
    settings = {"faults.discipline": "vpri", "faults.absent_ppm": 100_000}
    faults = pagetide.run(small, settings=settings).faults
    assert faults.page_requests > 0 and faults.service.max_ns > 0


def test_study_of_one_point_is_run(tmp_path):
    path = tmp_path / "study.toml"
    path.write_text('preset = "hypertrio"\n[[trace]]\ntenants = 4\npackets = 100\ninput.synthetic.workload = "iperf3"\n')
    of_file = pagetide.run(study=path, settings={"devtlb.replacement": "lru"})
    table = {"preset": "hypertrio", "devtlb.replacement": "lru", "trace": [{"tenants": 4, "packets": 100, "input": {"synthetic": {"workload": "iperf3"}}}]}
    assert pagetide.run(study=table).id == of_file.id
    with pytest.raises(pagetide.Error, match="2 points"):
        pagetide.run(study=path, settings={"seed": [1, 2]})


STUDY = {
    "preset": ["base", "hypertrio"],
    "devtlb": {"replacement": ["lru", "oracle"]},
    "trace": [{"tenants": [4, 40], "packets": 500, "input": {"synthetic": {"workload": "websearch"}}}],
}


def test_sweep_has_a_row_a_point_as_arrow_and_as_dictionaries():
    told = []
    table = pagetide.sweep(STUDY, progress=lambda done, points: told.append((done, points)))
    assert len(table) == 8 and table.summary["run"] == 8
    assert told[-1] == (8, 8) and told == sorted(told)
    assert table.column("trace_tenants") == [4] * 4 + [40] * 4
    assert table.column("point") == list(range(8))
    arrow = pa.table(table)
    assert arrow.num_rows == 8 and arrow.column_names == table.column_names
    assert arrow["gbps"].to_pylist() == table.column("gbps")
    import pandas
    import polars

    assert polars.DataFrame(table)["gbps"].to_list() == table.column("gbps")
    if hasattr(pandas.DataFrame, "from_arrow"):
        assert list(pandas.DataFrame.from_arrow(table)["gbps"]) == table.column("gbps")
    with pytest.raises(pagetide.Error, match="no column"):
        table.column("nothing")


def test_sweep_into_a_file_goes_on_where_it_was(tmp_path):
    out = tmp_path / "out.parquet"
    first = pagetide.sweep(STUDY, out=out, jobs=1)
    again = pagetide.sweep(STUDY, out=out)
    assert (first.summary["run"], again.summary["run"], again.summary["kept"]) == (8, 0, 8)
    file = pq.read_table(out)
    assert file.column_names == first.column_names
    assert file["gbps"].to_pylist() == first.column("gbps") == again.column("gbps")


def test_own_traces_take_the_place_of_a_studys(small, tmp_path):
    path = tmp_path / "a.parquet"
    small.write(path)
    traces = [small, pagetide.Trace.read(path), small.in_memory()]
    table = pagetide.sweep({"preset": ["base", "hypertrio"]}, traces=traces)
    gbps = table.column("gbps")
    assert len(gbps) == 6 and gbps[0:2] == gbps[2:4] == gbps[4:6]
    assert len(set(table.column("id"))) == 6
    assert table.column("trace_files")[2] == str(path)
    assert table.column("trace_events_sha256")[4] is not None


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: pagetide.run(), "there is nothing to run"),
        (lambda: pagetide.sweep({"preset": "base"}), "the study has no trace"),
        (lambda: pagetide.sweep(STUDY, traces=[]), "nothing to run"),
        (lambda: pagetide.sweep(STUDY, jobs=0), "jobs is 0"),
        (lambda: pagetide.sweep(STUDY, backend="x"), "there is no backend 'x'"),
        (lambda: pagetide.sweep(STUDY, address="x"), "backend='ray'"),
        (lambda: pagetide.sweep(STUDY, settings={"devtlb.entires": 4}), "entires"),
        (lambda: pagetide.sweep({**STUDY, "seed": object()}), "object"),
        (lambda: pagetide.sweep(STUDY, settings={"devtlb.ways": 7}), "devtlb"),
        (lambda: pagetide.sweep("nowhere.toml"), "nowhere.toml"),
        (lambda: pagetide.sweep(STUDY, out="/nowhere/a"), "/nowhere/a"),
    ],
)
def test_impossible_run_is_refused_with_a_sentence(call, told):
    with pytest.raises(pagetide.Error) as error:
        call()
    assert told in str(error.value)


def test_exception_of_the_progress_ends_the_sweep():
    def enough(done, points):
        raise ValueError("enough")

    with pytest.raises(ValueError, match="enough"):
        pagetide.sweep(STUDY, progress=enough)


def test_threads_of_python_go_on_during_a_run():
    trace = pagetide.Trace.make(tenants=256, packets=150_000, workload="websearch")
    begun, counted = threading.Event(), []

    def count():
        begun.set()
        while not ended.is_set():
            counted.append(None)
            ended.wait(0.001)

    ended = threading.Event()
    thread = threading.Thread(target=count)
    thread.start()
    begun.wait()
    before = len(counted)
    pagetide.run(trace)
    during = len(counted) - before
    ended.set()
    thread.join()
    assert during > 3


CHILD = """
import signal, sys, threading, time, pagetide
trace = pagetide.Trace.make(tenants=1024, packets=2_000_000_000, workload="websearch")
class Slow:
    def observe(self, tenant): return None
work = {
    "run": lambda: pagetide.run(trace, preset="hypertrio"),
    "policy": lambda: pagetide.run(trace, preset="hypertrio", policies={"predictor": Slow()}),
    "future": lambda: pagetide.run(
        trace, preset="hypertrio", settings={"devtlb.replacement": "oracle"}, policies={"predictor": Slow()}
    ),
    "sweep": lambda: pagetide.sweep({"seed": [1, 2, 3]}, traces=[trace]),
    "write": lambda: trace.write(sys.argv[2]),
}[sys.argv[1]]
def once(*_):
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt
signal.signal(signal.SIGINT, once)
try:
    print("begun", flush=True)
    work()
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize("what", ["run", "policy", "future", "sweep", "write"])
def test_interrupt_ends_what_would_take_hours(what, tmp_path):
    with subprocess.Popen(
        [sys.executable, "-c", CHILD, what, str(tmp_path / "a")], stdout=subprocess.PIPE, text=True
    ) as child:
        try:
            assert child.stdout.readline() == "begun\n"
            os.kill(child.pid, signal.SIGINT)
            child.wait(60)
            assert child.stdout.read() == "interrupted\n"
            assert child.returncode == 0
        finally:
            child.kill()
    assert list(tmp_path.iterdir()) == []


def test_rows_are_those_of_the_command_line(tmp_path):
    cli = os.environ.get("PAGETIDE")
    if not cli:
        pytest.skip("PAGETIDE names no program to compare with")
    from pagetide import check

    report = subprocess.run(
        [sys.executable, "-m", "pagetide.check", "--json", "--cli", cli, "--packets", "2000", "--rounds", "1"],
        stdout=subprocess.PIPE,
        check=True,
    )
    figures = json.loads(report.stdout)["figures"]
    assert figures["points"] == 32
    assert figures["rows_equal_cli"] and figures["own_lru_equal"] and figures["own_predictor_equal"]
    assert check.main(["--cli", "/nowhere/pagetide"]) == 2


def test_what_is_to_be_equal_and_is_not_is_named():
    from pagetide.check import differences

    assert differences({"points": 3, "rows_equal": False, "lost_points": 2}) == ["rows_equal", "lost_points"]
    assert differences({"points": 3, "rows_equal": True, "lost_points": 0}) == []
