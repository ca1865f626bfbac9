// SPDX-License-Identifier: Apache-2.0
//! Settings of `pagetide run` and `pagetide dpu`: each defined once for each.
//!
//! One line in `settings!` gives a setting its name, type, default and help.
//! From it come the flag (`--state-dir`), the key of the TOML file of the same
//! name (`state-dir`), the default, `--help`, `--print-settings` and
//! `docs/settings.md`. A flag wins over the file, the file over the default;
//! a key that is no setting is an error, not a silence.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde::{Deserialize, Serialize, de::DeserializeOwned};

use crate::budget::{Amount, BudgetSetting};
use crate::cpus::CpuList;
use crate::percent::Percent;
use crate::pool::PoolMax;
use crate::protection::ProtectorChoice;
use crate::scheduler::{IdleTimeChoice, ShareList};
use crate::tiers::{DemoteAfter, TierList, WhenGoneChoice, may_be_secret};
use pagetide_policy::{set_times::SetTimes, swap_in::Together};
use pagetide_report::size::ByteSize;

/// Documentation of one setting.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct SettingDoc {
    /// Field name, with underscores.
    field: &'static str,
    /// Default as it would be written.
    pub default: &'static str,
    /// One sentence.
    pub help: &'static str,
}

impl SettingDoc {
    /// Name as it is written in flags and files.
    #[must_use]
    pub fn name(&self) -> String {
        self.field.replace('_', "-")
    }
}

/// Why there are no settings to run by.
#[derive(Debug, thiserror::Error)]
pub enum SettingsError {
    /// The file cannot be read.
    #[error("cannot read the settings file {path}: {source}; check --config")]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// The reason.
        source: std::io::Error,
    },
    /// The file is not TOML, has an unknown key, or a value of the wrong type.
    #[error("the settings file {path} is wrong: {reason}")]
    Wrong {
        /// The file.
        path: PathBuf,
        /// What the parser says, with line and key.
        reason: String,
    },
}

/// Where I/O page faults are handled (VPRI 6.1).
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IopfHandling {
    /// On the CPUs of the VM that faulted.
    Affined,
    /// By one thread for all VMs, in the order of arrival.
    Serialized,
}

/// Who serves an I/O page fault while its engine has nothing else to do (VPRI 6.1: who pays).
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IopfPayer {
    /// The engine, on its own CPU.
    Engine,
    /// The CPUs of the VM that faulted.
    Vm,
}

/// How the threads that handle I/O page faults preempt vCPUs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum IopfPreempt {
    /// `SCHED_FIFO`, where allowed; else as by `Nice`.
    Fifo,
    /// Niceness -20, where allowed.
    Nice,
    /// Nothing.
    Off,
}

/// How samples tell what a VM's memory is used.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum TrackerChoice {
    /// The cheapest that this kernel has.
    Auto,
    /// Pages are unmapped; those that are touched are mapped again.
    Unmap,
    /// By the kernel's idle page tracking.
    Idle,
    /// All pages are unmapped at each scan: for comparison.
    Whole,
}

/// Something that is done or not.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Switch {
    /// It is done.
    On,
    /// It is not.
    Off,
}

impl From<Switch> for Together {
    fn from(switch: Switch) -> Self {
        match switch {
            Switch::On => Self::On,
            Switch::Off => Self::Off,
        }
    }
}

/// Form of the log on stderr.
#[derive(Clone, Copy, PartialEq, Eq, Debug, ValueEnum, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum LogFormat {
    /// Lines for people.
    Text,
    /// One JSON object a line.
    Json,
}

/// Settings of a process, complete.
pub trait Settings: Serialize + Sized {
    /// What flags or a file give of them.
    type Given: DeserializeOwned + Default;
    /// Every setting in the order of declaration.
    const DOCS: &'static [SettingDoc];

    /// `flags` over `file` over the defaults.
    #[must_use]
    fn merge(flags: Self::Given, file: Self::Given) -> Self;

    /// Directory of everything that outlives the process.
    fn state_dir(&self) -> &Path;

    /// Path of the API socket.
    fn api_path(&self) -> PathBuf;

    /// Form of the log, and what is logged.
    fn log(&self) -> (LogFormat, &str);

    /// As a settings file with the help as comments.
    #[must_use]
    fn to_toml(&self) -> String {
        let Ok(toml::Value::Table(table)) = toml::Value::try_from(self) else {
            unreachable!("settings are plain values");
        };
        let mut text = String::new();
        for setting in Self::DOCS {
            let name = setting.name();
            text += &format!("# {}.\n{name} = {}\n\n", setting.help, table[&name]);
        }
        text.truncate(text.trim_end().len());
        text.push('\n');
        text
    }
}

/// Settings of one source from a TOML file.
///
/// # Errors
/// [`SettingsError`].
pub fn from_file<G: DeserializeOwned>(path: &Path) -> Result<G, SettingsError> {
    let text = std::fs::read_to_string(path).map_err(|source| SettingsError::Unreadable {
        path: path.to_owned(),
        source,
    })?;
    from_text(path, &text)
}

/// Settings of a text in the form of a settings file, which has this name in errors.
///
/// # Errors
/// [`SettingsError::Wrong`].
pub fn from_text<G: DeserializeOwned>(name: &Path, text: &str) -> Result<G, SettingsError> {
    toml::from_str(text).map_err(|error: toml::de::Error| SettingsError::Wrong {
        path: name.to_owned(),
        reason: reason_of(&error, text),
    })
}

/// What the parser says and where, without the line itself: it may have a password.
fn reason_of(error: &toml::de::Error, text: &str) -> String {
    let told = without_secrets(error.message());
    let before = error.span().and_then(|span| text.get(..span.start));
    match before {
        Some(before) => {
            let line = before.matches('\n').count() + 1;
            let last = before.rsplit('\n').next().unwrap_or_default();
            let column = last.chars().count() + 1;
            format!("line {line}, column {column}: {told}")
        }
        None => told,
    }
}

/// A message in which serde quotes a value that it did not expect, without that value if it may be secret.
fn without_secrets(message: &str) -> String {
    for quote in ['"', '`'] {
        if let Some((head, rest)) = message.split_once(quote)
            && let Some((quoted, tail)) = rest.rsplit_once(quote)
            && is_of_serde(head)
            && may_be_secret(quoted)
        {
            return format!("{head}{quote}…{quote}{tail}");
        }
    }
    message.to_owned()
}

fn is_of_serde(head: &str) -> bool {
    head.starts_with("invalid ") || head.starts_with("unknown ")
}

macro_rules! settings {
    (
        $(#[doc = $about:literal])*
        $settings:ident, $given:ident;
        $(
            #[doc = $help:literal]
            $field:ident : $type:ty = $default:literal
        ),* $(,)?
    ) => {
        $(#[doc = $about])*
        #[derive(Clone, PartialEq, Eq, Debug, Serialize)]
        #[serde(rename_all = "kebab-case")]
        pub struct $settings {
            $( #[doc = $help] pub $field: $type, )*
        }

        /// Settings as one source gives them: flags or a file.
        #[derive(Clone, PartialEq, Eq, Default, Debug, Args, Deserialize)]
        #[serde(rename_all = "kebab-case", deny_unknown_fields)]
        pub struct $given {
            $(
                #[doc = $help]
                #[arg(long, help = concat!($help, " [default: ", $default, "]"))]
                pub $field: Option<$type>,
            )*
        }

        impl Settings for $settings {
            type Given = $given;
            const DOCS: &'static [SettingDoc] = &[$(
                SettingDoc {
                    field: stringify!($field),
                    default: $default,
                    help: $help.trim_ascii(),
                },
            )*];

            fn merge(flags: $given, file: $given) -> Self {
                Self { $(
                    $field: flags.$field.or(file.$field).unwrap_or_else(|| by_default($default)),
                )* }
            }

            fn state_dir(&self) -> &Path {
                &self.state_dir
            }

            fn api_path(&self) -> PathBuf {
                self.state_dir.join(&self.api)
            }

            fn log(&self) -> (LogFormat, &str) {
                (self.log, &self.log_filter)
            }
        }

        impl $settings {
            /// The engines of the DPU in this process.
            #[must_use]
            pub fn engines(&self) -> EngineSettings {
                EngineSettings {
                    count: self.engines,
                    cpus: self.engine_cpus.clone(),
                    poll_us: self.engine_poll_us,
                    iopf_timeout_ms: self.iopf_timeout_ms,
                }
            }
        }
    };
}

settings! {
    /// Settings of a daemon.
    RunSettings, GivenSettings;
    /// Directory of pools, locks and the API socket; must be on tmpfs, is made with mode 0700
    state_dir: PathBuf = "/dev/shm/pagetide",
    /// Socket of the API; a relative path lies in the state directory
    api: PathBuf = "api.sock",
    /// Where the software DPU is: in-process, or the VPRI socket of a `pagetide dpu` process
    dpu: DpuPlace = "in-process",
    /// Threads of the software DPU that serve device queues
    engines: Count = "1",
    /// CPUs of the engines, such as 0,2-5, one engine on each in turn; any leaves it to the kernel
    engine_cpus: CpuList = "any",
    /// Microseconds an idle engine polls its queues before it sleeps
    engine_poll_us: u32 = "50",
    /// Milliseconds a device's request waits for its pages before it fails with an I/O error; 0 waits for ever
    iopf_timeout_ms: u32 = "30000",
    /// Where I/O page faults are handled: affined to the CPUs of the VM that faulted, or, for comparison, serialized by one thread for all
    iopf_handling: IopfHandling = "affined",
    /// Who serves an I/O page fault while its engine is idle, and pays for it: the engine, which takes no wake-up and holds up its other devices for that time, or the CPUs of the VM that faulted
    iopf_payer: IopfPayer = "engine",
    /// How the threads that handle I/O page faults preempt vCPUs: fifo (SCHED_FIFO, where allowed), nice (niceness -20), or off
    iopf_preempt: IopfPreempt = "fifo",
    /// Microseconds a VM's fault reader polls before it sleeps, on a CPU of its own; 0 sleeps at once, on the CPU of the vCPU that faults
    reader_poll_us: u32 = "0",
    /// Most pages that a vCPU's fault reads ahead when it reads in sequence, or when many pages around it are being swapped in, at most 16; 0 for none
    neighbours: u32 = "16",
    /// Threads that evict from one VM at a time, at most 16; 0 for a quarter of the CPUs, four at most
    evict_threads: u32 = "0",
    /// Most memory that the pools of all VMs may take together, such as 8G, or none; what `pagetide pool cap` has set holds instead
    pool_max: PoolMax = "none",
    /// Where evicted pages are kept, in order: zero and same (pages of one repeated word, which take no room), lz4, zstd, to which pages go that stay cold, disk:/PATH, a file or block device of this host to which, sealed, those go that stay cold still longer, and remote:redis://HOST:PORT=SIZE, a Redis or Valkey server of another host, likewise (disk and remote in either order); lz4, zstd and disk may have a limit on what they hold of all VMs, such as lz4=8G or disk:/PATH=64G, and remote must
    tiers: TierList = "zero,same,lz4,zstd",
    /// How long a section of a VM must be left alone until its stored pages are packed anew for the tier zstd, such as 30s, 10min or 2h
    demote_after: DemoteAfter = "10min",
    /// How long a section of a VM must be left alone until its stored pages go from memory to disk or to another host, such as 30s, 10min or 2h; while there is no room in memory, the oldest go at once
    sink_after: DemoteAfter = "30min",
    /// What becomes of a page that is needed while its disk is gone: wait (the fault waits until the disk is back) or lost (accesses to the page fail from then on)
    disk_when_gone: WhenGoneChoice = "wait",
    /// What becomes of a page that is needed while the server of the tier remote is gone, or that the server has lost: wait (the fault waits until the page is there again) or lost (accesses to the page fail from then on)
    remote_when_gone: WhenGoneChoice = "wait",
    /// How hot memory is found: unmap (pages are unmapped; those that are touched are mapped again), idle (the kernel's idle page tracking, which it must have), whole (all pages are unmapped at each scan, which slows a busy guest down; for comparison), or auto for the cheapest that the kernel has
    tracker: TrackerChoice = "auto",
    /// Most that finding its hot memory may cost a VM: share of the CPU time of its VMM, and as much of a CPU of the daemon's
    tracker_cost: Percent = "0.5%",
    /// How long a section of a VM stays in each of the sets between hot and cold: quick (known within a minute), paper (ten minutes from hot to cold), or either with other times, such as paper:scan=30s,hot=5min,warm=2min,active=2min,inactive=2min,cool=1min; scan is the time between two scans while cold memory is wanted
    set_times: SetTimes = "quick",
    /// Whether a vCPU's or device's fault has the rest of its 2 MiB section swapped in by background work, as far as the limit leaves room: on or off
    swap_in_together: Switch = "off",
    /// The most that resident memory and pools of all VMs may take together, or off. What was set while the daemon ran is kept over its restarts, until one of the settings of the budget is changed
    host_budget: BudgetSetting = "off",
    /// Free below this, a page that is swapped in first has others of its VM evicted: a share of the budget, or a size
    budget_min: Amount = "1%",
    /// Free below this, memory is reclaimed until budget-high is free
    budget_low: Amount = "2%",
    /// From this on there is enough free memory of the budget
    budget_high: Amount = "4%",
    /// Between budget-low and budget-high, cold memory of all VMs is reclaimed at so many bytes a second; 0: not
    budget_pace: ByteSize = "64M",
    /// File locked by the one daemon of a host that has a budget. Another path is for hosts that are parts of one, such as containers with memory of their own
    budget_lock: PathBuf = "/run/pagetide/budget.lock",
    /// Policy that keeps sections which devices are about to touch from being evicted, of VMs attached from now on: none, lru or adp, with parameters such as adp:promote-after=120s
    dma_protector: ProtectorChoice = "none",
    /// Most records of the access log that are examined in a second; engines drop the others. While accesses are recorded, all are examined, whatever this is
    access_log_rate: u32 = "100000",
    /// Shares of the CPU time of a cycle by class, in order of priority, together at most 100%; those that are not named have their defaults. This and the other settings of the scheduler can be changed by `pagetide host scheduler`, and what was changed holds until that resets it
    scheduler_shares: ShareList = "vcpu-faults=40%,io-faults=20%,reclaim=25%,scan=10%,background=5%",
    /// Microseconds of a cycle of the scheduler of background work, 1000 to 10000000
    scheduler_cycle_us: u64 = "50000",
    /// Most CPU time in microseconds that background work uses at a time, 100 to the length of a cycle
    scheduler_longest_run_us: u64 = "2000",
    /// For how long background work that used more than that is granted nothing, in percent of the excess; at most 1000
    scheduler_penalty_percent: u32 = "100",
    /// What becomes of CPU time that no class of work is entitled to: lent to any, or unused
    scheduler_idle_time: IdleTimeChoice = "lent",
    /// CPUs on which background work (reclaim, scans) may run, such as 0,2-5; any for all that the daemon may use
    background_cpus: CpuList = "any",
    /// Milliseconds that the program of a live upgrade may take to check itself before it takes over
    upgrade_ready_ms: u32 = "10000",
    /// Milliseconds that it may take to recover and serve everything; after that the old program goes on. A host with very large VMs needs more
    upgrade_serving_ms: u32 = "5000",
    /// Form of the log on stderr: text or json
    log: LogFormat = "text",
    /// What is logged, in the syntax of tracing's EnvFilter
    log_filter: String = "info",
}

settings! {
    /// Settings of a DPU process.
    DpuSettings, GivenDpuSettings;
    /// Directory of locks, the list of devices and the sockets; made with mode 0700
    state_dir: PathBuf = "/dev/shm/pagetide-dpu",
    /// Socket of the API; a relative path lies in the state directory
    api: PathBuf = "api.sock",
    /// Socket of the VPRI function, to which the daemon connects; a relative path lies in the state directory
    vpri: PathBuf = "vpri.sock",
    /// Threads that serve device queues
    engines: Count = "1",
    /// CPUs of the engines, such as 0,2-5, one engine on each in turn; any leaves it to the kernel
    engine_cpus: CpuList = "any",
    /// Microseconds an idle engine polls its queues before it sleeps
    engine_poll_us: u32 = "50",
    /// Milliseconds a device's request waits for its pages before it fails with an I/O error; 0 waits for ever
    iopf_timeout_ms: u32 = "30000",
    /// Form of the log on stderr: text or json
    log: LogFormat = "text",
    /// What is logged, in the syntax of tracing's EnvFilter
    log_filter: String = "info",
}

/// Where the software DPU of a daemon is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub enum DpuPlace {
    /// In the daemon.
    InProcess,
    /// In the process that listens there.
    Socket(PathBuf),
}

const IN_PROCESS: &str = "in-process";

impl std::str::FromStr for DpuPlace {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            IN_PROCESS => Ok(Self::InProcess),
            path if Path::new(path).is_absolute() => Ok(Self::Socket(path.into())),
            other => Err(format!(
                "'{other}' is neither {IN_PROCESS} nor the absolute path of a socket"
            )),
        }
    }
}

impl TryFrom<String> for DpuPlace {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DpuPlace> for String {
    fn from(place: DpuPlace) -> Self {
        match place {
            DpuPlace::InProcess => IN_PROCESS.to_owned(),
            DpuPlace::Socket(path) => path.display().to_string(),
        }
    }
}

/// A number of threads: 1 to 256.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "u32", into = "u32")]
pub struct Count(u32);

/// More threads than any host of today has CPUs to run.
const COUNT_MAX: u32 = 256;

impl Count {
    /// The number.
    #[must_use]
    pub const fn get(self) -> usize {
        self.0 as usize
    }
}

impl TryFrom<u32> for Count {
    type Error = String;

    fn try_from(number: u32) -> Result<Self, String> {
        if (1..=COUNT_MAX).contains(&number) {
            Ok(Self(number))
        } else {
            Err(format!("{number} is not between 1 and {COUNT_MAX}"))
        }
    }
}

impl From<Count> for u32 {
    fn from(count: Count) -> Self {
        count.0
    }
}

impl std::str::FromStr for Count {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let number: u32 = text
            .parse()
            .map_err(|_| format!("'{text}' is not a number between 1 and {COUNT_MAX}"))?;
        Self::try_from(number)
    }
}

/// Choices that are read as they are written on the command line.
macro_rules! read_by_name {
    ($($choice:ty),+) => {$(
        impl std::str::FromStr for $choice {
            type Err = String;

            fn from_str(text: &str) -> Result<Self, String> {
                <Self as ValueEnum>::from_str(text, false)
            }
        }
    )+};
}

read_by_name!(
    Switch,
    LogFormat,
    IopfHandling,
    IopfPayer,
    TrackerChoice,
    IopfPreempt
);

/// Reads a default; a test reads them all, so a wrong one never ships.
fn by_default<T: std::str::FromStr>(written: &str) -> T {
    let Ok(value) = written.parse() else {
        unreachable!("the default '{written}' of a setting does not parse");
    };
    value
}

/// The engines of a software DPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EngineSettings {
    /// Threads.
    pub count: Count,
    /// Where they run.
    pub cpus: CpuList,
    /// Microseconds an idle one polls before it sleeps.
    pub poll_us: u32,
    /// Milliseconds a request waits for its pages; 0 for ever.
    pub iopf_timeout_ms: u32,
}

impl DpuSettings {
    /// Path of the VPRI function's socket.
    #[must_use]
    pub fn vpri_path(&self) -> PathBuf {
        self.state_dir.join(&self.vpri)
    }
}

/// The page `docs/settings.md`.
#[must_use]
pub fn settings_page() -> String {
    let mut page = String::from(
        "# Settings\n\n\
         Made from `crates/daemon/src/settings.rs`; do not edit.\n\n\
         Each is a flag (`--NAME VALUE`) and a key of the TOML file given by `--config`. A flag\n\
         wins over the file, the file over the default. A key that is no setting is an error.\n\
         `--print-settings` prints the settings in force as such a file.\n",
    );
    page += &table_of("pagetide run", RunSettings::DOCS);
    page += &table_of("pagetide dpu", DpuSettings::DOCS);
    page
}

fn table_of(command: &str, settings: &[SettingDoc]) -> String {
    let mut table = format!("\n## `{command}`\n\n| name | default | meaning |\n|---|---|---|\n");
    for setting in settings {
        table += &format!(
            "| `{}` | `{}` | {} |\n",
            setting.name(),
            setting.default,
            setting.help
        );
    }
    table
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(text: &str) -> Result<GivenSettings, SettingsError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("pagetide.toml");
        std::fs::write(&path, text).unwrap();
        from_file(&path)
    }

    #[test]
    fn flag_wins_over_file_and_file_over_default() {
        let flags = GivenSettings {
            engines: Some(Count(3)),
            ..GivenSettings::default()
        };
        let given = file("engines = 2\nlog = \"json\"\n").unwrap();
        let settings = RunSettings::merge(flags, given);
        assert_eq!(settings.engines, Count(3));
        assert_eq!(settings.log, LogFormat::Json);
        assert_eq!(settings.state_dir, Path::new("/dev/shm/pagetide"));
    }

    #[test]
    fn key_that_is_no_setting_is_an_error_that_names_it() {
        let error = file("engine-pol-us = 2\n").unwrap_err().to_string();
        assert!(error.contains("engine-pol-us"), "{error}");
        assert!(error.contains("pagetide.toml"), "{error}");
    }

    #[test]
    fn value_of_wrong_type_or_out_of_range_is_an_error_with_its_line() {
        for text in [
            "engines = \"two\"",
            "engines = 0",
            "engine-poll-us = -1",
            "set-times = \"paper:hot=0s\"",
            "swap-in-together = \"yes\"",
        ] {
            let error = file(text).unwrap_err().to_string();
            assert!(error.contains("line 1"), "{error}");
        }
    }

    #[test]
    fn file_that_is_not_there_is_an_error_that_names_it() {
        let error = from_file::<GivenSettings>(Path::new("/nowhere/x.toml")).unwrap_err();
        assert!(error.to_string().contains("/nowhere/x.toml"));
    }

    #[test]
    fn printed_settings_read_back_as_the_same() {
        let settings = RunSettings::merge(GivenSettings::default(), GivenSettings::default());
        let read = file(&settings.to_toml()).unwrap();
        assert_eq!(
            RunSettings::merge(GivenSettings::default(), read),
            settings,
            "{}",
            settings.to_toml()
        );
    }

    #[test]
    fn relative_api_path_lies_in_the_state_directory() {
        let mut settings = RunSettings::merge(GivenSettings::default(), GivenSettings::default());
        assert_eq!(settings.api_path(), Path::new("/dev/shm/pagetide/api.sock"));
        settings.api = PathBuf::from("/run/x.sock");
        assert_eq!(settings.api_path(), Path::new("/run/x.sock"));
    }
}
