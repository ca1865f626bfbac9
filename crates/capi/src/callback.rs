// SPDX-License-Identifier: Apache-2.0
//! Callbacks of asynchronous operations (GMEM 4.1, 5.3).
//!
//! A C callback has no argument for the result, so it is called only on success: when the mapping
//! is made, or removed and invalidated. gm_as_synchronize reports failures.

#![expect(unsafe_code, reason = "a function of the caller's is called")]

use crate::{
    failure::{Failure, wrong},
    types::GM_ASYNC,
};
use std::ffi::{c_int, c_void};

/// A callback as C passes it.
pub(crate) type Function = Option<unsafe extern "C" fn(*mut c_void)>;

/// Whether a call waits.
pub(crate) enum Wait {
    /// It does.
    UntilDone,
    /// It does not, and the callback is called when it is done.
    NotAtAll(Option<gmem::Callback>),
}

struct Callback {
    function: unsafe extern "C" fn(*mut c_void),
    arg: *mut c_void,
}

// SAFETY: gmem.h says of both that any thread may call back.
unsafe impl Send for Callback {}

impl Callback {
    fn call(self) {
        // SAFETY: gmem.h demands of the caller that function and argument stay valid until the
        // operation is complete; it is called once.
        unsafe { (self.function)(self.arg) }
    }
}

impl Wait {
    /// Interprets `flags` and the callback; other code handles the `known` flags.
    ///
    /// # Errors
    /// An unknown flag, or a callback for an operation that is waited for.
    pub(crate) fn of_c(
        flags: c_int,
        known: c_int,
        function: Function,
        arg: *mut c_void,
    ) -> Result<Self, Failure> {
        if flags & !(known | GM_ASYNC) != 0 {
            return Err(wrong("flags", "a bit of it is unknown"));
        }
        if flags & GM_ASYNC == 0 {
            return match function {
                None => Ok(Self::UntilDone),
                Some(_) => Err(wrong("async_callback", "it needs the flag GM_ASYNC")),
            };
        }
        let callback = function.map(|function| {
            let callback = Callback { function, arg };
            let called: gmem::Callback = Box::new(move |outcome| {
                if outcome.is_ok() {
                    callback.call();
                }
            });
            called
        });
        Ok(Self::NotAtAll(callback))
    }
}
