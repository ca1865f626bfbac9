// SPDX-License-Identifier: Apache-2.0
//! [`Program`]: the file that is to become the daemon, open, so that what was checked is what is run.
//!
//! The daemon runs as root, so whoever can write its program is root. Hence the file and each directory
//! from `/` to it must be root's, and nobody else may write to them. The path is walked by open directories,
//! without following links, and the program is started by the descriptor of its file: a name that changes
//! meanwhile changes nothing.

use rustix::{
    fs::{CWD, FileType, Mode, OFlags, Stat, fstat, openat},
    io::Errno,
};
use std::{
    ffi::OsStr,
    io,
    os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd},
    path::{Component, Path, PathBuf},
};

/// Permission bits of group and others to write.
const WRITABLE: u32 = 0o022;
/// Permission bits to execute.
const EXECUTABLE: u32 = 0o111;

/// Why a program may not become the daemon.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// The path is relative, or has `..` in it.
    #[error("the program '{0}' is not an absolute path without '..': write it from /")]
    NotAbsolute(PathBuf),
    /// Part of the path cannot be opened.
    #[error("cannot open {path}: {source}")]
    Unopened {
        /// The part.
        path: PathBuf,
        /// The kernel's answer.
        source: io::Error,
    },
    /// Part of the path is a symbolic link.
    #[error("{0} is a symbolic link: name the file that it leads to")]
    Link(PathBuf),
    /// Part of the path is not what it should be.
    #[error("{path} is not a {wanted}")]
    Kind {
        /// The part.
        path: PathBuf,
        /// What it should be.
        wanted: &'static str,
    },
    /// Part of the path belongs to another user.
    #[error(
        "{path} belongs to user {uid}, who could put another program there: the program and all directories above it \
         must belong to root"
    )]
    Owner {
        /// The part.
        path: PathBuf,
        /// Its owner.
        uid: u32,
    },
    /// Others can write to part of the path.
    #[error(
        "{path} can be written by others than root (mode {mode:04o}): the program and all directories above it must not be"
    )]
    Writable {
        /// The part.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
    /// It cannot be executed.
    #[error("{path} is not executable (mode {mode:04o})")]
    NotExecutable {
        /// The file.
        path: PathBuf,
        /// Its mode.
        mode: u32,
    },
}

/// A program that may become the daemon.
#[derive(Debug)]
pub struct Program {
    path: PathBuf,
    file: OwnedFd,
}

impl Program {
    /// Opens the program at `path` if it and all directories above it are root's alone.
    ///
    /// # Errors
    /// [`ProgramError`], which names the part that is wrong.
    pub fn open(path: &Path) -> Result<Self, ProgramError> {
        let not_absolute = || ProgramError::NotAbsolute(path.to_owned());
        let mut names = Vec::new();
        for component in path.components() {
            match component {
                Component::RootDir => {}
                Component::Normal(name) => names.push(name),
                Component::ParentDir | Component::CurDir | Component::Prefix(_) => {
                    return Err(not_absolute());
                }
            }
        }
        let Some((file, directories)) = names.split_last() else {
            return Err(not_absolute());
        };
        if !path.is_absolute() {
            return Err(not_absolute());
        }
        let mut at = PathBuf::from("/");
        let mut directory = opened(CWD, OsStr::new("/"), &at)?;
        check(&directory, &at, FileType::Directory)?;
        for name in directories {
            at.push(name);
            directory = opened(directory.as_fd(), name, &at)?;
            check(&directory, &at, FileType::Directory)?;
        }
        at.push(file);
        let file = opened(directory.as_fd(), file, &at)?;
        let mode = check(&file, &at, FileType::RegularFile)?;
        if mode & EXECUTABLE == 0 {
            return Err(ProgramError::NotExecutable { path: at, mode });
        }
        Ok(Self { path: at, file })
    }

    /// A program that is open already.
    #[must_use]
    pub fn of(path: PathBuf, file: OwnedFd) -> Self {
        Self { path, file }
    }

    /// Where it was found.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// A path that leads to the open file, whatever its name leads to: for `exec` in this process or in a child
    /// of it.
    #[must_use]
    pub fn by_descriptor(&self) -> PathBuf {
        format!("/proc/self/fd/{}", self.file.as_raw_fd()).into()
    }
}

/// The descriptor itself: it opens nothing, not even a pipe, and follows no link.
fn opened(dir: BorrowedFd<'_>, name: &OsStr, at: &Path) -> Result<OwnedFd, ProgramError> {
    let flags = OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    openat(dir, name, flags, Mode::empty()).map_err(|source| match source {
        Errno::NOTDIR => ProgramError::Kind {
            path: at.parent().unwrap_or(at).to_owned(),
            wanted: "directory",
        },
        source => ProgramError::Unopened {
            path: at.to_owned(),
            source: source.into(),
        },
    })
}

/// Checks one part of the path; returns its permission bits.
fn check(part: &OwnedFd, at: &Path, wanted: FileType) -> Result<u32, ProgramError> {
    let stat = fstat(part).map_err(|source| ProgramError::Unopened {
        path: at.to_owned(),
        source: source.into(),
    })?;
    check_stat(&stat, at, wanted)
}

fn check_stat(stat: &Stat, at: &Path, wanted: FileType) -> Result<u32, ProgramError> {
    let path = at.to_owned();
    let mode = stat.st_mode & 0o7777;
    match FileType::from_raw_mode(stat.st_mode) {
        kind if kind == wanted => {}
        FileType::Symlink => return Err(ProgramError::Link(path)),
        _ => {
            let wanted = match wanted {
                FileType::Directory => "directory",
                _ => "regular file",
            };
            return Err(ProgramError::Kind { path, wanted });
        }
    }
    if stat.st_uid != 0 {
        return Err(ProgramError::Owner {
            path,
            uid: stat.st_uid,
        });
    }
    // With an access control list these are the most that it grants to anyone.
    if mode & WRITABLE != 0 {
        return Err(ProgramError::Writable { path, mode });
    }
    Ok(mode)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::{PermissionsExt, symlink};

    #[test]
    fn path_that_is_relative_or_has_dots_is_refused() {
        for path in ["bin/x", "", "/", "/usr/../bin/x", "../x"] {
            let refused = Program::open(Path::new(path));
            assert!(
                matches!(refused, Err(ProgramError::NotAbsolute(_))),
                "{path}: {refused:?}"
            );
        }
    }

    #[test]
    fn program_of_the_system_is_taken_and_missing_one_is_not() {
        let path = std::fs::canonicalize("/bin/true").unwrap();
        let program = Program::open(&path).unwrap();
        assert_eq!(program.path(), path);
        let by_descriptor = std::process::Command::new(program.by_descriptor()).arg0_true();
        assert!(by_descriptor.success());
        let missing = Program::open(Path::new("/usr/no-such-program"));
        assert!(
            matches!(missing, Err(ProgramError::Unopened { .. })),
            "{missing:?}"
        );
    }

    trait Arg0True {
        fn arg0_true(&mut self) -> std::process::ExitStatus;
    }

    impl Arg0True for std::process::Command {
        fn arg0_true(&mut self) -> std::process::ExitStatus {
            use std::os::unix::process::CommandExt;
            self.arg0("true").status().unwrap()
        }
    }

    /// Below `/tmp`, which all may write, nothing is safe; the first part that is wrong is named.
    #[test]
    fn directory_that_others_can_write_is_named() {
        let dir = tempfile::tempdir_in("/tmp").unwrap();
        let path = dir.path().join("pagetide");
        std::fs::write(&path, "x").unwrap();
        match Program::open(&path) {
            Err(ProgramError::Writable { path, mode }) => {
                assert_eq!((path, mode & 0o777), (PathBuf::from("/tmp"), 0o777));
            }
            other => panic!("{other:?}"),
        }
    }

    fn roots_own() -> Option<tempfile::TempDir> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: only root has directories of root");
            return None;
        }
        Some(tempfile::tempdir_in("/var/lib").unwrap())
    }

    fn set_mode(path: &Path, mode: u32) {
        std::fs::set_permissions(path, PermissionsExt::from_mode(mode)).unwrap();
    }

    #[test]
    fn file_must_be_roots_regular_executable_and_writable_by_nobody_else() {
        let Some(dir) = roots_own() else { return };
        let path = dir.path().join("program");
        std::fs::copy("/bin/true", &path).unwrap();
        set_mode(&path, 0o755);
        assert!(Program::open(&path).is_ok());
        set_mode(&path, 0o775);
        assert!(matches!(
            Program::open(&path),
            Err(ProgramError::Writable { mode: 0o775, .. })
        ));
        set_mode(&path, 0o644);
        assert!(matches!(
            Program::open(&path),
            Err(ProgramError::NotExecutable { .. })
        ));
        set_mode(&path, 0o755);
        std::os::unix::fs::chown(&path, Some(65_534), None).unwrap();
        assert!(matches!(
            Program::open(&path),
            Err(ProgramError::Owner { uid: 65_534, .. })
        ));
        std::os::unix::fs::chown(&path, Some(0), None).unwrap();
        set_mode(dir.path(), 0o777);
        match Program::open(&path) {
            Err(ProgramError::Writable { path, .. }) => assert_eq!(path, dir.path()),
            other => panic!("{other:?}"),
        }
        set_mode(dir.path(), 0o755);
        let folder = Program::open(dir.path());
        assert!(
            matches!(
                folder,
                Err(ProgramError::Kind {
                    wanted: "regular file",
                    ..
                })
            ),
            "{folder:?}"
        );
        let below = Program::open(&path.join("x"));
        assert!(
            matches!(
                below,
                Err(ProgramError::Kind {
                    wanted: "directory",
                    ..
                })
            ),
            "{below:?}"
        );
    }

    #[test]
    fn link_is_refused_as_a_file_and_as_a_directory() {
        let Some(dir) = roots_own() else { return };
        let path = dir.path().join("program");
        std::fs::copy("/bin/true", &path).unwrap();
        let link = dir.path().join("link");
        symlink(&path, &link).unwrap();
        assert!(matches!(Program::open(&link), Err(ProgramError::Link(at)) if at == link));
        let folder = dir.path().join("folder");
        symlink(dir.path(), &folder).unwrap();
        let through = Program::open(&folder.join("program"));
        assert!(matches!(through, Err(ProgramError::Link(at)) if at == folder));
    }

    #[test]
    fn what_was_opened_is_what_is_run_though_its_name_changes() {
        let Some(dir) = roots_own() else { return };
        let path = dir.path().join("program");
        std::fs::copy("/bin/true", &path).unwrap();
        let program = Program::open(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        std::fs::copy("/bin/false", &path).unwrap();
        let mut command = std::process::Command::new(program.by_descriptor());
        assert!(command.arg0_true().success());
    }
}
