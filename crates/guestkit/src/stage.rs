// SPDX-License-Identifier: Apache-2.0
//! The environment of a product test with a real guest.
//!
//! A stage is a folder on tmpfs, a running daemon with its state there, and the guest's image. Where a
//! machine cannot provide one, [`Stage::set`] returns the reason, and the test skips itself with it.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering::Relaxed};
use std::time::{Duration, Instant};

use crate::borrowed::Tmpfs;
use crate::guest::{Guest, GuestError};
use crate::image::{self, Extras, Image, ImageError};
use crate::product::{Product, ProductError, Role};
use crate::qemu::{GuestSpec, Version};

/// A folder on tmpfs with a short name, since socket paths must be short; removed on drop.
#[derive(Debug)]
pub struct RunFolder(PathBuf);

impl RunFolder {
    /// Makes a folder that no other process or call uses.
    ///
    /// # Errors
    /// There is no tmpfs at `/dev/shm` to write to.
    pub fn new() -> io::Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        let number = COUNT.fetch_add(1, Relaxed);
        let process = std::process::id();
        let path = PathBuf::from(format!("/dev/shm/pagetide-guestkit-{process}-{number}"));
        fs::create_dir_all(&path)?;
        Ok(Self(path))
    }

    /// Its path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.0
    }
}

impl Drop for RunFolder {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_dir_all(&self.0) {
            eprintln!("guestkit: {} stays: {error}", self.0.display());
        }
    }
}

/// Why a test of the product cannot run here.
#[derive(Debug)]
pub struct Skip(pub String);

/// A daemon, an image, a folder. Guests are dropped first, the folder last.
#[derive(Debug)]
pub struct Stage {
    /// The daemon.
    pub product: Product,
    /// The DPU process, if devices are not in the daemon.
    pub dpu: Option<Product>,
    image: Image,
    disks: Vec<DiskFile>,
    _small: Option<Tmpfs>,
    folder: RunFolder,
    guests: u32,
}

/// How much room the daemon's state has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Room {
    /// All of `/dev/shm`.
    Ample,
    /// A tmpfs of so many bytes.
    Bytes(u64),
}

/// What runs.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Processes {
    /// A daemon, with its devices in it.
    Daemon,
    /// The same with these flags.
    DaemonWith(Vec<String>),
    /// The same with a budget lock of its own.
    DaemonWithBudgetLock,
    /// A daemon, and a DPU process with its devices.
    DaemonAndDpu,
}

/// A disk image, removed on drop.
#[derive(Debug)]
struct DiskFile(PathBuf);

impl Drop for DiskFile {
    fn drop(&mut self) {
        if let Err(error) = fs::remove_file(&self.0) {
            eprintln!("guestkit: {} stays: {error}", self.0.display());
        }
    }
}

impl Stage {
    /// Starts a daemon, or returns why tests of the product cannot run here.
    ///
    /// # Errors
    /// [`Skip`] for lack of root, QEMU, image or binary.
    ///
    /// # Panics
    /// All is present and the daemon does not start: that is a failure and no reason to skip.
    pub fn set() -> Result<Self, Skip> {
        Self::set_with(Room::Ample, Processes::Daemon)
    }

    /// As [`Stage::set`], with a DPU process beside the daemon.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub fn set_with_dpu_process() -> Result<Self, Skip> {
        Self::set_with(Room::Ample, Processes::DaemonAndDpu)
    }

    /// As [`Stage::set`], with a budget lock of its own: other tests may have a budget on this host, too.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub fn set_with_budget() -> Result<Self, Skip> {
        Self::set_with(Room::Ample, Processes::DaemonWithBudgetLock)
    }

    /// As [`Stage::set`], the daemon having these flags.
    ///
    /// # Errors
    /// As there.
    ///
    /// # Panics
    /// As there.
    pub fn set_with_flags(flags: Vec<String>) -> Result<Self, Skip> {
        Self::set_with(Room::Ample, Processes::DaemonWith(flags))
    }

    /// As [`Stage::set`], the daemon's state being on a tmpfs of `bytes`.
    ///
    /// # Errors
    /// As there, and where nothing can be mounted.
    ///
    /// # Panics
    /// As there.
    pub fn set_on_tmpfs_of(bytes: u64) -> Result<Self, Skip> {
        Self::set_with(Room::Bytes(bytes), Processes::Daemon)
    }

    fn set_with(room: Room, processes: Processes) -> Result<Self, Skip> {
        let skip = |reason: String| Skip(reason);
        if !rustix::process::geteuid().is_root() {
            return Err(skip("take-over needs root".to_owned()));
        }
        Version::installed().map_err(|error| skip(error.to_string()))?;
        let binary = Product::binary().map_err(|error| {
            skip(format!(
                "{error}: build it with `cargo build --release -p pagetide`"
            ))
        })?;
        let image = image::prepare().map_err(|error| skip(format!("no guest image: {error}")))?;
        let folder = RunFolder::new().map_err(|error| skip(format!("/dev/shm: {error}")))?;
        let small = match room {
            Room::Ample => None,
            Room::Bytes(bytes) => Some(
                Tmpfs::mount(&folder.path().join("small"), &format!("size={bytes}"))
                    .map_err(|error| skip(error.to_string()))?,
            ),
        };
        let state = small.as_ref().map_or(folder.path(), Tmpfs::path);
        let (state, log) = (state.join("state"), folder.path().join("pagetide.log"));
        let start = |role, state: &Path, log: &Path| {
            Product::start_in(role, &binary, state, log).unwrap_or_else(|error| panic!("{error}"))
        };
        let dpu = (processes == Processes::DaemonAndDpu).then(|| {
            let (state, log) = (folder.path().join("dpu"), folder.path().join("dpu.log"));
            start(Role::Dpu, &state, &log)
        });
        let role = match (&dpu, processes) {
            (Some(dpu), _) => Role::DaemonBeside(dpu.vpri()),
            (None, Processes::DaemonWithBudgetLock) => {
                let lock = folder.path().join("budget.lock");
                Role::DaemonWith(vec![format!("--budget-lock={}", lock.display())])
            }
            (None, Processes::DaemonWith(flags)) => Role::DaemonWith(flags),
            (None, _) => Role::Daemon,
        };
        Ok(Self {
            product: start(role, &state, &log),
            dpu,
            image,
            disks: Vec::new(),
            _small: small,
            folder,
            guests: 0,
        })
    }

    /// Boots guests with more in their initramfs from now on.
    ///
    /// # Errors
    /// As [`image::prepare_with`].
    pub fn add_to_image(&mut self, extras: &Extras<'_>) -> Result<(), ImageError> {
        self.image = image::prepare_with(extras)?;
        Ok(())
    }

    /// The process in which the devices are.
    #[must_use]
    pub fn devices(&self) -> &Product {
        self.dpu.as_ref().unwrap_or(&self.product)
    }

    /// The folder.
    #[must_use]
    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// A socket for a disk, and its empty image on a file system that supports direct I/O.
    ///
    /// # Errors
    /// The image cannot be made.
    pub fn new_disk(&mut self, bytes: u64) -> io::Result<(PathBuf, PathBuf)> {
        let images = image::repository().join("target/guest/disks");
        fs::create_dir_all(&images)?;
        let number = self.disks.len();
        let name = self.folder().file_name().unwrap_or_default();
        let image = images.join(format!("{}-{number}.raw", name.to_string_lossy()));
        fs::File::create(&image)?.set_len(bytes)?;
        self.disks.push(DiskFile(image.clone()));
        Ok((self.folder().join(format!("disk{number}.sock")), image))
    }

    /// Boots a guest with files of its own.
    ///
    /// # Errors
    /// As [`Guest::start`].
    pub fn boot(&mut self, spec: &GuestSpec) -> Result<Guest, GuestError> {
        self.guests += 1;
        Guest::start(
            spec,
            &self.image,
            &self.folder.path().join(format!("guest{}", self.guests)),
        )
    }

    /// Polls until `holds`.
    ///
    /// # Errors
    /// A poll failed, or `timeout` passed; the latter includes the end of the daemon's log.
    pub fn until(
        &self,
        what: &str,
        timeout: Duration,
        mut holds: impl FnMut() -> Result<bool, ProductError>,
    ) -> Result<(), ProductError> {
        let deadline = Instant::now() + timeout;
        while !holds()? {
            if Instant::now() > deadline {
                let reason = format!("{what} is not so after {} s", timeout.as_secs());
                return Err(ProductError::Silent {
                    reason,
                    log: self.product.log_tail(),
                });
            }
            std::thread::sleep(Duration::from_millis(50));
        }
        Ok(())
    }
}
