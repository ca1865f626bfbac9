// SPDX-License-Identifier: Apache-2.0
//! [`SavedFile`]: what was set, in the state directory, so that it survives the daemon.
//!
//! The file is replaced as a whole before what it says is in force. A daemon that dies in between has
//! changed nothing that anybody was told of, and its successor goes on with what the file says.
//!
//! The settings with which the daemon was started are in it, too. They hold once: what is set while the
//! daemon runs stands beside them, and holds until the settings themselves are changed.

use super::super::failure::failed;
use crate::{
    budget::{Amount, BudgetSetting},
    control::ControlError,
    settings::RunSettings,
};
use pagetide_policy::budget::{Bytes, Mark, Permille, Plan, Rate, VmShare, Watermarks};
use pagetide_report::size::ByteSize;
use serde::{Deserialize, Serialize};
use std::{
    collections::BTreeMap,
    fs::{File, OpenOptions},
    io::{self, Write},
    os::unix::fs::OpenOptionsExt,
    path::{Path, PathBuf},
};

/// Version of the file's form.
const VERSION: u32 = 1;
const NAME: &str = "budget.json";

/// The settings of the budget.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Given {
    budget: BudgetSetting,
    min: Amount,
    low: Amount,
    high: Amount,
    pace: ByteSize,
}

impl Given {
    pub(super) fn of(settings: &RunSettings) -> Self {
        Self {
            budget: settings.host_budget,
            min: settings.budget_min,
            low: settings.budget_low,
            high: settings.budget_high,
            pace: settings.budget_pace,
        }
    }

    /// The plan that they make; `None` without a budget.
    pub(super) fn plan(&self) -> Option<Plan> {
        match self.budget {
            BudgetSetting::Off => None,
            BudgetSetting::Size(ByteSize(bytes)) => Some(self.plan_of(Bytes(bytes))),
        }
    }

    /// A plan for a budget set by command, with their watermarks.
    pub(super) fn plan_of(&self, budget: Bytes) -> Plan {
        let mut plan = Plan::new(budget);
        plan.watermarks = Watermarks {
            min: mark(self.min),
            low: mark(self.low),
            high: mark(self.high),
        };
        plan.tuning.pace = Rate(Bytes(self.pace.0));
        plan
    }
}

/// An amount as the policy has it.
pub(super) fn mark(amount: Amount) -> Mark {
    match amount {
        Amount::Permille(share) => Mark::Permille(Permille(share)),
        Amount::Bytes(ByteSize(bytes)) => Mark::Bytes(Bytes(bytes)),
    }
}

/// All that is set.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub(super) struct Saved {
    version: u32,
    given: Given,
    /// The budget; `None` without one.
    pub(super) plan: Option<Plan>,
    /// What each VM may have, by its name.
    pub(super) vms: BTreeMap<String, VmShare>,
}

impl Saved {
    /// What holds at the start: what was set before, unless the settings are others by now.
    pub(super) fn at_start(before: Option<Self>, given: Given) -> Self {
        match before {
            Some(before) if before.given == given => before,
            before => Self {
                version: VERSION,
                given,
                plan: given.plan(),
                vms: before.map(|before| before.vms).unwrap_or_default(),
            },
        }
    }

    /// The same with another budget, or none.
    pub(super) fn with_plan(&self, plan: Option<Plan>) -> Self {
        Self {
            plan,
            ..self.clone()
        }
    }

    /// True if the settings alone would have no budget: it was set by command.
    pub(super) fn is_by_command(&self) -> bool {
        self.plan.is_some() && self.given.plan().is_none()
    }

    /// The settings that the daemon was started with.
    pub(super) fn given(&self) -> &Given {
        &self.given
    }
}

/// See the module.
#[derive(Debug)]
pub(super) struct SavedFile {
    pub(super) path: PathBuf,
}

impl SavedFile {
    pub(super) fn in_dir(state_dir: &Path) -> Self {
        Self {
            path: state_dir.join(NAME),
        }
    }

    /// What it says; `None` if there is none.
    ///
    /// # Errors
    /// It cannot be read, or is not such a file.
    pub(super) fn read(&self) -> Result<Option<Saved>, ControlError> {
        let bytes = match std::fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => {
                return Err(failed(format!(
                    "cannot read {}: {error}",
                    self.path.display()
                )));
            }
        };
        let unreadable = |why: String| {
            ControlError::refused(format!(
                "{} has what was set of the host's budget, and cannot be read: {why}; remove it to begin with the \
                 settings",
                self.path.display()
            ))
        };
        let saved: Saved =
            serde_json::from_slice(&bytes).map_err(|error| unreadable(error.to_string()))?;
        match saved.version {
            VERSION => Ok(Some(saved)),
            other => Err(unreadable(format!(
                "it has version {other}, and this program reads {VERSION}"
            ))),
        }
    }

    /// Puts a file that cannot be read out of the way, for a person to look at.
    pub(super) fn set_aside(&self) {
        let aside = self.path.with_extension("json.unreadable");
        match std::fs::rename(&self.path, &aside) {
            Ok(()) => tracing::warn!(path = %aside.display(), "the file is kept under this name"),
            Err(error) => tracing::warn!(%error, "the file cannot be renamed"),
        }
    }

    /// Replaces it. There is none if it would say no more than the settings do.
    ///
    /// # Errors
    /// It says what it said before.
    pub(super) fn write(&self, saved: &Saved) -> Result<(), ControlError> {
        let json = serde_json::to_vec_pretty(saved).map_err(failed)?;
        let next = self.path.with_extension("json.new");
        let written = if *saved == Saved::at_start(None, saved.given) {
            remove_if_there(&self.path)
        } else {
            write_new(&next, &json).and_then(|()| std::fs::rename(&next, &self.path))
        };
        written.map_err(|error| {
            failed(format!(
                "what was set could not be written to {}, so nothing has changed: {error}",
                self.path.display()
            ))
        })
    }
}

fn remove_if_there(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn write_new(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file: File = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn given(budget: &str) -> Given {
        Given {
            budget: budget.parse().unwrap(),
            min: "1%".parse().unwrap(),
            low: "2%".parse().unwrap(),
            high: "64M".parse().unwrap(),
            pace: ByteSize(5),
        }
    }

    #[test]
    fn what_was_set_is_read_back_and_holds_until_the_settings_change() {
        let dir = tempfile::tempdir().unwrap();
        let file = SavedFile::in_dir(dir.path());
        assert_eq!(file.read().unwrap(), None);
        let mut saved = Saved::at_start(None, given("off"));
        assert_eq!(saved.plan, None);
        saved.plan = Some(saved.given().plan_of(Bytes::gib(48)));
        let share = VmShare {
            floor: Bytes::gib(1),
            ..VmShare::default()
        };
        saved.vms.insert("a".into(), share);
        file.write(&saved).unwrap();
        let read = file.read().unwrap();
        assert_eq!(read.as_ref(), Some(&saved));
        assert_eq!(Saved::at_start(read.clone(), given("off")), saved);
        let other = Saved::at_start(read, given("4G"));
        let plan = other.plan.unwrap();
        assert_eq!(plan.budget, Bytes::gib(4));
        assert_eq!(plan.watermarks.high, Mark::Bytes(Bytes::mib(64)));
        assert_eq!(plan.tuning.pace, Rate(Bytes(5)));
        assert_eq!(
            other.vms["a"], share,
            "shares are no settings of the daemon"
        );
    }

    #[test]
    fn file_of_another_form_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = SavedFile::in_dir(dir.path());
        let saved = Saved::at_start(None, given("off"));
        let newer = Saved {
            version: 2,
            ..saved
        };
        for bytes in [b"{}".to_vec(), serde_json::to_vec(&newer).unwrap()] {
            std::fs::write(&file.path, bytes).unwrap();
            let error = file.read().unwrap_err();
            assert!(error.message.contains("budget.json"), "{error}");
        }
    }

    #[test]
    fn write_that_fails_leaves_what_was_there() {
        let dir = tempfile::tempdir().unwrap();
        let file = SavedFile::in_dir(dir.path());
        let saved = Saved::at_start(None, given("1G")).with_plan(None);
        file.write(&saved).unwrap();
        // A directory in the place of the new file: it cannot be made, whoever runs this.
        std::fs::create_dir(dir.path().join("budget.json.new")).unwrap();
        let other = saved.with_plan(Some(saved.given().plan_of(Bytes::gib(2))));
        let error = file.write(&other).unwrap_err();
        assert!(error.message.contains("nothing has changed"), "{error}");
        assert_eq!(file.read().unwrap(), Some(saved.clone()));
        // What the settings say by themselves needs no file.
        file.write(&Saved::at_start(None, given("1G"))).unwrap();
        assert_eq!(file.read().unwrap(), None);
        file.write(&Saved::at_start(None, given("1G"))).unwrap();
    }
}
