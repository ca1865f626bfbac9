// SPDX-License-Identifier: Apache-2.0
//! RAM that comes and goes in a squeezed guest: DIMMs and virtio-mem, through QEMU's monitor.

use std::fs::{self, File, OpenOptions};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::process::{Child, Command};
use std::time::Instant;

use pagetide_guest::params::Params;
use pagetide_guest::wire::{Command as Word, Progress};
use pagetide_guestkit::guest::Guest;
use pagetide_guestkit::plug::{
    drop_memory, eject, plug, plug_file, plugged_bytes, request, virtio_mem,
};
use pagetide_guestkit::qemu::{Disk, GuestSpec, QEMU, is_ram};
use pagetide_guestkit::report::Report;
use pagetide_guestkit::stage::Stage;
use pagetide_guestkit::steps::{
    self, PATIENCE, VM, let_go, limit_to_half, number, squeeze, take_turn, work,
};
use serde_json::Value;

use liar::Liar;

mod liar;

const DISK_BYTES: u64 = 32 << 20;
const DISK_4_MIB: u64 = 4 << 20;
/// The least that Linux takes in or gives up is 128 MiB.
const DIMM_BYTES: u64 = 256 << 20;
/// Most that a device of blocks gives; not the size of any other file.
const BLOCKS_BYTES: u64 = 2 * DIMM_BYTES;
const S_OK: u8 = 0;
const S_IOERR: u8 = 1;

/// A guest with a disk, to which RAM can be added.
fn growing(disk: Disk) -> GuestSpec {
    let spec = steps::with_disk(disk);
    let work = Params {
        file_bytes: DISK_BYTES,
        ..spec.work
    };
    GuestSpec {
        work,
        spare_ram_bytes: 1 << 30,
        ..spec
    }
}

/// A stage with a guest that works on a disk of the daemon.
fn set(stage: &mut Stage, spec: GuestSpec) -> Guest {
    let (socket, image) = stage.new_disk(DISK_BYTES).expect("an image");
    // A DIMM here may be a file on tmpfs.
    let allowed = ["--allow-ram", "tmpfs"];
    let served = stage.product.serve_disk_with(&socket, &image, &allowed);
    served.expect("a disk");
    let disk = Disk::VhostUser(socket);
    steps::working_guest(stage, &GuestSpec { disk, ..spec })
}

fn regions(stage: &Stage) -> Vec<Value> {
    let vm = stage.product.show(VM).expect("show");
    vm["regions"].as_array().cloned().unwrap_or_default()
}

/// Waits until the daemon knows so many RAM files, so many bytes in all, and nothing keeps it from evicting them.
fn until_known(stage: &Stage, files: usize, ram_bytes: u64) {
    let mut last = Value::Null;
    let known = || {
        let vm = stage.product.show(VM)?;
        let count = vm["regions"].as_array().map_or(0, Vec::len);
        let blockers = vm["eviction_blockers"].as_array().map_or(0, Vec::len);
        let is_known = count == files && number(&vm, "ram_bytes") == ram_bytes;
        last = vm;
        Ok(is_known && blockers == 0)
    };
    let what = format!("{files} RAM files known");
    if let Err(error) = stage.until(&what, PATIENCE, known) {
        panic!("{error}; last: {last}");
    }
}

/// Has the guest let go of a DIMM, working on nothing meanwhile: pages under direct I/O cannot be moved.
fn eject_quietly(guest: &mut Guest, name: &str) {
    guest.send(Word::Quiet).expect("send");
    eject(guest, name, PATIENCE).expect("ejected");
    guest.send(Word::Go).expect("send");
}

/// Has the guest take memory and buffers anew, and waits until both are in plugged RAM.
fn use_plugged(guest: &mut Guest) {
    guest.send(Word::Give).expect("send");
    let small = |p: &Progress| p.memory_bytes < 64 << 20;
    guest
        .wait_for("less memory", PATIENCE, small)
        .expect("given up");
    guest.send(Word::Take).expect("send");
    let before = guest.progress().map_or(0, |p| p.disk_plugged_bytes);
    let plugged = |p: &Progress| {
        p.memory_plugged_bytes >= 16 << 20 && p.disk_plugged_bytes >= before + (2 << 20)
    };
    guest
        .wait_for("work in plugged RAM", PATIENCE, plugged)
        .expect("plugged RAM in use");
}

/// Limits the guest to half of what is resident, and waits until that is so and some of the RAM
/// that was plugged in has been evicted. The guest works on and may take up more of it than it had
/// at first; but nobody else makes it less.
fn squeeze_plugged(stage: &Stage, guest: &Guest) {
    let of_plugged = || {
        let plugged = regions(stage).into_iter().skip(1);
        plugged.map(|r| number(&r, "resident_bytes")).sum::<u64>()
    };
    let (mut most, mut has_shrunk) = (of_plugged(), false);
    assert!(most > 4 << 20, "{most}");
    let ceiling = Report::ceiling_bytes(limit_to_half(stage, guest));
    let squeezed = || {
        let plugged = of_plugged();
        has_shrunk |= plugged < most;
        most = most.max(plugged);
        let resident = guest.resident_bytes().is_ok_and(|bytes| bytes <= ceiling);
        Ok(resident && has_shrunk)
    };
    if let Err(error) = stage.until("plugged RAM squeezed", PATIENCE, squeezed) {
        let vm = stage.product.show(VM).expect("show");
        panic!("at most {ceiling} bytes wanted, plugged RAM had {most}: {vm}; {error}");
    }
}

/// Lets the guest work until it has compared so much more of its disk.
fn work_on_disk(guest: &mut Guest, bytes: u64) {
    let goal = guest.progress().map_or(0, |p| p.disk_bytes_verified) + bytes;
    guest
        .wait_for("work on the disk", PATIENCE, |p| {
            p.disk_bytes_verified >= goal
        })
        .expect("the disk works");
}

/// The guest's RAM files, the one that was made last at the end.
fn ram_files(guest: &Guest) -> Vec<File> {
    let folder = format!("/proc/{}/fd", guest.pid());
    let mut numbers: Vec<u32> = fs::read_dir(folder)
        .expect("descriptors")
        .flatten()
        .filter(|entry| fs::read_link(entry.path()).is_ok_and(|to| is_ram(&to.to_string_lossy())))
        .filter_map(|entry| entry.file_name().to_string_lossy().parse().ok())
        .collect();
    numbers.sort_unstable();
    let open = |number: u32| {
        let path = format!("/proc/{}/fd/{number}", guest.pid());
        OpenOptions::new().read(true).write(true).open(path)
    };
    let files = numbers.into_iter().map(|number| open(number).expect("RAM"));
    files.collect()
}

/// Whether the daemon has a mapping or a descriptor of the file `ino`.
fn daemon_has(stage: &Stage, ino: u64) -> bool {
    let pid = stage.product.pid().expect("a daemon");
    let maps = fs::read_to_string(format!("/proc/{pid}/maps")).expect("maps");
    let mapped = maps
        .lines()
        .any(|line| line.split_whitespace().nth(4) == Some(&ino.to_string()));
    let fds = fs::read_dir(format!("/proc/{pid}/fd")).expect("descriptors");
    let open = |path: &std::path::Path| fs::metadata(path).is_ok_and(|stat| stat.ino() == ino);
    mapped || fds.flatten().any(|entry| open(&entry.path()))
}

#[test]
fn dimm_in_a_squeezed_guest_is_evicted_and_after_it_is_gone_dma_into_it_reaches_nothing() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let mut guest = set(&mut stage, growing(Disk::Absent));
    let boot_bytes = growing(Disk::Absent).ram_bytes;
    squeeze(&stage, &guest);
    plug(&guest, "a", DIMM_BYTES).expect("plugged");
    until_known(&stage, 2, boot_bytes + DIMM_BYTES);
    use_plugged(&mut guest);
    squeeze_plugged(&stage, &guest);
    work(&mut guest, 64 << 20);

    // Another front end, who got that RAM for its DMA as well.
    let (socket, image) = stage.new_disk(DISK_4_MIB).expect("an image");
    let mark = [0x5a; 4096];
    fs::write(&image, [mark, [0; 4096]].concat()).expect("an image");
    stage.product.serve_disk(&socket, &image).expect("a disk");
    let dimm = ram_files(&guest).pop().expect("a DIMM");
    let ino = dimm.metadata().expect("a file").ino();
    let mut other = Liar::connect(&socket).expect("a front end");
    other.lend(&dimm, DIMM_BYTES);

    eject_quietly(&mut guest, "a");
    let at = DIMM_BYTES - 4096;
    let there = || {
        let mut bytes = [0; 4096];
        dimm.read_exact_at(&mut bytes, at).expect("read");
        bytes
    };
    // The guest is done with it, but as long as it is mapped DMA reaches it.
    assert_eq!(other.read_into_lent(0, at), S_OK);
    assert_eq!(there(), mark, "DMA into RAM that is there");
    assert_eq!(other.read_into_lent(1, at), S_OK);
    assert_eq!(there(), [0; 4096], "cleared the same way");
    drop_memory(&guest, "a").expect("unmapped");
    until_known(&stage, 1, boot_bytes);
    assert_eq!(other.read_into_lent(0, at), S_IOERR);
    assert_eq!(there(), [0; 4096], "DMA into RAM that is gone");
    let device = stage.product.device(&socket).expect("a device");
    assert_eq!(device["state"], "connected", "{device}");
    drop((other, dimm));
    stage
        .until("the DIMM's file closed", PATIENCE, || {
            Ok(!daemon_has(&stage, ino))
        })
        .expect("closed");
    // What is left keeps to the limit; the DIMM's file is nobody's.
    let vm = stage.product.show(VM).expect("show");
    let ceiling = Report::ceiling_bytes(number(&vm, "limit_bytes"));
    let below = || Ok(guest.resident_bytes().is_ok_and(|bytes| bytes <= ceiling));
    stage
        .until("resident below the limit", PATIENCE, below)
        .expect("given back");
    work(&mut guest, 64 << 20);

    plug(&guest, "b", DIMM_BYTES).expect("plugged");
    until_known(&stage, 2, boot_bytes + DIMM_BYTES);
    use_plugged(&mut guest);
    let_go(&stage, &mut guest);
}

/// What can be seen from outside of a daemon that takes new RAM, in the order in which it comes.
#[derive(Clone, Copy, Debug)]
enum Sight {
    /// The daemon has the file: devices lose it next.
    Opened,
    /// The pool says that it is the VM's: it is to be watched, and its pages' words to be set.
    Recorded,
    /// It is one of the VM's regions.
    Listed,
}

const SIGHTS: [Sight; 3] = [Sight::Opened, Sight::Recorded, Sight::Listed];
/// Where a pool says whose it is.
const POOL_HEAD_BYTES: usize = 64 << 10;

/// Kills the daemon as soon as that is seen of the RAM file made last. The rest of the way is short:
/// whether it had come to its end by then is said.
fn kill_at(stage: &mut Stage, guest: &Guest, sight: Sight) {
    let files = ram_files(guest);
    let newest = files.last().expect("RAM").metadata().expect("a file");
    let pool = File::open(stage.folder().join("state/vm.pool")).expect("a pool");
    let deadline = Instant::now() + PATIENCE;
    let seen = |stage: &Stage| match sight {
        Sight::Opened => daemon_has(stage, newest.ino()),
        Sight::Recorded => is_recorded(&pool, newest.ino()),
        Sight::Listed => regions(stage).len() == files.len(),
    };
    while !seen(stage) {
        assert!(Instant::now() < deadline, "{sight:?} is not to be seen");
    }
    stage.product.kill();
    let log = stage.product.log_tail();
    let last = log.lines().last();
    let taken = last.is_some_and(|line| line.contains("RAM was plugged in"));
    let how_far = if taken {
        "when all was done"
    } else {
        "in the middle"
    };
    eprintln!("killed at {sight:?}, {how_far}");
}

/// Whether the pool names the file `ino`.
fn is_recorded(pool: &File, ino: u64) -> bool {
    let mut head = vec![0; POOL_HEAD_BYTES];
    let read = pool.read_at(&mut head, 0).expect("a pool");
    let named = format!("\"ino\":{ino}}}");
    String::from_utf8_lossy(&head[..read]).contains(&named)
}

#[test]
fn daemon_killed_while_dimms_come_and_go_and_restarted_verifies_all() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let mut guest = set(&mut stage, growing(Disk::Absent));
    let boot_bytes = growing(Disk::Absent).ram_bytes;
    squeeze(&stage, &guest);
    let mut ram_bytes = boot_bytes;
    let dimms = [
        ("a", DIMM_BYTES),
        ("b", DIMM_BYTES / 2),
        ("c", DIMM_BYTES / 2),
    ];
    for (sight, (name, bytes)) in SIGHTS.into_iter().zip(dimms) {
        plug(&guest, name, bytes).expect("plugged");
        kill_at(&mut stage, &guest, sight);
        stage.product.run().expect("a successor");
        ram_bytes += bytes;
        until_known(&stage, ram_files(&guest).len(), ram_bytes);
        // A QEMU whose back end dies in the middle of a handshake gives the disk up.
        work_on_disk(&mut guest, 1 << 20);
    }
    use_plugged(&mut guest);
    squeeze_plugged(&stage, &guest);
    stage.product.kill();
    stage.product.run().expect("a successor");
    until_known(&stage, 4, ram_bytes);
    work(&mut guest, 64 << 20);
    work_on_disk(&mut guest, 1 << 20);
    // Unplugged, and another one plugged, while nobody looks.
    eject_quietly(&mut guest, "a");
    stage.product.kill();
    drop_memory(&guest, "a").expect("unmapped");
    plug(&guest, "d", 2 * DIMM_BYTES).expect("plugged");
    stage.product.run().expect("a successor");
    until_known(&stage, 4, ram_bytes + DIMM_BYTES);
    use_plugged(&mut guest);
    let_go(&stage, &mut guest);
}

/// A process that maps all of `file`, so that nobody takes that for a VM's RAM.
struct Stranger(Child);

impl Stranger {
    fn map(file: &Path, bytes: u64) -> Self {
        let object = format!(
            "memory-backend-file,id=ram,size={bytes},share=on,mem-path={}",
            file.display()
        );
        let child = Command::new(QEMU)
            .args(["-nodefaults", "-display", "none", "-S", "-machine", "none"])
            .args(["-object", &object])
            .spawn();
        let mut stranger = Self(child.expect("a stranger"));
        let maps = format!("/proc/{}/maps", stranger.0.id());
        let name = file.to_string_lossy();
        while !fs::read_to_string(&maps).is_ok_and(|maps| maps.contains(&*name)) {
            let ended = stranger.0.try_wait().expect("a stranger");
            assert!(ended.is_none(), "the stranger maps nothing: {ended:?}");
            std::thread::yield_now();
        }
        stranger
    }
}

impl Drop for Stranger {
    fn drop(&mut self) {
        for done in [self.0.kill(), self.0.wait().map(drop)] {
            if let Err(error) = done {
                eprintln!("a stranger stays: {error}");
            }
        }
    }
}

#[test]
fn disk_io_in_a_dimm_is_served_before_the_dimm_is_taken_and_all_is_sound_after() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let mut guest = set(&mut stage, growing(Disk::Absent));
    let boot_bytes = growing(Disk::Absent).ram_bytes;
    squeeze(&stage, &guest);
    // Nobody takes it while another maps it, so there is time to see what happens before.
    let folder = tempfile::tempdir_in("/dev/shm").expect("a folder");
    let path = folder.path().join("qemu_back_mem.dimm");
    let file = File::create(&path).expect("a file");
    file.set_len(DIMM_BYTES).expect("its size");
    let stranger = Stranger::map(&path, DIMM_BYTES);
    plug_file(&guest, "a", &path, DIMM_BYTES).expect("plugged");
    use_plugged(&mut guest);
    let refused = || {
        let vm = stage.product.show(VM)?;
        Ok(vm["warnings"].to_string().contains("not managed"))
    };
    stage
        .until("the DIMM refused", PATIENCE, refused)
        .expect("refused");
    work_on_disk(&mut guest, 8 << 20);
    assert_eq!(regions(&stage).len(), 1);
    drop(stranger);
    until_known(&stage, 2, boot_bytes + DIMM_BYTES);
    squeeze_plugged(&stage, &guest);
    work(&mut guest, 64 << 20);
    let_go(&stage, &mut guest);
}

#[test]
fn virtio_mem_blocks_in_a_squeezed_guest_are_evicted_and_given_back() {
    let Some((_turn, mut stage)) = take_turn(Stage::set) else {
        return;
    };
    let spec = GuestSpec {
        extra: virtio_mem(BLOCKS_BYTES),
        ..growing(Disk::Absent)
    };
    let mut guest = set(&mut stage, spec);
    squeeze(&stage, &guest);
    assert_eq!(regions(&stage).len(), 2);
    request(&guest, DIMM_BYTES).expect("asked for");
    let has = |guest: &Guest, bytes| plugged_bytes(guest).is_ok_and(|now| now == bytes);
    let all = || Ok(has(&guest, DIMM_BYTES));
    stage
        .until("blocks plugged", PATIENCE, all)
        .expect("plugged");
    use_plugged(&mut guest);
    let file = ram_files(&guest)
        .into_iter()
        .find(|file| file.metadata().is_ok_and(|stat| stat.len() == BLOCKS_BYTES))
        .expect("RAM");
    let resident = || file.metadata().map_or(u64::MAX, |stat| stat.blocks() * 512);
    let before = resident();
    let ceiling = Report::ceiling_bytes(limit_to_half(&stage, &guest));
    let squeezed = || {
        let below = guest.resident_bytes().is_ok_and(|bytes| bytes <= ceiling);
        Ok(below && resident() < before)
    };
    stage
        .until("blocks squeezed", PATIENCE, squeezed)
        .expect("squeezed");
    work(&mut guest, 64 << 20);
    // Pages under direct I/O cannot be moved, and Linux tries again after most of a minute only.
    guest.send(Word::Quiet).expect("send");
    request(&guest, 0).expect("asked for");
    let none = || Ok(has(&guest, 0));
    stage
        .until("blocks given back", PATIENCE, none)
        .expect("given back");
    assert_eq!(resident(), 0);
    guest.send(Word::Go).expect("send");
    work(&mut guest, 64 << 20);
    let_go(&stage, &mut guest);
}
