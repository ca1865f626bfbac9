// SPDX-License-Identifier: Apache-2.0
//! Records what the devices of a stock guest ask of its IOMMU, as HyperTRIO's log collector does (IV-A).
//!
//! ```text
//!   clients here ─ 127.0.0.1 ─ QEMU's network ─ NIC 1 ─ namespace or VM with a server ┐
//!                                             ─ NIC 2 ─ namespace or VM with a server ├ one stock guest
//!                                                 │ DMA                               ┘
//!                            emulated VT-d ◄──────┘      its kernel's tracepoints
//!                                  │                                  │
//!                               vtd.log                            maps.txt
//! ```
//! The log ends before the tracepoints do, so whatever is in the log was mapped before.

mod clients;
mod machine;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use pagetide_guest::record::ServedWorkload;
use serde::Serialize;

use crate::image::{self, Addition, Extras, Image, ImageError, Kernel};
use crate::programs::{FIO, IPERF3, ProgramError, QEMU_SYSTEM};
use crate::qemu::{Accel, QemuError, Version};
use crate::qmp::QmpError;
use machine::Machine;

/// Most devices of one machine: its bus has no more free places in the paper's.
pub const DEVICES_MAX: u32 = 24;
/// Firmware of a machine in the guest.
const FIRMWARE: [(&str, &str); 4] = [
    ("/usr/share/seabios/bios-256k.bin", "bios-256k.bin"),
    ("/usr/share/qemu/kvmvapic.bin", "kvmvapic.bin"),
    ("/usr/share/qemu/linuxboot_dma.bin", "linuxboot_dma.bin"),
    ("/usr/share/qemu/linuxboot.bin", "linuxboot.bin"),
];

/// Nothing could be recorded.
#[derive(Debug, thiserror::Error)]
pub enum RecordingError {
    /// No image.
    #[error(transparent)]
    Image(#[from] ImageError),
    /// A program for the guest is not there.
    #[error(transparent)]
    Program(#[from] ProgramError),
    /// QEMU cannot be used.
    #[error(transparent)]
    Qemu(#[from] QemuError),
    /// QEMU's monitor failed.
    #[error(transparent)]
    Qmp(#[from] QmpError),
    /// A file or a process failed.
    #[error("{what}: {source}")]
    Io {
        /// Which.
        what: String,
        /// Why.
        source: io::Error,
    },
    /// The guest said something else than what was expected.
    #[error("the guest said '{said}' where '{wanted}' was expected\n{log}")]
    Said {
        /// Its words.
        said: String,
        /// The words that were expected.
        wanted: String,
        /// Ends of its console and of QEMU's messages.
        log: String,
    },
    /// The guest ended or was silent.
    #[error("the guest {how} before it said '{wanted}'\n{log}")]
    Silent {
        /// What it did.
        how: &'static str,
        /// The words that were expected.
        wanted: String,
        /// Ends of its console and of QEMU's messages.
        log: String,
    },
    /// A client failed.
    #[error("a client of {workload}: {reason}")]
    Client {
        /// What it is a client of.
        workload: &'static str,
        /// Why.
        reason: String,
    },
}

impl RecordingError {
    fn io(what: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let what = what.into();
        move |source| Self::Io { what, source }
    }
}

/// The devices that are recorded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Device {
    /// VMware's NIC
    Vmxnet3,
    /// Intel's 82574L, whose driver is in Debian's full kernel
    E1000e,
    /// virtio's NIC, behind the IOMMU
    VirtioNet,
    /// An NVMe disk
    Nvme,
}

impl Device {
    /// The kernel that has its driver.
    const fn kernel(self) -> Kernel {
        match self {
            Self::E1000e => Kernel::Full,
            Self::Vmxnet3 | Self::VirtioNet | Self::Nvme => Kernel::Cloud,
        }
    }

    /// Its driver, unless that is built into the kernel.
    const fn module(self) -> Option<&'static str> {
        match self {
            Self::Vmxnet3 => Some("vmxnet3"),
            Self::E1000e => Some("e1000e"),
            Self::VirtioNet => Some("virtio_net"),
            Self::Nvme => None,
        }
    }
}

/// What the devices do.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Workload {
    /// A stream of bytes to each NIC
    Iperf3,
    /// Pieces of videos, fetched over several connections from each NIC
    Media,
    /// Questions to a search server behind each NIC
    Search,
    /// Blocks at random, read and written on each disk
    Fio,
}

impl Workload {
    /// What is served, of a workload of NICs.
    const fn served(self) -> Option<ServedWorkload> {
        match self {
            Self::Iperf3 => Some(ServedWorkload::Iperf3),
            Self::Media => Some(ServedWorkload::Media),
            Self::Search => Some(ServedWorkload::Search),
            Self::Fio => None,
        }
    }
}

/// Who maps memory for the devices, and how.
#[derive(Clone, Copy, PartialEq, Eq, Debug, clap::ValueEnum)]
pub enum Mode {
    /// The guest's drivers, buffer by buffer; what is unmapped is invalidated at once
    Strict,
    /// The guest's drivers; what was unmapped is invalidated later, all at once
    Lazy,
    /// VMs in the guest, by VFIO: their memory, in huge pages
    Passthrough,
}

/// What is recorded.
#[derive(Clone, Debug)]
pub struct RecordingSpec {
    /// The kind of devices.
    pub device: Device,
    /// How many, [`DEVICES_MAX`] at most.
    pub devices: u32,
    /// What they do.
    pub workload: Workload,
    /// For how long.
    pub seconds: u32,
    /// Who maps memory for them.
    pub mode: Mode,
    /// Where everything goes; it exists.
    pub folder: PathBuf,
}

/// What was recorded.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Recorded {
    /// Devices that worked.
    pub devices: u32,
    /// Bytes that the workload received: its server or its clients, as the direction is, or its disks and it.
    pub bytes_received: u64,
    /// What ran the guest's instructions.
    pub accel: &'static str,
    /// QEMU's version.
    pub qemu_version: String,
    /// The guest's kernel.
    pub kernel: String,
}

/// The log of QEMU in a folder.
#[must_use]
pub fn log_in(folder: &Path) -> PathBuf {
    folder.join("vtd.log")
}

/// The records of the guest's kernel in a folder.
#[must_use]
pub fn maps_in(folder: &Path) -> PathBuf {
    folder.join("maps.txt")
}

/// Boots the guest, lets its devices work, and leaves log and records in the folder.
///
/// # Errors
/// No image or no QEMU, a guest that does not do its part, a client that fails.
pub fn record(spec: &RecordingSpec) -> Result<Recorded, RecordingError> {
    let (accel, version) = (Accel::of_this_machine(), Version::installed()?);
    let image = image(spec)?;
    machine::remove_socket(spec)?;
    let mut machine = Machine::start(spec, &image, accel)?;
    machine.expect("ready")?;
    let bytes_received = match spec.workload.served() {
        Some(workload) => {
            let verb = match spec.mode {
                Mode::Strict | Mode::Lazy => "serve",
                Mode::Passthrough => "assign",
            };
            machine.tell(&format!("{verb} {}", workload.name()))?;
            machine.expect(&format!("serving {}", spec.devices))?;
            clients::run(workload, &machine.host_ports()?, spec.seconds)?
        }
        None => {
            machine.tell(&format!("disks {}", spec.seconds))?;
            machine.number_behind(&format!("ran {} ", spec.devices))?
        }
    };
    machine.end_log()?;
    machine.tell("trace")?;
    let bytes = machine.number_behind("traced ")?;
    drop(machine);
    cut(&maps_in(&spec.folder), bytes)?;
    Ok(Recorded {
        devices: spec.devices,
        bytes_received,
        accel: accel.name(),
        qemu_version: version.to_string(),
        kernel: image.release,
    })
}

/// Cuts the disk that the guest wrote its records to behind them.
fn cut(path: &Path, bytes: u64) -> Result<(), RecordingError> {
    fs::OpenOptions::new()
        .write(true)
        .open(path)
        .and_then(|file| file.set_len(bytes))
        .map_err(RecordingError::io(path.to_string_lossy()))
}

fn image(spec: &RecordingSpec) -> Result<Image, RecordingError> {
    let programs = match spec.workload {
        Workload::Iperf3 => IPERF3.additions()?,
        Workload::Fio => FIO.additions()?,
        // busybox and guest-work have their servers.
        Workload::Media | Workload::Search => Vec::new(),
    };
    let kernel = spec.device.kernel();
    let name = match spec.workload {
        Workload::Iperf3 => "iperf3",
        Workload::Fio => "fio",
        Workload::Media | Workload::Search => "none",
    };
    let driver: Vec<&str> = spec.device.module().into_iter().collect();
    let suffix = format!("-record-{name}-{}", driver.join("-"));
    let tenants = image::prepare_with(&Extras {
        suffix: &suffix,
        additions: &programs,
        kernel,
        modules: &driver,
    })?;
    if spec.mode != Mode::Passthrough {
        return Ok(tenants);
    }
    let mut additions = QEMU_SYSTEM.additions()?;
    additions.push(Addition::copy(&tenants.kernel, "vm/kernel"));
    additions.push(Addition::copy(&tenants.initramfs, "vm/initramfs"));
    for (path, name) in FIRMWARE {
        additions.push(Addition::copy(
            Path::new(path),
            &format!("usr/share/qemu/{name}"),
        ));
    }
    let suffix = format!("{suffix}-vms");
    Ok(image::prepare_with(&Extras {
        suffix: &suffix,
        additions: &additions,
        kernel,
        modules: &["kvm_amd", "kvm_intel", "vfio_iommu_type1", "vfio_pci"],
    })?)
}
