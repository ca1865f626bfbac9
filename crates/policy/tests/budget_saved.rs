// SPDX-License-Identifier: Apache-2.0
//! Settings of a budget are read back from JSON as they were written, and never without their
//! checks.

use pagetide_policy::budget::{
    Bytes, Mark, Permille, Plan, Saved, VmId, VmShare, Watermarks, Weight,
};
use std::collections::BTreeMap;

fn saved() -> Saved {
    let mut plan = Plan::new(Bytes::gib(48));
    plan.watermarks = Watermarks {
        high: Mark::Bytes(Bytes::gib(2)),
        low: Mark::Permille(Permille(21)),
        ..plan.watermarks
    };
    let share = VmShare {
        weight: Weight::try_from(300).expect("a weight"),
        floor: Bytes::gib(1),
        ceiling: Some(Bytes::gib(6)),
    };
    Saved {
        plan,
        vms: BTreeMap::from([(VmId(7), share), (VmId(1), VmShare::default())]),
    }
}

#[test]
fn what_was_set_is_read_back_as_it_was_written() {
    let text = serde_json::to_string(&saved()).expect("it can be written");
    let read: Saved = serde_json::from_str(&text).expect("it can be read");
    assert_eq!(read, saved());
}

#[test]
fn weight_that_is_not_possible_is_refused_when_it_is_read() {
    let text = serde_json::to_string(&saved()).expect("it can be written");
    for bad in ["\"weight\":0", "\"weight\":10001", "\"weight\":-1"] {
        let text = text.replace("\"weight\":300", bad);
        let error = serde_json::from_str::<Saved>(&text).expect_err("it is refused");
        assert!(!error.to_string().is_empty());
    }
}
