// SPDX-License-Identifier: Apache-2.0
//! `pagetide run` and `pagetide dpu`: from settings to a serving process, and its shutdown.
//!
//! The order matters: lock the state directory, then listen, then recover what a predecessor left. Two
//! daemons thus never touch one pool, and clients that connect early wait in the socket's backlog
//! instead of failing. On SIGTERM or SIGINT the API keeps answering while every VM is detached, so that
//! progress can be watched; the API stops last.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::runtime::Runtime;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::error::Elapsed;
use tracing_subscriber::EnvFilter;

use crate::api::{self, ApiSocket};
use crate::cli::{DpuRunArgs, RunArgs, SettingsArgs};
use crate::control::{Control, ControlError};
use crate::dpu::{Owed, process::start_dpu};
use crate::files;
use crate::host::{start_control, start_with};
use crate::notify;
use crate::settings::{DpuSettings, LogFormat, RunSettings, Settings, from_file};
use crate::state_dir::StateDir;
use crate::upgrade::{Order, Parts, Prepared, UpgradeReport, Upgrades, hold, own_program, prepare};
use pagetide_addr::{PAGE_BYTES, to_usize};
use pagetide_report::outcome::{CommandError, print};
use pagetide_sys::clock::now_ns;

/// How long requests still under way at the end may take. All work is done by then; this only waits for
/// a client that does not read its answer.
const LAST_ANSWERS_WAIT: Duration = Duration::from_secs(3);
/// How long requests under way may take when a new program is ready to take over; one that takes longer (a detach,
/// say) is not cut off, and the upgrade is given up.
const DRAIN_WAIT: Duration = Duration::from_secs(3);

/// Runs the daemon until SIGTERM or SIGINT, or until another program has taken over.
pub fn run(args: RunArgs) -> Result<(), CommandError> {
    notify::started();
    let Some(settings) = settings_of::<RunSettings>(args.source, args.given)? else {
        return Ok(());
    };
    let own = own_program();
    let started = Started::afresh(&settings, start_control)?;
    started.serve(&settings, &own, UpgradeReport::none())
}

/// Runs a DPU process until SIGTERM or SIGINT.
pub fn run_dpu(args: DpuRunArgs) -> Result<(), CommandError> {
    notify::started();
    let Some(settings) = settings_of::<DpuSettings>(args.source, args.given)? else {
        return Ok(());
    };
    let started = Started::afresh(&settings, start_dpu)?;
    let runtime = runtime()?;
    started.tell_ready();
    let outcome = runtime.block_on(serve(&started.socket, started.control));
    ended(runtime, outcome)
}

/// Goes on as the daemon with what a predecessor, or this process before its last `exec`, has left.
pub(crate) fn go_on(
    settings: &RunSettings,
    parts: Parts,
    own: &Path,
    last: UpgradeReport,
) -> Result<(), CommandError> {
    check_host()?;
    let mut started = Started::from_parts(settings, parts, Owed::AsAfterDeath)?;
    started.admit();
    started.serve(settings, own, last)
}

/// The settings in force, and a log; `None` if they were only to be printed.
fn settings_of<S: Settings>(
    source: SettingsArgs,
    flags: S::Given,
) -> Result<Option<S>, CommandError> {
    let file = match &source.config {
        Some(path) => from_file(path).map_err(CommandError::refused)?,
        None => S::Given::default(),
    };
    let settings = S::merge(flags, file);
    if source.print_settings {
        print(&settings.to_toml())?;
        return Ok(None);
    }
    start_log(&settings)?;
    check_host()?;
    Ok(Some(settings))
}

/// Whether the kernel and the limits of this process allow a daemon.
pub(crate) fn check_host() -> Result<(), CommandError> {
    check_page_size(rustix::param::page_size()).map_err(CommandError::refused)?;
    files::raise_limit().map_err(CommandError::refused)
}

/// The name of a process that was executed by a descriptor would be a number.
pub(crate) fn name_process() {
    if let Err(error) = rustix::thread::set_name(c"pagetide") {
        tracing::debug!(%error, "this process has no name");
    }
}

fn runtime() -> Result<Runtime, CommandError> {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .map_err(|error| CommandError::failed(format!("cannot start the API: {error}")))
}

fn ended(runtime: Runtime, outcome: Result<(), CommandError>) -> Result<(), CommandError> {
    // A call that still blocks belongs to a client that no longer gets an answer.
    runtime.shutdown_background();
    outcome?;
    tracing::info!("ended");
    Ok(())
}

/// A running system that does not answer yet.
pub(crate) struct Started {
    state_dir: StateDir,
    socket: ApiSocket,
    control: Arc<dyn Control>,
}

impl Started {
    fn afresh<S: Settings>(
        settings: &S,
        start: impl FnOnce(&S) -> Result<Arc<dyn Control>, ControlError>,
    ) -> Result<Self, CommandError> {
        let state_dir = StateDir::open(settings.state_dir()).map_err(CommandError::refused)?;
        let socket = ApiSocket::bind(&settings.api_path()).map_err(CommandError::refused)?;
        notify::recovering();
        let control = start(settings)?;
        Ok(Self {
            state_dir,
            socket,
            control,
        })
    }

    /// Recovers everything as after a death, with what was handed over.
    pub(crate) fn from_parts(
        settings: &RunSettings,
        parts: Parts,
        owed: Owed,
    ) -> Result<Self, CommandError> {
        let state_dir =
            StateDir::adopt(&settings.state_dir, parts.lock).map_err(CommandError::refused)?;
        let socket = ApiSocket::adopt(&settings.api_path(), parts.api);
        let control = start_with(settings, parts.handed, owed)?;
        Ok(Self {
            state_dir,
            socket,
            control,
        })
    }

    /// This process is the daemon from now on.
    pub(crate) fn admit(&mut self) {
        self.socket.own();
        self.control.admit();
    }

    fn tell_ready(&self) {
        tracing::info!(
            version = env!("CARGO_PKG_VERSION"),
            pid = std::process::id(),
            state_dir = %self.state_dir.path().display(),
            api = %self.socket.path().display(),
            "ready"
        );
        notify::ready();
    }

    /// Serves until the end, or until another program has taken over.
    pub(crate) fn serve(
        self,
        settings: &RunSettings,
        own: &Path,
        last: UpgradeReport,
    ) -> Result<(), CommandError> {
        let runtime = runtime()?;
        let (upgrades, mut orders) = Upgrades::new(own, last);
        let text = settings.to_toml();
        let upgrading = Upgrading {
            state_dir: &self.state_dir,
            upgrades: &upgrades,
            settings: &text,
            ready_wait: Duration::from_millis(settings.upgrade_ready_ms.into()),
        };
        let serving = Serving {
            socket: &self.socket,
            control: &self.control,
            upgrading: Some(upgrading),
        };
        self.tell_ready();
        match runtime.block_on(serving.run(Some(&mut orders))) {
            Ok(End::HandedOver(prepared, parts)) => {
                runtime.shutdown_background();
                self.hand_over(*prepared, parts, &text, own)
            }
            Ok(End::Ended) => ended(runtime, Ok(())),
            Err(error) => ended(runtime, Err(error)),
        }
    }

    fn hand_over(
        &self,
        prepared: Prepared,
        mut parts: Parts,
        settings: &str,
        own: &Path,
    ) -> Result<(), CommandError> {
        parts.handed.vms = self.control.vms().into_iter().map(|vm| vm.name).collect();
        parts.handed.devices = self.control.hand_over();
        let Err(error) = hold::pass_on(prepared, parts, settings, own);
        // Nothing is detached: the next daemon recovers everything, as after a crash.
        tracing::error!(%error, "this program cannot be executed again; ending as by a crash");
        std::process::exit(1)
    }
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
pub(crate) fn start_log(settings: &impl Settings) -> Result<(), CommandError> {
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
    let serving = Serving {
        socket,
        control: &control,
        upgrading: None,
    };
    serving.run(None).await.map(drop)
}

/// What a live upgrade needs.
struct Upgrading<'a> {
    state_dir: &'a StateDir,
    upgrades: &'a Upgrades,
    settings: &'a str,
    ready_wait: Duration,
}

/// How serving has ended.
enum End {
    /// Everything is detached.
    Ended,
    /// Nothing is: the program that is ready is to take over.
    HandedOver(Box<Prepared>, Parts),
}

/// Why serving is interrupted.
enum Asked {
    /// A signal, by its name.
    End(&'static str),
    HandOver(Box<Prepared>),
}

/// The API of a running system.
struct Serving<'a> {
    socket: &'a ApiSocket,
    control: &'a Arc<dyn Control>,
    upgrading: Option<Upgrading<'a>>,
}

impl Serving<'_> {
    async fn run(
        &self,
        mut orders: Option<&mut mpsc::Receiver<Order>>,
    ) -> Result<End, CommandError> {
        let failed = |error| CommandError::failed(format!("cannot start the API: {error}"));
        let mut signals = Signals::new().map_err(failed)?;
        loop {
            let (stop, mut server) = self.answer().map_err(failed)?;
            match self.until_asked(&mut signals, orders.as_deref_mut()).await {
                Asked::End(name) => {
                    tracing::info!(signal = name, "shutting down: detaching every VM");
                    let outcome = shut_down(Arc::clone(self.control), &mut signals).await;
                    drop(stop);
                    match tokio::time::timeout(LAST_ANSWERS_WAIT, server).await {
                        Ok(Ok(())) => {}
                        Ok(ended) => tracing::warn!(?ended, "the API ended badly"),
                        Err(_) => tracing::warn!("a client did not read its answer; left it"),
                    }
                    return outcome.map(|()| End::Ended).map_err(CommandError::from);
                }
                Asked::HandOver(prepared) => {
                    drop(stop);
                    // Requests that go on longer keep their connections: the old server is not cut off.
                    let drained = tokio::time::timeout(DRAIN_WAIT, &mut server).await;
                    match self.last_checks(drained.map(drop)) {
                        Ok(parts) => return Ok(End::HandedOver(prepared, parts)),
                        Err(reason) => self.gave_up(*prepared, &reason),
                    }
                }
            }
        }
    }

    /// Answers requests until what is returned is dropped, and then those under way.
    fn answer(&self) -> std::io::Result<(oneshot::Sender<()>, JoinHandle<()>)> {
        let listener = self.socket.listener()?;
        let (stop, stopped) = oneshot::channel::<()>();
        let upgrades = self.upgrading.as_ref();
        let upgrades = upgrades.map(|upgrading| upgrading.upgrades.clone());
        let router = api::router_with(Arc::clone(self.control), upgrades);
        let server = tokio::spawn(api::serve(listener, router, async move {
            // A dropped sender requests the stop as much as its message does.
            drop(stopped.await);
        }));
        Ok((stop, server))
    }

    async fn until_asked(
        &self,
        signals: &mut Signals,
        mut orders: Option<&mut mpsc::Receiver<Order>>,
    ) -> Asked {
        loop {
            let order = tokio::select! {
                told = signals.next() => match told {
                    Told::End(name) => return Asked::End(name),
                    Told::Upgrade => None,
                },
                Some(order) = next_order(orders.as_deref_mut()) => Some(order),
            };
            let Some(upgrading) = &self.upgrading else {
                tracing::warn!("SIGUSR2: this process is not upgraded while it runs");
                continue;
            };
            let path = match &order {
                Some(order) => order.program.clone(),
                None => upgrading.upgrades.own().to_owned(),
            };
            let prepared = tokio::select! {
                name = signals.end() => return Asked::End(name),
                prepared = self.prepare(upgrading, path) => prepared,
            };
            if let Some(prepared) = upgrading.begin(order, prepared) {
                return Asked::HandOver(Box::new(prepared));
            }
        }
    }

    async fn prepare(
        &self,
        upgrading: &Upgrading<'_>,
        path: std::path::PathBuf,
    ) -> Result<Prepared, ControlError> {
        self.control.may_hand_over()?;
        let (settings, ready_wait) = (upgrading.settings.to_owned(), upgrading.ready_wait);
        let work = tokio::task::spawn_blocking(move || prepare(&path, &settings, ready_wait));
        work.await.unwrap_or_else(|gone| {
            Err(ControlError::failed(format!(
                "the upgrade panicked: {gone}"
            )))
        })
    }

    /// Whether nothing stands against stopping the work now, and what will be handed over.
    fn last_checks(&self, drained: Result<(), Elapsed>) -> Result<Parts, String> {
        let Some(upgrading) = &self.upgrading else {
            return Err("this process is not upgraded while it runs".to_owned());
        };
        if drained.is_err() {
            return Err(format!(
                "a request of the API has been under way for {} s (a detach, say, or a reclaim): wait for its end",
                DRAIN_WAIT.as_secs()
            ));
        }
        self.control
            .may_hand_over()
            .map_err(|error| error.message)?;
        Parts::of(upgrading.state_dir, self.socket, now_ns()).map_err(|error| error.message)
    }

    fn gave_up(&self, prepared: Prepared, reason: &str) {
        let report = prepared.give_up(reason);
        if let Some(upgrading) = &self.upgrading {
            upgrading.upgrades.set(report);
        }
    }
}

async fn next_order(orders: Option<&mut mpsc::Receiver<Order>>) -> Option<Order> {
    match orders {
        Some(orders) => orders.recv().await,
        None => std::future::pending().await,
    }
}

impl Upgrading<'_> {
    /// Tells whoever has asked whether an upgrade begins.
    fn begin(
        &self,
        order: Option<Order>,
        prepared: Result<Prepared, ControlError>,
    ) -> Option<Prepared> {
        let answer = match &prepared {
            Ok(prepared) => {
                self.upgrades.set(prepared.report().clone());
                Ok(prepared.report().clone())
            }
            Err(error) => {
                tracing::warn!(%error, "no upgrade; nothing has happened");
                Err(error.clone())
            }
        };
        if let Some(order) = order
            && order.begun.send(answer).is_err()
        {
            tracing::debug!("the client that has asked for an upgrade has left");
        }
        prepared.ok()
    }
}

/// Detaches everything; a further signal only logs that the detach continues.
async fn shut_down(control: Arc<dyn Control>, signals: &mut Signals) -> Result<(), ControlError> {
    let mut work = tokio::task::spawn_blocking(move || control.shut_down());
    loop {
        tokio::select! {
            ended = &mut work => {
                return ended.unwrap_or_else(|gone| {
                    Err(ControlError::failed(format!("shutdown panicked: {gone}")))
                });
            }
            name = signals.end() => tracing::warn!(
                signal = name,
                "still detaching; SIGKILL would pause the VMs until the next `pagetide run`"
            ),
        }
    }
}

/// What a signal has told.
enum Told {
    /// To end, by this signal.
    End(&'static str),
    /// To be replaced by the program that lies where the own one lay.
    Upgrade,
}

struct Signals {
    terminate: Signal,
    interrupt: Signal,
    /// The same as `pagetide upgrade` with the path of the own program.
    upgrade: Signal,
}

impl Signals {
    fn new() -> std::io::Result<Self> {
        Ok(Self {
            terminate: signal(SignalKind::terminate())?,
            interrupt: signal(SignalKind::interrupt())?,
            upgrade: signal(SignalKind::user_defined2())?,
        })
    }

    async fn next(&mut self) -> Told {
        tokio::select! {
            _ = self.terminate.recv() => Told::End("SIGTERM"),
            _ = self.interrupt.recv() => Told::End("SIGINT"),
            _ = self.upgrade.recv() => Told::Upgrade,
        }
    }

    async fn end(&mut self) -> &'static str {
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
