// SPDX-License-Identifier: Apache-2.0
//! Four real guests: stock Linux under a stock QEMU, each with a well-known program that serves requests.
//!
//! They come from the project's test kit: `service-guest`, of the crate `pagetide-guestkit`, lies beside this
//! program when both were built (`pagetide_guest::services` has the programs and the words). Requests follow
//! one another without a pause, and each answer is compared with what it must be. Of a guest's data 85 % are
//! never asked for; with what its kernel and programs leave alone that is the cold share of Taiji's Fig. 3a, for
//! all of its RAM is present from the start.

use super::{
    arms::Place,
    guest::Served,
    vms::{Beside, Vms, while_measuring},
};
use crate::orders::{Ordered, kit_program, this_program};
use pagetide_addr::PAGE_BYTES;
use pagetide_sys::mapping::SharedMapping;
use std::{
    fs::File,
    os::fd::AsFd as _,
    path::{Path, PathBuf},
    process::Command,
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

/// RAM of each.
pub(super) const RAM_BYTES: u64 = 384 << 20;
/// The services, by their names in an order.
pub(super) const SERVICES: [&str; 4] = ["redis", "sqlite", "files", "compile"];
const PROGRAM: &str = "service-guest";
/// QEMU's RAM, by the link of its descriptor.
const RAM_LINK: &str = "/memfd:memory-backend-memfd";
/// Longest wait for a boot, and for data to be made or compared, by four emulated guests at once.
const PATIENCE: Duration = Duration::from_secs(600);

/// See the module.
pub(super) struct RealGuests {
    guests: Vec<Ordered>,
    group: Option<PathBuf>,
}

/// Makes all of a guest's RAM present, as a process of the guest's cgroup, which is charged with it.
#[derive(clap::Args, Clone, PartialEq, Eq, Debug)]
pub struct FillRamOptions {
    /// QEMU's process id
    #[arg(long)]
    pub pid: u32,
    /// Memory cgroup of the guest
    #[arg(long)]
    pub group: Option<PathBuf>,
}

impl RealGuests {
    /// Starts all and makes their data.
    pub(super) fn start(place: &Place<'_>) -> Result<Self, String> {
        let program = kit_program(PROGRAM)?;
        let mut guests = Vec::new();
        for (number, service) in SERVICES.iter().enumerate() {
            let folder = place.dir.join(service);
            std::fs::create_dir(&folder)
                .map_err(|error| format!("{}: {error}", folder.display()))?;
            let mut command = Command::new(&program);
            command
                .args(["--service", service])
                .args(["--ram-mib", &(RAM_BYTES >> 20).to_string()])
                .args(["--seed", &(number + 1).to_string()])
                .arg("--folder")
                .arg(&folder);
            if let Some(group) = place.group {
                command.arg("--group").arg(group);
            }
            guests.push(Ordered::start(&mut command)?);
        }
        let mut guests = Self {
            guests,
            group: place.group.map(Path::to_owned),
        };
        guests.expect_all("ready")?;
        for (guest, service) in guests.guests.iter_mut().zip(SERVICES) {
            guest.tell(&format!("prepare {service}\n"))?;
        }
        guests.expect_all("done")?;
        guests.touch_all()?;
        Ok(guests)
    }

    fn tell_all(&mut self, order: &str) -> Result<(), String> {
        self.guests
            .iter_mut()
            .try_for_each(|guest| guest.tell(order))
    }

    fn expect_all(&mut self, wanted: &str) -> Result<(), String> {
        for (guest, service) in self.guests.iter_mut().zip(SERVICES) {
            let line = guest.line_within(PATIENCE)?;
            if line != wanted {
                return Err(format!("the guest with {service}: {line}"));
            }
        }
        Ok(())
    }
}

impl Vms for RealGuests {
    fn pids(&self) -> Vec<u32> {
        self.guests.iter().map(Ordered::pid).collect()
    }

    fn measure(&mut self, time: Duration, beside: &mut Beside<'_>) -> Result<Vec<Served>, String> {
        self.tell_all(&format!("measure {}\n", time.as_millis()))?;
        while_measuring(time, beside)?;
        let mut served = Vec::new();
        for (guest, service) in self.guests.iter_mut().zip(SERVICES) {
            let line = guest.line_within(PATIENCE)?;
            let one =
                served_in(&line).ok_or_else(|| format!("the guest with {service}: {line}"))?;
            served.push(one);
        }
        Ok(served)
    }

    fn touch_all(&mut self) -> Result<(), String> {
        for pid in self.pids() {
            let mut command = Command::new(this_program()?);
            command.args(["bench-part", "fill-ram", "--pid", &pid.to_string()]);
            if let Some(group) = &self.group {
                command.arg("--group").arg(group);
            }
            let status = command.status().map_err(|error| error.to_string())?;
            if !status.success() {
                return Err(format!(
                    "the RAM of the guest {pid} cannot be made present: {status}"
                ));
            }
        }
        Ok(())
    }

    fn verify_all(&mut self) -> Result<(), String> {
        self.tell_all("verify\n")?;
        self.expect_all("done")
    }
}

/// An answer to `measure`: requests, nanoseconds, and quantiles of their times.
fn served_in(line: &str) -> Option<Served> {
    let mut numbers = line
        .strip_prefix("served ")?
        .split(' ')
        .map(str::parse::<u64>);
    let mut next = || numbers.next().transpose().unwrap_or(None);
    let (requests, wall_ns) = (next()?, next()?);
    let ns = numbers.map(|ns| ns.map(|ns| u32::try_from(ns).unwrap_or(u32::MAX)));
    match ns.collect::<Result<Vec<_>, _>>() {
        Ok(ns) => Some(Served {
            requests,
            wall_ns,
            ns,
        }),
        Err(_) => None,
    }
}

/// See [`FillRamOptions`].
///
/// # Errors
/// A message.
pub fn fill_ram(options: &FillRamOptions) -> Result<(), String> {
    if let Some(group) = &options.group {
        super::guest::join(group)?;
    }
    let folder = PathBuf::from(format!("/proc/{}/fd", options.pid));
    let failed = |error: std::io::Error| format!("{}: {error}", folder.display());
    for entry in std::fs::read_dir(&folder).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        let link = match std::fs::read_link(&path) {
            Ok(link) => link,
            // Closed since the folder was read; RAM stays open.
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => continue,
            Err(error) => return Err(failed(error)),
        };
        if !link.to_string_lossy().starts_with(RAM_LINK) {
            continue;
        }
        let file = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(failed)?;
        return read_all(&file).map_err(|error| format!("{}: {error}", folder.display()));
    }
    Err(format!("the process {} has no RAM of a guest", options.pid))
}

/// Reads a word of each page: a hole of a file in memory becomes a page of zeros by that. (Pages that were
/// only allocated cannot be told from absent ones, and no daemon takes them over.)
fn read_all(file: &File) -> Result<(), Box<dyn std::error::Error>> {
    let bytes = file.metadata()?.len();
    let mapping = SharedMapping::new(file.as_fd(), bytes)?;
    for page in 0..bytes / PAGE_BYTES {
        let words = mapping.atomic_u64s(page * PAGE_BYTES, 1);
        let word = words
            .and_then(<[AtomicU64]>::first)
            .ok_or("it is shorter than it was")?;
        std::hint::black_box(word.load(Relaxed));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::Stdio;

    #[test]
    fn served_requests_are_read_and_a_failure_is_none() {
        let served = served_in("served 3 8000000000 5 70 9000000000");
        let wanted = Served {
            requests: 3,
            wall_ns: 8_000_000_000,
            ns: vec![5, 70, u32::MAX],
        };
        assert_eq!(served, Some(wanted));
        for wrong in [
            "failed redis: x",
            "served",
            "served 3",
            "served 3 5 x",
            "done",
        ] {
            assert_eq!(served_in(wrong), None, "{wrong}");
        }
    }

    #[test]
    fn process_without_guest_ram_is_told() {
        // A process of its own: this one maps the RAM of other tests.
        let mut child = Command::new("cat")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .spawn()
            .unwrap();
        let options = FillRamOptions {
            pid: child.id(),
            group: None,
        };
        let error = fill_ram(&options).unwrap_err();
        drop(child.stdin.take());
        child.wait().unwrap();
        assert!(error.contains("no RAM of a guest"), "{error}");
    }
}
