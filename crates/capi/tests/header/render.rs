// SPDX-License-Identifier: Apache-2.0
//! Items of Rust as declarations of C.
//!
//! Of Rust it knows what the interface needs and stops at everything else: aliases
//! of numbers, transparent structs of one number, structs, and functions; and as
//! types numbers, pointers, those structs, and optional functions.

use std::collections::{BTreeMap, BTreeSet};
use syn::{Attribute, Expr, Fields, FnArg, Item, Lit, Pat, ReturnType, Type};

const WIDTH: usize = 100;

const BEGIN: &str = r#"/* SPDX-License-Identifier: Apache-2.0 */
/*
 * gmem.h: one memory management for CPU and devices (GMEM).
 *
 * A driver writes the operations of its MMU (gm_mmu_t) and no memory management.
 * It makes a device of them (gm_dev_create) and attaches it to an address space
 * (gm_as_attach), where a region of addresses (gm_as_alloc) means the same to the
 * CPU and to every device: wired to the driver's pages (gm_region_map), or filled
 * page by page when somebody faults on it (gm_dev_fault).
 *
 * Functions return GM_RET_OK or why not, and may be called by any thread, several
 * at once. Where a result is given back through a pointer, it is written with
 * GM_RET_OK only. What is not in the paper is marked (Extension.).
 *
 * Two rules that no compiler checks. Hold no lock that a callback takes while calling
 * a function here, as it may run callbacks of operations that were queued before
 * (gm_region_unmap says which do). And a device that has faulted drops its TLB's entry
 * of the page before it tries again (gm_dev_fault).
 *
 * Compiles as C99 and as C++11. Made from the source of libpagetide_gmem: do not edit.
 */
#ifndef PAGETIDE_GMEM_H
#define PAGETIDE_GMEM_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif
"#;

const END: &str = r#"
#ifdef __cplusplus
}
#endif

#endif /* PAGETIDE_GMEM_H */
"#;

/// Macros, each after the item it goes with.
const MACROS: [(&str, &str); 3] = [
    (
        "gm_flags_t",
        r"
/*
 * Flag of gm_region_map: pages of 2^log2 bytes. Without it they have 4 KiB.
 */
#define GM_MAP_PAGE_SIZE(log2) ((int)(log2) << 8)
",
    ),
    (
        "gm_mmu_cpu",
        r"
/*
 * The MMU of the host's CPUs, predefined: gm_dev_create(gm_mmu_CPU, &space,
 * GM_DEV_CAP_RECOVERS, &cpu) makes a device of them, where `space` is a gm_cpu_space_t whose mappings
 * an address space inherits, or NULL. A program cannot hand its own page tables to a library, so such a
 * CPU has a table like any device, and reaches memory at addresses of the space by gm_cpu_read() and
 * gm_cpu_write(). One CPU can be attached to a space.
 */
#define gm_mmu_CPU (gm_mmu_cpu())
",
    ),
    (
        "gm_dev_cpu",
        r"
/*
 * The host's CPUs as a device, predefined, with no mappings to inherit. As any device it is active in
 * one space at a time: a program with several spaces makes a CPU for each, of gm_mmu_CPU.
 */
#define gm_dev_CPU (gm_dev_cpu())
",
    ),
];

/// The header as far as it is written.
pub struct Header {
    text: String,
    /// Aliases and transparent structs, and the numbers they are.
    numbers: BTreeMap<String, String>,
}

/// A constant: name, value, documentation.
type Constant = (String, String, String);

impl Header {
    pub fn new() -> Self {
        Self {
            text: BEGIN.to_owned(),
            numbers: BTreeMap::new(),
        }
    }

    pub fn finish(self) -> String {
        self.text + END
    }

    pub fn add_part(&mut self, title: &str, source: &str) {
        let file: syn::File = syn::parse_str(source).unwrap();
        let rule = "-".repeat(WIDTH - title.len() - 10);
        self.text += &format!("\n/* ---- {title} {rule} */\n");
        let mut constants: BTreeMap<String, Vec<Constant>> = BTreeMap::new();
        for item in &file.items {
            if let Item::Const(item) = item
                && let Some(of) = name_of(&item.ty)
            {
                let value = value_of(&item.expr);
                let constant = (item.ident.to_string(), value, documentation(&item.attrs));
                constants.entry(of).or_default().push(constant);
            }
        }
        for item in &file.items {
            self.add_item(item, &constants);
        }
    }

    fn add_item(&mut self, item: &Item, constants: &BTreeMap<String, Vec<Constant>>) {
        match item {
            Item::Type(item) if is_public(&item.vis) => {
                let name = item.ident.to_string();
                self.add_documentation(&item.attrs);
                self.text += &format!("typedef {};\n", declaration(&item.ty, &name));
                self.numbers.insert(name.clone(), String::new());
                if let Some(constants) = constants.get(&name) {
                    self.text += &format!("\nenum {};\n", enumeration(constants));
                }
                self.add_macros(&name);
            }
            Item::Struct(item) if is_public(&item.vis) => {
                let name = item.ident.to_string();
                self.add_documentation(&item.attrs);
                match &item.fields {
                    Fields::Unnamed(_) => {
                        self.numbers.insert(name.clone(), String::new());
                        let body = enumeration(&constants[&name]);
                        self.text += &format!("typedef enum {} {body} {name};\n", tag(&name));
                    }
                    Fields::Named(fields) if is_opaque(&item.fields) => {
                        assert_eq!(fields.named.len(), 1, "{name}");
                        self.text += &format!("typedef struct {} {name};\n", tag(&name));
                    }
                    Fields::Named(fields) => {
                        self.text += &format!("typedef struct {} {{\n", tag(&name));
                        for field in &fields.named {
                            let comment = comment(&documentation(&field.attrs), "    ");
                            let name = field.ident.as_ref().unwrap().to_string();
                            let declared = declaration(&field.ty, &name);
                            self.text += &comment;
                            self.text += &format!("{};\n", broken(&format!("    {declared}")));
                        }
                        self.text += &format!("}} {name};\n");
                    }
                    Fields::Unit => panic!("{name} is of no use to C"),
                }
            }
            // Of a plain number: the preprocessor may want it.
            Item::Const(item) if is_public(&item.vis) => {
                let of = name_of(&item.ty).unwrap_or_default();
                if !of.starts_with("gm_") {
                    self.add_documentation(&item.attrs);
                    let value = value_of(&item.expr);
                    self.text += &format!("#define {} {value}\n", item.ident);
                }
            }
            Item::Fn(function) if is_exported(function) => {
                self.add_documentation(&function.attrs);
                let name = function.sig.ident.to_string();
                let of_argument = |argument: &FnArg| {
                    let FnArg::Typed(argument) = argument else {
                        panic!("{name} has a receiver");
                    };
                    let Pat::Ident(pattern) = &*argument.pat else {
                        panic!("{name} has an argument without a name");
                    };
                    declaration(&argument.ty, &pattern.ident.to_string())
                };
                let arguments = function.sig.inputs.iter().map(of_argument).collect();
                let whole = format!("{name}({})", list(arguments));
                let declared = returning(&function.sig.output, &whole);
                self.text += &format!("{};\n", broken(&declared));
                self.add_macros(&name);
            }
            _ => {}
        }
    }

    fn add_documentation(&mut self, attrs: &[Attribute]) {
        let text = documentation(attrs);
        assert!(!text.is_empty(), "an item of the interface says nothing");
        self.text += "\n";
        self.text += &comment(&text, "");
    }

    fn add_macros(&mut self, after: &str) {
        for (_, text) in MACROS.iter().filter(|(item, _)| *item == after) {
            self.text += text;
        }
    }
}

fn is_public(visibility: &syn::Visibility) -> bool {
    matches!(visibility, syn::Visibility::Public(_))
}

/// True if C sees the function: in every build, so without a condition.
pub fn is_exported(function: &syn::ItemFn) -> bool {
    let has = |name: &str| function.attrs.iter().any(|attr| attr.path().is_ident(name));
    has("unsafe") && !has("cfg")
}

/// The functions that a header declares.
pub fn functions(header: &str) -> BTreeSet<String> {
    let begins = |line: &&str| line.starts_with(|first: char| first.is_ascii_lowercase());
    let lines = header.lines().filter(begins);
    let lines = lines.filter(|line| !line.starts_with("typedef") && !line.starts_with("enum"));
    lines
        .filter_map(|line| line.split('(').next())
        .filter_map(|head| head.split([' ', '*']).next_back())
        .map(str::to_owned)
        .filter(|name| name.starts_with("gm_"))
        .collect()
}

/// The documentation of an item, without what concerns Rust alone.
pub fn documentation(attrs: &[Attribute]) -> String {
    let mut lines = Vec::new();
    for attr in attrs.iter().filter(|attr| attr.path().is_ident("doc")) {
        if let syn::Meta::NameValue(pair) = &attr.meta
            && let Expr::Lit(value) = &pair.value
            && let Lit::Str(line) = &value.lit
        {
            lines.push(line.value().trim().to_owned());
        }
    }
    let safety = lines.iter().position(|line| line == "# Safety");
    lines.truncate(safety.unwrap_or(lines.len()));
    lines.join("\n").trim().to_owned()
}

fn comment(text: &str, indent: &str) -> String {
    let one_line = format!("{indent}/* {text} */\n");
    if !text.contains('\n') && one_line.len() <= WIDTH {
        return one_line;
    }
    // As wide as the source is, or narrower where it stands further in.
    let mut lines = String::new();
    for paragraph in text.split("\n\n") {
        if !lines.is_empty() {
            lines += &format!("{indent} *\n");
        }
        let words: Vec<String> = paragraph.split_whitespace().map(str::to_owned).collect();
        for line in filled(words, WIDTH - indent.len() - 3) {
            lines += &format!("{indent} * {line}\n");
        }
    }
    format!("{indent}/*\n{lines}{indent} */\n")
}

/// Words in lines no longer than `width`.
fn filled(words: Vec<String>, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in words {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= width => {
                line.push(' ');
                line.push_str(&word);
            }
            _ => lines.push(word),
        }
    }
    lines
}

/// A declaration, cut at its commas if it is long.
fn broken(declaration: &str) -> String {
    if declaration.len() < WIDTH {
        return declaration.to_owned();
    }
    let indent = declaration.len() - declaration.trim_start().len();
    let words = declaration.trim_start().split(", ");
    let mut words: Vec<String> = words.map(|part| format!("{part},")).collect();
    if let Some(last) = words.last_mut() {
        last.pop();
    }
    let inner = " ".repeat(indent + 4);
    let lines = filled(words, WIDTH - indent - 5);
    format!(
        "{}{}",
        " ".repeat(indent),
        lines.join(&format!("\n{inner}"))
    )
}

fn enumeration(constants: &[Constant]) -> String {
    let mut body = String::from("{\n");
    for (name, value, text) in constants {
        assert!(!text.is_empty(), "{name} says nothing");
        body += &comment(text, "    ");
        body += &format!("    {name} = {value},\n");
    }
    // C99 allows the last comma, C++98 would not.
    body.truncate(body.len() - 2);
    body + "\n}"
}

/// What stands behind `struct` or `enum`.
fn tag(name: &str) -> &str {
    name.strip_suffix("_t").unwrap_or(name)
}

fn is_opaque(fields: &Fields) -> bool {
    fields
        .iter()
        .any(|field| matches!(field.ty, Type::Array(_)))
}

fn name_of(ty: &Type) -> Option<String> {
    match ty {
        Type::Path(path) => path.path.get_ident().map(ToString::to_string),
        _ => None,
    }
}

/// A number, be it in a transparent struct.
fn value_of(expr: &Expr) -> String {
    match expr {
        Expr::Lit(value) => match &value.lit {
            Lit::Int(number) => number.to_string().replace('_', ""),
            _ => panic!("a constant is no number"),
        },
        Expr::Call(call) => value_of(&call.args[0]),
        _ => String::new(),
    }
}

fn list(arguments: Vec<String>) -> String {
    if arguments.is_empty() {
        "void".to_owned()
    } else {
        arguments.join(", ")
    }
}

fn returning(output: &ReturnType, rest: &str) -> String {
    match output {
        ReturnType::Default => format!("void {rest}"),
        ReturnType::Type(_, ty) => declaration(ty, rest),
    }
}

/// `name` declared to be of a type.
fn declaration(ty: &Type, name: &str) -> String {
    let name = name.strip_prefix("r#").unwrap_or(name);
    match ty {
        Type::Ptr(pointer) => {
            let inner = declaration(&pointer.elem, &format!("*{name}"));
            let is_const = pointer.const_token.is_some();
            assert!(
                !is_const || !matches!(*pointer.elem, Type::Ptr(_)),
                "{name}"
            );
            if is_const {
                format!("const {inner}")
            } else {
                inner
            }
        }
        Type::Path(path) => {
            let last = path.path.segments.last().unwrap();
            if let syn::PathArguments::AngleBracketed(of) = &last.arguments {
                assert_eq!(last.ident, "Option", "{name}");
                let syn::GenericArgument::Type(Type::BareFn(function)) = &of.args[0] else {
                    panic!("{name} is an option of no function");
                };
                return function_pointer(function, name);
            }
            format!("{} {name}", plain(&last.ident.to_string()))
        }
        _ => panic!("{name} has a type that C does not know"),
    }
}

fn function_pointer(function: &syn::TypeBareFn, name: &str) -> String {
    let of_argument = |argument: &syn::BareFnArg| {
        let (given, _) = argument.name.as_ref().expect("arguments have names");
        declaration(&argument.ty, &given.to_string())
    };
    let arguments = function.inputs.iter().map(of_argument).collect();
    returning(&function.output, &format!("(*{name})({})", list(arguments)))
}

fn plain(name: &str) -> &str {
    match name {
        "u8" => "uint8_t",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "usize" => "size_t",
        "bool" => "bool",
        "c_int" => "int",
        "c_char" => "char",
        "c_void" => "void",
        ours if ours.starts_with("gm_") => ours,
        _ => panic!("{name} is no type of the interface"),
    }
}
