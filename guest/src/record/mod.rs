// SPDX-License-Identifier: Apache-2.0
//! A guest whose devices' DMA is recorded: its devices are tenants behind an emulated IOMMU, the host's log has
//! what they asked of it, and the kernel's own tracepoints what was mapped.
//!
//! ```text
//!   guest, at first: ready
//!   host: serve WORKLOAD    guest: serving N     each NIC is in a network namespace of its own, with a server
//!   host: assign WORKLOAD   guest: serving N     each NIC is given to a VM by VFIO; the server is in the VM
//!   host: disks SECONDS     guest: ran N BYTES   fio on each NVMe disk
//!   host: trace             guest: traced BYTES  the kernel's records are on the disk `/dev/vda`
//!   any:                           failed WORDS
//! ```
//! | workload | server | what its clients do |
//! |---|---|---|
//! | `iperf3` | iperf3 | send as fast as they can |
//! | `media` | busybox' httpd | fetch pieces of videos, in several qualities |
//! | `search` | [`search`] | ask for words, and get the best documents |

mod assigned;
mod disks;
mod error;
pub mod search;
mod tenants;
mod tracepoints;
mod workload;

use std::fs::File;
use std::io::{self, BufRead, BufReader, Write};
use std::str::FromStr;

use assigned::AssignedVms;
use tenants::Tenant;

pub use error::RecordError;
pub use workload::ServedWorkload;

/// A command of the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Order {
    Serve(ServedWorkload),
    Assign(ServedWorkload),
    Disks { seconds: u64 },
    Trace,
}

impl FromStr for Order {
    type Err = RecordError;

    fn from_str(line: &str) -> Result<Self, RecordError> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let order = match words[..] {
            ["serve", name] => ServedWorkload::from_name(name).map(Self::Serve),
            ["assign", name] => ServedWorkload::from_name(name).map(Self::Assign),
            ["disks", seconds] => match seconds.parse() {
                Ok(seconds @ 1..=3600) => Some(Self::Disks { seconds }),
                _ => None,
            },
            ["trace"] => Some(Self::Trace),
            _ => None,
        };
        order.ok_or_else(|| RecordError::NoOrder(line.to_owned()))
    }
}

/// What serves until the machine ends.
#[derive(Default)]
struct Serving {
    tenants: Vec<Tenant>,
    vms: Option<AssignedVms>,
}

/// Executes the host's commands until it closes the port.
///
/// # Errors
/// The port fails.
pub fn run(port: &mut File) -> io::Result<()> {
    let mut serving = Serving::default();
    // Earlier output went to a port that echoes.
    writeln!(port, "ready")?;
    for line in BufReader::new(port.try_clone()?).lines() {
        let answer = line?
            .parse()
            .and_then(|order: Order| serving.obey(order))
            .unwrap_or_else(|error| format!("failed {}", error.to_string().replace('\n', "; ")));
        writeln!(port, "{answer}")?;
    }
    Ok(())
}

impl Serving {
    fn obey(&mut self, order: Order) -> Result<String, RecordError> {
        Ok(match order {
            Order::Serve(workload) => {
                self.tenants = tenants::serve(workload)?;
                format!("serving {}", self.tenants.len())
            }
            Order::Assign(workload) => {
                let vms = self.vms.insert(AssignedVms::start(workload)?);
                format!("serving {}", vms.count())
            }
            Order::Disks { seconds } => {
                let ran = disks::run(seconds)?;
                format!("ran {} {}", ran.disks, ran.bytes)
            }
            Order::Trace => format!("traced {}", tracepoints::store()?),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn orders_are_read_and_anything_else_is_refused() {
        let order = |line: &str| line.parse::<Order>().ok();
        assert_eq!(
            order("serve media"),
            Some(Order::Serve(ServedWorkload::Media))
        );
        assert_eq!(
            order("assign iperf3"),
            Some(Order::Assign(ServedWorkload::Iperf3))
        );
        assert_eq!(order("disks 3"), Some(Order::Disks { seconds: 3 }));
        assert_eq!(order("trace"), Some(Order::Trace));
        for wrong in [
            "",
            "serve",
            "serve x",
            "disks 0",
            "disks 3601",
            "disks x",
            "trace 1",
        ] {
            assert_eq!(order(wrong), None, "{wrong}");
        }
    }
}
