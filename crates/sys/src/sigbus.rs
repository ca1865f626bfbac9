// SPDX-License-Identifier: Apache-2.0
//! Surviving a mapping whose file shrinks while we use it.
//!
//! # The danger
//! An access to mapped memory that its file cannot back raises `SIGBUS`, which ends the process.
//! The owner of guest RAM can cause this at any time: by truncating a file that accepts no seals,
//! or by filling the tmpfs on which the file is sparse. A failed memory module does the same.
//!
//! # Handling
//! A mapping of guest RAM is *guarded*: its range is in a list that the signal handler reads. On a
//! `SIGBUS` at an address in the list, the handler marks the range as lost, maps anonymous zeros
//! over all of it, and returns, so that the access reads zeros. Only the user of that range is
//! affected. The user checks [`Guard::is_lost`] before it trusts data it has read, and gives the
//! memory up. Any other `SIGBUS` goes to the previous handler (Rust's, which lets the process end).
//!
//! The whole range is replaced, not one page: a range of huge pages cannot be replaced in part, and
//! a user that has lost one page must not touch any other.
//!
//! # The list
//! ```text
//!   HEAD ─► Entry ─► Entry ─► … ─► null      entries are never freed, only used again
//! ```
//! The handler may run at any time on any thread, so it takes no lock: it walks the list with
//! atomic loads. A mutex serializes writers. The length publishes a range: it is zero while start
//! and length do not match. A thread that faults in a range holds a borrow of the mapping, so its
//! own entry does not change. Entries that do change belong to others, and the second check of the
//! length prevents a mixture of old and new from being taken for a range.
#![expect(
    unsafe_code,
    reason = "signal handlers are installed by sigaction, and memory is mapped over a faulting range"
)]

use std::{
    io,
    mem::MaybeUninit,
    ptr::null_mut,
    sync::{
        Mutex, OnceLock, PoisonError,
        atomic::{AtomicBool, AtomicPtr, AtomicUsize, Ordering},
    },
};

#[derive(Debug)]
struct Entry {
    start: AtomicUsize,
    /// Zero: the entry is free, or is about to change.
    len: AtomicUsize,
    lost: AtomicBool,
    /// Set before the entry is published, then constant.
    next: *const Entry,
}

// SAFETY: `next` points to an entry that is never freed, and is constant after publication; all
// other fields are atomic.
unsafe impl Sync for Entry {}

static HEAD: AtomicPtr<Entry> = AtomicPtr::new(null_mut());
static WRITERS: Mutex<()> = Mutex::new(());
/// The previous `SIGBUS` handler; `None` if ours could not be installed.
static BEFORE: OnceLock<Option<libc::sigaction>> = OnceLock::new();

/// A range of memory that is guarded while this lives.
#[derive(Debug)]
pub(crate) struct Guard {
    entry: &'static Entry,
}

impl Guard {
    /// Guards `len` bytes at `start`, both multiples of the page size of the mapping there.
    ///
    /// # Safety
    /// The range is one mapping of the caller's, created by `mmap`, to which no reference to plain
    /// memory is ever created: it may be replaced by zeros at any time. It must stay mapped until
    /// the guard is dropped.
    pub unsafe fn new(start: usize, len: usize) -> io::Result<Self> {
        install()?;
        let _writers = WRITERS.lock().unwrap_or_else(PoisonError::into_inner);
        let entry = free_entry().unwrap_or_else(new_entry);
        entry.lost.store(false, Ordering::Relaxed);
        entry.start.store(start, Ordering::Relaxed);
        // Pairs with the Acquire loads in `find`.
        entry.len.store(len, Ordering::Release);
        Ok(Self { entry })
    }

    /// True once part of the range could not be backed by its file: data read from it since is not
    /// what its owner wrote.
    #[inline]
    pub fn is_lost(&self) -> bool {
        self.entry.lost.load(Ordering::Acquire)
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let _writers = WRITERS.lock().unwrap_or_else(PoisonError::into_inner);
        self.entry.len.store(0, Ordering::Release);
    }
}

fn entries() -> impl Iterator<Item = &'static Entry> {
    let mut next: *const Entry = HEAD.load(Ordering::Acquire);
    std::iter::from_fn(move || {
        // SAFETY: entries are leaked boxes: a pointer to one is null or valid forever.
        let entry = unsafe { next.as_ref() }?;
        next = entry.next;
        Some(entry)
    })
}

fn free_entry() -> Option<&'static Entry> {
    entries().find(|entry| entry.len.load(Ordering::Relaxed) == 0)
}

/// Call this from one writer at a time.
fn new_entry() -> &'static Entry {
    let entry = Box::leak(Box::new(Entry {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
        next: HEAD.load(Ordering::Relaxed),
    }));
    // Pairs with the Acquire in `entries`: a reader that sees the entry also sees `next`.
    HEAD.store(entry, Ordering::Release);
    entry
}

/// The guarded range that contains `address`: the entry, its start and its length.
fn find(address: usize) -> Option<(&'static Entry, usize, usize)> {
    entries().find_map(|entry| {
        let len = entry.len.load(Ordering::Acquire);
        let start = entry.start.load(Ordering::Acquire);
        let whole = len != 0 && entry.len.load(Ordering::Acquire) == len;
        let holds = address.checked_sub(start).is_some_and(|into| into < len);
        (whole && holds).then_some((entry, start, len))
    })
}

fn install() -> io::Result<()> {
    let before = BEFORE.get_or_init(|| {
        let mut action = MaybeUninit::<libc::sigaction>::zeroed();
        let mut before = MaybeUninit::<libc::sigaction>::zeroed();
        let handler: extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void) = on_sigbus;
        // SAFETY: zeros are a valid `sigaction` with an empty mask; the handler has the signature
        // that SA_SIGINFO requires and calls nothing that is unsafe in a signal handler.
        let done = unsafe {
            (*action.as_mut_ptr()).sa_sigaction = handler as usize;
            (*action.as_mut_ptr()).sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            libc::sigaction(libc::SIGBUS, action.as_ptr(), before.as_mut_ptr())
        };
        // SAFETY: filled by the call if it succeeded, zeros otherwise; both are valid.
        (done == 0).then(|| unsafe { before.assume_init() })
    });
    match before {
        Some(_) => Ok(()),
        None => Err(io::Error::other("no handler for SIGBUS can be installed")),
    }
}

/// Runs on the thread that touched the memory, at an arbitrary point: only atomic loads, stores and
/// system calls are allowed.
extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid siginfo to a handler with SA_SIGINFO; `si_addr` is defined
    // for SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    if let Some((entry, start, len)) = find(address) {
        // Before the zeros are mapped, so that a thread that has read one of them finds the range
        // lost.
        entry.lost.store(true, Ordering::SeqCst);
        if map_zeros(start, len) {
            return;
        }
    }
    hand_on(signal, info, context);
}

fn map_zeros(start: usize, len: usize) -> bool {
    // SAFETY: `errno` belongs to this thread; the interrupted code must find it unchanged.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the range is one mapping whose owner has agreed, by `Guard::new`, to its replacement,
    // and keeps it mapped while a thread can fault in it.
    let mapped = unsafe {
        libc::mmap(
            start as *mut libc::c_void,
            len,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    // SAFETY: as above.
    unsafe { *libc::__errno_location() = errno };
    mapped != libc::MAP_FAILED
}

/// Does what would have happened without us.
fn hand_on(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let before = BEFORE.get().and_then(Option::as_ref);
    match before {
        Some(before)
            if before.sa_sigaction != libc::SIG_DFL && before.sa_sigaction != libc::SIG_IGN =>
        {
            if before.sa_flags & libc::SA_SIGINFO == 0 {
                // SAFETY: a handler installed without SA_SIGINFO takes only the number.
                let handler = unsafe {
                    std::mem::transmute::<usize, extern "C" fn(i32)>(before.sa_sigaction)
                };
                handler(signal);
            } else {
                // SAFETY: a handler installed with SA_SIGINFO has this signature, and gets what the
                // kernel passed to us.
                let handler = unsafe {
                    std::mem::transmute::<
                        usize,
                        extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void),
                    >(before.sa_sigaction)
                };
                handler(signal, info, context);
            }
        }
        // The instruction is executed again, faults again, and ends the process.
        _ => {
            // SAFETY: zeros with SIG_DFL are a valid action; sigaction may be called in a handler.
            unsafe {
                let mut default = MaybeUninit::<libc::sigaction>::zeroed();
                (*default.as_mut_ptr()).sa_sigaction = libc::SIG_DFL;
                libc::sigaction(signal, default.as_ptr(), null_mut());
            }
        }
    }
}
