// SPDX-License-Identifier: Apache-2.0
//! Messages of the event queue, from the driver to the device.

use super::{
    Answer, MASK_BYTES, Opcode, STATUS_BYTES, WireError,
    header::{Header, flag},
    put_range,
};
use pagetide_addr::{Access, DomainId, FileKey, FilePage, FileRange, Marks};
use std::borrow::Cow;

/// What happens to a space that the driver gives back.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Farewell {
    /// Memory without paging from now on: every page becomes read-write.
    Release,
    /// Memory that no longer exists: every page is unmapped for good.
    Retire,
}

/// A message from the driver to the device. Handled strictly in the order of the queue.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Event<'a> {
    /// Creates an I/O address space for the memory `name` of `page_count` pages. Every page of it
    /// but the standing ones is unmapped at once. [`Status::value`](super::Status::value) is the number of the space,
    /// chosen by the device: all other events, and page requests, name the space by it.
    Create {
        /// The memory: `st_dev` and `st_ino` of a RAM file.
        name: FileKey,
        /// Its length, in pages; not 0.
        page_count: u64,
    },
    /// The driver gives a space back. Its number is no longer valid.
    Destroy {
        /// The space.
        space: DomainId,
        /// What happens to the memory.
        farewell: Farewell,
    },
    /// Devices may do `access` to the pages: they are present. Posted: the driver does not wait for
    /// the status.
    Map {
        /// The space.
        space: DomainId,
        /// What is allowed.
        access: Access,
        /// The pages.
        ranges: Cow<'a, [FileRange]>,
    },
    /// No new DMA to the pages begins, and none that began before is under way.
    Unmap {
        /// The space.
        space: DomainId,
        /// The pages.
        ranges: Cow<'a, [FileRange]>,
    },
    /// Like [`Self::Unmap`], but reads stay allowed.
    Protect {
        /// The space.
        space: DomainId,
        /// The pages.
        ranges: Cow<'a, [FileRange]>,
    },
    /// Waits, within the bound, until no DMA that began before touches the pages. No bit changes.
    Invalidate {
        /// The space.
        space: DomainId,
        /// The pages; none means the whole space.
        ranges: Cow<'a, [FileRange]>,
    },
    /// Every page but the standing ones is unmapped; DMA that began before may go on.
    UnmapAll {
        /// The space.
        space: DomainId,
    },
    /// Queries which pages the device keeps for long.
    Standing {
        /// The space.
        space: DomainId,
        /// Pages of one section, reported in the mask of the reply; `None`: the number of such
        /// pages in the space, reported in its value.
        pages: Option<FileRange>,
    },
    /// Queries which pages DMA has touched since the marks were cleared, reported in the mask of
    /// the reply.
    Touched {
        /// The space.
        space: DomainId,
        /// Pages of one section.
        pages: FileRange,
        /// What happens to the marks.
        marks: Marks,
    },
    /// Answers to page requests. Posted: the driver does not wait for the status.
    Respond {
        /// The answers.
        answers: Cow<'a, [Answer]>,
    },
    /// A driver's session begins.
    Begin,
    /// All memory that has pages elsewhere now has a space, or is barred.
    Ready,
    /// From now on, no device may touch this memory.
    Bar {
        /// The memory.
        name: FileKey,
    },
    /// Where the device puts the content of pages that it has written whole.
    Bounce {
        /// Address of the bounce area, in the function's own memory.
        address: u64,
        /// Its length, in slots of [`SLOT_BYTES`](super::SLOT_BYTES).
        slots: u64,
    },
}

impl Event<'_> {
    /// Its operation.
    #[must_use]
    pub fn opcode(&self) -> Opcode {
        match self {
            Self::Create { .. } => Opcode::Create,
            Self::Destroy { .. } => Opcode::Destroy,
            Self::Map { .. } => Opcode::Map,
            Self::Unmap { .. } => Opcode::Unmap,
            Self::Protect { .. } => Opcode::Protect,
            Self::Invalidate { .. } => Opcode::Invalidate,
            Self::UnmapAll { .. } => Opcode::UnmapAll,
            Self::Standing { .. } => Opcode::Standing,
            Self::Touched { .. } => Opcode::Touched,
            Self::Respond { .. } => Opcode::Respond,
            Self::Begin => Opcode::Begin,
            Self::Ready => Opcode::Ready,
            Self::Bar { .. } => Opcode::Bar,
            Self::Bounce { .. } => Opcode::Bounce,
        }
    }

    /// Number of elements in its body.
    #[must_use]
    pub fn count(&self) -> usize {
        match self {
            Self::Map { ranges, .. }
            | Self::Unmap { ranges, .. }
            | Self::Protect { ranges, .. }
            | Self::Invalidate { ranges, .. } => ranges.len(),
            Self::Respond { answers } => answers.len(),
            Self::Create { .. } | Self::Touched { .. } => 1,
            Self::Standing { pages, .. } => usize::from(pages.is_some()),
            _ => 0,
        }
    }

    /// Bytes of the device's reply: the status, and the mask where there is one.
    #[must_use]
    pub fn reply_bytes(&self) -> usize {
        match self {
            Self::Standing { pages: Some(_), .. } | Self::Touched { .. } => {
                STATUS_BYTES + MASK_BYTES
            }
            _ => STATUS_BYTES,
        }
    }

    /// Appends the message.
    pub fn encode(&self, into: &mut Vec<u8>) {
        let (space, flags, [arg0, arg1]) = self.header_fields();
        let count = u32::try_from(self.count()).unwrap_or(u32::MAX);
        into.extend((self.opcode() as u16).to_le_bytes());
        into.extend(flags.to_le_bytes());
        into.extend(space.0.to_le_bytes());
        into.extend(count.to_le_bytes());
        into.extend([0; 4]);
        into.extend(arg0.to_le_bytes());
        into.extend(arg1.to_le_bytes());
        match self {
            Self::Create { page_count, .. } => {
                put_range(into, FileRange::new(FilePage(0), FilePage(*page_count)));
            }
            Self::Map { ranges, .. }
            | Self::Unmap { ranges, .. }
            | Self::Protect { ranges, .. }
            | Self::Invalidate { ranges, .. } => {
                for range in ranges.iter() {
                    put_range(into, *range);
                }
            }
            Self::Standing {
                pages: Some(pages), ..
            }
            | Self::Touched { pages, .. } => put_range(into, *pages),
            Self::Respond { answers } => {
                for answer in answers.iter() {
                    answer.encode(into);
                }
            }
            _ => {}
        }
    }

    /// Space, flags and both arguments.
    fn header_fields(&self) -> (DomainId, u16, [u64; 2]) {
        const NONE: DomainId = DomainId(0);
        match *self {
            Self::Create { name, .. } | Self::Bar { name } => (NONE, 0, [name.dev, name.ino]),
            Self::Destroy { space, farewell } => {
                let flags = match farewell {
                    Farewell::Release => flag::DESTROY_RELEASE,
                    Farewell::Retire => flag::DESTROY_RETIRE,
                };
                (space, flags, [0; 2])
            }
            Self::Map { space, access, .. } => {
                let flags = match access {
                    Access::Read => 0,
                    Access::Write => flag::MAP_WRITE,
                };
                (space, flags, [0; 2])
            }
            Self::Touched { space, marks, .. } => {
                let flags = match marks {
                    Marks::Keep => 0,
                    Marks::Forget => flag::TOUCHED_FORGET,
                };
                (space, flags, [0; 2])
            }
            Self::Unmap { space, .. }
            | Self::Protect { space, .. }
            | Self::Invalidate { space, .. }
            | Self::UnmapAll { space }
            | Self::Standing { space, .. } => (space, 0, [0; 2]),
            Self::Bounce { address, slots } => (NONE, 0, [address, slots]),
            Self::Respond { .. } | Self::Begin | Self::Ready => (NONE, 0, [0; 2]),
        }
    }
}

impl Event<'static> {
    /// Decodes the event from `bytes`, which must hold nothing else.
    ///
    /// # Errors
    /// [`WireError`]: the device refuses the event with [`WireError::status`].
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let header = Header::decode(bytes)?;
        let space = header.space;
        let [arg0, arg1] = header.args;
        let name = FileKey {
            dev: arg0,
            ino: arg1,
        };
        Ok(match header.opcode {
            Opcode::Create => {
                let page_count = header.whole_space(bytes)?;
                Self::Create { name, page_count }
            }
            Opcode::Destroy => {
                let farewell = header.farewell()?;
                Self::Destroy { space, farewell }
            }
            Opcode::Map => {
                let access = match header.flags {
                    flag::MAP_WRITE => Access::Write,
                    _ => Access::Read,
                };
                let ranges = header.ranges(bytes)?.into();
                Self::Map {
                    space,
                    access,
                    ranges,
                }
            }
            Opcode::Unmap => {
                let ranges = header.ranges(bytes)?.into();
                Self::Unmap { space, ranges }
            }
            Opcode::Protect => {
                let ranges = header.ranges(bytes)?.into();
                Self::Protect { space, ranges }
            }
            Opcode::Invalidate => {
                let ranges = header.ranges(bytes)?.into();
                Self::Invalidate { space, ranges }
            }
            Opcode::UnmapAll => Self::UnmapAll { space },
            Opcode::Standing => {
                let pages = header.range_in_section(bytes)?;
                Self::Standing { space, pages }
            }
            Opcode::Touched => {
                let marks = match header.flags {
                    flag::TOUCHED_FORGET => Marks::Forget,
                    _ => Marks::Keep,
                };
                // One element: the header was checked.
                let pages = header.range_in_section(bytes)?.unwrap_or_default();
                Self::Touched {
                    space,
                    pages,
                    marks,
                }
            }
            Opcode::Respond => Self::Respond {
                answers: header.answers(bytes)?.into(),
            },
            Opcode::Begin => Self::Begin,
            Opcode::Ready => Self::Ready,
            Opcode::Bar => Self::Bar { name },
            Opcode::Bounce => Self::Bounce {
                address: arg0,
                slots: arg1,
            },
        })
    }
}
