// SPDX-License-Identifier: Apache-2.0
//! Chunks: the unit that the caches take from the segments, one segment for up to 64 pieces of one
//! size (vmem's quantum caches import slabs in the same way).
//!
//! With a segment for each small piece there would be as many segments as allocations. With a
//! million of them every access to a segment misses the CPU's caches and its TLB, for large
//! allocations too. So small pieces are cut from chunks, which are powers of two in size and
//! aligned to it: a piece and its size determine its chunk. A bit for each piece tells whether it
//! is idle, that is, neither with a caller nor in a magazine.
//!
//! Chunks must not hide free space. Before an allocation would fail, and at `reap`, each chunk is
//! *dissolved*: idle pieces become free segments, the others segments of their own, which are freed
//! one by one. If no chunk certainly fits, single pieces are taken to begin with.

use std::collections::{BTreeMap, BTreeSet};

use super::ArenaError;
use super::request::Request;
use super::segments::{Owner, SEGMENTS_MAX, Seg, Segments};

/// Pieces of a chunk: the bits of a word.
const PIECES_MAX: u64 = 64;

/// Largest chunk in quanta.
const CHUNK_QUANTA_MAX: u64 = 1024;

/// Fewest pieces for which a chunk pays. Larger pieces are taken one by one: they are rarely many,
/// and much space would be left at the end of a chunk.
const PIECES_MIN: u64 = 8;

/// One chunk.
#[derive(Debug)]
struct Chunk {
    seg: Seg,
    class: usize,
    /// Bit `i`: piece `i` is idle.
    idle: u64,
}

/// The chunks of an arena.
#[derive(Default)]
pub(super) struct Chunks {
    /// By their first integer.
    chunks: BTreeMap<u64, Chunk>,
    /// For each class, the chunks with idle pieces; lower ones are used first, so that higher ones
    /// empty.
    partial: BTreeMap<usize, BTreeSet<u64>>,
    /// Bytes of chunks that are in no piece in use.
    pub idle_bytes: u128,
}

/// Geometry of the chunks of one class.
#[derive(Clone, Copy)]
struct Shape {
    class: usize,
    piece_bytes: u64,
    chunk_bytes: u64,
}

impl Shape {
    fn new(class: usize, quantum: u64) -> Self {
        let quanta = class as u64 + 1;
        let most = (quanta * PIECES_MAX).min(CHUNK_QUANTA_MAX);
        Self {
            class,
            piece_bytes: quanta * quantum,
            chunk_bytes: quantum << most.ilog2(),
        }
    }

    /// 0 if a piece is larger than the largest chunk.
    fn pieces(&self) -> u64 {
        self.chunk_bytes / self.piece_bytes
    }

    /// Bits of all pieces.
    fn all(&self) -> u64 {
        u64::MAX >> (PIECES_MAX - self.pieces())
    }

    fn base(&self, start: u64) -> u64 {
        start & !(self.chunk_bytes - 1)
    }
}

impl Chunk {
    /// The bit of the piece that begins at `start`, if one does; `start` is within the chunk.
    fn bit(&self, base: u64, start: u64, shape: &Shape) -> Option<u64> {
        let offset = start - base;
        let bit = 1_u64 << (offset / shape.piece_bytes);
        offset
            .is_multiple_of(shape.piece_bytes)
            .then_some(bit & shape.all())
            .filter(|&bit| bit != 0)
    }
}

impl Segments {
    /// Up to `count` pieces for the caches.
    pub(super) fn take_pieces(&mut self, class: usize, count: usize, pieces: &mut Vec<u64>) {
        let shape = Shape::new(class, self.quantum);
        let wanted = pieces.len() + count;
        while pieces.len() < wanted {
            let partial = self.chunks.partial.get(&class);
            let Some(&base) = partial.and_then(BTreeSet::first) else {
                if shape.pieces() >= PIECES_MIN && self.open_chunk(&shape) {
                    continue;
                }
                let request = Request::plain(shape.piece_bytes - 1, self.quantum);
                match self.alloc(&request, Owner::Caches) {
                    Ok(start) => pieces.push(start),
                    Err(_) => return, // the caller sees that there are fewer
                }
                continue;
            };
            self.take_from(base, &shape, wanted, pieces);
        }
    }

    /// Takes back a piece from the caches.
    pub(super) fn give_back_piece(&mut self, class: usize, start: u64) -> Result<(), ArenaError> {
        let shape = Shape::new(class, self.quantum);
        let base = shape.base(start);
        let chunk = self.chunks.chunks.get_mut(&base);
        // A chunk of another class that begins there may be smaller and end before this piece.
        let Some(chunk) = chunk.filter(|chunk| chunk.class == class) else {
            return self.free(start, shape.piece_bytes - 1, Owner::Caches);
        };
        let bit = chunk.bit(base, start, &shape);
        let bit = bit.filter(|bit| chunk.idle & bit == 0);
        chunk.idle |= bit.ok_or(ArenaError::NotAllocated { start })?;
        self.chunks.idle_bytes += u128::from(shape.piece_bytes);
        let (seg, idle) = (chunk.seg, chunk.idle);
        let partial = self.chunks.partial.entry(class).or_default();
        if idle == shape.all() {
            partial.remove(&base);
            self.chunks.chunks.remove(&base);
            self.chunks.idle_bytes -= u128::from(shape.chunk_bytes);
            self.free_chunk(seg);
        } else {
            partial.insert(base);
        }
        Ok(())
    }

    /// Turns every chunk into segments: then no free space is hidden.
    pub(super) fn dissolve_chunks(&mut self) {
        let chunks = std::mem::take(&mut self.chunks);
        for (base, chunk) in chunks.chunks {
            let shape = Shape::new(chunk.class, self.quantum);
            self.dissolve(base, &chunk, &shape);
        }
    }

    /// Size less one of the piece in use that begins at `start`, if a chunk has one there.
    pub(super) fn piece_in_use(&self, start: u64) -> Option<u64> {
        let (&base, chunk) = self.chunks.chunks.range(..=start).next_back()?;
        let shape = Shape::new(chunk.class, self.quantum);
        if start - base >= shape.chunk_bytes {
            return None;
        }
        let bit = chunk.bit(base, start, &shape)?;
        (chunk.idle & bit == 0).then_some(shape.piece_bytes - 1)
    }

    /// Whether `seg` is a valid chunk.
    pub(super) fn is_chunk(&self, seg: Seg) -> bool {
        let segment = &self.slab[seg.at()];
        let Some(chunk) = self.chunks.chunks.get(&segment.first) else {
            return false;
        };
        let shape = Shape::new(chunk.class, self.quantum);
        let partial = self.chunks.partial.get(&chunk.class);
        let listed = partial.is_some_and(|partial| partial.contains(&segment.first));
        chunk.seg == seg
            && segment.length_less() == shape.chunk_bytes - 1
            && listed == (chunk.idle != 0)
            && chunk.idle & !shape.all() == 0
            && chunk.idle != shape.all()
    }

    /// Number of chunks and their idle bytes, counted.
    pub(super) fn count_chunks(&self) -> (usize, u128) {
        let idle = self.chunks.chunks.values().map(|chunk| {
            let shape = Shape::new(chunk.class, self.quantum);
            let in_use = u64::from((shape.all() & !chunk.idle).count_ones());
            u128::from(shape.chunk_bytes - in_use * shape.piece_bytes)
        });
        (self.chunks.chunks.len(), idle.sum())
    }

    /// Makes a new chunk of idle pieces, if there certainly is a place for one.
    fn open_chunk(&mut self, shape: &Shape) -> bool {
        let request = Request::aligned_chunk(shape.chunk_bytes, self.quantum);
        let Some((base, seg)) = self.alloc_chunk(&request) else {
            return false;
        };
        let chunk = Chunk {
            seg,
            class: shape.class,
            idle: shape.all(),
        };
        self.chunks.chunks.insert(base, chunk);
        let partial = self.chunks.partial.entry(shape.class).or_default();
        partial.insert(base);
        self.chunks.idle_bytes += u128::from(shape.chunk_bytes);
        true
    }

    /// Takes idle pieces of one chunk, until `pieces` has `wanted`.
    fn take_from(&mut self, base: u64, shape: &Shape, wanted: usize, pieces: &mut Vec<u64>) {
        let Some(chunk) = self.chunks.chunks.get_mut(&base) else {
            return;
        };
        while chunk.idle != 0 && pieces.len() < wanted {
            let index = u64::from(chunk.idle.trailing_zeros());
            chunk.idle &= chunk.idle - 1;
            self.chunks.idle_bytes -= u128::from(shape.piece_bytes);
            pieces.push(base + index * shape.piece_bytes);
        }
        if chunk.idle == 0
            && let Some(partial) = self.chunks.partial.get_mut(&shape.class)
        {
            partial.remove(&base);
        }
    }

    fn dissolve(&mut self, base: u64, chunk: &Chunk, shape: &Shape) {
        let mut in_use = shape.all() & !chunk.idle;
        let mut pieces = Vec::new();
        while in_use != 0 {
            let index = u64::from(in_use.trailing_zeros());
            in_use &= in_use - 1;
            pieces.push(base + index * shape.piece_bytes);
        }
        // A piece in use and the free run behind it, and one run before.
        if self.slab.len() + 2 * pieces.len() + 1 > SEGMENTS_MAX {
            self.chunks.chunks.insert(
                base,
                Chunk {
                    seg: chunk.seg,
                    ..*chunk
                },
            );
            if chunk.idle != 0 {
                let partial = self.chunks.partial.entry(shape.class).or_default();
                partial.insert(base);
            }
            let in_use = pieces.len() as u64 * shape.piece_bytes;
            self.chunks.idle_bytes += u128::from(shape.chunk_bytes - in_use);
            return;
        }
        self.split_chunk(chunk.seg, &pieces, shape.piece_bytes);
    }
}
