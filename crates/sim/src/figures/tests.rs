// SPDX-License-Identifier: Apache-2.0
//! Figures of few packets: that each is complete, not what it shows.

use std::collections::HashSet;
use std::num::NonZeroUsize;
use std::path::Path;

use super::*;

fn options(out: &Path, only: &[&str]) -> FigureOptions {
    FigureOptions {
        out: out.to_owned(),
        packets: 40,
        only: only.iter().map(|name| (*name).to_owned()).collect(),
        jobs: NonZeroUsize::new(2).unwrap(),
        build: Build {
            pagetide_version: "1".into(),
            git_commit: None,
            program_sha256: "0".into(),
        },
        host: "here".into(),
        stop: Stop::default(),
    }
}

#[test]
fn every_study_is_possible_and_names_are_distinct_and_in_order() {
    let mut points = 0;
    for figure in FIGURES {
        let study = Draft::parse(&figure.toml(9), Path::new(""))
            .and_then(|draft| draft.study())
            .unwrap_or_else(|error| panic!("{}: {error}", figure.id));
        points += study.points.len();
        assert_eq!(study.skipped > 0, figure.id == "partitions");
    }
    assert!(points > 3_000, "{points}");
    let names = names();
    assert_eq!(names.len(), 18);
    assert_eq!(names.iter().collect::<HashSet<_>>().len(), 18);
    assert_eq!((names[0], names[17]), ("4", "tenants-a-partition"));
    assert!(names.iter().all(|name| catalogue::place(name) < 18));
}

#[test]
fn every_line_of_a_panel_has_a_point_at_each_place_and_every_number_of_the_paper_has_ours() {
    for figure in FIGURES {
        let study = Draft::parse(&figure.toml(9), Path::new("")).unwrap();
        let study = study.study().unwrap();
        let traces = Traces::of(&study).unwrap();
        // Rows without results: their y is 0.
        let rows: Vec<Row> = (0..study.points.len())
            .map(|number| {
                let row = SweepRow {
                    id: traces.id(&study.points[number]),
                    run: crate::study::Run {
                        build: options(Path::new(""), &[]).build,
                        host: String::new(),
                        started_unix_ms: 0,
                        wall_seconds: 0.0,
                        figures: ["gbps", "link_share", "walk_accesses"]
                            .map(|name| (name.to_owned(), json!(1.0)))
                            .into_iter()
                            .collect(),
                    },
                };
                Row::of(cells(&study, &traces, number, &row))
            })
            .collect();
        let (panels, beside) = collect(figure, &rows);
        assert!(!panels.is_empty());
        for panel in &panels {
            let Places::Named(places) = &panel.places else {
                panic!("{}: numbers on the x axis", figure.id);
            };
            assert!(places.len() >= 4, "{}", figure.id);
            // What can be told apart in one picture.
            assert!((1..=7).contains(&panel.curves.len()), "{}", figure.id);
            for curve in &panel.curves {
                let at: Vec<f64> = curve.points.iter().map(|(x, _)| *x).collect();
                let expected: Vec<f64> = (0_u32..).take(places.len()).map(f64::from).collect();
                assert_eq!(at, expected, "{}: {}", figure.id, curve.name);
            }
        }
        assert!(!beside.is_empty(), "{}", figure.id);
        for one in &beside {
            assert!(one.ours.len() >= 4);
            let found = one.ours.iter().all(|(_, ours)| ours != "–");
            assert!(found, "{}: {}", figure.id, one.what);
        }
    }
}

#[test]
fn figures_share_points_and_go_on_where_they_stopped() {
    let dir = tempfile::tempdir().unwrap();
    let options = options(dir.path(), &["12b", "12c"]);
    let first = compute(&options, &|_| {}).unwrap();
    // A PTB of 32 without prefetching is in both.
    assert!(first.run > 0 && first.points > first.run);
    let again = compute(&options, &|_| {}).unwrap();
    assert_eq!((again.points, again.run), (first.points, 0));
    assert_eq!(again.figures, first.figures);
    for figure in &again.figures {
        for file in &figure.files {
            assert!(dir.path().join(file).is_file(), "{file}");
        }
    }
    let study = Draft::read(&dir.path().join("figure-12b.toml")).unwrap();
    assert!(study.study().unwrap().points.len() > 100);
}

#[test]
fn unknown_figure_is_refused_with_the_names_that_there_are() {
    let error = compute(&options(Path::new("/nowhere"), &["13"]), &|_| {}).unwrap_err();
    let told = error.to_string();
    assert!(
        told.starts_with("13: ") && told.contains("11a, 11b"),
        "{told}"
    );
    assert!(error.is_wrong_use());
}

#[test]
fn pages_of_a_tenant_are_those_of_the_section() {
    let dir = tempfile::tempdir().unwrap();
    let figures = compute(&options(dir.path(), &["8a", "8b"]), &|_| {}).unwrap();
    assert_eq!((figures.points, figures.figures.len()), (0, 2));
    let ours: Vec<&str> = figures.figures[0]
        .beside
        .iter()
        .map(|beside| beside.ours[0].1.as_str())
        .collect();
    assert_eq!(ours[..2], ["32", "70"]);
    let bars = &figures.figures[0].panels[0].curves[0].points;
    assert_eq!(bars.len(), 33, "the ring's page and 32 of data");
}
