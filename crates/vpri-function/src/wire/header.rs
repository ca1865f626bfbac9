// SPDX-License-Identifier: Apache-2.0
//! The header of an event, and which fields each operation uses.

use super::{
    ANSWER_BYTES, Answer, Farewell, HEADER_BYTES, RANGE_BYTES, WireError, check, range_at, u16_at,
    u32_at, u64_at,
};
use pagetide_addr::{DomainId, FileRange};

/// Bits of an event's `flags`.
pub(super) mod flag {
    pub const MAP_WRITE: u16 = 1;
    pub const DESTROY_RELEASE: u16 = 1;
    pub const DESTROY_RETIRE: u16 = 2;
    pub const TOUCHED_FORGET: u16 = 1;
}

/// The operation of an event, as its number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
#[repr(u16)]
pub enum Opcode {
    /// [`Event::Create`](super::Event::Create).
    Create = 1,
    /// [`Event::Destroy`](super::Event::Destroy).
    Destroy = 2,
    /// [`Event::Map`](super::Event::Map).
    Map = 3,
    /// [`Event::Unmap`](super::Event::Unmap).
    Unmap = 4,
    /// [`Event::Protect`](super::Event::Protect).
    Protect = 5,
    /// [`Event::Invalidate`](super::Event::Invalidate).
    Invalidate = 6,
    /// [`Event::UnmapAll`](super::Event::UnmapAll).
    UnmapAll = 7,
    /// [`Event::Standing`](super::Event::Standing).
    Standing = 8,
    /// [`Event::Touched`](super::Event::Touched).
    Touched = 9,
    /// [`Event::Respond`](super::Event::Respond).
    Respond = 10,
    /// [`Event::Begin`](super::Event::Begin).
    Begin = 11,
    /// [`Event::Ready`](super::Event::Ready).
    Ready = 12,
    /// [`Event::Bar`](super::Event::Bar).
    Bar = 13,
    /// [`Event::Bounce`](super::Event::Bounce).
    Bounce = 14,
}

impl Opcode {
    /// Every operation, in the order of the numbers.
    pub const ALL: [Self; 14] = [
        Self::Create,
        Self::Destroy,
        Self::Map,
        Self::Unmap,
        Self::Protect,
        Self::Invalidate,
        Self::UnmapAll,
        Self::Standing,
        Self::Touched,
        Self::Respond,
        Self::Begin,
        Self::Ready,
        Self::Bar,
        Self::Bounce,
    ];

    /// The operation with this number.
    #[must_use]
    pub fn from_number(number: u16) -> Option<Self> {
        Self::ALL.into_iter().find(|known| *known as u16 == number)
    }

    /// Which fields its header uses.
    const fn shape(self) -> Shape {
        use Count::{AtLeast, AtMostOne, Exactly};
        const BARE: Shape = Shape {
            uses_space: false,
            uses_args: false,
            flags: 0,
            count: Exactly(0),
        };
        const SPACE: Shape = Shape {
            uses_space: true,
            ..BARE
        };
        const ARGS: Shape = Shape {
            uses_args: true,
            ..BARE
        };
        match self {
            Self::Create => ARGS.count(Exactly(1)),
            Self::Destroy => SPACE.flags(flag::DESTROY_RELEASE | flag::DESTROY_RETIRE),
            Self::Map => SPACE.flags(flag::MAP_WRITE).count(AtLeast(1)),
            Self::Unmap | Self::Protect => SPACE.count(AtLeast(1)),
            Self::Invalidate => SPACE.count(AtLeast(0)),
            Self::UnmapAll => SPACE,
            Self::Standing => SPACE.count(AtMostOne),
            Self::Touched => SPACE.flags(flag::TOUCHED_FORGET).count(Exactly(1)),
            Self::Respond => BARE.count(AtLeast(1)),
            Self::Begin | Self::Ready => BARE,
            Self::Bar | Self::Bounce => ARGS,
        }
    }

    /// Bytes of one element of its body.
    const fn element_bytes(self) -> usize {
        match self {
            Self::Respond => ANSWER_BYTES,
            _ => RANGE_BYTES,
        }
    }
}

/// How many elements a body has.
#[derive(Clone, Copy)]
enum Count {
    Exactly(u32),
    AtLeast(u32),
    AtMostOne,
}

/// Which fields of the header an operation uses. All others are zero.
#[derive(Clone, Copy)]
struct Shape {
    uses_space: bool,
    uses_args: bool,
    flags: u16,
    count: Count,
}

impl Shape {
    const fn flags(self, flags: u16) -> Self {
        Self { flags, ..self }
    }

    const fn count(self, count: Count) -> Self {
        Self { count, ..self }
    }
}

/// A header whose fields are valid for its operation.
pub(super) struct Header {
    pub opcode: Opcode,
    pub flags: u16,
    pub space: DomainId,
    pub args: [u64; 2],
    count: usize,
}

impl Header {
    const FLAGS_AT: usize = 2;
    const SPACE_AT: usize = 4;
    const COUNT_AT: usize = 8;
    const RESERVED_AT: usize = 12;
    const ARGS_AT: usize = 16;

    /// The header of the message `bytes`, whose length it checks.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let len = bytes.len();
        if len < HEADER_BYTES {
            let expected = HEADER_BYTES;
            return Err(WireError::Length { len, expected });
        }
        let number = u16_at(bytes, 0);
        let opcode = Opcode::from_number(number).ok_or(WireError::Opcode(number))?;
        let shape = opcode.shape();
        let flags = u16_at(bytes, Self::FLAGS_AT);
        check(|| flags & !shape.flags == 0, Self::FLAGS_AT, flags)?;
        let space = u32_at(bytes, Self::SPACE_AT);
        check(|| shape.uses_space || space == 0, Self::SPACE_AT, space)?;
        let count = u32_at(bytes, Self::COUNT_AT);
        let is_count = || match shape.count {
            Count::Exactly(number) => count == number,
            Count::AtLeast(least) => count >= least,
            Count::AtMostOne => count <= 1,
        };
        check(is_count, Self::COUNT_AT, count)?;
        let reserved = u32_at(bytes, Self::RESERVED_AT);
        check(|| reserved == 0, Self::RESERVED_AT, reserved)?;
        let args = [Self::ARGS_AT, Self::ARGS_AT + 8].map(|at| (at, u64_at(bytes, at)));
        for (at, value) in args {
            check(|| shape.uses_args || value == 0, at, value)?;
        }
        // At most 2^32 elements of 40 bytes: no overflow in 64 bits.
        let count = count as usize;
        let expected = HEADER_BYTES + count * opcode.element_bytes();
        if len != expected {
            return Err(WireError::Length { len, expected });
        }
        Ok(Self {
            opcode,
            flags,
            space: DomainId(space),
            args: args.map(|(_, value)| value),
            count,
        })
    }

    /// The flags of DESTROY: exactly one of the two.
    pub fn farewell(&self) -> Result<Farewell, WireError> {
        match self.flags {
            flag::DESTROY_RELEASE => Ok(Farewell::Release),
            flag::DESTROY_RETIRE => Ok(Farewell::Retire),
            flags => Err(WireError::Field {
                at: Self::FLAGS_AT,
                value: flags.into(),
            }),
        }
    }

    /// The body as one range that covers all pages of a space; returns their number.
    pub fn whole_space(&self, bytes: &[u8]) -> Result<u64, WireError> {
        let pages = range_at(bytes, HEADER_BYTES)?;
        check(|| pages.start.0 == 0, HEADER_BYTES, pages.start.0)?;
        Ok(pages.end.0)
    }

    /// The body as ranges.
    pub fn ranges(&self, bytes: &[u8]) -> Result<Vec<FileRange>, WireError> {
        let at = |index| HEADER_BYTES + index * RANGE_BYTES;
        let ranges = (0..self.count).map(|index| range_at(bytes, at(index)));
        ranges.collect()
    }

    /// The body as one range that lies in one section, if there is one.
    pub fn range_in_section(&self, bytes: &[u8]) -> Result<Option<FileRange>, WireError> {
        let Some(pages) = self.ranges(bytes)?.first().copied() else {
            return Ok(None);
        };
        let last_section = (pages.end.0 - 1) / pagetide_addr::SECTION_PAGES;
        let is_one = || last_section == pages.start.section().0;
        check(is_one, HEADER_BYTES + 8, pages.len())?;
        Ok(Some(pages))
    }

    /// The body as answers to page requests.
    pub fn answers(&self, bytes: &[u8]) -> Result<Vec<Answer>, WireError> {
        let at = |index| HEADER_BYTES + index * ANSWER_BYTES;
        let answers = (0..self.count).map(|index| Answer::decode(bytes, at(index)));
        answers.collect()
    }
}
