// SPDX-License-Identifier: Apache-2.0
//! The codes of kinds and accesses.

use crate::event::{EventKind, TraceAccess};

/// Kinds with their names in the file; the position is the code, so only append.
pub(super) const KINDS: [(EventKind, &str); 10] = [
    (EventKind::Translate, "translate"),
    (EventKind::InvalidatePages, "invalidate-pages"),
    (EventKind::InvalidateDomain, "invalidate-domain"),
    (EventKind::InvalidateAll, "invalidate-all"),
    (EventKind::InvalidateSource, "invalidate-source"),
    (
        EventKind::InvalidateContextsOfDomain,
        "invalidate-contexts-of-domain",
    ),
    (EventKind::InvalidateContexts, "invalidate-contexts"),
    (EventKind::Join, "join"),
    (EventKind::Leave, "leave"),
    (EventKind::PageOut, "page-out"),
];

/// Accesses with their names in the file; the position is the code, so only append.
pub(super) const ACCESSES: [(TraceAccess, &str); 3] = [
    (TraceAccess::Unknown, "unknown"),
    (TraceAccess::Read, "read"),
    (TraceAccess::Write, "write"),
];

/// Code of `kind` in the column of that name.
pub(super) const fn kind_code(kind: EventKind) -> i32 {
    match kind {
        EventKind::Translate => 0,
        EventKind::InvalidatePages => 1,
        EventKind::InvalidateDomain => 2,
        EventKind::InvalidateAll => 3,
        EventKind::InvalidateSource => 4,
        EventKind::InvalidateContextsOfDomain => 5,
        EventKind::InvalidateContexts => 6,
        EventKind::Join => 7,
        EventKind::Leave => 8,
        EventKind::PageOut => 9,
    }
}

/// Code of `access` in the column of that name.
pub(super) const fn access_code(access: TraceAccess) -> i32 {
    match access {
        TraceAccess::Unknown => 0,
        TraceAccess::Read => 1,
        TraceAccess::Write => 2,
    }
}

/// Name of `kind` in files and documents.
pub(crate) fn kind_name(kind: EventKind) -> &'static str {
    KINDS
        .iter()
        .find(|(known, _)| *known == kind)
        .map_or("", |(_, name)| name)
}

/// Entry of a table of codes.
pub(super) fn decoded<T: Copy>(table: &[(T, &str)], code: i32) -> Option<T> {
    usize::try_from(code)
        .ok()
        .and_then(|index| table.get(index))
        .map(|(value, _)| *value)
}

/// A table of codes as JSON, name to code.
pub(super) fn codes_json<T>(table: &[(T, &str)]) -> String {
    let codes = table
        .iter()
        .enumerate()
        .map(|(code, (_, name))| ((*name).to_owned(), code.into()))
        .collect();
    serde_json::Value::Object(codes).to_string()
}
