// SPDX-License-Identifier: Apache-2.0
//! Disks as the operator gives them out: to one at a time, to whom they are meant for, each by a name
//! of its own, and the same after a restart. The peers are QEMU's own programs.

use std::fs::{self, File};
use std::io::ErrorKind;
use std::os::unix::fs::{MetadataExt, symlink};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use pagetide_guestkit::peer::StorageDaemon;
use pagetide_guestkit::product::{Product, is_listening};
use pagetide_guestkit::stage::RunFolder;
use pagetide_guestkit::steps::PATIENCE;
use rustix::fs::{CWD, FileType, Mode, mknodat};
use serde_json::Value;

const DISK_BYTES: u64 = 4 << 20;
/// Some group that is not root's: libvirt's `kvm` is numbered otherwise on each host.
const GROUP: u32 = 64_055;
const USER: u32 = 64_056;
/// What a successor logs that finds an image in use.
const SUCCESSOR_WAITS: &str = "waiting for what another process still has of a device";

/// A daemon and a folder for images and sockets.
struct Scene {
    product: Product,
    folder: RunFolder,
}

impl Scene {
    /// `None` where the product cannot be tried, after saying why.
    fn set() -> Option<Self> {
        if let Err(error) = Product::binary() {
            eprintln!("SKIPPED: {error}: build it with `cargo build --release -p pagetide`");
            return None;
        }
        let folder = RunFolder::new().expect("a folder");
        Some(Self {
            product: daemon(folder.path(), "state"),
            folder,
        })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn image(&self, name: &str) -> PathBuf {
        let path = self.path(name);
        let file = File::create(&path).expect("an image");
        file.set_len(DISK_BYTES).expect("its size");
        path
    }

    /// Asks for a disk, and returns what was said: nothing, or the refusal.
    fn ask(&self, socket: &str, image: &Path, more: &[&str]) -> Result<(), String> {
        ask(&self.product, &self.path(socket), image, more)
    }

    fn device(&self, socket: &str) -> Value {
        let device = self.product.device(&self.path(socket));
        device.expect("a device")
    }

    fn remove(&self, socket: &str) {
        let path = self.path(socket);
        let words = ["dpu", "remove", "--socket"].map(str::to_owned);
        let words = words.into_iter().chain([path.display().to_string()]);
        let answer = self.product.client(words);
        answer.and_then(|a| a.success()).expect("removed");
    }

    fn restart(&mut self) {
        self.product.kill();
        self.product.run().expect("it starts again");
    }
}

fn daemon(folder: &Path, name: &str) -> Product {
    let binary = Product::binary().expect("built");
    let (state, log) = (folder.join(name), folder.join(format!("{name}.log")));
    Product::start(&binary, &state, &log).expect("a daemon")
}

fn ask(product: &Product, socket: &Path, image: &Path, more: &[&str]) -> Result<(), String> {
    let (socket, image) = (socket.display().to_string(), image.display().to_string());
    let words = ["dpu", "blk", "--socket", &socket, "--image", &image];
    let answer = product
        .client([&words[..], more].concat())
        .expect("a client");
    match answer.status.code() {
        Some(0) => Ok(()),
        code => {
            assert_eq!(code, Some(2), "{}", answer.said);
            Err(answer.said)
        }
    }
}

/// Whether QEMU's image tools may write the image now.
fn qemu_may_write(image: &Path) -> Option<bool> {
    let mut command = Command::new("qemu-io");
    command
        .args(["-f", "raw", "-c", "write -P 7 0 512"])
        .arg(image);
    match command.output() {
        Ok(output) => {
            let said = String::from_utf8_lossy(&output.stderr).into_owned();
            let may = output.status.success();
            assert!(may || said.contains("lock"), "{said}");
            Some(may)
        }
        Err(error) => {
            eprintln!("SKIPPED: qemu-io: {error}");
            None
        }
    }
}

/// QEMU's back end, as soon as nobody has the image: what a killed daemon has left of its locks goes a
/// moment after it.
fn peer(image: &Path, socket: &Path) -> Option<StorageDaemon> {
    let began = Instant::now();
    loop {
        match StorageDaemon::start(image, socket, 1) {
            Ok(peer) => return Some(peer),
            Err(error) if error.kind() == ErrorKind::NotFound => {
                eprintln!("SKIPPED: qemu-storage-daemon: {error}");
                return None;
            }
            Err(error) => assert!(began.elapsed() < PATIENCE, "{error}"),
        }
    }
}

#[test]
fn image_is_served_once_whatever_it_is_called_and_by_one_daemon() {
    let Some(scene) = Scene::set() else { return };
    let image = scene.image("image");
    let (hard, soft) = (scene.path("hard"), scene.path("soft"));
    fs::hard_link(&image, &hard).expect("a hard link");
    symlink(&image, &soft).expect("a symbolic link");
    scene.ask("a", &image, &[]).expect("served");
    let second = daemon(scene.folder.path(), "second");
    for name in [&image, &hard, &soft] {
        let said = scene.ask("b", name, &[]).expect_err("served twice");
        assert!(said.contains("a already"), "{said}");
        let said = scene
            .ask("b", name, &["--read-only"])
            .expect_err("a reader");
        assert!(said.contains("--shared"), "{said}");
        let elsewhere = ask(&second, &scene.path("c"), name, &[]);
        let said = elsewhere.expect_err("served by two daemons");
        assert!(said.contains("in use by another"), "{said}");
    }
    assert_eq!(scene.product.devices().expect("a list").len(), 1);
    scene.remove("a");
    ask(&second, &scene.path("c"), &hard, &[]).expect("free at once");
}

#[test]
fn image_that_qemu_serves_is_refused_and_qemu_refuses_ours() {
    let Some(scene) = Scene::set() else { return };
    let image = scene.image("image");
    let Some(theirs) = peer(&image, &scene.path("theirs")) else {
        return;
    };
    let said = scene.ask("ours", &image, &[]).expect_err("QEMU has it");
    assert!(said.contains("in use by another"), "{said}");
    drop(theirs);
    let Some(free) = qemu_may_write(&image) else {
        return;
    };
    assert!(free);
    scene.ask("ours", &image, &[]).expect("QEMU is gone");
    assert_eq!(qemu_may_write(&image), Some(false));
    scene.remove("ours");
    assert_eq!(qemu_may_write(&image), Some(true));
}

/// A block device that is a file, and a second node of it; gone on drop.
struct Loop {
    disk: PathBuf,
    node: PathBuf,
}

impl Loop {
    fn over(file: &Path) -> Option<Self> {
        let mut command = Command::new("losetup");
        match command.args(["--find", "--show"]).arg(file).output() {
            Ok(output) if output.status.success() => {
                let disk = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
                // Where devices may be opened: other file systems are often mounted `nodev`.
                let node = PathBuf::from(format!("/dev/pagetide-guestkit-{}", std::process::id()));
                let number = fs::metadata(&disk).expect("a device").rdev();
                let (kind, mode) = (FileType::BlockDevice, Mode::RUSR | Mode::WUSR);
                mknodat(CWD, &node, kind, mode, number).expect("a node");
                Some(Self { disk, node })
            }
            other => {
                eprintln!("SKIPPED: no loop device: {other:?}");
                None
            }
        }
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.node) {
            eprintln!("guestkit: {} stays: {error}", self.node.display());
        }
        let mut command = Command::new("losetup");
        match command.arg("--detach").arg(&self.disk).status() {
            Ok(status) if status.success() => {}
            other => eprintln!("guestkit: {} stays: {other:?}", self.disk.display()),
        }
    }
}

#[test]
fn block_device_is_served_once_whatever_its_node_and_not_while_the_kernel_has_it() {
    let Some(mut scene) = Scene::set() else {
        return;
    };
    let Some(device) = Loop::over(&scene.image("image")) else {
        return;
    };
    let node = &device.node;
    scene.ask("a", &device.disk, &[]).expect("served");
    scene.ask("b", node, &[]).expect_err("served twice");
    let second = daemon(scene.folder.path(), "second");
    let elsewhere = ask(&second, &scene.path("c"), node, &[]);
    // Its locks are another node's, but it is open for one alone.
    assert!(
        elsewhere
            .expect_err("served twice")
            .contains("in use by the kernel")
    );
    scene.restart();
    assert_eq!(scene.device("a")["state"], "listening");
    scene.remove("a");
    ask(&second, &scene.path("c"), node, &[]).expect("free at once");
}

#[test]
fn image_is_shared_by_the_operators_word_and_readers_need_none() {
    let Some(mut scene) = Scene::set() else {
        return;
    };
    let image = scene.image("image");
    scene.ask("a", &image, &["--shared"]).expect("one writer");
    scene.ask("b", &image, &["--shared"]).expect("another");
    scene
        .ask("c", &image, &[])
        .expect_err("one that does not know");
    let theirs = peer(&image, &scene.path("theirs"));
    scene.restart();
    for socket in ["a", "b"] {
        let device = scene.device(socket);
        assert_eq!(
            (&device["state"], &device["shared"]),
            (&"listening".into(), &true.into())
        );
    }
    drop(theirs);
    let read = scene.image("read");
    scene.ask("d", &read, &["--read-only"]).expect("a reader");
    scene.ask("e", &read, &["--read-only"]).expect("another");
    scene
        .ask("f", &read, &[])
        .expect_err("a writer beside readers");
    scene.restart();
    assert_eq!(scene.product.devices().expect("a list").len(), 4);
}

#[test]
fn image_is_served_again_after_each_sigkill_and_guarded_as_before() {
    let Some(mut scene) = Scene::set() else {
        return;
    };
    let image = scene.image("image");
    scene.ask("a", &image, &[]).expect("served");
    for _ in 0..5 {
        scene.restart();
        let device = scene.device("a");
        assert_eq!(device["state"], "listening", "{device}");
        assert_eq!(device["error"], Value::Null, "{device}");
        scene.ask("b", &image, &[]).expect_err("served twice");
    }
}

#[test]
fn image_that_another_took_meanwhile_keeps_its_place_on_the_list() {
    let Some(mut scene) = Scene::set() else {
        return;
    };
    let (image, other) = (scene.image("image"), scene.image("other"));
    scene.ask("a", &image, &[]).expect("served");
    scene.ask("b", &other, &[]).expect("served");
    scene.product.kill();
    let Some(thief) = peer(&image, &scene.path("theirs")) else {
        return;
    };
    scene.product.run().expect("it starts");
    let device = scene.device("a");
    assert_eq!(device["state"], "stopped", "{device}");
    let said = device["error"].as_str().unwrap_or_default();
    assert!(said.contains("in use by another"), "{device}");
    assert_eq!(scene.device("b")["state"], "listening");
    drop(thief);
    scene.restart();
    assert_eq!(scene.device("a")["state"], "listening");
}

#[test]
fn image_that_comes_free_while_a_successor_waits_is_served() {
    let Some(mut scene) = Scene::set() else {
        return;
    };
    let image = scene.image("image");
    scene.ask("a", &image, &[]).expect("served");
    scene.product.kill();
    let Some(thief) = peer(&image, &scene.path("theirs")) else {
        return;
    };
    let log = scene.path("state.log");
    let freed = std::thread::spawn(move || {
        // As what a predecessor has left, it goes by itself, while the successor waits.
        let began = Instant::now();
        let waits = || fs::read_to_string(&log).is_ok_and(|log| log.contains(SUCCESSOR_WAITS));
        while !waits() && began.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(2));
        }
        drop(thief);
        assert!(waits(), "the successor did not say that it waits");
    });
    scene.product.run().expect("it starts");
    freed.join().expect("freed");
    assert_eq!(scene.device("a")["state"], "listening");
}

#[test]
fn content_in_a_format_is_refused_without_raw_and_comes_back_once_it_was_served() {
    let Some(mut scene) = Scene::set() else {
        return;
    };
    let image = scene.path("image");
    for format in ["qcow2", "vmdk", "vhdx", "vdi", "vpc", "qed", "parallels"] {
        let mut command = Command::new("qemu-img");
        command
            .args(["create", "-q", "-f", format])
            .arg(&image)
            .arg("16M");
        match command.status() {
            Ok(status) => assert!(status.success(), "{format}"),
            Err(error) => {
                eprintln!("SKIPPED: qemu-img: {error}");
                return;
            }
        }
        let said = scene.ask("a", &image, &[]).expect_err(format);
        assert!(said.contains(format) && said.contains("--raw"), "{said}");
        scene.ask("a", &image, &["--raw"]).expect(format);
        scene.remove("a");
        fs::remove_file(&image).expect("removed");
    }
    // What a guest writes into its disk later must not keep it from coming back.
    let image = scene.image("disk");
    scene.ask("b", &image, &[]).expect("served");
    let mut content = fs::read(&image).expect("its content");
    content[..4].copy_from_slice(b"QFI\xfb");
    fs::write(&image, content).expect("written");
    scene.restart();
    assert_eq!(scene.device("b")["state"], "listening");
}

#[test]
fn image_cut_short_is_told_in_the_list_and_does_not_grow() {
    let Some(scene) = Scene::set() else { return };
    let image = scene.image("image");
    scene.ask("a", &image, &[]).expect("served");
    assert_eq!(scene.device("a")["error"], Value::Null);
    let file = File::options().write(true).open(&image).expect("the image");
    file.set_len(DISK_BYTES / 2).expect("cut");
    let device = scene.device("a");
    let said = device["error"].as_str().unwrap_or_default();
    assert!(said.contains("cut short"), "{device}");
    assert_eq!(device["capacity_bytes"], DISK_BYTES);
    file.set_len(DISK_BYTES).expect("restored");
    assert_eq!(scene.device("a")["error"], Value::Null);
}

/// Whether a process of that user and group can connect.
fn connects_as(user: u32, group: u32, socket: &Path) -> Option<bool> {
    let script = "use Socket; socket(my $s, AF_UNIX, SOCK_STREAM, 0) or exit 2; \
                  exit(connect($s, pack_sockaddr_un($ARGV[0])) ? 0 : $!{EACCES} ? 1 : 3)";
    let mut command = Command::new("perl");
    command.args(["-MErrno", "-e", script]).arg(socket);
    match command.uid(user).gid(group).status() {
        Ok(status) => match status.code() {
            Some(0) => Some(true),
            Some(1) => Some(false),
            other => panic!("{}: {other:?}", socket.display()),
        },
        Err(error) => {
            eprintln!("SKIPPED: perl: {error}");
            None
        }
    }
}

#[test]
fn socket_belongs_to_whom_it_was_given_also_after_a_restart() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: only root can give a socket away");
        return;
    }
    let Some(mut scene) = Scene::set() else {
        return;
    };
    let image = scene.image("image");
    let (user, group) = (USER.to_string(), GROUP.to_string());
    let given = ["--owner", &user, "--group", &group, "--mode", "0620"];
    scene.ask("given", &image, &given).expect("served");
    let (other, free) = (scene.image("other"), scene.image("free"));
    scene
        .ask("grouped", &other, &["--group", &group])
        .expect("served");
    scene.ask("plain", &free, &[]).expect("served");
    for _ in 0..2 {
        for (name, uid, gid, mode) in [("given", USER, GROUP, 0o620), ("grouped", 0, GROUP, 0o660)]
        {
            let path = scene.path(name);
            let made = fs::symlink_metadata(&path).expect("a socket");
            assert_eq!(
                (made.uid(), made.gid(), made.mode() & 0o7777),
                (uid, gid, mode)
            );
            assert!(is_listening(&path).expect("a list"));
        }
        let device = scene.device("given");
        assert_eq!(
            (&device["owner"], &device["group"], &device["mode"]),
            (
                &user.as_str().into(),
                &group.as_str().into(),
                &"0620".into()
            )
        );
        assert_eq!(scene.device("plain")["mode"], Value::Null);
        let stranger = GROUP + 7;
        for (name, gid, wanted) in [
            ("given", GROUP, true),
            ("given", stranger, false),
            ("grouped", GROUP, true),
            ("plain", GROUP, false),
        ] {
            if let Some(connected) = connects_as(stranger, gid, &scene.path(name)) {
                assert_eq!(connected, wanted, "{name} as group {gid}");
            }
        }
        scene.restart();
    }
}

#[test]
fn socket_for_nobody_known_or_by_no_mode_is_wrong_use_and_leaves_the_image_free() {
    let Some(scene) = Scene::set() else { return };
    let image = scene.image("image");
    for (option, value) in [
        ("--owner", "no-such-user"),
        ("--group", "no-such-group"),
        ("--mode", "8"),
    ] {
        let said = scene.ask("a", &image, &[option, value]).expect_err(value);
        assert!(said.contains(value), "{said}");
        assert!(!scene.path("a").exists());
    }
    scene.ask("a", &image, &[]).expect("served");
}

#[test]
fn each_disk_has_a_serial_of_its_own_that_stays() {
    let Some(mut scene) = Scene::set() else {
        return;
    };
    let images = ["one", "two", "three"].map(|name| scene.image(name));
    let sockets = ["a", "b", "c"];
    for (socket, image) in sockets.iter().zip(&images) {
        scene.ask(socket, image, &[]).expect("served");
    }
    let serials = |scene: &Scene| sockets.map(|socket| scene.device(socket)["serial"].to_string());
    let first = serials(&scene);
    let distinct: std::collections::BTreeSet<_> = first.iter().collect();
    assert_eq!(distinct.len(), sockets.len(), "{first:?}");
    assert!(first.iter().all(|serial| serial.len() <= 22), "{first:?}");
    scene.restart();
    assert_eq!(serials(&scene), first);
    scene.remove("b");
    scene.ask("b", &images[1], &[]).expect("served");
    assert_eq!(serials(&scene), first);
    scene.remove("c");
    scene
        .ask("c", &images[2], &["--serial", "mine"])
        .expect("served");
    assert_eq!(scene.device("c")["serial"], "mine");
}

#[test]
fn list_of_an_earlier_version_is_taken_up_and_its_disk_keeps_its_name() {
    let Some(mut scene) = Scene::set() else {
        return;
    };
    let image = scene.image("image");
    scene.ask("a", &image, &[]).expect("served");
    scene.product.kill();
    let list = serde_json::json!({"blk": [{
        "socket": scene.path("old"), "image": image, "queues": 2, "read_only": false,
        "lookup": true, "serial": null, "on_fault": "out-of-order",
    }]});
    fs::write(scene.path("state/devices.json"), list.to_string()).expect("a list");
    scene.product.run().expect("it starts");
    let device = scene.device("old");
    assert_eq!(
        (&device["state"], &device["serial"]),
        (&"listening".into(), &"pagetide".into())
    );
    let waited = Instant::now();
    while !is_listening(&scene.path("old")).expect("a list") {
        assert!(waited.elapsed() < PATIENCE, "it does not listen");
        std::thread::yield_now();
    }
}
