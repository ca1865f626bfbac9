// SPDX-License-Identifier: Apache-2.0
//! The identity of the VM that owns the pool. It is replaced whole: whenever the process dies, a
//! successor finds the old one or the new one.
//!
//! ```text
//!   4 KiB    ├ first half ─ 30 KiB ┬ second half ─ 30 KiB ┤ 64 KiB
//!   cell 10    bit 32: which half is true · bits 0…31: its length in bytes
//! ```
//! A new identity is written into the half that is not current, and one store to the cell makes
//! that half current. A pool from the time when there was only one identity has it in the first
//! half, or in both halves if it is long.

use super::{
    Pool,
    error::PoolError,
    format::{Cell, HEADER_BYTES},
};
use pagetide_addr::to_usize;
use std::sync::{PoisonError, atomic::Ordering};

const IDENTITY_AT: u64 = 4096;
const HALF_BYTES: u64 = (HEADER_BYTES - IDENTITY_AT) / 2;
const SECOND_HALF: u64 = 1 << 32;

/// The content of the cell.
struct True {
    second_half: u64,
    len_bytes: u64,
}

impl Pool {
    /// The owner's identity, as written by [`Self::set_identity`] or at creation.
    ///
    /// # Errors
    /// [`PoolError::Damaged`].
    pub fn identity(&self) -> Result<Vec<u8>, PoolError> {
        let now = self.true_identity()?;
        let mut identity = vec![0; to_usize(now.len_bytes)];
        let at = IDENTITY_AT + now.second_half * HALF_BYTES;
        let read = self.mapping.copy_from(at, &mut identity);
        read.map_err(|source| PoolError::Map {
            path: self.path.clone(),
            source,
        })?;
        Ok(identity)
    }

    /// Replaces the identity atomically: whenever this process dies, a successor finds the old one
    /// or this one.
    ///
    /// # Errors
    /// [`PoolError::IdentityTooLong`]; the old one stays.
    pub fn set_identity(&self, identity: &[u8]) -> Result<(), PoolError> {
        let _changing = (self.changing.lock()).unwrap_or_else(PoisonError::into_inner);
        let next = self.write_next_identity(identity)?;
        // Release pairs with the Acquire in `true_identity`: a thread that sees the half sees its
        // bytes.
        self.cell(Cell::Identity).store(next, Ordering::Release);
        Ok(())
    }

    /// Writes into the half that is not current; returns the cell value that makes it current.
    fn write_next_identity(&self, identity: &[u8]) -> Result<u64, PoolError> {
        let now = self.true_identity()?;
        let len_bytes = identity.len() as u64;
        if len_bytes > HALF_BYTES || now.len_bytes > HALF_BYTES {
            return Err(PoolError::IdentityTooLong(to_usize(
                len_bytes.max(now.len_bytes),
            )));
        }
        let second_half = 1 - now.second_half;
        let at = IDENTITY_AT + second_half * HALF_BYTES;
        let written = self.mapping.copy_to(at, identity);
        written.map_err(|source| PoolError::Map {
            path: self.path.clone(),
            source,
        })?;
        Ok((second_half * SECOND_HALF) | len_bytes)
    }

    fn true_identity(&self) -> Result<True, PoolError> {
        let cell = self.cell(Cell::Identity).load(Ordering::Acquire);
        let (second_half, len_bytes) = (cell / SECOND_HALF, cell % SECOND_HALF);
        let room_bytes = match second_half {
            0 => 2 * HALF_BYTES,
            1 => HALF_BYTES,
            _ => 0,
        };
        if second_half > 1 || len_bytes > room_bytes {
            return Err(PoolError::Damaged {
                path: self.path.clone(),
                why: format!("its identity has {len_bytes} bytes in half {second_half}"),
            });
        }
        Ok(True {
            second_half,
            len_bytes,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn identity_is_the_old_one_until_the_new_one_is_whole() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("vm.pool");
        let long = vec![b'x'; to_usize(HALF_BYTES)];
        drop(Pool::create(&path, 10, 3, b"first").unwrap());
        for (old, new) in [
            (&b"first"[..], &b"the second"[..]),
            (b"the second", &long),
            (&long, b""),
            (b"", b"first again"),
        ] {
            let pool = Pool::open(&path).unwrap();
            // Death after the last byte, before the store that makes it current.
            pool.write_next_identity(new).unwrap();
            drop(pool);
            let pool = Pool::open(&path).unwrap();
            assert_eq!(pool.identity().unwrap(), old);
            pool.set_identity(new).unwrap();
            assert_eq!(pool.identity().unwrap(), new);
            drop(pool);
            assert_eq!(Pool::open(&path).unwrap().identity().unwrap(), new);
        }
    }

    #[test]
    fn identity_longer_than_a_half_is_refused_and_the_old_one_stays() {
        let dir = tempfile::tempdir_in("/dev/shm").unwrap();
        let path = dir.path().join("vm.pool");
        let pool = Pool::create(&path, 10, 3, b"first").unwrap();
        let too_long = vec![b'x'; to_usize(HALF_BYTES + 1)];
        assert!(matches!(
            pool.set_identity(&too_long),
            Err(PoolError::IdentityTooLong(_))
        ));
        assert_eq!(pool.identity().unwrap(), b"first");
    }
}
