// SPDX-License-Identifier: Apache-2.0
//! Names of VMs: which are valid, and which one a VMM suggests.
//!
//! A name appears in paths of the API, in file names of pools and in labels of metrics, so it may only
//! contain characters without special meaning in any of them.

use crate::control::ControlError;

/// Longest name, in bytes: with prefix and suffix it must fit a file name (255).
pub const NAME_BYTES_MAX: usize = 64;

fn may_stand(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.')
}

/// Refuses an invalid VM name.
pub fn check_name(name: &str) -> Result<(), ControlError> {
    let fits = !name.is_empty()
        && name.len() <= NAME_BYTES_MAX
        && name.bytes().all(may_stand)
        && !name.starts_with('.');
    if fits {
        Ok(())
    } else {
        Err(ControlError::wrong_use(format!(
            "'{}' cannot name a VM: use 1 to {NAME_BYTES_MAX} letters, digits, '-', '_' and '.', not beginning with '.'",
            name.escape_debug()
        )))
    }
}

/// Name for the VM of process `pid`: its VMM's `-name`, else `vm-PID`.
///
/// A process that is gone also gets `vm-PID`: the attach then reports the error.
#[must_use]
pub fn default_name(pid: u32) -> String {
    let fallback = || format!("vm-{pid}");
    match std::fs::read(format!("/proc/{pid}/cmdline")) {
        Ok(cmdline) => from_cmdline(&cmdline).unwrap_or_else(fallback),
        Err(_) => fallback(),
    }
}

/// The name in a VMM's NUL-separated command line, with invalid characters replaced by `-`.
fn from_cmdline(cmdline: &[u8]) -> Option<String> {
    let arguments: Vec<&[u8]> = cmdline.split(|b| *b == 0).collect();
    let at = arguments
        .iter()
        .position(|a| *a == b"-name" || *a == b"--name")?;
    let value = String::from_utf8_lossy(arguments.get(at + 1)?);
    // QEMU: `-name guest=g1,debug-threads=on` or `-name g1,process=x`.
    let name = value
        .split(',')
        .find_map(|part| part.strip_prefix("guest="))
        .or_else(|| value.split(',').next().filter(|part| !part.contains('=')))?;
    let mut name: String = name
        .chars()
        .map(|c| {
            let plain = c.is_ascii() && may_stand(c as u8);
            if plain { c } else { '-' }
        })
        .collect();
    name.truncate(NAME_BYTES_MAX);
    check_name(&name).is_ok().then_some(name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn name_of_the_vmm_is_taken_in_both_spellings() {
        for (cmdline, name) in [
            (
                "qemu\0-name\0guest=web 1,debug-threads=on\0-m\x001G\0",
                "web-1",
            ),
            ("qemu\0-name\0db\0", "db"),
            ("qemu\0-name\0debug-threads=on,guest=a.b\0", "a.b"),
        ] {
            assert_eq!(from_cmdline(cmdline.as_bytes()).as_deref(), Some(name));
        }
    }

    #[test]
    fn command_line_without_a_usable_name_gives_none() {
        for cmdline in [
            "",
            "qemu\0-m\x001G\0",
            "qemu\0-name",
            "qemu\0-name\0debug-threads=on\0",
            "q\0-name\0\0",
        ] {
            assert_eq!(from_cmdline(cmdline.as_bytes()), None, "{cmdline:?}");
        }
    }

    #[test]
    fn name_that_means_something_elsewhere_is_refused() {
        for name in ["", "..", ".x", "a/b", "a b", "a\"b", "ä", &"x".repeat(65)] {
            assert!(check_name(name).is_err(), "{name}");
        }
        assert!(check_name("vm-17_a.b").is_ok());
    }

    #[test]
    fn process_that_is_gone_is_named_by_its_pid() {
        assert_eq!(default_name(u32::MAX), format!("vm-{}", u32::MAX));
    }
}
