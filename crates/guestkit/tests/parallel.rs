// SPDX-License-Identifier: Apache-2.0
//! Many vCPUs that fault at a time, at the limit, while their daemon dies again and again.
//!
//! All of the guest's memory is in use and five eighths of it may be there, so that faults never end:
//! they come several together, most need room, and make it themselves. The guest is the benches'
//! stand-in, which checks each page it reads.

use pagetide_guestkit::dense::Dense;
use pagetide_guestkit::product::Product;
use pagetide_guestkit::stage::RunFolder;
use pagetide_guestkit::steps::number;
use std::time::{Duration, Instant};

const VM: &str = "vm";
const RAM_BYTES: u64 = 256 << 20;
const LIMIT_BYTES: u64 = RAM_BYTES / 8 * 5;
const VCPUS: u32 = 4;
/// Deaths of the daemon.
const KILLS: u64 = 50;
/// Faults between two of them, at least.
const FAULTS: u64 = 100;
/// Longest wait for anything.
const PATIENCE: Duration = Duration::from_secs(120);

#[test]
fn vcpus_that_fault_together_at_the_limit_read_no_wrong_byte_though_daemons_die() {
    let Some(binary) = Product::to_take_over() else {
        return;
    };
    let folder = RunFolder::new().expect("a folder on /dev/shm");
    let mut guest = Dense::start(folder.path(), RAM_BYTES, VCPUS, 1000).expect("a stand-in");
    let (state, log) = (folder.path().join("state"), folder.path().join("log"));
    let mut product = Product::start(&binary, &state, &log).unwrap_or_else(|e| panic!("{e}"));
    product.attach(guest.pid(), VM).expect("attach");
    product.limit(VM, LIMIT_BYTES).expect("limit");
    let (mut handed_on, mut direct) = (0, 0);
    for death in 1..=KILLS {
        let before = number(&product.show(VM).expect("show"), "vcpu_faults");
        let deadline = Instant::now() + PATIENCE;
        let vm = loop {
            let vm = product.show(VM).expect("show");
            // The first daemon begins with all of it present.
            let is_squeezed = number(&vm, "resident_bytes") <= LIMIT_BYTES + LIMIT_BYTES / 10;
            if is_squeezed && number(&vm, "vcpu_faults") >= before + FAULTS {
                break vm;
            }
            assert!(
                Instant::now() < deadline,
                "no faults after {death} deaths: {vm}\n{}",
                product.log_tail()
            );
            std::thread::sleep(Duration::from_millis(10));
        };
        handed_on += number(&vm, "handed_on_faults");
        direct += number(&vm, "directly_evicted_pages");
        product.kill();
        product.run().expect("a successor");
    }
    let vm = product.show(VM).expect("show");
    assert_eq!(number(&vm, "restarts"), KILLS, "{vm}");
    assert_eq!(number(&vm, "alias_faults"), 0, "{vm}");
    assert_eq!(number(&vm, "poisoned_pages"), 0, "{vm}");
    eprintln!("{handed_on} faults were handed on, {direct} pages evicted by fills");
    assert!(handed_on > 0 && direct > 0);
    product.detach(VM).expect("detach");
    guest.verify().expect("each byte is right");
    drop(guest);
    product.released().expect("it holds nothing");
}
