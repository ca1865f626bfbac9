// SPDX-License-Identifier: Apache-2.0
//! A mapping whose file is cut short under us, survived.
//!
//! # The danger
//! A touch of mapped memory that its file cannot back is a `SIGBUS`, and that
//! ends the process. The owner of guest RAM can bring it about at any time: it
//! truncates a file that takes no seals, or fills the tmpfs that the file is
//! sparse on. A failed memory module does the same.
//!
//! # What is done
//! A mapping of guest RAM is *guarded*: its range stands in a list that the
//! signal handler reads. A `SIGBUS` at an address of the list marks the range
//! as lost, maps anonymous zeros over all of it, and returns, so that whatever
//! was touched reads as zeros. Nobody but the user of that one range notices.
//! The user looks at [`Guard::is_lost`] before it believes what it has read, and
//! gives the memory up. Any other `SIGBUS` goes to the handler that was there
//! before (Rust's, which lets the process end).
//!
//! All of the range is replaced, not the one page: a range of huge pages
//! cannot be replaced in part, and a user that has lost one page is to touch no
//! other.
//!
//! # The list
//! ```text
//!   HEAD ─► Entry ─► Entry ─► … ─► null      entries are never freed, only used again
//! ```
//! The handler may run at any instant on any thread, so it takes no lock: it
//! walks the list by atomic loads. Writers exclude one another by a mutex. A
//! range is published by its length: zero while start and length do not belong
//! together. A thread that faults in a range holds a borrow of the mapping, so
//! its own entry does not change under it; entries that do change belong to
//! others, and the second look at the length keeps a mixture of old and new
//! from being taken for a range.
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
    /// Zero: the entry is free, or about to change.
    len: AtomicUsize,
    lost: AtomicBool,
    /// Set before the entry is published, then constant.
    next: *const Entry,
}

// SAFETY: `next` points to an entry that is never freed, and is constant after publication; all else
// is atomic.
unsafe impl Sync for Entry {}

static HEAD: AtomicPtr<Entry> = AtomicPtr::new(null_mut());
static WRITERS: Mutex<()> = Mutex::new(());
/// What handled `SIGBUS` before us; `None` if ours could not be installed.
static BEFORE: OnceLock<Option<libc::sigaction>> = OnceLock::new();

/// A range of memory that is guarded as long as this lives.
#[derive(Debug)]
pub(crate) struct Guard {
    entry: &'static Entry,
}

impl Guard {
    /// Guards `len` bytes at `start`, both multiples of the page size of the mapping there.
    ///
    /// # Safety
    /// The range is one mapping of the caller's, made by `mmap`, in which no reference to plain
    /// memory is ever made: it may be replaced by zeros at any time. It must stay mapped until the
    /// guard is dropped.
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

    /// True once part of the range could not be backed by its file: what was read from it since is
    /// not what its owner wrote.
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
        // SAFETY: entries are leaked boxes: a pointer to one is null or valid for ever.
        let entry = unsafe { next.as_ref() }?;
        next = entry.next;
        Some(entry)
    })
}

fn free_entry() -> Option<&'static Entry> {
    entries().find(|entry| entry.len.load(Ordering::Relaxed) == 0)
}

/// To be called by one writer at a time.
fn new_entry() -> &'static Entry {
    let entry = Box::leak(Box::new(Entry {
        start: AtomicUsize::new(0),
        len: AtomicUsize::new(0),
        lost: AtomicBool::new(false),
        next: HEAD.load(Ordering::Relaxed),
    }));
    // Pairs with the Acquire in `entries`: `next` is seen by whoever sees the entry.
    HEAD.store(entry, Ordering::Release);
    entry
}

/// The guarded range that holds `address`: the entry, its start and its length.
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
        // that SA_SIGINFO asks for and calls nothing that is unsafe in a signal handler.
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

/// Runs on the thread that touched the memory, in the middle of whatever it did: only atomic loads,
/// stores and system calls.
extern "C" fn on_sigbus(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    // SAFETY: the kernel hands a valid siginfo to a handler with SA_SIGINFO; `si_addr` is defined for
    // SIGBUS.
    let address = unsafe { (*info).si_addr() } as usize;
    if let Some((entry, start, len)) = find(address) {
        // Before the zeros are there, so that whoever has read one of them finds the mark.
        entry.lost.store(true, Ordering::SeqCst);
        if map_zeros(start, len) {
            return;
        }
    }
    hand_on(signal, info, context);
}

fn map_zeros(start: usize, len: usize) -> bool {
    // SAFETY: `errno` is this thread's own; the interrupted code must find it as it was.
    let errno = unsafe { *libc::__errno_location() };
    // SAFETY: the range is one mapping whose owner has agreed, by `Guard::new`, to its being
    // replaced, and keeps it mapped while a thread can fault in it.
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

/// Does what would have been done without us.
fn hand_on(signal: i32, info: *mut libc::siginfo_t, context: *mut libc::c_void) {
    let before = BEFORE.get().and_then(Option::as_ref);
    match before {
        Some(before)
            if before.sa_sigaction != libc::SIG_DFL && before.sa_sigaction != libc::SIG_IGN =>
        {
            if before.sa_flags & libc::SA_SIGINFO == 0 {
                // SAFETY: a handler installed without SA_SIGINFO takes the number alone.
                let handler = unsafe {
                    std::mem::transmute::<usize, extern "C" fn(i32)>(before.sa_sigaction)
                };
                handler(signal);
            } else {
                // SAFETY: a handler installed with SA_SIGINFO has this signature, and gets what the
                // kernel gave us.
                let handler = unsafe {
                    std::mem::transmute::<
                        usize,
                        extern "C" fn(i32, *mut libc::siginfo_t, *mut libc::c_void),
                    >(before.sa_sigaction)
                };
                handler(signal, info, context);
            }
        }
        // The instruction is run again, faults again, and ends the process.
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
