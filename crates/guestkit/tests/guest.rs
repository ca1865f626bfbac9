// SPDX-License-Identifier: Apache-2.0
//! The test guests themselves, without Pagetide: they must be sound before they may accuse.

use std::path::Path;
use std::time::Duration;

use pagetide_guest::params::Params;
use pagetide_guest::wire::Progress;
use pagetide_guestkit::guest::Guest;
use pagetide_guestkit::image::{self, Image};
use pagetide_guestkit::peer::StorageDaemon;
use pagetide_guestkit::qemu::{Disk, GuestSpec, Version};

const PATIENCE: Duration = Duration::from_secs(180);
const DISK_BYTES: u64 = 32 << 20;

fn image() -> Option<Image> {
    if let Err(error) = Version::installed() {
        eprintln!("SKIPPED: {error}");
        return None;
    }
    match image::prepare() {
        Ok(image) => Some(image),
        Err(error) => {
            eprintln!("SKIPPED: no guest image: {error}");
            None
        }
    }
}

fn spec(disk: Disk) -> GuestSpec {
    let file_bytes = if disk == Disk::Absent { 0 } else { DISK_BYTES };
    let work = Params {
        mem_bytes: 32 << 20,
        file_bytes,
        ..Params::default()
    };
    GuestSpec {
        ram_bytes: 256 << 20,
        disk,
        work,
        ..GuestSpec::default()
    }
}

fn new_image(folder: &Path) -> std::path::PathBuf {
    let path = folder.join("disk.raw");
    let file = std::fs::File::create(&path).expect("an image");
    file.set_len(DISK_BYTES).expect("its size");
    path
}

fn work_and_finish(guest: &mut Guest) -> Progress {
    guest.wait_for_work(PATIENCE).expect("work");
    let resident = guest.resident_bytes().expect("a memfd");
    assert!(resident > 64 << 20, "{resident} bytes resident");
    let round = |progress: &Progress| {
        progress.memory_rounds >= 2 && (progress.disk_bytes == 0 || progress.disk_rounds >= 2)
    };
    guest
        .wait_for("two rounds", PATIENCE, round)
        .expect("two rounds");
    let last = guest.finish(PATIENCE).expect("a sound end");
    assert_eq!(
        (last.memory_errors, last.disk_errors),
        (0, 0),
        "{}",
        guest.log_tails()
    );
    assert_eq!(last.final_memory_bytes, last.memory_bytes);
    assert_eq!(last.final_disk_bytes, last.disk_bytes);
    last
}

#[test]
fn guest_with_ordinary_disk_verifies_all_and_powers_off() {
    let Some(image) = image() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let disk = Disk::Image(new_image(folder.path()), ",discard=unmap");
    let mut guest = Guest::start(&spec(disk), &image, folder.path()).expect("a guest");
    let last = work_and_finish(&mut guest);
    assert_eq!(last.disk_bytes, DISK_BYTES);
}

#[test]
fn guest_without_disk_verifies_memory_and_powers_off() {
    let Some(image) = image() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let mut guest = Guest::start(&spec(Disk::Absent), &image, folder.path()).expect("a guest");
    let last = work_and_finish(&mut guest);
    assert_eq!(last.disk_bytes, 0);
}

#[test]
fn guest_with_vhost_user_disk_of_qemu_verifies_all_and_powers_off() {
    let Some(image) = image() else { return };
    let folder = tempfile::tempdir().expect("a folder");
    let socket = folder.path().join("disk.sock");
    let _daemon = match StorageDaemon::start(&new_image(folder.path()), &socket, 2) {
        Ok(daemon) => daemon,
        Err(error) => {
            eprintln!("SKIPPED: qemu-storage-daemon: {error}");
            return;
        }
    };
    let mut guest =
        Guest::start(&spec(Disk::VhostUser(socket)), &image, folder.path()).expect("a guest");
    let last = work_and_finish(&mut guest);
    assert_eq!(last.disk_bytes, DISK_BYTES);
}
