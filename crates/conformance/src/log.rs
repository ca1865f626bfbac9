// SPDX-License-Identifier: Apache-2.0
//! Checks of the access log: DMA accesses are reported, and so are losses.

use super::{
    Check, Checked, Ended, Tester,
    disk::{CONTENT, PAGES},
    ensure,
    probe::PATIENCE,
    transfers::{READ_PAGES, Rig},
};
use pagetide_addr::{Access, FilePage, PAGE_BYTES};
use pagetide_vpri::LogRecord;
use pagetide_vpri_function::wire::{LogEntry, RECORD_BYTES, feature};
use std::time::{Duration, Instant};

/// Time between two tries: a device must report its records within 100 ms.
const TRY: Duration = Duration::from_millis(120);

/// The checks, in order.
pub(super) const CHECKS: &[Check] = &[
    Check {
        name: "log/accesses",
        demand: "with buffers in queue 2 the device reports what DMA has touched, in whole records",
        run: accesses,
    },
    Check {
        name: "log/losses",
        demand: "records for which there was no buffer are counted, and reported first (LOG_LOSSES)",
        run: losses,
    },
    Check {
        name: "log/no-room",
        demand: "a chain of queue 2 that is too short for a record is returned with length 0",
        run: no_room,
    },
];

/// A disk with all of its memory mapped.
fn mapped(tester: &mut Tester) -> Result<Rig, Ended> {
    tester.needs(feature::ACCESS_LOG, "ACCESS_LOG")?;
    let rig = Rig::new(tester)?;
    let all = FilePage(0).run(PAGES);
    rig.map(tester, all, Access::Write)?;
    Ok(rig)
}

/// Reads again and again, until `found` returns true for what the device reports.
fn read_until(
    tester: &mut Tester,
    rig: &mut Rig,
    what: &str,
    mut found: impl FnMut(&mut Tester) -> Result<bool, Ended>,
) -> Checked {
    let began = Instant::now();
    while !found(tester)? {
        ensure(
            || began.elapsed() < PATIENCE,
            || format!("{what} within {} s", PATIENCE.as_secs()),
        )?;
        rig.disk.read(READ_PAGES)?;
        rig.disk.wait_done()?;
        std::thread::sleep(TRY);
    }
    Ok(())
}

fn accesses(tester: &mut Tester) -> Checked {
    let mut rig = mapped(tester)?;
    let space = rig.space;
    let content = CONTENT.byte_offset()..CONTENT.byte_offset() + READ_PAGES * PAGE_BYTES;
    let room = 16 * RECORD_BYTES;
    tester.probe()?.give_log_buffer(0, room)?;
    read_until(tester, &mut rig, "no access was reported", |tester| {
        let Some(entries) = tester.probe()?.log_entries()? else {
            return Ok(false);
        };
        tester.probe()?.give_log_buffer(0, room)?;
        let is_the_read = |record: &LogRecord| {
            let end = record.address.saturating_add(record.len_bytes.into());
            let within = content.contains(&record.address) && end <= content.end;
            record.space == space && within && record.access == Access::Write
        };
        let told = |entry: &LogEntry| matches!(entry, LogEntry::Access(r) if is_the_read(r));
        Ok(entries.iter().any(told))
    })
}

fn losses(tester: &mut Tester) -> Checked {
    tester.needs(feature::LOG_LOSSES, "LOG_LOSSES")?;
    let mut rig = mapped(tester)?;
    // Room for one record, and then none until another read is done.
    let mut is_out = false;
    read_until(tester, &mut rig, "no loss was reported", |tester| {
        if !is_out {
            tester.probe()?.give_log_buffer(0, RECORD_BYTES)?;
            is_out = true;
            return Ok(false);
        }
        let Some(entries) = tester.probe()?.log_entries()? else {
            return Ok(false);
        };
        is_out = false;
        let Some(LogEntry::Lost { records, .. }) = entries.first() else {
            return Ok(false);
        };
        ensure(|| *records > 0, || "a loss of no record".to_owned())?;
        Ok(true)
    })
}

fn no_room(tester: &mut Tester) -> Checked {
    let mut rig = mapped(tester)?;
    tester.probe()?.give_log_buffer(0, RECORD_BYTES - 1)?;
    read_until(tester, &mut rig, "the chain did not come back", |tester| {
        let entries = tester.probe()?.log_entries()?;
        let is_empty = entries.as_ref().is_none_or(Vec::is_empty);
        ensure(
            || is_empty,
            || "it wrote into a chain without room".to_owned(),
        )?;
        Ok(entries.is_some())
    })
}
