// SPDX-License-Identifier: Apache-2.0
//! What tenants serve.

/// What a tenant serves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ServedWorkload {
    /// See [`crate::record`].
    Iperf3,
    /// See [`crate::record`].
    Media,
    /// See [`crate::record`].
    Search,
}

impl ServedWorkload {
    /// All.
    pub const ALL: [Self; 3] = [Self::Iperf3, Self::Media, Self::Search];

    /// Its name in a command.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Iperf3 => "iperf3",
            Self::Media => "media",
            Self::Search => "search",
        }
    }

    /// The port of TCP on which its server listens.
    #[must_use]
    pub const fn port(self) -> u16 {
        match self {
            Self::Iperf3 => 5201,
            Self::Media => 8080,
            Self::Search => 8081,
        }
    }

    /// The one of that name.
    pub(super) fn from_name(name: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|workload| workload.name() == name)
    }
}
