// SPDX-License-Identifier: Apache-2.0
//! `pagetide run` and `pagetide dpu`: from settings to a serving process, and its shutdown.
//!
//! The order matters: lock the state directory, then listen, then recover what a predecessor left. Two
//! daemons thus never touch one pool, and clients that connect early wait in the socket's backlog
//! instead of failing. On SIGTERM or SIGINT the API keeps answering while every VM is detached, so that
//! progress can be watched; the API stops last.
//!
//! In a live upgrade everything that serving needs and that may not be had (a runtime, descriptors) is made
//! before the new program says that it serves ([`Desk`]): afterwards there is no way back.

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::runtime::Runtime;
use tokio::sync::{mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::error::Elapsed;
use tracing_subscriber::EnvFilter;

use crate::api::{self, ApiSocket, Calls};
use crate::cli::{DpuRunArgs, RunArgs, SettingsArgs};
use crate::control::{Control, ControlError, DeviceReport};
use crate::dpu::{Owed, process::start_dpu};
use crate::files;
use crate::host::{start_control, start_with};
use crate::notify;
use crate::settings::{DpuSettings, LogFormat, RunSettings, Settings, from_file};
use crate::signals::{Signals, Told, aside};
use crate::state_dir::StateDir;
use crate::upgrade::{
    Order, Parts, Prepared, Turn, UpgradeReport, Upgrades, hold, own_program, prepare, refuse_all,
};
use pagetide_addr::{PAGE_BYTES, to_usize};
use pagetide_handover::message;
use pagetide_report::outcome::{CommandError, print};
use pagetide_sys::{clock::now_ns, hurry::Hurry};

/// How long requests still under way at the end may take. All work is done by then; this only waits for
/// a client that does not read its answer.
const LAST_ANSWERS_WAIT: Duration = Duration::from_secs(3);
/// How long requests under way may take when a new program is ready to take over; one that takes longer (a detach,
/// say) is not cut off, and the upgrade is given up.
const DRAIN_WAIT: Duration = Duration::from_secs(3);

/// Runs the daemon until SIGTERM or SIGINT, or until another program has taken over.
pub fn run(args: RunArgs) -> Result<(), CommandError> {
    notify::started();
    // Threads of VMs may wait for a daemon.
    let hurry = Hurry::begin();
    let Some(settings) = settings_of::<RunSettings>(args.source, args.given)? else {
        return Ok(());
    };
    let own = own_program();
    let started = Started::afresh(&settings, start_control)?;
    drop(hurry);
    started.serve(&settings, &own, UpgradeReport::none())
}

/// Runs a DPU process until SIGTERM or SIGINT.
pub fn run_dpu(args: DpuRunArgs) -> Result<(), CommandError> {
    notify::started();
    let hurry = Hurry::begin();
    let Some(settings) = settings_of::<DpuSettings>(args.source, args.given)? else {
        return Ok(());
    };
    let started = Started::afresh(&settings, start_dpu)?;
    drop(hurry);
    started.tell_ready();
    let Started {
        socket,
        control,
        desk,
        ..
    } = started;
    let Desk { runtime, front } = desk;
    let serving = Serving {
        socket: &socket,
        control: &control,
        calls: Calls::default(),
        upgrading: None,
    };
    let outcome = runtime.block_on(serving.run(front, None));
    ended(runtime, outcome.map(drop))
}

/// Goes on as the daemon with what a predecessor, or this process before its last `exec`, has left.
pub(crate) fn go_on(
    settings: &RunSettings,
    parts: Parts,
    own: &Path,
    last: UpgradeReport,
    hurry: Hurry,
) -> Result<(), CommandError> {
    check_host()?;
    let mut started = Started::from_parts(settings, parts, Owed::AsAfterDeath)?;
    started.admit();
    drop(hurry);
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

/// What serving needs and may not be had.
struct Desk {
    runtime: Runtime,
    front: Front,
}

/// The part of it that belongs to the runtime.
struct Front {
    signals: Signals,
    listener: UnixListener,
}

impl Front {
    fn of(socket: &ApiSocket) -> Result<Self, CommandError> {
        let failed = |error| CommandError::failed(format!("cannot start the API: {error}"));
        Ok(Self {
            signals: Signals::new().map_err(failed)?,
            listener: socket.listener().map_err(failed)?,
        })
    }
}

impl Desk {
    fn of(socket: &ApiSocket) -> Result<Self, CommandError> {
        let runtime = runtime()?;
        let front = {
            let _within = runtime.enter();
            Front::of(socket)?
        };
        Ok(Self { runtime, front })
    }
}

/// A running system that does not answer yet.
pub(crate) struct Started {
    state_dir: StateDir,
    socket: ApiSocket,
    control: Arc<dyn Control>,
    desk: Desk,
}

impl Started {
    fn afresh<S: Settings + Sync>(
        settings: &S,
        start: impl FnOnce(&S) -> Result<Arc<dyn Control>, ControlError> + Send,
    ) -> Result<Self, CommandError> {
        let state_dir = StateDir::open(settings.state_dir()).map_err(CommandError::refused)?;
        let socket = ApiSocket::bind(&settings.api_path()).map_err(CommandError::refused)?;
        notify::recovering();
        let no_thread = |error| CommandError::failed(format!("no thread to start with: {error}"));
        let control = aside(|| start(settings)).map_err(no_thread)??;
        Ok(Self {
            desk: Desk::of(&socket)?,
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
        // Signals are blocked already: the mask is inherited.
        let control = start_with(settings, Some(parts.handed), owed)?;
        Ok(Self {
            desk: Desk::of(&socket)?,
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
        let (upgrades, mut orders) = Upgrades::new(own, last);
        let text = settings.to_toml();
        self.tell_ready();
        let Desk { runtime, front } = self.desk;
        let serving = Serving {
            socket: &self.socket,
            control: &self.control,
            calls: Calls::default(),
            upgrading: Some(Upgrading {
                state_dir: &self.state_dir,
                upgrades: &upgrades,
                settings: &text,
                ready_wait: Duration::from_millis(settings.upgrade_ready_ms.into()),
            }),
        };
        match runtime.block_on(serving.run(front, Some(&mut orders))) {
            Ok(End::HandedOver(prepared, parts, hurry)) => {
                runtime.shutdown_background();
                let Err(error) = hold::pass_on(*prepared, parts, &text, own, hurry);
                // Nothing is detached: the next daemon recovers everything, as after a crash.
                tracing::error!(%error, "this program cannot be executed again; ending as by a crash");
                std::process::exit(1)
            }
            Ok(End::Ended) => ended(runtime, Ok(())),
            Err(error) => ended(runtime, Err(error)),
        }
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
        calls: Calls::default(),
        upgrading: None,
    };
    serving.run(Front::of(socket)?, None).await.map(drop)
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
    HandedOver(Box<Prepared>, Parts, Hurry),
}

/// Why serving is interrupted.
enum Asked {
    /// A signal, by its name.
    End(&'static str),
    /// This program is ready, and no other upgrade is begun before this one is given up.
    HandOver(Box<Prepared>, Turn),
}

/// The API of a running system.
struct Serving<'a> {
    socket: &'a ApiSocket,
    control: &'a Arc<dyn Control>,
    /// Work of all servers that there have been.
    calls: Calls,
    upgrading: Option<Upgrading<'a>>,
}

impl Serving<'_> {
    async fn run(
        &self,
        front: Front,
        mut orders: Option<&mut mpsc::Receiver<Order>>,
    ) -> Result<End, CommandError> {
        let Front {
            mut signals,
            mut listener,
        } = front;
        loop {
            let (stop, mut server) = self.answer(listener);
            let (prepared, _turn, next) = loop {
                match self.until_asked(&mut signals, orders.as_deref_mut()).await {
                    Asked::End(name) => {
                        orders.into_iter().for_each(refuse_all);
                        return self.end(name, &mut signals, stop, server).await;
                    }
                    // What a server of its own needs if nothing comes of it is there before this one stops.
                    Asked::HandOver(prepared, turn) => match self.socket.listener() {
                        Ok(next) => break (prepared, turn, next),
                        Err(error) => self.gave_up(*prepared, &error.to_string()),
                    },
                }
            };
            listener = next;
            drop(stop);
            // Requests that go on longer keep their connections: the old server is not cut off.
            let drained = tokio::time::timeout(DRAIN_WAIT, self.drained(&mut server)).await;
            // From here on VMs and disks wait.
            let hurry = Hurry::begin();
            match self.hand_over(&prepared, drained) {
                Ok(parts) => {
                    signals.put_back();
                    return Ok(End::HandedOver(prepared, parts, hurry));
                }
                Err(reason) => self.gave_up(*prepared, &reason),
            }
        }
    }

    /// Returns once no request is under way, nor work of one whose client has left.
    async fn drained(&self, server: &mut JoinHandle<()>) {
        if let Err(error) = server.await {
            tracing::warn!(%error, "the API ended badly");
        }
        self.calls.are_over().await;
    }

    /// Detaches everything, while the API answers.
    async fn end(
        &self,
        signal: &'static str,
        signals: &mut Signals,
        stop: oneshot::Sender<()>,
        server: JoinHandle<()>,
    ) -> Result<End, CommandError> {
        tracing::info!(signal, "shutting down: detaching every VM");
        let outcome = shut_down(Arc::clone(self.control), signals).await;
        drop(stop);
        match tokio::time::timeout(LAST_ANSWERS_WAIT, server).await {
            Ok(Ok(())) => {}
            Ok(ended) => tracing::warn!(?ended, "the API ended badly"),
            Err(_) => tracing::warn!("a client did not read its answer; left it"),
        }
        outcome.map(|()| End::Ended).map_err(CommandError::from)
    }

    /// Answers requests until what is returned is dropped, and then those under way.
    fn answer(&self, listener: UnixListener) -> (oneshot::Sender<()>, JoinHandle<()>) {
        let (stop, stopped) = oneshot::channel::<()>();
        let upgrades = self.upgrading.as_ref();
        let upgrades = upgrades.map(|upgrading| upgrading.upgrades.clone());
        let router = api::router_with(Arc::clone(self.control), upgrades, self.calls.clone());
        let server = tokio::spawn(api::serve(listener, router, async move {
            // A dropped sender requests the stop as much as its message does.
            drop(stopped.await);
        }));
        (stop, server)
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
            let order = match order {
                Some(order) => order,
                None => match upgrading.upgrades.by_signal() {
                    Some(order) => order,
                    None => {
                        tracing::warn!("SIGUSR2: an upgrade has been asked for already");
                        continue;
                    }
                },
            };
            let prepared = tokio::select! {
                name = signals.end() => return Asked::End(name),
                prepared = self.prepare(upgrading, order.program.clone()) => prepared,
            };
            if let Some((prepared, turn)) = upgrading.begin(order, prepared) {
                return Asked::HandOver(Box::new(prepared), turn);
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
        let requires = self.requires();
        let work =
            tokio::task::spawn_blocking(move || prepare(&path, &settings, requires, ready_wait));
        work.await.unwrap_or_else(|gone| {
            Err(ControlError::failed(format!(
                "the upgrade panicked: {gone}"
            )))
        })
    }

    /// What a successor must know. An older program goes on with everything but network devices.
    fn requires(&self) -> &'static [&'static str] {
        let is_nic = |device: &DeviceReport| device.kind == "net";
        match self.control.devices().iter().any(is_nic) {
            true => &[message::POOLS, message::DISKS, message::NICS],
            false => &[message::POOLS, message::DISKS],
        }
    }

    /// Stops all work, if nothing stands against it; returns what is handed over to the process that is `prepared`.
    fn hand_over(
        &self,
        prepared: &Prepared,
        drained: Result<(), Elapsed>,
    ) -> Result<Parts, String> {
        let Some(upgrading) = &self.upgrading else {
            return Err("this process is not upgraded while it runs".to_owned());
        };
        if drained.is_err() {
            return Err(format!(
                "a request of the API has been under way for {} s (a detach, say, or a reclaim): wait for its end",
                DRAIN_WAIT.as_secs()
            ));
        }
        let told = |error: ControlError| error.message;
        self.control.may_hand_over().map_err(told)?;
        if !prepared.knows(self.requires()) {
            return Err(
                "a network device was added while the new program started: order the upgrade once more".to_owned(),
            );
        }
        let mut parts = Parts::of(upgrading.state_dir, self.socket, now_ns()).map_err(told)?;
        parts.handed.vms = self.control.vms().into_iter().map(|vm| vm.name).collect();
        parts.handed.devices = self.control.hand_over().map_err(told)?;
        Ok(parts)
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
        order: Order,
        prepared: Result<Prepared, ControlError>,
    ) -> Option<(Prepared, Turn)> {
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
        let Order { begun, turn, .. } = order;
        if begun.is_some_and(|begun| begun.send(answer).is_err()) {
            tracing::debug!("the client that has asked for an upgrade has left");
        }
        prepared.map(|prepared| (prepared, turn)).ok()
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
