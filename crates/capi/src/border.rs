// SPDX-License-Identifier: Apache-2.0
//! [`call`] wraps every function that C calls; [`InDriver`] wraps every C function that a space
//! calls.
//!
//! A panic would be undefined behaviour in a caller that is not Rust, so it ends here and becomes
//! GM_RET_INTERNAL. A driver's operation runs with locks of its space held. If it called the
//! interface it might deadlock, so such calls are refused by a mark on the thread.

#![expect(
    unsafe_code,
    reason = "pointers that C gives are read and written here"
)]

use crate::{
    failure::{Failure, wrong},
    types::{GM_RET_OK, gm_ret_t},
};
use std::{
    cell::Cell,
    panic::{AssertUnwindSafe, catch_unwind},
};

thread_local! {
    /// Number of nested driver operations on this thread.
    static IN_DRIVER: Cell<u32> = const { Cell::new(0) };
}

/// The body of an exported function.
pub(crate) fn call(body: impl FnOnce() -> Result<(), Failure>) -> gm_ret_t {
    if IN_DRIVER.with(Cell::get) > 0 {
        return Failure::InDriver.tell();
    }
    // Any state that a panic in `body` leaves is behind locks that tolerate it.
    match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => GM_RET_OK,
        Ok(Err(failure)) => failure.tell(),
        Err(panic) => Failure::Internal(message_of(panic.as_ref())).tell(),
    }
}

fn message_of(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
    text.unwrap_or("a panic without a message").to_owned()
}

/// An operation of a driver is under way on this thread until this is dropped.
pub(crate) struct InDriver(());

impl InDriver {
    pub(crate) fn enter() -> Self {
        IN_DRIVER.with(|depth| depth.set(depth.get() + 1));
        Self(())
    }
}

impl Drop for InDriver {
    fn drop(&mut self) {
        IN_DRIVER.with(|depth| depth.set(depth.get() - 1));
    }
}

/// Destination of a result. Checked before anything is done, so that nothing must be undone.
pub(crate) struct Out<T>(std::ptr::NonNull<T>);

impl<T> Out<T> {
    /// # Errors
    /// [`Failure`] if `place` is NULL.
    pub(crate) fn new(place: *mut T) -> Result<Self, Failure> {
        match std::ptr::NonNull::new(place) {
            Some(place) if place.is_aligned() => Ok(Self(place)),
            _ => Err(wrong("place for the result", "it must not be NULL")),
        }
    }

    pub(crate) fn put(self, value: T) {
        // SAFETY: the caller of the C function passed a place for a result of that type, as its
        // header demands; it is not NULL and aligned.
        unsafe { self.0.write(value) }
    }
}

/// An array passed by C.
///
/// # Safety
/// `first` must be NULL or have `count` values behind it, which do not change during `'a`.
pub(crate) unsafe fn array<'a, T>(
    name: &'static str,
    first: *const T,
    count: usize,
) -> Result<&'a [T], Failure> {
    if count == 0 {
        return Ok(&[]);
    }
    if first.is_null() || !first.is_aligned() {
        return Err(wrong(name, "it must not be NULL"));
    }
    if count > isize::MAX as usize / size_of::<T>().max(1) {
        return Err(wrong(name, "there are more of them than memory could hold"));
    }
    // SAFETY: not NULL, aligned, not longer than memory; the caller guarantees the rest.
    Ok(unsafe { std::slice::from_raw_parts(first, count) })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{GM_RET_IN_DRIVER, GM_RET_INTERNAL, GM_RET_INVALID_ARGUMENT};

    #[test]
    fn panic_in_a_call_becomes_a_code_and_the_next_call_works() {
        let number = 7;
        assert_eq!(call(|| panic!("on purpose: {number}")), GM_RET_INTERNAL);
        assert_eq!(call(|| panic!("on purpose")), GM_RET_INTERNAL);
        assert_eq!(call(|| std::panic::panic_any(number)), GM_RET_INTERNAL);
        assert_eq!(call(|| Ok(())), GM_RET_OK);
    }

    #[test]
    fn call_from_within_an_operation_of_a_driver_is_refused() {
        {
            let _inside = InDriver::enter();
            assert_eq!(call(|| Ok(())), GM_RET_IN_DRIVER);
        }
        assert_eq!(call(|| Ok(())), GM_RET_OK);
    }

    #[test]
    fn place_for_a_result_that_is_null_or_crooked_is_refused() {
        let mut places = [0_u64; 2];
        let crooked = places.as_mut_ptr().wrapping_byte_add(1);
        for place in [std::ptr::null_mut(), crooked] {
            let refused = call(|| Out::new(place).map(drop));
            assert_eq!(refused, GM_RET_INVALID_ARGUMENT);
        }
        Out::new(places.as_mut_ptr()).unwrap().put(9);
        assert_eq!(places, [9, 0]);
    }
}
