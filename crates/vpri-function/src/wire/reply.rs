// SPDX-License-Identifier: Apache-2.0
//! The device's reply to an event.

use super::{MASK_BYTES, STATUS_BYTES, WireError, put, u16_at, u32_at, u64_at};
use pagetide_addr::{FilePage, FilePageSet, FileSection};

/// How an event ended.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum Code {
    /// It is done.
    Ok = 0,
    /// The bits are cleared, but DMA that began before is under way: ask again, or send INVALIDATE.
    Busy = 1,
    /// A page is standing: nothing was done to the sections of such pages.
    Standing = 2,
    /// The message is malformed, or has impossible values.
    Invalid = 3,
    /// There is no such space.
    NoSpace = 4,
    /// There is already a space of that name, created in this session, or it is barred.
    Exists = 5,
    /// The device does not support that.
    Unsupported = 6,
    /// The device has no room for it.
    Full = 7,
}

impl Code {
    /// Every code, in the order of the numbers.
    pub const ALL: [Self; 8] = [
        Self::Ok,
        Self::Busy,
        Self::Standing,
        Self::Invalid,
        Self::NoSpace,
        Self::Exists,
        Self::Unsupported,
        Self::Full,
    ];
}

/// The status of an event.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Status {
    /// How it ended.
    pub code: Code,
    /// Details: for [`Code::Invalid`] and [`Code::Unsupported`] the offset of the field that is
    /// wrong, for [`Code::Busy`] and [`Code::Standing`] the number of such sections.
    pub detail: u32,
    /// The result: the number of the created space, or the number of standing pages. For
    /// [`Code::Busy`] and [`Code::Standing`] the first such section.
    pub value: u64,
}

impl Status {
    /// Success.
    pub const OK: Self = Self::of(Code::Ok);

    /// `code` without details.
    #[must_use]
    pub const fn of(code: Code) -> Self {
        Self {
            code,
            detail: 0,
            value: 0,
        }
    }

    /// Success, with a result.
    #[must_use]
    pub const fn with_value(value: u64) -> Self {
        Self {
            value,
            ..Self::of(Code::Ok)
        }
    }
}

/// The reply that the device writes into the writable part of an event's chain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Reply {
    /// How the event ended.
    pub status: Status,
    /// Pages of a section, if the event requests them and has succeeded.
    pub mask: Option<FilePageSet>,
}

impl From<Status> for Reply {
    fn from(status: Status) -> Self {
        Self { status, mask: None }
    }
}

impl Reply {
    /// The reply as written: the mask follows the status, if there is one.
    #[must_use]
    pub fn encode(&self) -> Vec<u8> {
        let mut bytes = vec![0; STATUS_BYTES];
        put(&mut bytes, 0, (self.status.code as u16).to_le_bytes());
        put(&mut bytes, 4, self.status.detail.to_le_bytes());
        put(&mut bytes, 8, self.status.value.to_le_bytes());
        if let Some(mask) = &self.mask {
            let mut words = [0_u8; MASK_BYTES];
            for page in mask.pages(FileSection(0)) {
                if let Some(byte) = words.get_mut(page.index() / 8) {
                    *byte |= 1 << (page.index() % 8);
                }
            }
            bytes.extend(words);
        }
        bytes
    }

    /// Decodes a reply from `bytes`: a status alone, or with a mask.
    ///
    /// # Errors
    /// [`WireError`].
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let len = bytes.len();
        let mask = match len {
            STATUS_BYTES => None,
            WITH_MASK => Some(mask_of(super::take(bytes, STATUS_BYTES))),
            _ => {
                let expected = STATUS_BYTES;
                return Err(WireError::Length { len, expected });
            }
        };
        let number = u16_at(bytes, 0);
        let known = Code::ALL.into_iter().find(|code| *code as u16 == number);
        let code = known.ok_or(WireError::Field {
            at: 0,
            value: number.into(),
        })?;
        let status = Status {
            code,
            detail: u32_at(bytes, 4),
            value: u64_at(bytes, 8),
        };
        Ok(Self { status, mask })
    }
}

const WITH_MASK: usize = STATUS_BYTES + MASK_BYTES;

/// The pages whose bits are set: bit `k % 8` of byte `k / 8` is page `k` of the section.
fn mask_of(bytes: [u8; MASK_BYTES]) -> FilePageSet {
    let mut set = FilePageSet::EMPTY;
    for (position, byte) in (0_u64..).zip(bytes) {
        for bit in (0..8).filter(|bit| byte & (1 << bit) != 0) {
            set.insert(FilePage(position * 8 + bit));
        }
    }
    set
}

impl WireError {
    /// Offset of the field that is wrong, in bytes.
    #[must_use]
    pub fn at(&self) -> usize {
        match self {
            Self::Length { len, expected } => *len.min(expected),
            Self::Opcode(_) => 0,
            Self::Field { at, .. } | Self::Range { at, .. } => *at,
        }
    }

    /// The status with which a device refuses the event.
    #[must_use]
    pub fn status(&self) -> Status {
        let code = match self {
            Self::Opcode(_) => Code::Unsupported,
            _ => Code::Invalid,
        };
        Status {
            code,
            detail: u32::try_from(self.at()).unwrap_or(u32::MAX),
            value: 0,
        }
    }
}
