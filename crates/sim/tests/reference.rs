// SPDX-License-Identifier: Apache-2.0
//! The same answer as the authors' program, to the nanosecond, for traces of the
//! project's own generator.
//!
//! `data/reference.csv` holds what the program printed for 204 configurations on
//! 40 traces. The traces follow from its columns, so they are made here. A change
//! of the generator or of the model shows as rows that are not exact.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use pagetide_sim::verify::{self, VerifyRequest};
use pagetide_trace::{HyperTrace, HypersioWriter, TraceParams, build};

fn reference() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/data/reference.csv")
}

/// The traces that the table is about, each once.
fn traces_of_table() -> Vec<TraceParams> {
    let mut reader = csv::Reader::from_path(reference()).unwrap();
    let mut traces: Vec<TraceParams> = Vec::new();
    for row in reader.deserialize::<BTreeMap<String, String>>() {
        let row = row.unwrap();
        if !traces
            .iter()
            .any(|trace| trace.matches(|name| row.get(name).map(String::as_str)))
        {
            traces.push(params_of(&row));
        }
    }
    traces
}

fn params_of(row: &BTreeMap<String, String>) -> TraceParams {
    let small = |name: &str| row[name].parse::<u32>().unwrap();
    let large = |name: &str| row[name].parse::<u64>().unwrap();
    TraceParams {
        workload: row["workload"].clone(),
        tenants: small("tenants"),
        order: row["order"].clone(),
        burst: small("burst"),
        total_pkts: large("total_pkts"),
        seed: large("seed"),
        third: row["third"].clone(),
        sids: row["sids"].clone(),
        uses: small("uses"),
        init_frac: row["init_frac"].parse().unwrap(),
        stagger: small("stagger"),
        run: small("run"),
        live: small("live"),
        generator: Some(row["generator"].clone()),
    }
}

fn make(params: &TraceParams, directory: &Path) {
    std::fs::create_dir(directory).unwrap();
    let mut trace = HyperTrace::synthetic(&params.spec().unwrap()).unwrap();
    let writer = HypersioWriter::create(&directory.join("iotlb_trace.bin")).unwrap();
    build(&mut trace, Box::new(writer), &mut |_| ()).unwrap();
    params.write(&directory.join("params.json")).unwrap();
}

#[test]
fn every_row_of_the_table_is_the_program_s_answer_to_the_nanosecond() {
    let directory = tempfile::tempdir().unwrap();
    let traces = traces_of_table();
    for (number, params) in traces.iter().enumerate() {
        make(params, &directory.path().join(number.to_string()));
    }
    let request = VerifyRequest {
        reference: reference(),
        traces: directory.path().to_owned(),
        lfu_seeds: 1,
        threads: 2,
    };
    let report = verify::run(&request, &|_, _| ()).unwrap();
    let figures = &report.figures;
    assert_eq!(figures.rows_without_trace, 0);
    assert_eq!(
        (figures.lru_exact, figures.oracle_exact, figures.lfu_exact),
        (figures.lru_rows, figures.oracle_rows, figures.lfu_rows),
        "{:#?}",
        report.worst
    );
    // No kind of row has gone from the table unnoticed.
    assert_eq!(traces.len(), 40);
    assert_eq!(
        (figures.lru_rows, figures.oracle_rows, figures.lfu_rows),
        (51, 45, 108)
    );
    assert_eq!(figures.drops_exact, figures.rows);
}

#[test]
fn answers_to_lfu_rows_are_near_the_range_of_fifteen_seeds() {
    // Rows of two traces are enough: each is run fifteen times.
    let directory = tempfile::tempdir().unwrap();
    for (number, params) in traces_of_table().iter().take(2).enumerate() {
        make(params, &directory.path().join(number.to_string()));
    }
    let request = VerifyRequest {
        reference: reference(),
        traces: directory.path().to_owned(),
        lfu_seeds: 15,
        threads: 2,
    };
    let report = verify::run(&request, &|_, _| ()).unwrap();
    assert!(report.figures.lfu_rows > 0);
    assert!(report.agrees, "{:#?}", report.worst);
    assert!(report.figures.rows_without_trace > 0);
}
