// SPDX-License-Identifier: Apache-2.0
//! Performance model of I/O address translation for a thousand tenants
//! (HyperTRIO III and IV-C).
