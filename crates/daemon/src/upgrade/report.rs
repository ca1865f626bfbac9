// SPDX-License-Identifier: Apache-2.0
//! [`UpgradeReport`]: how the last upgrade came out.

use pagetide_report::text::{Text, fields};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// How far an upgrade has come.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
#[serde(rename_all = "kebab-case")]
pub enum UpgradeState {
    /// There was none since this process was started.
    None,
    /// The new program is ready, and takes over.
    UnderWay,
    /// This process has taken over.
    Done,
    /// It was given up before anything was stopped.
    GivenUp,
    /// The new program has failed, and the old one goes on.
    RolledBack,
}

/// How the last upgrade came out.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize, ToSchema)]
pub struct UpgradeReport {
    /// How far it has come.
    pub state: UpgradeState,
    /// The process that serves now.
    pub pid: u32,
    /// The version of its program.
    pub version: String,
    /// The process of the new program.
    pub successor: Option<u32>,
    /// The new program.
    pub program: Option<String>,
    /// Why it has failed, or was given up.
    pub reason: Option<String>,
    /// From the moment the old program began to stop until everything was served again.
    pub pause_us: Option<u64>,
}

impl UpgradeReport {
    /// Of this process, before an upgrade.
    pub(crate) fn none() -> Self {
        Self {
            state: UpgradeState::None,
            pid: std::process::id(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            successor: None,
            program: None,
            reason: None,
            pause_us: None,
        }
    }

    /// The same upgrade, which has come out like this.
    pub(crate) fn ended(self, state: UpgradeState, reason: impl Into<Option<String>>) -> Self {
        Self {
            state,
            reason: reason.into(),
            ..self
        }
    }
}

impl Text for UpgradeReport {
    fn text(&self) -> String {
        fields(self)
    }
}
