// SPDX-License-Identifier: Apache-2.0
//! A real guest whose memory is on all tiers: lz4, zstd, a disk and another host.
//!
//! `PAGETIDE_TIERS_MINUTES` sets how long its loads go on while the tiers fail; `target/release/soak --all-tiers` is
//! the same with all options.

use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use pagetide_addr::Hva;
use pagetide_guestkit::far::FarServer;
use pagetide_guestkit::small_disk::SmallDisk;
use pagetide_guestkit::soak::{self, Options, SoakError, Tiers};
use pagetide_guestkit::stage::{Skip, Stage};
use pagetide_guestkit::steps::{PATIENCE, VM, number, small, take_turn};
use pagetide_sys::process::read_memory;
use serde_json::json;

/// How long the loads go on, if nothing else is said.
const MINUTES: f64 = 0.5;
const PAGE_BYTES: usize = 4096;
/// Bytes that are read at a time.
const PART: usize = 16 * PAGE_BYTES;
/// Where the disk tier puts its first page.
const FIRST_PAGE_AT: u64 = 16 << 20;
/// Parts of the disk in which a bit is flipped.
const FLIPPED_SECTORS: u64 = 64;

#[test]
fn loads_find_nothing_wrong_while_disk_server_wire_and_daemon_fail() {
    let minutes = std::env::var("PAGETIDE_TIERS_MINUTES");
    let minutes = minutes.map_or(MINUTES, |text| text.parse().expect("minutes"));
    let options = Options {
        minutes,
        seed: 17,
        attacks: String::new(),
        tiers: Tiers::All,
    };
    match soak::run(&options) {
        Err(SoakError::Missing(why)) => eprintln!("SKIPPED: {why}"),
        Err(error) => panic!("{error}"),
        Ok(report) => {
            let seen = report.tiers.clone().unwrap_or_default();
            eprintln!("{seen:#?}");
            let failures = report.failures();
            assert!(failures.is_empty(), "{failures:#?}");
        }
    }
}

/// Where QEMU has its guest's RAM: the largest memfd that it has mapped.
fn ram_of(pid: u32) -> io::Result<(u64, u64)> {
    let maps = fs::read_to_string(format!("/proc/{pid}/maps"))?;
    let memfds = maps.lines().filter(|line| line.contains("/memfd:"));
    let ranges = memfds.filter_map(|line| {
        let (begin, end) = line.split(' ').next()?.split_once('-')?;
        let number = |text| u64::from_str_radix(text, 16).ok();
        Some((number(begin)?, number(end)?))
    });
    let largest = ranges.max_by_key(|(begin, end)| end - begin);
    largest.ok_or_else(|| io::Error::other("QEMU has mapped no memfd"))
}

/// Reads its memory as its vCPUs would; `None` for a page that cannot be had.
fn pages_of(pid: u32) -> io::Result<Vec<Option<Vec<u8>>>> {
    let (begin, end) = ram_of(pid)?;
    let mut pages = Vec::new();
    for part in (begin..end).step_by(PART) {
        let mut bytes = vec![0; PART];
        if read_memory(pid, Hva(part), &mut bytes).is_ok() {
            pages.extend(bytes.chunks(PAGE_BYTES).map(|page| Some(page.to_vec())));
            continue;
        }
        for (number, page) in (0..).zip(bytes.chunks_mut(PAGE_BYTES)) {
            let at = Hva(part + number * PAGE_BYTES as u64);
            let read = read_memory(pid, at, page);
            pages.push(read.is_ok().then(|| page.to_vec()));
        }
    }
    Ok(pages)
}

/// Flips a bit in each of so many sectors.
fn flip_bits(path: &Path, from: u64) -> io::Result<()> {
    let file = File::options().read(true).write(true).open(path)?;
    for sector in 0..FLIPPED_SECTORS {
        let mut byte = [0];
        let at = from + sector * 512 + 100;
        file.read_exact_at(&mut byte, at)?;
        byte[0] ^= 1;
        file.write_all_at(&byte, at)?;
    }
    file.sync_all()
}

/// A stage whose daemon has a disk and a server as tiers.
fn set(disk: &SmallDisk, server: &FarServer) -> Result<Stage, Skip> {
    Stage::set_with_flags(vec![
        format!(
            "--tiers=zero,same,lz4,remote:redis://127.0.0.1:{}=8M,disk:{}=128M",
            server.port(),
            disk.path().join("tier").display()
        ),
        "--sink-after=100ms".to_owned(),
    ])
}

fn until_sunk(stage: &Stage) {
    let sunk = || {
        // What is in use is spared, and comes later.
        let reclaimed = stage.product.client(["vm", "reclaim", VM]);
        reclaimed.map(drop)?;
        let vm = stage.product.show(VM)?;
        let (disk, remote) = (number(&vm, "disk_pages"), number(&vm, "remote_pages"));
        Ok(disk > 1_000 && remote > 1_000)
    };
    stage.until("memory on both", PATIENCE, sunk).expect("sunk");
}

#[test]
fn bits_flipped_on_the_disk_cost_the_pages_that_are_told_and_no_other() {
    let Some(program) = FarServer::program() else {
        return;
    };
    let folder = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../target/guest");
    let at = tempfile::tempdir().expect("a folder");
    let image = folder.join(format!("tier-{}.img", std::process::id()));
    let disk = match SmallDisk::mount(&image, &at.path().join("disk"), 192 << 20) {
        Ok(disk) => disk,
        Err(error) => return eprintln!("SKIPPED: no file system for a disk: {error}"),
    };
    let server = FarServer::that_keeps_all(program, &at.path().join("far")).expect("a server");
    let Some((_turn, mut stage)) = take_turn(|| set(&disk, &server)) else {
        return;
    };
    let mut guest = stage.boot(&small()).expect("a guest");
    guest.wait_for_work(PATIENCE).expect("work");
    // From here on its memory does not change.
    let mut qmp = guest.qmp().expect("a monitor");
    qmp.execute("stop", &json!({})).expect("QEMU obeys");
    let before = pages_of(guest.pid()).expect("its memory");
    stage.product.attach(guest.pid(), VM).expect("attach");
    until_sunk(&stage);
    flip_bits(&disk.path().join("tier"), FIRST_PAGE_AT).expect("flipped");
    let after = pages_of(guest.pid()).expect("its memory");
    assert_eq!(before.len(), after.len());
    let mut absent = 0;
    for (number, (before, after)) in before.iter().zip(&after).enumerate() {
        match after {
            Some(_) => assert!(before == after, "page {number}"),
            None => absent += 1,
        }
    }
    let vm = stage.product.show(VM).expect("show");
    assert!((1..=FLIPPED_SECTORS).contains(&absent), "{absent}");
    assert_eq!(number(&vm, "poisoned_pages"), absent, "{vm}");
    let refused = stage
        .product
        .client(["vm", "detach", VM])
        .expect("a client");
    let sentence = format!("{absent} pages of {VM} are lost");
    assert!(refused.said.contains(&sentence), "{}", refused.said);
    // Part of its memory is lost: it cannot go on.
    guest.kill();
}
