// SPDX-License-Identifier: Apache-2.0
//! The command line of a stock QEMU for a test guest.
//!
//! Pure functions: from a [`GuestSpec`] and the machine's properties to arguments. [`crate::guest`] starts
//! it.

use std::path::{Path, PathBuf};
use std::process::Command;

use pagetide_guest::params::Params;

use crate::image::Image;

/// Name of the emulator.
pub const QEMU: &str = "qemu-system-x86_64";

/// QEMU cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum QemuError {
    /// It is not installed.
    #[error("{QEMU} could not be started ({0}): install the package qemu-system-x86")]
    Missing(std::io::Error),
    /// Its version cannot be read.
    #[error("{QEMU} --version says {0:?}, and no version is in it")]
    NoVersion(String),
}

/// QEMU's version.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version {
    /// First number.
    pub major: u32,
    /// Second number.
    pub minor: u32,
    /// Third number.
    pub micro: u32,
}

impl Version {
    /// Queries the installed QEMU.
    ///
    /// # Errors
    /// It is not installed, or its answer has no version.
    pub fn installed() -> Result<Self, QemuError> {
        let output = Command::new(QEMU)
            .arg("--version")
            .output()
            .map_err(QemuError::Missing)?;
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        Self::parse(&text).ok_or(QemuError::NoVersion(text))
    }

    /// Name and value of the option for a socket to reconnect after a fifth of a second, or after a second
    /// where only whole seconds are possible.
    #[must_use]
    pub fn reconnect(self) -> (&'static str, u32) {
        // 9.2 renamed the option to milliseconds, and later versions drop the old one.
        if (self.major, self.minor) >= (9, 2) {
            ("reconnect-ms", 200)
        } else {
            ("reconnect", 1)
        }
    }

    fn parse(text: &str) -> Option<Self> {
        let words = text.split_once("version ")?.1;
        let number = words
            .split(|c: char| c != '.' && !c.is_ascii_digit())
            .next()?;
        let mut parts = number.split('.').map(str::parse);
        let mut part = || match parts.next() {
            Some(Ok(part)) => Some(part),
            _ => None,
        };
        Some(Self {
            major: part()?,
            minor: part()?,
            micro: part().unwrap_or(0),
        })
    }
}

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// What runs the guest's instructions.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Accel {
    /// Hardware virtualization.
    Kvm,
    /// Software emulation.
    Tcg,
}

impl Accel {
    /// KVM where a hardware module of it is loaded and may be used.
    ///
    /// `/dev/kvm` alone is not enough: where neither `kvm_intel` nor `kvm_amd`
    /// is behind it, stock guest kernels hang at boot.
    #[must_use]
    pub fn of_this_machine() -> Self {
        let module = ["kvm_intel", "kvm_amd"]
            .iter()
            .any(|name| Path::new("/sys/module").join(name).exists());
        let device = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open("/dev/kvm");
        if module && device.is_ok() {
            Self::Kvm
        } else {
            Self::Tcg
        }
    }

    /// Its name in reports.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg",
        }
    }

    /// As QEMU's `-accel` has it.
    pub(crate) const fn argument(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::Tcg => "tcg,thread=multi",
        }
    }
}

/// Where guest RAM lies.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Ram {
    /// A shared memfd: what Pagetide takes over.
    #[default]
    SharedMemfd,
    /// A shared unlinked file in this folder, which is on a tmpfs.
    SharedFile(PathBuf),
    /// A memfd mapped privately.
    PrivateMemfd,
    /// A shared memfd of huge pages, 2 MiB each.
    HugetlbMemfd,
    /// Anonymous memory: QEMU's default.
    Anonymous,
}

/// The guest's disk.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum Disk {
    /// No disk.
    #[default]
    Absent,
    /// A raw image that QEMU itself opens; the string has options for its `-drive`.
    Image(PathBuf, &'static str),
    /// A vhost-user-blk back end that listens on a socket.
    VhostUser(PathBuf),
}

/// Where the port of the guest's work leads.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Port {
    /// A socket that QEMU listens on ([`Paths::port`]).
    #[default]
    Socket,
    /// QEMU's input and output.
    Stdio,
}

/// A guest to be started.
#[derive(Clone, Debug)]
pub struct GuestSpec {
    /// Its RAM.
    pub ram_bytes: u64,
    /// Where the RAM lies.
    pub ram: Ram,
    /// Number of virtual CPUs.
    pub cpus: u32,
    /// Its disk.
    pub disk: Disk,
    /// Queues of a vhost-user disk.
    pub disk_queues: u32,
    /// What runs in it.
    pub work: Params,
    /// Whether a balloon reports free pages.
    pub free_page_reporting: bool,
    /// RAM that can be plugged in while it runs.
    pub spare_ram_bytes: u64,
    /// User that QEMU becomes after it has opened everything.
    pub run_as: Option<String>,
    /// The other end of its work's port.
    pub port: Port,
    /// More arguments for QEMU.
    pub extra: Vec<String>,
}

impl Default for GuestSpec {
    fn default() -> Self {
        Self {
            ram_bytes: 512 << 20,
            ram: Ram::default(),
            cpus: 2,
            disk: Disk::default(),
            disk_queues: 2,
            work: Params::default(),
            free_page_reporting: false,
            spare_ram_bytes: 0,
            run_as: None,
            port: Port::default(),
            extra: Vec::new(),
        }
    }
}

/// Files and sockets of one running guest, in one folder.
#[derive(Clone, Debug)]
pub struct Paths {
    /// The folder.
    pub folder: PathBuf,
    /// QEMU's monitor.
    pub qmp: PathBuf,
    /// The port of the guest's work.
    pub port: PathBuf,
    /// Output of the guest's kernel and work.
    pub console: PathBuf,
    /// Output of QEMU itself.
    pub log: PathBuf,
}

impl Paths {
    /// The names in `folder`.
    #[must_use]
    pub fn in_folder(folder: &Path) -> Self {
        let file = |name| folder.join(name);
        Self {
            folder: folder.to_owned(),
            qmp: file("qmp.sock"),
            port: file("port.sock"),
            console: file("console.log"),
            log: file("qemu.log"),
        }
    }
}

/// The arguments of `qemu-system-x86_64`.
#[must_use]
pub fn arguments(
    spec: &GuestSpec,
    image: &Image,
    paths: &Paths,
    accel: Accel,
    version: Version,
) -> Vec<String> {
    let mut words: Vec<String> = ["-nodefaults", "-no-user-config", "-display", "none"]
        .map(str::to_owned)
        .to_vec();
    let mut option = |name: &str, value: String| words.extend([name.to_owned(), value]);
    // A guest that panics must end, not restart.
    option("-action", "reboot=shutdown,panic=exit-failure".to_owned());
    option("-accel", accel.argument().to_owned());
    option("-cpu", "max".to_owned());
    option("-smp", spec.cpus.to_string());
    option("-m", memory_size(spec));
    let (object, machine) = memory(&spec.ram, spec.ram_bytes);
    if let Some(object) = object {
        option("-object", object);
    }
    option("-machine", machine);
    option("-kernel", image.kernel.display().to_string());
    option("-initrd", image.initramfs.display().to_string());
    option("-append", kernel_command_line(&spec.work));
    option(
        "-qmp",
        format!("unix:{},server=on,wait=off", paths.qmp.display()),
    );
    option("-serial", format!("file:{}", paths.console.display()));
    let port = match spec.port {
        Port::Socket => format!(
            "socket,id=port,path={},server=on,wait=off",
            paths.port.display()
        ),
        Port::Stdio => "stdio,id=port,signal=off".to_owned(),
    };
    option("-chardev", port);
    option("-serial", "chardev:port".to_owned());
    for (name, value) in disk(spec, version) {
        option(name, value);
    }
    if spec.free_page_reporting {
        option(
            "-device",
            "virtio-balloon-pci,free-page-reporting=on".to_owned(),
        );
    }
    if let Some(user) = &spec.run_as {
        option("-runas", user.clone());
    }
    words.extend(spec.extra.iter().cloned());
    words
}

fn memory_size(spec: &GuestSpec) -> String {
    let boot = format!("{}M", spec.ram_bytes >> 20);
    if spec.spare_ram_bytes == 0 {
        return boot;
    }
    let most = spec.ram_bytes + spec.spare_ram_bytes;
    format!("{boot},slots=4,maxmem={}M", most >> 20)
}

/// The memory object for this RAM, if there is one, and the machine that uses it.
pub(crate) fn memory(ram: &Ram, ram_bytes: u64) -> (Option<String>, String) {
    let kind = match ram {
        Ram::SharedMemfd => "memfd,share=on".to_owned(),
        Ram::PrivateMemfd => "memfd,share=off".to_owned(),
        Ram::HugetlbMemfd => "memfd,share=on,hugetlb=on,hugetlbsize=2M".to_owned(),
        Ram::SharedFile(folder) => format!("file,share=on,mem-path={}", folder.display()),
        Ram::Anonymous => return (None, "q35".to_owned()),
    };
    let object = format!("memory-backend-{kind},id=ram,size={ram_bytes}");
    (Some(object), "q35,memory-backend=ram".to_owned())
}

/// Whether `path`, as `/proc` shows it, is guest RAM of a QEMU started by [`arguments`].
#[must_use]
pub fn is_ram(path: &str) -> bool {
    path.contains("/memfd:memory-backend-memfd") || path.contains("/qemu_back_mem.")
}

fn disk(spec: &GuestSpec, version: Version) -> Vec<(&'static str, String)> {
    match &spec.disk {
        Disk::Absent => Vec::new(),
        Disk::Image(path, options) => vec![
            (
                "-drive",
                format!(
                    "file={},format=raw,if=none,id=blk0{options}",
                    path.display()
                ),
            ),
            ("-device", "virtio-blk-pci,drive=blk0".to_owned()),
        ],
        Disk::VhostUser(socket) => {
            let (name, value) = version.reconnect();
            let reconnect = format!("{name}={value}");
            let queues = spec.disk_queues;
            vec![
                (
                    "-chardev",
                    format!("socket,id=blk0,path={},{reconnect}", socket.display()),
                ),
                (
                    "-device",
                    format!("vhost-user-blk-pci,chardev=blk0,num-queues={queues}"),
                ),
            ]
        }
    }
}

fn kernel_command_line(work: &Params) -> String {
    // The guest may stall for seconds while no daemon runs: no watchdog may take that for a hang. On a busy
    // host a vCPU that was not run for a tick at boot must not take its timer for broken, and panic.
    // Debian's kernels zero every page as they allocate it, and so fetch it before a device can; here the
    // device must be first. Plugged memory is used at once, and only for movable pages, so that it can be
    // unplugged again.
    format!(
        "console=ttyS0 loglevel=4 panic=-1 nowatchdog rcupdate.rcu_cpu_stall_suppress=1 \
         mitigations=off no_timer_check init_on_alloc=0 memhp_default_state=online_movable {}",
        work.words()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn image() -> Image {
        Image {
            kernel: "/k".into(),
            initramfs: "/i".into(),
            release: "6".to_owned(),
        }
    }

    fn line(spec: &GuestSpec, version: Version) -> String {
        arguments(
            spec,
            &image(),
            &Paths::in_folder(Path::new("/g")),
            Accel::Tcg,
            version,
        )
        .join(" ")
    }

    #[test]
    fn version_is_read_with_and_without_distribution_suffix() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7)\nCopyright";
        let seven = Version {
            major: 7,
            minor: 2,
            micro: 22,
        };
        assert_eq!(Version::parse(debian), Some(seven));
        assert_eq!(Version::parse("version 10.0").map(|v| v.major), Some(10));
        assert_eq!(Version::parse("nothing"), None);
    }

    #[test]
    fn reconnect_option_follows_version() {
        let spec = GuestSpec {
            disk: Disk::VhostUser("/s".into()),
            ..GuestSpec::default()
        };
        let old = line(
            &spec,
            Version {
                major: 7,
                minor: 2,
                micro: 0,
            },
        );
        let new = line(
            &spec,
            Version {
                major: 10,
                minor: 0,
                micro: 0,
            },
        );
        assert!(old.contains("path=/s,reconnect=1 "), "{old}");
        assert!(new.contains("path=/s,reconnect-ms=200 "), "{new}");
    }

    #[test]
    fn default_guest_has_shared_memfd_and_no_disk() {
        let line = line(
            &GuestSpec::default(),
            Version {
                major: 7,
                minor: 2,
                micro: 0,
            },
        );
        assert!(line.contains("memory-backend-memfd,share=on,id=ram,size=536870912"));
        assert!(!line.contains("blk0"));
    }
}
