// SPDX-License-Identifier: Apache-2.0
//! A file that gets its name only when it is complete, so a reader that finds the name finds the whole
//! file.
//!
//! Until then it has no name at all (`O_TMPFILE`), so that a killed process leaves nothing behind. A file
//! system without such files gets one named `.NAME.PID-N.partial` beside it; a killed process leaves that
//! one there.
//!
//! Taking a name replaces an existing file. That is right for files and ruinous for devices and pipes:
//! `/dev/null` would become a regular file for the whole system. So only a regular file may be replaced.
//! Symbolic links stay, and the file they lead to is replaced.

use std::ffi::{OsStr, OsString};
use std::fs::{self, File, FileType, OpenOptions};
use std::io::ErrorKind;
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};

use crate::error::TraceError;

/// Most symbolic links that are followed; the kernel's own limit.
const LINKS_MAX: usize = 40;

/// Bytes of a file's name that its temporary name begins with: with the numbers after them the name stays
/// below the limit of 255.
const NAME_BYTES_MAX: usize = 200;

/// A file being written for a path; dropped before [`PartialFile::complete`], it leaves nothing behind.
#[derive(Debug)]
pub struct PartialFile {
    /// The requested path.
    path: PathBuf,
    /// The path it resolves to: no symbolic link.
    target: PathBuf,
    temporary: PathBuf,
    stage: Stage,
}

/// The file's state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Stage {
    /// It has no name.
    Nameless,
    /// It has the temporary name.
    Temporary,
    /// It has its final name.
    Complete,
}

impl PartialFile {
    /// Creates the file, empty, open for reading and writing, still without its name.
    ///
    /// # Errors
    /// If `path` exists and is no regular file, or no file can be created there.
    pub fn create(path: &Path) -> Result<(Self, File), TraceError> {
        let target = target_of(path)?;
        let Some(name) = target.file_name() else {
            return Err(TraceError::Asked(format!(
                "{} is no name of a file to write",
                path.display()
            )));
        };
        let mut partial = Self {
            path: path.to_owned(),
            temporary: target.with_file_name(hidden(name)),
            target,
            stage: Stage::Nameless,
        };
        if let Some(file) = nameless(directory_of(&partial.target)) {
            return Ok((partial, file));
        }
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(true)
            .open(&partial.temporary)
            .map_err(|source| partial.error(source))?;
        partial.stage = Stage::Temporary;
        Ok((partial, file))
    }

    /// Checks that a file can be created at `path`, before long work whose result goes there.
    ///
    /// # Errors
    /// As [`PartialFile::create`].
    pub fn check(path: &Path) -> Result<(), TraceError> {
        Self::create(path).map(drop)
    }

    /// The name that the file will have.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Gives `file`, the one of [`PartialFile::create`], its name, once it is on disk.
    ///
    /// # Errors
    /// If the system cannot write it out or name it.
    pub fn complete(mut self, file: &File) -> Result<(), TraceError> {
        self.finish(file).map_err(|source| self.error(source))
    }

    fn finish(&mut self, file: &File) -> std::io::Result<()> {
        file.sync_data()?;
        if self.stage == Stage::Nameless {
            // A link cannot replace an existing file but a rename can: so two steps.
            match fs::remove_file(&self.temporary) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(error),
                _ => {}
            }
            rustix::fs::linkat(
                CWD,
                descriptor(file),
                CWD,
                &self.temporary,
                AtFlags::SYMLINK_FOLLOW,
            )?;
            self.stage = Stage::Temporary;
        }
        fs::rename(&self.temporary, &self.target)?;
        self.stage = Stage::Complete;
        Ok(())
    }

    /// An error of the system about this file.
    pub fn error(&self, source: std::io::Error) -> TraceError {
        TraceError::Io {
            path: self.path.clone(),
            source,
        }
    }
}

impl Drop for PartialFile {
    fn drop(&mut self) {
        if self.stage == Stage::Temporary {
            // Gone already, or its directory is: either way there is nothing left to remove.
            drop(fs::remove_file(&self.temporary));
        }
    }
}

/// The file that `path` resolves to, which may not exist yet.
fn target_of(path: &Path) -> Result<PathBuf, TraceError> {
    let refused = |reason: String| TraceError::File {
        path: path.to_owned(),
        reason,
    };
    match fs::metadata(path) {
        Ok(there) if there.is_file() => {}
        Ok(there) => {
            return Err(refused(format!(
                "is {}, and would be replaced; give the name of a file",
                kind_of(there.file_type())
            )));
        }
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(source) => {
            return Err(TraceError::Io {
                path: path.to_owned(),
                source,
            });
        }
    }
    let mut target = path.to_owned();
    // A dangling link is followed too, as when a file is opened for writing.
    for _ in 0..LINKS_MAX {
        match fs::read_link(&target) {
            Ok(next) => target = directory_of(&target).join(next),
            Err(_) => break,
        }
    }
    let directory = directory_of(&target);
    if !directory.is_dir() {
        return Err(refused(format!(
            "there is no directory {}; make it first",
            directory.display()
        )));
    }
    Ok(target)
}

/// A temporary name for `name` that is unique: others may be writing the same file, and the last to finish
/// wins.
fn hidden(name: &OsStr) -> OsString {
    // Only needs to be unique; no other data depends on it.
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let serial = NEXT.fetch_add(1, Ordering::Relaxed);
    let name = name.as_bytes();
    let mut hidden = OsString::from(".");
    hidden.push(OsStr::from_bytes(&name[..name.len().min(NAME_BYTES_MAX)]));
    hidden.push(format!(".{}-{serial}.partial", std::process::id()));
    hidden
}

fn kind_of(kind: FileType) -> &'static str {
    if kind.is_dir() {
        "a directory"
    } else if kind.is_fifo() {
        "a pipe"
    } else if kind.is_socket() {
        "a socket"
    } else {
        "a device"
    }
}

fn directory_of(file: &Path) -> &Path {
    match file.parent() {
        Some(parent) if !parent.as_os_str().is_empty() => parent,
        _ => Path::new("."),
    }
}

/// A file without a name, if the file system supports that and the file can be named later.
fn nameless(directory: &Path) -> Option<File> {
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    // Whatever is wrong, creating a named file gives a better error.
    match rustix::fs::open(directory, flags, Mode::from_raw_mode(0o666)) {
        Ok(file) => Some(File::from(file)).filter(|file| descriptor(file).exists()),
        Err(_) => None,
    }
}

/// The kernel's path of an open file, to link from.
fn descriptor(file: &File) -> PathBuf {
    PathBuf::from(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;
    use std::os::unix::fs::symlink;

    use super::*;

    fn make(path: &Path, content: &[u8]) -> Result<(), TraceError> {
        let (partial, mut file) = PartialFile::create(path)?;
        file.write_all(content).unwrap();
        partial.complete(&file)
    }

    fn names(directory: &Path) -> Vec<OsString> {
        let entries = fs::read_dir(directory).unwrap();
        let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name()).collect();
        names.sort();
        names
    }

    #[test]
    fn file_that_is_complete_replaces_the_one_before_and_is_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        for content in [b"one".as_slice(), b"two"] {
            make(&path, content).unwrap();
            assert_eq!(fs::read(&path).unwrap(), content);
        }
        assert_eq!(names(dir.path()), ["a"]);
    }

    #[test]
    fn file_that_is_dropped_or_leaked_leaves_the_one_before() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        make(&path, b"one").unwrap();
        drop(PartialFile::create(&path).unwrap());
        PartialFile::check(&path).unwrap();
        assert_eq!(names(dir.path()), ["a"]);
        // As when the process is killed: nothing is dropped, and all is closed.
        if nameless(dir.path()).is_some() {
            let (partial, file) = PartialFile::create(&path).unwrap();
            std::mem::forget(partial);
            drop(file);
            assert_eq!(names(dir.path()), ["a"]);
        }
        assert_eq!(fs::read(&path).unwrap(), b"one");
    }

    #[test]
    fn file_with_a_temporary_name_ends_as_one_without() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        for complete in [true, false] {
            let temporary = dir.path().join(".a.partial");
            let mut file = File::create(&temporary).unwrap();
            let partial = PartialFile {
                path: path.clone(),
                target: path.clone(),
                temporary,
                stage: Stage::Temporary,
            };
            file.write_all(b"one").unwrap();
            if complete {
                partial.complete(&file).unwrap();
            } else {
                drop(partial);
            }
            assert_eq!(names(dir.path()), ["a"]);
        }
    }

    #[test]
    fn name_of_a_pipe_or_directory_is_refused_and_keeps_what_it_names() {
        let dir = tempfile::tempdir().unwrap();
        let pipe = dir.path().join("pipe");
        rustix::fs::mkfifoat(CWD, &pipe, Mode::from_raw_mode(0o600)).unwrap();
        let link = dir.path().join("link");
        symlink("pipe", &link).unwrap();
        for (path, told) in [
            (pipe.as_path(), "is a pipe"),
            (&link, "is a pipe"),
            (dir.path(), "is a directory"),
            (&dir.path().join("absent/a"), "make it first"),
        ] {
            let error = PartialFile::create(path).unwrap_err().to_string();
            assert!(error.contains(told), "{error}");
        }
        let kind = fs::symlink_metadata(&pipe).unwrap().file_type();
        assert!(kind.is_fifo());
        assert_eq!(names(dir.path()), ["link", "pipe"]);
    }

    #[test]
    fn symbolic_link_stays_and_its_file_is_replaced_or_made() {
        let dir = tempfile::tempdir().unwrap();
        let deep = dir.path().join("deep");
        fs::create_dir(&deep).unwrap();
        fs::write(deep.join("there"), "old").unwrap();
        for name in ["there", "new"] {
            let link = dir.path().join(format!("to-{name}"));
            let second = dir.path().join(format!("again-{name}"));
            symlink(Path::new("deep").join(name), &link).unwrap();
            symlink(&link, &second).unwrap();
            make(&second, b"content").unwrap();
            for link in [&link, &second] {
                assert!(fs::symlink_metadata(link).unwrap().is_symlink());
            }
            assert_eq!(fs::read(deep.join(name)).unwrap(), b"content");
        }
        assert_eq!(names(&deep), ["new", "there"]);
    }

    #[test]
    fn name_as_long_as_names_may_be_is_given() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a".repeat(255));
        make(&path, b"one").unwrap();
        assert_eq!(names(dir.path()), [path.file_name().unwrap()]);
        assert_ne!(hidden(OsStr::new("a")), hidden(OsStr::new("a")));
    }

    #[test]
    fn symbolic_links_in_a_circle_are_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("a");
        symlink("a", &path).unwrap();
        assert!(PartialFile::create(&path).is_err());
        assert_eq!(names(dir.path()), ["a"]);
    }
}
