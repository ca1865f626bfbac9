// SPDX-License-Identifier: Apache-2.0
//! [`Signals`]: SIGTERM, SIGINT and SIGUSR2, which ask the daemon to end or to be replaced.
//!
//! They are blocked in all its threads and read from a descriptor, so that one which comes at any moment of a live
//! upgrade waits for whoever goes on: it stays pending over the `exec` of the old program, which reads it if it goes
//! on, and passes it to the new one if that does ([`pass_to`]). While a daemon starts, only its main thread can be
//! ended by them ([`aside`]).

use pagetide_sys::kept_signals::{self, KeptSignals};
use rustix::process::{Pid, Signal, getpid, kill_process};
use std::{io, thread};
use tokio::io::{Interest, unix::AsyncFd};

const ALL: [Signal; 3] = [Signal::TERM, Signal::INT, Signal::USR2];

/// Blocks them in this thread and in all that it creates, if the process that has started this one has not done so.
pub(crate) fn keep() -> io::Result<()> {
    kept_signals::block(&ALL)
}

/// What a signal has told.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Told {
    /// To end, by this signal.
    End(&'static str),
    /// To be replaced by the program that lies where the own one lay.
    Upgrade,
}

/// See the module.
pub(crate) struct Signals {
    kept: AsyncFd<KeptSignals>,
    /// To be replaced was told while only an end was waited for.
    upgrade: bool,
}

impl Signals {
    /// Blocks and reads them; to be called within the runtime.
    #[expect(
        deprecated,
        reason = "what replaces it is unsafe; the value owns the descriptor, so that stays open and the same"
    )]
    pub(crate) fn new() -> io::Result<Self> {
        let kept = KeptSignals::of(&ALL)?;
        Ok(Self {
            kept: AsyncFd::with_interest(kept, Interest::READABLE)?,
            upgrade: false,
        })
    }

    /// The next one.
    pub(crate) async fn next(&mut self) -> Told {
        match std::mem::take(&mut self.upgrade) {
            true => Told::Upgrade,
            false => self.read().await,
        }
    }

    /// The next one that tells to end; another one is told afterwards.
    pub(crate) async fn end(&mut self) -> &'static str {
        loop {
            match self.read().await {
                Told::End(name) => return name,
                Told::Upgrade => self.upgrade = true,
            }
        }
    }

    /// This process is replaced: what was told and not heeded is pending again, for whoever goes on.
    pub(crate) fn put_back(&mut self) {
        if std::mem::take(&mut self.upgrade)
            && let Err(error) = kill_process(getpid(), Signal::USR2)
        {
            tracing::warn!(%error, "SIGUSR2 came while an upgrade was prepared, and is lost");
        }
    }

    async fn read(&self) -> Told {
        match self.try_read().await {
            Ok(told) => told,
            Err(error) => {
                tracing::error!(%error, "signals cannot be read; end this process by the API's clients and SIGKILL");
                std::future::pending().await
            }
        }
    }

    async fn try_read(&self) -> io::Result<Told> {
        loop {
            let mut ready = self.kept.readable().await?;
            match self.kept.get_ref().next()? {
                Some(Signal::TERM) => return Ok(Told::End("SIGTERM")),
                Some(Signal::INT) => return Ok(Told::End("SIGINT")),
                Some(_) => return Ok(Told::Upgrade),
                None => ready.clear_ready(),
            }
        }
    }
}

/// Gives another process what is pending here, and what comes until this one has ended is lost.
pub(crate) fn pass_to(process: Pid) {
    let passed = KeptSignals::of(&ALL).and_then(|kept| {
        while let Some(signal) = kept.next()? {
            tracing::info!(
                ?signal,
                "a signal came during the upgrade, and is passed on"
            );
            kill_process(process, signal)?;
        }
        Ok(())
    });
    if let Err(error) = passed {
        tracing::warn!(%error, "signals that came during the upgrade are lost");
    }
}

/// Does `work` on a thread that these signals leave alone, as they do all threads that it creates. This thread, and
/// with it the process, can be ended by them meanwhile.
pub(crate) fn aside<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    thread::scope(|scope| {
        let builder = thread::Builder::new().name("pt-start".to_owned());
        let worker = builder.spawn_scoped(scope, || {
            keep()?;
            Ok(work())
        })?;
        match worker.join() {
            Ok(done) => done,
            Err(panic) => std::panic::resume_unwind(panic),
        }
    })
}
