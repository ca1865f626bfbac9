// SPDX-License-Identifier: Apache-2.0
//! A back end with the front end that drives it, and the image that all back ends serve.

use super::{
    frontend::{Run, RunResult},
    process::{Backend, Frontend, PartError, SideCpus},
};
use crate::harness::{
    figures::to_f64,
    report::{BenchError, failed, unable},
};
use pagetide_dpu::{Content, ImageUse, Sharing};
use std::{
    io::Write as _,
    path::{Path, PathBuf},
};

/// Bytes of the image: far beyond any cache of the device, quickly written.
const IMAGE_BYTES: u64 = 512 << 20;

/// How benches use images, which belong to them: back ends under comparison serve the same one.
pub(crate) const SHARED_IMAGE: ImageUse = ImageUse {
    sharing: Sharing::Shared,
    content: Content::Raw,
};

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// It cannot be written.
    #[error("an image of {IMAGE_BYTES} bytes cannot be written to {dir}: {source}")]
    Write {
        /// Where.
        dir: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
    /// The file system has no direct I/O.
    #[error("{dir} has no direct I/O ({source}); set TMPDIR to a directory on a disk")]
    Direct {
        /// Where.
        dir: PathBuf,
        /// The kernel's answer.
        source: std::io::Error,
    },
}

impl From<ImageError> for BenchError {
    fn from(error: ImageError) -> Self {
        match error {
            ImageError::Write { .. } => failed(error),
            ImageError::Direct { .. } => unable(error),
        }
    }
}

/// A back end with the front end that drives it.
pub struct Side {
    /// The back end.
    pub backend: Backend,
    frontend: Frontend,
}

/// The result of one side in a slice, or in all slices of a pair.
#[derive(Debug, Default, Clone, Copy)]
pub struct Slice {
    ios: u64,
    nanos: u64,
    cpu_ns: u64,
}

/// The same as rates.
#[derive(Debug, Clone, Copy)]
pub struct Sample {
    /// Requests completed.
    pub ios: f64,
    /// Requests a second.
    pub iops: f64,
    /// CPU time of the back end for each request.
    pub cpu_ns_per_io: f64,
}

impl Side {
    /// Ours, with its socket and its state in `dir`. `options` are further ones of its command line.
    ///
    /// # Errors
    /// [`PartError`].
    pub fn start_ours(
        dir: &Path,
        image: &Path,
        options: &[&str],
        at: SideCpus,
    ) -> Result<Self, PartError> {
        let socket = dir.join("ours.sock");
        let backend = Backend::ours(&socket, image, dir, options, at)?;
        let frontend = Frontend::start(&socket, at)?;
        Ok(Self { backend, frontend })
    }

    /// The peer: QEMU's storage daemon.
    ///
    /// # Errors
    /// [`PartError`].
    pub fn start_peer(dir: &Path, image: &Path, at: SideCpus) -> Result<Self, PartError> {
        let socket = dir.join("qsd.sock");
        let backend = Backend::qsd(&socket, image, at)?;
        let frontend = Frontend::start(&socket, at)?;
        Ok(Self { backend, frontend })
    }

    /// CPU time of both ends so far.
    ///
    /// # Errors
    /// [`PartError`].
    pub fn cpu_ns(&self) -> Result<u64, PartError> {
        Ok(self.backend.cpu_ns()? + self.frontend.cpu_ns()?)
    }

    /// Does one run.
    ///
    /// # Errors
    /// [`PartError`], also if a request failed.
    pub fn slice(&mut self, run: Run) -> Result<Slice, PartError> {
        let before = self.backend.cpu_ns()?;
        let result: RunResult = self.frontend.run(run)?;
        let after = self.backend.cpu_ns()?;
        if result.errors > 0 {
            return Err(PartError::Requests(result.errors));
        }
        Ok(Slice {
            ios: result.ios,
            nanos: result.nanos,
            cpu_ns: after - before,
        })
    }
}

impl Sample {
    /// The empty result.
    pub const NONE: Self = Self {
        ios: 0.0,
        iops: 0.0,
        cpu_ns_per_io: 0.0,
    };
}

impl Slice {
    /// Adds `more`.
    pub fn add(&mut self, more: Self) {
        self.ios += more.ios;
        self.nanos += more.nanos;
        self.cpu_ns += more.cpu_ns;
    }

    /// As rates.
    #[must_use]
    pub fn sample(self) -> Sample {
        let ios = to_f64(self.ios.max(1));
        Sample {
            ios,
            iops: ios / (to_f64(self.nanos.max(1)) / 1e9),
            cpu_ns_per_io: to_f64(self.cpu_ns) / ios,
        }
    }
}

/// Writes an image into `dir`.
///
/// # Errors
/// [`ImageError`].
pub fn make_image(dir: &Path) -> Result<PathBuf, ImageError> {
    let path = dir.join("image");
    let written = write_image(&path);
    written.map_err(|source| ImageError::Write {
        dir: dir.to_owned(),
        source,
    })?;
    let direct = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::DIRECT;
    match rustix::fs::open(&path, direct, rustix::fs::Mode::empty()) {
        Ok(_) => Ok(path),
        Err(error) => Err(ImageError::Direct {
            dir: dir.to_owned(),
            source: error.into(),
        }),
    }
}

/// Written, not only allocated: a first write to an unwritten extent costs more than a second.
fn write_image(path: &Path) -> std::io::Result<()> {
    let mut file = std::fs::File::create(path)?;
    let mut block = vec![0_u8; 1 << 20];
    for (i, byte) in block.iter_mut().enumerate() {
        *byte = u8::try_from(i * 31 % 251).unwrap_or(0);
    }
    for _ in 0..IMAGE_BYTES >> 20 {
        file.write_all(&block)?;
    }
    file.sync_all()
}
