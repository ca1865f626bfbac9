// SPDX-License-Identifier: Apache-2.0
//! The function's configuration space: the limits of the device.

use super::{CONFIG_BYTES, MAGIC, RANGES_MIN, VERSION, WireError, check, put, u16_at, u32_at};

/// The limits of a device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Most spaces at a time.
    pub spaces_max: u32,
    /// Most unanswered page requests.
    pub requests_max: u32,
    /// Most body elements of one event, at least [`RANGES_MIN`].
    pub ranges_max: u32,
    /// Longest time that an event waits for DMA to leave its pages, in microseconds.
    pub lease_wait_us: u32,
    /// Changes with each start of the device.
    pub generation: u32,
}

impl Config {
    /// The configuration space.
    #[must_use]
    pub fn encode(&self) -> [u8; CONFIG_BYTES] {
        let mut bytes = [0; CONFIG_BYTES];
        put(&mut bytes, 0, MAGIC.to_le_bytes());
        put(&mut bytes, 4, VERSION.to_le_bytes());
        put(&mut bytes, 8, self.spaces_max.to_le_bytes());
        put(&mut bytes, 12, self.requests_max.to_le_bytes());
        put(&mut bytes, 16, self.ranges_max.to_le_bytes());
        put(&mut bytes, 20, self.lease_wait_us.to_le_bytes());
        put(&mut bytes, 24, self.generation.to_le_bytes());
        bytes
    }

    /// The limits in the configuration space `bytes`.
    ///
    /// # Errors
    /// [`WireError`]: it is not a VPRI function, or one that a driver of this version cannot use.
    pub fn decode(bytes: &[u8]) -> Result<Self, WireError> {
        let len = bytes.len();
        if len < CONFIG_BYTES {
            let expected = CONFIG_BYTES;
            return Err(WireError::Length { len, expected });
        }
        let (magic, version) = (u32_at(bytes, 0), u16_at(bytes, 4));
        check(|| magic == MAGIC, 0, magic)?;
        check(|| version == VERSION, 4, version)?;
        let config = Self {
            spaces_max: u32_at(bytes, 8),
            requests_max: u32_at(bytes, 12),
            ranges_max: u32_at(bytes, 16),
            lease_wait_us: u32_at(bytes, 20),
            generation: u32_at(bytes, 24),
        };
        check(|| config.spaces_max > 0, 8, config.spaces_max)?;
        check(|| config.requests_max > 0, 12, config.requests_max)?;
        check(|| config.ranges_max >= RANGES_MIN, 16, config.ranges_max)?;
        Ok(config)
    }
}
