// SPDX-License-Identifier: Apache-2.0
//! Checks of this repository that no compiler makes: `cargo xtask tidy`, `cargo xtask circles`.
//!
//! A rule without a test is not enforced. Each module holds one kind of rule as pure functions from text to
//! findings; this file reads the text and prints.

mod circles;
mod edges;
mod licences;
mod origins;
mod source;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

#[derive(Debug, thiserror::Error)]
enum TidyError {
    #[error("{path}: {source}", path = path.display())]
    Read { path: PathBuf, source: io::Error },
    #[error("`cargo metadata` failed: {0}")]
    Metadata(String),
    #[error("`cargo metadata` printed no JSON: {0}")]
    NotJson(#[from] serde_json::Error),
    #[error("deny.toml: {0}")]
    DenyList(String),
    #[error(transparent)]
    Circles(#[from] circles::CircleError),
}

fn main() -> ExitCode {
    let mut words = std::env::args().skip(1);
    match words.next().as_deref() {
        Some("tidy") => report("tidy", tidy()),
        Some("circles") => report("circles", circles()),
        other => {
            let given = other.unwrap_or("nothing");
            eprintln!(
                "xtask: {given} is no task; `cargo xtask tidy` and `cargo xtask circles` are"
            );
            ExitCode::from(2)
        }
    }
}

fn report(task: &str, found: Result<Vec<String>, TidyError>) -> ExitCode {
    match found {
        Err(error) => {
            eprintln!("{task}: {error}");
            ExitCode::FAILURE
        }
        Ok(findings) if findings.is_empty() => {
            eprintln!("{task}: nothing to say");
            ExitCode::SUCCESS
        }
        Ok(findings) => {
            for finding in &findings {
                eprintln!("{task}: {finding}");
            }
            eprintln!("{task}: {} findings", findings.len());
            ExitCode::FAILURE
        }
    }
}

/// Prints every circle of files; those that are too large are findings.
fn circles() -> Result<Vec<String>, TidyError> {
    let root = root();
    let mut findings = Vec::new();
    for krate in crate_roots(&root)? {
        for circle in circles::of_crate(&krate)? {
            let name = |path: &PathBuf| {
                let path = path.strip_prefix(&root).unwrap_or(path);
                path.display().to_string()
            };
            let files: Vec<String> = circle.files.iter().map(name).collect();
            let mut text = format!("{} files: {}", files.len(), files.join(" "));
            if files.len() <= circles::FILES_MAX {
                eprintln!("circles: {text}");
                continue;
            }
            for (from, to, names) in &circle.uses {
                let (from, to) = (name(from), name(to));
                text += &format!("\n    {from} uses {to}: {}", names.join(", "));
            }
            findings.push(text);
        }
    }
    Ok(findings)
}

/// The root files of our libraries, in order.
fn crate_roots(root: &Path) -> Result<Vec<PathBuf>, TidyError> {
    let files = rust_files(root)?;
    let is_root = |path: &PathBuf| path.ends_with("src/lib.rs");
    Ok(files.into_iter().filter(is_root).collect())
}

fn tidy() -> Result<Vec<String>, TidyError> {
    let root = root();
    let mut findings = Vec::new();
    for path in rust_files(&root)? {
        let name = path
            .strip_prefix(&root)
            .unwrap_or(&path)
            .display()
            .to_string();
        let text = read(&path)?;
        findings.extend(
            source::check(&name, &text)
                .into_iter()
                .map(|f| format!("{name}:{f}")),
        );
    }
    let metadata = metadata(&root)?;
    findings.extend(edges::check(&edges::workspace(&metadata)));
    let deny = read(&root.join("deny.toml"))?;
    let allowed = licences::allowed(&deny).map_err(TidyError::DenyList)?;
    findings.extend(licences::check(&metadata, &allowed));
    let rules = origins::Rules::read(&deny).map_err(TidyError::DenyList)?;
    findings.extend(origins::check(&metadata, &rules));
    Ok(findings)
}

fn root() -> PathBuf {
    let mut root = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    root.pop();
    root.pop();
    root
}

/// All our Rust files, in order: the result of tidy must not depend on what is committed.
fn rust_files(root: &Path) -> Result<Vec<PathBuf>, TidyError> {
    let mut files = Vec::new();
    let mut folders = ["crates", "examples", "guest"]
        .map(|name| root.join(name))
        .to_vec();
    while let Some(folder) = folders.pop() {
        let entries = fs::read_dir(&folder).map_err(|source| read_error(&folder, source))?;
        for entry in entries {
            let path = entry.map_err(|source| read_error(&folder, source))?.path();
            if path.is_dir() {
                if path.file_name().is_some_and(|name| name != "target") {
                    folders.push(path);
                }
            } else if path.extension().is_some_and(|ending| ending == "rs") {
                files.push(path);
            }
        }
    }
    files.sort();
    Ok(files)
}

fn metadata(root: &Path) -> Result<serde_json::Value, TidyError> {
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .current_dir(root)
        .args(["metadata", "--format-version", "1"])
        // Other platforms' crates are neither used nor downloaded.
        .args(["--filter-platform", "x86_64-unknown-linux-gnu"])
        .output()
        .map_err(|error| TidyError::Metadata(error.to_string()))?;
    if !output.status.success() {
        return Err(TidyError::Metadata(
            String::from_utf8_lossy(&output.stderr).into_owned(),
        ));
    }
    Ok(serde_json::from_slice(&output.stdout)?)
}

fn read(path: &Path) -> Result<String, TidyError> {
    fs::read_to_string(path).map_err(|source| read_error(path, source))
}

fn read_error(path: &Path, source: io::Error) -> TidyError {
    TidyError::Read {
        path: path.to_owned(),
        source,
    }
}
