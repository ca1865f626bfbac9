// SPDX-License-Identifier: Apache-2.0
//! Which points of a study are finished, for whoever runs them: threads of this program, or somebody else.

use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};

use super::error::StudyError;
use super::identity::PointId;
use super::journal::{Build, Journal, Run};
use super::output::check_output;
use super::points::Study;
use super::results::{SweepRow, write_results};
use super::traces::Traces;

/// The finished points of a study, and their journal if there is to be one.
#[derive(Debug)]
pub struct Ledger {
    ids: Vec<PointId>,
    finished: HashMap<PointId, Run>,
    /// Where results go, and the journal beside them.
    kept: Option<(PathBuf, Journal)>,
    open: Vec<usize>,
}

impl Ledger {
    /// Begins, or goes on with, a study whose results go to `out`; without one they are only in memory.
    ///
    /// # Errors
    /// If the output path is impossible or an input of the study, or the journal cannot be used.
    pub fn open(
        study: &Study,
        traces: &Traces,
        build: &Build,
        out: Option<&Path>,
    ) -> Result<Self, StudyError> {
        let (kept, finished) = match out {
            None => (None, HashMap::new()),
            Some(out) => {
                check_output(out, study, traces)?;
                let path = Journal::path_beside(out);
                check_output(&path, study, traces)?;
                let (journal, finished) = Journal::open(&path, build)?;
                (Some((out.to_owned(), journal)), finished)
            }
        };
        let ids: Vec<PointId> = study.points.iter().map(|point| traces.id(point)).collect();
        let mut seen: HashSet<&PointId> = finished.keys().collect();
        let new = ids.iter().enumerate().filter(|(_, id)| seen.insert(*id));
        let open = new.map(|(number, _)| number).collect();
        Ok(Self {
            ids,
            finished,
            kept,
            open,
        })
    }

    /// Numbers of the points that are to be run: not those of an earlier sweep, and equal ones once.
    #[must_use]
    pub fn open_points(&self) -> &[usize] {
        &self.open
    }

    /// Records the result of point `number`. It is on disk on return, if the results go there.
    ///
    /// # Errors
    /// If the journal cannot be written.
    ///
    /// # Panics
    /// If the study has no such point.
    pub fn keep(&mut self, number: usize, run: Run) -> Result<(), StudyError> {
        let id = self.ids[number].clone();
        if let Some((_, journal)) = &mut self.kept {
            journal.add(&id, &run)?;
        }
        self.finished.insert(id, run);
        Ok(())
    }

    /// A row for each point in the order of the study, written to the output if there is one.
    ///
    /// # Errors
    /// If the output cannot be written.
    ///
    /// # Panics
    /// If a point is not finished.
    pub fn close(self, study: &Study, traces: &Traces) -> Result<Vec<SweepRow>, StudyError> {
        let row = |id: PointId| {
            let Some(run) = self.finished.get(&id).cloned() else {
                panic!("point {id} was not run");
            };
            SweepRow { id, run }
        };
        let rows: Vec<SweepRow> = self.ids.iter().cloned().map(row).collect();
        if let Some((out, _)) = &self.kept {
            write_results(study, traces, &rows, out)?;
        }
        Ok(rows)
    }

    /// Where the journal is.
    #[must_use]
    pub fn journal(&self) -> Option<PathBuf> {
        let (out, _) = self.kept.as_ref()?;
        Some(Journal::path_beside(out))
    }
}
