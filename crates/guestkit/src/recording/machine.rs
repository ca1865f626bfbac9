// SPDX-License-Identifier: Apache-2.0
//! The QEMU with an emulated VT-d whose log is kept, and the port of its guest.

use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::json;

use super::{Device, Mode, RecordingError, RecordingSpec, log_in, maps_in};
use crate::guest::tail;
use crate::image::Image;
use crate::qemu::{Accel, QEMU};
use crate::qmp::Qmp;

/// Longest wait for the guest's next words. A machine in an emulated one boots for minutes.
const PATIENCE: Duration = Duration::from_secs(900);
/// Between two looks for QEMU's end.
const LOOK: Duration = Duration::from_millis(200);
/// Bytes of the disk for the kernel's records; only what is written takes room.
const MAPS_BYTES: u64 = 8 << 30;
/// Records that the guest's kernel keeps, for each CPU: two million.
const TRACE_BUFFER: &str = "96M";
const CPUS: u64 = 2;
const RAM_MIB: u64 = 768;
/// For a NIC's buffers.
const RAM_OF_A_DEVICE_MIB: u64 = 16;
/// For a VM and the QEMU around it.
const RAM_OF_A_VM_MIB: u64 = 256;
/// Bytes of an NVMe disk. It is not kept.
const DISK_BYTES: u64 = 1 << 30;
/// Events of the emulated VT-d that make a trace.
const EVENTS: [&str; 3] = ["vtd_iotlb_page_*", "vtd_iotlb_cc_update", "vtd_inv_desc_*"];

/// A running QEMU and the port of its guest. Dropped, it is killed.
#[derive(Debug)]
pub(super) struct Machine {
    child: Child,
    orders: Option<ChildStdin>,
    answers: Receiver<String>,
    folder: PathBuf,
}

impl Drop for Machine {
    fn drop(&mut self) {
        if let Err(error) = self.child.kill().and_then(|()| self.child.wait()) {
            eprintln!("ending QEMU: {error}");
        }
    }
}

impl Machine {
    /// Starts QEMU.
    pub(super) fn start(
        spec: &RecordingSpec,
        image: &Image,
        accel: Accel,
    ) -> Result<Self, RecordingError> {
        let maps = maps_in(&spec.folder);
        File::create(&maps)
            .and_then(|file| file.set_len(MAPS_BYTES))
            .map_err(RecordingError::io(maps.to_string_lossy()))?;
        let log = spec.folder.join("qemu.log");
        let errors = File::create(&log).map_err(RecordingError::io(log.to_string_lossy()))?;
        // It must not outlive us, however we end.
        let mut child = Command::new("setpriv")
            .args(["--pdeathsig", "KILL", "--", QEMU])
            .args(arguments(spec, image, accel))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(errors)
            .spawn()
            .map_err(RecordingError::io("setpriv"))?;
        let orders = child.stdin.take();
        let answers = child.stdout.take().map(listen);
        Ok(Self {
            child,
            orders,
            answers: answers.unwrap_or_else(|| channel().1),
            folder: spec.folder.clone(),
        })
    }

    /// Gives the guest an order.
    pub(super) fn tell(&mut self, order: &str) -> Result<(), RecordingError> {
        let Some(orders) = &mut self.orders else {
            return Ok(());
        };
        writeln!(orders, "{order}")
            .and_then(|()| orders.flush())
            .map_err(RecordingError::io("the guest's port"))
    }

    /// Waits for the guest's next words, which must be these.
    pub(super) fn expect(&mut self, wanted: &str) -> Result<(), RecordingError> {
        let said = self.next(wanted)?;
        if said == wanted {
            return Ok(());
        }
        Err(self.unexpected(said, wanted))
    }

    /// Waits for the guest's next words, which must be these and a number.
    pub(super) fn number_behind(&mut self, wanted: &str) -> Result<u64, RecordingError> {
        let said = self.next(wanted)?;
        match said.strip_prefix(wanted).map(str::parse) {
            Some(Ok(number)) => Ok(number),
            _ => Err(self.unexpected(said, wanted)),
        }
    }

    fn unexpected(&self, said: String, wanted: &str) -> RecordingError {
        RecordingError::Said {
            said,
            wanted: wanted.to_owned(),
            log: self.log_tails(),
        }
    }

    fn next(&mut self, wanted: &str) -> Result<String, RecordingError> {
        let deadline = Instant::now() + PATIENCE;
        let how = loop {
            match self.answers.recv_timeout(LOOK) {
                Ok(line) => return Ok(line),
                Err(RecvTimeoutError::Disconnected) => break "ended",
                Err(RecvTimeoutError::Timeout) if Instant::now() > deadline => break "was silent",
                Err(RecvTimeoutError::Timeout) => {}
            }
        };
        Err(RecordingError::Silent {
            how,
            wanted: wanted.to_owned(),
            log: self.log_tails(),
        })
    }

    /// The ports of this machine that lead to the servers, one for each NIC.
    pub(super) fn host_ports(&self) -> Result<Vec<u16>, RecordingError> {
        let table = self.qmp()?.execute(
            "human-monitor-command",
            &json!({ "command-line": "info usernet" }),
        )?;
        Ok(forwarded(table.as_str().unwrap_or_default()))
    }

    /// Ends the log: what devices ask from now on is not in it.
    pub(super) fn end_log(&self) -> Result<(), RecordingError> {
        let mut qmp = self.qmp()?;
        for name in EVENTS {
            let events = json!({ "name": name, "enable": false });
            qmp.execute("trace-event-set-state", &events)?;
        }
        Ok(())
    }

    fn qmp(&self) -> Result<Qmp, RecordingError> {
        Ok(Qmp::connect(&self.folder.join("qmp.sock"))?)
    }

    fn log_tails(&self) -> String {
        ["qemu.log", "console.log"]
            .map(|name| tail(&self.folder.join(name), 15))
            .join("")
    }
}

/// Ports of this machine in QEMU's table of forwarded ones:
/// `TCP[HOST_FORWARD] FD ADDRESS PORT ADDRESS PORT …`.
fn forwarded(table: &str) -> Vec<u16> {
    let port = |line: &str| {
        let mut words = line.split_whitespace();
        if words.next() != Some("TCP[HOST_FORWARD]") {
            return None;
        }
        words.nth(2).and_then(|port| port.parse().ok())
    };
    table.lines().filter_map(port).collect()
}

fn listen(output: ChildStdout) -> Receiver<String> {
    let (send, receive) = channel();
    // Ends when QEMU does.
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

/// The arguments of `qemu-system-x86_64`.
fn arguments(spec: &RecordingSpec, image: &Image, accel: Accel) -> Vec<String> {
    let file = |name: &str| spec.folder.join(name).display().to_string();
    let devices = u64::from(spec.devices);
    let ram_mib = RAM_MIB
        + devices
            * match spec.mode {
                Mode::Strict | Mode::Lazy => RAM_OF_A_DEVICE_MIB,
                Mode::Passthrough => RAM_OF_A_VM_MIB,
            };
    let mut words: Vec<String> = ["-nodefaults", "-no-user-config", "-display", "none"]
        .map(str::to_owned)
        .to_vec();
    let mut option = |name: &str, value: String| words.extend([name.to_owned(), value]);
    option("-action", "reboot=shutdown,panic=exit-failure".to_owned());
    option("-accel", accel.argument().to_owned());
    option("-cpu", "max".to_owned());
    option("-smp", CPUS.to_string());
    option("-m", format!("{ram_mib}M"));
    option("-machine", "q35,kernel-irqchip=split".to_owned());
    // With interrupt remapping the guest tests its timer, and panics where the host is busy and it is late.
    option("-device", "intel-iommu,intremap=off".to_owned());
    option("-kernel", image.kernel.display().to_string());
    option("-initrd", image.initramfs.display().to_string());
    option("-append", command_line(spec.mode));
    option(
        "-qmp",
        format!("unix:{},server=on,wait=off", file("qmp.sock")),
    );
    option("-serial", format!("file:{}", file("console.log")));
    option("-chardev", "stdio,id=port,signal=off".to_owned());
    option("-serial", "chardev:port".to_owned());
    // Not behind the IOMMU, so it is not in the log.
    let maps = maps_in(&spec.folder).display().to_string();
    option(
        "-drive",
        format!("file={maps},format=raw,if=none,id=maps,cache=unsafe"),
    );
    option("-device", "virtio-blk-pci,drive=maps".to_owned());
    for number in 0..spec.devices {
        for (name, value) in device(spec, number) {
            option(name, value);
        }
    }
    for event in EVENTS {
        option("-trace", event.to_owned());
    }
    option("-msg", "timestamp=on".to_owned());
    option("-D", log_in(&spec.folder).display().to_string());
    words
}

fn device(spec: &RecordingSpec, number: u32) -> [(&'static str, String); 2] {
    let name = match spec.device {
        Device::Vmxnet3 => "vmxnet3",
        Device::E1000e => "e1000e",
        Device::VirtioNet => "virtio-net-pci,iommu_platform=on,disable-legacy=on",
        Device::Nvme => {
            return [
                (
                    "-drive",
                    format!("driver=null-co,read-zeroes=on,size={DISK_BYTES},if=none,id=d{number}"),
                ),
                (
                    "-device",
                    format!("nvme,drive=d{number},serial=tenant{number}"),
                ),
            ];
        }
    };
    let port = spec
        .workload
        .served()
        .map_or(0, pagetide_guest::record::ServedWorkload::port);
    [
        (
            "-netdev",
            format!("user,id=n{number},ipv6=off,hostfwd=tcp:127.0.0.1:0-:{port}"),
        ),
        // Without firmware of its own: nothing boots from it.
        ("-device", format!("{name},netdev=n{number},romfile=")),
    ]
}

fn command_line(mode: Mode) -> String {
    let strict = match mode {
        Mode::Strict | Mode::Passthrough => 1,
        Mode::Lazy => 0,
    };
    // As for the other guests of tests; moreover a guest that is late must not mistrust its clock for that.
    format!(
        "console=ttyS0 loglevel=4 panic=-1 nowatchdog rcupdate.rcu_cpu_stall_suppress=1 mitigations=off \
         no_timer_check tsc=reliable intel_iommu=on iommu.strict={strict} \
         trace_event=iommu:map,iommu:unmap trace_buf_size={TRACE_BUFFER} pt.record=1"
    )
}

/// Removes the socket of an earlier QEMU.
pub(super) fn remove_socket(spec: &RecordingSpec) -> Result<(), RecordingError> {
    let path = spec.folder.join("qmp.sock");
    match fs::remove_file(&path) {
        Err(source) if source.kind() != std::io::ErrorKind::NotFound => Err(RecordingError::Io {
            what: path.display().to_string(),
            source,
        }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Workload;
    use super::*;

    #[test]
    fn forwarded_ports_are_read_in_order() {
        let table = "Hub -1 (n0):\n  Protocol[State]    FD  Source Address  Port   Dest. Address  Port RecvQ SendQ\n\
                     \x20 TCP[HOST_FORWARD]   3       127.0.0.1 32901       10.0.2.15  5201     0     0\n\
                     \x20 TCP[ESTABLISHED]    9       127.0.0.1 111         10.0.2.15  5201     0     0\n\
                     Hub -1 (n1):\n  TCP[HOST_FORWARD]   4       127.0.0.1 40001       10.0.2.15  5201     0     0\n";
        assert_eq!(forwarded(table), [32901, 40001]);
        assert!(forwarded("").is_empty());
    }

    #[test]
    fn devices_are_behind_the_iommu_and_the_disk_of_records_is_not() {
        let spec = RecordingSpec {
            device: Device::VirtioNet,
            devices: 3,
            workload: Workload::Media,
            seconds: 1,
            mode: Mode::Lazy,
            folder: "/f".into(),
        };
        let image = Image {
            kernel: "/k".into(),
            initramfs: "/i".into(),
            release: "6".to_owned(),
        };
        let line = arguments(&spec, &image, Accel::Tcg).join(" ");
        assert_eq!(line.matches("iommu_platform=on").count(), 3, "{line}");
        assert!(line.contains("virtio-blk-pci,drive=maps -netdev"));
        assert!(line.contains("-:8080") && line.contains("iommu.strict=0"));
        let iommu = line.find("intel-iommu").expect("an IOMMU");
        assert!(iommu < line.find("virtio-blk-pci").expect("a disk"));
    }
}
