// SPDX-License-Identifier: Apache-2.0
//! Compilation: gcc's compiler proper turns one C source after the other into assembler. What a build has left
//! behind stands beside: files that nobody reads.

use super::files::{check_files, files_of, make_files};
use super::{DATA_BYTES, Random, Service, ServiceError, WORK, io_failed};
use crate::pattern;
use std::collections::hash_map::DefaultHasher;
use std::fs;
use std::hash::{Hash, Hasher};
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

const PROGRAM: &str = "/bin/cc1";
const SOURCES: u64 = 8;
/// Functions of a source. An emulated guest compiles them within half a second.
const FUNCTIONS: u64 = 24;

/// See the module.
pub(super) struct Sources {
    /// Of the assembler that each was first compiled to.
    outputs: Vec<u64>,
    files: u64,
}

impl Sources {
    pub(super) fn prepare() -> Result<Self, ServiceError> {
        for number in 0..SOURCES {
            fs::write(source(number), program(number)).map_err(io_failed("a source"))?;
        }
        let outputs = (0..SOURCES).map(compile).collect::<Result<_, _>>()?;
        Ok(Self {
            outputs,
            files: make_files(files_of(DATA_BYTES))?,
        })
    }

    fn check(&self, number: u64) -> Result<(), ServiceError> {
        let known = usize::try_from(number)
            .ok()
            .and_then(|place| self.outputs.get(place));
        match known == Some(&compile(number)?) {
            true => Ok(()),
            false => Err(ServiceError::Wrong(format!("the compiled source {number}"))),
        }
    }
}

impl Service for Sources {
    fn request(&mut self, random: &mut Random) -> Result<(), ServiceError> {
        self.check(random.below(SOURCES))
    }

    fn verify(&mut self) -> Result<(), ServiceError> {
        (0..SOURCES).try_for_each(|number| self.check(number))?;
        check_files(self.files)
    }
}

fn source(number: u64) -> PathBuf {
    Path::new(WORK).join(format!("{number}.c"))
}

/// The hash of the assembler.
fn compile(number: u64) -> Result<u64, ServiceError> {
    let mut command = Command::new(PROGRAM);
    command
        // There are no headers in the guest, and the sources need none.
        .args(["-quiet", "-fpreprocessed", "-O1", "-o", "-"])
        .arg(source(number));
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(io_failed(PROGRAM))?;
    if !output.status.success() || output.stdout.is_empty() {
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        return Err(io_failed(PROGRAM)(io::Error::other(said)));
    }
    let mut hasher = DefaultHasher::new();
    output.stdout.hash(&mut hasher);
    Ok(hasher.finish())
}

/// A source that no other is like.
fn program(number: u64) -> String {
    let function = |name: u64| {
        let [a, b, c] =
            [1, 2, 3].map(|salt| pattern::mix(number * FUNCTIONS + name + salt) % 1000 + 1);
        format!(
            "int f{name}(int *v, int n) {{\n  int s = {a};\n  for (int i = 0; i < n; i++) {{\n    \
             if (v[i] % {b} == 0) s += v[i] * {c};\n    else s ^= v[(i + {a}) % n] - s / {b};\n    \
             switch (s & 7) {{ case 0: s += {c}; break; case 3: s -= i; break; case 5: v[i] = s; break; }}\n  \
             }}\n  return s;\n}}\n"
        )
    };
    (0..FUNCTIONS).map(function).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sources_differ_and_have_all_their_functions() {
        let (first, second) = (program(0), program(1));
        assert_ne!(first, second);
        assert_eq!(
            first.matches("\nint f").count() + 1,
            usize::try_from(FUNCTIONS).unwrap_or(0)
        );
        assert_eq!(first.matches('{').count(), first.matches('}').count());
    }
}
