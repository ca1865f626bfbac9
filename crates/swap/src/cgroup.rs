// SPDX-License-Identifier: Apache-2.0
//! [`MemoryGroups`]: how much memory the cgroups of this process leave it.
//!
//! A pool's memory is charged to the process that allocates it, so to this process's memory cgroup.
//! If that has a limit, free room in the tmpfs does not help: a charge beyond the limit makes the
//! kernel kill a process of the group, most likely this one.
//!
//! A charge counts in the group and in every ancestor, so each of them must have room.
//!
//! | | version 2 | version 1 |
//! |---|---|---|
//! | own group | line `0::` of `/proc/self/cgroup` | line with `memory` (also where version 2 has other controllers) |
//! | limit | `memory.max`, and `memory.high`, beyond which charging is slowed down to a crawl | `memory.limit_in_bytes` |
//! | charged | `memory.current` | `memory.usage_in_bytes` |
//! | ancestors count | always | if they say so in `memory.use_hierarchy` |
//!
//! Page cache of files is charged too. The kernel drops clean cache before it kills, so clean cache
//! counts as free: otherwise reads of images would stop eviction for ever. Pages of tmpfs are on the
//! anonymous lists of `memory.stat`, so they do not count as such cache.
//!
//! Memory charged only to the VMM is not counted: guest pages that `UFFDIO_COPY` fills are charged
//! to the VMM's group.

mod mounts;

use mounts::Mounts;
use std::io;
use std::path::{Component, Path, PathBuf};
use std::sync::{Arc, LazyLock};

/// Limits from here on mean "unlimited": version 1 then reports the largest number of whole pages
/// in an `i64`.
const UNLIMITED_BYTES: u64 = 1 << 60;

/// A limit that holds for this process.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Level {
    /// Directory of the group.
    pub group: PathBuf,
    /// The file in it that sets the limit.
    pub file: &'static str,
    /// The limit.
    pub limit_bytes: u64,
    /// Bytes charged to the group and its descendants.
    pub charged_bytes: u64,
    /// Clean page cache in that, which is dropped when room is needed.
    pub cache_bytes: u64,
}

impl Level {
    /// What may still be charged.
    #[must_use]
    pub fn free_bytes(&self) -> u64 {
        let held = self.charged_bytes.saturating_sub(self.cache_bytes);
        self.limit_bytes.saturating_sub(held)
    }
}

/// The memory cgroups of this process, read each time: a process may be moved, and limits may
/// change. Only where the hierarchies are mounted is known from before, until that changes.
#[derive(Clone, Debug)]
pub struct MemoryGroups {
    root: PathBuf,
    mounts: Arc<Mounts>,
    /// The process, as `/proc` has it.
    process: String,
}

/// The version of the interface of control groups.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Version {
    /// A hierarchy for each controller.
    One,
    /// One hierarchy for all.
    Two,
}

/// Where a group's files are.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Place {
    /// The interface of these files.
    pub version: Version,
    /// The root of the hierarchy, as far as it can be seen.
    pub mount: PathBuf,
    /// The directory of the group.
    pub directory: PathBuf,
}

impl MemoryGroups {
    /// The groups that the kernel reports. All of these share one open list of mounts.
    #[must_use]
    pub fn of_this_process() -> Self {
        static MOUNTS: LazyLock<Arc<Mounts>> =
            LazyLock::new(|| Arc::new(Mounts::of(Path::new("/proc/self/mountinfo"))));
        Self {
            mounts: Arc::clone(&MOUNTS),
            ..Self::below(Path::new("/"))
        }
    }

    /// The same, with `/proc` and all mounts below `root`.
    #[must_use]
    pub fn below(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
            mounts: Arc::new(Mounts::of(&root.join("proc/self/mountinfo"))),
            process: "self".to_owned(),
        }
    }

    /// The groups of another process, as this process sees them.
    #[must_use]
    pub fn of_process(self, pid: u32) -> Self {
        Self {
            process: pid.to_string(),
            ..self
        }
    }

    /// All limits that apply; none if there are no cgroups.
    ///
    /// # Errors
    /// Reading failed, or a file has invalid content.
    pub fn levels(&self) -> io::Result<Vec<Level>> {
        let Some(Place {
            version,
            mount,
            directory,
        }) = self.place()?
        else {
            return Ok(Vec::new());
        };
        let mut levels = Vec::new();
        for group in directory.ancestors().take_while(|g| g.starts_with(&mount)) {
            let is_own = group == directory;
            let here = self.root.join(group.strip_prefix("/").unwrap_or(group));
            let limits = match version {
                Version::Two => limits_of_two(&here)?,
                Version::One if is_own || counts_descendants(&here)? => limits_of_one(&here)?,
                Version::One => Vec::new(),
            };
            levels.extend(limits.into_iter().map(|level| Level {
                group: group.to_owned(),
                ..level
            }));
        }
        Ok(levels)
    }

    /// Time, in all, for which some thread of the group was stalled for memory (PSI); `None` where that
    /// is not known: version 1, the root, a kernel without PSI.
    ///
    /// # Errors
    /// Reading failed.
    pub fn stalled_us(&self) -> io::Result<Option<u64>> {
        let Some(place) = self.place()? else {
            return Ok(None);
        };
        // The root's figure is of the whole host.
        if place.version == Version::One || place.directory == place.mount {
            return Ok(None);
        }
        let here = self.root.join(
            place
                .directory
                .strip_prefix("/")
                .unwrap_or(&place.directory),
        );
        let text = match read_if_there(&here.join("memory.pressure")) {
            // PSI is compiled in and switched off.
            Err(error)
                if error.raw_os_error() == Some(rustix::io::Errno::OPNOTSUPP.raw_os_error()) =>
            {
                None
            }
            read => read?,
        };
        let some = text
            .as_deref()
            .and_then(|text| text.lines().find_map(|line| line.strip_prefix("some ")));
        let total = some.and_then(|some| {
            some.split(' ')
                .find_map(|field| field.strip_prefix("total="))
        });
        Ok(total.and_then(|total| total.trim().parse().ok()))
    }

    /// Directory of the process's own group; `None` if there is none that can be seen.
    ///
    /// # Errors
    /// Reading failed.
    pub fn directory(&self) -> io::Result<Option<PathBuf>> {
        Ok(self.place()?.map(|place| place.directory))
    }

    /// The group of the memory controller; `None` if there is none that can be seen.
    ///
    /// # Errors
    /// Reading failed.
    pub fn place(&self) -> io::Result<Option<Place>> {
        let Some(groups) =
            read_if_there(&self.root.join("proc").join(&self.process).join("cgroup"))?
        else {
            return Ok(None);
        };
        let mounts = self.mounts.of_cgroups()?;
        let place = own_group(&groups).and_then(|(version, own)| {
            let (mount, directory) = directory_of(version, own, &mounts)?;
            Some(Place {
                version,
                mount,
                directory,
            })
        });
        Ok(place)
    }
}

/// The group of the memory controller, by `/proc/self/cgroup`: lines `number:controllers:path`.
fn own_group(groups: &str) -> Option<(Version, &str)> {
    let fields = |line: &'_ str| -> Option<(String, usize)> {
        let mut parts = line.splitn(3, ':').skip(1);
        let controllers = parts.next()?;
        Some((controllers.to_owned(), line.len() - parts.next()?.len()))
    };
    let mut unified = None;
    for line in groups.lines() {
        let Some((controllers, at)) = fields(line) else {
            continue;
        };
        if controllers.split(',').any(|name| name == "memory") {
            return Some((Version::One, &line[at..]));
        }
        if controllers.is_empty() {
            unified = Some((Version::Two, &line[at..]));
        }
    }
    unified
}

/// Where the hierarchy is mounted, and the group's directory in it. A mount may show only a part of
/// the hierarchy (containers); a group outside of that part is not visible, and then the limits of the
/// part's own root apply.
fn directory_of(version: Version, own: &str, mounts: &str) -> Option<(PathBuf, PathBuf)> {
    mounts.lines().find_map(|line| {
        let (mount, kind) = line.split_once(" - ")?;
        let mut kind = kind.split(' ');
        let (file_system, options) = (kind.next()?, kind.nth(1)?);
        let is_it = match version {
            Version::Two => file_system == "cgroup2",
            Version::One => {
                file_system == "cgroup" && options.split(',').any(|name| name == "memory")
            }
        };
        if !is_it {
            return None;
        }
        let mut fields = mount.split(' ').skip(3);
        let (root, mount) = (fields.next()?, PathBuf::from(fields.next()?));
        let own = Path::new(own);
        let inside = match own.strip_prefix(root) {
            Ok(inside) if !inside.components().any(|c| c == Component::ParentDir) => inside,
            Ok(_) | Err(_) => Path::new(""),
        };
        let directory: PathBuf = mount.join(inside).components().collect();
        Some((mount, directory))
    })
}

fn limits_of_two(here: &Path) -> io::Result<Vec<Level>> {
    let charged = number_in(&here.join("memory.current"))?;
    let cache = cache_bytes(here, "")?;
    let limits = ["memory.max", "memory.high"];
    limits_by(here, &limits, charged, cache)
}

fn limits_of_one(here: &Path) -> io::Result<Vec<Level>> {
    let charged = number_in(&here.join("memory.usage_in_bytes"))?;
    let cache = cache_bytes(here, "total_")?;
    limits_by(here, &["memory.limit_in_bytes"], charged, cache)
}

fn limits_by(
    here: &Path,
    files: &[&'static str],
    charged: Option<u64>,
    cache_bytes: u64,
) -> io::Result<Vec<Level>> {
    let mut levels = Vec::new();
    for file in files {
        let limit = number_in(&here.join(file))?.filter(|limit| *limit < UNLIMITED_BYTES);
        // If either is missing, the controller is off here, or this is the root of the hierarchy.
        if let (Some(limit_bytes), Some(charged_bytes)) = (limit, charged) {
            levels.push(Level {
                group: PathBuf::new(),
                file,
                limit_bytes,
                charged_bytes,
                cache_bytes,
            });
        }
    }
    Ok(levels)
}

/// Clean page cache of files, by `memory.stat`.
fn cache_bytes(here: &Path, prefix: &str) -> io::Result<u64> {
    let stat = read_if_there(&here.join("memory.stat"))?.unwrap_or_default();
    let value = |names: &[&str]| {
        let lines = stat.lines().filter_map(|line| line.split_once(' '));
        let named = |(name, number): (&str, &str)| {
            let bare = name.strip_prefix(prefix)?;
            names
                .contains(&bare)
                .then(|| number.trim().parse::<u64>().unwrap_or(0))
        };
        lines.filter_map(named).sum::<u64>()
    };
    let cache = value(&["inactive_file", "active_file"]);
    // Version 2 uses other names.
    let waiting = value(&["dirty", "writeback", "file_dirty", "file_writeback"]);
    Ok(cache.saturating_sub(waiting))
}

/// Whether a group of version 1 is charged for its descendants.
fn counts_descendants(here: &Path) -> io::Result<bool> {
    let says = read_if_there(&here.join("memory.use_hierarchy"))?;
    Ok(says.is_none_or(|says| says.trim() != "0"))
}

/// `None` for `max`, and if there is no such file.
fn number_in(file: &Path) -> io::Result<Option<u64>> {
    let Some(text) = read_if_there(file)? else {
        return Ok(None);
    };
    match text.trim() {
        "max" => Ok(None),
        number => match number.parse() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(io::Error::new(
                io::ErrorKind::InvalidData,
                format!("{} says '{number}', which is not a number", file.display()),
            )),
        },
    }
}

fn read_if_there(file: &Path) -> io::Result<Option<String>> {
    match std::fs::read_to_string(file) {
        Ok(text) => Ok(Some(text)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        // A group may be removed while it is read.
        Err(error) if error.raw_os_error() == Some(rustix::io::Errno::NODEV.raw_os_error()) => {
            Ok(None)
        }
        Err(error) => Err(error),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A tree of files below a directory.
    fn tree(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (path, content) in files {
            let path = dir.path().join(path);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, content).unwrap();
        }
        dir
    }

    fn levels(files: &[(&str, &str)]) -> Vec<(String, &'static str, u64, u64)> {
        let dir = tree(files);
        let levels = MemoryGroups::below(dir.path()).levels().unwrap();
        let told = |level: Level| {
            let free = level.free_bytes();
            (
                level.group.display().to_string(),
                level.file,
                level.limit_bytes,
                free,
            )
        };
        levels.into_iter().map(told).collect()
    }

    const UNIFIED: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw\n";
    const VERSION_1: &str = "40 30 0:30 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n\
                             41 30 0:31 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";

    #[test]
    fn version_2_tells_max_and_high_of_the_group_and_of_every_ancestor() {
        let found = levels(&[
            ("proc/self/cgroup", "0::/machine/pagetide\n"),
            ("proc/self/mountinfo", UNIFIED),
            ("sys/fs/cgroup/memory.stat", "anon 5\n"),
            ("sys/fs/cgroup/machine/memory.max", "max\n"),
            ("sys/fs/cgroup/machine/memory.high", "900\n"),
            ("sys/fs/cgroup/machine/memory.current", "850\n"),
            ("sys/fs/cgroup/machine/memory.stat", "inactive_file 0\n"),
            ("sys/fs/cgroup/machine/pagetide/memory.max", "500\n"),
            ("sys/fs/cgroup/machine/pagetide/memory.high", "max\n"),
            ("sys/fs/cgroup/machine/pagetide/memory.current", "100\n"),
        ]);
        let own = "/sys/fs/cgroup/machine/pagetide".to_owned();
        let parent = "/sys/fs/cgroup/machine".to_owned();
        assert_eq!(
            found,
            [
                (own, "memory.max", 500, 400),
                (parent, "memory.high", 900, 50)
            ]
        );
    }

    #[test]
    fn stalls_of_another_process_are_told_of_its_own_group_under_version_2_only() {
        let pressure = "some avg10=0.10 avg60=0.00 avg300=0.00 total=1234\n\
                        full avg10=0.00 avg60=0.00 avg300=0.00 total=99\n";
        let two = [
            ("proc/self/cgroup", "0::/\n"),
            ("proc/7/cgroup", "0::/machine/vm\n"),
            ("proc/8/cgroup", "0::/machine/none\n"),
            ("proc/self/mountinfo", UNIFIED),
            ("sys/fs/cgroup/memory.pressure", pressure),
            ("sys/fs/cgroup/machine/vm/memory.pressure", pressure),
            ("sys/fs/cgroup/machine/vm/memory.max", "500\n"),
            ("sys/fs/cgroup/machine/vm/memory.current", "100\n"),
        ];
        let dir = tree(&two);
        let own = MemoryGroups::below(dir.path());
        let of = |pid| own.clone().of_process(pid);
        assert_eq!(of(7).stalled_us().unwrap(), Some(1234));
        assert_eq!(of(7).levels().unwrap()[0].limit_bytes, 500);
        assert_eq!(of(8).stalled_us().unwrap(), None, "a kernel without PSI");
        assert_eq!(
            of(9).stalled_us().unwrap(),
            None,
            "a process that has ended"
        );
        // At the root it would be the whole host's.
        assert_eq!(own.stalled_us().unwrap(), None);
        let one = [
            ("proc/7/cgroup", "4:memory:/vm\n0::/vm\n"),
            ("proc/self/mountinfo", VERSION_1),
            ("sys/fs/cgroup/unified/vm/memory.pressure", pressure),
        ];
        let dir = tree(&one);
        let of_7 = MemoryGroups::below(dir.path()).of_process(7);
        assert_eq!(of_7.stalled_us().unwrap(), None);
    }

    #[test]
    fn clean_page_cache_is_free_and_dirty_cache_and_tmpfs_are_not() {
        let stat = "anon 1\nfile 700\nshmem 300\ninactive_anon 300\ninactive_file 250\n\
                    active_file 150\nfile_dirty 90\nfile_writeback 10\n";
        let found = levels(&[
            ("proc/self/cgroup", "0::/\n"),
            ("proc/self/mountinfo", UNIFIED),
            ("sys/fs/cgroup/memory.max", "1000\n"),
            ("sys/fs/cgroup/memory.current", "800\n"),
            ("sys/fs/cgroup/memory.stat", stat),
        ]);
        assert_eq!(
            found,
            [("/sys/fs/cgroup".to_owned(), "memory.max", 1000, 500)]
        );
    }

    #[test]
    fn version_1_counts_ancestors_that_say_so_also_beside_version_2() {
        let stat = "cache 9\ninactive_file 1\ntotal_inactive_file 40\ntotal_dirty 10\n";
        let found = levels(&[
            (
                "proc/self/cgroup",
                "4:cpu:/\n3:memory,hugetlb:/a/b/c\n0::/elsewhere\n",
            ),
            ("proc/self/mountinfo", VERSION_1),
            (
                "sys/fs/cgroup/memory/memory.limit_in_bytes",
                "9223372036854771712\n",
            ),
            ("sys/fs/cgroup/memory/memory.usage_in_bytes", "123\n"),
            ("sys/fs/cgroup/memory/a/memory.limit_in_bytes", "600\n"),
            ("sys/fs/cgroup/memory/a/memory.usage_in_bytes", "500\n"),
            ("sys/fs/cgroup/memory/a/memory.stat", stat),
            ("sys/fs/cgroup/memory/a/memory.use_hierarchy", "1\n"),
            ("sys/fs/cgroup/memory/a/b/memory.limit_in_bytes", "5\n"),
            ("sys/fs/cgroup/memory/a/b/memory.usage_in_bytes", "5\n"),
            ("sys/fs/cgroup/memory/a/b/memory.use_hierarchy", "0\n"),
            ("sys/fs/cgroup/memory/a/b/c/memory.limit_in_bytes", "700\n"),
            ("sys/fs/cgroup/memory/a/b/c/memory.usage_in_bytes", "300\n"),
            ("sys/fs/cgroup/memory/a/b/c/memory.use_hierarchy", "0\n"),
        ]);
        let file = "memory.limit_in_bytes";
        let group = |path: &str| format!("/sys/fs/cgroup/memory/{path}");
        assert_eq!(
            found,
            [
                (group("a/b/c"), file, 700, 400),
                (group("a"), file, 600, 130)
            ]
        );
    }

    #[test]
    fn container_sees_its_part_of_the_hierarchy_by_its_own_paths_or_by_the_hosts() {
        let limits = [
            ("sys/fs/cgroup/memory.max", "1000\n"),
            ("sys/fs/cgroup/memory.current", "400\n"),
        ];
        let part = "30 23 0:26 /docker/77 /sys/fs/cgroup ro - cgroup2 cgroup2 rw\n";
        for (own, mounts) in [
            ("0::/\n", UNIFIED),
            ("0::/docker/77\n", part),
            ("0::/../other\n", UNIFIED),
            ("0::/system.slice/x\n", part),
        ] {
            let files = [("proc/self/cgroup", own), ("proc/self/mountinfo", mounts)];
            let found = levels(&[files.as_slice(), &limits].concat());
            assert_eq!(found.len(), 1, "{own}{found:?}");
            assert_eq!(found[0].3, 600, "{own}{found:?}");
        }
    }

    #[test]
    fn without_cgroups_or_limits_there_is_no_level_and_nonsense_is_an_error() {
        assert_eq!(levels(&[]), []);
        assert_eq!(levels(&[("proc/self/cgroup", "0::/\n")]), []);
        let dir = tree(&[
            ("proc/self/cgroup", "0::/\n"),
            ("proc/self/mountinfo", UNIFIED),
            ("sys/fs/cgroup/memory.max", "lots\n"),
            ("sys/fs/cgroup/memory.current", "1\n"),
        ]);
        let error = MemoryGroups::below(dir.path()).levels().unwrap_err();
        assert!(error.to_string().contains("'lots'"), "{error}");
    }

    #[test]
    fn groups_of_this_very_process_can_be_read() {
        for level in MemoryGroups::of_this_process().levels().unwrap() {
            assert!(level.group.is_dir(), "{level:?}");
        }
    }
}
