// SPDX-License-Identifier: Apache-2.0
//! The paper's figures.

use std::path::PathBuf;

use pagetide_figures::draw_all;
use pagetide_sim::Stop;
use pagetide_sim::figures::{FigureOptions, compute, names};
use pyo3::prelude::*;
use serde_json::{Value, json};

use crate::error::{error, to_json};
use crate::interrupt::interruptible;
use crate::study::{Progress, host, this_build, threads};

/// Names of the figures.
#[pyfunction]
pub fn figure_names() -> Vec<&'static str> {
    names()
}

/// Computes and draws figures into the directory `out`, and gives what is in them as JSON.
#[pyfunction]
pub fn figures(
    py: Python<'_>,
    out: PathBuf,
    packets: u64,
    only: Vec<String>,
    jobs: Option<usize>,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    std::fs::create_dir_all(&out)
        .map_err(|reason| error(format!("{}: {reason}", out.display())))?;
    let options = FigureOptions {
        out,
        packets,
        only,
        jobs: threads(jobs)?,
        build: this_build()?,
        host: host(),
        stop: Stop::default(),
    };
    let at = Progress::default();
    let work = || -> Result<Value, String> {
        let computed =
            compute(&options, &|progress| at.tell(progress)).map_err(|error| error.to_string())?;
        let (drawn, page) = draw_all(&computed, &options.out, options.packets)
            .map_err(|error| error.to_string())?;
        let figures: Vec<Value> = drawn
            .iter()
            .map(|(figure, pictures)| {
                let pictures: Vec<Value> = pictures
                    .iter()
                    .map(|picture| {
                        json!({
                            "name": picture.panel.name,
                            "reading": picture.panel.reading,
                            "file": picture.file,
                            "svg": picture.svg,
                        })
                    })
                    .collect();
                json!({
                    "id": figure.id,
                    "title": figure.title,
                    "section": figure.section,
                    "about": figure.about,
                    "files": figure.files,
                    "beside": figure.beside,
                    "pictures": pictures,
                })
            })
            .collect();
        Ok(json!({
            "figures": figures,
            "page": page,
            "points": computed.points,
            "run": computed.run,
            "skipped": computed.skipped,
            "requests": computed.requests,
            "wall_seconds": computed.wall_seconds,
        }))
    };
    let done = interruptible(py, &options.stop, at.between(&progress), work)?;
    to_json(&done.map_err(error)?)
}
