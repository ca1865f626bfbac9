// SPDX-License-Identifier: Apache-2.0
//! Checks that every crate we build with has a licence from the list in `deny.toml`.
//!
//! The list is only there, so that `cargo deny` and this check cannot disagree. Expressions are those of
//! SPDX with `AND`, `OR`, `WITH` and parentheses; the old `A/B` means `A OR B`.

use serde_json::Value;

/// The allowed licences of a `deny.toml`.
pub fn allowed(deny: &str) -> Result<Vec<String>, String> {
    let table: toml::Table = deny
        .parse()
        .map_err(|error: toml::de::Error| error.to_string())?;
    let list = table
        .get("licenses")
        .and_then(|licences| licences.get("allow")?.as_array());
    let list = list.ok_or_else(|| "has no list licenses.allow".to_owned())?;
    Ok(list
        .iter()
        .filter_map(|name| name.as_str().map(str::to_owned))
        .collect())
}

/// A finding for each package whose licence is not allowed.
pub fn check(metadata: &Value, allowed: &[String]) -> Vec<String> {
    let Some(packages) = metadata["packages"].as_array() else {
        return Vec::new();
    };
    let mut findings = Vec::new();
    for package in packages {
        let licence = package["license"].as_str().unwrap_or_default();
        if !satisfied(licence, allowed) {
            findings.push(format!(
                "crate {} {} has the licence {licence:?}, which deny.toml does not allow",
                package["name"].as_str().unwrap_or_default(),
                package["version"].as_str().unwrap_or_default(),
            ));
        }
    }
    findings
}

fn satisfied(expression: &str, allowed: &[String]) -> bool {
    let spaced = expression
        .replace('/', " OR ")
        .replace('(', " ( ")
        .replace(')', " ) ");
    let words: Vec<&str> = spaced.split_whitespace().collect();
    let mut parser = Parser {
        words: &words,
        allowed,
    };
    let result = parser.any();
    parser.words.is_empty() && result
}

/// Parses an expression by descent; an invalid part is not satisfied.
struct Parser<'a> {
    words: &'a [&'a str],
    allowed: &'a [String],
}

impl Parser<'_> {
    fn any(&mut self) -> bool {
        let mut result = self.all();
        while self.take("OR") {
            result |= self.all();
        }
        result
    }

    fn all(&mut self) -> bool {
        let mut result = self.one();
        while self.take("AND") {
            result &= self.one();
        }
        result
    }

    fn one(&mut self) -> bool {
        if self.take("(") {
            let result = self.any();
            return self.take(")") && result;
        }
        let Some((&name, rest)) = self.words.split_first() else {
            return false;
        };
        self.words = rest;
        let mut name = name.to_owned();
        if self.take("WITH")
            && let Some((exception, rest)) = self.words.split_first()
        {
            name += &format!(" WITH {exception}");
            self.words = rest;
        }
        self.allowed.contains(&name)
    }

    fn take(&mut self, word: &str) -> bool {
        match self.words.split_first() {
            Some((&first, rest)) if first == word => {
                self.words = rest;
                true
            }
            _ => false,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn free(expression: &str) -> bool {
        let list = [
            "MIT",
            "Apache-2.0",
            "BSD-3-Clause",
            "Apache-2.0 WITH LLVM-exception",
        ];
        satisfied(expression, &list.map(str::to_owned))
    }

    #[test]
    fn expressions_with_one_free_way_are_satisfied() {
        for expression in [
            "MIT",
            "GPL-3.0 OR MIT",
            "MIT/Apache-2.0",
            "(MIT OR LGPL-2.1) AND BSD-3-Clause",
            "Apache-2.0 WITH LLVM-exception OR GPL-2.0",
            "GPL-2.0 AND X OR MIT AND BSD-3-Clause",
        ] {
            assert!(free(expression), "{expression}");
        }
    }

    #[test]
    fn expressions_without_a_free_way_are_not() {
        for expression in [
            "",
            "GPL-3.0",
            "MIT AND GPL-3.0",
            "MIT WITH odd",
            "(MIT",
            "MIT MIT",
            "AND",
        ] {
            assert!(!free(expression), "{expression}");
        }
    }

    #[test]
    fn list_is_read_from_deny_toml() {
        let deny = "[licenses]\nallow = [\"MIT\", \"ISC\"]\n";
        assert_eq!(allowed(deny), Ok(vec!["MIT".to_owned(), "ISC".to_owned()]));
        assert!(allowed("[advisories]\n").is_err());
    }
}
