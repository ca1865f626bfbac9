// SPDX-License-Identifier: Apache-2.0
//! sqlite: its shell, which reads statements and writes rows, on a database in the guest's memory.

use super::{DATA_BYTES, Random, Service, ServiceError, io_failed, used};
use crate::pattern;
use std::io::{self, BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

const PROGRAM: &str = "/bin/sqlite3";
const DATABASE: &str = "/tmp/service/rows.db";
/// A row fills a page of the database.
const BODY_BYTES: usize = 3900;
const READS_A_REQUEST: u64 = 4;
/// Rows written by one transaction, while the data is made.
const BATCH: usize = 256;

/// See the module.
pub(super) struct Rows {
    shell: Child,
    statements: ChildStdin,
    rows: BufReader<ChildStdout>,
    generations: Vec<u32>,
}

impl Drop for Rows {
    fn drop(&mut self) {
        if let Err(error) = self.shell.kill().and_then(|()| self.shell.wait()) {
            eprintln!("guest-work: ending sqlite: {error}");
        }
    }
}

impl Rows {
    pub(super) fn prepare() -> Result<Self, ServiceError> {
        let failed = io_failed(PROGRAM);
        let mut shell = Command::new(PROGRAM)
            .args(["-batch", "-list", DATABASE])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(&failed)?;
        let (statements, rows) = shell
            .stdin
            .take()
            .zip(shell.stdout.take())
            .ok_or_else(|| failed(io::ErrorKind::BrokenPipe.into()))?;
        let count = usize::try_from(DATA_BYTES).unwrap_or(0) / pattern::PAGE_BYTES;
        let mut all = Self {
            shell,
            statements,
            rows: BufReader::new(rows),
            generations: vec![0; count],
        };
        // The journal is memory, too, and deleting it each time would be most of a request.
        all.ask("PRAGMA journal_mode = TRUNCATE;")?;
        all.tell("CREATE TABLE rows (id INTEGER PRIMARY KEY, body TEXT);")?;
        let count = count as u64;
        for first in (0..count).step_by(BATCH) {
            all.tell("BEGIN;")?;
            for id in first..count.min(first + BATCH as u64) {
                all.tell(&format!(
                    "INSERT INTO rows VALUES ({id}, '{}');",
                    body(id, 0)
                ))?;
            }
            all.tell("COMMIT;")?;
        }
        all.check(count - 1)?;
        Ok(all)
    }

    fn tell(&mut self, statement: &str) -> Result<(), ServiceError> {
        let told = writeln!(self.statements, "{statement}");
        told.and_then(|()| self.statements.flush())
            .map_err(io_failed(PROGRAM))
    }

    /// The one row of the answer.
    fn ask(&mut self, statement: &str) -> Result<String, ServiceError> {
        self.tell(statement)?;
        let mut line = String::new();
        self.rows.read_line(&mut line).map_err(io_failed(PROGRAM))?;
        Ok(line.trim_end().to_owned())
    }

    fn check(&mut self, id: u64) -> Result<(), ServiceError> {
        let got = self.ask(&format!("SELECT body FROM rows WHERE id = {id};"))?;
        match got == body(id, self.generations[place(id)]) {
            true => Ok(()),
            false => Err(ServiceError::Wrong(format!("row {id}"))),
        }
    }

    fn update(&mut self, id: u64) -> Result<(), ServiceError> {
        let next = self.generations[place(id)] + 1;
        let text = body(id, next);
        let got = self.ask(&format!(
            "UPDATE rows SET body = '{text}' WHERE id = {id} RETURNING id;"
        ))?;
        if got != id.to_string() {
            return Err(ServiceError::Wrong(format!(
                "row {id}, which is to be updated,"
            )));
        }
        self.generations[place(id)] = next;
        Ok(())
    }
}

impl Service for Rows {
    fn request(&mut self, random: &mut Random) -> Result<(), ServiceError> {
        let rows = used(self.generations.len() as u64);
        for _ in 0..READS_A_REQUEST {
            self.check(random.below(rows))?;
        }
        self.update(random.below(rows))
    }

    fn verify(&mut self) -> Result<(), ServiceError> {
        (0..self.generations.len() as u64).try_for_each(|id| self.check(id))
    }
}

fn place(id: u64) -> usize {
    usize::try_from(id).unwrap_or(usize::MAX)
}

/// Text without a quotation mark, about half of it repeated.
fn body(id: u64, generation: u32) -> String {
    let mut text = String::with_capacity(BODY_BYTES + 32);
    let mut word = pattern::key(2, id, generation);
    while text.len() < BODY_BYTES {
        word = pattern::mix(word);
        text += &format!("{word:016x}{word:016x}");
    }
    text.truncate(BODY_BYTES);
    text
}
