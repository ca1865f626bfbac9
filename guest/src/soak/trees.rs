// SPDX-License-Identifier: Apache-2.0
//! File trees in a soak: made, synced, read from the disk, compared, deleted.

use std::fs::{self, File};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::time::Duration;

use super::tally::Tally;
use super::{FILES, PAUSE, Soak, content, different_bytes, drop_page_cache};
use crate::pattern;

const FOLDERS: u64 = 4;
const FILES_A_FOLDER: u64 = 8;
/// Sizes go from one byte to this.
const FILE_BYTES_MAX: u64 = 96 << 10;
/// Trees that stay for a while, so that the file system does not always reuse the same blocks.
const KEPT: u64 = 3;
const REST: Duration = Duration::from_millis(20);

/// Trees until the soak ends; then all that are left are verified.
pub fn run(soak: &Soak) {
    let mut oldest = 0;
    for number in 0_u64.. {
        if !soak.goes_on() {
            break;
        }
        told(soak, number, make(soak, number));
        if number - oldest >= KEPT {
            told(soak, oldest, verify_and_delete(soak, oldest));
            oldest += 1;
        }
    }
    for number in oldest.. {
        if !path(number).exists() {
            return;
        }
        told(soak, number, verify_and_delete(soak, number));
    }
}

fn told(soak: &Soak, number: u64, result: io::Result<()>) {
    if let Err(error) = result {
        soak.tally.failed(&format!("file tree {number}: {error}"));
        soak.rest(PAUSE);
    }
}

fn path(number: u64) -> PathBuf {
    Path::new(FILES).join(format!("tree{number}"))
}

fn names(number: u64) -> impl Iterator<Item = (u64, PathBuf)> {
    (0..FOLDERS * FILES_A_FOLDER).map(move |index| {
        let folder = path(number).join(format!("d{}", index / FILES_A_FOLDER));
        (index, folder.join(format!("f{index}")))
    })
}

fn wanted(soak: &Soak, number: u64, index: u64) -> Vec<u8> {
    let key = pattern::key(soak.seed ^ 0x7472_6565, number, 0) ^ index;
    let bytes = pattern::mix(key) % FILE_BYTES_MAX + 1;
    content(key, usize::try_from(bytes).unwrap_or(1))
}

fn make(soak: &Soak, number: u64) -> io::Result<()> {
    for (index, name) in names(number) {
        if let Some(folder) = name.parent() {
            fs::create_dir_all(folder)?;
        }
        let mut file = File::create(&name)?;
        file.write_all(&wanted(soak, number, index))?;
        if index % 4 == 0 {
            file.sync_all()?;
        }
        soak.rest(REST);
    }
    File::open(path(number))?.sync_all()
}

fn verify_and_delete(soak: &Soak, number: u64) -> io::Result<()> {
    // Dirty pages are written first, so that the reads come from the disk.
    rustix::fs::sync();
    drop_page_cache()?;
    for (index, name) in names(number) {
        let want = wanted(soak, number, index);
        let wrong = different_bytes(&want, &fs::read(&name)?);
        if wrong > 0 {
            soak.tally.wrong(wrong, &name.display().to_string());
        }
    }
    fs::remove_dir_all(path(number))?;
    Tally::add(&soak.tally.trees, 1);
    Ok(())
}
