// SPDX-License-Identifier: Apache-2.0
//! `pagetide run` and `pagetide dpu`: from settings to a serving process, and its shutdown.
//!
//! The order matters: lock the state directory, then listen, then recover what a predecessor left. Two
//! daemons thus never touch one pool, and clients that connect early wait in the socket's backlog
//! instead of failing. On SIGTERM or SIGINT the API keeps answering while every VM is detached, so that
//! progress can be watched; the API stops last.

use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::oneshot;
use tracing_subscriber::EnvFilter;

use crate::api::{self, ApiSocket};
use crate::cli::{DpuRunArgs, RunArgs, SettingsArgs};
use crate::control::{Control, ControlError};
use crate::dpu::process::start_dpu;
use crate::files;
use crate::host::start_control;
use crate::settings::{DpuSettings, LogFormat, RunSettings, Settings, from_file};
use crate::state_dir::StateDir;
use pagetide_addr::{PAGE_BYTES, to_usize};
use pagetide_report::outcome::{CommandError, print};

/// How long requests still under way at the end may take. All work is done by then; this only waits for
/// a client that does not read its answer.
const LAST_ANSWERS_WAIT: Duration = Duration::from_secs(3);

/// Runs the daemon until SIGTERM or SIGINT.
pub fn run(args: RunArgs) -> Result<(), CommandError> {
    run_with::<RunSettings>(args.source, args.given, start_control)
}

/// Runs a DPU process until SIGTERM or SIGINT.
pub fn run_dpu(args: DpuRunArgs) -> Result<(), CommandError> {
    run_with::<DpuSettings>(args.source, args.given, start_dpu)
}

fn run_with<S: Settings>(
    source: SettingsArgs,
    flags: S::Given,
    start: impl FnOnce(&S) -> Result<Arc<dyn Control>, ControlError>,
) -> Result<(), CommandError> {
    let file = match &source.config {
        Some(path) => from_file(path).map_err(CommandError::refused)?,
        None => S::Given::default(),
    };
    let settings = S::merge(flags, file);
    if source.print_settings {
        return print(&settings.to_toml());
    }
    start_log(&settings)?;
    check_page_size(rustix::param::page_size()).map_err(CommandError::refused)?;
    files::raise_limit().map_err(CommandError::refused)?;
    let state_dir = StateDir::open(settings.state_dir()).map_err(CommandError::refused)?;
    let socket = ApiSocket::bind(&settings.api_path()).map_err(CommandError::refused)?;
    let control = start(&settings)?;
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| CommandError::failed(format!("cannot start the API: {error}")))?;
    tracing::info!(
        version = env!("CARGO_PKG_VERSION"),
        pid = std::process::id(),
        state_dir = %state_dir.path().display(),
        api = %socket.path().display(),
        "ready"
    );
    let outcome = runtime.block_on(serve(&socket, control));
    // A call that still blocks belongs to a client that no longer gets an answer.
    runtime.shutdown_background();
    outcome?;
    tracing::info!("ended");
    Ok(())
}

/// Words, bitmaps and stored content count pages of 4 KiB. A kernel with larger ones (on AArch64 there are such)
/// would move more than one at a time.
fn check_page_size(host_bytes: usize) -> Result<(), String> {
    if host_bytes == to_usize(PAGE_BYTES) {
        return Ok(());
    }
    Err(format!(
        "this kernel has pages of {host_bytes} bytes, and Pagetide moves pages of {PAGE_BYTES}: boot a kernel with \
         pages of 4 KiB"
    ))
}

/// Starts the log on stderr.
fn start_log(settings: &impl Settings) -> Result<(), CommandError> {
    let (format, written) = settings.log();
    let filter = EnvFilter::try_new(written).map_err(|error| {
        CommandError::refused(format!(
            "log-filter '{written}' is wrong: {error}; write a level such as info, or target=level"
        ))
    })?;
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false);
    match format {
        LogFormat::Text => log.try_init(),
        LogFormat::Json => log.json().flatten_event(true).try_init(),
    }
    .map_err(|error| CommandError::failed(format!("cannot start the log: {error}")))
}

/// Serves the API on `socket` until SIGTERM or SIGINT, then shuts `control` down.
pub async fn serve(socket: &ApiSocket, control: Arc<dyn Control>) -> Result<(), CommandError> {
    let failed = |error| CommandError::failed(format!("cannot start the API: {error}"));
    let mut signals = EndSignals::new().map_err(failed)?;
    let listener = socket.listener().map_err(failed)?;
    let (stop, stopped) = oneshot::channel::<()>();
    let router = api::router(Arc::clone(&control));
    let server = tokio::spawn(api::serve(listener, router, async move {
        // A dropped sender requests the stop as much as its message does.
        drop(stopped.await);
    }));
    let name = signals.next().await;
    tracing::info!(signal = name, "shutting down: detaching every VM");
    let outcome = shut_down(control, &mut signals).await;
    drop(stop);
    match tokio::time::timeout(LAST_ANSWERS_WAIT, server).await {
        Ok(Ok(())) => {}
        Ok(ended) => tracing::warn!(?ended, "the API ended badly"),
        Err(_) => tracing::warn!("a client did not read its answer; left it"),
    }
    outcome.map_err(CommandError::from)
}

/// Detaches everything; a further signal only logs that the detach continues.
async fn shut_down(
    control: Arc<dyn Control>,
    signals: &mut EndSignals,
) -> Result<(), ControlError> {
    let mut work = tokio::task::spawn_blocking(move || control.shut_down());
    loop {
        tokio::select! {
            ended = &mut work => {
                return ended.unwrap_or_else(|gone| {
                    Err(ControlError::failed(format!("shutdown panicked: {gone}")))
                });
            }
            name = signals.next() => tracing::warn!(
                signal = name,
                "still detaching; SIGKILL would pause the VMs until the next `pagetide run`"
            ),
        }
    }
}

struct EndSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl EndSignals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
        })
    }

    async fn next(&mut self) -> &'static str {
        tokio::select! {
            _ = self.terminate.recv() => "SIGTERM",
            _ = self.interrupt.recv() => "SIGINT",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernel_with_larger_pages_is_refused_with_both_sizes() {
        assert_eq!(check_page_size(4096), Ok(()));
        let refused = check_page_size(65_536).unwrap_err();
        assert!(
            refused.contains("65536") && refused.contains("4096"),
            "{refused}"
        );
    }
}
