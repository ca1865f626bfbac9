// SPDX-License-Identifier: Apache-2.0
//! The archive format of an initramfs ("newc" of cpio), as much as one needs.
//!
//! Each entry is a 110-byte header of hexadecimal numbers, the name with a zero
//! byte, the content; name and content are padded to four bytes. The kernel's
//! `Documentation/driver-api/early-userspace/buffer-format.rst` has the grammar.

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const TRAILER: &str = "TRAILER!!!";

/// An archive that is being written.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

/// A file that the format cannot hold.
#[derive(Debug, thiserror::Error)]
#[error("{name} has {bytes} bytes, and a file in an initramfs has at most 4 GiB")]
pub struct TooLarge {
    name: String,
    bytes: usize,
}

impl Archive {
    /// Adds a directory; parents come before their content.
    pub fn directory(&mut self, name: &str) {
        self.entry(name, DIRECTORY, &[], 0);
    }

    /// Adds an executable file.
    ///
    /// # Errors
    /// The content has more than 4 GiB.
    pub fn program(&mut self, name: &str, content: &[u8]) -> Result<(), TooLarge> {
        let bytes = u32::try_from(content.len()).map_err(|_| TooLarge {
            name: name.to_owned(),
            bytes: content.len(),
        })?;
        self.entry(name, PROGRAM, content, bytes);
        Ok(())
    }

    /// The finished archive.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.entry(TRAILER, 0, &[], 0);
        self.bytes
    }

    fn entry(&mut self, name: &str, mode: u32, content: &[u8], bytes: u32) {
        self.entries += 1;
        let name_bytes = name.len() + 1;
        // magic, inode, mode, uid, gid, links, mtime, size, device ×4, name size, checksum
        let header = format!(
            "070701{:08x}{mode:08x}{zero:08x}{zero:08x}{links:08x}{zero:08x}{bytes:08x}\
             {zero:08x}{zero:08x}{zero:08x}{zero:08x}{name_bytes:08x}{zero:08x}",
            self.entries,
            zero = 0,
            links = 1,
        );
        self.bytes.extend_from_slice(header.as_bytes());
        self.bytes.extend_from_slice(name.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_part_begins_on_four_bytes() {
        let mut archive = Archive::default();
        archive.directory("bin");
        archive.program("bin/x", b"12345").expect("small");
        let bytes = archive.finish();
        let starts: Vec<usize> = bytes
            .windows(6)
            .enumerate()
            .filter(|(_, w)| w == b"070701")
            .map(|(i, _)| i)
            .collect();
        assert_eq!(starts.len(), 3);
        assert!(starts.iter().all(|start| start % 4 == 0));
        assert_eq!(&bytes[starts[1] + 54..starts[1] + 62], b"00000005");
        assert!(bytes.len() % 4 == 0);
    }

    #[test]
    fn cpio_itself_reads_the_archive_back() {
        use std::io::Write;
        use std::process::{Command, Stdio};
        let mut archive = Archive::default();
        archive.directory("etc");
        archive.program("etc/one", b"content").expect("small");
        let cpio = Command::new("cpio")
            .args(["-t", "--quiet"])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut cpio) = cpio else {
            eprintln!("SKIPPED: cpio is not installed");
            return;
        };
        let mut input = cpio.stdin.take().expect("piped");
        input.write_all(&archive.finish()).expect("cpio reads");
        drop(input);
        let output = cpio.wait_with_output().expect("cpio ends");
        assert_eq!(String::from_utf8_lossy(&output.stdout), "etc\netc/one\n");
    }
}
