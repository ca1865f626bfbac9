// SPDX-License-Identifier: Apache-2.0
//! Detection of image formats other than plain sectors.
//!
//! We serve raw images only. The guest would see an image in another format (qcow2, for example) as
//! it is: a disk of strange size and content, and its first write would destroy the image. So such
//! content is refused unless the operator allows it. The signatures are those that QEMU probes for
//! (`bdrv_probe` of its drivers), and two more that are at the end of a file.
//!
//! A guest may write any signature to its disk. So the signature is checked once, when a device is
//! added, and not when a device comes back after a restart. And the content is never *interpreted*:
//! the worst that a guest can do is that its own disk, when removed and added again, needs the
//! operator's permission.

use std::{
    fs::File,
    io,
    os::{fd::OwnedFd, unix::fs::FileExt},
};

/// Whether the image's content may look like a format.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Content {
    /// It must not.
    #[default]
    Probed,
    /// It may: the operator says that its bytes are the disk's content.
    Raw,
}

/// Bytes checked at the beginning, and at the end.
const LOOKED_AT_BYTES: usize = 512;

/// A signature and its position.
struct Signature {
    format: &'static str,
    place: Place,
    bytes: &'static [u8],
}

#[derive(Clone, Copy)]
enum Place {
    /// Offset from the beginning.
    At(usize),
    /// Distance from the end.
    BeforeEnd(usize),
}

const fn at_start(format: &'static str, bytes: &'static [u8]) -> Signature {
    let place = Place::At(0);
    Signature {
        format,
        place,
        bytes,
    }
}

const SIGNATURES: [Signature; 16] = [
    // qcow and qcow2 differ in the version that follows.
    at_start("qcow2", b"QFI\xfb"),
    at_start("qed", b"QED\0"),
    at_start("vmdk", b"KDMV"),
    at_start("vmdk", b"COWD"),
    at_start("vmdk", b"# Disk DescriptorFile"),
    at_start("vhdx", b"vhdxfile"),
    // A dynamic disk has its footer at the beginning, too; a fixed one only at the end, and old
    // programs wrote it one byte shorter.
    at_start("vpc (VHD)", b"conectix"),
    Signature {
        format: "vpc (VHD)",
        place: Place::BeforeEnd(512),
        bytes: b"conectix",
    },
    Signature {
        format: "vpc (VHD)",
        place: Place::BeforeEnd(511),
        bytes: b"conectix",
    },
    Signature {
        format: "vdi",
        place: Place::At(64),
        bytes: b"\x7f\x10\xda\xbe",
    },
    at_start("luks", b"LUKS\xba\xbe"),
    at_start("parallels", b"WithoutFreeSpace"),
    at_start("parallels", b"WithouFreSpacExt"),
    at_start("bochs", b"Bochs Virtual HD Image"),
    at_start("cloop", b"#!/bin/sh\n#V2.0 Format\nmodprobe cloop"),
    Signature {
        format: "dmg",
        place: Place::BeforeEnd(512),
        bytes: b"koly",
    },
];

/// The format that an image of `bytes` looks like; `None` if it looks like plain sectors.
pub(crate) fn probe(image: &OwnedFd, bytes: u64) -> io::Result<Option<&'static str>> {
    let file = File::from(image.try_clone()?);
    let mut head = [0; LOOKED_AT_BYTES];
    let mut tail = [0; LOOKED_AT_BYTES];
    let head = read_up_to(&file, &mut head, 0)?;
    let tail_at = bytes.saturating_sub(LOOKED_AT_BYTES as u64);
    let tail = read_up_to(&file, &mut tail, tail_at)?;
    Ok(looks_like(head, tail))
}

/// `head` and `tail` may overlap.
fn looks_like(head: &[u8], tail: &[u8]) -> Option<&'static str> {
    let found = SIGNATURES.iter().find(|signature| {
        let there = match signature.place {
            Place::At(offset) => head.get(offset..),
            Place::BeforeEnd(distance) => tail
                .len()
                .checked_sub(distance)
                .and_then(|at| tail.get(at..)),
        };
        there.is_some_and(|bytes| bytes.starts_with(signature.bytes))
    });
    found.map(|signature| signature.format)
}

fn read_up_to<'a>(file: &File, into: &'a mut [u8], at: u64) -> io::Result<&'a [u8]> {
    let mut done = 0;
    while done < into.len() {
        match file.read_at(&mut into[done..], at + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(&into[..done])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn probed(content: &[u8]) -> Option<&'static str> {
        let file = tempfile::NamedTempFile::new().unwrap();
        std::fs::write(file.path(), content).unwrap();
        let image = OwnedFd::from(File::open(file.path()).unwrap());
        probe(&image, content.len() as u64).unwrap()
    }

    #[test]
    fn every_signature_is_known_in_its_place_and_nowhere_else() {
        for signature in &SIGNATURES {
            let mut content = vec![0; 4096];
            let at = match signature.place {
                Place::At(offset) => offset,
                Place::BeforeEnd(distance) => content.len() - distance,
            };
            content[at..at + signature.bytes.len()].copy_from_slice(signature.bytes);
            assert_eq!(probed(&content), Some(signature.format));
            // In the second sector it is data of some guest.
            content.rotate_right(1024);
            assert_eq!(probed(&content), None, "{}", signature.format);
        }
    }

    #[test]
    fn plain_disks_look_like_nothing() {
        assert_eq!(probed(&[0; 8192]), None);
        assert_eq!(probed(b"QFI"), None);
        let mut partitioned = vec![0x90; 1 << 20];
        partitioned[510..512].copy_from_slice(&[0x55, 0xaa]);
        partitioned[512..520].copy_from_slice(b"EFI PART");
        assert_eq!(probed(&partitioned), None);
    }
}
