// SPDX-License-Identifier: Apache-2.0
//! `pagetide vm detach`: starts the detach, shows its progress, and stops it on Ctrl-C; a second Ctrl-C
//! leaves it to the daemon.
//!
//! A detach fills every absent page, which takes about a second per GiB. Progress is read from the VM's
//! own report, from its count of stored pages.

use crate::{
    client::{Client, vm_path},
    control::{DetachReport, VmReport},
};
use hyper::Method;
use pagetide_report::{outcome::CommandError, progress::Progress};
use std::{path::Path, time::Duration};
use tokio::signal::unix::{SignalKind, signal};

/// Interval between progress polls.
const LOOK: Duration = Duration::from_millis(500);

/// Detaches the VM `name` of the daemon that listens on `socket`.
pub fn detach(name: &str, socket: &Path) -> Result<DetachReport, CommandError> {
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| CommandError::failed(format!("cannot start the client: {error}")))?;
    runtime.block_on(watched(&Client::new(socket), &vm_path(name)))
}

async fn watched(client: &Client, path: &str) -> Result<DetachReport, CommandError> {
    let mut interrupts = signal(SignalKind::interrupt())
        .map_err(|error| CommandError::failed(format!("cannot listen for Ctrl-C: {error}")))?;
    let mut looks = tokio::time::interval(LOOK);
    let mut detach = std::pin::pin!(client.ask::<DetachReport>(Method::DELETE, path));
    // `None` while the detach has not taken long.
    let mut shown: Option<Shown> = None;
    let mut is_first_look = true;
    let mut asked_to_stop = false;
    loop {
        tokio::select! {
            answer = &mut detach => return answer.map_err(CommandError::from),
            _ = interrupts.recv() => {
                if std::mem::replace(&mut asked_to_stop, true) {
                    return Err(CommandError::failed(
                        "interrupted: the daemon has not answered yet; `pagetide vm show` tells whether the VM is still attached",
                    ));
                }
                // Its result arrives through the detach itself, which then either completes or stops.
                let stop = client.ask::<VmReport>(Method::DELETE, &format!("{path}/detach")).await;
                if let Err(error) = stop {
                    tracing::debug!(%error, "the detach cannot be stopped any more");
                }
            }
            _ = looks.tick() => {
                if std::mem::take(&mut is_first_look) {
                    continue;
                }
                if let Ok(vm) = client.ask::<VmReport>(Method::GET, path).await {
                    shown.get_or_insert_with(|| Shown::of(&vm)).at(&vm);
                }
            }
        }
    }
}

/// Progress, on stderr.
struct Shown {
    progress: Progress,
    stored_pages: u64,
}

/// Pages that a detach still has to fill. Zero pages may stay absent.
fn left_pages(vm: &VmReport) -> u64 {
    vm.same_filled_pages + vm.lz4_pages + vm.uncompressed_pages + vm.zstd_pages
}

impl Shown {
    fn of(vm: &VmReport) -> Self {
        Self {
            progress: Progress::new("bringing pages back", "pages"),
            stored_pages: left_pages(vm),
        }
    }

    fn at(&self, vm: &VmReport) {
        let done = self.stored_pages.saturating_sub(left_pages(vm));
        self.progress.at(done, Some(self.stored_pages));
    }
}
