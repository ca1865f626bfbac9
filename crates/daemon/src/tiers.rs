// SPDX-License-Identifier: Apache-2.0
//! The settings `tiers`, `demote-after`, `sink-after`, `disk-when-gone` and `remote-when-gone`: where pages are
//! kept, and in which forms.
//!
//! ```text
//!   zero,same,lz4=8G,zstd,remote:redis://far:6379=32G,disk:/path=64G
//!   ─────────  ──────  ─── ─────────────────────────── ──────────────
//!   always     where   where they go that stay cold,   and where those go that find no room there
//!   there      most
//!              enter
//! ```
//! A limit is on what the tier holds of all VMs. A page that finds no room in a tier enters at the next of
//! those in memory. Pages go to disk and to another host from the pool only, so that no eviction waits for these;
//! which of the two comes first is the operator's choice.
//!
//! The limit of a server is what stands behind the last `=`; it must be given, as nothing else bounds what
//! this host takes of the other. A URL with a password is refused: this setting is seen in lists of processes,
//! in logs and by the API. The refusal does not repeat it, wherever a mistake has put it.

use clap::{
    Arg, Command,
    builder::{TypedValueParser, ValueParserFactory},
};
use pagetide_policy::{demotion::AFTER_MIN, protect::parameters::Field};
use pagetide_report::size::ByteSize;
use pagetide_swap::{
    slow::WhenGone,
    store::{PoolTiers, RESUME_BYTES, ZstdTier},
};
use pagetide_tiers::remote::RemoteUrl;
use serde::{Deserialize, Serialize};
use std::{ffi::OsStr, path::PathBuf, str::FromStr, sync::Arc, time::Duration};

const ZERO: &str = "zero";
const SAME: &str = "same";
const LZ4: &str = "lz4";
const ZSTD: &str = "zstd";
const DISK: &str = "disk";
const REMOTE: &str = "remote";
/// All of them, in their order; those of the same place in either order.
const NAMES: [(&str, u8); 6] = [
    (ZERO, 0),
    (SAME, 1),
    (LZ4, 2),
    (ZSTD, 3),
    (DISK, 4),
    (REMOTE, 4),
];
const ALLOWED: &str = "zero,same,lz4,zstd,disk:/PATH,remote:redis://HOST=SIZE in this order (disk and remote in \
                       either), lz4, zstd and disk with a limit if you like, such as lz4=8G";
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

/// A server of another host as a tier.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct RemoteSetting {
    /// As it was written, without a password.
    text: String,
    url: RemoteUrl,
    /// Most that it is given.
    pub limit_bytes: u64,
}

impl RemoteSetting {
    /// Where the server is, and where its password stands.
    #[must_use]
    pub fn url(&self) -> &RemoteUrl {
        &self.url
    }
}

/// A tier outside memory.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum SlowSetting {
    /// On a disk.
    Disk(DiskSetting),
    /// On another host.
    Remote(RemoteSetting),
}

/// The setting `tiers`.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TierList {
    lz4_limit_bytes: Option<u64>,
    zstd: ZstdTier,
    slow: Vec<SlowSetting>,
}

impl TierList {
    /// The tiers in memory, with nothing in them.
    #[must_use]
    pub fn open(&self) -> Arc<PoolTiers> {
        PoolTiers::new(self.lz4_limit_bytes, self.zstd)
    }

    /// Those outside memory, in the order in which pages go down to them.
    #[must_use]
    pub fn slow(&self) -> &[SlowSetting] {
        &self.slow
    }
}

/// True if a text may have a password in it.
pub(crate) fn may_be_secret(text: &str) -> bool {
    ["@", "://", "password"]
        .iter()
        .any(|sign| text.contains(sign))
}

/// A part of the list as errors show it. A comma or an equals sign in a password has made parts of that.
fn shown(part: &str, list: &str) -> String {
    let is_secret = may_be_secret(part) || list.contains('@') || list.contains("password");
    match is_secret {
        true => "'…'".to_owned(),
        false => format!("'{part}'"),
    }
}

/// An item of the list, taken apart.
struct Item<'a> {
    name: &'static str,
    /// Behind the colon: a path or a URL.
    at: Option<&'a str>,
    limit_bytes: Option<u64>,
    place: u8,
}

impl<'a> Item<'a> {
    fn of(item: &'a str, list: &str) -> Result<Self, String> {
        // The last one: a path or a URL may have others.
        let (text, limit) = match item.rsplit_once('=') {
            Some((text, limit)) => (text.trim(), Some(limit.trim())),
            None => (item, None),
        };
        let (name, at) = match text.split_once(':') {
            Some((name, at)) => (name.trim(), Some(at.trim())),
            None => (text, None),
        };
        let known = NAMES.iter().find(|(known, _)| *known == name);
        let &(name, place) =
            known.ok_or_else(|| format!("there is no tier {}", shown(name, list)))?;
        let limit_bytes = limit.map(|limit| limit_of(name, limit, list)).transpose()?;
        Ok(Self {
            name,
            at,
            limit_bytes,
            place,
        })
    }

    /// Adds what it says to the list.
    fn add_to(&self, list: &mut TierList) -> Result<(), String> {
        let Self {
            name,
            at,
            limit_bytes,
            ..
        } = *self;
        match (name, at) {
            (DISK, Some(path)) if path.starts_with('/') => {
                let path = path.into();
                let disk = DiskSetting { path, limit_bytes };
                list.slow.push(SlowSetting::Disk(disk));
            }
            (DISK, _) => {
                return Err(
                    "the tier disk needs a path from the root, such as disk:/var/lib/pagetide/tier"
                        .to_owned(),
                );
            }
            (REMOTE, at) => {
                let remote = remote_of(at, limit_bytes)?;
                list.slow.push(SlowSetting::Remote(remote));
            }
            (_, Some(_)) => return Err(format!("the tier {name} has no path")),
            (LZ4, None) => list.lz4_limit_bytes = limit_bytes,
            (ZSTD, None) => list.zstd = ZstdTier::On { limit_bytes },
            (_, None) if limit_bytes.is_some() => {
                return Err(format!("the tier {name} takes no room, so it has no limit"));
            }
            (_, None) => {}
        }
        Ok(())
    }
}

fn remote_of(url: Option<&str>, limit_bytes: Option<u64>) -> Result<RemoteSetting, String> {
    let text =
        url.ok_or("the tier remote needs a URL and a limit, such as remote:redis://far:6379=16G")?;
    let url = RemoteUrl::parse(text).map_err(|why| format!("the tier remote: {why}"))?;
    if url.has_password() {
        return Err(
            "the URL of the tier remote has a password, which lists of processes would show: write it into a \
             file that root alone may read and add ?password-file=/FILE to the URL (or ?password-env=VARIABLE)"
                .to_owned(),
        );
    }
    let limit_bytes = limit_bytes.ok_or(
        "the tier remote needs a limit on what it is given, such as remote:redis://far:6379=16G",
    )?;
    Ok(RemoteSetting {
        text: text.to_owned(),
        url,
        limit_bytes,
    })
}

impl FromStr for TierList {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let wrong = |why: String| format!("{why}; write {ALLOWED}");
        let mut list = Self {
            lz4_limit_bytes: None,
            zstd: ZstdTier::Off,
            slow: Vec::new(),
        };
        let mut named: Vec<(&str, u8)> = Vec::new();
        for item in text.split(',').map(str::trim) {
            let item = Item::of(item, text).map_err(wrong)?;
            let (name, place) = (item.name, item.place);
            if named.last().is_some_and(|(last, _)| *last == name) {
                return Err(wrong(format!("the tier {name} is named twice")));
            }
            let is_late = named
                .iter()
                .any(|(other, at)| *other == name || *at > place);
            if is_late {
                return Err(wrong(format!("the tier {name} stands too late, or twice")));
            }
            named.push((name, place));
            item.add_to(&mut list).map_err(wrong)?;
        }
        match named.iter().any(|(name, _)| *name == LZ4) {
            true => Ok(list),
            false => Err(wrong("the tier lz4 is missing".to_owned())),
        }
    }
}

fn limit_of(name: &str, text: &str, list: &str) -> Result<u64, String> {
    let size: ByteSize = text.parse().map_err(|_| {
        format!(
            "the limit of the tier {name}: {} is no size: write bytes or a number with K, M, G or T, such as 4096 or \
             256M",
            shown(text, list)
        )
    })?;
    match size.0 {
        bytes if bytes < LIMIT_BYTES_MIN => Err(format!(
            "a limit of {bytes} bytes is too little for the tier {name}: give at least {}",
            ByteSize(LIMIT_BYTES_MIN)
        )),
        bytes => Ok(bytes),
    }
}

/// Reads the flag, with an error that does not repeat it.
#[derive(Clone, Debug)]
pub struct TierListParser;

impl TypedValueParser for TierListParser {
    type Value = TierList;

    fn parse_ref(
        &self,
        command: &Command,
        _: Option<&Arg>,
        value: &OsStr,
    ) -> Result<TierList, clap::Error> {
        let text = value.to_str().ok_or("it is not UTF-8".to_owned());
        let parsed = text.and_then(str::parse);
        parsed.map_err(|why: String| {
            let kind = clap::error::ErrorKind::ValueValidation;
            clap::Error::raw(kind, format!("the value of --tiers is wrong: {why}\n"))
                .with_cmd(command)
        })
    }
}

impl ValueParserFactory for TierList {
    type Parser = TierListParser;

    fn value_parser() -> TierListParser {
        TierListParser
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
        names.extend(list.slow.iter().map(|slow| match slow {
            SlowSetting::Disk(DiskSetting { path, limit_bytes }) => {
                named(&format!("{DISK}:{}", path.display()), *limit_bytes)
            }
            SlowSetting::Remote(RemoteSetting {
                text, limit_bytes, ..
            }) => named(&format!("{REMOTE}:{text}"), Some(*limit_bytes)),
        }));
        names.join(",")
    }
}

/// The settings `disk-when-gone` and `remote-when-gone`.
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
            (
                "lz4,remote:redis://far=1024M",
                "zero,same,lz4,remote:redis://far=1G",
            ),
            (
                "lz4,disk:/d,remote:rediss://u@far:7000/3?ca=/c.pem&password-file=/p=2G",
                "zero,same,lz4,disk:/d,remote:rediss://u@far:7000/3?ca=/c.pem&password-file=/p=2G",
            ),
            (
                "lz4,remote:redis://a?node=b:7001&password-env=PT=8G,disk:/d=1G",
                "zero,same,lz4,remote:redis://a?node=b:7001&password-env=PT=8G,disk:/d=1G",
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
        assert_eq!(disk.slow(), [SlowSetting::Disk(expected)]);
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
            ("lz4,remote", "needs a URL and a limit"),
            ("lz4,remote=1G", "needs a URL and a limit"),
            ("lz4,remote:redis://far", "needs a limit"),
            ("lz4,remote:redis://far?cluster=true", "'true' is no size"),
            ("lz4,remote:far:6379=1G", "write redis://"),
            (
                "lz4,remote:redis://far=1K",
                "too little for the tier remote",
            ),
            ("lz4,remote:redis://:hunter2@far=1G", "password-file="),
            ("lz4,remote:redis://far?password=hunter2=1G", "no option"),
            ("lz4,remote:redis://far?password=hunter2", "'…' is no size"),
            ("lz4,remote:redis://u:7=1G,hunter2,b@far=1G", "no tier '…'"),
            ("lz4,remote:redis://:a=hunter2@far", "'…' is no size"),
            ("remote:redis://far=1G,lz4", "lz4 stands too late"),
            (
                "lz4,remote:redis://a=1G,disk:/d,remote:redis://b=1G",
                "remote stands too late, or twice",
            ),
        ] {
            let error = text.parse::<TierList>().unwrap_err();
            assert!(error.contains(why), "{text}: {error}");
            assert!(error.ends_with(ALLOWED) && !error.contains('\n'), "{error}");
            assert!(!error.contains("hunter2"), "{error}");
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
