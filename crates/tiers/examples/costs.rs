// SPDX-License-Identifier: Apache-2.0
//! What a slow tier costs on this machine, printed: the seal of a page by either cipher, the room for it, and
//! a read from a disk beside a bare one from the same file.
//!
//! ```sh
//! cargo run --release -p pagetide-tiers --example costs [DIRECTORY]
//! ```

use chacha20poly1305::ChaCha20Poly1305;
use chacha20poly1305::aead::{AeadInOut, KeyInit};
use pagetide_addr::PageNo;
use pagetide_random::SplitMix64;
use pagetide_sys::file_ring::Buffer;
use pagetide_tiers::disk::{Bounds, DiskTier, Owner, Source};
use pagetide_tiers::extent::{NoRoom, Sectors, SegmentNo};
use pagetide_tiers::seal::{Key, Sealer, sealed_bytes};
use pagetide_tiers::tier::Done;
use pagetide_tiers::{
    Batch, BlockSize, ExtentName, ExtentNo, Place, Room, SectorNo, SlowTier, TierError, TierKind,
    Version, VmId,
};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::Instant;

const VM: VmId = VmId(1);
const ROUNDS: u32 = 20_000;

fn main() -> Result<(), Box<dyn Error>> {
    let directory = std::env::args_os()
        .nth(1)
        .map_or(PathBuf::from("/var/tmp"), PathBuf::from);
    for bytes in [2000, 4096] {
        let aes = seal_ns(bytes)?;
        let chacha = chacha_ns(bytes)?;
        eprintln!(
            "{bytes} bytes: AES-256-GCM seals in {:.0} ns and opens in {:.0} ns; ChaCha20-Poly1305 seals in {chacha:.0} ns",
            aes.0, aes.1
        );
    }
    eprintln!("room: {:.0} ns a page on a full disk of 64 GiB", room_ns());
    disk(&directory)
}

fn batch(version: u64, room: Room) -> Batch {
    let extent = ExtentName {
        vm: VM,
        number: ExtentNo(1),
        version: Version(version),
    };
    Batch::new(extent, room)
}

/// Nanoseconds to seal and to open a page.
fn seal_ns(bytes: usize) -> Result<(f64, f64), Box<dyn Error>> {
    let sealer = Sealer::new(&Key::generate()?);
    let content = vec![7; bytes];
    let room = Room {
        kind: TierKind::Remote,
        start: SectorNo(0),
        sectors: 0,
        pages: 512,
    };
    let mut places: Vec<(Place, Vec<u8>)> = Vec::new();
    let began = Instant::now();
    for version in 0..u64::from(ROUNDS / 500) {
        let mut batch = batch(version, room);
        for page in 0..500 {
            places.push((
                sealer.seal(PageNo(page), &content, 1, &mut batch)?,
                Vec::new(),
            ));
        }
        let from = places.len() - 500;
        for (place, page) in places[from..].iter_mut().zip(batch.pages()) {
            place.1 = page.bytes.to_vec();
        }
    }
    let sealed = began.elapsed();
    let began = Instant::now();
    for (index, (place, sealed)) in places.iter_mut().enumerate() {
        let page = PageNo(index as u64 % 500);
        sealer.open(TierKind::Remote, page, place, sealed)?;
    }
    let ns = |took: std::time::Duration| took.as_secs_f64() * 1e9 / f64::from(ROUNDS);
    Ok((ns(sealed), ns(began.elapsed())))
}

fn chacha_ns(bytes: usize) -> Result<f64, Box<dyn Error>> {
    let cipher = ChaCha20Poly1305::new(&[1; 32].into());
    let mut content = vec![7; bytes];
    let began = Instant::now();
    for round in 0..ROUNDS {
        let mut nonce = [0; 12];
        nonce[..4].copy_from_slice(&round.to_le_bytes());
        let tag =
            cipher.encrypt_inout_detached(&nonce.into(), &[0; 17], content.as_mut_slice().into());
        std::hint::black_box(tag.map_err(|_| "the cipher refused")?);
    }
    Ok(began.elapsed().as_secs_f64() * 1e9 / f64::from(ROUNDS))
}

/// Nanoseconds to take and to free the sectors of a page, on a disk that is full. Whole rooms are freed, so it is
/// hardly fragmented.
fn room_ns() -> f64 {
    let mut sectors = Sectors::new(64 << 6, SegmentNo(64 << 6), BlockSize::Bytes512);
    let mut random = SplitMix64::new(1);
    let mut rooms: Vec<Room> = Vec::new();
    let mut began = Instant::now();
    let mut pages = 0;
    while pages < 4_000_000 {
        let sizes: Vec<u16> = (0..300)
            .map(|_| u16::try_from(1 + random.below(9)).unwrap_or(9))
            .collect();
        match sectors.take(VM, &sizes) {
            Ok(more) => {
                pages += sizes.len();
                rooms.extend(more);
            }
            Err(NoRoom::Segment) => {
                if let Some(segment) = sectors.begin_segment() {
                    sectors.add_segment(VM, segment);
                }
                // The figure is of a disk that is full.
                began = Instant::now();
                pages = 0;
            }
            Err(_) => {
                for _ in 0..8 {
                    let room = rooms.swap_remove(random.index(rooms.len()));
                    if let Ok(Some(segment)) = sectors.free(VM, room.start, room.sectors) {
                        sectors.end_transit(segment);
                    }
                }
            }
        }
    }
    began.elapsed().as_secs_f64() * 1e9 / 4_000_000.0
}

fn disk(directory: &Path) -> Result<(), Box<dyn Error>> {
    let dir = tempfile::tempdir_in(directory)?;
    let path = dir.path().join("tier");
    let owner = Owner {
        state_dir: dir.path().to_owned(),
        boot: 1,
        has_pages: |_, _| false,
    };
    let limit_bytes = Some(1 << 30);
    let source = Source {
        path: path.clone(),
        limit_bytes,
        owner,
    };
    let tier = DiskTier::open(source, Bounds::default(), None)?.begin()?;
    let sealer = Sealer::new(&Key::generate()?);
    let granule = tier.granule_bytes();
    let places = written(&tier, &sealer, granule)?;
    read_in_turns(&tier, &path, &places)?;
    eprintln!("{:?}", tier.figures());
    Ok(())
}

/// Writes a batch after the other; where its pages are.
fn written(
    tier: &DiskTier,
    sealer: &Sealer,
    granule_bytes: usize,
) -> Result<Vec<Place>, Box<dyn Error>> {
    let content = vec![7; 2000];
    let mut places = Vec::new();
    let began = Instant::now();
    for version in 1..=200 {
        let lengths = vec![sealed_bytes(content.len(), granule_bytes)?; 512];
        let rooms = loop {
            match tier.make_room(VM, &lengths) {
                // Its segment is being allocated.
                Err(TierError::Busy(_)) => std::thread::yield_now(),
                made => break made?,
            }
        };
        for room in rooms {
            let mut batch = batch(version, room);
            for _ in 0..room.pages {
                places.push(sealer.seal(PageNo(1), &content, granule_bytes, &mut batch)?);
            }
            let (tell, written) = channel();
            tier.write(
                batch,
                Done::new(TierKind::Disk, move |result| drop(tell.send(result))),
            );
            written.recv()??;
        }
    }
    let us = began.elapsed().as_secs_f64() * 1e6 / places.len() as f64;
    eprintln!("written: {us:.1} us a page, one batch at a time");
    Ok(places)
}

/// One after the other, as a VM asks that walks through stored memory; through the tier and without it in turns, as
/// disks vary.
fn read_in_turns(tier: &DiskTier, path: &Path, places: &[Place]) -> Result<(), Box<dyn Error>> {
    let bare = rustix::fs::open(
        path,
        rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::DIRECT,
        rustix::fs::Mode::empty(),
    )?;
    let mut buffer = Buffer::zeroed(4096);
    let mut random = SplitMix64::new(2);
    let (mut ours, mut theirs) = (Vec::new(), Vec::new());
    for turn in 0..100 {
        for _ in 0..100 {
            let place = places[random.index(places.len())];
            let began = Instant::now();
            if turn % 2 == 0 {
                let (tell, read) = channel();
                tier.read(
                    place,
                    Done::new(TierKind::Disk, move |result| drop(tell.send(result))),
                );
                read.recv()??;
                ours.push(began.elapsed());
            } else {
                let at = place.start.byte_offset() + u64::from(place.position.0) * 512;
                rustix::io::pread(&bare, &mut buffer[..], at)?;
                theirs.push(began.elapsed());
            }
        }
    }
    ours.sort_unstable();
    theirs.sort_unstable();
    for part in [50, 99] {
        let at = ours.len() * part / 100;
        eprintln!(
            "read, {part} %: {:?} through the tier's thread, {:?} by a bare pread",
            ours[at], theirs[at]
        );
    }
    Ok(())
}
