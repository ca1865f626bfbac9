// SPDX-License-Identifier: Apache-2.0
//! [`Failure`]: why a call from C fails, as a code and as a sentence.
//!
//! Each [`GmError`] has one code, and the border has some of its own. There is no code for errors
//! that C cannot cause: spaces over paged memory are not made from C, so nothing is ever *lost*
//! there. The sentence has the numbers of the case, and is kept for the thread until its next
//! failure.

use crate::types::*;
use gmem::GmError;
use std::{
    cell::RefCell,
    ffi::{CStr, CString, c_char},
};

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// What went wrong.
#[derive(Debug)]
pub(crate) enum Failure {
    /// An error of the interface.
    Gmem(GmError),
    /// An invalid handle.
    InvalidHandle {
        /// Kind of object.
        kind: &'static str,
    },
    /// A stale handle.
    Destroyed {
        /// Kind of object.
        kind: &'static str,
    },
    /// A CPU is already attached to the space, this one or another.
    CpuAttached,
    /// An operation of a driver called the interface.
    InDriver,
    /// Too many objects.
    TooMany {
        /// Kind of object.
        kind: &'static str,
    },
    /// The system refused a thread for asynchronous operations.
    NoThread {
        /// Why.
        error: std::io::Error,
    },
    /// A panic, with its message.
    Internal(String),
}

impl From<GmError> for Failure {
    fn from(error: GmError) -> Self {
        Self::Gmem(error)
    }
}

/// An invalid argument.
pub(crate) fn wrong(argument: &'static str, why: &'static str) -> Failure {
    Failure::Gmem(GmError::InvalidArgument { argument, why })
}

/// An unsupported operation.
pub(crate) fn unsupported(what: &'static str) -> Failure {
    Failure::Gmem(GmError::Unsupported { what })
}

impl Failure {
    /// The code for C.
    pub(crate) fn code(&self) -> gm_ret_t {
        match self {
            Self::Gmem(error) => code_of(error),
            Self::InvalidHandle { .. } => GM_RET_INVALID_HANDLE,
            Self::Destroyed { .. } => GM_RET_DESTROYED,
            Self::CpuAttached => GM_RET_ALREADY_ATTACHED,
            Self::InDriver => GM_RET_IN_DRIVER,
            Self::TooMany { .. } | Self::NoThread { .. } => GM_RET_UNSUPPORTED,
            Self::Internal(_) => GM_RET_INTERNAL,
        }
    }

    /// Keeps the sentence for this thread, and returns the code.
    pub(crate) fn tell(&self) -> gm_ret_t {
        // Only a panic's message can contain a zero byte.
        let sentence = self.to_string().replace('\0', "?");
        let sentence = CString::new(sentence).unwrap_or_default();
        // Fails only while the thread exits: it cannot query the sentence any more.
        if LAST.try_with(|last| last.replace(sentence)).is_err() {
            return self.code();
        }
        self.code()
    }
}

fn code_of(error: &GmError) -> gm_ret_t {
    match error {
        GmError::InvalidArgument { .. } => GM_RET_INVALID_ARGUMENT,
        GmError::NoAddresses { .. } => GM_RET_NO_ADDRESSES,
        GmError::NoMemory { .. } => GM_RET_NO_MEMORY,
        GmError::NotAllocated { .. } => GM_RET_NOT_ALLOCATED,
        GmError::AlreadyAttached { .. } => GM_RET_ALREADY_ATTACHED,
        GmError::NotAttached { .. } => GM_RET_NOT_ATTACHED,
        GmError::NotActive { .. } => GM_RET_NOT_ACTIVE,
        GmError::InUse { .. } => GM_RET_IN_USE,
        GmError::AlreadyMapped { .. } => GM_RET_ALREADY_MAPPED,
        GmError::NotMapped { .. } => GM_RET_NOT_MAPPED,
        GmError::Denied { .. } => GM_RET_DENIED,
        GmError::CannotRecover { .. } => GM_RET_CANNOT_RECOVER,
        GmError::Unsupported { .. } => GM_RET_UNSUPPORTED,
        GmError::Busy { .. } => GM_RET_BUSY,
        GmError::Device { .. } => GM_RET_DEVICE,
        GmError::Destroyed => GM_RET_DESTROYED,
        // Concerns paged memory, which no space made from C has.
        GmError::Lost { .. } => GM_RET_INTERNAL,
    }
}

impl std::fmt::Display for Failure {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::Gmem(error) => write!(f, "{error}"),
            Self::InvalidHandle { kind } => {
                write!(f, "this is no handle of {kind} that was ever given out")
            }
            Self::Destroyed { kind } => write!(f, "the {kind} of this handle was destroyed"),
            Self::CpuAttached => f.write_str(
                "a CPU is attached to the address space already, and a space has one: detach it first",
            ),
            Self::InDriver => f.write_str(
                "called from within an operation of a driver, where it would wait for itself",
            ),
            Self::TooMany { kind } => write!(f, "not supported: more handles of {kind}"),
            Self::NoThread { error } => write!(
                f,
                "not supported now: no thread for asynchronous operations: {error}"
            ),
            Self::Internal(message) => write!(f, "a bug in libpagetide_gmem: {message}"),
        }
    }
}

/// The sentence of this thread's last failure; valid until the next failure.
pub(crate) fn last() -> *const c_char {
    // There is none while the thread exits.
    LAST.try_with(|last| last.borrow().as_ptr())
        .unwrap_or(c"".as_ptr())
}

/// A sentence for each code.
pub(crate) fn sentence(code: gm_ret_t) -> &'static CStr {
    match code {
        GM_RET_OK => c"it is done",
        GM_RET_INVALID_HANDLE => c"this is no handle that was ever given out",
        GM_RET_DESTROYED => c"the object of this handle was destroyed",
        GM_RET_INVALID_ARGUMENT => c"an argument makes no sense",
        GM_RET_NO_ADDRESSES => c"no free range of addresses satisfies the request",
        GM_RET_NO_MEMORY => c"no physical memory is free, or none is registered",
        GM_RET_NOT_ALLOCATED => c"the address is in no allocated region",
        GM_RET_ALREADY_ATTACHED => c"the device is attached to the address space already",
        GM_RET_NOT_ATTACHED => c"the device is not attached to the address space",
        GM_RET_NOT_ACTIVE => c"the device is active in no address space: switch it there first",
        GM_RET_IN_USE => c"something else still uses it",
        GM_RET_ALREADY_MAPPED => c"the region is mapped already: unmap it first",
        GM_RET_NOT_MAPPED => c"the region is not mapped",
        GM_RET_DENIED => c"the region does not allow the access",
        GM_RET_CANNOT_RECOVER => {
            c"the device cannot recover from a fault: wire what it may use (gm_region_map)"
        }
        GM_RET_UNSUPPORTED => c"this space, device, region or version cannot do that",
        GM_RET_BUSY => c"a device is in the middle of an access that does not end: try again",
        GM_RET_DEVICE => c"an operation of a driver failed",
        GM_RET_IN_DRIVER => c"called from within an operation of a driver",
        GM_RET_INTERNAL => c"a bug in libpagetide_gmem",
        _ => c"no code of gm_ret_t",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_a_sentence_of_its_own_and_no_other_number_has_one() {
        let none = sentence(gm_ret_t(u32::MAX));
        let all: std::collections::BTreeSet<_> = (0..=GM_RET_INTERNAL.0)
            .map(|code| sentence(gm_ret_t(code)))
            .collect();
        assert_eq!(all.len() as u64, u64::from(GM_RET_INTERNAL.0) + 1);
        assert!(!all.contains(none));
        assert_eq!(sentence(gm_ret_t(GM_RET_INTERNAL.0 + 1)), none);
    }

    #[test]
    fn failure_that_was_told_is_the_threads_last() {
        let code = wrong("size", "it must not be 0").tell();
        assert_eq!(code, GM_RET_INVALID_ARGUMENT);
        let kept = LAST.with_borrow(|last| last.to_str().unwrap().to_owned());
        assert_eq!(kept, "size is wrong: it must not be 0");
    }
}
