// SPDX-License-Identifier: Apache-2.0
//! The names of pages on the server.
//!
//! ```text
//!   pagetide:{VM:version}:position       a sealed page: VM in 32 hexadecimal digits, the others decimal
//!   pagetide:marker:token:number         one for each connected tier, the next after each loss, see [`super`]
//! ```
//! A version is used for one batch of a VM only, so a key is written once in its life, and whatever is under
//! it is that page or nothing. What stands between the braces is all that a cluster hashes: the pages of an
//! extent are on one node, written by one pipeline and deleted by one command, and the extents of a VM are
//! spread over all nodes.

use crate::{ExtentName, Place, Position};

/// The key of a page.
pub(super) fn page(extent: ExtentName, position: Position) -> String {
    let ExtentName { vm, version, .. } = extent;
    format!("pagetide:{{{vm}:{}}}:{}", version.0, position.0)
}

/// The key of the page at a place.
pub(super) fn of(place: Place) -> String {
    page(place.extent, place.position)
}

/// The key of a tier's marker with this number.
pub(super) fn marker(token: u128, number: u32) -> String {
    format!("pagetide:marker:{token:032x}:{number}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{ExtentNo, SectorNo, Version, VmId};

    #[test]
    fn key_names_vm_version_and_position_and_hashes_the_extent() {
        let extent = ExtentName {
            vm: VmId(0xab),
            number: ExtentNo(7),
            version: Version(u64::MAX),
        };
        let key = page(extent, Position(511));
        assert_eq!(
            key,
            "pagetide:{000000000000000000000000000000ab:18446744073709551615}:511"
        );
        let place = Place {
            extent,
            position: Position(511),
            start: SectorNo(0),
            sectors: 0,
        };
        assert_eq!(of(place), key);
        assert_eq!(
            marker(1, 2),
            "pagetide:marker:00000000000000000000000000000001:2"
        );
    }

    #[test]
    fn no_two_pages_share_a_key() {
        let mut keys = std::collections::HashSet::new();
        for vm in [1, 11, 0x11] {
            for version in [1, 11, 111] {
                for position in [1, 11, 111] {
                    let extent = ExtentName {
                        vm: VmId(vm),
                        number: ExtentNo(0),
                        version: Version(version),
                    };
                    assert!(keys.insert(page(extent, Position(position))));
                }
            }
        }
    }
}
