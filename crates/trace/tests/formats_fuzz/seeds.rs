// SPDX-License-Identifier: Apache-2.0
//! The files that fuzz targets begin with: `fuzz/seeds/TARGET/`.
//!
//! They are kept in the repository: bytes that broke something are added there, and every test run reads all of
//! them. The first ones are the tests' samples; after a change of a format,
//! `UPDATE_SEEDS=1 cargo test seeds_of_every_target` writes those anew.

use std::fs;
use std::path::Path;

/// A fuzz target by its name, what it does with its bytes, and the first of its seeds.
pub type Target = (&'static str, fn(&[u8]), Vec<Vec<u8>>);

/// Calls each target's function with each of its seeds, of which there must be some. Writes the first ones if that
/// is asked for.
pub fn check(targets: &[Target]) {
    for (target, body, samples) in targets {
        check_one(target, *body, samples);
    }
}

fn check_one(target: &str, body: fn(&[u8]), samples: &[Vec<u8>]) {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../fuzz/seeds")
        .join(target);
    if std::env::var_os("UPDATE_SEEDS").is_some() {
        fs::create_dir_all(&folder).expect("a folder for seeds");
        for (number, sample) in samples.iter().enumerate() {
            fs::write(folder.join(format!("sample-{number}")), sample).expect("a seed");
        }
    }
    let seeds =
        fs::read_dir(&folder).unwrap_or_else(|error| panic!("{}: {error}", folder.display()));
    let mut count = 0;
    for seed in seeds {
        let path = seed.expect("an entry").path();
        body(&fs::read(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display())));
        count += 1;
    }
    assert!(
        count >= samples.len(),
        "{target} has {count} seeds in {}",
        folder.display()
    );
}
