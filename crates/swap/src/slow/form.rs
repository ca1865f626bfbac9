// SPDX-License-Identifier: Apache-2.0
//! The byte in front of what is sealed: the form of the stored page behind it.

use crate::tier::Form;

/// They are on disk, so the numbers never change.
pub(super) const fn byte_of(form: Form) -> u8 {
    match form {
        Form::Lz4 => 1,
        Form::Uncompressed => 2,
        Form::Zstd => 3,
    }
}

pub(super) const fn form_of(byte: u8) -> Option<Form> {
    match byte {
        1 => Some(Form::Lz4),
        2 => Some(Form::Uncompressed),
        3 => Some(Form::Zstd),
        _ => None,
    }
}
