// SPDX-License-Identifier: Apache-2.0
//! Tenants as the paper has them: each NIC is passed through, by VFIO, to a VM of its own, whose memory is of huge
//! pages. The VM runs the same kernel and the same `guest-work`, which obeys us as we obey the host.
//!
//! ```text
//!   this machine ─ vfio-pci ─ QEMU, KVM ─┬─ second serial port: ready, serve WORKLOAD, serving 1
//!                     │                  └─ memory in /huge: mapped for the NIC, 2 MiB at a time
//!                     ▼
//!              IOMMU of this machine: I/O virtual address = physical address in the VM
//! ```
//! Where this machine is emulated, so is its hardware virtualization: a VM boots in a minute or two.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use super::error::{LOOK, RecordError};
use super::tenants;
use super::workload::ServedWorkload;

const QEMU: &str = "/usr/bin/qemu-system-x86_64";
const KERNEL: &str = "/vm/kernel";
const INITRAMFS: &str = "/vm/initramfs";
const HUGE: &str = "/huge";
/// Memory of a VM, in MiB; a multiple of a huge page.
const VM_MIB: u64 = 160;
const HUGE_PAGE_MIB: u64 = 2;
const PCI_DEVICES: &str = "/sys/bus/pci/devices";
/// Class of Ethernet controllers, without the programming interface.
const CLASS: &str = "0x0200";
/// Longest wait for a VM to boot, or to start its server.
const PATIENCE: Duration = Duration::from_secs(500);
/// Words for the kernel of a VM: it is late at times, and must not mistrust its clock for that.
const COMMAND_LINE: &str = "console=ttyS0 loglevel=4 panic=-1 nowatchdog rcupdate.rcu_cpu_stall_suppress=1 \
                            mitigations=off no_timer_check tsc=reliable pt.record=1";

/// Running VMs with a NIC each.
#[derive(Debug)]
pub(super) struct AssignedVms(Vec<Vm>);

impl AssignedVms {
    /// Gives every NIC to a VM, and returns when all of them serve.
    pub(super) fn start(workload: ServedWorkload) -> Result<Self, RecordError> {
        let nics = nics()?;
        if nics.is_empty() {
            return Err(RecordError::NoDevice("network interface"));
        }
        // The emulated IOMMU does not remap interrupts.
        let unsafe_interrupts = "/sys/module/vfio_iommu_type1/parameters/allow_unsafe_interrupts";
        fs::write(unsafe_interrupts, "1").map_err(RecordError::io(unsafe_interrupts))?;
        reserve(nics.len() as u64 * VM_MIB / HUGE_PAGE_MIB)?;
        let mut vms = Vec::new();
        for nic in &nics {
            give_to_vfio(nic)?;
            vms.push(Vm::start(nic)?);
        }
        for vm in &mut vms {
            vm.expect("ready")?;
            vm.tell(&format!("serve {}\n", workload.name()))?;
        }
        for vm in &mut vms {
            vm.expect("serving 1")?;
        }
        Ok(Self(vms))
    }

    pub(super) fn count(&self) -> usize {
        self.0.len()
    }
}

/// Ethernet controllers, by their places on the bus.
fn nics() -> Result<Vec<String>, RecordError> {
    let mut nics = Vec::new();
    for entry in fs::read_dir(PCI_DEVICES).map_err(RecordError::io(PCI_DEVICES))? {
        let entry = entry.map_err(RecordError::io(PCI_DEVICES))?;
        let class = fs::read_to_string(entry.path().join("class"));
        if class.is_ok_and(|class| class.starts_with(CLASS)) {
            nics.push(entry.file_name().to_string_lossy().into_owned());
        }
    }
    nics.sort();
    Ok(nics)
}

/// Reserves huge pages, all of them.
fn reserve(pages: u64) -> Result<(), RecordError> {
    const COUNT: &str = "/proc/sys/vm/nr_hugepages";
    fs::create_dir_all(HUGE).map_err(RecordError::io(HUGE))?;
    tenants::run(&["mount", "-t", "hugetlbfs", "huge", HUGE])?;
    fs::write(COUNT, pages.to_string()).map_err(RecordError::io(COUNT))?;
    let text = fs::read_to_string(COUNT).map_err(RecordError::io(COUNT))?;
    match text.trim().parse::<u64>() {
        Ok(reserved) if reserved >= pages => Ok(()),
        _ => Err(RecordError::Program {
            program: COUNT.to_owned(),
            said: format!("{} of {pages} huge pages are there", text.trim()),
        }),
    }
}

/// Takes a device from its driver, and gives it to the one for passing through.
fn give_to_vfio(nic: &str) -> Result<(), RecordError> {
    let device = Path::new(PCI_DEVICES).join(nic);
    let write = |path: PathBuf, text: &str| {
        fs::write(&path, text).map_err(RecordError::io(path.to_string_lossy()))
    };
    write(device.join("driver_override"), "vfio-pci")?;
    if device.join("driver").exists() {
        write(device.join("driver/unbind"), nic)?;
    }
    write(PathBuf::from("/sys/bus/pci/drivers_probe"), nic)
}

/// A VM with a NIC. Dropped, it is killed.
#[derive(Debug)]
struct Vm {
    child: Child,
    orders: Option<ChildStdin>,
    answers: Receiver<String>,
    nic: String,
}

impl Drop for Vm {
    fn drop(&mut self) {
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            eprintln!("guest-work: ending the VM of {}: {error}", self.nic);
        }
    }
}

impl Vm {
    fn start(nic: &str) -> Result<Self, RecordError> {
        let log = format!("/tmp/vm-{nic}.log");
        let mut child = Command::new(QEMU)
            .args(["-L", "/usr/share/qemu", "-nodefaults", "-no-user-config"])
            .args(["-display", "none", "-accel", "kvm", "-cpu", "host"])
            .args(["-smp", "1", "-m", &format!("{VM_MIB}M")])
            .arg("-object")
            .arg(format!(
                "memory-backend-file,id=ram,size={VM_MIB}M,mem-path={HUGE},prealloc=on"
            ))
            .args(["-machine", "q35,memory-backend=ram"])
            .args(["-kernel", KERNEL, "-initrd", INITRAMFS])
            .args(["-append", COMMAND_LINE])
            .args(["-action", "reboot=shutdown,panic=exit-failure"])
            .args(["-serial", &format!("file:{log}")])
            .args(["-chardev", "stdio,id=port,signal=off"])
            .args(["-serial", "chardev:port"])
            .args(["-device", &format!("vfio-pci,host={nic}")])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .map_err(RecordError::io(QEMU))?;
        let orders = child.stdin.take();
        let answers = child.stdout.take().map(listen);
        Ok(Self {
            child,
            orders,
            // A VM without output has ended.
            answers: answers.unwrap_or_else(|| channel().1),
            nic: nic.to_owned(),
        })
    }

    fn tell(&mut self, order: &str) -> Result<(), RecordError> {
        let Some(orders) = &mut self.orders else {
            return Ok(());
        };
        orders
            .write_all(order.as_bytes())
            .and_then(|()| orders.flush())
            .map_err(RecordError::io(QEMU))
    }

    /// Waits for a line, which must be `answer`.
    fn expect(&mut self, answer: &str) -> Result<(), RecordError> {
        let deadline = Instant::now() + PATIENCE;
        loop {
            match self.answers.recv_timeout(LOOK) {
                Ok(line) if line == answer => return Ok(()),
                Ok(line) => return Err(self.failed(&line)),
                Err(RecvTimeoutError::Disconnected) => return Err(self.failed("it ended")),
                Err(RecvTimeoutError::Timeout) if Instant::now() > deadline => {
                    return Err(RecordError::Late {
                        what: format!("'{answer}' of the VM of {}", self.nic),
                        seconds: PATIENCE.as_secs(),
                    });
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
        }
    }

    /// The error with the end of its console.
    fn failed(&self, said: &str) -> RecordError {
        let console = fs::read_to_string(format!("/tmp/vm-{}.log", self.nic)).unwrap_or_default();
        let mut last: Vec<&str> = console.lines().rev().take(5).collect();
        last.reverse();
        RecordError::Program {
            program: format!("the VM of {}", self.nic),
            said: format!("{said}: {}", last.join("; ")),
        }
    }
}

/// The lines of a VM's port. The channel ends with the VM.
fn listen(output: ChildStdout) -> Receiver<String> {
    let (send, receive) = channel();
    thread::spawn(move || {
        for line in BufReader::new(output).lines() {
            let Ok(line) = line else { return };
            if send.send(line.trim().to_owned()).is_err() {
                return;
            }
        }
    });
    receive
}
