// SPDX-License-Identifier: Apache-2.0
//! Numbers and layouts of `<linux/userfaultfd.h>` that are used here.

pub(super) const UFFD_API: u64 = 0xaa;
pub(super) const IOC_WRITE: u64 = 1;
pub(super) const IOC_READ: u64 = 2;

pub(super) const fn ioctl_number(direction: u64, number: u64, size: usize) -> u64 {
    direction << 30 | (size as u64) << 16 | 0xaa << 8 | number
}

pub(super) const USERFAULTFD_IOC_NEW: u64 = ioctl_number(0, 0, 0);
pub(super) const UFFDIO_API: u64 = ioctl_number(IOC_READ | IOC_WRITE, 0x3f, size_of::<Api>());
pub(super) const UFFDIO_REGISTER: u64 =
    ioctl_number(IOC_READ | IOC_WRITE, 0, size_of::<Register>());
pub(super) const UFFDIO_UNREGISTER: u64 = ioctl_number(IOC_READ, 1, size_of::<Range>());
pub(super) const UFFDIO_WAKE: u64 = ioctl_number(IOC_READ, 2, size_of::<Range>());
pub(super) const UFFDIO_COPY: u64 = ioctl_number(IOC_READ | IOC_WRITE, 3, size_of::<CopyIn>());
pub(super) const UFFDIO_ZEROPAGE: u64 = ioctl_number(IOC_READ | IOC_WRITE, 4, size_of::<Fill>());
pub(super) const UFFDIO_WRITEPROTECT: u64 =
    ioctl_number(IOC_READ | IOC_WRITE, 6, size_of::<Protect>());
pub(super) const UFFDIO_CONTINUE: u64 = ioctl_number(IOC_READ | IOC_WRITE, 7, size_of::<Fill>());
pub(super) const UFFDIO_POISON: u64 = ioctl_number(IOC_READ | IOC_WRITE, 8, size_of::<Fill>());

const _: () = assert!(UFFDIO_API == 0xc018_aa3f && UFFDIO_REGISTER == 0xc020_aa00);
const _: () = assert!(UFFDIO_UNREGISTER == 0x8010_aa01 && UFFDIO_COPY == 0xc028_aa03);
const _: () = assert!(UFFDIO_ZEROPAGE == 0xc020_aa04 && UFFDIO_WRITEPROTECT == 0xc018_aa06);
const _: () = assert!(size_of::<Message>() == 32);

/// Modes of `UFFDIO_COPY`.
pub(super) const COPY_WITHOUT_WAKING: u64 = 1;
pub(super) const COPY_PROTECTED: u64 = 2;

/// Mode of `UFFDIO_CONTINUE`.
pub(super) const CONTINUE_WITHOUT_WAKING: u64 = 1;

/// Modes of `UFFDIO_WRITEPROTECT`; without the first the protection is removed.
pub(super) const PROTECT: u64 = 1;
pub(super) const PROTECT_WITHOUT_WAKING: u64 = 2;

pub(super) const UFFD_EVENT_PAGEFAULT: u8 = 0x12;
pub(super) const FLAG_WRITE: u64 = 1;
pub(super) const FLAG_WP: u64 = 2;
pub(super) const FLAG_MINOR: u64 = 4;

#[repr(C)]
pub(super) struct Api {
    pub(super) api: u64,
    pub(super) features: u64,
    pub(super) ioctls: u64,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) len: u64,
}

#[repr(C)]
pub(super) struct Register {
    pub(super) range: Range,
    pub(super) mode: u64,
    pub(super) ioctls: u64,
}

#[repr(C)]
pub(super) struct CopyIn {
    pub(super) dst: u64,
    pub(super) src: u64,
    pub(super) len: u64,
    pub(super) mode: u64,
    pub(super) done: i64,
}

/// Layout of `uffdio_zeropage`, of `uffdio_continue` and of `uffdio_poison`.
#[repr(C)]
pub(super) struct Fill {
    pub(super) range: Range,
    pub(super) mode: u64,
    pub(super) done: i64,
}

#[repr(C)]
pub(super) struct Protect {
    pub(super) range: Range,
    pub(super) mode: u64,
}

/// `uffd_msg` of a page fault.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct Message {
    pub(super) event: u8,
    pub(super) reserved: [u8; 7],
    pub(super) flags: u64,
    pub(super) address: u64,
    pub(super) thread: u32,
    pub(super) padding: u32,
}
