// SPDX-License-Identifier: Apache-2.0
//! C programs that use the library, built and run.
//!
//! The libraries are built for it once, in a folder of the tests' own, with the
//! one function more that panics on purpose. Each program is built by the
//! system's C compiler, strictly, and linked against the shared library; one
//! against the static one as well. A machine without a compiler says SKIPPED.

#[path = "header/render.rs"]
#[expect(dead_code, reason = "only the list of functions is wanted here")]
mod render;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::{Command, Output},
    sync::OnceLock,
};

const C: [&str; 7] = [
    "-std=c99",
    "-D_POSIX_C_SOURCE=200809L",
    "-Wall",
    "-Wextra",
    "-Werror",
    "-pedantic",
    "-O1",
];

fn room() -> &'static Path {
    Path::new(env!("CARGO_TARGET_TMPDIR"))
}

fn source(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn succeed(command: &mut Command) -> Output {
    let output = command
        .output()
        .unwrap_or_else(|error| panic!("{command:?}: {error}"));
    let told = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(
        output.status.success(),
        "{command:?}: {}\n{}{}",
        output.status,
        told(&output.stdout),
        told(&output.stderr)
    );
    output
}

/// Says so and returns `None` if this machine has no such compiler.
fn compiler(name: &'static str) -> Option<Command> {
    if Command::new(name).arg("--version").output().is_err() {
        eprintln!("SKIPPED: no {name} on this machine");
        return None;
    }
    Some(Command::new(name))
}

/// Where the libraries are.
fn libraries() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let target = room().join("capi");
        let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
        succeed(
            Command::new(cargo)
                .args(["build", "--quiet", "--package", "pagetide-capi"])
                .args(["--features", "provoke-panic", "--target-dir"])
                .arg(&target)
                .current_dir(source("")),
        );
        target.join("debug")
    })
}

/// How a program is linked.
#[derive(Clone, Copy)]
enum Link {
    Shared,
    Static,
    /// As `Shared`, with every function behind a macro that keeps its name when it has succeeded.
    Counting,
}

/// A header, to come before all others, that lets a program write the names of the functions that have
/// returned GM_RET_OK, or anything if that is not what they return, to the file `GMEM_CALLED`.
fn counting_header() -> PathBuf {
    let header = std::fs::read_to_string(source("include/gmem.h")).unwrap();
    let names = render::functions(&header);
    let mut text = String::from("#include <gmem.h>\n#include <stdio.h>\n#include <stdlib.h>\n");
    text += &format!("static unsigned char gm_called[{}];\n", names.len());
    text += "\
static inline void gm_count(int number)
{
    __atomic_store_n(&gm_called[number], 1, __ATOMIC_RELAXED);
}

static inline gm_ret_t gm_count_ok(int number, gm_ret_t ret)
{
    if (ret == GM_RET_OK)
        gm_count(number);
    return ret;
}

__attribute__((destructor)) static void gm_tell_called(void)
{
    const char *path = getenv(\"GMEM_CALLED\");
    FILE *file = path == NULL ? NULL : fopen(path, \"w\");
    if (file == NULL)
        return;
";
    for (number, name) in names.iter().enumerate() {
        text += &format!("    if (gm_called[{number}])\n        fputs(\"{name}\\n\", file);\n");
    }
    text += "    fclose(file);\n}\n";
    for (number, name) in names.iter().enumerate() {
        let counted = if header.contains(&format!("\ngm_ret_t {name}(")) {
            format!("gm_count_ok({number}, {name}(__VA_ARGS__))")
        } else {
            format!("(gm_count({number}), {name}(__VA_ARGS__))")
        };
        text += &format!("#define {name}(...) {counted}\n");
    }
    let path = room().join("called.h");
    std::fs::write(&path, text).unwrap();
    path
}

/// The functions that have succeeded in a program that was built so.
fn called_by(program: &Path) -> Option<BTreeSet<String>> {
    let built = build(program, Link::Counting)?;
    let told = built.with_extension("called");
    let mut command = Command::new(built);
    command.env_remove("LD_LIBRARY_PATH");
    succeed(command.env("GMEM_CALLED", &told));
    let text = std::fs::read_to_string(told).unwrap();
    Some(text.lines().map(str::to_owned).collect())
}

/// Builds a program; `None` without a compiler.
fn build(program: &Path, link: Link) -> Option<PathBuf> {
    let name = program.file_stem().unwrap().to_string_lossy();
    let libraries = libraries();
    let mut cc = compiler("cc")?;
    cc.args(C).arg("-I").arg(source("include")).arg(program);
    let built = match link {
        Link::Shared | Link::Counting => {
            cc.arg("-L").arg(libraries).arg("-lpagetide_gmem");
            cc.arg(format!("-Wl,-rpath,{}", libraries.display()));
            if let Link::Counting = link {
                cc.arg("-include").arg(counting_header());
                room().join(format!("{name}-counting"))
            } else {
                room().join(format!("{name}-shared"))
            }
        }
        Link::Static => {
            cc.arg(libraries.join("libpagetide_gmem.a"));
            cc.args(["-lgcc_s", "-lm", "-ldl"]);
            room().join(format!("{name}-static"))
        }
    };
    succeed(cc.arg("-pthread").arg("-o").arg(&built));
    Some(built)
}

/// Builds and runs a program; what it printed.
fn run(program: &str, link: Link) -> Option<String> {
    let built = build(&source(program), link)?;
    // Cargo's own, which would come before the program's: it leads to another build of the library.
    let output = succeed(Command::new(built).env_remove("LD_LIBRARY_PATH"));
    Some(String::from_utf8(output.stdout).unwrap())
}

#[test]
fn functions_of_the_header_do_what_they_say() {
    for link in [Link::Shared, Link::Static] {
        if let Some(told) = run("tests/c/functions.c", link) {
            assert_eq!(told, "functions: all as said\n");
        }
    }
}

#[test]
fn every_code_is_returned_by_its_call_and_misuse_is_refused() {
    if let Some(told) = run("tests/c/codes.c", Link::Shared) {
        assert_eq!(told, "codes: every one has its call\n");
    }
}

#[test]
fn asynchronous_operations_call_back_after_the_invalidation_only() {
    if let Some(told) = run("tests/c/asynchronous.c", Link::Shared) {
        assert_eq!(told, "asynchronous: all as said\n");
    }
}

#[test]
fn threads_that_use_one_space_find_every_byte_as_written() {
    if let Some(told) = run("tests/c/threads.c", Link::Shared) {
        assert_eq!(told, "threads: every byte as written\n");
    }
}

#[test]
fn example_of_a_cpu_and_two_devices_prints_what_it_shows() {
    const TOLD: &str = "\
the CPU has written: 2 pages in host memory, 0 in the GPU's
the GPU has worked: 0 pages in host memory, 2 in the GPU's
the CPU has read: 2 pages in host memory, 0 in the GPU's
the CPU reads: ONE ADDRESS MEANS THE SAME TO ALL (2 faults of the GPU)
the NIC has summed 8 buffers to 28
8 callbacks; the NIC reaches 0 of the buffers
";
    for link in [Link::Shared, Link::Static] {
        if let Some(told) = run("../../examples/c/two_devices.c", link) {
            assert_eq!(told, TOLD);
        }
    }
}

#[test]
fn every_function_of_the_header_succeeds_in_the_c_tests() {
    // One that is refused, as with a NULL handle, does not count: else the test could not fail.
    let refused = room().join("refused.c");
    let text = "int main(void) { return gm_as_destroy(NULL) == GM_RET_OK || gm_version() == 0; }\n";
    std::fs::write(&refused, text).unwrap();
    let Some(by_refused) = called_by(&refused) else {
        return;
    };
    assert_eq!(by_refused, BTreeSet::from(["gm_version".to_owned()]));

    let mut called = BTreeSet::new();
    for program in ["functions.c", "codes.c", "asynchronous.c"] {
        called.extend(called_by(&source("tests/c").join(program)).unwrap());
    }
    let header = std::fs::read_to_string(source("include/gmem.h")).unwrap();
    assert_eq!(called, render::functions(&header));
}

#[test]
fn header_stands_alone_in_strict_c_and_in_cpp() {
    let languages = [
        ("cc", "c", "c99"),
        ("cc", "c", "c11"),
        ("c++", "c++", "c++11"),
        ("c++", "c++", "c++17"),
    ];
    let includes = room().join("includes-gmem.c");
    std::fs::write(&includes, "#include <gmem.h>\n#include <gmem.h>\n").unwrap();
    for (name, language, standard) in languages {
        let Some(mut compiler) = compiler(name) else {
            continue;
        };
        compiler.args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only"]);
        compiler
            .arg(format!("-std={standard}"))
            .args(["-x", language]);
        compiler.arg("-I").arg(source("include")).arg(&includes);
        succeed(&mut compiler);
    }
}

#[test]
fn shared_library_exports_what_the_header_declares_and_nothing_else() {
    let Some(mut nm) = compiler("nm") else {
        return;
    };
    nm.args(["--dynamic", "--defined-only", "--format=just-symbols"]);
    let output = succeed(nm.arg(libraries().join("libpagetide_gmem.so")));
    let text = String::from_utf8(output.stdout).unwrap();
    let mut exported: BTreeSet<String> = text.lines().map(str::to_owned).collect();
    assert!(exported.remove("gm_provoke_panic"), "this build has it");
    let header = std::fs::read_to_string(source("include/gmem.h")).unwrap();
    assert_eq!(exported, render::functions(&header));
}
