// SPDX-License-Identifier: Apache-2.0
//! Policies against models that scan everything, against written sequences, and together.

mod golden;
mod model;
mod protector;
