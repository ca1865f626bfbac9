// SPDX-License-Identifier: Apache-2.0
//! A small file system on a loop device, which can be filled up and freed.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

const MIB: u64 = 1 << 20;
/// The steps in which it is filled: the last ones take what others have left.
const FILL_STEPS: [u64; 3] = [16 * MIB, MIB, 4096];

/// A mounted ext4; it and its image are gone when this is dropped.
#[derive(Debug)]
pub struct SmallDisk {
    image: PathBuf,
    at: PathBuf,
}

fn run(program: &str, words: &[&str]) -> io::Result<()> {
    let output = Command::new(program).args(words).output()?;
    match output.status.success() {
        true => Ok(()),
        false => Err(io::Error::other(format!(
            "{program} {}: {}",
            words.join(" "),
            String::from_utf8_lossy(&output.stderr).trim()
        ))),
    }
}

impl SmallDisk {
    /// Makes an image of `bytes` and mounts its file system at `at`.
    ///
    /// # Errors
    /// There is no loop device, or no `mkfs.ext4`.
    pub fn mount(image: &Path, at: &Path, bytes: u64) -> io::Result<Self> {
        for folder in image.parent().into_iter().chain([at]) {
            fs::create_dir_all(folder)?;
        }
        File::create(image)?.set_len(bytes)?;
        let (image, at) = (image.to_owned(), at.to_owned());
        let (image_word, at_word) = (image.to_string_lossy(), at.to_string_lossy());
        let options = ["-q", "-F", "-m", "0", &image_word];
        let mounted = run("mkfs.ext4", &options)
            .and_then(|()| run("mount", &["-o", "loop", &image_word, &at_word]));
        if let Err(error) = mounted {
            fs::remove_file(&image)?;
            return Err(error);
        }
        Ok(Self { image, at })
    }

    /// Where it is mounted.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.at
    }

    fn filler(&self) -> PathBuf {
        self.at.join("filler")
    }

    /// Takes all of its space.
    ///
    /// # Errors
    /// The kernel's error, but not that there is no space.
    pub fn fill(&self) -> io::Result<()> {
        let file = File::create(self.filler())?;
        let mut bytes = 0;
        for step in FILL_STEPS {
            loop {
                let flags = rustix::fs::FallocateFlags::empty();
                match rustix::fs::fallocate(&file, flags, bytes, step) {
                    Ok(()) => bytes += step,
                    Err(rustix::io::Errno::NOSPC) => break,
                    Err(error) => return Err(error.into()),
                }
            }
        }
        Ok(())
    }

    /// Gives the space back.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn free(&self) -> io::Result<()> {
        fs::remove_file(self.filler())
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        // A daemon that was killed may hold it for a moment.
        let unmounted = run("umount", &["-l", &self.at.to_string_lossy()]);
        if let Err(error) = unmounted.and_then(|()| fs::remove_file(&self.image)) {
            eprintln!("the small disk stays: {error}");
        }
    }
}
