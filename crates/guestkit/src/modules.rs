// SPDX-License-Identifier: Apache-2.0
//! Kernel modules and the order in which they load.
//!
//! A kernel package carries no `modules.dep` (it is made on installation), but each module lists its
//! dependencies in its `.modinfo` section, as `depends=a,b`. The order is computed from these.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

/// Modules could not be put in order.
#[derive(Debug, thiserror::Error)]
pub enum ModuleError {
    /// A module is not in the tree.
    #[error("the kernel package has no module {0}: is it the right kernel?")]
    Missing(String),
    /// The tree could not be read.
    #[error("reading {path}: {source}", path = path.display())]
    Read {
        /// What was read.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

/// A module and its content.
#[derive(Debug)]
pub struct Module {
    /// Name without path and ending, with underscores.
    pub name: String,
    /// The object file.
    pub object: Vec<u8>,
}

/// The `wanted` modules below `tree` and all they need, dependencies first.
///
/// # Errors
/// A module is missing or cannot be read.
pub fn in_order(tree: &Path, wanted: &[&str]) -> Result<Vec<Module>, ModuleError> {
    let mut paths = BTreeMap::new();
    find(tree, &mut paths)?;
    let mut order = Vec::new();
    for name in wanted {
        add(name, &paths, &mut order)?;
    }
    Ok(order)
}

fn add(
    name: &str,
    paths: &BTreeMap<String, PathBuf>,
    order: &mut Vec<Module>,
) -> Result<(), ModuleError> {
    if order.iter().any(|module| module.name == name) {
        return Ok(());
    }
    let path = paths
        .get(name)
        .ok_or_else(|| ModuleError::Missing(name.to_owned()))?;
    let object = fs::read(path).map_err(|source| read_error(path, source))?;
    for dependency in dependencies(&object) {
        add(&dependency, paths, order)?;
    }
    order.push(Module {
        name: name.to_owned(),
        object,
    });
    Ok(())
}

fn find(folder: &Path, paths: &mut BTreeMap<String, PathBuf>) -> Result<(), ModuleError> {
    for entry in fs::read_dir(folder).map_err(|source| read_error(folder, source))? {
        let path = entry.map_err(|source| read_error(folder, source))?.path();
        if path.is_dir() {
            find(&path, paths)?;
        } else if path.extension().is_some_and(|ending| ending == "ko")
            && let Some(stem) = path.file_stem().and_then(|stem| stem.to_str())
        {
            paths.insert(stem.replace('-', "_"), path);
        }
    }
    Ok(())
}

fn dependencies(object: &[u8]) -> Vec<String> {
    const FIELD: &[u8] = b"\0depends=";
    let Some(start) = object
        .windows(FIELD.len())
        .position(|window| window == FIELD)
    else {
        return Vec::new();
    };
    let value = &object[start + FIELD.len()..];
    let end = value
        .iter()
        .position(|&byte| byte == 0)
        .unwrap_or(value.len());
    String::from_utf8_lossy(&value[..end])
        .split(',')
        .filter(|name| !name.is_empty())
        .map(|name| name.replace('-', "_"))
        .collect()
}

fn read_error(path: &Path, source: io::Error) -> ModuleError {
    ModuleError::Read {
        path: path.to_owned(),
        source,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tree(modules: &[(&str, &str)]) -> tempfile::TempDir {
        let tree = tempfile::tempdir().expect("a folder");
        fs::create_dir(tree.path().join("drivers")).expect("a folder in it");
        for (name, depends) in modules {
            let object = format!("ELF\0license=GPL\0depends={depends}\0name={name}\0");
            fs::write(tree.path().join(format!("drivers/{name}.ko")), object).expect("a module");
        }
        tree
    }

    #[test]
    fn dependencies_load_before_what_needs_them_and_once() {
        let tree = tree(&[
            ("top", "left,right-side"),
            ("left", "base"),
            ("right-side", "base"),
            ("base", ""),
        ]);
        let order = in_order(tree.path(), &["top", "left"]).expect("all are there");
        let names: Vec<&str> = order.iter().map(|module| module.name.as_str()).collect();
        assert_eq!(names, ["base", "left", "right_side", "top"]);
    }

    #[test]
    fn missing_dependency_is_named() {
        let tree = tree(&[("top", "gone")]);
        let error = in_order(tree.path(), &["top"]).expect_err("gone is not there");
        assert!(matches!(error, ModuleError::Missing(name) if name == "gone"));
    }
}
