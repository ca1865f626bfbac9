// SPDX-License-Identifier: Apache-2.0
//! Decides which files mapped by a VMM are RAM: shared, writable, in memory, large enough, in ordinary pages or
//! huge ones of 2 MiB, and not inherited by children. A file that fails one of these is refused with
//! advice.

use super::{error::LayoutError, mapping::RamMapping, new_ram::NewRam};
use crate::Refusal;
use crate::process::VmmProcess;
use crate::refusal::HugetlbFault;
use pagetide_addr::{FileKey, Hva, SECTION_BYTES};
use pagetide_sys::memory_file::{FileError, GuestFile};
use procfs::process::{MMPermissions, MMapPath, MemoryMap, VmFlags};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt;

/// Smallest mapping that counts as guest RAM: video memory and firmware are smaller.
pub const SMALLEST_RAM_BYTES: u64 = 16 << 20;

#[derive(Default)]
pub(super) struct FoundRam {
    pub(super) files: Vec<GuestFile>,
    pub(super) mappings: Vec<RamMapping>,
    pub(super) flags: Vec<VmFlags>,
    /// A file that would be RAM if it were in memory.
    pub(super) on_disk: Option<String>,
}

impl FoundRam {
    /// Each file with its mappings.
    pub(super) fn into_new(self, vmm: &VmmProcess) -> Result<Vec<NewRam>, Refusal> {
        let refused = |source: LayoutError| Refusal::Layout {
            pid: vmm.pid(),
            name: vmm.name().to_owned(),
            source,
        };
        let mut new = Vec::new();
        for (number, file) in self.files.into_iter().enumerate() {
            let len_bytes = file.len_bytes().map_err(|e| refused(e.into()))?;
            let own = self.mappings.iter().filter(|m| m.file == number).copied();
            new.push(NewRam::new(file, len_bytes, own.collect()).map_err(refused)?);
        }
        Ok(new)
    }
}

pub(super) fn len_of(map: &MemoryMap) -> u64 {
    map.address.1 - map.address.0
}

/// Device number and inode: what names a file in `maps`.
pub(super) fn key_of(map: &MemoryMap) -> FileKey {
    let (major, minor) = (map.dev.0.cast_unsigned(), map.dev.1.cast_unsigned());
    FileKey {
        dev: rustix::fs::makedev(major, minor),
        ino: map.inode,
    }
}

pub(super) fn is_shared_writable(map: &MemoryMap) -> bool {
    let wanted = MMPermissions::READ | MMPermissions::WRITE | MMPermissions::SHARED;
    map.perms.contains(wanted)
}

/// Files that need not be examined.
pub(super) enum Known<'a> {
    Nothing,
    /// Files of a layout, and files examined before that are not RAM.
    Files(&'a dyn Fn(FileKey) -> bool),
}

impl Known<'_> {
    fn has(&self, key: FileKey) -> bool {
        match self {
            Self::Nothing => false,
            Self::Files(known) => known(key),
        }
    }
}

/// Chooses the files that are RAM, opens them and lists their mappings.
pub(super) fn find_ram(
    vmm: &VmmProcess,
    maps: &[MemoryMap],
    known: Known<'_>,
) -> Result<FoundRam, Refusal> {
    let (pid, name) = (vmm.pid(), vmm.name().to_owned());
    let large = |map: &&MemoryMap| {
        // Parts of one mapping that differ in flags are listed separately: their sum counts.
        let key = key_of(map);
        let sum: u64 = maps.iter().filter(|m| key_of(m) == key).map(len_of).sum();
        sum >= SMALLEST_RAM_BYTES
    };
    let shared: Vec<_> = maps
        .iter()
        .filter(|m| m.inode != 0 && is_shared_writable(m))
        .filter(|m| !known.has(key_of(m)))
        .filter(large)
        .collect();
    refuse_private_huge(vmm, maps, &known)?;
    let mut found = FoundRam::default();
    let mut keys = Vec::new();
    for map in &shared {
        if keys.contains(&key_of(map)) {
            continue;
        }
        let Some(file) = open_ram_file(vmm, map)? else {
            continue;
        };
        let in_memory = is_in_memory(vmm, &file)?;
        if !in_memory {
            found.on_disk.get_or_insert_with(|| path_of(map));
            continue;
        }
        keys.push(key_of(map));
        found.files.push(file);
    }
    for map in maps {
        let Some(file) = keys.iter().position(|key| *key == key_of(map)) else {
            continue;
        };
        let address = map.address.0;
        if !is_shared_writable(map) {
            return Err(Refusal::OddMapping { pid, name, address });
        }
        if !map.extension.vm_flags.contains(VmFlags::DC) {
            return Err(Refusal::Forkable { pid, name, address });
        }
        found.flags.push(map.extension.vm_flags);
        add_mapping(
            &mut found.mappings,
            RamMapping {
                hva: Hva(address),
                len_bytes: len_of(map),
                file,
                file_offset: map.offset,
            },
        );
    }
    Ok(found)
}

/// Memory in huge pages that are in no file cannot be taken out from here.
fn refuse_private_huge(
    vmm: &VmmProcess,
    maps: &[MemoryMap],
    known: &Known<'_>,
) -> Result<(), Refusal> {
    let is_private = |map: &&MemoryMap| map.inode == 0 || !is_shared_writable(map);
    let is_huge = |map: &&MemoryMap| map.extension.vm_flags.contains(VmFlags::HT);
    let found = maps
        .iter()
        .filter(|map| !known.has(key_of(map)) && len_of(map) >= SMALLEST_RAM_BYTES)
        .filter(is_private)
        .find(is_huge);
    match found {
        None => Ok(()),
        Some(huge) => {
            let (pid, address) = (vmm.pid(), huge.address.0);
            tracing::debug!(pid, address, "private hugetlb mapping");
            Err(Refusal::HugetlbRam {
                pid,
                name: vmm.name().to_owned(),
                what: HugetlbFault::Private,
            })
        }
    }
}

/// True for a file on tmpfs, or in huge pages of a size that can be evicted.
fn is_in_memory(vmm: &VmmProcess, file: &GuestFile) -> Result<bool, Refusal> {
    let pid = vmm.pid();
    let page_bytes = file.page_bytes().map_err(|e| unreadable(pid, &e))?;
    if page_bytes > SECTION_BYTES {
        return Err(Refusal::HugetlbRam {
            pid,
            name: vmm.name().to_owned(),
            what: HugetlbFault::TooLarge(page_bytes >> 20),
        });
    }
    let is_tmpfs = file.is_tmpfs().map_err(|e| unreadable(pid, &e))?;
    Ok(is_tmpfs || page_bytes == SECTION_BYTES)
}

/// Adds a mapping, or extends the last one by it.
fn add_mapping(mappings: &mut Vec<RamMapping>, more: RamMapping) {
    if let Some(last) = mappings.last_mut()
        && last.file == more.file
        && last.hva.0 + last.len_bytes == more.hva.0
        && last.file_offset + last.len_bytes == more.file_offset
    {
        last.len_bytes += more.len_bytes;
        return;
    }
    mappings.push(more);
}

fn path_of(map: &MemoryMap) -> String {
    match &map.pathname {
        MMapPath::Path(path) => path.display().to_string(),
        other => format!("{other:?}"),
    }
}

/// Opens the file behind a mapping: through a descriptor the VMM has of it, else through the
/// mapping itself. `None` for a file that cannot be opened for writing, such as device memory.
pub(super) fn open_ram_file(
    vmm: &VmmProcess,
    map: &MemoryMap,
) -> Result<Option<GuestFile>, Refusal> {
    let pid = vmm.pid();
    let fds = std::fs::read_dir(format!("/proc/{pid}/fd"))
        .map_err(|e| Refusal::looking(pid, "list the descriptors", e))?;
    let key = key_of(map);
    let through_fd = fds.flatten().map(|entry| entry.path()).find(|path| {
        std::fs::metadata(path)
            .is_ok_and(|stat| stat.dev() == key.dev && stat.ino() == key.ino && stat.is_file())
    });
    let (start, end) = map.address;
    let path =
        through_fd.unwrap_or_else(|| format!("/proc/{pid}/map_files/{start:x}-{end:x}").into());
    let opened: io::Result<File> = OpenOptions::new().read(true).write(true).open(&path);
    match opened {
        Ok(file) => Ok(Some(GuestFile::from(OwnedFd::from(file)))),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => Err(Refusal::NotPermitted {
            pid,
            what: "open the RAM",
        }),
        Err(e) => {
            tracing::debug!(pid, path = %path.display(), error = %e, "mapping is not taken for RAM");
            Ok(None)
        }
    }
}

pub(super) fn unreadable(pid: u32, error: &FileError) -> Refusal {
    Refusal::Unreadable {
        pid,
        what: "look at the RAM file",
        source: io::Error::other(error.to_string()),
    }
}

/// Shared memory in huge pages can be evicted, in pages of 4 KiB.
pub(super) fn huge_page_warning(flags: &[VmFlags]) -> Option<String> {
    let path = "/sys/kernel/mm/transparent_hugepage/shmem_enabled";
    // Missing in kernels without huge pages.
    let Ok(setting) = std::fs::read_to_string(path) else {
        return None;
    };
    let on = ["[always]", "[within_size]", "[force]"]
        .iter()
        .any(|word| setting.contains(word));
    let advised = setting.contains("[advise]") && flags.iter().any(|f| f.contains(VmFlags::HG));
    (on || advised).then(|| {
        format!(
            "shared memory is in huge pages here (shmem_enabled {}): they stay whole while they are \
             watched, what is to be evicted is split to pages of 4 KiB, and one that cannot be \
             split stays",
            setting.trim()
        )
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use pagetide_addr::PAGE_BYTES;

    fn mapping(file: usize, first_page: u64, pages: u64, hva: u64) -> RamMapping {
        RamMapping {
            hva: Hva(hva),
            len_bytes: pages * PAGE_BYTES,
            file,
            file_offset: first_page * PAGE_BYTES,
        }
    }

    #[test]
    fn mappings_listed_apart_are_joined_when_they_are_one() {
        let mut joined = Vec::new();
        add_mapping(&mut joined, mapping(0, 0, 2, 0x1000));
        add_mapping(&mut joined, mapping(0, 2, 3, 0x3000));
        add_mapping(&mut joined, mapping(0, 9, 1, 0x6000));
        assert_eq!(joined, [mapping(0, 0, 5, 0x1000), mapping(0, 9, 1, 0x6000)]);
    }
}
