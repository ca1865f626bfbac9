// SPDX-License-Identifier: Apache-2.0
//! Checks what `deny.toml` says about where crates come from and how often one is there.
//!
//! `cargo deny` checks the same, and known vulnerabilities on top; but it has to be installed. These checks need
//! nothing but `cargo metadata`, so they run wherever the project builds, and read the same lists:
//!
//! - `sources.allow-registry`: every crate that is not ours comes from one of them.
//! - `bans.wildcards`: none of ours asks for just any version (`*`).
//! - `bans.multiple-versions`: a crate is there once. `bans.skip` lists the older versions that cannot be avoided,
//!   each with its reason; an entry that nothing needs any more is a finding, too.

use serde_json::Value;
use std::collections::{BTreeMap, BTreeSet};

/// The lists of a `deny.toml` that concern versions and sources.
#[derive(Debug, PartialEq, Eq)]
pub struct Rules {
    registries: Vec<String>,
    /// Crates with the beginning of their version: `bitflags@1` skips 1.3.2.
    skipped: Vec<(String, String)>,
}

impl Rules {
    /// Reads them.
    pub fn read(deny: &str) -> Result<Self, String> {
        let table: toml::Table = deny
            .parse()
            .map_err(|error: toml::de::Error| error.to_string())?;
        let list = |section: &str, name: &str| {
            let found = table.get(section).and_then(|s| s.get(name)?.as_array());
            found.ok_or_else(|| format!("has no list {section}.{name}"))
        };
        let registries = list("sources", "allow-registry")?
            .iter()
            .filter_map(|url| url.as_str().map(str::to_owned))
            .collect();
        let mut skipped = Vec::new();
        for entry in list("bans", "skip")? {
            let text = |name| entry.get(name).and_then(toml::Value::as_str);
            let (Some(krate), Some(_reason)) = (text("crate"), text("reason")) else {
                return Err(format!(
                    "bans.skip: an entry needs `crate` and `reason`, not {entry}"
                ));
            };
            let (name, version) = krate.split_once('@').ok_or_else(|| {
                format!("bans.skip: {krate} names no version (write NAME@VERSION)")
            })?;
            skipped.push((name.to_owned(), version.to_owned()));
        }
        Ok(Self {
            registries,
            skipped,
        })
    }

    fn is_skipped(&self, name: &str, version: &str) -> bool {
        let covers = |(n, v): &(String, String)| n == name && begins(version, v);
        self.skipped.iter().any(covers)
    }
}

/// True if `version` is `beginning`, or goes on with another part: `1` begins 1.3 and not 12.0.
fn begins(version: &str, beginning: &str) -> bool {
    version
        .strip_prefix(beginning)
        .is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// A finding for each rule that `metadata` breaks.
pub fn check(metadata: &Value, rules: &Rules) -> Vec<String> {
    let packages = metadata["packages"].as_array();
    let packages = packages.map(Vec::as_slice).unwrap_or_default();
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    let mut findings = Vec::new();
    let mut versions: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for package in packages {
        let (name, version) = (text(&package["name"]), text(&package["version"]));
        match package["source"].as_str() {
            None => findings.extend(wildcards(package, &name)),
            Some(source) => findings.extend(foreign(source, rules, &name, &version)),
        }
        versions.entry(name).or_default().insert(version);
    }
    for (name, versions) in &versions {
        let kept: Vec<&str> = versions
            .iter()
            .map(String::as_str)
            .filter(|version| !rules.is_skipped(name, version))
            .collect();
        if kept.len() > 1 {
            findings.push(format!(
                "crate {name} is there in the versions {}: find one that all can use (`cargo tree -i {name}@VERSION` \
                 says who needs which), or add the older to bans.skip in deny.toml, with the reason",
                kept.join(", ")
            ));
        }
    }
    for (name, version) in &rules.skipped {
        let found = versions.get(name);
        let is_needed = found.is_some_and(|all| {
            all.len() > 1 && all.iter().any(|candidate| begins(candidate, version))
        });
        if !is_needed {
            findings.push(format!(
                "deny.toml skips {name}@{version}, which is there only once or not at all: remove the entry"
            ));
        }
    }
    findings
}

fn foreign(source: &str, rules: &Rules, name: &str, version: &str) -> Option<String> {
    let registry = source.strip_prefix("registry+").unwrap_or(source);
    let is_known = rules.registries.iter().any(|known| known == registry);
    (!is_known).then(|| {
        format!("crate {name} {version} comes from {source}, which is not in sources.allow-registry of deny.toml")
    })
}

fn wildcards(package: &Value, name: &str) -> Vec<String> {
    let dependencies = package["dependencies"].as_array();
    let any_version = dependencies
        .into_iter()
        .flatten()
        .filter(|dependency| dependency["req"] == "*" && dependency["path"].is_null());
    any_version
        .map(|dependency| {
            let wanted = dependency["name"].as_str().unwrap_or_default();
            format!("crate {name} takes any version of {wanted}: name the least that it needs")
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    const HOME: &str = "https://example.org/index";

    fn rules(skipped: &[(&str, &str)]) -> Rules {
        let owned = |(name, version): &(&str, &str)| ((*name).to_owned(), (*version).to_owned());
        Rules {
            registries: vec![HOME.to_owned()],
            skipped: skipped.iter().map(owned).collect(),
        }
    }

    fn package(name: &str, version: &str, source: &str) -> Value {
        json!({"name": name, "version": version, "source": format!("registry+{source}"), "dependencies": []})
    }

    fn found(packages: &[Value], skipped: &[(&str, &str)]) -> Vec<String> {
        check(&json!({ "packages": packages }), &rules(skipped))
    }

    #[test]
    fn crate_of_another_registry_or_repository_is_found() {
        assert!(found(&[package("a", "1.0.0", HOME)], &[]).is_empty());
        let strange = [package("a", "1.0.0", "https://example.com/index")];
        assert_eq!(found(&strange, &[]).len(), 1);
        let git =
            json!({"name": "a", "version": "1.0.0", "source": "git+https://example.org/index#1"});
        assert_eq!(found(&[git], &[]).len(), 1);
    }

    #[test]
    fn crate_in_two_versions_is_found_unless_the_older_is_skipped() {
        let twice = [package("a", "1.3.2", HOME), package("a", "12.0.0", HOME)];
        let findings = found(&twice, &[]);
        assert_eq!(findings.len(), 1);
        assert!(findings[0].contains("1.3.2, 12.0.0"), "{findings:?}");
        assert!(found(&twice, &[("a", "1")]).is_empty());
        assert_eq!(
            found(&twice, &[("a", "2")]).len(),
            2,
            "and the entry itself"
        );
    }

    #[test]
    fn skip_that_nothing_needs_is_found() {
        let once = [package("a", "1.3.2", HOME)];
        assert_eq!(found(&once, &[("a", "1")]).len(), 1);
        assert_eq!(found(&once, &[("b", "1")]).len(), 1);
    }

    #[test]
    fn any_version_is_found_and_a_path_needs_none() {
        let ours = |path: Value| {
            json!({"name": "ours", "version": "0.1.0", "source": null,
                   "dependencies": [{"name": "a", "req": "*", "path": path}]})
        };
        assert_eq!(found(&[ours(Value::Null)], &[]).len(), 1);
        assert!(found(&[ours(json!("/a"))], &[]).is_empty());
    }

    #[test]
    fn entry_without_reason_or_version_is_refused() {
        let deny = |entry: &str| {
            format!("[sources]\nallow-registry = [\"{HOME}\"]\n[bans]\nskip = [{entry}]\n")
        };
        let right = Rules::read(&deny("{ crate = \"a@1\", reason = \"b needs it\" }"));
        assert_eq!(right, Ok(rules(&[("a", "1")])));
        for wrong in [
            "{ crate = \"a@1\" }",
            "{ crate = \"a\", reason = \"b\" }",
            "\"a@1\"",
        ] {
            assert!(Rules::read(&deny(wrong)).is_err(), "{wrong}");
        }
        assert!(Rules::read("[bans]\nskip = []\n").is_err());
    }
}
