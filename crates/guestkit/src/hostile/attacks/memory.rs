// SPDX-License-Identifier: Apache-2.0
//! Files that cannot be guest RAM, or that are larger than there is room for.
//!
//! Mapped memory must stay accessible whatever its owner does: a memfd, sealed against shrinking
//! where it allows that. An access to a mapping of anything else may end in SIGBUS (a file that is
//! shrunk, a file system that is full) or never end (a file system in user space).

use std::fs::File;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags, fcntl_add_seals, open};
use serde_json::Value;

use super::super::descriptors::{KINDS, Kind, named};
use super::super::front::{
    Front, GPA, Io, RAM_BYTES, Ram, Setup, T_FLUSH, T_IN, T_OUT, VA, WRITE, data_of, greet,
    header_of,
};
use super::super::peer::{Failure, Peer, failed, wrong};
use super::super::silent_fuse::SilentFuse;
use super::super::wire::{self, Region, request};
use super::super::{Attack, Held, Seen, Target, seen};
use crate::borrowed::{HugePages, Tmpfs};

/// The forms of a refusal.
const NO: [Seen; 2] = [Seen::Refused, Seen::HungUp];
const YES: [Seen; 1] = [Seen::Served];
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;
/// Where lent memory begins.
const LENT: u64 = TIB;
const HUGE_PAGE_BYTES: u64 = 2 << 20;
/// Most regions a device accepts.
const REGIONS_MAX: u64 = 509;
/// Files of 2 TiB whose total exceeds the 128 TiB that a process can map.
const SPARSE_FILES: u64 = 70;

/// See the module.
pub fn attacks() -> Vec<Attack> {
    let mut all = kinds();
    all.extend(vouched_for());
    all.extend(address_space());
    all
}

fn kinds() -> Vec<Attack> {
    let mut all: Vec<Attack> = KINDS
        .into_iter()
        .map(|kind| {
            let name = format!("ram-is-{}", kind.name());
            Attack::new(name, &NO, move |target| no_file(target, kind))
        })
        .collect();
    all.extend([
        Attack::new("ram-memfd-cannot-be-shrunk", &YES, sealed_by_daemon),
        Attack::new("ram-memfd-unsealable", &YES, unsealable)
            .listed("ram_sealed", Value::Bool(false)),
        Attack::new("ram-memfd-sealable", &YES, sealable).listed("ram_sealed", Value::Bool(true)),
        Attack::new("ram-unsealable-where-seals-are-required", &NO, unsealable)
            .on_device_with(&["--require-sealed"]),
        Attack::new("ram-sealable-where-seals-are-required", &YES, sealable)
            .on_device_with(&["--require-sealed"]),
        Attack::new("ram-memfd-read-only", &NO, read_only),
        Attack::new("ram-memfd-sealed-against-writes", &NO, |target| {
            sealed_before(target, SealFlags::WRITE)
        }),
        Attack::new("ram-memfd-sealed-against-future-writes", &NO, |target| {
            sealed_before(target, SealFlags::FUTURE_WRITE)
        }),
        Attack::new("ram-memfd-sealed-against-seals", &YES, |target| {
            sealed_before(target, SealFlags::SEAL)
        }),
        Attack::new("ram-on-disk-file-system", &NO, on_disk),
        Attack::new("ram-on-silent-fuse", &NO, on_fuse),
        Attack::new("ram-lent-on-silent-fuse", &NO, lent_on_fuse),
    ]);
    all
}

/// What the operator has to allow by name.
fn vouched_for() -> Vec<Attack> {
    let either = [Seen::Served, Seen::Stopped];
    vec![
        Attack::new("ram-on-tmpfs", &NO, on_tmpfs),
        Attack::new("ram-on-tmpfs-allowed", &YES, on_tmpfs)
            .on_device_with(&["--allow-ram", "tmpfs"]),
        Attack::new("ram-on-full-tmpfs", &NO, on_full_tmpfs),
        Attack::new("ram-on-full-tmpfs-allowed", &either, on_full_tmpfs)
            .on_device_with(&["--allow-ram", "tmpfs"]),
        Attack::new("ram-on-tmpfs-where-hugetlbfs-is-allowed", &NO, on_tmpfs)
            .on_device_with(&["--allow-ram", "hugetlbfs"]),
        Attack::new("ram-hugetlb", &NO, hugetlb),
        Attack::new("ram-hugetlb-allowed", &YES, hugetlb)
            .on_device_with(&["--allow-ram", "hugetlbfs,tmpfs"]),
        Attack::new(
            "ram-hugetlb-beyond-the-pages-there-are",
            &NO,
            hugetlb_sparse,
        ),
        Attack::new(
            "ram-hugetlb-beyond-the-pages-there-are-allowed",
            &either,
            hugetlb_sparse,
        )
        .on_device_with(&["--allow-ram", "hugetlbfs"]),
    ]
}

fn address_space() -> Vec<Attack> {
    let any = [Seen::Served, Seen::Refused, Seen::HungUp];
    let mut all = vec![
        Attack::new("ram-seventy-files-of-terabytes", &YES, seventy_files)
            .on_device_with(&["--ram-max", "3T"]),
        Attack::new("ram-file-longer-than-the-quota", &NO, long_file),
        Attack::new("ram-file-of-petabytes", &NO, file_of_petabytes),
        Attack::new("ram-of-100-tib", &NO, |target| sparse(target, &[100 * TIB])),
        Attack::new("ram-beyond-quota", &NO, |target| {
            sparse(target, &[600 * GIB])
        }),
        Attack::new("ram-within-quota", &YES, |target| {
            sparse(target, &[256 * GIB])
        }),
        Attack::new("ram-beyond-quota-together", &NO, |target| {
            sparse(target, &[300 * GIB, 300 * GIB])
        }),
        Attack::new("ram-within-larger-quota", &YES, |target| {
            sparse(target, &[600 * GIB])
        })
        .on_device_with(&["--ram-max", "1T"]),
        Attack::new("ram-beyond-smaller-quota", &NO, |target| {
            sparse(target, &[2 * GIB])
        })
        .on_device_with(&["--ram-max", "1G"]),
        Attack::new("regions-as-many-as-there-may-be", &YES, |target| {
            regions(target, REGIONS_MAX)
        }),
        Attack::new("regions-one-too-many", &NO, |target| {
            regions(target, REGIONS_MAX + 1)
        }),
        Attack::new("regions-come-and-go", &YES, come_and_go),
        Attack::new("regions-of-one-file", &YES, one_file),
    ];
    for (name, region) in wrong_regions() {
        all.push(Attack::new(format!("region-{name}"), &NO, move |target| {
            one_region(target, region)
        }));
        all.push(Attack::new(format!("table-{name}"), &NO, move |target| {
            one_table(target, region)
        }));
    }
    all.push(Attack::new(
        "region-overlapping-for-the-front-end",
        &any,
        |target| {
            let region = Region {
                gpa: GPA + LENT,
                ..good()
            };
            one_region(target, region)
        },
    ));
    all
}

fn good() -> Region {
    Region {
        gpa: GPA,
        bytes: RAM_BYTES,
        va: VA,
        offset: 0,
    }
}

fn wrong_regions() -> [(&'static str, Region); 11] {
    let lent = Region {
        gpa: GPA + LENT,
        va: VA + LENT,
        ..good()
    };
    let at = |gpa| Region { gpa, ..lent };
    [
        ("overlapping", at(GPA + RAM_BYTES / 2)),
        ("wrapping-for-the-guest", at(u64::MAX - 4095)),
        (
            "wrapping-for-the-front-end",
            Region {
                va: u64::MAX - 4095,
                ..lent
            },
        ),
        (
            "wrapping-in-its-file",
            Region {
                offset: u64::MAX - 4095,
                ..lent
            },
        ),
        (
            "beyond-its-file",
            Region {
                offset: RAM_BYTES,
                ..lent
            },
        ),
        (
            "longer-than-its-file",
            Region {
                bytes: 2 * RAM_BYTES,
                ..lent
            },
        ),
        ("empty", Region { bytes: 0, ..lent }),
        (
            "of-all-addresses",
            Region {
                gpa: 0,
                bytes: u64::MAX,
                va: 0,
                offset: 0,
            },
        ),
        ("unaligned", at(GPA + LENT + 1)),
        (
            "unaligned-in-its-file",
            Region {
                offset: 512,
                bytes: 4096,
                ..lent
            },
        ),
        (
            "unaligned-for-the-front-end",
            Region {
                va: VA + LENT + 8,
                ..lent
            },
        ),
    ]
}

/// Starts with `ram` as all of guest RAM and does what any guest does.
fn with_ram(target: &Target, ram: Ram) -> Result<(Seen, Option<Front>), Failure> {
    match Setup::with(ram)?.start(&target.socket) {
        Ok(mut front) => {
            let checked = front.check(64, &[0x5a; 8192]);
            Ok((seen(checked)?, Some(front)))
        }
        Err(failure) => Ok((seen(Err::<(), _>(failure))?, None)),
    }
}

fn no_file(target: &Target, kind: Kind) -> Result<Held, Failure> {
    let peer = Peer::connect(&target.socket)?;
    greet(&peer, 0)?;
    let bait = match kind {
        Kind::OwnSocket => peer.descriptor()?.into(),
        kind => kind.open(target)?,
    };
    let table = wire::mem_table(1, &[good()]);
    let seen = seen(peer.tell(table, &[bait.fd.as_fd()]))?;
    Ok(Held::nothing(seen).and(peer).and(bait))
}

fn sealed_by_daemon(target: &Target) -> Result<Held, Failure> {
    let ram = Ram::new(RAM_BYTES)?;
    let (seen, front) = with_ram(target, ram.clone())?;
    if ram.resize(4096).is_ok() {
        // Restored: other attacks try what could kill the daemon.
        ram.resize(RAM_BYTES)?;
        let what = "it can be shrunk while the device has it mapped".to_owned();
        return Err(wrong("a memfd that may be sealed", what));
    }
    Ok(Held::nothing(seen).and(front))
}

fn unsealable(target: &Target) -> Result<Held, Failure> {
    let (seen, front) = with_ram(target, Ram::unsealable(RAM_BYTES)?)?;
    Ok(Held::nothing(seen).and(front))
}

fn sealable(target: &Target) -> Result<Held, Failure> {
    let (seen, front) = with_ram(target, Ram::new(RAM_BYTES)?)?;
    Ok(Held::nothing(seen).and(front))
}

fn read_only(target: &Target) -> Result<Held, Failure> {
    use std::os::fd::AsRawFd as _;
    let ram = Ram::new(RAM_BYTES)?;
    let path = format!("/proc/self/fd/{}", ram.file().as_raw_fd());
    let flags = OFlags::RDONLY | OFlags::CLOEXEC;
    let lent = open(path, flags, Mode::empty()).map_err(failed("opening a memfd again"))?;
    lend_in_table(target, lent.as_fd(), RAM_BYTES)
}

/// Sends `file` as all of guest RAM; this side does nothing with it.
fn lend_in_table(target: &Target, file: BorrowedFd<'_>, bytes: u64) -> Result<Held, Failure> {
    let peer = Peer::connect(&target.socket)?;
    greet(&peer, 0)?;
    let region = Region { bytes, ..good() };
    let seen = seen(peer.tell(wire::mem_table(1, &[region]), &[file]))?;
    Ok(Held::nothing(seen).and(peer))
}

fn sealed_before(target: &Target, seals: SealFlags) -> Result<Held, Failure> {
    let ram = Ram::new(RAM_BYTES)?;
    fcntl_add_seals(ram.file(), seals).map_err(failed("sealing"))?;
    if seals.contains(SealFlags::SEAL) {
        let (seen, front) = with_ram(target, ram)?;
        return Ok(Held::nothing(seen).and(front));
    }
    lend_in_table(target, ram.file().as_fd(), RAM_BYTES)
}

fn file_in(folder: &std::path::Path, bytes: u64) -> Result<Ram, Failure> {
    let file = named(&folder.join("hostile-ram"))?;
    file.set_len(bytes).map_err(failed("making a file long"))?;
    Ok(Ram::of(file, bytes))
}

fn on_disk(target: &Target) -> Result<Held, Failure> {
    let folder = std::env::current_dir().map_err(failed("the current directory"))?;
    let ram = file_in(&folder, RAM_BYTES)?;
    let kind = rustix::fs::fstatfs(ram.file()).map_err(failed("fstatfs"))?;
    if i128::from(kind.f_type) == 0x0102_1994 {
        return Err(Failure::NotHere("all is on tmpfs".to_owned()));
    }
    let (seen, front) = with_ram(target, ram)?;
    Ok(Held::nothing(seen).and(front))
}

fn on_tmpfs(target: &Target) -> Result<Held, Failure> {
    let (seen, front) = with_ram(target, file_in(&target.folder, RAM_BYTES)?)?;
    Ok(Held::nothing(seen).and(front))
}

/// The ring has memory; the rest has none, though the file is long enough.
fn on_full_tmpfs(target: &Target) -> Result<Held, Failure> {
    let path = target.folder.join("full");
    let small = Tmpfs::mount(&path, "size=1m").map_err(|e| Failure::NotHere(e.to_string()))?;
    let ram = file_in(small.path(), RAM_BYTES)?;
    // Its header and status have memory; then nothing more fits.
    ram.put(0, &vec![0; 0x5000])?;
    let mut filler = File::create(small.path().join("filler")).map_err(failed("a file"))?;
    while std::io::Write::write(&mut filler, &[1; 4096]).is_ok_and(|wrote| wrote == 4096) {}
    let mut front = match Setup::with(ram)?.start(&target.socket) {
        Ok(front) => front,
        Err(failure) => {
            let seen = seen(Err::<(), _>(failure))?;
            return Ok(Held::nothing(seen).and(small));
        }
    };
    // Its data is in a hole, and so is the status of the second.
    let outcome = front
        .request(0, Io::of_slot(0, T_IN, 0, 4096))
        .and_then(|_| {
            let status_in_hole = [
                (GPA + header_of(0), 16, 0),
                (GPA + 4 * (RAM_BYTES / 8), 1, WRITE),
            ];
            front.head(0, T_FLUSH, 0)?;
            front.describe_chain(&status_in_hole)?;
            front.offer(0)?;
            front.kick()?;
            front.wait()
        });
    let seen = seen(outcome)?;
    Ok(Held::nothing(seen).and(front).and(small))
}

fn huge_file(bytes: u64) -> Result<OwnedFd, Failure> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING | MemfdFlags::HUGETLB;
    let not_here = |error: rustix::io::Errno| Failure::NotHere(format!("hugetlb memfd: {error}"));
    let file = rustix::fs::memfd_create("hostile-huge", flags).map_err(not_here)?;
    rustix::fs::ftruncate(&file, bytes).map_err(not_here)?;
    Ok(file)
}

/// Lends huge pages beside the ring's memory, and has the device read and write there.
fn hugetlb(target: &Target) -> Result<Held, Failure> {
    let pages = HugePages::of_2_mib(2).map_err(|error| Failure::NotHere(error.to_string()))?;
    let file = huge_file(2 * HUGE_PAGE_BYTES)?;
    let seen = by_way_of(target, file.as_fd(), 2 * HUGE_PAGE_BYTES)?;
    Ok(Held::nothing(seen.0).and(seen.1).and(file).and(pages))
}

fn hugetlb_sparse(target: &Target) -> Result<Held, Failure> {
    let pages = HugePages::of_2_mib(1).map_err(|error| Failure::NotHere(error.to_string()))?;
    let file = huge_file(64 << 30)?;
    let mut front = Front::start(&target.socket)?;
    match seen(front.lend(file.as_fd(), LENT, 64 << 30))? {
        Seen::Served => {}
        no => return Ok(Held::nothing(no).and(front).and(file).and(pages)),
    }
    let mut outcome = Ok(0);
    for page in 0..8 {
        let io = Io {
            kind: T_IN,
            sector: 0,
            gpa: GPA + LENT + page * HUGE_PAGE_BYTES,
            len: 4096,
        };
        outcome = front.request(0, io);
        if outcome.is_err() {
            break;
        }
    }
    let seen = seen(outcome)?;
    Ok(Held::nothing(seen).and(front).and(file).and(pages))
}

/// Writes data to the disk, has it read into `file`, written back from there, and read again.
fn by_way_of(target: &Target, file: BorrowedFd<'_>, bytes: u64) -> Result<(Seen, Front), Failure> {
    let mut front = Front::start(&target.socket)?;
    match seen(front.lend(file, LENT, bytes))? {
        Seen::Served => {}
        no => return Ok((no, front)),
    }
    let content = [0x77; 4096];
    front.check(0, &content)?;
    for (kind, sector) in [(T_IN, 0), (T_OUT, 64)] {
        let io = Io {
            kind,
            sector,
            gpa: GPA + LENT + bytes - 4096,
            len: 4096,
        };
        front.do_io(2, io)?;
    }
    front.do_io(3, Io::of_slot(3, T_IN, 64, 4096))?;
    let back: [u8; 4096] = front.ram.get(data_of(3))?;
    if back != content {
        return Err(wrong("lent memory", "its content is another".to_owned()));
    }
    Ok((Seen::Served, front))
}

fn on_fuse(target: &Target) -> Result<Held, Failure> {
    let fuse = SilentFuse::mount(&target.folder.join("fuse"))?;
    let file = fuse.open()?;
    let held = lend_in_table(target, file.as_fd(), RAM_BYTES)?;
    Ok(held.and(file).and(fuse))
}

fn lent_on_fuse(target: &Target) -> Result<Held, Failure> {
    let fuse = SilentFuse::mount(&target.folder.join("fuse"))?;
    let file = fuse.open()?;
    let mut front = Front::start(&target.socket)?;
    let mut outcome = seen(front.lend(file.as_fd(), LENT, RAM_BYTES))?;
    if outcome == Seen::Served {
        // Header and data are in memory whose file system never answers.
        front.describe_chain(&[(GPA + LENT, 16, 0), (GPA + LENT + 4096, 4096, WRITE)])?;
        front.offer(0)?;
        front.kick()?;
        outcome = seen(front.wait())?;
    }
    Ok(Held::nothing(outcome).and(front).and(file).and(fuse))
}

/// Files of 2 TiB, with one page of each in the table.
fn seventy_files(target: &Target) -> Result<Held, Failure> {
    let mut front = Front::start(&target.socket)?;
    for number in 1..=SPARSE_FILES {
        let file = Ram::new(2 * TIB)?;
        front.lend(file.file().as_fd(), LENT + number * (1 << 30), 4096)?;
    }
    let seen = seen(front.check(64, &[1; 4096]))?;
    Ok(Held::nothing(seen).and(front))
}

/// A page of a file that is longer than the limit of a front end.
fn long_file(target: &Target) -> Result<Held, Failure> {
    page_of(target, 600 * GIB)
}

/// The bookkeeping for a file grows with its length.
fn file_of_petabytes(target: &Target) -> Result<Held, Failure> {
    page_of(target, 4096 * TIB)
}

fn page_of(target: &Target, bytes: u64) -> Result<Held, Failure> {
    let front = Front::start(&target.socket)?;
    let file = Ram::new(bytes)?;
    let seen = seen(front.lend(file.file().as_fd(), LENT, 4096))?;
    Ok(Held::nothing(seen).and(front))
}

/// Sparse memfds of these sizes beside the ring's memory.
fn sparse(target: &Target, sizes: &[u64]) -> Result<Held, Failure> {
    let mut front = Front::start(&target.socket)?;
    for (number, bytes) in (0..).zip(sizes) {
        let file = Ram::new(*bytes)?;
        let at = LENT + number * 64 * TIB;
        let outcome = front.lend(file.file().as_fd(), at, *bytes);
        match seen(outcome)? {
            Seen::Served => {}
            no => return Ok(Held::nothing(no).and(front)),
        }
    }
    let seen = seen(front.check(64, &[1; 4096]))?;
    Ok(Held::nothing(seen).and(front))
}

/// `count` regions in all, of one page each except the ring's.
fn regions(target: &Target, count: u64) -> Result<Held, Failure> {
    let mut front = Front::start(&target.socket)?;
    let file = Ram::new(4096)?;
    for number in 1..count {
        let at = LENT + number * (1 << 21);
        match seen(front.lend(file.file().as_fd(), at, 4096))? {
            Seen::Served => {}
            no => return Ok(Held::nothing(no).and(front)),
        }
    }
    let seen = seen(front.check(64, &[1; 4096]))?;
    Ok(Held::nothing(seen).and(front))
}

fn come_and_go(target: &Target) -> Result<Held, Failure> {
    let mut front = Front::start(&target.socket)?;
    for number in 0..100 {
        let file = Ram::new(TIB / 8)?;
        let region = Region {
            gpa: GPA + LENT,
            bytes: 1 << 20,
            va: VA + LENT,
            offset: number << 20,
        };
        let add = wire::mem_region(request::ADD_MEM_REG, &region);
        front.peer.tell(add, &[file.file().as_fd()])?;
        let gone = wire::mem_region(request::REM_MEM_REG, &region);
        front.peer.tell(gone, &[])?;
    }
    let seen = seen(front.check(64, &[1; 4096]))?;
    Ok(Held::nothing(seen).and(front))
}

fn one_file(target: &Target) -> Result<Held, Failure> {
    let mut front = Front::start(&target.socket)?;
    let ram = front.ram.clone();
    for number in 0..32 {
        front.lend(ram.file().as_fd(), LENT + number * (1 << 30), RAM_BYTES)?;
    }
    let seen = seen(front.check(64, &[1; 4096]))?;
    Ok(Held::nothing(seen).and(front))
}

fn one_region(target: &Target, region: Region) -> Result<Held, Failure> {
    let front = Front::start(&target.socket)?;
    let file = Ram::new(RAM_BYTES)?;
    let message = wire::mem_region(request::ADD_MEM_REG, &region);
    let seen = seen(front.peer.tell(message, &[file.file().as_fd()]))?;
    Ok(Held::nothing(seen).and(front))
}

fn one_table(target: &Target, region: Region) -> Result<Held, Failure> {
    let peer = Peer::connect(&target.socket)?;
    greet(&peer, 0)?;
    let file = Ram::new(RAM_BYTES)?;
    let fd = file.file().as_fd();
    let table = wire::mem_table(2, &[good(), region]);
    let seen = seen(peer.tell(table, &[fd, fd]))?;
    Ok(Held::nothing(seen).and(peer))
}
