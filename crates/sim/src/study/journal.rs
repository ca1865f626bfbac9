// SPDX-License-Identifier: Apache-2.0
//! The record of finished points, from which a sweep resumes after a kill.
//!
//! A text file beside the results, one JSON object a line, appended and synced when its point is done. A
//! kill leaves at most the last line torn: it has no line feed, or is no JSON. That line is removed, and
//! its point runs again. Any other unreadable content is not ours, and is refused, not overwritten.
//!
//! Lines of points that are no longer in the study stay; they cost nothing and the points may return. Lines
//! of another build of the program are ignored: its model may have differed.

use std::collections::HashMap;
use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::build_id::build_id;
use super::columns;
use super::error::StudyError;
use super::identity::{Content, PointId, sha256};
use crate::stop::Stop;

/// Version at the start of lines of this layout.
const VERSION: u32 = 1;

/// The program that produced a result.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Build {
    /// Its version.
    pub pagetide_version: String,
    /// The commit it was built from, if known; with the suffix `-dirty` if its source was changed since.
    pub git_commit: Option<String>,
    /// SHA-256 of the build id that the linker left in the program, or of the whole program if there is none:
    /// two builds of one commit may differ by uncommitted changes, or by compiler and features.
    #[serde(default)]
    pub program_sha256: String,
}

impl Build {
    /// The build of the running program.
    ///
    /// # Errors
    /// If the program cannot be read.
    pub fn running(version: &str, commit: Option<&str>) -> Result<Self, StudyError> {
        // The link leads to the program even if its name is gone.
        Self::of(Path::new("/proc/self/exe"), version, commit)
    }

    /// The build of the program or library in the file at `path`.
    ///
    /// # Errors
    /// If it cannot be read.
    pub fn of(path: &Path, version: &str, commit: Option<&str>) -> Result<Self, StudyError> {
        let id = File::open(path)
            .ok()
            .and_then(|mut file| build_id(&mut file));
        Ok(Self {
            pagetide_version: version.to_owned(),
            git_commit: commit.map(str::to_owned),
            program_sha256: match id {
                Some(id) => sha256(&id),
                None => Content::of(path, &Stop::default())?.sha256,
            },
        })
    }
}

/// The record of one run.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Run {
    /// The program that ran it.
    #[serde(flatten)]
    pub build: Build,
    /// The machine.
    pub host: String,
    /// Its start, in milliseconds of Unix time.
    pub started_unix_ms: u64,
    /// How long it took.
    pub wall_seconds: f64,
    /// Its results, by column.
    pub figures: Map<String, Value>,
}

#[derive(Serialize, Deserialize)]
struct Line {
    journal: u32,
    id: PointId,
    #[serde(flatten)]
    run: Run,
}

/// The journal of a sweep under way; no other sweep can use it meanwhile.
#[derive(Debug)]
pub(super) struct Journal {
    path: PathBuf,
    file: File,
}

impl Journal {
    /// Where the journal of the results at `results` is.
    pub(super) fn path_beside(results: &Path) -> PathBuf {
        let mut name = results.file_name().unwrap_or_default().to_owned();
        name.push(".journal");
        results.with_file_name(name)
    }

    /// Opens or creates the journal at `path`, and returns what `build` has finished already.
    pub(super) fn open(
        path: &Path,
        build: &Build,
    ) -> Result<(Self, HashMap<PointId, Run>), StudyError> {
        let mut file = OpenOptions::new()
            .read(true)
            .append(true)
            .create(true)
            .open(path)
            .map_err(|error| write_error(path, &error))?;
        rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive).map_err(
            |_| StudyError::Journal {
                path: path.to_owned(),
                reason: "another sweep is writing it; wait for that, or give another --out"
                    .to_owned(),
            },
        )?;
        let mut text = Vec::new();
        file.read_to_end(&mut text)
            .map_err(|error| write_error(path, &error))?;
        let (finished, whole) = read_lines(path, &text, build)?;
        if whole < text.len() {
            file.set_len(whole as u64)
                .and_then(|()| file.seek(SeekFrom::End(0)))
                .map_err(|error| write_error(path, &error))?;
        }
        let path = path.to_owned();
        Ok((Self { path, file }, finished))
    }

    /// Adds a point; it is on disk on return.
    pub(super) fn add(&mut self, id: &PointId, run: &Run) -> Result<(), StudyError> {
        let line = Line {
            journal: VERSION,
            id: id.clone(),
            run: run.clone(),
        };
        let mut text = columns::json(&line).to_string();
        text.push('\n');
        self.file
            .write_all(text.as_bytes())
            .and_then(|()| self.file.sync_data())
            .map_err(|error| write_error(&self.path, &error))
    }
}

/// The runs of `build` in `text`, and how many bytes of it are complete lines.
fn read_lines(
    path: &Path,
    text: &[u8],
    build: &Build,
) -> Result<(HashMap<PointId, Run>, usize), StudyError> {
    let mut finished = HashMap::new();
    let mut whole = 0;
    for (number, bytes) in text.split_inclusive(|byte| *byte == b'\n').enumerate() {
        let last = whole + bytes.len() == text.len();
        match serde_json::from_slice::<Line>(bytes) {
            Ok(line) if bytes.ends_with(b"\n") && line.journal == VERSION => {
                if line.run.build == *build {
                    finished.insert(line.id, line.run);
                }
            }
            _ if last && looks_torn(bytes) => break,
            _ => {
                return Err(StudyError::Journal {
                    path: path.to_owned(),
                    reason: format!(
                        "line {} is not of a journal of this program; move the file elsewhere to start anew",
                        number + 1
                    ),
                });
            }
        }
        whole += bytes.len();
    }
    Ok((finished, whole))
}

/// True if `bytes` may be the rest of one of our lines after a kill or a power cut.
fn looks_torn(bytes: &[u8]) -> bool {
    const BEGIN: &[u8] = b"{\"journal\":";
    let common = bytes.len().min(BEGIN.len());
    bytes[..common] == BEGIN[..common] || bytes.iter().all(|byte| *byte == 0)
}

fn write_error(path: &Path, error: &std::io::Error) -> StudyError {
    StudyError::Write {
        path: path.to_owned(),
        reason: error.to_string(),
    }
}
