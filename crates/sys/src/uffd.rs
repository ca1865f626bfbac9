// SPDX-License-Identifier: Apache-2.0
//! [`Userfaultfd`]: faults of an address space as messages, and the ioctls that answer them.
//!
//! A userfaultfd belongs to the address space in which it was created, wherever the descriptor is
//! held: all addresses here are of *that* process. The first `UFFDIO_API` fixes the features for
//! good, so it requests everything that a later version may want. `EVENT_` features are never
//! requested, because their unread events block `munmap` and `madvise` in the target.
//!
//! A message is only a hint: between the fault and the answer anything may have happened to the
//! page. Only the result of each ioctl counts:
//!
//! ```text
//!   copy, zeropage   Filled        the page is whole and its waiters are released
//!                    AlreadyThere  somebody was faster: content untouched, waiters still asleep
//!                    Retry         the address space is changing under the call
//!                    Gone          the process has ended
//!   write_protect    Done | Retry | Gone
//! ```
#![expect(unsafe_code, reason = "ioctls and reads of kernel structures")]

mod abi;
mod asking;
mod features;

pub use asking::MapOutcome;
pub use features::Features;

use crate::to_usize;
use abi::{
    Api, CopyIn, FLAG_MINOR, FLAG_WP, FLAG_WRITE, Fill, Message, PROTECT, PROTECT_WITHOUT_WAKING,
    Protect, Range, Register, UFFD_API, UFFD_EVENT_PAGEFAULT, UFFDIO_API, UFFDIO_COPY,
    UFFDIO_POISON, UFFDIO_REGISTER, UFFDIO_UNREGISTER, UFFDIO_WAKE, UFFDIO_WRITEPROTECT,
    UFFDIO_ZEROPAGE, USERFAULTFD_IOC_NEW,
};
use pagetide_addr::{Access, Hva, PAGE_BYTES};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd};

/// Messages per read.
pub const EVENTS_PER_READ: usize = 16;

/// Why a userfaultfd operation failed.
#[derive(Debug, thiserror::Error)]
pub enum UffdError {
    /// We are not allowed to create one.
    #[error(
        "creating a userfaultfd is not permitted (root, or access to /dev/userfaultfd, is needed): {source}"
    )]
    NotPermitted {
        /// The kernel's answer.
        source: io::Error,
    },
    /// Another userfaultfd watches these addresses.
    #[error(
        "addresses {start}..+{len_bytes} are watched by another userfaultfd: migration, postcopy, \
         a snapshot or another manager is using them; wait for it to end"
    )]
    Busy {
        /// First address.
        start: Hva,
        /// Number of bytes.
        len_bytes: u64,
    },
    /// The kernel refused.
    #[error("{operation} at {start}, {len_bytes} bytes, failed: {source}")]
    Kernel {
        /// The operation that failed.
        operation: &'static str,
        /// First address.
        start: Hva,
        /// Number of bytes.
        len_bytes: u64,
        /// The kernel's answer.
        source: io::Error,
    },
}

/// The faults for which a range is watched.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Watch {
    /// Accesses to absent pages.
    Missing,
    /// Accesses to absent pages, and writes to protected ones.
    MissingAndWriteProtected,
    /// Accesses to pages that are absent, or in the file and not mapped.
    MissingAndMinor,
}

/// Whether writes fault.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteProtection {
    /// They fault from now on.
    On,
    /// They are allowed, and threads blocked in one are woken.
    Off,
}

/// Result of filling pages.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum FillOutcome {
    /// This many bytes from the start were filled, and the threads waiting for them woken; fewer
    /// than requested if the next page was present already.
    Filled {
        /// Bytes filled, at least one page.
        bytes: u64,
    },
    /// The first page was present already. Nothing was written, and its waiters still sleep.
    AlreadyThere,
    /// The address space is changing; try again.
    Retry,
    /// The process has ended.
    Gone,
}

/// Result of changing a protection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[must_use]
pub enum ProtectOutcome {
    /// The change is in effect.
    Done,
    /// The address space is changing; try again.
    Retry,
    /// The process has ended.
    Gone,
}

/// Why a thread faulted.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    /// The page is absent.
    Missing,
    /// The page is write-protected.
    WriteProtected,
    /// The page is in its file but not mapped.
    Minor,
}

/// A page fault as the kernel reports it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct FaultEvent {
    /// Address of the access (the byte, with [`Features::EXACT_ADDRESS`], else its page).
    pub address: Hva,
    /// Why it faulted.
    pub kind: FaultKind,
    /// The type of access.
    pub access: Access,
    /// Thread that waits (0 without [`Features::THREAD_ID`]), as seen from where the userfaultfd
    /// was created.
    pub thread: u32,
}

/// A userfaultfd, of this process or of another.
#[derive(Debug)]
pub struct Userfaultfd {
    fd: OwnedFd,
}

impl From<OwnedFd> for Userfaultfd {
    fn from(fd: OwnedFd) -> Self {
        Self { fd }
    }
}

impl AsFd for Userfaultfd {
    /// Readable when a fault is queued.
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

impl Userfaultfd {
    /// Creates one for this process's own address space, including kernel-mode faults.
    ///
    /// # Errors
    /// [`UffdError::NotPermitted`].
    pub fn create_here() -> Result<Self, UffdError> {
        // SAFETY: the system call takes only flags and returns a new descriptor or -1.
        let made =
            unsafe { libc::syscall(libc::SYS_userfaultfd, libc::O_CLOEXEC | libc::O_NONBLOCK) };
        if let Some(fd) = own(made) {
            return Ok(Self { fd });
        }
        let refused = io::Error::last_os_error();
        let device =
            Self::open_device().map_err(|_| UffdError::NotPermitted { source: refused })?;
        // SAFETY: the ioctl takes only flags and returns a new descriptor or -1.
        let made = unsafe {
            libc::ioctl(
                device.as_raw_fd(),
                USERFAULTFD_IOC_NEW,
                libc::O_CLOEXEC | libc::O_NONBLOCK,
            )
        };
        own(made.into())
            .map(|fd| Self { fd })
            .ok_or_else(|| UffdError::NotPermitted {
                source: io::Error::last_os_error(),
            })
    }

    /// Opens `/dev/userfaultfd`. Any process that holds it can create a userfaultfd, whatever its
    /// privileges, by `USERFAULTFD_IOC_NEW`.
    ///
    /// # Errors
    /// [`UffdError::NotPermitted`] (Linux before 6.1 does not have it).
    pub fn open_device() -> Result<File, UffdError> {
        File::options()
            .read(true)
            .write(true)
            .open("/dev/userfaultfd")
            .map_err(|source| UffdError::NotPermitted { source })
    }

    /// Features that the kernel supports.
    ///
    /// # Errors
    /// [`UffdError`].
    pub fn supported() -> Result<Features, UffdError> {
        // A throw-away descriptor: the first UFFDIO_API fixes the features.
        Self::create_here()?.handshake(Features::NONE)
    }

    /// Fixes the features for good: those of `wanted` that the kernel supports. Returns them.
    ///
    /// # Errors
    /// [`UffdError::Kernel`] with `EINVAL` if they are fixed already.
    pub fn api(&self, wanted: Features) -> Result<Features, UffdError> {
        let chosen = wanted.intersect(Self::supported()?);
        self.handshake(chosen)?;
        Ok(chosen)
    }

    /// The handshake itself; returns all features that the kernel supports.
    fn handshake(&self, features: Features) -> Result<Features, UffdError> {
        let mut api = Api {
            api: UFFD_API,
            features: features.0,
            ioctls: 0,
        };
        self.ioctl(UFFDIO_API, &mut api)
            .map_err(|source| kernel("UFFDIO_API", Hva(0), 0, source))?;
        Ok(Features(api.features))
    }

    /// Watches `len_bytes` from `start` on.
    ///
    /// # Errors
    /// [`UffdError::Busy`] if another userfaultfd does; [`UffdError::Kernel`].
    pub fn register(&self, start: Hva, len_bytes: u64, watch: Watch) -> Result<(), UffdError> {
        let mut register = Register {
            range: range(start, len_bytes),
            mode: match watch {
                Watch::Missing => 1,
                Watch::MissingAndWriteProtected => 3,
                Watch::MissingAndMinor => 5,
            },
            ioctls: 0,
        };
        self.ioctl(UFFDIO_REGISTER, &mut register)
            .map_err(|source| match source.raw_os_error() {
                Some(libc::EBUSY) => UffdError::Busy { start, len_bytes },
                _ => kernel("UFFDIO_REGISTER", start, len_bytes, source),
            })
    }

    /// Stops watching the range. Threads that wait in it are woken, and protections are removed.
    ///
    /// # Errors
    /// [`UffdError::Kernel`].
    pub fn unregister(&self, start: Hva, len_bytes: u64) -> Result<(), UffdError> {
        self.ioctl(UFFDIO_UNREGISTER, &mut range(start, len_bytes))
            .map_err(|source| kernel("UFFDIO_UNREGISTER", start, len_bytes, source))
    }

    /// Fills absent pages from `dst` on with `content` (whole pages). Each page is filled
    /// atomically.
    ///
    /// # Errors
    /// [`UffdError::Kernel`]; nothing was filled.
    pub fn copy(&self, dst: Hva, content: &[u8]) -> Result<FillOutcome, UffdError> {
        let len = content.len() as u64;
        let mut copy = CopyIn {
            dst: dst.0,
            src: content.as_ptr().addr() as u64,
            len,
            mode: 0,
            done: 0,
        };
        let answer = self.ioctl(UFFDIO_COPY, &mut copy);
        fill_outcome("UFFDIO_COPY", dst, len, answer, copy.done)
    }

    /// Fills absent pages with zeros.
    ///
    /// # Errors
    /// [`UffdError::Kernel`]; nothing was filled.
    pub fn zeropage(&self, start: Hva, len_bytes: u64) -> Result<FillOutcome, UffdError> {
        let mut fill = Fill {
            range: range(start, len_bytes),
            mode: 0,
            done: 0,
        };
        let answer = self.ioctl(UFFDIO_ZEROPAGE, &mut fill);
        fill_outcome("UFFDIO_ZEROPAGE", start, len_bytes, answer, fill.done)
    }

    /// Makes every access to absent pages fail (`SIGBUS`) from now on. A page that is mapped,
    /// poisoned already, or absent but write-protected counts as present.
    ///
    /// # Errors
    /// [`UffdError::Kernel`], also if the kernel lacks [`Features::POISON`].
    pub fn poison(&self, start: Hva, len_bytes: u64) -> Result<FillOutcome, UffdError> {
        let mut fill = Fill {
            range: range(start, len_bytes),
            mode: 0,
            done: 0,
        };
        let answer = self.ioctl(UFFDIO_POISON, &mut fill);
        fill_outcome("UFFDIO_POISON", start, len_bytes, answer, fill.done)
    }

    /// Protects pages against writes, whether present or absent, or removes the protection.
    ///
    /// # Errors
    /// [`UffdError::Kernel`].
    pub fn write_protect(
        &self,
        start: Hva,
        len_bytes: u64,
        protection: WriteProtection,
    ) -> Result<ProtectOutcome, UffdError> {
        let mode = match protection {
            WriteProtection::On => PROTECT,
            WriteProtection::Off => 0,
        };
        self.change_protection(start, len_bytes, mode)
    }

    /// Removes a protection without waking any thread. On an absent page it leaves a marker, which
    /// blocks [`Userfaultfd::poison`].
    ///
    /// # Errors
    /// [`UffdError::Kernel`].
    pub fn unprotect_quietly(
        &self,
        start: Hva,
        len_bytes: u64,
    ) -> Result<ProtectOutcome, UffdError> {
        self.change_protection(start, len_bytes, PROTECT_WITHOUT_WAKING)
    }

    fn change_protection(
        &self,
        start: Hva,
        len_bytes: u64,
        mode: u64,
    ) -> Result<ProtectOutcome, UffdError> {
        let mut protect = Protect {
            range: range(start, len_bytes),
            mode,
        };
        match self.ioctl(UFFDIO_WRITEPROTECT, &mut protect) {
            Ok(()) => Ok(ProtectOutcome::Done),
            Err(source) => match source.raw_os_error() {
                Some(libc::EAGAIN) => Ok(ProtectOutcome::Retry),
                Some(libc::ESRCH) => Ok(ProtectOutcome::Gone),
                _ => Err(kernel("UFFDIO_WRITEPROTECT", start, len_bytes, source)),
            },
        }
    }

    /// Wakes the threads that wait in the range. They retry the access, and may fault again.
    ///
    /// # Errors
    /// [`UffdError::Kernel`].
    pub fn wake(&self, start: Hva, len_bytes: u64) -> Result<(), UffdError> {
        self.ioctl(UFFDIO_WAKE, &mut range(start, len_bytes))
            .map_err(|source| kernel("UFFDIO_WAKE", start, len_bytes, source))
    }

    /// Reads queued faults, at most [`EVENTS_PER_READ`], into `faults` (which is cleared first).
    /// Returns their number; 0 if none is queued. Other events are skipped.
    ///
    /// # Errors
    /// [`UffdError::Kernel`].
    pub fn read_faults(&self, faults: &mut Vec<FaultEvent>) -> Result<usize, UffdError> {
        faults.clear();
        let empty = Message {
            event: 0,
            reserved: [0; 7],
            flags: 0,
            address: 0,
            thread: 0,
            padding: 0,
        };
        let mut messages = [empty; EVENTS_PER_READ];
        // SAFETY: the kernel writes whole 32-byte messages into an array of that size; any bits
        // are a valid Message.
        let got = unsafe {
            libc::read(
                self.fd.as_raw_fd(),
                messages.as_mut_ptr().cast(),
                size_of_val(&messages),
            )
        };
        let Ok(got) = usize::try_from(got) else {
            let source = io::Error::last_os_error();
            return match source.raw_os_error() {
                Some(libc::EAGAIN | libc::EINTR) => Ok(0),
                _ => Err(kernel("reading a userfaultfd", Hva(0), 0, source)),
            };
        };
        faults.extend(
            messages[..got / size_of::<Message>()]
                .iter()
                .filter(|m| m.event == UFFD_EVENT_PAGEFAULT)
                .map(Message::fault),
        );
        Ok(faults.len())
    }

    fn ioctl<T>(&self, request: u64, argument: &mut T) -> io::Result<()> {
        // SAFETY: each request above is paired with the structure whose size is part of its
        // number, so the kernel reads and writes exactly `T`. Addresses inside are checked by
        // the kernel; UFFDIO_COPY only reads its source, a live slice of the caller's.
        let answer =
            unsafe { libc::ioctl(self.fd.as_raw_fd(), request, std::ptr::from_mut(argument)) };
        if answer < 0 {
            return Err(io::Error::last_os_error());
        }
        Ok(())
    }
}

impl Message {
    fn fault(&self) -> FaultEvent {
        FaultEvent {
            address: Hva(self.address),
            kind: if self.flags & FLAG_WP != 0 {
                FaultKind::WriteProtected
            } else if self.flags & FLAG_MINOR != 0 {
                FaultKind::Minor
            } else {
                FaultKind::Missing
            },
            access: if self.flags & FLAG_WRITE != 0 {
                Access::Write
            } else {
                Access::Read
            },
            thread: self.thread,
        }
    }
}

/// Number and flags of the ioctl that creates a userfaultfd from `/dev/userfaultfd`.
#[must_use]
pub(crate) const fn new_request() -> (u64, u64) {
    const FLAGS: i32 = libc::O_CLOEXEC | libc::O_NONBLOCK;
    (USERFAULTFD_IOC_NEW, FLAGS.cast_unsigned() as u64)
}

/// True if the descriptor is a userfaultfd.
#[must_use]
pub fn is_userfaultfd(fd: BorrowedFd<'_>) -> bool {
    std::fs::read_link(format!("/proc/self/fd/{}", fd.as_raw_fd()))
        .is_ok_and(|name| name.as_os_str() == "anon_inode:[userfaultfd]")
}

fn own(made: libc::c_long) -> Option<OwnedFd> {
    let number = i32::try_from(made).map_or(-1, |n| n);
    // SAFETY: a non-negative number is a descriptor that the kernel has just created for us;
    // nothing else knows it.
    (number >= 0).then(|| unsafe { OwnedFd::from_raw_fd(number) })
}

const fn range(start: Hva, len: u64) -> Range {
    Range {
        start: start.0,
        len,
    }
}

fn kernel(operation: &'static str, start: Hva, len_bytes: u64, source: io::Error) -> UffdError {
    UffdError::Kernel {
        operation,
        start,
        len_bytes,
        source,
    }
}

/// `done` is the number of bytes filled, or the error again; `EAGAIN` with bytes means that the
/// fill was cut short.
fn fill_outcome(
    operation: &'static str,
    start: Hva,
    len_bytes: u64,
    answer: io::Result<()>,
    done: i64,
) -> Result<FillOutcome, UffdError> {
    match (answer, u64::try_from(done).map_or(0, |bytes| bytes)) {
        (Ok(()), _) => Ok(FillOutcome::Filled { bytes: len_bytes }),
        (Err(_), bytes) if bytes > 0 => Ok(FillOutcome::Filled { bytes }),
        (Err(source), _) => match source.raw_os_error() {
            Some(libc::EEXIST) => Ok(FillOutcome::AlreadyThere),
            Some(libc::EAGAIN) => Ok(FillOutcome::Retry),
            Some(libc::ESRCH) => Ok(FillOutcome::Gone),
            _ => Err(kernel(operation, start, len_bytes, source)),
        },
    }
}

/// Rounds `address` down to its page.
#[must_use]
pub const fn page_of(address: Hva) -> Hva {
    Hva(address.0 & !(PAGE_BYTES - 1))
}

const _: () = assert!(to_usize(PAGE_BYTES) == 4096);

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mapping::SharedMapping;
    use crate::memory_file::GuestFile;
    use rustix::event::{PollFd, PollFlags};

    const PAGES: u64 = 16;

    struct Watched {
        uffd: Userfaultfd,
        file: GuestFile,
        mapping: SharedMapping,
    }

    impl Watched {
        /// Memory of our own under a userfaultfd; `None` where we may not create one.
        fn new() -> Option<Self> {
            Self::with(Features::WANTED)
        }

        fn with(features: Features) -> Option<Self> {
            let uffd = match Userfaultfd::create_here() {
                Ok(uffd) => uffd,
                Err(e) => {
                    eprintln!("SKIPPED: {e}");
                    return None;
                }
            };
            let features = uffd.api(features).unwrap();
            assert!(features.contains(Features::EVICTION));
            let bytes = PAGES * PAGE_BYTES;
            let file = GuestFile::new_memfd("uffd", bytes).unwrap();
            let mapping = SharedMapping::new(file.as_fd(), bytes).unwrap();
            let watched = Self {
                uffd,
                file,
                mapping,
            };
            watched
                .uffd
                .register(watched.at(0), bytes, Watch::MissingAndWriteProtected)
                .unwrap();
            Some(watched)
        }

        fn at(&self, page: u64) -> Hva {
            Hva(self.mapping.address() as u64 + page * PAGE_BYTES)
        }

        fn next_fault(&self) -> FaultEvent {
            let mut faults = Vec::new();
            while self.uffd.read_faults(&mut faults).unwrap() == 0 {
                rustix::event::poll(&mut [PollFd::new(&self.uffd, PollFlags::IN)], None).unwrap();
            }
            assert_eq!(faults.len(), 1);
            faults[0]
        }
    }

    /// Range of the next event that is no fault, or `None` if there is none within `wait_ms`.
    fn next_removal(w: &Watched, wait_ms: i64) -> Option<Range> {
        const UFFD_EVENT_REMOVE: u8 = 0x15;
        let wait = rustix::time::Timespec {
            tv_sec: wait_ms / 1_000,
            tv_nsec: wait_ms % 1_000 * 1_000_000,
        };
        let mut polled = [PollFd::new(&w.uffd, PollFlags::IN)];
        if rustix::event::poll(&mut polled, Some(&wait)).unwrap() == 0 {
            return None;
        }
        let mut message = [0_u8; 32];
        assert_eq!(rustix::io::read(&w.uffd, &mut message).unwrap(), 32);
        assert_eq!(message[0], UFFD_EVENT_REMOVE);
        let number = |at: usize| u64::from_ne_bytes(message[at..at + 8].try_into().unwrap());
        Some(Range {
            start: number(8),
            len: number(16) - number(8),
        })
    }

    #[test]
    fn a_removal_tells_a_range_and_not_whether_its_content_goes_and_a_punch_tells_nothing() {
        const EVENT_REMOVE: Features = Features(1 << 3);
        const PATIENCE_MS: i64 = 10_000;
        let wanted = Features(EVENT_REMOVE.0 | Features::EVICTION.0);
        let Some(w) = Watched::with(wanted) else {
            return;
        };
        w.file.write_at(0, &[7; 4096]).unwrap();
        let expect_removal = |first: u64, pages: u64| {
            let range = next_removal(&w, PATIENCE_MS).expect("an event");
            let expected = (w.at(first).0, pages * PAGE_BYTES);
            assert_eq!((range.start, range.len), expected);
        };
        std::thread::scope(|scope| {
            // It waits until the event is read.
            let caller = scope.spawn(|| w.mapping.drop_translations(0, 2 * PAGE_BYTES));
            expect_removal(0, 2);
            caller.join().unwrap().unwrap();
        });
        let mut byte = [0];
        w.file.read_at(0, &mut byte).unwrap();
        assert_eq!(byte, [7], "nothing was discarded");
        std::thread::scope(|scope| {
            let caller = scope.spawn(|| {
                let start = w.mapping.address() as *mut std::ffi::c_void;
                let advice = rustix::mm::Advice::LinuxRemove;
                // SAFETY: the range is our own mapping, of which no reference to plain bytes exists.
                unsafe { rustix::mm::madvise(start, to_usize(2 * PAGE_BYTES), advice) }
            });
            expect_removal(0, 2);
            caller.join().unwrap().unwrap();
        });
        assert!(!w.file.is_data(0).unwrap());
        // A punch of what is absent already, or not mapped, leaves no trace.
        w.file.punch(0, 4 * PAGE_BYTES).unwrap();
        assert!(next_removal(&w, 0).is_none());
    }

    #[test]
    fn a_thread_that_reads_an_absent_page_waits_and_gets_the_copied_content() {
        let Some(w) = Watched::new() else { return };
        std::thread::scope(|scope| {
            let reader = scope.spawn(|| {
                let mut byte = [0];
                w.mapping.copy_from(3 * PAGE_BYTES + 5, &mut byte).unwrap();
                byte[0]
            });
            let fault = w.next_fault();
            assert_eq!(fault.kind, FaultKind::Missing);
            assert_eq!(fault.access, Access::Read);
            assert_eq!(page_of(fault.address), w.at(3));
            assert_ne!(fault.thread, 0);
            assert_eq!(
                w.uffd.copy(w.at(3), &[42; 4096]).unwrap(),
                FillOutcome::Filled { bytes: PAGE_BYTES }
            );
            assert_eq!(reader.join().unwrap(), 42);
        });
    }

    #[test]
    fn a_mapping_is_watched_while_it_is_registered_for_both_and_asking_changes_nothing() {
        let Some(w) = Watched::new() else { return };
        let filled = w.uffd.copy(w.at(1), &[5; 4096]).unwrap();
        assert_eq!(filled, FillOutcome::Filled { bytes: PAGE_BYTES });
        let protected = w
            .uffd
            .write_protect(w.at(0), 2 * PAGE_BYTES, WriteProtection::On);
        assert_eq!(protected.unwrap(), ProtectOutcome::Done);
        for page in 0..3 {
            assert!(w.uffd.is_watched(w.at(page)).unwrap(), "{page}");
        }
        assert!(!w.file.is_data(0).unwrap() && !w.file.is_data(2 * PAGE_BYTES).unwrap());
        std::thread::scope(|scope| {
            scope.spawn(|| w.mapping.copy_to(PAGE_BYTES, &[6]).unwrap());
            assert_eq!(w.next_fault().kind, FaultKind::WriteProtected);
            let off = WriteProtection::Off;
            let lifted = w.uffd.write_protect(w.at(1), PAGE_BYTES, off).unwrap();
            assert_eq!(lifted, ProtectOutcome::Done);
        });
        w.uffd.unregister(w.at(2), PAGE_BYTES).unwrap();
        assert!(!w.uffd.is_watched(w.at(2)).unwrap());
        w.uffd
            .register(w.at(2), PAGE_BYTES, Watch::Missing)
            .unwrap();
        assert!(!w.uffd.is_watched(w.at(2)).unwrap());
        assert!(w.uffd.is_watched(w.at(3)).unwrap());
        let again = SharedMapping::new(w.file.as_fd(), PAGE_BYTES).unwrap();
        assert!(!w.uffd.is_watched(Hva(again.address() as u64)).unwrap());
    }

    #[test]
    fn a_copy_over_a_page_that_is_there_stops_before_it_and_changes_nothing() {
        let Some(w) = Watched::new() else { return };
        assert_eq!(
            w.uffd.zeropage(w.at(2), PAGE_BYTES).unwrap(),
            FillOutcome::Filled { bytes: PAGE_BYTES }
        );
        assert_eq!(
            w.uffd.copy(w.at(0), &vec![1; 4 * 4096]).unwrap(),
            FillOutcome::Filled {
                bytes: 2 * PAGE_BYTES
            }
        );
        assert_eq!(
            w.uffd.copy(w.at(2), &[1; 4096]).unwrap(),
            FillOutcome::AlreadyThere
        );
        assert!(!w.file.is_data(3 * PAGE_BYTES).unwrap());
        let mut byte = [9];
        w.file.read_at(2 * PAGE_BYTES, &mut byte).unwrap();
        assert_eq!(byte, [0]);
    }

    #[test]
    fn a_write_to_a_protected_page_waits_until_protection_is_taken_off() {
        let Some(w) = Watched::new() else { return };
        assert_eq!(
            w.uffd.copy(w.at(1), &[5; 4096]).unwrap(),
            FillOutcome::Filled { bytes: PAGE_BYTES }
        );
        assert_eq!(
            w.uffd
                .write_protect(w.at(0), PAGES * PAGE_BYTES, WriteProtection::On)
                .unwrap(),
            ProtectOutcome::Done
        );
        let mut byte = [0];
        w.mapping.copy_from(PAGE_BYTES, &mut byte).unwrap();
        assert_eq!(byte, [5], "reads go through");
        std::thread::scope(|scope| {
            scope.spawn(|| w.mapping.copy_to(PAGE_BYTES, &[6]).unwrap());
            let fault = w.next_fault();
            assert_eq!(fault.kind, FaultKind::WriteProtected);
            w.file.read_at(PAGE_BYTES, &mut byte).unwrap();
            assert_eq!(byte, [5], "not written while protected");
            assert_eq!(
                w.uffd
                    .write_protect(w.at(1), PAGE_BYTES, WriteProtection::Off)
                    .unwrap(),
                ProtectOutcome::Done
            );
        });
        w.file.read_at(PAGE_BYTES, &mut byte).unwrap();
        assert_eq!(byte, [6]);
    }

    #[test]
    fn a_writer_blocked_while_its_page_is_punched_stores_into_the_content_that_comes_back() {
        let Some(w) = Watched::new() else { return };
        assert_eq!(
            w.uffd.copy(w.at(4), &[7; 4096]).unwrap(),
            FillOutcome::Filled { bytes: PAGE_BYTES }
        );
        let on = WriteProtection::On;
        assert_eq!(
            w.uffd.write_protect(w.at(4), PAGE_BYTES, on).unwrap(),
            ProtectOutcome::Done
        );
        std::thread::scope(|scope| {
            scope.spawn(|| w.mapping.copy_to(4 * PAGE_BYTES, &[8]).unwrap());
            assert_eq!(w.next_fault().kind, FaultKind::WriteProtected);
            w.file.punch(4 * PAGE_BYTES, PAGE_BYTES).unwrap();
            w.uffd.wake(w.at(4), PAGE_BYTES).unwrap();
            assert_eq!(w.next_fault().kind, FaultKind::Missing);
            assert_eq!(
                w.uffd.copy(w.at(4), &[7; 4096]).unwrap(),
                FillOutcome::Filled { bytes: PAGE_BYTES }
            );
        });
        let mut bytes = [0; 2];
        w.file.read_at(4 * PAGE_BYTES, &mut bytes).unwrap();
        assert_eq!(bytes, [8, 7]);
    }

    #[test]
    fn a_range_under_one_userfaultfd_is_busy_for_another() {
        let Some(w) = Watched::new() else { return };
        let other = Userfaultfd::create_here().unwrap();
        other.api(Features::WANTED).unwrap();
        assert!(matches!(
            other.register(w.at(0), PAGE_BYTES, Watch::Missing),
            Err(UffdError::Busy { .. })
        ));
        w.uffd.unregister(w.at(0), PAGES * PAGE_BYTES).unwrap();
        other.register(w.at(0), PAGE_BYTES, Watch::Missing).unwrap();
        assert!(is_userfaultfd(other.as_fd()));
        assert!(!is_userfaultfd(w.file.as_fd()));
    }

    #[test]
    fn features_asked_for_twice_are_refused() {
        let Some(w) = Watched::new() else { return };
        assert!(matches!(
            w.uffd.api(Features::WANTED),
            Err(UffdError::Kernel { .. })
        ));
    }

    #[test]
    fn an_evicted_page_cannot_be_poisoned_until_its_protection_is_taken_off() {
        let Some(w) = Watched::new() else { return };
        if !Userfaultfd::supported().unwrap().contains(Features::POISON) {
            eprintln!("SKIPPED: this kernel has no UFFDIO_POISON");
            return;
        }
        let filled = FillOutcome::Filled { bytes: PAGE_BYTES };
        let there = FillOutcome::AlreadyThere;
        assert_eq!(w.uffd.copy(w.at(3), &[1; 4096]).unwrap(), filled);
        let on = WriteProtection::On;
        assert_eq!(
            w.uffd.write_protect(w.at(3), PAGE_BYTES, on).unwrap(),
            ProtectOutcome::Done
        );
        w.file.punch(3 * PAGE_BYTES, PAGE_BYTES).unwrap();
        assert_eq!(w.uffd.poison(w.at(3), PAGE_BYTES).unwrap(), there);
        let quietly = w.uffd.unprotect_quietly(w.at(3), PAGE_BYTES);
        assert_eq!(quietly.unwrap(), ProtectOutcome::Done);
        assert_eq!(w.uffd.poison(w.at(3), PAGE_BYTES).unwrap(), filled);
        assert_eq!(w.uffd.poison(w.at(3), PAGE_BYTES).unwrap(), there);
        // `write` fails when it reads that address, where a plain load would end this process.
        let (into, from) = rustix::pipe::pipe().unwrap();
        let address = w.mapping.ptr_at(3 * PAGE_BYTES, 1).unwrap();
        // SAFETY: one byte of a live mapping is read by the kernel, or not at all.
        let wrote = unsafe { libc::write(from.as_raw_fd(), address.as_ptr().cast(), 1) };
        assert_eq!(
            (wrote, io::Error::last_os_error().raw_os_error()),
            (-1, Some(libc::EFAULT))
        );
        drop(into);
    }

    /// Markers that userfaultfd leaves in page tables are not pages; pages that it fills are.
    #[test]
    fn pages_are_present_as_the_file_has_them_whatever_a_userfaultfd_has_marked() {
        let Some(w) = Watched::new() else { return };
        let filled = FillOutcome::Filled { bytes: PAGE_BYTES };
        assert_eq!(w.uffd.copy(w.at(1), &[1; 4096]).unwrap(), filled);
        assert_eq!(w.uffd.zeropage(w.at(2), PAGE_BYTES).unwrap(), filled);
        let features = Userfaultfd::supported().unwrap();
        if features.contains(Features::POISON) {
            assert_eq!(w.uffd.poison(w.at(5), PAGE_BYTES).unwrap(), filled);
        }
        // Markers on holes 3 and 4, a protection on page 2.
        let protected = w
            .uffd
            .write_protect(w.at(2), 3 * PAGE_BYTES, WriteProtection::On);
        assert_eq!(protected.unwrap(), ProtectOutcome::Done);
        let there = || w.file.present_runs(0, 7 * PAGE_BYTES).unwrap();
        assert_eq!(there(), [(PAGE_BYTES, 2 * PAGE_BYTES)]);
        let runs = w.file.data_runs(0, 7 * PAGE_BYTES).unwrap();
        assert_eq!(runs, there());
        // Out of every page table, but still in the file.
        let own = crate::process::ProcessFd::open(std::process::id()).unwrap();
        own.page_out(&[(w.at(1), 2 * PAGE_BYTES)]).unwrap();
        assert_eq!(there(), [(PAGE_BYTES, 2 * PAGE_BYTES)]);
        w.file.punch(2 * PAGE_BYTES, PAGE_BYTES).unwrap();
        assert_eq!(there(), [(PAGE_BYTES, PAGE_BYTES)]);
    }

    #[test]
    fn a_poisoned_page_stays_a_hole_and_can_be_filled_after_all() {
        let Some(w) = Watched::new() else { return };
        if !Userfaultfd::supported().unwrap().contains(Features::POISON) {
            eprintln!("SKIPPED: this kernel has no UFFDIO_POISON");
            return;
        }
        assert_eq!(
            w.uffd.poison(w.at(6), PAGE_BYTES).unwrap(),
            FillOutcome::Filled { bytes: PAGE_BYTES }
        );
        assert!(!w.file.is_data(6 * PAGE_BYTES).unwrap());
        assert_eq!(
            w.uffd.copy(w.at(6), &[1; 4096]).unwrap(),
            FillOutcome::Filled { bytes: PAGE_BYTES }
        );
        let mut byte = [0];
        w.mapping.copy_from(6 * PAGE_BYTES, &mut byte).unwrap();
        assert_eq!(byte, [1]);
    }
}
