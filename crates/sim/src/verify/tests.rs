// SPDX-License-Identifier: Apache-2.0
//! Which rows belong to which trace, and the messages about broken input.

use std::fs;
use std::path::Path;

use pagetide_trace::{HyperTrace, HypersioWriter, TraceParams, build};
use tempfile::TempDir;

use super::*;

/// Columns of the table, with a row that fits [`params`].
const ROW: [(&str, &str); 30] = [
    ("workload", "iperf3"),
    ("tenants", "4"),
    ("order", "rr"),
    ("burst", "1"),
    ("total_pkts", "200"),
    ("seed", "9007199254740993"),
    ("third", "mailbox"),
    ("sids", "unique"),
    ("uses", "1500"),
    ("init_frac", "0.0015"),
    ("stagger", "1"),
    ("run", "0"),
    ("live", "0"),
    ("cc", "1536"),
    ("iotlb", "64"),
    ("iotlb_ways", "8"),
    ("iotlb_groups", "1"),
    ("l2", "512"),
    ("l2_ways", "16"),
    ("l2_groups", "1"),
    ("l3", "1024"),
    ("l3_ways", "16"),
    ("l3_groups", "1"),
    ("pb", "0"),
    ("stride", "1000000000"),
    ("hist", "2"),
    ("ptb", "1"),
    ("repl", "lru"),
    ("inorder", "0"),
    ("gbps", "200"),
];

/// The parameters in [`ROW`].
fn params() -> TraceParams {
    TraceParams {
        workload: "iperf3".to_owned(),
        tenants: 4,
        order: "rr".to_owned(),
        burst: 1,
        total_pkts: 200,
        seed: (1 << 53) + 1,
        third: "mailbox".to_owned(),
        sids: "unique".to_owned(),
        uses: 1500,
        init_frac: 0.0015,
        stagger: 1,
        run: 0,
        live: 0,
        generator: Some("pagetide".to_owned()),
    }
}

/// A directory with the trace of [`params`] and a table.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(TempDir::new().unwrap());
        let traces = place.traces();
        fs::create_dir_all(traces.join("below")).unwrap();
        params().write(&place.params()).unwrap();
        let mut trace = HyperTrace::synthetic(&params().spec().unwrap()).unwrap();
        let writer = HypersioWriter::create(&traces.join("below/t_iotlb_trace.bin")).unwrap();
        build(&mut trace, Box::new(writer), &mut |_| ()).unwrap();
        place.table(&[row(&[("generator", "pagetide")])]);
        place
    }

    fn traces(&self) -> PathBuf {
        self.0.path().join("traces")
    }

    fn params(&self) -> PathBuf {
        self.traces().join("below/t_params.json")
    }

    fn reference(&self) -> PathBuf {
        self.0.path().join("reference.csv")
    }

    /// Writes the table; the first row determines the columns.
    fn table(&self, rows: &[Vec<(&str, String)>]) {
        let mut lines = Vec::new();
        if let Some(first) = rows.first() {
            lines.push(first.iter().map(|(name, _)| (*name).to_owned()).collect());
        }
        for row in rows {
            lines.push(row.iter().map(|(_, value)| value.clone()).collect());
        }
        let lines: Vec<String> = lines.iter().map(|line: &Vec<_>| line.join(",")).collect();
        fs::write(self.reference(), lines.join("\n") + "\n").unwrap();
    }

    fn verify(&self, threads: usize) -> Result<VerifyReport, SimError> {
        let request = VerifyRequest {
            reference: self.reference(),
            traces: self.traces(),
            lfu_seeds: 4,
            threads,
        };
        run(&request, &|_, _| ())
    }

    /// The error message of verifying.
    fn complaint(&self) -> String {
        self.verify(2).unwrap_err().to_string()
    }
}

/// [`ROW`] with the program's answer, and `changes`.
fn row(changes: &[(&'static str, &str)]) -> Vec<(&'static str, String)> {
    let mut row: Vec<(&str, String)> = ROW
        .iter()
        .chain(&[("time_ns", "1000"), ("dropped_slots", "")])
        .map(|(name, value)| (*name, (*value).to_owned()))
        .collect();
    for (name, value) in changes {
        match row.iter_mut().find(|(column, _)| column == name) {
            Some((_, old)) => (*value).clone_into(old),
            None => row.push((name, (*value).to_owned())),
        }
    }
    row
}

/// The model's own answer for [`ROW`] with `changes`.
fn own_answer(place: &Place, changes: &[(&'static str, &str)]) -> RowOutcome {
    place.table(&[row(changes)]);
    let report = place.verify(1).unwrap();
    report.worst[0].clone()
}

#[test]
fn row_whose_columns_all_match_is_compared_with_its_trace() {
    let place = Place::new();
    let figures = place.verify(1).unwrap().figures;
    assert_eq!((figures.rows, figures.rows_without_trace), (1, 0));
    assert_eq!(figures.lru_exact, 0, "no trace takes a microsecond");
}

#[test]
fn row_that_differs_in_any_one_column_is_without_trace() {
    let place = Place::new();
    for (name, value) in &ROW[..13] {
        // A seed that is the same number as a double.
        let other = match (*name, value.parse::<f64>()) {
            ("seed", _) => "9007199254740992".to_owned(),
            (_, Ok(number)) => (number + 1.0).to_string(),
            (_, Err(_)) => "other".to_owned(),
        };
        place.table(&[row(&[("generator", "pagetide"), (name, &other)])]);
        let figures = place.verify(1).unwrap().figures;
        assert_eq!((figures.rows, figures.rows_without_trace), (0, 1), "{name}");
    }
}

#[test]
fn numbers_match_however_they_are_written() {
    let place = Place::new();
    let written = [
        ("generator", " pagetide "),
        ("tenants", "4.0"),
        ("init_frac", "1.5e-3"),
        ("run", "-0.0"),
        ("stagger", " 1"),
    ];
    place.table(&[row(&written)]);
    assert_eq!(place.verify(1).unwrap().figures.rows, 1);
}

#[test]
fn row_of_another_generator_is_without_trace() {
    let place = Place::new();
    for generator in ["", "another"] {
        place.table(&[row(&[("generator", generator)])]);
        assert_eq!(place.verify(1).unwrap().figures.rows_without_trace, 1);
    }
    place.table(&[row(&[])]);
    assert_eq!(place.verify(1).unwrap().figures.rows_without_trace, 1);
}

#[test]
fn row_without_generator_matches_params_without_one() {
    let place = Place::new();
    let silent = TraceParams {
        generator: None,
        ..params()
    };
    silent.write(&place.params()).unwrap();
    place.table(&[row(&[])]);
    assert_eq!(place.verify(1).unwrap().figures.rows, 1);
    place.table(&[row(&[("generator", "")])]);
    assert_eq!(place.verify(1).unwrap().figures.rows, 1);
}

#[test]
fn trace_that_is_there_twice_is_run_once() {
    let place = Place::new();
    params()
        .write(&place.traces().join("u_params.json"))
        .unwrap();
    for name in ["iotlb_trace.bin", "cc_data.bin", "slpt_data.bin"] {
        let from = place.traces().join(format!("below/t_{name}"));
        fs::copy(from, place.traces().join(format!("u_{name}"))).unwrap();
    }
    assert_eq!(place.verify(1).unwrap().figures.rows, 1);
}

#[test]
fn rows_are_exact_where_seed_0_says_what_the_table_says() {
    let place = Place::new();
    for repl in ["lru", "lfu", "oracle"] {
        let mut changes = vec![("generator", "pagetide"), ("repl", repl)];
        let ours = own_answer(&place, &changes);
        let seed_0 = {
            // The least of one seed is its answer.
            let request = VerifyRequest {
                reference: place.reference(),
                traces: place.traces(),
                lfu_seeds: 1,
                threads: 1,
            };
            run(&request, &|_, _| ()).unwrap().worst[0].least_ns
        };
        let right = seed_0.to_string();
        changes.push(("time_ns", &right));
        place.table(&[row(&changes)]);
        let report = place.verify(2).unwrap();
        let figures = &report.figures;
        let exact = figures.lru_exact + figures.lfu_exact + figures.oracle_exact;
        assert_eq!((exact, report.agrees), (1, true), "{repl}");
        assert!(report.worst.is_empty());

        // One more than the greatest of all seeds is neither exact nor within.
        let wrong = (ours.most_ns + 1).to_string();
        changes.push(("time_ns", &wrong));
        place.table(&[row(&changes)]);
        let report = place.verify(2).unwrap();
        assert!(!report.worst[0].exact);
        let error = report.worst[0].error;
        #[expect(clippy::cast_precision_loss, reason = "far below 2^53")]
        let expected = 1.0 / (ours.most_ns + 1) as f64;
        assert!((error - expected).abs() < 1e-12, "{repl}: {error}");
    }
}

#[test]
fn dropped_slots_are_compared_where_the_table_has_them() {
    let place = Place::new();
    let none = own_answer(&place, &[("generator", "pagetide")]);
    assert_eq!(none.drops_agree, None);
    let wrong = own_answer(&place, &[("generator", "pagetide"), ("dropped_slots", "1")]);
    assert_eq!(wrong.drops_agree, Some(false));
}

#[test]
fn threads_do_not_change_a_report() {
    let place = Place::new();
    let rows: Vec<_> = (0..12)
        .map(|n| {
            let repl = ["lru", "lfu", "oracle"][n % 3];
            let ptb = ["1", "4", "8", "32"][n / 3];
            row(&[("generator", "pagetide"), ("repl", repl), ("ptb", ptb)])
        })
        .collect();
    place.table(&rows);
    let one = place.verify(1).unwrap();
    assert_eq!(one.figures.rows, 12);
    for threads in [2, 5, 100] {
        assert_eq!(place.verify(threads).unwrap(), one);
    }
}

#[test]
fn table_without_a_column_is_refused_by_the_column_s_name() {
    let place = Place::new();
    for missing in ["workload", "live", "iotlb_groups", "repl", "time_ns"] {
        let mut row = row(&[]);
        row.retain(|(name, _)| *name != missing);
        place.table(&[row]);
        let complaint = place.complaint();
        assert!(
            complaint.contains("reference.csv")
                && complaint.contains(&format!("no column '{missing}'")),
            "{complaint}"
        );
    }
}

#[test]
fn number_that_is_none_is_refused_with_row_and_column() {
    let place = Place::new();
    for (column, value, said) in [
        ("iotlb", "many", "'iotlb' is 'many'"),
        ("gbps", "-1", "'gbps' is '-1'"),
        ("time_ns", "", "'time_ns' is ''"),
        ("dropped_slots", "x", "'dropped_slots' is 'x'"),
        ("ptb", "4294967296", "too large"),
        ("repl", "fifo", "not lru, lfu or oracle"),
    ] {
        place.table(&[row(&[]), row(&[(column, value)])]);
        let complaint = place.complaint();
        assert!(
            complaint.contains("record 2") && complaint.contains(said),
            "{complaint}"
        );
    }
}

#[test]
fn packets_beyond_any_trace_are_no_overflow() {
    let place = Place::new();
    place.table(&[row(&[("total_pkts", "18446744073709551615")])]);
    assert_eq!(place.verify(1).unwrap().figures.rows_without_trace, 1);
}

#[test]
fn table_without_rows_is_refused() {
    let place = Place::new();
    fs::write(place.reference(), "").unwrap();
    assert!(place.complaint().contains("no rows"));
    fs::write(place.reference(), "workload,tenants\n").unwrap();
    assert!(place.complaint().contains("no rows"));
}

#[test]
fn rows_of_different_lengths_are_refused() {
    let place = Place::new();
    fs::write(place.reference(), "workload,tenants\niperf3\n").unwrap();
    assert!(place.complaint().contains("reference.csv"));
}

#[test]
fn table_or_directory_that_does_not_exist_is_named() {
    let place = Place::new();
    fs::remove_file(place.reference()).unwrap();
    assert!(place.complaint().contains("reference.csv"));
    let place = Place::new();
    fs::remove_dir_all(place.traces()).unwrap();
    let complaint = place.complaint();
    assert!(
        complaint.contains(&place.traces().display().to_string()),
        "{complaint}"
    );
}

#[test]
fn broken_params_are_refused_with_their_file() {
    let place = Place::new();
    let whole = fs::read_to_string(place.params()).unwrap();
    for (broken, said) in [
        ("{".to_owned(), "no JSON"),
        (String::new(), "no JSON"),
        ("{\"workload\": \"seq\"}".to_owned(), "has no 'tenants'"),
        (whole.replace("\"stagger\"", "\"x\""), "has no 'stagger'"),
        (whole.replace("\"rr\"", "[\"rr\"]"), "'order' is"),
        (whole.replace("\"pagetide\"", "7"), "'generator' is 7"),
    ] {
        fs::write(place.params(), broken).unwrap();
        let complaint = place.complaint();
        assert!(
            complaint.contains("t_params.json") && complaint.contains(said),
            "{complaint}"
        );
    }
}

#[test]
fn trace_missing_beside_its_params_is_counted_and_named() {
    let place = Place::new();
    let trace = place.traces().join("below/t_iotlb_trace.bin");
    fs::remove_file(&trace).unwrap();
    let report = place.verify(1).unwrap();
    assert_eq!(
        (report.figures.rows, report.figures.rows_without_trace),
        (0, 1)
    );
    assert_eq!(report.missing_traces, [trace]);
    assert!(!report.agrees, "nothing was compared");
}

#[test]
fn params_of_something_else_are_passed_over() {
    let place = Place::new();
    fs::write(place.traces().join("hyper_params.json"), "{\"layers\": 3}").unwrap();
    assert_eq!(place.verify(1).unwrap().figures.rows, 1);
}

#[test]
fn row_that_the_model_cannot_run_is_named() {
    let place = Place::new();
    place.table(&[row(&[("generator", "pagetide"), ("iotlb_groups", "64")])]);
    let complaint = place.complaint();
    assert!(
        complaint.contains("record 1") && complaint.contains("devtlb"),
        "{complaint}"
    );
}

#[test]
fn row_that_took_no_time_is_refused() {
    let place = Place::new();
    place.table(&[row(&[("time_ns", "0")])]);
    assert!(place.complaint().contains("'time_ns' is 0"));
}

#[test]
fn params_without_trace_and_without_rows_are_nobody_s_business() {
    let place = Place::new();
    fs::remove_file(place.traces().join("below/t_iotlb_trace.bin")).unwrap();
    place.table(&[row(&[("generator", "another")])]);
    assert_eq!(place.verify(1).unwrap().figures.rows_without_trace, 1);
}

#[test]
fn broken_trace_is_told_with_its_record() {
    let place = Place::new();
    let path: &Path = &place.traces().join("below/t_iotlb_trace.bin");
    let mut bytes = fs::read(path).unwrap();
    bytes.truncate(48 * 10 + 5);
    fs::write(path, bytes).unwrap();
    let complaint = place.complaint();
    assert!(complaint.contains("record 10"), "{complaint}");
}

#[test]
fn configuration_that_cannot_be_run_is_told() {
    let place = Place::new();
    place.table(&[row(&[("generator", "pagetide"), ("gbps", "0")])]);
    assert!(place.complaint().contains("link.gbps"));
}
