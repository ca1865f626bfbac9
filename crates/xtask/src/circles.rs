// SPDX-License-Identifier: Apache-2.0
//! Circles of files: files that depend on one another.
//!
//! One file depends on another if its `use` declarations name an item that the other defines. Re-exports
//! are followed to the definition, so a crate's root is no part of a circle merely because it re-exports
//! everything. A *circle* is a strongly connected set of files, as in a call graph: to understand one of
//! them, a reader has to read all. Code compiled only for tests is ignored.
//!
//! ```text
//!   crate root ─ mod ─► files and inline modules ─► items, uses, re-exports
//!   use path   ─► module ─► item ─► (re-export ─► …) ─► file       edges ─► components
//! ```
//! Paths in code (`crate::a::b()`) and macros are not followed.

use petgraph::{
    algo::tarjan_scc,
    graph::{DiGraph, NodeIndex},
};
use std::{
    collections::{BTreeMap, BTreeSet},
    fs, io,
    path::{Path, PathBuf},
};
use syn::{Attribute, Item, ItemMod, UseTree, Visibility, ext::IdentExt as _};

/// Most files of a circle.
pub const FILES_MAX: usize = 3;

/// A source file cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum CircleError {
    /// It does not exist, or may not be read.
    #[error("{path}: {source}", path = path.display())]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// It is no Rust.
    #[error("{path}: {source}", path = path.display())]
    Parse {
        /// Which.
        path: PathBuf,
        /// Why.
        source: syn::Error,
    },
    /// A module has no file.
    #[error("{path}: there is no file for `mod {name}`", path = path.display())]
    NoFile {
        /// Where it is declared.
        path: PathBuf,
        /// Its name.
        name: String,
    },
}

/// A name that a module imports.
struct Import {
    path: Vec<String>,
    /// Its local name; `*` for all of a module.
    name: String,
    is_public: bool,
}

#[derive(Default)]
struct Module {
    file: usize,
    parent: Option<usize>,
    children: BTreeMap<String, usize>,
    items: BTreeSet<String>,
    imports: Vec<Import>,
}

/// The modules of one crate.
#[derive(Default)]
struct Tree {
    files: Vec<PathBuf>,
    modules: Vec<Module>,
}

/// Files that depend on one another.
#[derive(Debug)]
pub struct Circle {
    /// By path, in order.
    pub files: Vec<PathBuf>,
    /// From, to, and the imported names.
    pub uses: Vec<(PathBuf, PathBuf, Vec<String>)>,
}

/// The circles of the crate whose root is `root`, largest first.
///
/// # Errors
/// [`CircleError`].
pub fn of_crate(root: &Path) -> Result<Vec<Circle>, CircleError> {
    let mut tree = Tree::default();
    let folder = root.parent().unwrap_or(Path::new(""));
    tree.read(root, folder, None)?;
    let mut graph = DiGraph::<usize, ()>::new();
    let nodes: Vec<_> = (0..tree.files.len())
        .map(|file| graph.add_node(file))
        .collect();
    let edges = tree.edges();
    for (from, to) in edges.keys() {
        graph.update_edge(nodes[*from], nodes[*to], ());
    }
    let of_component = |component: Vec<NodeIndex>| {
        let inside: BTreeSet<usize> = component.into_iter().map(|node| graph[node]).collect();
        tree.circle(&inside, &edges)
    };
    let mut circles: Vec<Circle> = tarjan_scc(&graph)
        .into_iter()
        .filter(|component| component.len() > 1)
        .map(of_component)
        .collect();
    circles.sort_by_key(|circle| (std::cmp::Reverse(circle.files.len()), circle.files.clone()));
    Ok(circles)
}

/// From and to, by number, with the names.
type Edges = BTreeMap<(usize, usize), BTreeSet<String>>;

/// True for code compiled only for tests or models.
fn is_for_tests(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let syn::Meta::List(list) = &attribute.meta else {
            return false;
        };
        let condition = list.tokens.to_string();
        let asks_for = |what: &str| condition.contains(what) && !condition.contains("not");
        list.path.is_ident("cfg") && (asks_for("test") || asks_for("loom"))
    })
}

impl Tree {
    fn read(
        &mut self,
        path: &Path,
        folder: &Path,
        parent: Option<usize>,
    ) -> Result<usize, CircleError> {
        let read = fs::read_to_string(path).map_err(|source| CircleError::Read {
            path: path.to_owned(),
            source,
        });
        let parsed = syn::parse_file(&read?).map_err(|source| CircleError::Parse {
            path: path.to_owned(),
            source,
        })?;
        self.files.push(path.to_owned());
        let file = self.files.len() - 1;
        self.module(&parsed.items, file, parent, folder)
    }

    /// A module of these items, in `file`; the files of its children are in `folder`.
    fn module(
        &mut self,
        items: &[Item],
        file: usize,
        parent: Option<usize>,
        folder: &Path,
    ) -> Result<usize, CircleError> {
        self.modules.push(Module {
            file,
            parent,
            ..Module::default()
        });
        let this = self.modules.len() - 1;
        for item in items {
            match item {
                Item::Mod(child) if !is_for_tests(&child.attrs) => {
                    let name = child.ident.unraw().to_string();
                    let module = self.child(child, file, this, folder)?;
                    self.modules[this].children.insert(name, module);
                }
                Item::Use(item) if !is_for_tests(&item.attrs) => {
                    let imports = &mut self.modules[this].imports;
                    flatten(&item.tree, &mut Vec::new(), &item.vis, imports);
                }
                _ => self.modules[this].items.extend(name_of(item)),
            }
        }
        Ok(this)
    }

    fn child(
        &mut self,
        child: &ItemMod,
        file: usize,
        parent: usize,
        folder: &Path,
    ) -> Result<usize, CircleError> {
        let name = child.ident.unraw().to_string();
        let own = folder.join(&name);
        if let Some((_, items)) = &child.content {
            return self.module(items, file, Some(parent), &own);
        }
        let beside = folder.join(format!("{name}.rs"));
        let within = own.join("mod.rs");
        let path = [beside, within].into_iter().find(|path| path.exists());
        let path = path.ok_or_else(|| CircleError::NoFile {
            path: self.files[file].clone(),
            name,
        })?;
        self.read(&path, &own, Some(parent))
    }

    fn circle(&self, inside: &BTreeSet<usize>, edges: &Edges) -> Circle {
        let path = |file: &usize| self.files[*file].clone();
        let mut files: Vec<_> = inside.iter().map(path).collect();
        files.sort();
        let within = edges
            .iter()
            .filter(|((from, to), _)| inside.contains(from) && inside.contains(to));
        let of_edge = |((from, to), names): (&(usize, usize), &BTreeSet<String>)| {
            (path(from), path(to), names.iter().cloned().collect())
        };
        Circle {
            files,
            uses: within.map(of_edge).collect(),
        }
    }

    /// Edges from each file to those that define the names it uses.
    fn edges(&self) -> Edges {
        let mut edges = Edges::new();
        for (number, module) in self.modules.iter().enumerate() {
            for import in &module.imports {
                let mut path = import.path.clone();
                if import.name == "*" {
                    path.push("*".to_owned());
                }
                if let Some(file) = self.definition(number, &path, &mut BTreeSet::new())
                    && file != module.file
                {
                    edges
                        .entry((module.file, file))
                        .or_default()
                        .insert(import.name.clone());
                }
            }
        }
        edges
    }

    /// The file that defines the item at `path`, as seen from `module`; `None` for other crates' items.
    fn definition(
        &self,
        module: usize,
        path: &[String],
        seen: &mut BTreeSet<(usize, Vec<String>)>,
    ) -> Option<usize> {
        // Re-exports may name one another.
        if !seen.insert((module, path.to_vec())) {
            return None;
        }
        let (first, rest) = path.split_first()?;
        match first.as_str() {
            "crate" => return self.in_module(0, rest, seen),
            "self" => return self.in_module(module, rest, seen),
            "super" => return self.in_module(self.modules[module].parent?, rest, seen),
            _ => {}
        }
        self.in_module(module, path, seen)
    }

    fn in_module(
        &self,
        number: usize,
        path: &[String],
        seen: &mut BTreeSet<(usize, Vec<String>)>,
    ) -> Option<usize> {
        let module = &self.modules[number];
        let Some((first, rest)) = path.split_first() else {
            return Some(module.file);
        };
        if first == "*" {
            return Some(module.file);
        }
        if first == "super" || first == "self" {
            return self.definition(number, path, seen);
        }
        if let Some(child) = module.children.get(first) {
            return self.in_module(*child, rest, seen);
        }
        if module.items.contains(first) {
            return Some(module.file);
        }
        let named = module.imports.iter().filter(|import| import.name == *first);
        let of_named = named.map(|import| import.path.clone());
        let globs = module
            .imports
            .iter()
            .filter(|import| import.name == "*" && import.is_public);
        let of_globs = globs.map(|import| [&import.path[..], std::slice::from_ref(first)].concat());
        let onward: Vec<_> = of_named.chain(of_globs).collect();
        onward.into_iter().find_map(|onward| {
            let whole = [&onward[..], rest].concat();
            self.definition(number, &whole, seen)
        })
    }
}

fn flatten(tree: &UseTree, path: &mut Vec<String>, vis: &Visibility, into: &mut Vec<Import>) {
    let mut add = |path: Vec<String>, name: String| {
        into.push(Import {
            path,
            name,
            is_public: !matches!(vis, Visibility::Inherited),
        });
    };
    match tree {
        UseTree::Path(part) => {
            path.push(part.ident.unraw().to_string());
            flatten(&part.tree, path, vis, into);
            path.pop();
        }
        UseTree::Name(name) if name.ident == "self" => {
            add(path.clone(), path.last().cloned().unwrap_or_default());
        }
        UseTree::Name(name) => {
            let name = name.ident.unraw().to_string();
            add([&path[..], std::slice::from_ref(&name)].concat(), name);
        }
        UseTree::Rename(rename) => {
            let whole = [&path[..], &[rename.ident.unraw().to_string()]].concat();
            add(whole, rename.rename.unraw().to_string());
        }
        UseTree::Glob(_) => add(path.clone(), "*".to_owned()),
        UseTree::Group(group) => {
            for part in &group.items {
                flatten(part, path, vis, into);
            }
        }
    }
}

/// The name that an item defines, if it defines one.
fn name_of(item: &Item) -> Option<String> {
    let ident = match item {
        Item::Const(item) => &item.ident,
        Item::Enum(item) => &item.ident,
        Item::Fn(item) => &item.sig.ident,
        Item::Static(item) => &item.ident,
        Item::Struct(item) => &item.ident,
        Item::Trait(item) => &item.ident,
        Item::TraitAlias(item) => &item.ident,
        Item::Type(item) => &item.ident,
        Item::Union(item) => &item.ident,
        _ => return None,
    };
    Some(ident.unraw().to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    /// A crate of these files, in its own folder, which is removed on drop.
    struct Sample(PathBuf);

    impl Sample {
        fn new(files: &[(&str, &str)]) -> Self {
            static NEXT: AtomicU64 = AtomicU64::new(0);
            let number = NEXT.fetch_add(1, Ordering::Relaxed);
            let name = format!("xtask-circles-{}-{number}", std::process::id());
            let folder = std::env::temp_dir().join(name);
            for (name, text) in files {
                let path = folder.join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, text).unwrap();
            }
            Self(folder)
        }

        fn circles(&self) -> Vec<Vec<String>> {
            let circles = of_crate(&self.0.join("lib.rs")).unwrap();
            let name = |path: &PathBuf| path.strip_prefix(&self.0).unwrap().display().to_string();
            circles
                .iter()
                .map(|circle| circle.files.iter().map(name).collect())
                .collect()
        }
    }

    impl Drop for Sample {
        fn drop(&mut self) {
            fs::remove_dir_all(&self.0).unwrap();
        }
    }

    #[test]
    fn re_exports_are_followed_to_the_file_that_defines() {
        // a uses b by the root's re-export, b uses a by its path: a circle of two, without the root.
        let sample = Sample::new(&[
            ("lib.rs", "mod a; mod b; pub use b::{B as Renamed, C};"),
            ("a.rs", "use crate::{Renamed, C}; pub struct A;"),
            ("b.rs", "use crate::a::A; pub struct B; pub struct C;"),
        ]);
        assert_eq!(sample.circles(), [["a.rs", "b.rs"]]);
    }

    #[test]
    fn files_of_one_direction_and_tests_are_no_circle() {
        let sample = Sample::new(&[
            ("lib.rs", "mod a; mod b; #[cfg(test)] mod c;"),
            (
                "a.rs",
                "use crate::b::inner::B; #[cfg(test)] mod tests { use crate::c::T; }",
            ),
            (
                "b.rs",
                "pub mod inner { pub struct B; } #[cfg(test)] use crate::a::A;",
            ),
            ("c.rs", "use crate::a::A; pub struct T;"),
        ]);
        assert!(sample.circles().is_empty(), "{:?}", sample.circles());
    }

    #[test]
    fn globs_modules_in_folders_and_super_are_resolved() {
        let sample = Sample::new(&[
            ("lib.rs", "pub mod a; pub use a::*;"),
            (
                "a/mod.rs",
                "mod one; mod two; pub use one::*; use two::Two;",
            ),
            ("a/one.rs", "use super::two::Two; pub struct One;"),
            (
                "a/two.rs",
                "use crate::One; use super::super::a::one as also; pub struct Two;",
            ),
        ]);
        assert_eq!(sample.circles(), [["a/one.rs", "a/two.rs"]]);
    }

    #[test]
    fn what_cannot_be_read_is_named() {
        let sample = Sample::new(&[("lib.rs", "mod gone;")]);
        let error = of_crate(&sample.0.join("lib.rs")).unwrap_err().to_string();
        assert!(error.contains("mod gone"), "{error}");
        let sample = Sample::new(&[("lib.rs", "fn (")]);
        assert!(of_crate(&sample.0.join("lib.rs")).is_err());
    }
}
