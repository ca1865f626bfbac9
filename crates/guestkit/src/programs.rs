// SPDX-License-Identifier: Apache-2.0
//! Programs of this machine, and their dependencies in a guest.
//!
//! The guest has no distribution, only our initramfs; so an installed program goes there with the shared
//! objects that the loader would use, each at its path on this machine.

use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use pagetide_guest::loads::Load;

use crate::image::Addition;

/// A program cannot be provided to a guest.
#[derive(Debug, thiserror::Error)]
pub enum ProgramError {
    /// It is not installed.
    #[error("there is no {path}: install the package {package}")]
    Missing {
        /// Its expected path.
        path: &'static str,
        /// The package that has it.
        package: &'static str,
    },
    /// Its dependencies cannot be determined.
    #[error("`ldd` cannot tell what a program needs: {0}")]
    Objects(String),
    /// `ldd` cannot be run.
    #[error("ldd could not be started: {0}")]
    Start(#[from] io::Error),
}

/// A program of a Debian package.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Program {
    /// The package, as an error names it.
    pub package: &'static str,
    /// Where it is on this machine.
    pub path: &'static str,
    /// Where it is in the guest, from the root.
    pub name: &'static str,
}

/// Loads on disks.
pub const FIO: Program = Program {
    package: "fio",
    path: "/usr/bin/fio",
    name: "bin/fio",
};

/// Loads on CPU and memory.
pub const STRESS_NG: Program = Program {
    package: "stress-ng",
    path: "/usr/bin/stress-ng",
    name: "bin/stress-ng",
};

/// The server of redis. Server and checker of its files are one program, which decides by its name.
pub const REDIS_SERVER: Program = Program {
    package: "redis-tools",
    path: "/usr/bin/redis-check-rdb",
    name: "bin/redis-server",
};

/// Redis' own load.
pub const REDIS_BENCHMARK: Program = Program {
    package: "redis-tools",
    path: "/usr/bin/redis-benchmark",
    name: "bin/redis-benchmark",
};

/// Prime numbers, and writes to memory.
pub const SYSBENCH: Program = Program {
    package: "sysbench",
    path: "/usr/bin/sysbench",
    name: "bin/sysbench",
};

/// Sends as fast as it can, and receives.
pub const IPERF3: Program = Program {
    package: "iperf3",
    path: "/usr/bin/iperf3",
    name: "bin/iperf3",
};

/// Keeps values by their keys in memory.
pub const MEMCACHED: Program = Program {
    package: "memcached",
    path: "/usr/bin/memcached",
    name: "bin/memcached",
};

/// QEMU, for VMs in a guest.
pub const QEMU_SYSTEM: Program = Program {
    package: "qemu-system-x86",
    path: "/usr/bin/qemu-system-x86_64",
    name: "usr/bin/qemu-system-x86_64",
};

/// The programs that a load runs.
#[must_use]
pub const fn of_load(load: Load) -> &'static [Program] {
    match load {
        Load::StressVm | Load::StressStream => &[STRESS_NG],
        Load::Redis => &[REDIS_SERVER, REDIS_BENCHMARK],
        Load::SysbenchCpu | Load::SysbenchMemory => &[SYSBENCH],
        Load::Fio | Load::FioVerify => &[FIO],
    }
}

/// The shell of sqlite.
pub const SQLITE: Program = Program {
    package: "sqlite3",
    path: "/usr/bin/sqlite3",
    name: "bin/sqlite3",
};

impl Program {
    /// The program and its shared objects.
    ///
    /// # Errors
    /// It or a shared object that it needs is not installed.
    pub fn additions(&self) -> Result<Vec<Addition>, ProgramError> {
        let (path, package) = (self.path, self.package);
        if !Path::new(path).exists() {
            return Err(ProgramError::Missing { path, package });
        }
        with_objects(Path::new(path), self.name)
    }
}

/// The compiler proper of gcc, as `bin/cc1`, and its shared objects. Its path has gcc's version in it.
///
/// # Errors
/// gcc or a shared object is not installed.
pub fn compiler() -> Result<Vec<Addition>, ProgramError> {
    let (path, package) = ("gcc", "gcc");
    let asked = Command::new(path).arg("-print-prog-name=cc1").output();
    let Ok(answer) = asked else {
        return Err(ProgramError::Missing { path, package });
    };
    let cc1 = String::from_utf8_lossy(&answer.stdout).trim().to_owned();
    with_objects(Path::new(&cc1), "bin/cc1")
}

/// The program at `path` as `name`, and its shared objects.
///
/// # Errors
/// A shared object is not installed.
pub fn with_objects(path: &Path, name: &str) -> Result<Vec<Addition>, ProgramError> {
    let output = Command::new("ldd").arg(path).output()?;
    if !output.status.success() {
        let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
        return Err(ProgramError::Objects(format!("{}: {said}", path.display())));
    }
    let list = String::from_utf8_lossy(&output.stdout);
    let mut additions = vec![Addition::copy(path, name)];
    for object in objects(&list)? {
        let name = object
            .strip_prefix("/")
            .unwrap_or(&object)
            .to_string_lossy()
            .into_owned();
        additions.push(Addition::copy(&object, &name));
    }
    Ok(additions)
}

/// The paths in an answer of `ldd`.
fn objects(list: &str) -> Result<Vec<PathBuf>, ProgramError> {
    let mut paths = Vec::new();
    for line in list.lines() {
        if line.contains("not found") {
            return Err(ProgramError::Objects(line.trim().to_owned()));
        }
        // `NAME => PATH (ADDRESS)`, or `PATH (ADDRESS)`; the kernel's own object has no path.
        paths.extend(
            line.split_whitespace()
                .find(|word| word.starts_with('/'))
                .map(PathBuf::from),
        );
    }
    Ok(paths)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_read_from_ldds_answer_and_what_is_missing_is_named() {
        let list = "\tlinux-vdso.so.1 (0x00007f)\n\
                    \tlibz.so.1 => /lib/x86_64-linux-gnu/libz.so.1 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";
        let found = objects(list).expect("all are there");
        let wanted = [
            "/lib/x86_64-linux-gnu/libz.so.1",
            "/lib64/ld-linux-x86-64.so.2",
        ];
        assert_eq!(found, wanted.map(PathBuf::from));
        let error = objects("\tlibaio.so.1 => not found\n").expect_err("it is missing");
        assert!(error.to_string().contains("libaio"));
    }
}
