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
use std::path::Path;
use std::sync::mpsc::{Receiver, channel};
use tempfile::TempDir;

const LIMIT: u64 = 4 * SEGMENT_BYTES;
const VM: VmId = VmId(3);

/// A directory on a disk; `None` if there is none.
fn directory() -> Option<TempDir> {
    let dir = tempfile::tempdir_in("/var/tmp").unwrap();
    match open(&dir.path().join("probe")) {
        Ok(_) => Some(dir),
        Err(error @ (DiskError::NoDirectIo(_) | DiskError::InMemory(..))) => {
            eprintln!("SKIPPED: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A daemon that has pools with pages on any disk.
fn owner(state_dir: &str) -> Owner {
    Owner {
        state_dir: state_dir.into(),
        boot: 9,
        has_pages: |_, _| true,
    }
}

fn source(path: &Path, limit_bytes: u64) -> Source {
    Source {
        path: path.to_owned(),
        limit_bytes: Some(limit_bytes),
        owner: owner("/run/one"),
    }
}

fn open(path: &Path) -> Result<FoundDisk, DiskError> {
    DiskTier::open(source(path, LIMIT), Bounds::default(), None)
}

/// Room, once its segment is there.
fn room(tier: &DiskTier, sealed_bytes: &[usize]) -> Result<Vec<Room>, TierError> {
    loop {
        match tier.make_room(VM, sealed_bytes) {
            Err(TierError::Busy(_)) => std::thread::yield_now(),
            made => return made,
        }
    }
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
    let rooms = room(tier, &bytes).unwrap();
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
    let lowered = DiskTier::open(source(&path, 2 * SEGMENT_BYTES), Bounds::default(), None);
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
    let tier = DiskTier::open(source(&path, 2 * SEGMENT_BYTES), Bounds::default(), None)
        .unwrap()
        .begin()
        .unwrap();
    let lock = File::open(&path).unwrap();
    let locked = rustix::fs::flock(&lock, rustix::fs::FlockOperation::NonBlockingLockExclusive);
    assert_eq!(locked, Err(rustix::io::Errno::WOULDBLOCK));
    for _ in 0..8 {
        assert_eq!(room(&tier, &[4096; 512]).unwrap().len(), 1);
    }
    let full = TierError::Full(TierKind::Disk);
    assert_eq!(room(&tier, &[4096]).unwrap_err(), full);
    assert_eq!(tier.health().standing, crate::Standing::Full);
    tier.forget_vm(VM, &[]);
    while tier.health().standing == crate::Standing::Full {
        std::thread::yield_now();
    }
    assert!(room(&tier, &[4096; 512]).is_ok());
    assert_eq!(tier.figures().limit_bytes, SEGMENT_BYTES);
    assert_eq!(tier.kind().to_string(), "disk");
}

fn as_owner(path: &Path, owner: Owner) -> Result<DiskTier, DiskError> {
    let source = Source {
        owner,
        ..source(path, LIMIT)
    };
    DiskTier::open(source, Bounds::default(), None)?.begin()
}

/// Its daemon is dead, or hands over to another program just now.
#[test]
fn disk_with_pages_of_another_daemon_is_refused_and_one_without_is_taken() {
    let Some(dir) = directory() else { return };
    let path = dir.path().join("tier");
    let sealer = Sealer::new(&Key::generate().unwrap());
    let tier = open(&path).unwrap().begin().unwrap();
    let (stored, entries) = store(&tier, &sealer, 1, &contents(1, 40));
    drop(tier);
    let refused = as_owner(&path, owner("/run/other")).unwrap_err();
    assert!(refused.to_string().contains("/run/one"), "{refused}");
    let mut found = open(&path).unwrap();
    found.hold(VM, entries).unwrap();
    let tier = found.begin().unwrap();
    for page in &stored {
        let opened = open_sealed(&tier, &sealer, page);
        assert_eq!(opened.as_ref(), Some(&page.content));
    }
    // What is nobody's may be taken: its pools have no page, or did not outlive the host.
    drop(tier);
    let other = owner("/run/other");
    let without_pages = Owner {
        has_pages: |home, _| home != Path::new("/run/one"),
        ..other.clone()
    };
    drop(as_owner(&path, without_pages).unwrap());
    drop(as_owner(&path, owner("/run/third")).unwrap());
    let tier = as_owner(&path, owner("/run/third")).unwrap();
    store(&tier, &sealer, 9, &contents(1, 40));
    drop(tier);
    assert!(as_owner(&path, owner("/run/other")).is_err());
    drop(as_owner(&path, Owner { boot: 10, ..other }).unwrap());
}

/// Waits for the threads of a tier.
fn until_working(tier: &DiskTier) {
    while tier.health().standing != crate::Standing::Working {
        std::thread::yield_now();
    }
}

#[test]
fn disk_that_is_missing_is_awaited_and_has_its_pages_when_it_is_back() {
    let Some(dir) = directory() else { return };
    let (path, away) = (dir.path().join("tier"), dir.path().join("away"));
    let sealer = Sealer::new(&Key::generate().unwrap());
    let tier = open(&path).unwrap().begin().unwrap();
    let (mut kept, mut entries) = (Vec::new(), Vec::new());
    for round in 0..10 {
        let (stored, more) = store(&tier, &sealer, 1 + round, &vec![vec![1; 4096]; 400]);
        kept.extend(stored);
        entries.extend(more);
    }
    drop(tier);
    let id = open(&path).unwrap().id();
    std::fs::rename(&path, &away).unwrap();
    let missing = DiskError::NotADisk(path.clone());
    let awaited = |id| FoundDisk::awaited(source(&path, LIMIT), Bounds::default(), id, &missing);
    let mut found = awaited(Some(id)).unwrap();
    assert_eq!((found.id(), found.is_awaited()), (id, true));
    found.hold(VM, entries).unwrap();
    let tier = found.begin().unwrap();
    let places: Vec<Place> = kept.iter().map(|page| page.place).collect();
    tier.recover(VM, &places).unwrap();
    assert!(matches!(
        tier.health().standing,
        crate::Standing::Gone { .. }
    ));
    let gone = |error: TierError| matches!(error, TierError::Gone { .. });
    assert!(gone(read(&tier, places[0]).unwrap_err()));
    assert!(gone(tier.make_room(VM, &[512]).unwrap_err()));
    // Pages are given up meanwhile, and another disk lies there for a while.
    tier.forget(&places[..1800]);
    let stored_bytes = tier.figures().stored_bytes;
    drop(open(&path).unwrap().begin().unwrap());
    while !format!("{:?}", tier.health().standing).contains("another disk") {
        std::thread::yield_now();
    }
    std::fs::rename(&away, &path).unwrap();
    until_working(&tier);
    assert_eq!(tier.figures().stored_bytes, stored_bytes);
    assert_eq!(tier.figures().limit_bytes, LIMIT - SEGMENT_BYTES);
    for page in &kept[1800..] {
        let opened = open_sealed(&tier, &sealer, page);
        assert_eq!(opened.as_ref(), Some(&page.content));
    }
    let (more, _) = store(&tier, &sealer, 100, &contents(3, 300));
    for page in kept[1800..].iter().chain(&more) {
        let opened = open_sealed(&tier, &sealer, page);
        assert_eq!(opened.as_ref(), Some(&page.content));
    }
}

#[test]
fn awaited_disk_serves_the_others_though_tables_name_what_is_beyond_its_end() {
    let Some(dir) = directory() else { return };
    let (path, away) = (dir.path().join("tier"), dir.path().join("away"));
    let sealer = Sealer::new(&Key::generate().unwrap());
    let tier = open(&path).unwrap().begin().unwrap();
    let (kept, entries) = store(&tier, &sealer, 1, &contents(4, 100));
    drop(tier);
    let id = open(&path).unwrap().id();
    std::fs::rename(&path, &away).unwrap();
    let missing = DiskError::NotADisk(path.clone());
    let mut found =
        FoundDisk::awaited(source(&path, LIMIT), Bounds::default(), Some(id), &missing).unwrap();
    found.hold(VM, entries).unwrap();
    let (damaged, ended) = (VmId(6), VmId(7));
    let beyond = |segments: u64| ExtentEntry {
        version: Version(1),
        start: SectorNo((LIMIT + segments * SEGMENT_BYTES) / SECTOR_BYTES as u64),
        sectors: 8,
    };
    found.hold(damaged, [beyond(3)]).unwrap();
    found.hold(ended, [beyond(5)]).unwrap();
    let tier = found.begin().unwrap();
    let places: Vec<Place> = kept.iter().map(|page| page.place).collect();
    tier.recover(VM, &places).unwrap();
    tier.forget_vm(ended, &[]);
    std::fs::rename(&away, &path).unwrap();
    until_working(&tier);
    let nowhere = Place {
        start: beyond(3).start,
        ..places[0]
    };
    let not_there = Err(TierError::NotThere(TierKind::Disk));
    assert_eq!(read(&tier, nowhere), not_there);
    tier.forget_vm(damaged, &[]);
    for round in 0..3 {
        let (more, _) = store(&tier, &sealer, 100 + round, &contents(5, 20));
        for page in kept.iter().chain(&more) {
            let opened = open_sealed(&tier, &sealer, page);
            assert_eq!(opened.as_ref(), Some(&page.content));
        }
    }
}

#[test]
fn disk_with_a_name_is_not_taken_over_while_it_is_not_known_who_has_pages_there() {
    let Some(dir) = directory() else { return };
    let (path, away) = (dir.path().join("tier"), dir.path().join("away"));
    let id = open(&path).unwrap().id();
    std::fs::rename(&path, &away).unwrap();
    let missing = DiskError::NotADisk(path.clone());
    let mut found =
        FoundDisk::awaited(source(&path, LIMIT), Bounds::default(), None, &missing).unwrap();
    found.keep_all();
    let seen = |wanted| open::open(&source(&path, LIMIT), wanted, Duration::ZERO).map(drop);
    assert!(seen(found.wanted).is_err(), "nothing is made in its place");
    assert!(!path.exists());
    std::fs::rename(&away, &path).unwrap();
    let refused = seen(found.wanted).unwrap_err();
    assert!(matches!(refused, DiskError::OfSomebody(_)), "{refused}");
    assert_eq!(open(&path).unwrap().id(), id);
    // Without that doubt it would have been named anew.
    seen(Wanted::Named(found.id())).unwrap();
    assert_eq!(open(&path).unwrap().id(), found.id());
}

#[test]
fn disk_that_nobody_has_pages_on_and_is_missing_gets_the_name_that_it_was_given() {
    let Some(dir) = directory() else { return };
    let folder = dir.path().join("later");
    let path = folder.join("tier");
    let missing = open(&path).map(drop).unwrap_err();
    let found =
        FoundDisk::awaited(source(&path, LIMIT), Bounds::default(), None, &missing).unwrap();
    let id = found.id();
    let tier = found.begin().unwrap();
    assert!(matches!(
        tier.health().standing,
        crate::Standing::Gone { .. }
    ));
    std::fs::create_dir(&folder).unwrap();
    until_working(&tier);
    let sealer = Sealer::new(&Key::generate().unwrap());
    store(&tier, &sealer, 1, &contents(1, 40));
    drop(tier);
    assert_eq!(open(&path).unwrap().id(), id);
}

#[test]
fn awaited_tier_ends_at_once() {
    let Some(dir) = directory() else { return };
    let path = dir.path().join("nowhere/tier");
    let missing = DiskError::NotADisk(path.clone());
    let found = FoundDisk::awaited(source(&path, LIMIT), Bounds::default(), None, &missing);
    let tier = found.unwrap().begin().unwrap();
    let (done, answer) = duty();
    let sealer = Sealer::new(&Key::generate().unwrap());
    let room = Room {
        kind: TierKind::Disk,
        start: SectorNo(0),
        sectors: 8,
        pages: 1,
    };
    let extent = ExtentName {
        vm: VM,
        number: ExtentNo(1),
        version: Version(1),
    };
    let mut batch = Batch::new(extent, room);
    let place = sealer.seal(PageNo(1), &[1; 100], 512, &mut batch).unwrap();
    tier.read(place, done);
    assert!(answer.recv().unwrap().is_err());
    drop(tier);
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
    let small = DiskTier::open(
        source(&at("small"), 2 * SEGMENT_BYTES - 1),
        Bounds::default(),
        None,
    );
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
