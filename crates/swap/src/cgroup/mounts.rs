// SPDX-License-Identifier: Apache-2.0
//! [`Mounts`]: where hierarchies of cgroups are mounted, as `/proc/self/mountinfo` has it.
//!
//! The budget asks that for each VM several times a second, and on a host with many containers the list has
//! thousands of lines. It is read again when it has changed: the kernel tells that by `POLLERR | POLLPRI` on an
//! open mountinfo, once for each reader since it last looked. So the poll comes *before* the read: a mount
//! made between them is seen by the read, or else told by the next poll. A file that is no mountinfo of the
//! kernel cannot tell, and is read each time.

use rustix::{
    event::{PollFd, PollFlags, Timespec, poll},
    fs::fstatfs,
};
use std::{
    fs::File,
    io::{self, Read as _, Seek as _},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
};

/// Kind of the file system at `/proc`, as `statfs` has it.
const PROCFS_MAGIC: i128 = 0x9fa0;

/// See the module.
#[derive(Debug)]
pub(super) struct Mounts {
    file: PathBuf,
    known: Mutex<Option<Known>>,
}

#[derive(Debug)]
struct Known {
    open: File,
    lines: Arc<str>,
}

impl Mounts {
    /// As the mountinfo at `file` has it.
    pub(super) fn of(file: &Path) -> Self {
        Self {
            file: file.to_owned(),
            known: Mutex::default(),
        }
    }

    /// The lines of cgroup mounts; none if there is no such file.
    pub(super) fn of_cgroups(&self) -> io::Result<Arc<str>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(Known { open, lines }) = &*known
            && !may_have_changed(open)
        {
            return Ok(Arc::clone(lines));
        }
        let open = match known.take() {
            Some(Known { open, .. }) if can_tell(&open) => open,
            Some(_) | None => match File::open(&self.file) {
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok("".into()),
                open => open?,
            },
        };
        let lines = read(&open)?;
        *known = Some(Known {
            open,
            lines: Arc::clone(&lines),
        });
        Ok(lines)
    }
}

fn read(mut open: &File) -> io::Result<Arc<str>> {
    let mut text = String::new();
    open.rewind()?;
    open.read_to_string(&mut text)?;
    let is_of_cgroups = |line: &&str| line.contains(" - cgroup");
    let lines: Vec<&str> = text.lines().filter(is_of_cgroups).collect();
    Ok(lines.join("\n").into())
}

/// The kernel tells of changes.
fn can_tell(open: &File) -> bool {
    fstatfs(open).is_ok_and(|found| i128::from(found.f_type) == PROCFS_MAGIC)
}

fn may_have_changed(open: &File) -> bool {
    const AT_ONCE: Timespec = Timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    let mut polled = [PollFd::new(open, PollFlags::PRI)];
    let told = poll(&mut polled, Some(&AT_ONCE));
    let [polled] = polled;
    !can_tell(open) || told.is_err() || polled.revents().intersects(PollFlags::PRI | PollFlags::ERR)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Command;

    #[test]
    fn mounts_of_cgroups_are_kept_while_nothing_is_mounted_and_read_again_afterwards() {
        let mounts = Mounts::of(Path::new("/proc/self/mountinfo"));
        // Others may mount something meanwhile.
        let kept = (0..1000).any(|_| {
            let (one, other) = (mounts.of_cgroups().unwrap(), mounts.of_cgroups().unwrap());
            Arc::ptr_eq(&one, &other)
        });
        assert!(kept, "it is read each time");
        let before = mounts.of_cgroups().unwrap();
        let dir = tempfile::tempdir().unwrap();
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "none"])
            .arg(dir.path())
            .output();
        if !mounted.is_ok_and(|mounted| mounted.status.success()) {
            eprintln!("SKIPPED: to mount needs root");
            return;
        }
        let after = mounts.of_cgroups().unwrap();
        let unmounted = Command::new("umount").arg(dir.path()).status().unwrap();
        assert!(unmounted.success());
        assert!(!Arc::ptr_eq(&before, &after), "the change was not seen");
        assert_eq!(before, after, "cgroups are mounted where they were");
    }

    #[test]
    fn file_that_cannot_tell_of_changes_is_read_each_time() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("mountinfo");
        let mounts = Mounts::of(&file);
        assert_eq!(&*mounts.of_cgroups().unwrap(), "");
        for text in ["1 - cgroup2 a", "2 - cgroup b\n3 - ext4 c\n"] {
            std::fs::write(&file, text).unwrap();
            let first = text.lines().next().unwrap();
            assert_eq!(&*mounts.of_cgroups().unwrap(), first);
        }
        std::fs::remove_file(&file).unwrap();
        assert_eq!(&*mounts.of_cgroups().unwrap(), "");
    }
}
