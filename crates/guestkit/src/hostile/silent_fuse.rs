// SPDX-License-Identifier: Apache-2.0
//! A file system in user space that mounts, opens its file, and never answers a read.
//!
//! It speaks just enough of the kernel's protocol (`/dev/fuse`, Linux `include/uapi/linux/fuse.h`)
//! for a file of some size to be opened and mapped. A thread that then touches the mapping waits
//! until the file system is unmounted.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::thread::{self, JoinHandle};

use super::front::RAM_BYTES;
use super::peer::{Failure, failed};

/// Longest message of the kernel: nothing is written here.
const MESSAGE_BYTES: usize = 256 << 10;
const HEADER_BYTES: usize = 40;
const ROOT: u64 = 1;
const FILE: u64 = 2;
const S_IFDIR: u32 = 0o040_000;
const S_IFREG: u32 = 0o100_000;
const ENOSYS: i32 = -38;

const LOOKUP: u32 = 1;
const FORGET: u32 = 2;
const GETATTR: u32 = 3;
const OPEN: u32 = 14;
const READ: u32 = 15;
const WRITE: u32 = 16;
const RELEASE: u32 = 18;
const FLUSH: u32 = 25;
const INIT: u32 = 26;
const OPENDIR: u32 = 27;
const RELEASEDIR: u32 = 29;
const INTERRUPT: u32 = 36;
const BATCH_FORGET: u32 = 42;

/// See the module. Unmounted on drop, which ends every wait.
#[derive(Debug)]
pub struct SilentFuse {
    path: PathBuf,
    thread: Option<JoinHandle<()>>,
}

impl SilentFuse {
    /// Mounts one at `path`.
    ///
    /// # Errors
    /// [`Failure::NotHere`] without `/dev/fuse` or the right to mount.
    pub fn mount(path: &Path) -> Result<Self, Failure> {
        let not_here = |error: std::io::Error| Failure::NotHere(format!("FUSE: {error}"));
        fs::create_dir_all(path).map_err(failed("a folder"))?;
        let device = File::options()
            .read(true)
            .write(true)
            .open("/dev/fuse")
            .map_err(not_here)?;
        // mount(8) has to inherit the descriptor: it is duplicated without CLOEXEC.
        let inherited = rustix::io::dup(&device).map_err(|error| not_here(error.into()))?;
        let options = format!(
            "fd={},rootmode=40000,user_id=0,group_id=0,allow_other",
            inherited.as_raw_fd()
        );
        let output = Command::new("mount")
            .args(["-i", "-t", "fuse", "-o", &options, "pagetide-guestkit"])
            .arg(path)
            .output()
            .map_err(not_here)?;
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
            return Err(Failure::NotHere(format!("FUSE: {said}")));
        }
        drop(inherited);
        let thread = thread::Builder::new()
            .name("silent-fuse".to_owned())
            .spawn(move || serve(device))
            .map_err(failed("starting a thread"))?;
        Ok(Self {
            path: path.to_owned(),
            thread: Some(thread),
        })
    }

    /// Its file.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn open(&self) -> Result<File, Failure> {
        let file = File::options()
            .read(true)
            .write(true)
            .open(self.path.join("ram"));
        file.map_err(failed("opening a file of a FUSE"))
    }
}

impl Drop for SilentFuse {
    fn drop(&mut self) {
        // Aborting ends every request that waits, even if other processes hold the mount.
        let unmounted = Command::new("umount")
            .args(["--force", "--lazy"])
            .arg(&self.path)
            .status();
        if !unmounted.is_ok_and(|status| status.success()) {
            eprintln!("guestkit: {} stays mounted", self.path.display());
            return;
        }
        if let Some(thread) = self.thread.take()
            && thread.join().is_err()
        {
            eprintln!("guestkit: the FUSE panicked");
        }
    }
}

/// Answers all but reads, until the file system is unmounted.
fn serve(mut device: File) {
    let mut message = vec![0; MESSAGE_BYTES];
    loop {
        let bytes = match device.read(&mut message) {
            Ok(bytes) if bytes >= HEADER_BYTES => bytes,
            Ok(_) => return,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => continue,
            // The request was aborted meanwhile.
            Err(error) if error.raw_os_error() == Some(2) => continue,
            Err(_) => return,
        };
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&message[at..at + 8]);
            u64::from_le_bytes(word)
        };
        let [o0, o1, o2, o3] = [message[4], message[5], message[6], message[7]];
        let (opcode, unique, node) = (u32::from_le_bytes([o0, o1, o2, o3]), word(8), word(16));
        let Some(answer) = answer(opcode, node, &message[HEADER_BYTES..bytes]) else {
            continue;
        };
        let (error, body) = match answer {
            Ok(body) => (0, body),
            Err(error) => (error, Vec::new()),
        };
        let len = u32::try_from(16 + body.len()).unwrap_or(u32::MAX);
        let mut reply = Vec::from(len.to_le_bytes());
        reply.extend(error.to_le_bytes());
        reply.extend(unique.to_le_bytes());
        reply.extend(body);
        if let Err(error) = device.write_all(&reply) {
            // The request was interrupted meanwhile, or the file system was unmounted.
            eprintln!("guestkit: the FUSE's answer to {opcode}: {error}");
        }
    }
}

/// `None`: no answer is sent.
fn answer(opcode: u32, node: u64, body: &[u8]) -> Option<Result<Vec<u8>, i32>> {
    let attributes = |node| {
        // Valid for a long time, so that the kernel does not ask again.
        let mut bytes = words(&[3600, 0]);
        bytes.extend(attributes_of(node));
        bytes
    };
    match opcode {
        READ | WRITE | FORGET | BATCH_FORGET | INTERRUPT => None,
        INIT => Some(Ok(init(body))),
        LOOKUP => {
            let mut bytes = words(&[FILE, 0, 3600, 3600, 0]);
            bytes.extend(attributes_of(FILE));
            Some(Ok(bytes))
        }
        GETATTR => Some(Ok(attributes(node))),
        OPEN | OPENDIR => Some(Ok(words(&[0, 0]))),
        FLUSH | RELEASE | RELEASEDIR => Some(Ok(Vec::new())),
        _ => Some(Err(ENOSYS)),
    }
}

/// `struct fuse_init_out`: the kernel's version, and no further features.
fn init(body: &[u8]) -> Vec<u8> {
    let mut bytes = vec![0; 64];
    // The kernel's own minor version; every kernel that we run on supports minor 31.
    bytes[..4].copy_from_slice(body.get(..4).unwrap_or(&[7, 0, 0, 0]));
    bytes[4] = 31;
    // max_readahead, flags, max_background, congestion_threshold, max_write.
    bytes[16..18].copy_from_slice(&16_u16.to_le_bytes());
    bytes[18..20].copy_from_slice(&12_u16.to_le_bytes());
    bytes[20..24].copy_from_slice(&(128_u32 << 10).to_le_bytes());
    bytes
}

/// `struct fuse_attr`.
fn attributes_of(node: u64) -> Vec<u8> {
    let (size, mode) = match node {
        ROOT => (0, S_IFDIR | 0o755),
        _ => (RAM_BYTES, S_IFREG | 0o666),
    };
    let mut bytes = words(&[node, size, size / 512, 0, 0, 0]);
    // Three nanosecond fields, mode, links, owner, group, device, block size, padding.
    for word in [0, 0, 0, mode, 1, 0, 0, 0, 4096, 0] {
        bytes.extend(word.to_le_bytes());
    }
    bytes
}

fn words(words: &[u64]) -> Vec<u8> {
    words.iter().flat_map(|word| word.to_le_bytes()).collect()
}
