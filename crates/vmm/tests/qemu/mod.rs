// SPDX-License-Identifier: Apache-2.0
//! A stock QEMU for tests, without a guest: its firmware runs, and its RAM can be written from
//! outside and read through QEMU itself.

use std::io::{BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

pub const RAM_MIB: u64 = 128;

pub struct Qemu {
    child: Child,
    to: ChildStdin,
    from: BufReader<ChildStdout>,
    dir: tempfile::TempDir,
}

/// Says why and returns false where these tests cannot run.
pub fn can_run() -> bool {
    let version = Command::new("qemu-system-x86_64").arg("--version").output();
    if version.is_err() {
        eprintln!("SKIPPED: qemu-system-x86_64 is not installed");
        return false;
    }
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: not root");
        return false;
    }
    let swaps = std::fs::read_to_string("/proc/swaps").unwrap_or_default();
    if swaps.lines().count() > 1 {
        eprintln!("SKIPPED: this machine has swap, a VMM without a cgroup of its own is refused");
        return false;
    }
    true
}

impl Qemu {
    /// QEMU with its RAM in a shared memfd, as Pagetide wants it.
    pub fn with_shared_ram(more: &[&str]) -> Self {
        let object = format!("memory-backend-memfd,id=ram,size={RAM_MIB}M,share=on");
        Self::with_ram_object(&object, more)
    }

    /// QEMU whose RAM is the memory backend `object`.
    pub fn with_ram_object(object: &str, more: &[&str]) -> Self {
        let mut arguments = vec![
            "-machine",
            "q35,accel=tcg,memory-backend=ram",
            "-object",
            object,
        ];
        arguments.extend_from_slice(more);
        Self::start(&arguments)
    }

    pub fn start(more: &[&str]) -> Self {
        let dir = tempfile::tempdir().unwrap();
        // QEMU may run as somebody else.
        std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o777)).unwrap();
        let mut child = Command::new("qemu-system-x86_64")
            .args(["-m", &format!("{RAM_MIB}M")])
            .args(["-display", "none", "-nodefaults", "-qmp", "stdio"])
            .args(more)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut qemu = Self {
            to: child.stdin.take().unwrap(),
            from: BufReader::new(child.stdout.take().unwrap()),
            child,
            dir,
        };
        let greeting = qemu.line();
        assert!(greeting.contains("QMP"), "{greeting}");
        qemu.ask(r#"{"execute":"qmp_capabilities"}"#);
        qemu
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Path of a file that QEMU may write.
    pub fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// Sends a QMP command and returns the line that answers it.
    pub fn ask(&mut self, command: &str) -> String {
        writeln!(self.to, "{command}").unwrap();
        loop {
            let line = self.line();
            assert!(!line.contains("\"error\""), "{command}: {line}");
            if line.contains("\"return\"") {
                return line;
            }
        }
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.from.read_line(&mut line).unwrap();
        assert!(!line.is_empty(), "QEMU has ended");
        line
    }

    pub fn is_running(&mut self) -> bool {
        self.ask(r#"{"execute":"query-status"}"#)
            .contains("\"running\": true")
    }

    /// Guest memory as QEMU itself reads it, faulting where it must.
    pub fn guest_memory(&mut self, start: u64, len: u64) -> Vec<u8> {
        let file = self.path("memory");
        self.ask(&format!(
            r#"{{"execute":"pmemsave","arguments":{{"val":{start},"size":{len},"filename":"{}"}}}}"#,
            file.display()
        ));
        std::fs::read(file).unwrap()
    }

    pub fn kill(&mut self) {
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }

    pub fn open_descriptors(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.pid()))
            .unwrap()
            .count()
    }
}

impl Drop for Qemu {
    fn drop(&mut self) {
        if let Ok(None) = self.child.try_wait() {
            self.kill();
        }
    }
}
