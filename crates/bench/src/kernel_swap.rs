// SPDX-License-Identifier: Apache-2.0
//! The peers: swap of the kernel on zram or in a file, set up for a bench and removed again.
//!
//! A zram device of our own is added and removed, so that one in use on the machine is not affected.
//! `vm.page-cluster` is 0 meanwhile: no readahead, one page a fault, as for us. Dropping [`KernelSwap`]
//! undoes everything.
//!
//! # Out of memory, not only out of page tables
//! zram has a page as soon as it is told to. A disk has it later, and even then the page stays in the swap cache,
//! where a touch would find it. Its owner's memory cgroup can be told to reclaim it: so a guest that is paged out
//! to a file is started in a group ([`KernelSwap::within`]).

use crate::{
    cgroup::Group,
    fault::{guest::Order, process::Guest},
};
use pagetide_swap::tier::PAGE;
use pagetide_sys::clock;
use rustix::fs::FallocateFlags;
use std::{
    fs::{self, File, Permissions},
    io::{self, Write as _},
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::{Mutex, PoisonError},
    time::{Duration, Instant},
};

const CONTROL: &str = "/sys/class/zram-control";
const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";
const DROP_CACHES: &str = "/proc/sys/vm/drop_caches";
/// Above all other swap, if there is any.
const PRIORITY: &str = "32767";
/// Pages that the kernel may leave in memory, in thousandths: its per-CPU batches.
const LEFT_PERMILLE_MAX: u64 = 5;
/// Of the process itself, most likely: its stack and heap are taken away with the rest and touched again at once, so
/// they are in memory and in the swap cache. (67 and 102 were seen.)
const OWN_PAGES_MAX: u64 = 128;
/// Longest wait for pages to leave memory.
const LEAVE_WAIT: Duration = Duration::from_secs(30);
const LEAVE_RETRY: Duration = Duration::from_millis(20);
/// Pages that are written to a device at a time.
const WRITE_PAGES: usize = 256;

/// How a zram device compresses.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Compressor {
    Lz4,
    Zstd,
}

impl Compressor {
    const fn name(self) -> &'static str {
        match self {
            Self::Lz4 => "lz4",
            Self::Zstd => "zstd",
        }
    }
}

/// Where the pages go.
enum Medium {
    Zram {
        number: String,
    },
    /// With the group of the guests.
    File {
        group: Group,
    },
}

/// A swap area that can be switched on.
pub(crate) struct KernelSwap {
    medium: Medium,
    path: PathBuf,
    is_on: bool,
    _no_readahead: NoReadahead,
}

/// What it took to page a guest out.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct PagedOut {
    /// Pages that the kernel left in memory.
    pub(crate) left_pages: u64,
    /// CPU time of the thread that paged out.
    pub(crate) cpu_ns: u64,
    /// What they take in memory of a zram device, fragmentation included.
    pub(crate) memory_bytes: Option<u64>,
}

impl KernelSwap {
    /// A zram device for `bytes` of pages.
    ///
    /// # Errors
    /// A message with the reason why there is none.
    pub(crate) fn on_zram(bytes: u64, compressor: Compressor) -> Result<Self, String> {
        if !Path::new(CONTROL).exists()
            && let Err(error) = run("modprobe", &["zram"])
        {
            return Err(format!("this kernel has no zram ({error})"));
        }
        let no_readahead = NoReadahead::begin()?;
        let number = read(&Path::new(CONTROL).join("hot_add"))?;
        let swap = Self {
            path: format!("/dev/zram{number}").into(),
            medium: Medium::Zram { number },
            is_on: false,
            _no_readahead: no_readahead,
        };
        let offered = read(Path::new(&swap.attribute("comp_algorithm")?))?;
        let name = compressor.name();
        let mut names = offered.split_whitespace();
        if !names.any(|it| it.trim_matches(['[', ']']) == name) {
            return Err(format!(
                "this kernel's zram does not compress by {name}: it has {offered}"
            ));
        }
        swap.set("comp_algorithm", name)?;
        swap.set("disksize", &bytes.to_string())?;
        run("mkswap", &[&swap.name()])?;
        Ok(swap)
    }

    /// A file at `path` for `bytes` of pages.
    ///
    /// # Errors
    /// A message with the reason why there is none.
    pub(crate) fn in_file(path: PathBuf, bytes: u64) -> Result<Self, String> {
        let failed = |error: io::Error| format!("{}: {error}", path.display());
        let group = Group::create()?;
        let no_readahead = NoReadahead::begin()?;
        let file = File::create_new(&path).map_err(failed)?;
        let swap = Self {
            medium: Medium::File { group },
            path: path.clone(),
            is_on: false,
            _no_readahead: no_readahead,
        };
        file.set_permissions(Permissions::from_mode(0o600))
            .map_err(failed)?;
        // A swap file has no holes.
        let all = FallocateFlags::empty();
        rustix::fs::fallocate(&file, all, 0, bytes).map_err(|errno| failed(errno.into()))?;
        run("mkswap", &[&swap.name()])?;
        file.sync_all().map_err(failed)?;
        Ok(swap)
    }

    /// Runs `start`; the guest that it starts can be paged out.
    ///
    /// # Errors
    /// Those of `start`, and of going to the group and back.
    pub(crate) fn within<T>(&self, start: impl FnOnce() -> Result<T, String>) -> Result<T, String> {
        match &self.medium {
            Medium::Zram { .. } => start(),
            Medium::File { group } => group.within(start),
        }
    }

    /// Switches it on.
    pub(crate) fn switch_on(&mut self) -> Result<(), String> {
        run("swapon", &["-p", PRIORITY, &self.name()])?;
        self.is_on = true;
        Ok(())
    }

    /// Switches it off; its remaining content is read back.
    pub(crate) fn switch_off(&mut self) -> Result<(), String> {
        run("swapoff", &[&self.name()])?;
        self.is_on = false;
        Ok(())
    }

    /// Switches it on, pages out `guest`, all `pages` of which are in memory, runs `work`, and switches it off.
    ///
    /// # Errors
    /// Those of `work`, and if the kernel leaves more in memory than a few.
    pub(crate) fn paged_out<T>(
        &mut self,
        guest: &mut Guest,
        pages: u64,
        work: impl FnOnce(&mut Guest, PagedOut) -> Result<T, String>,
    ) -> Result<T, String> {
        // Only what is mapped is paged out.
        guest.have_done(&Order::Fill)?;
        self.switch_on()?;
        let out = self.page_out(guest, pages)?;
        let done = work(guest, out)?;
        self.switch_off()?;
        Ok(done)
    }

    fn page_out(&self, guest: &Guest, pages: u64) -> Result<PagedOut, String> {
        let left_pages_max = pages * LEFT_PERMILLE_MAX / 1000;
        let begun = thread_cpu();
        guest.page_out()?;
        let cpu_ns = clock::ns(thread_cpu().saturating_sub(begun));
        let mut memory_bytes = None;
        match &self.medium {
            Medium::Zram { .. } => memory_bytes = Some(self.memory_bytes()?),
            Medium::File { group } => self.empty_swap_cache(group, left_pages_max)?,
        }
        let left_pages = pages.saturating_sub(self.used_pages()?);
        if left_pages > left_pages_max {
            return Err(format!(
                "the kernel left {left_pages} of {pages} pages in memory instead of {}",
                self.name()
            ));
        }
        Ok(PagedOut {
            left_pages,
            cpu_ns,
            memory_bytes,
        })
    }

    /// Has the kernel reclaim what it has written, and drop its other caches.
    fn empty_swap_cache(&self, group: &Group, left_pages_max: u64) -> Result<(), String> {
        let begun = Instant::now();
        loop {
            group.reclaim_all()?;
            // Also takes what each CPU has put by out of its hands: that cannot be reclaimed.
            write(Path::new(DROP_CACHES), "1")?;
            let cached = swap_cached_pages()?;
            if cached <= left_pages_max + OWN_PAGES_MAX {
                return Ok(());
            }
            if begun.elapsed() > LEAVE_WAIT {
                return Err(format!(
                    "{cached} pages stay in the swap cache of {}",
                    self.name()
                ));
            }
            std::thread::sleep(LEAVE_RETRY);
        }
    }

    /// Pages in it now.
    pub(crate) fn used_pages(&self) -> Result<u64, String> {
        let swaps = read(Path::new("/proc/swaps"))?;
        let name = self.name();
        swaps
            .lines()
            .find(|line| {
                line.starts_with(&format!("{name} ")) || line.starts_with(&format!("{name}\t"))
            })
            .and_then(|line| line.split_whitespace().nth(3)?.parse::<u64>().ok())
            .map(|kib| kib / 4)
            .ok_or_else(|| format!("/proc/swaps does not tell of {name}"))
    }

    /// Writes `pages` to it, from its start, while it is off: for [`Self::memory_bytes`].
    ///
    /// # Errors
    /// The kernel's.
    pub(crate) fn write(&self, pages: impl Iterator<Item = [u8; PAGE]>) -> Result<(), String> {
        let failed = |error: io::Error| format!("{}: {error}", self.name());
        let mut file = File::options()
            .write(true)
            .open(&self.path)
            .map_err(failed)?;
        let mut part = Vec::with_capacity(WRITE_PAGES * PAGE);
        for page in pages {
            part.extend_from_slice(&page);
            if part.len() == WRITE_PAGES * PAGE {
                file.write_all(&part).map_err(failed)?;
                part.clear();
            }
        }
        file.write_all(&part).map_err(failed)?;
        file.sync_all().map_err(failed)
    }

    /// Memory that the content of a zram device takes now, fragmentation included.
    ///
    /// # Errors
    /// It is none, or does not tell.
    pub(crate) fn memory_bytes(&self) -> Result<u64, String> {
        let path = self.attribute("mm_stat")?;
        let stat = read(Path::new(&path))?;
        let used = stat.split_whitespace().nth(2);
        used.and_then(|bytes| bytes.parse::<u64>().ok())
            .ok_or_else(|| format!("{path} does not tell the memory used"))
    }

    fn name(&self) -> String {
        self.path.display().to_string()
    }

    fn attribute(&self, attribute: &str) -> Result<String, String> {
        match &self.medium {
            Medium::Zram { number } => Ok(format!("/sys/block/zram{number}/{attribute}")),
            Medium::File { .. } => Err(format!("{} is no zram device", self.name())),
        }
    }

    fn set(&self, attribute: &str, value: &str) -> Result<(), String> {
        write(Path::new(&self.attribute(attribute)?), value)
    }

    fn undo(&mut self) -> Result<(), String> {
        let mut first = Ok(());
        if self.is_on {
            first = self.switch_off();
        }
        match &self.medium {
            Medium::Zram { number } => first
                .and(self.set("reset", "1"))
                .and(write(&Path::new(CONTROL).join("hot_remove"), number)),
            Medium::File { .. } => first.and_then(|()| {
                fs::remove_file(&self.path).map_err(|error| format!("{}: {error}", self.name()))
            }),
        }
    }
}

impl Drop for KernelSwap {
    fn drop(&mut self) {
        if let Err(error) = self.undo() {
            tracing::error!(swap = %self.path.display(), error, "a swap area of the bench stays behind");
        }
    }
}

/// While there is one, the kernel reads nothing ahead from swap.
struct NoReadahead;

/// How many there are, and what was set before.
static READAHEAD: Mutex<(usize, String)> = Mutex::new((0, String::new()));

impl NoReadahead {
    fn begin() -> Result<Self, String> {
        let mut users = READAHEAD.lock().unwrap_or_else(PoisonError::into_inner);
        if users.0 == 0 {
            users.1 = read(Path::new(PAGE_CLUSTER))?;
            write(Path::new(PAGE_CLUSTER), "0")?;
        }
        users.0 += 1;
        Ok(Self)
    }
}

impl Drop for NoReadahead {
    fn drop(&mut self) {
        let mut users = READAHEAD.lock().unwrap_or_else(PoisonError::into_inner);
        users.0 -= 1;
        if users.0 == 0
            && let Err(error) = write(Path::new(PAGE_CLUSTER), &users.1)
        {
            tracing::error!(
                error,
                before = users.1,
                "vm.page-cluster stays as the bench has set it"
            );
        }
    }
}

/// CPU time of this thread.
fn thread_cpu() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::try_from(time).unwrap_or_default()
}

/// Pages that are in memory and in swap.
fn swap_cached_pages() -> Result<u64, String> {
    let path = "/proc/meminfo";
    let text = read(Path::new(path))?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("SwapCached:")?.split_whitespace().next());
    line.and_then(|kib| kib.parse::<u64>().ok())
        .map(|kib| kib / 4)
        .ok_or_else(|| format!("{path} has no SwapCached"))
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path)
        .map(|text| text.trim().to_owned())
        .map_err(|error| format!("{}: {error}", path.display()))
}

fn write(path: &Path, value: &str) -> Result<(), String> {
    fs::write(path, value)
        .map_err(|error| format!("writing {value} to {}: {error}", path.display()))
}

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!(
        "{program} ended with {}: {}",
        output.status,
        said.trim()
    ))
}
