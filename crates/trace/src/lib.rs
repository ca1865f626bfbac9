// SPDX-License-Identifier: Apache-2.0
//! Traces of I/O address translation: what they are made of, the formats they
//! are kept in, tenants made by a recipe, and hyper-traces of any number of
//! tenants (HyperTRIO IV).

mod error;
mod event;
mod hypersio;
mod stream;

pub use error::TraceError;
pub use event::{Event, EventKind, IOVA_BITS, IommuDomain, PageSize, SourceId, TraceAccess};
pub use hypersio::HypersioReader;
pub use stream::{BATCH_EVENTS, EventSink, EventSource, Events};
