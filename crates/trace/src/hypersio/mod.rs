// SPDX-License-Identifier: Apache-2.0
//! Files of the authors' simulator (HyperSIO 1.0), read and written.
//!
//! # The binary trace
//! Three files share a prefix. Each is records back to back, packed, little-endian, without header or
//! trailer:
//!
//! ```text
//! …iotlb_trace.bin   48 bytes a translation request
//!    0        4     6     8        16       24        32        40        48
//!    │ type=1 │ sid │ did │  iova  │  mask  │  level  │  slpte  │  next   │
//! …cc_data.bin       20 bytes a context entry:  sid u16, high u64, low u64, generation u16
//! …slpt_data.bin     42 bytes a page-table entry
//! ```
//!
//! `level` is 1, 2 or 3 for pages of 4 KiB, 2 MiB or 1 GiB, and `mask` must say the same: all ones above
//! the page. `next` is the number of the next request for the same page of the same domain, all ones if
//! there is none; their oracle uses it. A packet is three consecutive records.
//!
//! Their simulator loads the second and third file and uses neither, so we do not read them; they must
//! exist, so [`HypersioWriter`] writes them. `next` is not read either: where it is needed it is computed
//! from the requests, which makes it reliable.
//!
//! # The text log
//! The input of the authors' trace builder: the `-trace` output of their patched QEMU. See
//! [`HypersioLogReader`].

mod record;

pub(crate) use record::is_record;
use record::{
    NEVER, NEXT_AT, RECORD_BYTES, TYPE_TRANSLATE, complaint, event_of, field, is_sound, mask_of,
    size_of_mask,
};

mod binary;
mod log;
mod writer;

pub use binary::HypersioReader;
pub use log::{HypersioLogReader, LogSources};
pub use writer::HypersioWriter;
