// SPDX-License-Identifier: Apache-2.0
//! Ctrl-C in a bench that has changed the machine: it is noted, and the bench ends between two steps, so
//! that VMs are detached and swap devices removed in order.

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};
use tokio::signal::unix::{SignalKind, signal};

/// Whether the bench must end.
#[derive(Clone, Debug)]
pub(super) struct Interrupted(Arc<AtomicBool>);

impl Interrupted {
    /// Notes SIGINT and SIGTERM from now on.
    pub(super) fn listen() -> Result<Self, String> {
        let flag = Arc::new(AtomicBool::new(false));
        let told = Arc::clone(&flag);
        let runtime = tokio::runtime::Builder::new_current_thread()
            .enable_all()
            .build()
            .map_err(|error| error.to_string())?;
        std::thread::spawn(move || {
            runtime.block_on(async {
                let signals = (
                    signal(SignalKind::interrupt()),
                    signal(SignalKind::terminate()),
                );
                let (Ok(mut interrupt), Ok(mut terminate)) = signals else {
                    tracing::warn!("signals cannot be caught: do not interrupt the bench");
                    return;
                };
                loop {
                    tokio::select! {
                        _ = interrupt.recv() => {}
                        _ = terminate.recv() => {}
                    }
                    told.store(true, Ordering::Relaxed);
                }
            });
        });
        Ok(Self(flag))
    }

    /// An error if it was interrupted.
    pub(super) fn check(&self) -> Result<(), String> {
        if self.0.load(Ordering::Relaxed) {
            return Err("it was interrupted; everything is as before".into());
        }
        Ok(())
    }
}
