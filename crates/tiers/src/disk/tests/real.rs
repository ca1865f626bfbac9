// SPDX-License-Identifier: Apache-2.0
//! The disk tier on a real file, by the kernel's io_uring. Skipped where the directory of temporary files has
//! no direct I/O.

use super::super::*;
use crate::seal::{Key, Sealer};
use crate::{ExtentNo, Version};
use pagetide_addr::PageNo;
use pagetide_random::SplitMix64;
use std::fs::{File, OpenOptions, Permissions};
use std::os::unix::fs::{FileExt, MetadataExt, PermissionsExt};
use std::sync::mpsc::{Receiver, channel};
use tempfile::TempDir;

const LIMIT: u64 = 4 * SEGMENT_BYTES;
const VM: VmId = VmId(3);

/// A directory on a disk; `None` if there is none.
fn directory() -> Option<TempDir> {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    match DiskTier::open(&dir.path().join("probe"), LIMIT, Bounds::default()) {
        Ok(_) => Some(dir),
        Err(error @ (DiskError::NoDirectIo(_) | DiskError::InMemory(..))) => {
            eprintln!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

fn open(path: &Path) -> Result<FoundDisk, DiskError> {
    DiskTier::open(path, LIMIT, Bounds::default())
}

fn duty<T: Send + 'static>() -> (crate::tier::Done<T>, Receiver<Result<T, TierError>>) {
    let (tell, answer) = channel();
    let done = crate::tier::Done::new(TierKind::Disk, move |result| tell.send(result).unwrap());
    (done, answer)
}

fn read(tier: &DiskTier, place: Place) -> Result<Vec<u8>, TierError> {
    let (done, answer) = duty();
    tier.read(place, done);
    answer.recv().unwrap()
}

/// A stored page, as a pool would know it.
#[derive(Clone)]
struct Stored {
    page: PageNo,
    content: Vec<u8>,
    place: Place,
}

/// Stores the pages of one section as one batch; returns the entries of its extents too.
fn store(
    tier: &DiskTier,
    sealer: &Sealer,
    version: u64,
    contents: &[Vec<u8>],
) -> (Vec<Stored>, Vec<ExtentEntry>) {
    let granule = tier.granule_bytes();
    let bytes: Vec<usize> = contents
        .iter()
        .map(|content| crate::seal::sealed_bytes(content.len(), granule).unwrap())
        .collect();
    let rooms = tier.make_room(VM, &bytes).unwrap();
    let (mut stored, mut entries) = (Vec::new(), Vec::new());
    for (room, version) in rooms.into_iter().zip(version..) {
        let extent = ExtentName {
            vm: VM,
            number: ExtentNo(u32::try_from(version).unwrap()),
            version: Version(version),
        };
        let mut batch = Batch::new(extent, room);
        for _ in 0..room.pages {
            let page = PageNo(version * 1000 + stored.len() as u64);
            let content = contents[stored.len()].clone();
            let place = sealer.seal(page, &content, granule, &mut batch).unwrap();
            stored.push(Stored {
                page,
                content,
                place,
            });
        }
        let (done, answer) = duty();
        tier.write(batch, done);
        answer.recv().unwrap().unwrap();
        entries.push(ExtentEntry::new(extent.version, room));
    }
    (stored, entries)
}

fn contents(seed: u64, count: usize) -> Vec<Vec<u8>> {
    let mut random = SplitMix64::new(seed);
    let page = |_| {
        let len = 1 + random.index(4100);
        (0..len).map(|_| random.next_u64() as u8).collect()
    };
    (0..count).map(page).collect()
}

fn open_sealed(tier: &DiskTier, sealer: &Sealer, stored: &Stored) -> Option<Vec<u8>> {
    let mut sealed = read(tier, stored.place).unwrap();
    let opened = sealer.open(TierKind::Disk, stored.page, &stored.place, &mut sealed);
    opened.map(<[u8]>::to_vec).ok()
}

#[test]
fn pages_survive_the_daemon_and_everything_else_is_given_back() {
    let Some(dir) = directory() else { return };
    let path = dir.path().join("tier");
    let key = Key::generate().unwrap();
    let sealer = Sealer::new(&key);
    let tier = open(&path).unwrap().begin().unwrap();
    assert_eq!(path.metadata().unwrap().mode() & 0o777, 0o600);
    let (mut kept, mut entries) = (Vec::new(), Vec::new());
    for round in 0..6 {
        let (stored, more) = store(&tier, &sealer, 1 + round * 10, &contents(round, 300));
        kept.extend(stored);
        entries.extend(more);
    }
    for stored in &kept {
        assert_eq!(
            open_sealed(&tier, &sealer, stored).as_ref(),
            Some(&stored.content)
        );
    }
    let gone = kept.split_off(600);
    tier.forget(&gone.iter().map(|stored| stored.place).collect::<Vec<_>>());
    let stored_bytes = tier.figures().stored_bytes;
    assert!(tier.figures().read_latency.count >= 1800);
    drop(tier);

    let mut found = open(&path).unwrap();
    found.hold(VM, entries).unwrap();
    let tier = found.begin().unwrap();
    assert!(
        tier.figures().stored_bytes > stored_bytes,
        "all of the extents"
    );
    let places: Vec<Place> = kept.iter().map(|stored| stored.place).collect();
    tier.recover(VM, &places).unwrap();
    assert_eq!(tier.figures().stored_bytes, stored_bytes);
    let sealer = Sealer::new(&Key::from_pool(key.for_pool()));
    store(&tier, &sealer, 100, &contents(9, 512));
    for stored in &kept {
        assert_eq!(
            open_sealed(&tier, &sealer, stored).as_ref(),
            Some(&stored.content)
        );
    }
    tier.forget_vm(VM, &[]);
    drop(tier);
    drop(open(&path).unwrap().begin().unwrap());
    let blocks = path.metadata().unwrap().blocks();
    assert!(blocks * 512 < SEGMENT_BYTES, "{blocks} blocks are left");
}

#[test]
fn pages_beyond_a_lowered_limit_are_still_read() {
    let Some(dir) = directory() else { return };
    let path = dir.path().join("tier");
    let sealer = Sealer::new(&Key::generate().unwrap());
    let tier = open(&path).unwrap().begin().unwrap();
    let (mut kept, mut entries) = (Vec::new(), Vec::new());
    for round in 0..10 {
        let (stored, more) = store(&tier, &sealer, 1 + round, &vec![vec![1; 4096]; 400]);
        kept.extend(stored);
        entries.extend(more);
    }
    assert!(kept.last().unwrap().place.start >= SegmentNo(2).start());
    drop(tier);
    let lowered = DiskTier::open(&path, 2 * SEGMENT_BYTES, Bounds::default());
    let mut found = lowered.unwrap();
    found.hold(VM, entries).unwrap();
    let tier = found.begin().unwrap();
    for page in &kept {
        assert_eq!(
            open_sealed(&tier, &sealer, page).as_ref(),
            Some(&page.content)
        );
    }
}

#[test]
fn damaged_bytes_never_open() {
    let Some(dir) = directory() else { return };
    let path = dir.path().join("tier");
    let sealer = Sealer::new(&Key::generate().unwrap());
    let tier = open(&path).unwrap().begin().unwrap();
    let (old, _) = store(&tier, &sealer, 1, &contents(1, 40));
    let (stored, _) = store(&tier, &sealer, 2, &contents(2, 40));
    let file = OpenOptions::new()
        .read(true)
        .write(true)
        .open(&path)
        .unwrap();
    let mut random = SplitMix64::new(4);
    let offset = |place: &Place| place.start.byte_offset() + u64::from(place.position.0) * 512;
    for round in 0..2000 {
        let victim = &stored[random.index(stored.len())];
        let (at, len) = (
            offset(&victim.place),
            usize::from(victim.place.sectors) * 512,
        );
        let mut right = vec![0; len];
        file.read_exact_at(&mut right, at).unwrap();
        let mut wrong = right.clone();
        match random.below(5) {
            0 => wrong[random.index(len)] ^= 1 << random.below(8),
            1 => wrong.fill(random.next_u64() as u8),
            2 => wrong[random.index(len)..].fill(0),
            3 => wrong.rotate_left(1 + random.index(len - 1)),
            // What stood in another place, or there before.
            _ => {
                let other = &old[random.index(old.len())];
                file.read_exact_at(&mut wrong, offset(&other.place))
                    .unwrap();
            }
        }
        file.write_all_at(&wrong, at).unwrap();
        let opened = open_sealed(&tier, &sealer, victim);
        if wrong == right {
            assert_eq!(opened.as_ref(), Some(&victim.content));
        } else {
            assert_eq!(opened, None, "round {round}");
        }
        file.write_all_at(&right, at).unwrap();
    }
    for page in &stored {
        assert_eq!(
            open_sealed(&tier, &sealer, page).as_ref(),
            Some(&page.content)
        );
    }
}

#[test]
fn file_that_is_cut_off_has_no_page() {
    let Some(dir) = directory() else { return };
    let path = dir.path().join("tier");
    let sealer = Sealer::new(&Key::generate().unwrap());
    let tier = open(&path).unwrap().begin().unwrap();
    let (stored, _) = store(&tier, &sealer, 1, &contents(1, 4));
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(1 << 20).unwrap();
    assert_eq!(
        read(&tier, stored[0].place),
        Err(TierError::NotThere(TierKind::Disk))
    );
}

#[test]
fn disk_is_one_daemons_and_a_full_one_says_so() {
    let Some(dir) = directory() else { return };
    let path = dir.path().join("tier");
    let tier = DiskTier::open(&path, 2 * SEGMENT_BYTES, Bounds::default())
        .unwrap()
        .begin()
        .unwrap();
    let lock = File::open(&path).unwrap();
    let locked = rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    assert_eq!(locked, Err(rustix::io::Errno::WOULDBLOCK));
    for _ in 0..8 {
        assert_eq!(tier.make_room(VM, &[4096; 512]).unwrap().len(), 1);
    }
    let full = TierError::Full(TierKind::Disk);
    assert_eq!(tier.make_room(VM, &[4096]).unwrap_err(), full);
    assert_eq!(tier.health().standing, crate::Standing::Full);
    tier.forget_vm(VM, &[]);
    while tier.health().standing == crate::Standing::Full {
        std::thread::yield_now();
    }
    assert!(tier.make_room(VM, &[4096; 512]).is_ok());
    assert_eq!(tier.figures().limit_bytes, SEGMENT_BYTES);
    assert_eq!(tier.kind().to_string(), "disk");
}

#[test]
fn what_is_no_disk_of_ours_is_refused_with_its_reason() {
    let Some(dir) = directory() else { return };
    let at = |name: &str| dir.path().join(name);
    std::os::unix::fs::symlink(at("probe"), at("link")).unwrap();
    assert!(matches!(open(&at("link")), Err(DiskError::NotADisk(_))));
    assert!(matches!(open(dir.path()), Err(DiskError::NotADisk(_))));
    assert!(matches!(
        open(&at("nowhere/tier")),
        Err(DiskError::Kernel { .. })
    ));
    for content in [&b"somebody's letters"[..], &[0; 100_000]] {
        std::fs::write(at("letters"), content).unwrap();
        assert!(matches!(open(&at("letters")), Err(DiskError::NotOurs(_))));
        assert_eq!(std::fs::read(at("letters")).unwrap(), content);
    }
    drop(open(&at("shared")).unwrap());
    for mode in [0o620, 0o602] {
        std::fs::set_permissions(at("shared"), Permissions::from_mode(mode)).unwrap();
        assert!(matches!(
            open(&at("shared")),
            Err(DiskError::OthersCanWrite(_))
        ));
    }
    let small = DiskTier::open(&at("small"), 2 * SEGMENT_BYTES - 1, Bounds::default());
    assert!(matches!(small, Err(DiskError::TooSmall { .. })));
    if let Ok(memory) = tempfile::tempdir_in("/dev/shm") {
        let path = memory.path().join("tier");
        let refused = open(&path).map(drop);
        assert!(
            matches!(refused, Err(DiskError::InMemory(_, "tmpfs"))) || !is_tmpfs(memory.path()),
            "{refused:?}"
        );
    }
    let far = ExtentEntry {
        version: Version(1),
        start: SectorNo(LIMIT / 512),
        sectors: 8,
    };
    let mut found = open(&at("probe")).unwrap();
    assert!(matches!(
        found.hold(VM, [far]),
        Err(SectorError::Outside { .. })
    ));
}

fn is_tmpfs(path: &Path) -> bool {
    rustix::fs::statfs(path).is_ok_and(|stat| i128::from(stat.f_type) == 0x0102_1994)
}
