// SPDX-License-Identifier: Apache-2.0
//! DMA protectors: which sections a device is likely to touch again just when the evictor would
//! take them (VPRI 4.2, 6.2).
//!
//! ```text
//!   access log ──► Touch ──► ProtectionPolicy of the device ──► Changes ──► protected sections
//!                                  ▲   ▲                                         │
//!                    time passes ──┘   └── section evicted ◄── evictor ◄─────────┘ spares them
//! ```
//! A policy knows one device of one VM and may use only past events. *Protected* means that the
//! evictor does not choose the section as long as it can take others that are idle; nothing is
//! locked in memory. A policy does not decide how much of a VM is protected: all devices together
//! have a bound, [`together_max`].
//!
//! Times are durations since any fixed moment, and never run backwards.

mod policy;

pub use policy::{Change, Fate, PolicyReport, ProtectionPolicy, Touch};

pub mod adp;
pub mod choice;
pub mod lru;
pub mod none;
pub mod parameters;
mod promotion_age;
mod protected;
mod protector;
pub mod recency;
#[cfg(test)]
mod tests;

pub use choice::{PolicyChoice, PolicyError};
pub use promotion_age::{AGE_MAX, AGE_MIN, PromotionAge};
pub use protected::ProtectedSections;
pub use protector::{Protector, together_max};
