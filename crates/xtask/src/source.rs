// SPDX-License-Identifier: Apache-2.0
//! Rules for each source file: its header, its length, words it may not contain.
//!
//! Text is checked line by line and not parsed: the rules concern what a reader sees. Comments are ignored.
//! For the length, everything after the file's `#[cfg(test)] mod tests` is ignored, too, as long tests are
//! no burden.

/// Most lines of a file without its tests.
const MOST_LINES: usize = 600;

const LICENCE_LINE: &str = "// SPDX-License-Identifier: Apache-2.0";

/// A word that code may not contain, and what to write instead.
struct Forbidden {
    word: &'static str,
    instead: &'static str,
}

const FORBIDDEN: [Forbidden; 7] = [
    Forbidden {
        word: concat!("#[", "allow("),
        instead: "write #[expect(lint, reason = \"…\")], which ends with its cause",
    },
    Forbidden {
        word: concat!("#![", "allow("),
        instead: "write #![expect(lint, reason = \"…\")], which ends with its cause",
    },
    Forbidden {
        word: concat!("#[", "ignore"),
        instead: "let the test look whether it can run, and say SKIPPED with the reason",
    },
    Forbidden {
        word: concat!("todo", "!("),
        instead: "finish it, or leave it out",
    },
    Forbidden {
        word: concat!("unimplemented", "!("),
        instead: "finish it, or leave it out",
    },
    Forbidden {
        word: concat!(".ok", "()?"),
        instead: "an error is not an absence: name it, or match on it",
    },
    Forbidden {
        word: concat!("let _", " = "),
        instead: "say why the result does not matter",
    },
];

/// All findings in a file, each as `line: sentence`.
pub fn check(name: &str, text: &str) -> Vec<String> {
    let lines: Vec<&str> = text.lines().collect();
    let mut findings = header(&lines);
    findings.extend(length(name, &lines));
    findings.extend(words(&lines));
    findings
}

fn header(lines: &[&str]) -> Vec<String> {
    let mut findings = Vec::new();
    if lines.first() != Some(&LICENCE_LINE) {
        findings.push(format!("1: the first line is not `{LICENCE_LINE}`"));
    }
    if !lines.get(1).is_some_and(|line| line.starts_with("//! ")) {
        findings.push("2: the second line does not begin the module's `//!` header".to_owned());
    }
    findings
}

fn length(name: &str, lines: &[&str]) -> Option<String> {
    if name.contains("/tests/") || name.ends_with("tests.rs") {
        return None;
    }
    let tests = lines.windows(2).position(|pair| {
        pair[0].starts_with("#[cfg(") && pair[0].contains("test") && pair[1].starts_with("mod ")
    });
    let length = tests.unwrap_or(lines.len());
    (length > MOST_LINES).then(|| {
        format!(
            "{length}: {length} lines without tests, more than {MOST_LINES}: split it by theory"
        )
    })
}

fn words(lines: &[&str]) -> Vec<String> {
    let mut findings = Vec::new();
    for (index, line) in lines.iter().enumerate() {
        if line.trim_start().starts_with("//") {
            continue;
        }
        for Forbidden { word, instead } in &FORBIDDEN {
            if line.contains(word) {
                findings.push(format!("{}: `{}`: {instead}", index + 1, word.trim()));
            }
        }
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;

    const HEAD: &str = "// SPDX-License-Identifier: Apache-2.0\n//! Theory.\n";

    #[test]
    fn file_with_header_and_plain_code_has_no_findings() {
        assert_eq!(
            check("a.rs", &format!("{HEAD}fn f() {{}}\n")),
            Vec::<String>::new()
        );
    }

    #[test]
    fn missing_licence_and_missing_theory_are_two_findings() {
        assert_eq!(check("a.rs", "fn f() {}\n").len(), 2);
    }

    #[test]
    fn each_forbidden_word_is_found_at_its_line_but_not_in_comments() {
        for Forbidden { word, .. } in &FORBIDDEN {
            let findings = check("a.rs", &format!("{HEAD}\n    {word}x;\n// {word}\n"));
            assert_eq!(findings.len(), 1, "{word}");
            assert!(findings[0].starts_with("4: "), "{}", findings[0]);
        }
    }

    #[test]
    fn length_counts_up_to_the_tests() {
        let code = "fn f() {}\n".repeat(MOST_LINES - 2);
        let tests = format!("#[cfg(test)]\nmod tests {{\n{}}}\n", "// x\n".repeat(500));
        assert_eq!(
            check("a.rs", &format!("{HEAD}{code}{tests}")),
            Vec::<String>::new()
        );
        assert_eq!(
            check("a.rs", &format!("{HEAD}{code}fn g() {{}}\n{tests}")).len(),
            1
        );
        assert_eq!(
            check("crates/a/tests/a.rs", &format!("{HEAD}{code}{code}")),
            Vec::<String>::new()
        );
    }
}
