// SPDX-License-Identifier: Apache-2.0
//! Kernel and initramfs of a test guest, from Debian packages by their names.
//!
//! Nothing is installed and nothing is patched: the current cloud kernel and a
//! static busybox are downloaded by `apt-get download`, unpacked below
//! `target/guest/`, and packed with our static `guest-work` into an archive.
//! Downloads are kept by kernel release, so a second run needs no network.
//!
//! ```text
//!   target/guest/KERNEL-PACKAGE/   the kernel's package, unpacked
//!   target/guest/busybox-static/   busybox' package, unpacked
//!   target/guest/build/            cargo's folder for guest-work
//!   target/guest/initramfs-KERNEL  what QEMU loads; with additions, under a name of its own
//! ```

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cpio::{Archive, TooLarge};
use crate::modules::{self, ModuleError};

const BUSYBOX_NAME: &str = "busybox-static";
const MODULES: [&str; 5] = [
    "virtio_pci",
    "virtio_blk",
    "virtio_balloon",
    "virtio_mem",
    "virtio_net",
];
const GUEST_TARGET: &str = "x86_64-unknown-linux-gnu";
const INIT: &str = include_str!("../../../guest/init");

/// The image could not be made.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// A program failed.
    #[error("`{command}` failed: {output}")]
    Failed {
        /// The command line.
        command: String,
        /// The end of its output.
        output: String,
    },
    /// A program is not there.
    #[error("`{command}` could not be started: {source}")]
    Start {
        /// The command line.
        command: String,
        /// Why.
        source: io::Error,
    },
    /// A package does not look as expected.
    #[error("{package} {problem}")]
    Package {
        /// Name of the package.
        package: String,
        /// What is wrong.
        problem: &'static str,
    },
    /// A file could not be read or written.
    #[error("{path}: {source}", path = path.display())]
    File {
        /// Path of the file.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// The kernel's modules are not as expected.
    #[error(transparent)]
    Modules(#[from] ModuleError),
    /// A file does not fit into an initramfs.
    #[error(transparent)]
    TooLarge(#[from] TooLarge),
}

/// What QEMU boots.
#[derive(Clone, Debug)]
pub struct Image {
    /// The kernel.
    pub kernel: PathBuf,
    /// The initramfs.
    pub initramfs: PathBuf,
    /// Release of the kernel, as in `uname -r`.
    pub release: String,
}

/// An additional file in a guest's initramfs.
#[derive(Clone, Debug)]
pub struct Addition {
    /// Its path there, from the root.
    name: String,
    content: Content,
}

#[derive(Clone, Debug)]
enum Content {
    CopyOf(PathBuf),
    Text(String),
}

impl Addition {
    /// Its path in the guest, from the root.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The content of `path` on this machine, as `name` in the guest.
    #[must_use]
    pub fn copy(path: &Path, name: &str) -> Self {
        Self {
            name: name.to_owned(),
            content: Content::CopyOf(path.to_owned()),
        }
    }

    /// A text.
    #[must_use]
    pub fn text(name: &str, text: &str) -> Self {
        Self {
            name: name.to_owned(),
            content: Content::Text(text.to_owned()),
        }
    }

    fn bytes(&self) -> Result<Vec<u8>, ImageError> {
        match &self.content {
            Content::CopyOf(path) => read(path),
            Content::Text(text) => Ok(text.clone().into_bytes()),
        }
    }
}

/// The folder of this repository.
#[must_use]
pub fn repository() -> PathBuf {
    let mut path = PathBuf::from(env!("CARGO_MANIFEST_DIR"));
    path.pop();
    path.pop();
    path
}

/// Makes the image below `target/guest/`, or finds it there.
///
/// # Errors
/// A download, an unpacking or the build of `guest-work` failed.
pub fn prepare() -> Result<Image, ImageError> {
    prepare_with(&Extras::default())
}

/// A stock kernel, which a package of Debian depends on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Kernel {
    /// That for machines in a cloud: it has the drivers of usual virtual devices.
    #[default]
    Cloud,
    /// That for any machine, with drivers of devices of real ones.
    Full,
}

impl Kernel {
    /// The package that always depends on the current one.
    const fn package(self) -> &'static str {
        match self {
            Self::Cloud => "linux-image-cloud-amd64",
            Self::Full => "linux-image-amd64",
        }
    }

    /// Whether `package` has a kernel of this kind.
    fn is(self, package: &str) -> bool {
        package.starts_with("linux-image-") && package.contains("-cloud-") == (self == Self::Cloud)
    }
}

/// The content of an initramfs beyond what every guest needs.
#[derive(Clone, Copy, Debug, Default)]
pub struct Extras<'a> {
    /// End of the archive's name, which distinguishes it from others.
    pub suffix: &'a str,
    /// Further files.
    pub additions: &'a [Addition],
    /// The kernel that boots.
    pub kernel: Kernel,
    /// Further modules of it.
    pub modules: &'a [&'a str],
}

/// As [`prepare`], with more in the initramfs.
///
/// # Errors
/// As there, or an addition cannot be read.
pub fn prepare_with(extras: &Extras<'_>) -> Result<Image, ImageError> {
    let folder = repository().join("target/guest");
    fs::create_dir_all(&folder).map_err(|source| file_error(&folder, source))?;
    let lock_path = folder.join("lock");
    let lock = fs::File::create(&lock_path).map_err(|source| file_error(&lock_path, source))?;
    // Tests of several binaries may prepare at once; closing the file releases the lock.
    rustix::fs::flock(&lock, rustix::fs::FlockOperation::LockExclusive)
        .map_err(|error| file_error(&lock_path, error.into()))?;

    let kernel_package = kernel_package(&folder, extras.kernel)?;
    let kernel_tree = unpacked(&folder, &kernel_package)?;
    let busybox = unpacked(&folder, BUSYBOX_NAME)?.join("bin/busybox");
    let work = build_guest_work(&folder)?;
    let release = kernel_package.trim_start_matches("linux-image-").to_owned();
    let modules = kernel_tree
        .join("lib/modules")
        .join(&release)
        .join("kernel");
    let wanted = [&MODULES[..], extras.modules].concat();
    let mut archive = pack(&modules, &wanted, &busybox, &work)?;
    add(&mut archive, extras.additions)?;
    let initramfs = folder.join(format!("initramfs-{release}{}", extras.suffix));
    write_if_changed(&initramfs, &archive.finish())?;
    Ok(Image {
        kernel: kernel_tree.join(format!("boot/vmlinuz-{release}")),
        initramfs,
        release,
    })
}

fn pack(
    modules: &Path,
    wanted: &[&str],
    busybox: &Path,
    work: &Path,
) -> Result<Archive, ImageError> {
    let mut archive = Archive::default();
    archive.directory("bin");
    archive.directory("modules");
    archive.program("init", INIT.as_bytes())?;
    archive.program("bin/busybox", &read(busybox)?)?;
    archive.program("bin/guest-work", &read(work)?)?;
    let mut order = String::new();
    for module in modules::in_order(modules, wanted)? {
        order += &format!("{}.ko\n", module.name);
        archive.program(&format!("modules/{}.ko", module.name), &module.object)?;
    }
    archive.program("modules/order", order.as_bytes())?;
    Ok(archive)
}

fn add(archive: &mut Archive, additions: &[Addition]) -> Result<(), ImageError> {
    let mut folders = BTreeSet::new();
    for addition in additions {
        // `ancestors` includes the file and the root; neither is wanted.
        let above = Path::new(&addition.name).ancestors().skip(1);
        folders.extend(above.filter(|folder| !folder.as_os_str().is_empty()));
    }
    // A parent sorts before its content.
    for folder in folders {
        archive.directory(&folder.to_string_lossy());
    }
    for addition in additions {
        archive.program(&addition.name, &addition.bytes()?)?;
    }
    Ok(())
}

/// The name of the package that holds the current kernel of this kind.
fn kernel_package(folder: &Path, kernel: Kernel) -> Result<String, ImageError> {
    let mut ask = Command::new("apt-cache");
    ask.args(["depends", kernel.package()]);
    let asked = match run(&mut ask) {
        Ok(answer) => kernel_in(&answer),
        Err(error) => newest_unpacked(folder, kernel).ok_or(error).map(Some)?,
    };
    if let Some(name) = asked.or_else(|| newest_unpacked(folder, kernel)) {
        return Ok(name);
    }
    update_lists()?;
    kernel_in(&run(&mut ask)?).ok_or(ImageError::Package {
        package: kernel.package().to_owned(),
        problem: "is not in the package lists: run `apt-get update` as root, on Debian",
    })
}

fn kernel_in(answer: &str) -> Option<String> {
    let name = answer
        .lines()
        .find_map(|line| line.trim().strip_prefix("Depends: "))?;
    name.starts_with("linux-image-").then(|| name.to_owned())
}

fn newest_unpacked(folder: &Path, kernel: Kernel) -> Option<String> {
    let Ok(entries) = fs::read_dir(folder) else {
        return None;
    };
    entries
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| kernel.is(name))
        .max()
}

/// The folder with the content of a package, downloaded if it is not there yet.
fn unpacked(folder: &Path, package: &str) -> Result<PathBuf, ImageError> {
    let tree = folder.join(package);
    if tree.is_dir() {
        return Ok(tree);
    }
    let download = folder.join(format!("download-{package}"));
    fs::create_dir_all(&download).map_err(|source| file_error(&download, source))?;
    let mut fetch = Command::new("apt-get");
    // The sandbox user of apt cannot write into a folder of ours.
    fetch.current_dir(&download).args([
        "-qq",
        "-o",
        "APT::Sandbox::User=root",
        "download",
        package,
    ]);
    if run(&mut fetch).is_err() {
        update_lists()?;
        run(&mut fetch)?;
    }
    let archive = first_deb(&download, package)?;
    let half = folder.join(format!("half-{package}"));
    run(Command::new("dpkg-deb").arg("-x").arg(&archive).arg(&half))?;
    fs::rename(&half, &tree).map_err(|source| file_error(&tree, source))?;
    fs::remove_dir_all(&download).map_err(|source| file_error(&download, source))?;
    Ok(tree)
}

fn update_lists() -> Result<(), ImageError> {
    run(Command::new("apt-get").args(["-qq", "update"])).map(|_| ())
}

fn first_deb(folder: &Path, package: &str) -> Result<PathBuf, ImageError> {
    for entry in fs::read_dir(folder).map_err(|source| file_error(folder, source))? {
        let path = entry.map_err(|source| file_error(folder, source))?.path();
        if path.extension().is_some_and(|ending| ending == "deb") {
            return Ok(path);
        }
    }
    let problem = "was downloaded, but no .deb file is there";
    Err(ImageError::Package {
        package: package.to_owned(),
        problem,
    })
}

/// Builds `guest-work` without any shared library, since the guest has none.
fn build_guest_work(folder: &Path) -> Result<PathBuf, ImageError> {
    let target = folder.join("build");
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let mut build = Command::new(cargo);
    build
        .current_dir(repository())
        .args([
            "build",
            "--quiet",
            "--release",
            "--package",
            "pagetide-guest",
        ])
        .args([
            "--bin",
            "guest-work",
            "--target",
            GUEST_TARGET,
            "--target-dir",
        ])
        .arg(&target)
        .env_remove("CARGO_ENCODED_RUSTFLAGS")
        .env(
            "RUSTFLAGS",
            "-C target-feature=+crt-static -C strip=symbols",
        );
    run(&mut build)?;
    Ok(target.join(GUEST_TARGET).join("release/guest-work"))
}

fn run(command: &mut Command) -> Result<String, ImageError> {
    let line = command_line(command);
    let output = command.output().map_err(|source| ImageError::Start {
        command: line.clone(),
        source,
    })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let said = String::from_utf8_lossy(&output.stderr).trim().to_owned();
    let said = if said.is_empty() {
        output.status.to_string()
    } else {
        said
    };
    Err(ImageError::Failed {
        command: line,
        output: said,
    })
}

/// A command as a person would type it.
#[must_use]
pub fn command_line(command: &Command) -> String {
    let words = std::iter::once(command.get_program()).chain(command.get_args());
    words
        .map(|word| word.to_string_lossy())
        .collect::<Vec<_>>()
        .join(" ")
}

fn write_if_changed(path: &Path, content: &[u8]) -> Result<(), ImageError> {
    if fs::read(path).is_ok_and(|old| old == content) {
        return Ok(());
    }
    // A booting guest may have the old one open: never write into it.
    let half = path.with_extension("half");
    fs::write(&half, content).map_err(|source| file_error(&half, source))?;
    fs::rename(&half, path).map_err(|source| file_error(path, source))
}

fn read(path: &Path) -> Result<Vec<u8>, ImageError> {
    fs::read(path).map_err(|source| file_error(path, source))
}

fn file_error(path: &Path, source: io::Error) -> ImageError {
    ImageError::File {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_package_is_read_from_apts_answer() {
        let answer = "linux-image-cloud-amd64\n  Depends: linux-image-6.1.0-50-cloud-amd64\n";
        assert_eq!(
            kernel_in(answer).as_deref(),
            Some("linux-image-6.1.0-50-cloud-amd64")
        );
        assert_eq!(kernel_in("linux-image-cloud-amd64\n"), None);
    }

    #[test]
    fn kernels_of_the_two_kinds_are_told_apart_by_their_packages() {
        let (cloud, full) = (
            "linux-image-6.1.0-50-cloud-amd64",
            "linux-image-6.1.0-50-amd64",
        );
        assert!(Kernel::Cloud.is(cloud) && !Kernel::Cloud.is(full));
        assert!(Kernel::Full.is(full) && !Kernel::Full.is(cloud));
        assert!(!Kernel::Full.is("busybox-static"));
    }
}
