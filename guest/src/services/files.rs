// SPDX-License-Identifier: Apache-2.0
//! Files by HTTP: busybox' httpd, over the guest's loopback.

use super::{DATA_BYTES, Random, Service, ServiceError, WORK, io_failed, used};
use crate::pattern;
use crate::soak::content;
use std::fs;
use std::io::{self, Read, Write};
use std::net::TcpStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

const BUSYBOX: &str = "/bin/busybox";
const ADDRESS: &str = "127.0.0.1:80";
const FILE_BYTES: usize = 64 << 10;
const PATIENCE: Duration = Duration::from_secs(60);
const LOOK: Duration = Duration::from_millis(50);

/// See the module.
pub(super) struct Files {
    server: Child,
    count: u64,
}

impl Drop for Files {
    fn drop(&mut self) {
        if let Err(error) = self.server.kill().and_then(|()| self.server.wait()) {
            eprintln!("guest-work: ending httpd: {error}");
        }
    }
}

impl Files {
    pub(super) fn prepare() -> Result<Self, ServiceError> {
        let failed = io_failed(BUSYBOX);
        let up = Command::new(BUSYBOX)
            .args(["ifconfig", "lo", "127.0.0.1", "up"])
            .status();
        if !up.map_err(&failed)?.success() {
            return Err(failed(io::Error::other("the loopback does not come up")));
        }
        let count = make_files(files_of(DATA_BYTES))?;
        let server = Command::new(BUSYBOX)
            .args(["httpd", "-f", "-p", ADDRESS, "-h", WORK])
            .stdin(Stdio::null())
            .spawn()
            .map_err(&failed)?;
        let mut files = Self { server, count };
        let began = Instant::now();
        while let Err(error) = files.check(0) {
            if began.elapsed() > PATIENCE {
                return Err(error);
            }
            thread::sleep(LOOK);
        }
        Ok(files)
    }

    fn check(&mut self, file: u64) -> Result<(), ServiceError> {
        let mut answer = Vec::with_capacity(FILE_BYTES + 512);
        let fetched = TcpStream::connect(ADDRESS).and_then(|mut stream| {
            stream.write_all(format!("GET /{file} HTTP/1.0\r\n\r\n").as_bytes())?;
            stream.read_to_end(&mut answer)
        });
        fetched.map_err(io_failed("a request to httpd"))?;
        match answer.ends_with(&text(file)) {
            true => Ok(()),
            false => Err(ServiceError::Wrong(format!("file {file}"))),
        }
    }
}

impl Service for Files {
    fn request(&mut self, random: &mut Random) -> Result<(), ServiceError> {
        let file = random.below(used(self.count));
        self.check(file)
    }

    fn verify(&mut self) -> Result<(), ServiceError> {
        (0..self.count).try_for_each(|file| self.check(file))
    }
}

/// Makes so many files, named by their numbers; returns that.
pub(super) fn make_files(count: u64) -> Result<u64, ServiceError> {
    for file in 0..count {
        let path = Path::new(WORK).join(file.to_string());
        fs::write(path, text(file)).map_err(io_failed("a file of the guest"))?;
    }
    Ok(count)
}

/// Compares what [`make_files`] has made.
pub(super) fn check_files(count: u64) -> Result<(), ServiceError> {
    for file in 0..count {
        let path = Path::new(WORK).join(file.to_string());
        let found = fs::read(path).map_err(io_failed("a file of the guest"))?;
        if found != text(file) {
            return Err(ServiceError::Wrong(format!("file {file}")));
        }
    }
    Ok(())
}

/// How many files hold so much.
pub(super) const fn files_of(bytes: u64) -> u64 {
    bytes / FILE_BYTES as u64
}

fn text(file: u64) -> Vec<u8> {
    content(pattern::key(3, file, 0), FILE_BYTES)
}
