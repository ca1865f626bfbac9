// SPDX-License-Identifier: Apache-2.0
//! Page requests on the page fault queue, and the answers to them in an event.
//!
//! They are [`PageRequest`] and [`PageResponse`] except for one thing: an answer does
//! not name the queue. The device knows it from the id of the request.

use super::{ANSWER_BYTES, REQUEST_BYTES, WireError, check, put, range_at, u16_at, u32_at, u64_at};
use pagetide_addr::{
    Access, DeviceId, DomainId, OVERWRITE_PAGES_MAX, PageRequest, PageResponse, QueueId, RequestId,
    RequestKind, ResponseCode, Tier,
};

/// [`PageRequest::vector`] of a queue without an interrupt.
const NO_VECTOR: u16 = 0xffff;

/// Offsets of a page request's fields.
mod at {
    pub const ID: usize = 0;
    pub const DEVICE: usize = 8;
    pub const QUEUE: usize = 12;
    pub const VECTOR: usize = 14;
    pub const SPACE: usize = 16;
    pub const ACCESS: usize = 20;
    pub const KIND: usize = 21;
    pub const FIRST_PAGE: usize = 24;
    pub const PAGE_COUNT: usize = 32;
    pub const SENT_NS: usize = 40;
    pub const HOLD_US: usize = 48;
    pub const BOUNCE_BUFFER: usize = 52;
}

/// The page request as sent over the page fault queue.
#[must_use]
pub fn encode_request(request: &PageRequest) -> [u8; REQUEST_BYTES] {
    let mut bytes = [0; REQUEST_BYTES];
    let (kind, slot) = match request.kind {
        RequestKind::Demand => (0_u8, 0),
        RequestKind::Prefault => (1, 0),
        RequestKind::Overwrite { slot } => (2, slot),
        RequestKind::AliasFault => (3, 0),
        RequestKind::Blank => (4, 0),
        RequestKind::BlankAhead => (5, 0),
    };
    let vector = request.vector.unwrap_or(NO_VECTOR);
    put(&mut bytes, at::ID, request.id.0.to_le_bytes());
    put(&mut bytes, at::DEVICE, request.device.0.to_le_bytes());
    put(&mut bytes, at::QUEUE, request.queue.0.to_le_bytes());
    put(&mut bytes, at::VECTOR, vector.to_le_bytes());
    put(&mut bytes, at::SPACE, request.domain.0.to_le_bytes());
    put(&mut bytes, at::ACCESS, [access_number(request.access)]);
    put(&mut bytes, at::KIND, [kind]);
    let first_page = request.pages.start.0;
    put(&mut bytes, at::FIRST_PAGE, first_page.to_le_bytes());
    put(
        &mut bytes,
        at::PAGE_COUNT,
        request.pages.len().to_le_bytes(),
    );
    put(&mut bytes, at::SENT_NS, request.sent_ns.to_le_bytes());
    put(&mut bytes, at::HOLD_US, request.hold_us.to_le_bytes());
    put(&mut bytes, at::BOUNCE_BUFFER, slot.to_le_bytes());
    bytes
}

/// Decodes a page request from `bytes`. Bytes past its end and reserved fields are ignored.
///
/// # Errors
/// [`WireError`]. A request with a [`request_id`] is then answered as invalid.
pub fn decode_request(bytes: &[u8]) -> Result<PageRequest, WireError> {
    let len = bytes.len();
    if len < REQUEST_BYTES {
        let expected = REQUEST_BYTES;
        return Err(WireError::Length { len, expected });
    }
    let pages = range_at(bytes, at::FIRST_PAGE)?;
    let [access, kind] = super::take(bytes, at::ACCESS);
    let kind = match kind {
        0 => RequestKind::Demand,
        1 => RequestKind::Prefault,
        2 => {
            let is_right = || pages.len() <= OVERWRITE_PAGES_MAX;
            check(is_right, at::PAGE_COUNT, pages.len())?;
            let slot = u32_at(bytes, at::BOUNCE_BUFFER);
            RequestKind::Overwrite { slot }
        }
        3 => RequestKind::AliasFault,
        4 => RequestKind::Blank,
        5 => RequestKind::BlankAhead,
        _ => {
            let value = kind.into();
            return Err(WireError::Field {
                at: at::KIND,
                value,
            });
        }
    };
    let vector = u16_at(bytes, at::VECTOR);
    Ok(PageRequest {
        id: RequestId(u64_at(bytes, at::ID)),
        device: DeviceId(u32_at(bytes, at::DEVICE)),
        queue: QueueId(u16_at(bytes, at::QUEUE)),
        domain: DomainId(u32_at(bytes, at::SPACE)),
        pages,
        access: access_of(access, at::ACCESS)?,
        kind,
        vector: (vector != NO_VECTOR).then_some(vector),
        sent_ns: u64_at(bytes, at::SENT_NS),
        hold_us: u32_at(bytes, at::HOLD_US),
    })
}

/// The id by which even an otherwise invalid request can be answered.
#[must_use]
pub fn request_id(bytes: &[u8]) -> Option<RequestId> {
    (bytes.len() >= at::DEVICE).then(|| RequestId(u64_at(bytes, at::ID)))
}

pub(super) fn access_of(number: u8, at: usize) -> Result<Access, WireError> {
    match number {
        0 => Ok(Access::Read),
        1 => Ok(Access::Write),
        _ => Err(WireError::Field {
            at,
            value: number.into(),
        }),
    }
}

pub(super) const fn access_number(access: Access) -> u8 {
    match access {
        Access::Read => 0,
        Access::Write => 1,
    }
}

/// A page response as RESPOND carries it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Answer {
    /// Id of the request.
    pub id: RequestId,
    /// How it ended.
    pub code: ResponseCode,
    /// Where the content came from.
    pub tier: Tier,
    /// For an overwrite: which pages were installed.
    pub installed: u64,
    /// From its sending until its handling began, in nanoseconds.
    pub waited_ns: u64,
    /// How long it was handled, in nanoseconds.
    pub handling_ns: u64,
}

/// Numbers of response codes, as in PCIe's page request interface.
const SUCCESS: u16 = 0;
const INVALID_REQUEST: u16 = 1;
const RESPONSE_FAILURE: u16 = 15;
/// Number of [`Tier::Unknown`]; readers also treat unknown numbers as it.
const TIER_UNKNOWN: u8 = 255;

impl Answer {
    /// The page response, with `queue` as its queue.
    #[must_use]
    pub const fn to_queue(self, queue: QueueId) -> PageResponse {
        PageResponse {
            id: self.id,
            queue,
            code: self.code,
            tier: self.tier,
            installed: self.installed,
            waited_ns: self.waited_ns,
            handling_ns: self.handling_ns,
        }
    }

    pub(super) fn encode(&self, into: &mut Vec<u8>) {
        let mut bytes = [0; ANSWER_BYTES];
        let code = match self.code {
            ResponseCode::Success => SUCCESS,
            ResponseCode::InvalidRequest => INVALID_REQUEST,
            ResponseCode::ResponseFailure => RESPONSE_FAILURE,
        };
        let tier = match self.tier {
            Tier::Present => 0,
            Tier::Zero => 1,
            Tier::Compressed => 2,
            Tier::Uncompressed => 3,
            Tier::Disk => 4,
            Tier::Remote => 5,
            Tier::Unknown => TIER_UNKNOWN,
        };
        put(&mut bytes, 0, self.id.0.to_le_bytes());
        put(&mut bytes, 8, code.to_le_bytes());
        put(&mut bytes, 10, [tier]);
        put(&mut bytes, 16, self.installed.to_le_bytes());
        put(&mut bytes, 24, self.waited_ns.to_le_bytes());
        put(&mut bytes, 32, self.handling_ns.to_le_bytes());
        into.extend(bytes);
    }

    /// The answer at byte `at`.
    pub(super) fn decode(bytes: &[u8], at: usize) -> Result<Self, WireError> {
        let number = u16_at(bytes, at + 8);
        let code = match number {
            SUCCESS => ResponseCode::Success,
            INVALID_REQUEST => ResponseCode::InvalidRequest,
            RESPONSE_FAILURE => ResponseCode::ResponseFailure,
            _ => {
                let value = number.into();
                return Err(WireError::Field { at: at + 8, value });
            }
        };
        let [tier, reserved] = super::take(bytes, at + 10);
        check(|| reserved == 0, at + 11, reserved)?;
        let reserved = u32_at(bytes, at + 12);
        check(|| reserved == 0, at + 12, reserved)?;
        let tier = match tier {
            0 => Tier::Present,
            1 => Tier::Zero,
            2 => Tier::Compressed,
            3 => Tier::Uncompressed,
            4 => Tier::Disk,
            5 => Tier::Remote,
            _ => Tier::Unknown,
        };
        Ok(Self {
            id: RequestId(u64_at(bytes, at)),
            code,
            tier,
            installed: u64_at(bytes, at + 16),
            waited_ns: u64_at(bytes, at + 24),
            handling_ns: u64_at(bytes, at + 32),
        })
    }
}

impl From<&PageResponse> for Answer {
    fn from(response: &PageResponse) -> Self {
        Self {
            id: response.id,
            code: response.code,
            tier: response.tier,
            installed: response.installed,
            waited_ns: response.waited_ns,
            handling_ns: response.handling_ns,
        }
    }
}
