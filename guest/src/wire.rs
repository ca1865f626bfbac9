// SPDX-License-Identifier: Apache-2.0
//! The lines that guest and host exchange over the second serial port.
//!
//! Upwards each line is [`PREFIX`] and one JSON object, downwards each line is
//! one word of [`Command`]. A line that does not begin with the prefix is noise
//! (a kernel may print there when it dies) and is kept for a failure's report.

use serde::{Deserialize, Serialize};

/// Prefix of every line from the guest to the host.
pub const PREFIX: &str = "PT ";

/// The phase of the guest's work.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Memory and disk receive their first content.
    #[default]
    Fill,
    /// Both loops verify and rewrite.
    Work,
    /// After the stop command: everything is verified a last time.
    Final,
    /// Everything was verified a last time; power goes off next.
    Done,
}

/// All counters of a guest, since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// The phase of the work.
    pub phase: Phase,
    /// Bytes of anonymous memory under work now.
    pub memory_bytes: u64,
    /// Bytes of the disk under work; 0 without a disk.
    pub disk_bytes: u64,
    /// Bytes of memory read and compared.
    pub memory_bytes_verified: u64,
    /// Bytes of disk read and compared.
    pub disk_bytes_verified: u64,
    /// Pages of memory with wrong content.
    pub memory_errors: u64,
    /// Blocks of disk with wrong content, and failed reads, writes and flushes.
    pub disk_errors: u64,
    /// Complete sweeps over memory.
    pub memory_rounds: u64,
    /// Complete cycles over the disk.
    pub disk_rounds: u64,
    /// Bytes of memory compared by the last verification.
    pub final_memory_bytes: u64,
    /// Bytes of disk compared by the last verification.
    pub final_disk_bytes: u64,
    /// Bytes of the memory under work that lie in RAM that was plugged in.
    pub memory_plugged_bytes: u64,
    /// Bytes of disk read and written so far, past the page cache, with buffers in such RAM.
    pub disk_plugged_bytes: u64,
}

/// Prefix of every line of a soak for the host.
pub const SOAK_PREFIX: &str = "SK ";

/// The counters of a guest that soaks, since its start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SoakProgress {
    /// The phase of the work.
    pub phase: Phase,
    /// Wrong bytes, found by any load.
    pub wrong_bytes: u64,
    /// Reads, writes and file operations that failed, and lines about such in the kernel's log.
    pub io_errors: u64,
    /// Longest time between two writes of the heartbeat to the disk.
    pub longest_disk_gap_ms: u64,
    /// Longest time between two touches of the heartbeat's memory.
    pub longest_memory_gap_ms: u64,
    /// Beats of both heartbeats.
    pub beats: u64,
    /// Bytes that fio wrote and read back.
    pub fio_bytes: u64,
    /// Values written to redis and read from it.
    pub redis_operations: u64,
    /// Times redis was killed and had kept everything it had confirmed.
    pub redis_restarts: u64,
    /// File trees made, verified and deleted.
    pub trees: u64,
    /// Operations of stress-ng's vm workers, all verified.
    pub stress_ng_bogo_ops: u64,
    /// Bytes of patterned memory compared.
    pub memory_bytes_verified: u64,
    /// Pages that went to swap and came from it.
    pub swapped_pages: u64,
}

/// The progress of a soak in a line, or `None` if it has none.
#[must_use]
pub fn parse_soak_progress(line: &str) -> Option<SoakProgress> {
    let json = line.trim().strip_prefix(SOAK_PREFIX)?;
    serde_json::from_str(json).ok()
}

/// The line with the progress of a soak, without its line end.
///
/// # Errors
/// Never in practice: all fields are numbers and names.
pub fn soak_progress_line(progress: &SoakProgress) -> Result<String, serde_json::Error> {
    Ok(format!("{SOAK_PREFIX}{}", serde_json::to_string(progress)?))
}

/// A command from the host.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Command {
    /// Answer with a [`Progress`] line now.
    Status,
    /// Verify everything once more, report and power off.
    Stop,
    /// Pause both loops.
    Quiet,
    /// Go on after [`Command::Quiet`].
    Go,
    /// Free half of the memory under work.
    Give,
    /// Allocate that half again, and fill it anew.
    Take,
}

impl Command {
    /// All of them.
    pub const ALL: [Self; 6] = [
        Self::Status,
        Self::Stop,
        Self::Quiet,
        Self::Go,
        Self::Give,
        Self::Take,
    ];

    /// The command's word.
    #[must_use]
    pub const fn word(self) -> &'static str {
        match self {
            Self::Status => "status",
            Self::Stop => "stop",
            Self::Quiet => "quiet",
            Self::Go => "go",
            Self::Give => "give",
            Self::Take => "take",
        }
    }

    /// The command in a line, or `None` if it is no command.
    #[must_use]
    pub fn parse(line: &str) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|command| command.word() == line.trim())
    }
}

/// The progress in a line, or `None` if the line is noise.
#[must_use]
pub fn parse_progress(line: &str) -> Option<Progress> {
    let json = line.trim().strip_prefix(PREFIX)?;
    serde_json::from_str(json).ok()
}

/// The line with `progress`, without its line end.
///
/// # Errors
/// Never in practice: all fields are numbers and names.
pub fn progress_line(progress: &Progress) -> Result<String, serde_json::Error> {
    Ok(format!("{PREFIX}{}", serde_json::to_string(progress)?))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_line_parsed_again_is_the_same_progress() {
        let progress = Progress {
            phase: Phase::Work,
            memory_errors: 3,
            disk_bytes_verified: 1 << 40,
            ..Progress::default()
        };
        let line = progress_line(&progress).expect("numbers and names serialize");
        assert_eq!(parse_progress(&line), Some(progress));
    }

    #[test]
    fn soaks_line_parsed_again_is_the_same_progress_and_no_other_kind() {
        let progress = SoakProgress {
            wrong_bytes: 7,
            ..SoakProgress::default()
        };
        let line = soak_progress_line(&progress).expect("numbers and names serialize");
        assert_eq!(parse_soak_progress(&line), Some(progress));
        assert_eq!(parse_progress(&line), None);
    }

    #[test]
    fn noise_and_torn_lines_are_no_progress() {
        assert_eq!(parse_progress("[   1.0] kernel says"), None);
        assert_eq!(parse_progress("PT {\"phase\":\"wo"), None);
    }

    #[test]
    fn every_command_word_parses_back() {
        for command in Command::ALL {
            assert_eq!(
                Command::parse(&format!("{}\r\n", command.word())),
                Some(command)
            );
        }
        assert_eq!(Command::parse("reboot"), None);
    }
}
