// SPDX-License-Identifier: Apache-2.0
//! Other tenants of the same daemon, with their own devices, which misbehave.
//!
//! Each attacker has a device and makes one attack of [`crate::hostile`] on it after the other, holding its
//! resources for a while. The outcome of an attack is not checked: what matters is that the guest, whose
//! disk is in the same daemon, makes progress.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use pagetide_random::SplitMix64;

use super::stand::Stand;
use super::{Board, Options, SoakError, file_error};
use crate::hostile::{Attack, Failure, Held, Target, attacks};

/// Devices that are attacked; the rest of the tenants' devices come and go.
const ATTACKED: usize = 2;
/// Pause between two attacks.
const REST_MS: (u64, u64) = (100, 900);
/// How long an attacker holds its resources.
const HOLD_MS: (u64, u64) = (0, 1_500);

/// A tenant that attacks its own device.
pub struct Attacker {
    target: Target,
    attacks: Vec<Attack>,
    random: SplitMix64,
}

/// One for each device that is attacked.
///
/// # Errors
/// A folder for their files cannot be made.
pub fn attackers(stand: &Stand, options: &Options) -> Result<Vec<Attacker>, SoakError> {
    let mut attackers = Vec::new();
    for (number, device) in stand.tenants.iter().take(ATTACKED).enumerate() {
        let folder = folder(stand.folder(), number)?;
        attackers.push(Attacker {
            target: Target {
                socket: device.socket.clone(),
                folder,
            },
            attacks: chosen(&options.attacks),
            random: SplitMix64::stream(options.seed, 100 + number as u64),
        });
    }
    Ok(attackers)
}

/// Attacks that suit any device, with `part` in their name.
fn chosen(part: &str) -> Vec<Attack> {
    let mut attacks = attacks();
    attacks.retain(|attack| attack.options.is_empty() && attack.name.contains(part));
    attacks
}

fn folder(run_folder: &Path, number: usize) -> Result<PathBuf, SoakError> {
    let folder = run_folder.join(format!("attacker{number}"));
    fs::create_dir_all(&folder).map_err(|source| file_error(&folder, source))?;
    Ok(folder)
}

impl Attacker {
    /// Attacks until the soak is over.
    pub fn run(&self, board: &Board) {
        let mut random = self.random.clone();
        while !board.is_over() && !self.attacks.is_empty() {
            let choice = random.index(self.attacks.len());
            let attack = &self.attacks[choice];
            let held = attack.run(&self.target);
            if was_made(&held) {
                board.count_attack(&attack.name);
            }
            board.rest(Duration::from_millis(random.between(HOLD_MS.0, HOLD_MS.1)));
            drop(held);
            board.rest(Duration::from_millis(random.between(REST_MS.0, REST_MS.1)));
        }
    }
}

/// Whether there was a device to attack: the daemon may be down, or the machine may lack something.
fn was_made(held: &Result<Held, Failure>) -> bool {
    match held {
        Err(Failure::Kernel { step, .. }) => step != "connecting",
        Err(Failure::NotHere(_)) => false,
        _ => true,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attacks_are_chosen_by_a_part_of_their_name() {
        assert!(chosen("").len() > 50);
        let headers = chosen("header-");
        assert!(!headers.is_empty());
        assert!(headers.iter().all(|attack| attack.name.contains("header-")));
        assert!(chosen("no such attack").is_empty());
    }
}
