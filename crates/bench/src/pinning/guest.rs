// SPDX-License-Identifier: Apache-2.0
//! The VM: a process whose RAM the daemon takes over, with a network interface in it whose packets come back.
//!
//! ```text
//!   the RAM   │ content that is never asked for │ rings │ receiving buffers, a page each │ packets to be sent │
//! ```
//! Orders are lines of JSON, each answered by one line; the end of input ends the process.

use crate::{
    busy::{
        content::Mix,
        ram::{HugePages, Ram},
    },
    orders::say,
};
use pagetide_addr::{PAGE_BYTES, SECTION_BYTES, SECTION_PAGES};
use pagetide_frontend::nic::{Merging, NET_HEADER_BYTES, NIC_RINGS_BYTES, Nic, Way};
use pagetide_sys::{clock, mapping::SharedMapping};
use serde::{Deserialize, Serialize};
use std::{
    fmt::Display,
    io::BufRead as _,
    os::fd::OwnedFd,
    path::{Path, PathBuf},
    sync::Arc,
    time::{Duration, Instant},
};

/// Buffers of the receiving ring.
pub(super) const RING: u16 = 1024;
/// Packets under way.
const WINDOW: u64 = 64;
/// Bytes of a packet.
pub(super) const PACKET_BYTES: u32 = 1460;
/// Bytes of a receiving buffer.
const BUFFER_BYTES: u32 = 2048;
/// Memory of the interface, behind the content: whole sections.
const TAIL_BYTES: u64 = 6 << 20;
/// Nothing comes any more if nothing has come for so long.
const QUIET: Duration = Duration::from_millis(20);
/// Longest wait for a device to take the front end.
const CONNECT_WAIT: Duration = Duration::from_secs(20);

const _: () = assert!(TAIL_BYTES.is_multiple_of(SECTION_BYTES));
const _: () = assert!(NIC_RINGS_BYTES + (RING as u64 + WINDOW) * PAGE_BYTES <= TAIL_BYTES);

/// The VM to be started.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct NicGuestOptions {
    /// RAM in MiB without that of the interface; a multiple of 2
    #[arg(long)]
    pub ram_mib: u64,
    /// CPU of its driver
    #[arg(long)]
    pub cpu: usize,
}

/// An order.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Order {
    /// Be the front end of the device at this socket, with new rings.
    Connect {
        /// Its socket.
        socket: PathBuf,
    },
    /// Send packets round and round for so long.
    Run {
        /// In milliseconds.
        ms: u64,
    },
    /// Leave the device.
    Disconnect,
}

/// An answer.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) enum Answer {
    /// The RAM is filled.
    Ready {
        /// All of it.
        ram_bytes: u64,
    },
    /// Done.
    Done,
    /// Packets that came back.
    Ran {
        /// How many.
        packets: u64,
        /// In this time.
        ns: u64,
    },
    /// It failed.
    Failed {
        /// Why.
        reason: String,
    },
}

struct Driver {
    ram: Arc<SharedMapping>,
    file: OwnedFd,
    base: u64,
    nic: Option<Nic>,
}

fn told(error: impl Display) -> String {
    error.to_string()
}

/// Runs the VM until the end of input.
///
/// # Errors
/// A message.
pub fn run(options: &NicGuestOptions) -> Result<(), String> {
    let pages = options.ram_mib * (1 << 20) / SECTION_BYTES * SECTION_PAGES;
    let ram =
        Ram::with_tail(pages, TAIL_BYTES, HugePages::NotAdvised, Mix::Halves).map_err(told)?;
    ram.fill(pagetide_sys::cpu::affinity().map_err(told)?.len());
    let (file, mapping) = ram.shared().map_err(told)?;
    // The daemon holds vCPUs of what it takes over; this is one by its name.
    let driver = Driver {
        base: pages * PAGE_BYTES,
        ram: mapping,
        file,
        nic: None,
    };
    say(&Answer::Ready {
        ram_bytes: driver.ram.len_bytes(),
    })?;
    let cpu = options.cpu;
    let vcpu = std::thread::Builder::new()
        .name("CPU 0/KVM".into())
        .spawn(move || driver.serve(cpu))
        .map_err(|error| format!("no thread for the vCPU: {error}"))?;
    vcpu.join()
        .map_err(|_| "the vCPU has panicked".to_owned())?
}

impl Driver {
    fn serve(mut self, cpu: usize) -> Result<(), String> {
        pagetide_sys::cpu::set_affinity(&[cpu]).map_err(told)?;
        for line in std::io::stdin().lock().lines() {
            let order: Order = serde_json::from_str(&line.map_err(told)?).map_err(told)?;
            let answer = match self.obey(&order) {
                Ok(answer) => answer,
                Err(reason) => Answer::Failed { reason },
            };
            say(&answer)?;
        }
        Ok(())
    }

    fn obey(&mut self, order: &Order) -> Result<Answer, String> {
        match order {
            Order::Connect { socket } => self.connect(socket).map(|()| Answer::Done),
            Order::Run { ms } => self.go_round(Duration::from_millis(*ms)),
            Order::Disconnect => {
                self.nic = None;
                Ok(Answer::Done)
            }
        }
    }

    fn connect(&mut self, socket: &Path) -> Result<(), String> {
        // A ring begins at 0.
        let zeros = vec![0; usize::try_from(NIC_RINGS_BYTES).unwrap_or(0)];
        self.ram.copy_to(self.base, &zeros).map_err(told)?;
        let memory = (Arc::clone(&self.ram), self.file.try_clone().map_err(told)?);
        let mut nic =
            Nic::new(memory, self.base, RING, Merging::Mergeable, socket).map_err(told)?;
        for buffer in 0..u64::from(RING) {
            let at = self.page(buffer);
            nic.give(Way::Receive, at, BUFFER_BYTES).map_err(told)?;
        }
        let begun = Instant::now();
        while let Err(error) = nic.connect() {
            if begun.elapsed() > CONNECT_WAIT {
                return Err(told(error));
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        nic.kick(Way::Receive).map_err(told)?;
        for packet in 0..WINDOW {
            let at = self.page(u64::from(RING) + packet);
            let header = [0; NET_HEADER_BYTES as usize];
            self.ram.copy_to(at, &header).map_err(told)?;
            nic.give(Way::Send, at, NET_HEADER_BYTES + PACKET_BYTES)
                .map_err(told)?;
        }
        self.nic = Some(nic);
        Ok(())
    }

    fn page(&self, number: u64) -> u64 {
        self.base + NIC_RINGS_BYTES + number * PAGE_BYTES
    }

    fn go_round(&mut self, time: Duration) -> Result<Answer, String> {
        let nic = self.nic.as_mut().ok_or("there is no interface")?;
        nic.kick(Way::Send).map_err(told)?;
        let begun = Instant::now();
        let mut packets = 0;
        while begun.elapsed() < time {
            let mut sent = false;
            while let Some(back) = nic.take(Way::Send).map_err(told)? {
                nic.give(Way::Send, back.at, NET_HEADER_BYTES + PACKET_BYTES)
                    .map_err(told)?;
                sent = true;
            }
            if sent {
                nic.kick(Way::Send).map_err(told)?;
            }
            packets += receive(nic)?;
        }
        let ns = clock::ns(begun.elapsed());
        // What is still under way comes, too: a driver that rests has its whole ring posted.
        let mut last = Instant::now();
        while last.elapsed() < QUIET {
            if receive(nic)? > 0 {
                last = Instant::now();
            }
        }
        Ok(Answer::Ran { packets, ns })
    }
}

/// Takes the packets that have come, and posts their buffers again; how many there were.
fn receive(nic: &mut Nic) -> Result<u64, String> {
    let (mut packets, mut came) = (0, false);
    while let Some(back) = nic.take(Way::Receive).map_err(told)? {
        packets += u64::from(back.written > 0);
        nic.give(Way::Receive, back.at, BUFFER_BYTES)
            .map_err(told)?;
        came = true;
    }
    if came {
        nic.kick(Way::Receive).map_err(told)?;
    }
    Ok(packets)
}
