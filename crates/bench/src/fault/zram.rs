// SPDX-License-Identifier: Apache-2.0
//! The peer: kernel zram with lz4 as swap, set up for this bench and removed again.
//!
//! A separate device is added and removed, so that one in use on the machine is not affected.
//! `vm.page-cluster` is 0 meanwhile: no readahead, one page a fault, as for us. Dropping [`ZramSwap`]
//! undoes everything.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const CONTROL: &str = "/sys/class/zram-control";
const PAGE_CLUSTER: &str = "/proc/sys/vm/page-cluster";
/// Above all other swap, if there is any.
const PRIORITY: &str = "32767";

/// A zram device that can be switched on as swap.
pub(crate) struct ZramSwap {
    number: String,
    device: PathBuf,
    is_on: bool,
    page_cluster: String,
}

impl ZramSwap {
    /// A device for `bytes` of pages.
    ///
    /// # Errors
    /// A message with the reason why there is none.
    pub(crate) fn prepare(bytes: u64) -> Result<Self, String> {
        if !Path::new(CONTROL).exists()
            && let Err(error) = run("modprobe", &["zram"])
        {
            return Err(format!("this kernel has no zram ({error})"));
        }
        let page_cluster = read(Path::new(PAGE_CLUSTER))?;
        let number = read(&Path::new(CONTROL).join("hot_add"))?;
        let swap = Self {
            device: format!("/dev/zram{number}").into(),
            number,
            is_on: false,
            page_cluster,
        };
        swap.set("comp_algorithm", "lz4")?;
        swap.set("disksize", &bytes.to_string())?;
        run("mkswap", &[&swap.device_name()])?;
        write(Path::new(PAGE_CLUSTER), "0")?;
        Ok(swap)
    }

    /// Switches it on.
    pub(crate) fn switch_on(&mut self) -> Result<(), String> {
        run("swapon", &["-p", PRIORITY, &self.device_name()])?;
        self.is_on = true;
        Ok(())
    }

    /// Switches it off; its remaining content is read back.
    pub(crate) fn switch_off(&mut self) -> Result<(), String> {
        run("swapoff", &[&self.device_name()])?;
        self.is_on = false;
        Ok(())
    }

    /// Pages in it now.
    pub(crate) fn used_pages(&self) -> Result<u64, String> {
        let swaps = read(Path::new("/proc/swaps"))?;
        let name = self.device_name();
        swaps
            .lines()
            .find(|line| {
                line.starts_with(&format!("{name} ")) || line.starts_with(&format!("{name}\t"))
            })
            .and_then(|line| line.split_whitespace().nth(3)?.parse::<u64>().ok())
            .map(|kib| kib / 4)
            .ok_or_else(|| format!("/proc/swaps does not tell of {name}"))
    }

    /// The device.
    pub(crate) fn device(&self) -> &Path {
        &self.device
    }

    /// Memory that its content takes now, fragmentation included.
    pub(crate) fn memory_bytes(&self) -> Result<u64, String> {
        let path = format!("/sys/block/zram{}/mm_stat", self.number);
        let stat = read(Path::new(&path))?;
        let used = stat.split_whitespace().nth(2);
        used.and_then(|bytes| bytes.parse::<u64>().ok())
            .ok_or_else(|| format!("{path} does not tell the memory used"))
    }

    fn device_name(&self) -> String {
        self.device.display().to_string()
    }

    fn set(&self, attribute: &str, value: &str) -> Result<(), String> {
        let path = format!("/sys/block/zram{}/{attribute}", self.number);
        write(Path::new(&path), value)
    }

    fn undo(&mut self) -> Result<(), String> {
        let mut first = Ok(());
        if self.is_on {
            first = self.switch_off();
        }
        first
            .and(write(Path::new(PAGE_CLUSTER), &self.page_cluster))
            .and(self.set("reset", "1"))
            .and(write(&Path::new(CONTROL).join("hot_remove"), &self.number))
    }
}

impl Drop for ZramSwap {
    fn drop(&mut self) {
        if let Err(error) = self.undo() {
            tracing::error!(device = %self.device.display(), error, "the zram device of the bench stays behind");
        }
    }
}

fn read(path: &Path) -> Result<String, String> {
    fs::read_to_string(path)
        .map(|text| text.trim().to_owned())
        .map_err(|error| format!("{}: {error}", path.display()))
}

fn write(path: &Path, value: &str) -> Result<(), String> {
    fs::write(path, value)
        .map_err(|error| format!("writing {value} to {}: {error}", path.display()))
}

fn run(program: &str, arguments: &[&str]) -> Result<(), String> {
    let output = Command::new(program)
        .args(arguments)
        .stdin(Stdio::null())
        .output()
        .map_err(|error| format!("{program}: {error}"))?;
    if output.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&output.stderr);
    Err(format!(
        "{program} ended with {}: {}",
        output.status,
        said.trim()
    ))
}
