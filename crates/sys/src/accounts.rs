// SPDX-License-Identifier: Apache-2.0
//! Users and groups of the host by name, from any source that the host uses (getpwnam_r(3)).
#![expect(unsafe_code, reason = "the C library's look-ups take raw buffers")]

use std::{ffi::CString, io};

/// First size of the buffer for an entry; it doubles while the C library needs more.
const ENTRY_BYTES: usize = 1 << 10;
/// Enough for a group of tens of thousands of members; a larger one is not looked up.
const ENTRY_BYTES_MAX: usize = 1 << 22;

/// Why a name has no number.
#[derive(Debug, thiserror::Error)]
pub enum AccountError {
    /// This host does not know the name.
    #[error(
        "this host has no {kind} '{name}': give one that `getent {database}` knows, or a number"
    )]
    Unknown {
        /// User or group.
        kind: &'static str,
        /// The name.
        name: String,
        /// The name of the list in getent(1).
        database: &'static str,
    },
    /// It could not be looked up.
    #[error("looking {kind} '{name}' up failed: {source}")]
    Kernel {
        /// User or group.
        kind: &'static str,
        /// The name.
        name: String,
        /// The error of the C library.
        source: io::Error,
    },
}

/// Number of the user called `name`, which may be a number itself.
///
/// # Errors
/// [`AccountError`].
pub fn user_id(name: &str) -> Result<u32, AccountError> {
    id(name, "user", "passwd", |name, buffer| {
        // SAFETY: a plain structure of integers and pointers, all of which may be zero.
        let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
        let mut found = std::ptr::null_mut();
        // SAFETY: the name ends with a zero; entry and `found` are ours and outlive the call, and
        // the buffer has the stated length.
        let error = unsafe {
            libc::getpwnam_r(
                name.as_ptr(),
                &raw mut entry,
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                &raw mut found,
            )
        };
        (error, (!found.is_null()).then_some(entry.pw_uid))
    })
}

/// Number of the group called `name`, which may be a number itself.
///
/// # Errors
/// [`AccountError`].
pub fn group_id(name: &str) -> Result<u32, AccountError> {
    id(name, "group", "group", |name, buffer| {
        // SAFETY: as above.
        let mut entry: libc::group = unsafe { std::mem::zeroed() };
        let mut found = std::ptr::null_mut();
        // SAFETY: as above.
        let error = unsafe {
            libc::getgrnam_r(
                name.as_ptr(),
                &raw mut entry,
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                &raw mut found,
            )
        };
        (error, (!found.is_null()).then_some(entry.gr_gid))
    })
}

/// `look` returns the C library's error number, and the number it found.
fn id(
    name: &str,
    kind: &'static str,
    database: &'static str,
    look: impl Fn(&CString, &mut [u8]) -> (i32, Option<u32>),
) -> Result<u32, AccountError> {
    let unknown = || AccountError::Unknown {
        kind,
        name: name.to_owned(),
        database,
    };
    // The largest number means 'unchanged' to chown(2).
    if let Ok(number) = name.parse::<u32>() {
        return if number == u32::MAX {
            Err(unknown())
        } else {
            Ok(number)
        };
    }
    let text = CString::new(name).map_err(|_| unknown())?;
    let mut buffer = vec![0; ENTRY_BYTES];
    loop {
        match look(&text, &mut buffer) {
            (_, Some(number)) => return Ok(number),
            (libc::EINTR, None) => {}
            (libc::ERANGE, None) if buffer.len() < ENTRY_BYTES_MAX => {
                buffer.resize(2 * buffer.len(), 0);
            }
            // The error for 'not found' differs between the sources of names.
            (0 | libc::ENOENT | libc::ESRCH | libc::EBADF | libc::EPERM, None) => {
                return Err(unknown());
            }
            (error, None) => {
                return Err(AccountError::Kernel {
                    kind,
                    name: name.to_owned(),
                    source: io::Error::from_raw_os_error(error),
                });
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_and_numbers_stand_for_users_and_groups_and_nonsense_for_none() {
        assert_eq!(user_id("root").unwrap(), 0);
        assert_eq!(group_id("root").unwrap(), 0);
        assert_eq!(user_id("64055").unwrap(), 64_055);
        for name in [
            "",
            "no-such-account",
            "a\0b",
            "-1",
            "4294967295",
            "4294967296",
        ] {
            assert!(
                matches!(user_id(name), Err(AccountError::Unknown { .. })),
                "{name:?}"
            );
            assert!(
                matches!(group_id(name), Err(AccountError::Unknown { .. })),
                "{name:?}"
            );
        }
    }
}
