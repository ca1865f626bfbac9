// SPDX-License-Identifier: Apache-2.0
//! `include/gmem.h` is what the source says.
//!
//! The header is made of `src/types.rs` and `src/interface/*.rs`: their items, in
//! their order, with their documentation. `UPDATE_DOCS=1 cargo test -p
//! pagetide-capi --test header` writes it.

#[path = "header/render.rs"]
mod render;

use std::{collections::BTreeSet, fs, path::Path};

/// The files of the interface, each with its title in the header.
const PARTS: [(&str, &str); 6] = [
    ("space", "Virtual address spaces"),
    ("device", "Devices"),
    ("region", "Regions"),
    ("mapping_set", "Mapping sets"),
    ("cpu", "The host's CPUs"),
    ("library", "This library"),
];

fn source(path: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("src").join(path);
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn generated() -> String {
    let mut header = render::Header::new();
    header.add_part("Types", &source("types.rs"));
    for (file, title) in PARTS {
        header.add_part(title, &source(&format!("interface/{file}.rs")));
    }
    header.finish()
}

#[test]
fn header_is_what_the_source_says() {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("include/gmem.h");
    let generated = generated();
    if std::env::var_os("UPDATE_DOCS").is_some() {
        fs::write(&path, &generated).unwrap();
    }
    let written = fs::read_to_string(&path).unwrap_or_default();
    assert!(
        written == generated,
        "include/gmem.h is not what the source says: run this test with UPDATE_DOCS=1"
    );
}

/// All files under `src`.
fn files(folder: &Path, found: &mut Vec<std::path::PathBuf>) {
    for entry in fs::read_dir(folder).unwrap() {
        let path = entry.unwrap().path();
        if path.is_dir() {
            files(&path, found);
        } else {
            found.push(path);
        }
    }
}

#[test]
fn every_exported_name_of_the_source_is_in_the_header() {
    let mut all = Vec::new();
    files(&Path::new(env!("CARGO_MANIFEST_DIR")).join("src"), &mut all);
    let mut exported = BTreeSet::new();
    for path in all {
        let text = fs::read_to_string(path).unwrap();
        let mut lines = text.lines();
        while let Some(line) = lines.next() {
            if line.contains("no_mangle") || line.contains("export_name") {
                let rest: Vec<&str> = lines.by_ref().take(1).collect();
                let name = rest[0]
                    .split("fn ")
                    .nth(1)
                    .and_then(|rest| rest.split('(').next());
                exported.insert(name.expect("a function follows").to_owned());
            }
        }
    }
    assert!(exported.remove("gm_provoke_panic"), "the tests' own");
    let header = generated();
    let declared: BTreeSet<String> = render::functions(&header);
    assert_eq!(exported, declared);
    assert!(exported.len() > 20);
}

/// The functions of the paper (4.1), by name.
const PAPERS: [&str; 17] = [
    "gm_as_create",
    "gm_as_destroy",
    "gm_as_attach",
    "gm_as_alloc",
    "gm_as_lookup",
    "gm_as_synchronize",
    "gm_dev_create",
    "gm_dev_destroy",
    "gm_dev_switch",
    "gm_dev_detach",
    "gm_dev_fault",
    "gm_dev_register_physmem",
    "gm_region_map",
    "gm_region_unmap",
    "gm_region_dealloc",
    "gm_mapping_set_unmap",
    "gm_region_set_policy",
];

#[test]
fn what_is_not_the_papers_says_that_it_is_extension_and_the_papers_does_not() {
    for part in PARTS {
        let file: syn::File = syn::parse_str(&source(&format!("interface/{}.rs", part.0))).unwrap();
        for item in &file.items {
            let syn::Item::Fn(function) = item else {
                continue;
            };
            if !render::is_exported(function) {
                continue;
            }
            let name = function.sig.ident.to_string();
            // These two stand behind the paper's names.
            if ["gm_mmu_cpu", "gm_dev_cpu"].contains(&name.as_str()) {
                continue;
            }
            let is_extension = render::documentation(&function.attrs).contains("(Extension.)");
            assert_eq!(is_extension, !PAPERS.contains(&name.as_str()), "{name}");
        }
    }
}

#[test]
fn header_names_every_function_and_type_of_the_paper() {
    let header = generated();
    let functions = render::functions(&header);
    for name in PAPERS {
        assert!(functions.contains(name), "{name}");
    }
    let types = [
        "gm_as_t",
        "gm_va_t",
        "gm_pa_t",
        "gm_region_t",
        "gm_prot_t",
        "gm_mapping_set_t",
        "gm_as_alloc_t",
        "gm_mmu_t",
        "gm_dev_t",
        "gm_mmu_mode_t",
        "gm_dev_cap_t",
        "gm_ret_t",
        "gm_region_placement_t",
    ];
    for name in types {
        let defined = header
            .lines()
            .any(|line| line.ends_with(&format!(" {name};")));
        assert!(defined, "{name}");
    }
    assert!(header.contains("#define gm_dev_CPU "));
    assert!(header.contains("#define gm_mmu_CPU "));
}

#[test]
fn page_about_the_interface_names_every_function_type_and_code() {
    let page = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/gmem.md");
    let page = fs::read_to_string(page).unwrap();
    let header = generated();
    let mut names = render::functions(&header);
    let constants = header.lines().filter_map(|line| {
        let (name, _) = line.trim_start().split_once(" = ")?;
        name.starts_with("GM_RET_").then(|| name.to_owned())
    });
    names.extend(constants);
    let missing: Vec<&String> = names
        .iter()
        .filter(|name| !page.contains(&format!("`{name}`")))
        .collect();
    assert!(missing.is_empty(), "docs/gmem.md lacks {missing:?}");
}
