// SPDX-License-Identifier: Apache-2.0
//! The commands of `pagetide-lab` by way of `pagetide`.

use std::path::Path;
use std::process::{Command, Output};

const PAGETIDE: &str = env!("CARGO_BIN_EXE_pagetide");
const LAB: &str = env!("CARGO_BIN_EXE_pagetide-lab");
const COMMANDS: [&str; 5] = ["bench", "replay", "sim", "trace", "vpri"];

fn run(program: &Path, words: &[&str]) -> Output {
    Command::new(program).args(words).output().unwrap()
}

#[test]
fn lab_gets_each_word_and_its_status_and_output_come_back() {
    for command in COMMANDS {
        for words in [
            &[command, "--help"][..],
            &[command, "--no-such-flag", "-x", "--", "a b"],
        ] {
            let (ours, its) = (run(PAGETIDE.as_ref(), words), run(LAB.as_ref(), words));
            assert_eq!(ours.status.code(), its.status.code(), "{words:?}");
            assert_eq!(ours.stdout, its.stdout, "{words:?}");
            assert_eq!(ours.stderr, its.stderr, "{words:?}");
            let said = String::from_utf8([ours.stdout, ours.stderr].concat()).unwrap();
            assert!(
                said.contains(&format!("Usage: pagetide {command}")),
                "{said}"
            );
        }
    }
}

#[test]
fn without_the_lab_its_commands_are_refused_with_one_sentence() {
    // A link, not a copy: a file that is being written cannot be run, and a process that another test starts
    // at that moment has it open.
    let dir = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap();
    let alone = dir.path().join("pagetide");
    std::fs::hard_link(PAGETIDE, &alone).unwrap();
    for command in COMMANDS {
        let output = run(&alone, &[command, "--help"]);
        let said = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(output.stdout.is_empty());
        assert_eq!(said.lines().count(), 1, "{said}");
        let program = dir.path().join("pagetide-lab");
        assert!(said.contains(&*program.to_string_lossy()), "{said}");
        assert!(said.contains("cargo build --release -p pagetide"), "{said}");
    }
}
