// SPDX-License-Identifier: Apache-2.0
//! QEMU's own vhost-user-blk back end, which is independent of Pagetide.

use std::io;
use std::path::Path;
use std::process::{Child, Command};
use std::thread;
use std::time::{Duration, Instant};

const START_TIMEOUT: Duration = Duration::from_secs(60);

/// A running `qemu-storage-daemon`. Dropped, it is killed and waited for.
#[derive(Debug)]
pub struct StorageDaemon(Child);

impl StorageDaemon {
    /// Serves the raw `image` on `socket`, and returns when it listens.
    ///
    /// # Errors
    /// It is not installed, ends, or does not listen in time.
    pub fn start(image: &Path, socket: &Path, queues: u32) -> io::Result<Self> {
        let node = format!(
            "file,node-name=disk,filename={},discard=unmap",
            image.display()
        );
        let export = format!(
            "vhost-user-blk,id=export,node-name=disk,writable=on,num-queues={queues},\
             addr.type=unix,addr.path={}",
            socket.display()
        );
        let child = Command::new("qemu-storage-daemon")
            .args(["--blockdev", &node, "--export", &export])
            .spawn()?;
        let mut daemon = Self(child);
        let deadline = Instant::now() + START_TIMEOUT;
        while !socket.exists() {
            if let Some(status) = daemon.0.try_wait()? {
                return Err(io::Error::other(format!("it ended with {status}")));
            }
            if Instant::now() > deadline {
                return Err(io::ErrorKind::TimedOut.into());
            }
            thread::sleep(Duration::from_millis(10));
        }
        Ok(daemon)
    }

    /// Its process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.0.id()
    }
}

impl Drop for StorageDaemon {
    fn drop(&mut self) {
        if let Err(error) = self.0.kill() {
            eprintln!("guestkit: killing process {}: {error}", self.0.id());
        }
        if let Err(error) = self.0.wait() {
            eprintln!("guestkit: waiting for process {}: {error}", self.0.id());
        }
    }
}
