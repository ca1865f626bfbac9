// SPDX-License-Identifier: Apache-2.0
//! The password of a remote tier's server: where it stands, and what it is.
//!
//! A URL may have it, but a URL stands in lists of processes, settings and reports. So a file or a variable of the
//! environment may be named instead, and a program that shows its settings refuses the URL with a password
//! ([`super::RemoteUrl::has_password`]).

use std::ffi::OsString;
use std::fmt;
use std::io::Read;

/// Longest password that is read from a file, in bytes.
const PASSWORD_BYTES_MAX: usize = 4096;

/// Why a password cannot be read.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub enum PasswordError {
    /// The password file.
    #[error("the password file {path} cannot be read: {reason}")]
    File {
        /// The file.
        path: String,
        /// What the kernel says.
        reason: String,
    },
    /// The variable with the password.
    #[error("the environment's variable {name}, which is to have the password, {reason}")]
    Variable {
        /// The variable.
        name: String,
        /// What is wrong.
        reason: &'static str,
    },
}

/// A secret that no formatter prints.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(String);

impl Secret {
    pub(super) fn new(text: String) -> Self {
        Self(text)
    }

    /// What it is, for the one place that sends it.
    pub(super) fn reveal(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("***")
    }
}

/// Where a password stands.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum PasswordPlace {
    /// In the URL itself.
    Url(Secret),
    /// In the first line of a file.
    File(String),
    /// In a variable of the environment.
    Environment(String),
}

impl PasswordPlace {
    /// Reads it.
    pub(super) fn read(&self) -> Result<Secret, PasswordError> {
        match self {
            Self::Url(secret) => Ok(secret.clone()),
            Self::File(path) => of_file(path),
            Self::Environment(name) => of_variable(name, std::env::var_os(name)),
        }
    }
}

/// The first line of a file.
fn of_file(path: &str) -> Result<Secret, PasswordError> {
    let failed = |reason: String| PasswordError::File {
        path: path.to_owned(),
        reason,
    };
    let mut bytes = Vec::new();
    std::fs::File::open(path)
        .and_then(|file| file.take(PASSWORD_BYTES_MAX as u64).read_to_end(&mut bytes))
        .map_err(|error| failed(error.to_string()))?;
    let text = std::str::from_utf8(&bytes).map_err(|_| failed("it is not UTF-8".to_owned()))?;
    match text.lines().next() {
        None | Some("") => Err(failed("its first line is empty".to_owned())),
        Some(line) => Ok(Secret(line.to_owned())),
    }
}

fn of_variable(name: &str, value: Option<OsString>) -> Result<Secret, PasswordError> {
    let failed = |reason: &'static str| PasswordError::Variable {
        name: name.to_owned(),
        reason,
    };
    let value = value.ok_or_else(|| failed("is not set"))?;
    match value.into_string() {
        Ok(text) if text.is_empty() => Err(failed("is empty")),
        Ok(text) => Ok(Secret(text)),
        Err(_) => Err(failed("is not UTF-8")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::ffi::OsStringExt as _;

    #[test]
    fn password_of_a_file_is_its_first_line() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("password");
        let place = PasswordPlace::File(file.display().to_string());
        assert!(place.read().is_err());
        std::fs::write(&file, "hunter2\nnot this\n").unwrap();
        assert_eq!(place.read().unwrap().reveal(), "hunter2");
        for wrong in [b"\nhunter2\n".as_slice(), b"", &[0xff, 0xfe]] {
            std::fs::write(&file, wrong).unwrap();
            assert!(place.read().is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn password_of_the_environment_is_the_value_and_no_error_has_it() {
        let read = |value: Option<OsString>| of_variable("PT_PASSWORD", value);
        assert_eq!(read(Some("hunter2".into())).unwrap().reveal(), "hunter2");
        let damaged = OsString::from_vec(b"hunter2\xff".to_vec());
        for (value, why) in [
            (None, "is not set"),
            (Some(OsString::new()), "is empty"),
            (Some(damaged), "is not UTF-8"),
        ] {
            let error = read(value).unwrap_err().to_string();
            assert!(
                error.contains(why) && error.contains("PT_PASSWORD"),
                "{error}"
            );
            assert!(!error.contains("hunter2"), "{error}");
        }
        assert_eq!(format!("{:?}", Secret("hunter2".to_owned())), "***");
    }
}
