// SPDX-License-Identifier: Apache-2.0
//! The holdings of a process, from `/proc`, and what of them remains.
//!
//! A daemon that has released its VMs and devices should hold what it held before it had any. A
//! [`Snapshot`] lists its holdings: descriptors, memory that is shared through files, and threads, each
//! counted by *class*.
//!
//! ```text
//!   memfd pc.ram    a memfd, by the name its maker gave it         userfaultfd, eventfd, pidfd, …
//!   deleted PATH    a file that has no name any more (a pool)      socket, pipe
//!   file PATH       any other file
//!   thread faults-N a thread, by its name with numbers left out
//! ```
//! Classes make two moments comparable although descriptor numbers and addresses differ, and make a finding
//! readable.
//!
//! # What is not counted
//! - Private memory, which is the allocator's: arenas and stacks are kept for the next use.
//! - Threads that wait for work and end by themselves: of the runtime, of `io_uring`, and the workers of
//!   page requests (`pt-iopf-N`), of which there is at most one a CPU. Nor the thread that delays answers
//!   for fault injection (`pt-iopf-later`), which is created once.
//! - The watch over the daemon's own mappings (`pt-alias` and its userfaultfd), which is created once.
//! - Memory of the link between a daemon and a DPU process: the DPU process keeps the last daemon's until
//!   the next daemon connects. (In the daemon, a leaked link shows by its descriptor.)
//! - What is about to be released: [`wait_for_release`] polls until a timeout.

use std::collections::BTreeMap;
use std::fmt::{self, Display};
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

/// Between two polls of a process that still releases resources.
const LOOK_AGAIN: Duration = Duration::from_millis(20);
/// Prefixes of the names of threads that come and go with the work.
const PASSING_THREADS: [&str; 4] = ["tokio", "iou-", "pt-iopf-N", "pt-iopf-later"];
/// Name of the thread that watches the daemon's own mappings.
const ALIAS_WATCH: &str = "pt-alias";
/// Memory of the link between a daemon and a DPU process.
const LINK_MEMORY: &str = "memfd pagetide-vpri";
/// Size of the blocks in which the kernel counts what a file takes.
const BLOCK_BYTES: u64 = 512;
/// The suffix of `/proc` for the name of an unlinked file.
const DELETED: &str = " (deleted)";

/// Numbers by class.
pub type Classes = BTreeMap<String, u64>;

/// The holdings of a process at one moment.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Snapshot {
    /// Open descriptors.
    pub descriptors: Classes,
    /// Bytes of memory that files hold for it: mapped, or open though unlinked.
    pub bytes: Classes,
    /// Threads.
    pub threads: Classes,
}

/// The holdings of a process in excess of an earlier moment, by class.
#[derive(Clone, Default, PartialEq, Eq, Debug)]
pub struct Growth(Snapshot);

/// A file, whatever its names.
type FileId = (u64, u64);

/// Bytes of files, each counted once.
#[derive(Default)]
struct Files(BTreeMap<FileId, (String, u64)>);

impl Files {
    fn add_mapped(&mut self, file: FileId, class: String, bytes: u64) {
        self.0.entry(file).or_insert((class, 0)).1 += bytes;
    }

    /// An open file counts with its allocated size, unless it is mapped.
    fn add_open(&mut self, file: FileId, class: String, bytes: u64) {
        self.0.entry(file).or_insert((class, bytes));
    }

    fn by_class(self) -> Classes {
        let mut classes = Classes::new();
        for (class, bytes) in self.0.into_values() {
            *classes.entry(class).or_default() += bytes;
        }
        classes
    }
}

impl Snapshot {
    /// The holdings of process `pid` now.
    ///
    /// # Errors
    /// It has ended, or may not be examined.
    pub fn of(pid: u32) -> io::Result<Self> {
        let process = Path::new("/proc").join(pid.to_string());
        let mut files = Files::default();
        let maps = fs::read_to_string(process.join("maps"))?;
        for mapping in maps.lines().filter_map(shared_mapping) {
            files.add_mapped(mapping.file, mapping.class, mapping.bytes);
        }
        let descriptors = descriptors(&process.join("fd"), &mut files)?;
        let mut snapshot = Self {
            descriptors,
            bytes: files.by_class(),
            threads: threads(&process.join("task"))?,
        };
        snapshot.leave_out_the_alias_watch();
        snapshot.bytes.remove(LINK_MEMORY);
        Ok(snapshot)
    }

    /// The holdings of process `pid` once it has settled after its start, if that happens within
    /// `patience`: its threads have their names, and nothing comes or goes.
    ///
    /// # Errors
    /// As of [`Self::of`].
    pub fn settled(pid: u32, patience: Duration) -> io::Result<Self> {
        let deadline = Instant::now() + patience;
        // A thread has the process's name until it has run for the first time.
        let own = fs::read_to_string(format!("/proc/{pid}/comm"))?;
        let unnamed = without_numbers(own.trim_end());
        let mut before = Self::of(pid)?;
        loop {
            thread::sleep(LOOK_AGAIN);
            let now = Self::of(pid)?;
            let all_named = now.threads.get(&unnamed) == Some(&1);
            if (now == before && all_named) || Instant::now() > deadline {
                return Ok(now);
            }
            before = now;
        }
    }

    /// The watch over the daemon's own mappings is created for the first VM and kept, as one thread with
    /// one userfaultfd.
    fn leave_out_the_alias_watch(&mut self) {
        if self.threads.remove(ALIAS_WATCH).is_some()
            && let Some(count) = self.descriptors.get_mut("userfaultfd")
        {
            *count -= 1;
        }
    }

    /// Holdings at `later` that did not exist at this moment.
    #[must_use]
    pub fn growth_to(&self, later: &Self) -> Growth {
        Growth(Self {
            descriptors: growth(&self.descriptors, &later.descriptors),
            bytes: growth(&self.bytes, &later.bytes),
            threads: growth(&self.threads, &later.threads),
        })
    }
}

impl Growth {
    /// Descriptors more than before.
    #[must_use]
    pub fn leaked_descriptors(&self) -> u64 {
        self.0.descriptors.values().sum()
    }

    /// Bytes of memory held through files more than before.
    #[must_use]
    pub fn leaked_bytes(&self) -> u64 {
        self.0.bytes.values().sum()
    }

    /// Threads more than before.
    #[must_use]
    pub fn leaked_threads(&self) -> u64 {
        self.0.threads.values().sum()
    }

    /// True if nothing is held that was not held before.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.leaked_descriptors() + self.leaked_bytes() + self.leaked_threads() == 0
    }
}

impl Display for Growth {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self(more) = self;
        let parts = [
            ("descriptors", &more.descriptors),
            ("bytes", &more.bytes),
            ("threads", &more.threads),
        ];
        let mut between = "";
        for (what, classes) in parts.iter().filter(|(_, classes)| !classes.is_empty()) {
            let each: Vec<String> = classes.iter().map(|(c, n)| format!("{n} {c}")).collect();
            write!(f, "{between}{what}: {}", each.join(", "))?;
            between = "; ";
        }
        if between.is_empty() {
            write!(f, "nothing")?;
        }
        Ok(())
    }
}

/// Waits, at most `patience`, until process `pid` holds nothing that it did not hold `before`. Returns its
/// remaining excess.
///
/// # Errors
/// It has ended, or may not be examined.
pub fn wait_for_release(pid: u32, before: &Snapshot, patience: Duration) -> io::Result<Growth> {
    let deadline = Instant::now() + patience;
    loop {
        let growth = before.growth_to(&Snapshot::of(pid)?);
        if growth.is_empty() || Instant::now() > deadline {
            return Ok(growth);
        }
        thread::sleep(LOOK_AGAIN);
    }
}

fn growth(before: &Classes, later: &Classes) -> Classes {
    let more = |(class, now): (&String, &u64)| {
        let more = now.saturating_sub(before.get(class).copied().unwrap_or(0));
        (more > 0).then(|| (class.clone(), more))
    };
    later.iter().filter_map(more).collect()
}

/// A line of `maps` for memory shared through a file.
struct SharedMapping {
    file: FileId,
    class: String,
    bytes: u64,
}

/// Fields: range, permissions (the fourth letter is `s` for shared), offset, device as hexadecimal
/// major and minor, inode, path.
fn shared_mapping(line: &str) -> Option<SharedMapping> {
    let mut fields = line.splitn(6, ' ');
    let (range, permissions) = (fields.next()?, fields.next()?);
    if permissions.as_bytes().get(3) != Some(&b's') {
        return None;
    }
    let (start, end) = range.split_once('-')?;
    let (major, minor) = fields.nth(1)?.split_once(':')?;
    let inode = fields.next()?;
    let hex = |digits: &str| parsed(u64::from_str_radix(digits, 16));
    let device = rustix::fs::makedev(
        hex(major)?.try_into().unwrap_or(0),
        hex(minor)?.try_into().unwrap_or(0),
    );
    Some(SharedMapping {
        file: (device, parsed(inode.parse())?),
        class: class_of(fields.next().unwrap_or_default().trim()),
        bytes: hex(end)? - hex(start)?,
    })
}

/// A line of `/proc` with an invalid field is skipped.
fn parsed<E>(field: Result<u64, E>) -> Option<u64> {
    field.ok()
}

fn descriptors(folder: &Path, files: &mut Files) -> io::Result<Classes> {
    let mut classes = Classes::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        // Closed since the folder was listed.
        let Ok(target) = fs::read_link(&path) else {
            continue;
        };
        // A file in `/proc` about the process itself: its successor has it under another number.
        let own = folder
            .parent()
            .and_then(|process| target.strip_prefix(process).ok())
            .map(|file| Path::new("/proc/self").join(file));
        let class = class_of(&own.unwrap_or(target).to_string_lossy());
        *classes.entry(class.clone()).or_default() += 1;
        let is_nameless = class.starts_with("memfd ") || class.starts_with("deleted ");
        if is_nameless && let Ok(file) = fs::metadata(&path) {
            let bytes = file.blocks() * BLOCK_BYTES;
            files.add_open((file.dev(), file.ino()), class, bytes);
        }
    }
    Ok(classes)
}

/// The class of the target of a link in `/proc/PID/fd`, or of a line of `maps`.
fn class_of(target: &str) -> String {
    if let Some(memfd) = target.strip_prefix("/memfd:") {
        return format!("memfd {}", memfd.trim_end_matches(DELETED));
    }
    if let Some(kind) = target.strip_prefix("anon_inode:") {
        return kind.trim_matches(['[', ']']).to_owned();
    }
    if let Some(path) = target.strip_suffix(DELETED) {
        return format!("deleted {path}");
    }
    if target.starts_with('/') {
        return format!("file {target}");
    }
    // `socket:[4711]`, `pipe:[4711]`; memory without a file.
    match target.split_once(':') {
        Some((kind, _number)) => kind.to_owned(),
        None if target.is_empty() => "nameless".to_owned(),
        None => target.to_owned(),
    }
}

fn threads(folder: &Path) -> io::Result<Classes> {
    let mut classes = Classes::new();
    for entry in fs::read_dir(folder)? {
        // Ended since the folder was listed.
        let Ok(name) = fs::read_to_string(entry?.path().join("comm")) else {
            continue;
        };
        let class = without_numbers(name.trim_end());
        if !PASSING_THREADS
            .iter()
            .any(|passing| class.starts_with(passing))
        {
            *classes.entry(class).or_default() += 1;
        }
    }
    Ok(classes)
}

/// The name with each number as `N`.
fn without_numbers(name: &str) -> String {
    let mut class = String::new();
    for letter in name.chars() {
        match letter {
            '0'..='9' if class.ends_with('N') => {}
            '0'..='9' => class.push('N'),
            other => class.push(other),
        }
    }
    class
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_sys::{mapping::SharedMapping, memory_file::GuestFile};
    use std::os::fd::AsFd;

    #[test]
    fn targets_are_told_by_class() {
        let classes = [
            ("/memfd:pc.ram (deleted)", "memfd pc.ram"),
            ("/dev/shm/a/vm.pool (deleted)", "deleted /dev/shm/a/vm.pool"),
            ("/dev/shm/a/lock", "file /dev/shm/a/lock"),
            ("anon_inode:[userfaultfd]", "userfaultfd"),
            ("anon_inode:[eventfd]", "eventfd"),
            ("anon_inode:inotify", "inotify"),
            ("socket:[4711]", "socket"),
            ("pipe:[3]", "pipe"),
            ("", "nameless"),
        ];
        for (target, class) in classes {
            assert_eq!(class_of(target), class, "{target}");
        }
        assert_eq!(without_numbers("faults-4711"), "faults-N");
        assert_eq!(without_numbers("blk-0-conn"), "blk-N-conn");
    }

    #[test]
    fn file_about_the_process_itself_is_told_without_its_number() {
        let open = fs::File::open("/proc/self/mountinfo").unwrap();
        let held = Snapshot::of(std::process::id()).unwrap();
        let class = "file /proc/self/mountinfo";
        assert!(held.descriptors.contains_key(class), "{held:?}");
        drop(open);
    }

    #[test]
    fn shared_mapping_is_told_by_its_file_and_private_ones_are_not() {
        let shared = "7f00-8f00 rw-s 00000000 00:01 2053   /memfd:ram (deleted)";
        let told = shared_mapping(shared).expect("a shared mapping");
        assert_eq!(told.file, (rustix::fs::makedev(0, 1), 2053));
        assert_eq!((told.class.as_str(), told.bytes), ("memfd ram", 0x1000));
        assert!(shared_mapping("7f00-8f00 rw-p 00000000 00:00 0 [heap]").is_none());
    }

    /// Other tests run in this process, so only this test's own classes are checked.
    #[test]
    fn memory_descriptor_and_thread_that_stay_are_found_and_found_gone() {
        let own = std::process::id();
        let before = Snapshot::of(own).expect("our own");
        let file = GuestFile::new_memfd("leaks-test", 1 << 20).expect("a memfd");
        let mapping = SharedMapping::new(file.as_fd(), 1 << 20).expect("a mapping");
        let (stop, stopped) = std::sync::mpsc::channel::<()>();
        let (begin, begun) = std::sync::mpsc::channel();
        let thread = thread::Builder::new()
            .name("leaks-test-7".to_owned())
            .spawn(move || {
                begin.send(()).expect("somebody hears");
                assert!(stopped.recv().is_err());
            })
            .expect("a thread");
        begun.recv().expect("it runs");
        let Growth(more) = before.growth_to(&Snapshot::of(own).expect("our own"));
        assert_eq!(more.descriptors["memfd leaks-test"], 1);
        assert_eq!(more.bytes["memfd leaks-test"], 1 << 20);
        assert_eq!(more.threads["leaks-test-N"], 1);
        drop(mapping);
        file.write_at(4096, &[1]).expect("a page");
        let Growth(more) = before.growth_to(&Snapshot::of(own).expect("our own"));
        assert_eq!(more.bytes["memfd leaks-test"], 4096, "{more:?}");
        drop((file, stop));
        thread.join().expect("a sound end");
        let Growth(more) = before.growth_to(&Snapshot::of(own).expect("our own"));
        let told = Growth(more).to_string();
        assert!(!told.contains("leaks-test"), "{told}");
    }

    #[test]
    fn alias_watch_is_left_out_and_the_userfaultfd_of_a_vm_is_not() {
        let classes = |list: &[(&str, u64)]| -> Classes {
            list.iter().map(|(c, n)| ((*c).to_owned(), *n)).collect()
        };
        let mut snapshot = Snapshot {
            descriptors: classes(&[("userfaultfd", 2)]),
            threads: classes(&[("pt-alias", 1), ("engine-N", 1)]),
            ..Snapshot::default()
        };
        snapshot.leave_out_the_alias_watch();
        assert_eq!(snapshot.descriptors["userfaultfd"], 1);
        assert_eq!(snapshot.threads, classes(&[("engine-N", 1)]));
        snapshot.leave_out_the_alias_watch();
        assert_eq!(snapshot.descriptors["userfaultfd"], 1);
    }

    #[test]
    fn growth_is_what_is_more_and_says_so() {
        let classes = |list: &[(&str, u64)]| -> Classes {
            list.iter().map(|(c, n)| ((*c).to_owned(), *n)).collect()
        };
        let before = Snapshot {
            descriptors: classes(&[("socket", 4)]),
            ..Snapshot::default()
        };
        let later = Snapshot {
            descriptors: classes(&[("socket", 3), ("pidfd", 2)]),
            bytes: classes(&[("memfd ram", 4096)]),
            threads: classes(&[("pt-rounds-N", 1)]),
        };
        let growth = before.growth_to(&later);
        assert_eq!(growth.leaked_descriptors(), 2);
        assert_eq!(growth.leaked_bytes(), 4096);
        assert_eq!(growth.leaked_threads(), 1);
        assert_eq!(
            growth.to_string(),
            "descriptors: 2 pidfd; bytes: 4096 memfd ram; threads: 1 pt-rounds-N"
        );
        assert!(later.growth_to(&before).0.bytes.is_empty());
        assert_eq!(before.growth_to(&before).to_string(), "nothing");
    }
}
