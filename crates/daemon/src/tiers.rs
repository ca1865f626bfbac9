// SPDX-License-Identifier: Apache-2.0
//! The settings `tiers`, `demote-after`, `sink-after` and `disk-when-gone`: where pages are kept, and in
//! which forms.
//!
//! ```text
//!   zero,same,lz4=8G,zstd,disk:/path=64G
//!   ─────────  ──────  ─── ──────────────
//!   always     where   where they go that stay cold, and still colder
//!   there      most
//!              enter
//! ```
//! A limit is on what the tier holds of all VMs. A page that finds no room in a tier enters at the next of
//! those in memory. Pages go to a disk from the pool only, so that no eviction waits for it.

use pagetide_policy::{demotion::AFTER_MIN, protect::parameters::Field};
use pagetide_report::size::ByteSize;
use pagetide_swap::{
    slow::WhenGone,
    store::{PoolTiers, RESUME_BYTES, ZstdTier},
};
use serde::{Deserialize, Serialize};
use std::{path::PathBuf, str::FromStr, sync::Arc, time::Duration};

const ZERO: &str = "zero";
const SAME: &str = "same";
const LZ4: &str = "lz4";
const ZSTD: &str = "zstd";
const DISK: &str = "disk";
/// All of them, in their order.
const NAMES: [&str; 5] = [ZERO, SAME, LZ4, ZSTD, DISK];
const ALLOWED: &str = "zero,same,lz4,zstd,disk:/PATH in this order, lz4, zstd and disk with a limit if you like, \
                       such as lz4=8G";
/// Least limit of a tier: with less than a full store needs to take content again it would never do so.
const LIMIT_BYTES_MIN: u64 = RESUME_BYTES;
/// Longest time for which a section ages.
const AFTER_MAX: Duration = Duration::from_secs(7 * 24 * 3600);

/// A disk as a tier.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct DiskSetting {
    /// The file or block device.
    pub path: PathBuf,
    /// Most that it may hold; `None` for what there is.
    pub limit_bytes: Option<u64>,
}

/// The setting `tiers`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TierList {
    lz4_limit_bytes: Option<u64>,
    zstd: ZstdTier,
    disk: Option<DiskSetting>,
}

impl TierList {
    /// The tiers in memory, with nothing in them.
    #[must_use]
    pub fn open(&self) -> Arc<PoolTiers> {
        PoolTiers::new(self.lz4_limit_bytes, self.zstd)
    }

    /// The disk, if there is one.
    #[must_use]
    pub const fn disk(&self) -> Option<&DiskSetting> {
        self.disk.as_ref()
    }
}

impl FromStr for TierList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: String| format!("{why}; write {ALLOWED}");
        let mut list = Self {
            lz4_limit_bytes: None,
            zstd: ZstdTier::Off,
            disk: None,
        };
        // Place in the order after the last one named.
        let mut next = 0;
        let mut has_lz4 = false;
        for item in text.split(',').map(str::trim) {
            // The last one: a path may have others.
            let (name, limit) = match item.rsplit_once('=') {
                Some((name, limit)) => (name.trim(), Some(limit.trim())),
                None => (item, None),
            };
            let (name, path) = match name.split_once(':') {
                Some((name, path)) => (name.trim(), Some(path.trim())),
                None => (name, None),
            };
            let Some(place) = NAMES.iter().position(|known| *known == name) else {
                return Err(wrong(format!("there is no tier '{name}'")));
            };
            if place + 1 == next {
                return Err(wrong(format!("the tier {name} is named twice")));
            }
            if place < next {
                return Err(wrong(format!("the tier {name} stands too late, or twice")));
            }
            next = place + 1;
            let limit_bytes = limit.map(|limit| limit_of(name, limit)).transpose();
            let limit_bytes = limit_bytes.map_err(wrong)?;
            let path = path_of(name, path).map_err(wrong)?;
            match name {
                DISK => list.disk = path.map(|path| DiskSetting { path, limit_bytes }),
                LZ4 => (has_lz4, list.lz4_limit_bytes) = (true, limit_bytes),
                ZSTD => list.zstd = ZstdTier::On { limit_bytes },
                _ if limit.is_some() => {
                    return Err(wrong(format!(
                        "the tier {name} takes no room, so it has no limit"
                    )));
                }
                _ => {}
            }
        }
        match has_lz4 {
            true => Ok(list),
            false => Err(wrong("the tier lz4 is missing".to_owned())),
        }
    }
}

/// The path behind the name of a tier that has one.
fn path_of(name: &str, path: Option<&str>) -> Result<Option<PathBuf>, String> {
    match (name, path) {
        (DISK, Some(path)) if path.starts_with('/') => Ok(Some(path.into())),
        (DISK, _) => Err(
            "the tier disk needs a path from the root, such as disk:/var/lib/pagetide/tier"
                .to_owned(),
        ),
        (_, None) => Ok(None),
        (_, Some(_)) => Err(format!("the tier {name} has no path")),
    }
}

fn limit_of(name: &str, text: &str) -> Result<u64, String> {
    let size: ByteSize = text
        .parse()
        .map_err(|error| format!("the limit of the tier {name}: {error}"))?;
    match size.0 {
        bytes if bytes < LIMIT_BYTES_MIN => Err(format!(
            "a limit of {bytes} bytes is too little for the tier {name}: give at least {}",
            ByteSize(LIMIT_BYTES_MIN)
        )),
        bytes => Ok(bytes),
    }
}

impl TryFrom<String> for TierList {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<TierList> for String {
    fn from(list: TierList) -> Self {
        let named = |name: &str, limit_bytes: Option<u64>| match limit_bytes {
            Some(bytes) => format!("{name}={}", ByteSize(bytes)),
            None => name.to_owned(),
        };
        let mut names = vec![
            ZERO.to_owned(),
            SAME.to_owned(),
            named(LZ4, list.lz4_limit_bytes),
        ];
        if let ZstdTier::On { limit_bytes } = list.zstd {
            names.push(named(ZSTD, limit_bytes));
        }
        if let Some(DiskSetting { path, limit_bytes }) = &list.disk {
            names.push(named(&format!("{DISK}:{}", path.display()), *limit_bytes));
        }
        names.join(",")
    }
}

/// The setting `disk-when-gone`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct WhenGoneChoice(pub WhenGone);

const WAIT: &str = "wait";
const LOST: &str = "lost";

impl FromStr for WhenGoneChoice {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            WAIT => Ok(Self(WhenGone::Wait)),
            LOST => Ok(Self(WhenGone::Lost)),
            other => Err(format!(
                "'{other}' is not what may become of pages whose tier is gone: write {WAIT} or {LOST}"
            )),
        }
    }
}

impl TryFrom<String> for WhenGoneChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<WhenGoneChoice> for String {
    fn from(choice: WhenGoneChoice) -> Self {
        match choice.0 {
            WhenGone::Wait => WAIT.to_owned(),
            WhenGone::Lost => LOST.to_owned(),
        }
    }
}

/// The settings `demote-after` and `sink-after`.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DemoteAfter(pub Duration);

impl FromStr for DemoteAfter {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut after = Duration::ZERO;
        let set = Field::Time(&mut after).set(text.trim());
        set.map_err(|wanted| {
            format!("'{text}' is no time after which pages are demoted: write {wanted}")
        })?;
        match (AFTER_MIN..=AFTER_MAX).contains(&after) {
            true => Ok(Self(after)),
            false => Err(format!(
                "pages are demoted after {} ms at least and {} hours at most, not after '{text}'",
                AFTER_MIN.as_millis(),
                AFTER_MAX.as_secs() / 3600
            )),
        }
    }
}

impl TryFrom<String> for DemoteAfter {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl From<DemoteAfter> for String {
    fn from(after: DemoteAfter) -> Self {
        let mut after = after.0;
        Field::Time(&mut after).text()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tiers_are_read_as_written_and_written_as_read() {
        for (text, canonical) in [
            ("zero,same,lz4,zstd", "zero,same,lz4,zstd"),
            ("lz4", "zero,same,lz4"),
            ("same, lz4 = 1024M", "zero,same,lz4=1G"),
            ("zero,lz4=8G,zstd=512M", "zero,same,lz4=8G,zstd=512M"),
            ("lz4,disk:/d", "zero,same,lz4,disk:/d"),
            (
                "lz4,zstd,disk:/a=b/d=64G",
                "zero,same,lz4,zstd,disk:/a=b/d=64G",
            ),
        ] {
            let list: TierList = text.parse().unwrap();
            assert_eq!(String::from(list.clone()), canonical);
            assert_eq!(canonical.parse(), Ok(list));
        }
        let tiers = "lz4,zstd=2M".parse::<TierList>().unwrap().open();
        assert!(tiers.uses_zstd());
        assert!(!"lz4".parse::<TierList>().unwrap().open().uses_zstd());
        let disk: TierList = "lz4,disk:/a:b = 1G".parse().unwrap();
        let expected = DiskSetting {
            path: "/a:b".into(),
            limit_bytes: Some(1 << 30),
        };
        assert_eq!(disk.disk(), Some(&expected));
    }

    #[test]
    fn list_that_cannot_work_is_refused_by_one_sentence_that_says_what_is_allowed() {
        for (text, why) in [
            ("", "no tier ''"),
            ("zero,same", "lz4 is missing"),
            ("zero,same,zstd", "lz4 is missing"),
            ("lz4,lz4", "named twice"),
            ("lz4,zstd,lz4", "too late, or twice"),
            ("zstd,lz4", "lz4 stands too late"),
            ("lz4,zero", "zero stands too late"),
            ("lz4,snappy", "no tier 'snappy'"),
            ("LZ4", "no tier 'LZ4'"),
            ("lz4=much", "'much' is no size"),
            ("lz4=", "is no size"),
            ("lz4=1K", "too little for the tier lz4"),
            ("zero=1G,lz4", "zero takes no room"),
            ("lz4,", "no tier ''"),
            ("lz4,disk", "needs a path"),
            ("lz4,disk:", "needs a path"),
            ("lz4,disk:tier", "needs a path from the root"),
            ("lz4,disk:/d=much", "'much' is no size"),
            ("disk:/d", "lz4 is missing"),
            ("disk:/d,lz4", "lz4 stands too late"),
            ("lz4,disk:/d,disk:/e", "named twice"),
            ("lz4:/d", "lz4 has no path"),
        ] {
            let error = text.parse::<TierList>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
            assert!(error.ends_with(ALLOWED) && !error.contains('\n'), "{error}");
        }
    }

    #[test]
    fn what_becomes_of_pages_without_their_tier_is_one_of_two() {
        for text in ["wait", "lost"] {
            assert_eq!(String::from(text.parse::<WhenGoneChoice>().unwrap()), text);
        }
        let error = "hope".parse::<WhenGoneChoice>().unwrap_err();
        assert!(error.contains("wait or lost"), "{error}");
    }

    #[test]
    fn time_until_demotion_is_read_as_written_and_has_bounds() {
        for (text, ms) in [("10min", 600_000), ("100ms", 100), ("1h", 3_600_000)] {
            let after: DemoteAfter = text.parse().unwrap();
            assert_eq!(after, DemoteAfter(Duration::from_millis(ms)));
            assert_eq!(String::from(after).parse(), Ok(after));
        }
        for text in ["", "0s", "99ms", "-1s", "10", "1year", "170h"] {
            let error = text.parse::<DemoteAfter>().unwrap_err();
            assert!(error.contains("demoted"), "{error}");
        }
    }
}
