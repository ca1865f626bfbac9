// SPDX-License-Identifier: Apache-2.0
//! What else touches a VM's RAM: reasons to refuse a take-over, and eviction blockers.
//!
//! Copies that the kernel makes through page tables fault like a CPU and are safe. Three other
//! accesses are not:
//!
//! - **A process that maps the same file.** Its touch of a hole allocates a page of zeros without a
//!   fault on the VMM's userfaultfd. Refused at attach, and checked again before each reclaim.
//! - **A further mapping in the VMM itself**, which its userfaultfd does not watch either. No
//!   layout has one at attach; checked again before each reclaim. (A new RAM file, or the removal
//!   of a whole file, is no hazard: see [`RamLayout::news`].)
//! - **Kernel pins.** A page pinned for direct I/O or a device keeps taking DMA after it has been
//!   punched from its file: the data is lost. Anything that might pin (direct I/O files, vfio,
//!   vhost-scsi, vdpa, RDMA, udmabuf, pass-through of SCSI or NVMe commands, SEV, locked memory) is
//!   an eviction blocker: the VM is served, but nothing of it is evicted, and its status says so.

use crate::Refusal;
use crate::layout::{MapsChange, RamLayout};
use crate::process::{VmmProcess, in_proc, name_of};
use crate::refusal::NO_SUCH_PROCESS;
use crate::swap::{self, SwapReach};
use pagetide_sys::process::{ProcessError, same_address_space};
use std::fs;
use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt};

/// `O_DIRECT` as `/proc/PID/fdinfo` shows it (octal).
const DIRECT_FLAG: u32 = 0o40_000;
/// The first process.
const INIT: u32 = 1;

/// Why nothing of a VM may be evicted at the moment.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum EvictionBlocker {
    /// Pinned memory.
    #[error(
        "the VMM has {kib} KiB of pinned memory (VmPin): a device or io_uring may write to it at \
         any time"
    )]
    Pinned {
        /// How much.
        kib: u64,
    },
    /// Locked memory.
    #[error(
        "the VMM has {kib} KiB of locked memory (VmLck): start it without mem-lock (QEMU: no \
         -overcommit mem-lock=on)"
    )]
    Locked {
        /// How much.
        kib: u64,
    },
    /// A file open for direct I/O.
    #[error(
        "the VMM has {path} open for direct I/O (descriptor {fd}), which pins guest pages: use \
         cache.direct=off (QEMU: cache=writeback), or serve the disk by `pagetide dpu blk`"
    )]
    DirectFile {
        /// Its descriptor in the VMM.
        fd: i32,
        /// The file.
        path: String,
    },
    /// A device that does DMA through the kernel.
    #[error(
        "the VMM has {what} open ({path}), by which a device may do DMA into guest pages: remove \
         it, or serve it by a device with I/O page faults"
    )]
    Device {
        /// What kind of device.
        what: &'static str,
        /// Its descriptor's target.
        path: String,
    },
    /// Another process maps the RAM.
    #[error(
        "process {pid} ({name}) maps the guest's RAM and would read zeros in place of evicted \
         pages: stop it"
    )]
    MappedByAnother {
        /// Its pid.
        pid: u32,
        /// Its command name.
        name: String,
    },
    /// The VMM maps its RAM in another way than when it was taken over.
    #[error(
        "the VMM maps the guest's RAM otherwise than when it was taken over: {change}; detach the \
         VM, and attach it again when that has ended"
    )]
    MapsChanged {
        /// How.
        change: MapsChange,
    },
    /// The RAM can go to swap now.
    #[error("the guest's RAM can go to kernel swap: {0}")]
    Swap(SwapReach),
}

/// A process found to map the RAM, or to have its file open.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OtherProcess {
    /// Its pid.
    pub pid: u32,
    /// Its command name.
    pub name: String,
}

/// Refuses a VMM whose RAM another process maps or the kernel may swap out. `ours` are processes
/// that may map it: devices of this host that look pages up before each DMA.
///
/// # Errors
/// [`Refusal::SharedRam`], [`Refusal::SwapInReach`], and errors of the check.
pub fn refuse_if_shared(vmm: &VmmProcess, layout: &RamLayout, ours: &[u32]) -> Result<(), Refusal> {
    let (pid, name) = (vmm.pid(), vmm.name().to_owned());
    let others = who_else_maps(vmm, layout, ours)?;
    if let Some(other) = others.into_iter().next() {
        return Err(Refusal::SharedRam {
            pid,
            name,
            other_pid: other.pid,
            other_name: other.name,
        });
    }
    match swap::in_reach(pid, layout.swappable_keys()) {
        Ok(None) => Ok(()),
        Ok(Some(reach)) => Err(Refusal::SwapInReach { pid, name, reach }),
        Err(e) => Err(Refusal::looking(pid, "find the cgroup", e)),
    }
}

/// Everything that forbids evicting pages of this VM now; empty if nothing does. `ours` are as for
/// [`refuse_if_shared`]. To be called before each reclaim. Costs some microseconds per descriptor
/// of the VMM and per process of the host.
///
/// # Errors
/// [`Refusal`]: a failed check forbids eviction too.
pub fn check(
    vmm: &VmmProcess,
    layout: &RamLayout,
    ours: &[u32],
) -> Result<Vec<EvictionBlocker>, Refusal> {
    let pid = vmm.pid();
    let mut blockers = Vec::new();
    let status = in_proc(pid)
        .and_then(|p| p.status())
        .map_err(|e| Refusal::parsing(pid, "read the status", e))?;
    blockers.extend(
        status
            .vmpin
            .filter(|kib| *kib > 0)
            .map(|kib| EvictionBlocker::Pinned { kib }),
    );
    blockers.extend(
        status
            .vmlck
            .filter(|kib| *kib > 0)
            .map(|kib| EvictionBlocker::Locked { kib }),
    );
    descriptors(pid, &mut blockers)
        .map_err(|e| Refusal::looking(pid, "list the descriptors", e))?;
    let change = layout.maps_change(vmm)?;
    blockers.extend(change.map(|change| EvictionBlocker::MapsChanged { change }));
    let others = who_else_maps(vmm, layout, ours)?;
    blockers.extend(
        others
            .into_iter()
            .map(|OtherProcess { pid, name }| EvictionBlocker::MappedByAnother { pid, name }),
    );
    let reach = swap::in_reach(pid, layout.swappable_keys())
        .map_err(|e| Refusal::looking(pid, "find the cgroup", e))?;
    blockers.extend(reach.map(EvictionBlocker::Swap));
    vmm.still_runs()?;
    Ok(blockers)
}

/// Memory that the VMM has pinned or locked, in bytes.
///
/// # Errors
/// [`Refusal`] if it cannot be determined.
pub fn pinned_bytes(vmm: &VmmProcess) -> Result<u64, Refusal> {
    let pid = vmm.pid();
    let status = in_proc(pid)
        .and_then(|p| p.status())
        .map_err(|e| Refusal::parsing(pid, "read the status", e))?;
    Ok((status.vmpin.unwrap_or(0) + status.vmlck.unwrap_or(0)) << 10)
}

/// Adds what the VMM's open descriptors forbid.
fn descriptors(pid: u32, blockers: &mut Vec<EvictionBlocker>) -> io::Result<()> {
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        // A descriptor closed since it was listed blocks nothing.
        let Ok(target) = fs::read_link(entry.path()) else {
            continue;
        };
        let path = target.to_string_lossy().into_owned();
        if let Some(what) = dma_device(&path) {
            blockers.push(EvictionBlocker::Device { what, path });
            continue;
        }
        let number = entry.file_name();
        let number = number.to_string_lossy();
        let Ok(fd) = number.parse::<i32>() else {
            continue;
        };
        let Ok(details) = fs::read_to_string(format!("/proc/{pid}/fdinfo/{number}")) else {
            continue;
        };
        if !is_direct(&details) {
            continue;
        }
        // Pipes and sockets have the flag too, with another meaning.
        let on_storage = fs::metadata(entry.path())
            .is_ok_and(|stat| stat.is_file() || stat.file_type().is_block_device());
        if on_storage {
            blockers.push(EvictionBlocker::DirectFile { fd, path });
        }
    }
    Ok(())
}

/// The kind of DMA device that a descriptor's target is, if it is one. io_uring is not listed: QEMU
/// has one for its event loop, and its fixed buffers show as pinned memory.
fn dma_device(target: &str) -> Option<&'static str> {
    const KNOWN: [(&str, &str); 8] = [
        ("/dev/vfio/", "a VFIO device"),
        ("/dev/iommu", "an IOMMU"),
        ("/dev/vhost-scsi", "vhost-scsi"),
        ("/dev/vhost-vdpa", "a vDPA device"),
        ("/dev/infiniband/", "an RDMA device"),
        ("anon_inode:[vfio-device]", "a VFIO device"),
        ("/dev/udmabuf", "udmabuf"),
        ("/dev/bsg/", "SCSI pass-through"),
    ];
    // With a number each, unlike /dev/sgx_enclave and the like.
    const NUMBERED: [(&str, &str); 2] = [
        ("/dev/sg", "SCSI pass-through"),
        ("/dev/ng", "NVMe pass-through"),
    ];
    if target == "/dev/sev" {
        return Some("AMD SEV (memory of an encrypted guest is pinned)");
    }
    let known = KNOWN.iter().find(|(start, _)| target.starts_with(start));
    let numbered = || {
        NUMBERED.iter().find(|(start, _)| {
            let number = target.strip_prefix(start);
            number.is_some_and(|rest| rest.starts_with(|c: char| c.is_ascii_digit()))
        })
    };
    known.or_else(numbered).map(|(_, what)| *what)
}

fn is_direct(fdinfo: &str) -> bool {
    fdinfo
        .lines()
        .find_map(|line| line.strip_prefix("flags:"))
        .and_then(|flags| match u32::from_str_radix(flags.trim(), 8) {
            Ok(flags) => Some(flags & DIRECT_FLAG != 0),
            Err(_) => None,
        })
        // If the flags cannot be read, assume direct I/O.
        .unwrap_or(true)
}

/// Processes other than the VMM and this one that map a RAM file. Init is skipped: it maps no
/// memory of other processes, and in a container it may not be visible.
///
/// # Errors
/// [`Refusal::CannotLookInto`] for a process that might be one of them.
pub fn who_else_maps(
    vmm: &VmmProcess,
    layout: &RamLayout,
    ours: &[u32],
) -> Result<Vec<OtherProcess>, Refusal> {
    let needles: Vec<String> = layout
        .files()
        .iter()
        .map(|file| {
            let key = file.key();
            let (major, minor) = (rustix::fs::major(key.dev), rustix::fs::minor(key.dev));
            format!(" {major:02x}:{minor:02x} {} ", key.ino)
        })
        .collect();
    let mut found = Vec::new();
    for pid in all_pids().map_err(|e| Refusal::looking(vmm.pid(), "list the neighbours", e))? {
        if [INIT, vmm.pid(), std::process::id()].contains(&pid) || ours.contains(&pid) {
            continue;
        }
        let maps = match fs::read_to_string(format!("/proc/{pid}/maps")) {
            Ok(maps) => maps,
            Err(e) if is_gone(&e) => continue,
            Err(e) => {
                tracing::debug!(pid, error = %e, "mappings cannot be read");
                return Err(Refusal::CannotLookInto {
                    pid: vmm.pid(),
                    other_pid: pid,
                    other_name: name_of(pid),
                });
            }
        };
        if needles.iter().any(|needle| maps.contains(needle.as_str())) {
            match same_address_space(vmm.pid(), pid) {
                Ok(true) | Err(ProcessError::NoSuchProcess { .. }) => {}
                // Another address space, or unknown: it is reported, and the next check will tell.
                Ok(false) | Err(_) => found.push(OtherProcess {
                    pid,
                    name: name_of(pid),
                }),
            }
        }
    }
    Ok(found)
}

/// Processes other than the VMM and this one that have a RAM file open: a process that manages the
/// VM already is among them. For a message: processes that cannot be inspected are left out.
#[must_use]
pub fn who_else_has_open(vmm: &VmmProcess, layout: &RamLayout) -> Vec<OtherProcess> {
    let is_ram = |entry: io::Result<fs::DirEntry>| {
        let file = entry.and_then(|entry| fs::metadata(entry.path()));
        file.is_ok_and(|file| {
            let mut files = layout.files().iter().map(|file| file.key());
            files.any(|key| (key.dev, key.ino) == (file.dev(), file.ino()))
        })
    };
    let has_it =
        |pid: &u32| fs::read_dir(format!("/proc/{pid}/fd")).is_ok_and(|mut open| open.any(is_ram));
    let others = all_pids().unwrap_or_default().into_iter();
    others
        .filter(|pid| ![INIT, vmm.pid(), std::process::id()].contains(pid))
        .filter(has_it)
        .map(|pid| OtherProcess {
            pid,
            name: name_of(pid),
        })
        .collect()
}

fn all_pids() -> io::Result<Vec<u32>> {
    let mut pids = Vec::new();
    for entry in fs::read_dir("/proc")? {
        // Entries whose names are not numbers are not processes.
        if let Ok(pid) = entry?.file_name().to_string_lossy().parse() {
            pids.push(pid);
        }
    }
    Ok(pids)
}

fn is_gone(error: &io::Error) -> bool {
    error.kind() == io::ErrorKind::NotFound || error.raw_os_error() == Some(NO_SUCH_PROCESS)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_that_do_dma_are_known_and_harmless_ones_are_not() {
        for device in [
            "/dev/vfio/12",
            "/dev/vfio/vfio",
            "/dev/iommu",
            "/dev/vhost-vdpa-0",
            "/dev/infiniband/uverbs0",
            "/dev/udmabuf",
            "/dev/sg0",
            "/dev/sg12",
            "/dev/ng0n1",
            "/dev/bsg/0:0:0:0",
            "/dev/sev",
        ] {
            assert!(dma_device(device).is_some(), "{device}");
        }
        for harmless in [
            "/dev/vhost-net",
            "/dev/kvm",
            "anon_inode:kvm-vfio",
            "anon_inode:[userfaultfd]",
            "anon_inode:[io_uring]",
            "/dev/sgx_enclave",
            "/dev/sev-guest",
            "/dev/nvme0n1",
            "/dev/shm/ram",
        ] {
            assert!(dma_device(harmless).is_none(), "{harmless}");
        }
    }

    #[test]
    fn direct_flag_is_read_in_octal_and_missing_flags_count_as_set() {
        assert!(is_direct("pos:\t0\nflags:\t0140002\nmnt_id:\t30\n"));
        assert!(!is_direct("pos:\t0\nflags:\t0100002\nmnt_id:\t30\n"));
        assert!(is_direct("pos:\t0\n"));
    }
}
