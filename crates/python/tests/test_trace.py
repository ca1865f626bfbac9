# SPDX-License-Identifier: Apache-2.0
"""Traces: what they are made from, and their events as Arrow in both directions."""

import json
import pathlib

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import pagetide


def test_made_trace_is_a_recipe_with_the_command_lines_words():
    trace = pagetide.Trace.make(
        tenants=4, packets=100, workload="mediastream", order="rand", burst=2, sids="unique", settings={"input.synthetic.ring.iova": 1 << 30}
    )
    assert trace.kind == "recipe" and trace.path is None
    recipe = trace.recipe
    assert recipe["tenants"] == 4 and recipe["burst_packets"] == 2 and recipe["order"] == "rand"
    assert recipe["input"]["synthetic"]["ring"]["iova"] == 1 << 30
    assert trace.requests_per_packet == 3
    assert pagetide.Trace.build(recipe).recipe == recipe


def test_recipe_of_a_file_is_built(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('tenants = 3\npackets = 9\n[input.synthetic]\nworkload = "iperf3"\n')
    trace = pagetide.Trace.build(path, {"seed": 5})
    assert trace.recipe["seed"] == 5
    assert pa.table(trace).num_rows == 27


def test_events_have_the_columns_and_metadata_of_the_projects_files(small, tmp_path):
    path = tmp_path / "trace.parquet"
    events = small.write(path)
    ours = pa.table(small)
    theirs = pq.read_table(path)
    assert ours.num_rows == events == 6000
    assert ours.schema.names == theirs.schema.names
    assert ours.cast(theirs.schema).equals(theirs)
    assert ours.schema.metadata[b"pagetide.requests_per_packet"] == b"3"


@pytest.mark.parametrize("codec", ["snappy", "zstd", "gzip", "lz4", "none"])
def test_table_written_by_pyarrow_is_a_trace(small, tmp_path, codec):
    path = tmp_path / "theirs.parquet"
    pq.write_table(pa.table(small), path, compression=codec)
    ours, theirs = pagetide.run(small), pagetide.run(pagetide.Trace.read(path))
    assert theirs.elapsed_ns == ours.elapsed_ns and theirs.caches == ours.caches


def test_trace_comes_back_from_pyarrow_polars_and_pandas(small):
    import pandas
    import polars

    expected = pagetide.run(small)
    tables = [pa.table(small), pa.RecordBatchReader.from_stream(small), polars.DataFrame(small)]
    if hasattr(pandas.DataFrame, "from_arrow"):
        tables.append(pandas.DataFrame.from_arrow(small))
    for table in tables:
        again = pagetide.Trace.from_arrow(table)
        assert again.kind == "memory"
        assert pagetide.run(again).elapsed_ns == expected.elapsed_ns, type(table)
    assert pagetide.run(small.in_memory()).elapsed_ns == expected.elapsed_ns


def test_stream_outlives_its_trace():
    reader = pa.RecordBatchReader.from_stream(pagetide.Trace.make(tenants=4, packets=100).in_memory())
    assert reader.read_all().num_rows == 300


def test_own_table_of_few_columns_is_a_trace_of_requests():
    table = pa.table({"source": [8] * 6, "domain": [1] * 6, "iova": [4096 * n for n in range(6)]})
    trace = pagetide.Trace.from_arrow(table, requests_per_packet=2)
    outcome = pagetide.run(trace)
    assert outcome.requests == 6 and outcome.packets == 3
    assert trace.info()["kinds"] == {"translate": 6}


GOOD = {"source": [1, 1], "domain": [1, 1], "iova": [0, 4096]}


@pytest.mark.parametrize(
    "columns, told",
    [
        ({"iova": [0.5, 1.0]}, "its column 'iova' is of type Float64; integers are expected"),
        ({"kind": ["join", "leave"]}, "its column 'kind' is of type Utf8; integers are expected"),
        ({"source": [1, None]}, "record 1: source is null"),
        ({"domain": [1, 1 << 40]}, "record 1: domain is 1099511627776, which is out of range"),
        ({"iova": [1 << 60, 0]}, "record 0: iova 0x1000000000000000 has more than 57 bits"),
        ({"kind": [0, 99]}, "record 1: kind 99 is not known"),
        ({"page_size_bytes": [4096, 4097]}, "record 1: page_size_bytes is 4097"),
        ({"time_ns": [7, 6]}, "record 1: time_ns is 6, before the 7 of an event above"),
    ],
)
def test_wrong_table_is_refused_with_its_column_or_record(columns, told):
    with pytest.raises(pagetide.Error) as error:
        pagetide.Trace.from_arrow(pa.table({**GOOD, **columns}))
    assert told in str(error.value)


def test_error_of_a_tables_source_is_told_with_its_record():
    schema = pa.schema({"source": pa.int64(), "domain": pa.int64(), "iova": pa.int64()})

    def batches():
        yield pa.record_batch(GOOD, schema=schema)
        raise ValueError("the disk is gone")

    reader = pa.RecordBatchReader.from_batches(schema, batches())
    with pytest.raises(pagetide.Error, match="record 2: .*the disk is gone"):
        pagetide.Trace.from_arrow(reader)


def test_what_is_no_table_is_refused():
    for wrong in (5, "table", object()):
        with pytest.raises(pagetide.Error, match="is no table"):
            pagetide.Trace.from_arrow(wrong)

    class Liar:
        def __arrow_c_stream__(self, requested_schema=None):
            return 5

    with pytest.raises(pagetide.Error, match="gave no capsule"):
        pagetide.Trace.from_arrow(Liar())

    class Other:
        def __arrow_c_stream__(self, requested_schema=None):
            return pa.table(GOOD).schema.__arrow_c_schema__()

    with pytest.raises(pagetide.Error, match="another capsule"):
        pagetide.Trace.from_arrow(Other())


@pytest.mark.parametrize(
    "call, told",
    [
        (lambda: pagetide.Trace.make(tenants=0, packets=1), "tenants"),
        (lambda: pagetide.Trace.make(tenants=4), "packets"),
        (lambda: pagetide.Trace.make(tenants=4, packets=4, workload="x"), "x"),
        (lambda: pagetide.Trace.make(tenants=4, packets=4, sids="x"), "write unique"),
        (lambda: pagetide.Trace.make(tenants=4, packets=4, init_frac=float("nan")), "JSON"),
        (lambda: pagetide.Trace.make(tenants=4, packets=4, settings={"no.such": 1}), "no"),
        (lambda: pagetide.Trace.build("nowhere.toml"), "nowhere.toml"),
        (lambda: pagetide.Trace.read("nowhere.parquet"), "nowhere.parquet"),
        (lambda: pagetide.Trace.make(tenants=4, packets=4).write("/nowhere/a"), "/nowhere"),
        (lambda: pagetide.Trace.make(tenants=4, packets=4).write("a", "qemu-log"), "qemu-log"),
    ],
)
def test_impossible_trace_is_refused_with_a_sentence(call, told):
    with pytest.raises(pagetide.Error) as error:
        call()
    assert told in str(error.value)


def test_broken_file_is_refused(tmp_path):
    path = tmp_path / "broken.parquet"
    path.write_bytes(b"PAR1 and nothing more")
    with pytest.raises(pagetide.Error, match="broken.parquet"):
        pagetide.Trace.read(path)
    path.write_bytes(b"neither this nor that")
    with pytest.raises(pagetide.Error, match="of no trace format"):
        pagetide.Trace.read(path)


def test_trace_is_not_written_over_itself(tmp_path, small):
    path = tmp_path / "a.parquet"
    small.write(path)
    with pytest.raises(pagetide.Error, match="another name"):
        pagetide.Trace.read(path).write(path)


def test_authors_format_gets_its_side_file(tmp_path):
    path = tmp_path / "t_iotlb_trace.bin"
    pagetide.Trace.make(tenants=4, packets=30).write(path)
    assert path.stat().st_size == 90 * 48
    assert json.loads((tmp_path / "t_params.json").read_text())["tenants"] == 4
    assert isinstance(pathlib.Path(pagetide.Trace.read(path).path), pathlib.Path)
