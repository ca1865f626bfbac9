// SPDX-License-Identifier: Apache-2.0
//! What is around the data of a chain: a header that the device reads, and a place for its answer.
//!
//! Every kind of device states its [`Layout`]. A block request has a header of 16 bytes and a status
//! byte; a packet to be sent has a header and no answer. Where the driver cuts a chain into
//! descriptors means nothing (virtio 1.2, 2.7.4), so parts are found by their length alone.

use crate::{
    chain::{AnswerPlace, Buffers, Layout, split_front, split_last_byte},
    memory::{DeviceMemory, OutsideMemory, Span},
};

/// A chain that cannot be answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    /// Not enough readable bytes for a header.
    #[error("a request has a header of less than {bytes} readable bytes")]
    NoHeader {
        /// Bytes of a header.
        bytes: u32,
    },
    /// No room for the answer.
    #[error("a request has no writable byte for its status")]
    NoAnswer,
}

/// A chain without its data. Its parts are only located, not read.
#[derive(Debug)]
pub(crate) struct Frame {
    pub header: Span,
    /// The header's bytes if they are not contiguous.
    pub header_rest: Vec<Span>,
    /// Where the answer is written, if anywhere.
    pub answer: Option<Span>,
}

/// Takes the place of the answer off `buffers`: to answer, nothing else is needed.
#[inline]
pub(crate) fn answer_of(layout: Layout, buffers: &mut Buffers) -> Result<Option<Span>, FrameError> {
    match layout.answer {
        AnswerPlace::LastByte => match split_last_byte(&mut buffers.writable) {
            Some(byte) => Ok(Some(byte)),
            None => Err(FrameError::NoAnswer),
        },
        AnswerPlace::Nowhere => Ok(None),
    }
}

/// Takes header and answer off `buffers`, which keep the data.
#[inline]
pub(crate) fn frame(layout: Layout, buffers: &mut Buffers) -> Result<Frame, FrameError> {
    let answer = answer_of(layout, buffers)?;
    let bytes = layout.header_bytes;
    // The usual case first: a descriptor that contains the header and nothing else.
    if buffers.readable.first().is_some_and(|s| s.len == bytes) {
        return Ok(Frame {
            header: buffers.readable.remove(0),
            header_rest: Vec::new(),
            answer,
        });
    }
    // Then one with header and data.
    if let Some(first) = buffers.readable.first_mut()
        && first.len > bytes
    {
        let header = Span {
            len: bytes,
            ..*first
        };
        first.offset += u64::from(bytes);
        first.len -= bytes;
        return Ok(Frame {
            header,
            header_rest: Vec::new(),
            answer,
        });
    }
    let mut header = split_front(&mut buffers.readable, bytes)
        .filter(|header| !header.is_empty())
        .ok_or(FrameError::NoHeader { bytes })?;
    let rest = header.split_off(1);
    Ok(Frame {
        header: header[0],
        header_rest: rest,
        answer,
    })
}

impl Frame {
    /// Bytes of its header.
    pub fn header_bytes(&self) -> usize {
        let rest = self.header_rest.iter().map(|span| span.len as usize);
        self.header.len as usize + rest.sum::<usize>()
    }

    /// Reads the header once, so that later changes by the guest have no effect. It must be leased.
    pub fn read_header(&self, memory: &DeviceMemory, into: &mut [u8]) -> Result<(), OutsideMemory> {
        let mut done = copy(memory, self.header, into)?;
        for span in &self.header_rest {
            done += copy(memory, *span, &mut into[done..])?;
        }
        Ok(())
    }
}

/// Copies the bytes of a span, as far as `into` has room; returns how many. They must be leased.
pub(crate) fn copy(
    memory: &DeviceMemory,
    span: Span,
    into: &mut [u8],
) -> Result<usize, OutsideMemory> {
    let slice = memory.slice(span)?;
    Ok(slice.copy_to(into))
}

#[cfg(test)]
mod tests {
    use super::*;

    const LAYOUT: Layout = Layout {
        header_bytes: 16,
        answer: AnswerPlace::LastByte,
        data_bytes_max: 64 << 20,
    };

    fn span(offset: u64, len: u32) -> Span {
        Span {
            port: 0,
            offset,
            len,
        }
    }

    #[test]
    fn header_and_answer_are_found_however_the_chain_is_cut() {
        let mut one = Buffers {
            readable: vec![span(0, 16 + 512)],
            writable: vec![span(600, 1)],
            ..Buffers::default()
        };
        let parts = frame(LAYOUT, &mut one).unwrap();
        assert_eq!(parts.header, span(0, 16));
        assert_eq!(parts.answer, Some(span(600, 1)));
        assert_eq!(one.readable, [span(16, 512)]);
        assert!(one.writable.is_empty());
        let mut many = Buffers {
            readable: vec![span(0, 4), span(100, 20)],
            writable: vec![span(200, 8), span(300, 9)],
            ..Buffers::default()
        };
        let parts = frame(LAYOUT, &mut many).unwrap();
        assert_eq!(parts.header, span(0, 4));
        assert_eq!(parts.header_rest, [span(100, 12)]);
        assert_eq!(parts.answer, Some(span(308, 1)));
        assert_eq!(many.writable, [span(200, 8), span(300, 8)]);
        let mut short = Buffers {
            readable: vec![span(0, 15)],
            writable: vec![span(200, 1)],
            ..Buffers::default()
        };
        assert_eq!(
            frame(LAYOUT, &mut short).unwrap_err(),
            FrameError::NoHeader { bytes: 16 }
        );
        let mut mute = Buffers {
            readable: vec![span(0, 16)],
            writable: Vec::new(),
            ..Buffers::default()
        };
        assert_eq!(frame(LAYOUT, &mut mute).unwrap_err(), FrameError::NoAnswer);
    }

    #[test]
    fn chain_without_an_answer_keeps_all_its_writable_bytes() {
        let layout = Layout {
            header_bytes: 12,
            answer: AnswerPlace::Nowhere,
            data_bytes_max: 64 << 20,
        };
        let mut packet = Buffers {
            readable: vec![span(0, 12), span(100, 60)],
            writable: vec![span(200, 8)],
            ..Buffers::default()
        };
        let parts = frame(layout, &mut packet).unwrap();
        assert_eq!((parts.header, parts.answer), (span(0, 12), None));
        assert_eq!(packet.readable, [span(100, 60)]);
        assert_eq!(packet.writable, [span(200, 8)]);
        assert_eq!(answer_of(layout, &mut packet), Ok(None));
    }
}
