# SPDX-License-Identifier: Apache-2.0
"""Sweeps on Ray. Skipped where Ray is not installed."""

import pytest

import pagetide
from pagetide.check import rows_without_provenance


def test_without_ray_the_error_says_what_to_install(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(pagetide.Error, match="pip install"):
        pagetide.sweep({"preset": "base"}, traces=[pagetide.Trace.make(tenants=4, packets=9)], backend="ray")


def test_rows_on_ray_are_those_of_threads_also_if_a_worker_is_killed(tmp_path, small):
    pytest.importorskip("ray")
    from pagetide import check

    figures, _ = check.on_ray(None, 40, 2000)
    assert figures["points"] == 40 and figures["retried_points"] >= 1
    assert figures["rows_equal"] and figures["rows_equal_worker_killed"]
    assert figures["lost_points"] == 0


def test_every_kind_of_trace_travels_and_errors_come_back(tmp_path, small):
    ray = pytest.importorskip("ray")
    path = tmp_path / "a.parquet"
    small.write(path)
    study = {"preset": ["base", "hypertrio"], "devtlb.replacement": ["lru", "oracle"]}
    traces = [small, pagetide.Trace.read(path), small.in_memory()]
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, configure_logging=False)
    try:
        there = pagetide.sweep(study, traces=traces, backend="ray", out=tmp_path / "out.parquet")
        here = pagetide.sweep(study, traces=traces)
        assert rows_without_provenance(there.rows()) == rows_without_provenance(here.rows())
        again = pagetide.sweep(study, traces=traces, backend="ray", out=tmp_path / "out.parquet")
        assert (again.summary["run"], again.summary["kept"]) == (0, 12)
        broken = tmp_path / "b.parquet"
        bytes_ = bytearray(path.read_bytes())
        bytes_[200:400] = bytes(200)
        broken.write_bytes(bytes_)
        with pytest.raises(pagetide.Error, match="b.parquet, record"):
            pagetide.sweep(study, traces=[pagetide.Trace.read(broken)], backend="ray")
    finally:
        ray.shutdown()
