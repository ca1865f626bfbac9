// SPDX-License-Identifier: Apache-2.0
//! Memory of real programs: what it takes in zstd over what it takes in lz4.
//!
//! The programs are started here, build something as they do in use, and their private memory is read while they
//! hold it. Nothing is shipped: the pages are those of this machine's versions. A program that the machine has
//! not is left out, with the reason.
//!
//! | program | holds |
//! |---|---|
//! | Python | syntax trees of its own library, dictionaries of texts and numbers |
//! | SQLite | a database in memory, with an index |
//! | Redis | hashes and strings |
//! | rustc | a library that it compiles, stopped in the midst of it |
//!
//! Pages are counted as the pool keeps them ([`TierBytes`]), and zram gets the same.

use crate::{
    daemon::directory_in,
    harness::figures::to_f64,
    interrupt::Interrupted,
    kernel_swap::{Compressor, KernelSwap},
    orders::Ordered,
    redis::RedisServer,
    tiers::{TierBytes, compressible, memory_of},
};
use pagetide_addr::PAGE_BYTES;
use pagetide_swap::tier::PAGE;
use std::{
    fmt::Write as _,
    path::Path,
    process::Command,
    time::{Duration, Instant},
};

/// Pages of each that are packed, evenly over all of its memory.
const PAGES_MAX: usize = 8_000;
/// Longest time for a program to build what it holds.
const READY_WAIT: Duration = Duration::from_secs(60);
/// Memory with which a compiler is in the midst of its work.
const BUSY_BYTES: u64 = 96 << 20;
const LOOK: Duration = Duration::from_millis(5);
const READY: &str = "ready";

/// What one program's memory came to.
pub(super) struct ProgramMeasured {
    pub(super) bytes: TierBytes,
    /// What zram takes for a page, with lz4.
    pub(super) zram_bytes_per_page: Result<f64, String>,
}

/// See the module.
#[derive(Default)]
pub(super) struct Programs {
    pub(super) by_name: Vec<(&'static str, Result<ProgramMeasured, String>)>,
}

/// Starts a program and returns its memory.
type Dump = fn(&Path) -> Result<Vec<[u8; PAGE]>, String>;

const PROGRAMS: [(&str, Dump); 4] = [
    ("python", python),
    ("sqlite", sqlite),
    ("redis", redis),
    ("rustc", rustc),
];

impl Programs {
    pub(super) fn measure(interrupted: &Interrupted) -> Result<Self, String> {
        let dir = directory_in(&std::env::temp_dir())?;
        let mut programs = Self::default();
        for (name, dump) in PROGRAMS {
            interrupted.check()?;
            let measured = dump(dir.path()).and_then(|pages| measured(&pages));
            programs.by_name.push((name, measured));
        }
        Ok(programs)
    }

    /// Of all programs that were measured.
    pub(super) fn all(&self) -> Option<TierBytes> {
        let measured = self.by_name.iter().filter_map(|(_, it)| it.as_ref().ok());
        measured.map(|it| it.bytes).reduce(TierBytes::and)
    }
}

fn measured(pages: &[[u8; PAGE]]) -> Result<ProgramMeasured, String> {
    let bytes = TierBytes::of(pages.iter()).map_err(|error| error.to_string())?;
    if bytes.pages == 0 {
        return Err("none of its pages compresses".to_owned());
    }
    let on_zram = || {
        let zram = KernelSwap::on_zram(pages.len() as u64 * PAGE_BYTES, Compressor::Lz4)?;
        let pages = compressible(pages);
        let count = pages.len() as u64;
        zram.write(pages.into_iter().copied())?;
        Ok(to_f64(zram.memory_bytes()?) / to_f64(count))
    };
    Ok(ProgramMeasured {
        bytes,
        zram_bytes_per_page: on_zram(),
    })
}

fn memory(pid: u32) -> Result<Vec<[u8; PAGE]>, String> {
    memory_of(pid, PAGES_MAX).map_err(|error| format!("its memory cannot be read: {error}"))
}

/// The memory of a program that says when it is ready.
fn when_ready(program: &mut Ordered, script: &str) -> Result<Vec<[u8; PAGE]>, String> {
    program.tell(script)?;
    let begun = Instant::now();
    while program.line_within(READY_WAIT)? != READY {
        if begun.elapsed() > READY_WAIT {
            return Err("it does not get ready".to_owned());
        }
    }
    memory(program.pid())
}

/// A program of this machine.
fn start(name: &str, arguments: &[&str]) -> Result<Ordered, String> {
    Ordered::start(Command::new(name).args(arguments)).map_err(|error| format!("{name}: {error}"))
}

fn python(_: &Path) -> Result<Vec<[u8; PAGE]>, String> {
    const SCRIPT: &str = r#"
import ast, glob, json, os, sys
held = []
for path in sorted(glob.glob(os.path.dirname(ast.__file__) + "/*.py"))[:60]:
    with open(path, encoding="utf-8", errors="replace") as file:
        text = file.read()
    try:
        held.append((text, ast.parse(text)))
    except SyntaxError:
        pass
held.append({f"user:{n:07}": {"id": n, "name": f"name {n % 997}", "score": n * 0.37} for n in range(60000)})
held.append(json.dumps(held[-1]))
print("ready", flush=True)
sys.stdin.readline()
"#;
    let mut python = start("python3", &["-c", SCRIPT])?;
    when_ready(&mut python, "")
}

fn sqlite(_: &Path) -> Result<Vec<[u8; PAGE]>, String> {
    const SCRIPT: &str = "
PRAGMA cache_size = -200000;
CREATE TABLE orders (id INTEGER PRIMARY KEY, customer TEXT, item TEXT, price REAL, day INTEGER);
WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 300000)
INSERT INTO orders SELECT i, 'customer ' || (i * 7919 % 20011), 'item-' || (i % 613), (i * 31 % 10000) / 100.0,
19000 + i % 700 FROM n;
CREATE INDEX by_customer ON orders (customer, day);
.print ready
";
    let mut sqlite = start("sqlite3", &["-batch", ":memory:"])?;
    when_ready(&mut sqlite, SCRIPT)
}

fn redis(dir: &Path) -> Result<Vec<[u8; PAGE]>, String> {
    const LOAD: &str = "for i = 1, 60000 do redis.call('HSET', 'user:' .. i, 'name', 'name ' .. (i * 7919 % 20011), \
                        'mail', 'u' .. i .. '@example.org', 'visits', i % 613) redis.call('SET', 'page:' .. i, \
                        '<li><a href=\"/item/' .. i .. '\">item ' .. (i % 997) .. '</a></li>') end return 'ready'";
    let server = RedisServer::start(dir)?;
    let port = server.port().to_string();
    let loaded = Command::new("redis-cli")
        .args(["-p", &port, "EVAL", LOAD, "0"])
        .output()
        .map_err(|error| format!("redis-cli: {error}"))?;
    if String::from_utf8_lossy(&loaded.stdout).trim() == READY {
        return memory(server.pid());
    }
    let said = String::from_utf8_lossy(&loaded.stderr).into_owned();
    Err(format!("redis-server takes nothing: {said}"))
}

fn rustc(dir: &Path) -> Result<Vec<[u8; PAGE]>, String> {
    const FUNCTIONS: u32 = 6_000;
    let source = dir.join("library.rs");
    let mut text = String::new();
    for number in 0..FUNCTIONS {
        writeln!(
            text,
            "#[derive(Clone, Debug, Default, PartialEq)] pub struct Row{number} {{ pub id: u64, pub name: String, \
             pub parts: Vec<u32> }}\nimpl Row{number} {{ pub fn total(&self) -> u64 {{ self.parts.iter().map(|it| \
             u64::from(*it) * {number}).sum::<u64>() + self.id }} }}"
        )
        .map_err(|error| error.to_string())?;
    }
    std::fs::write(&source, text).map_err(|error| format!("{}: {error}", source.display()))?;
    let source = source.to_string_lossy();
    let out = dir.join("library.rlib");
    let out = out.to_string_lossy();
    let compiler = start(
        "rustc",
        &[
            "--edition",
            "2021",
            "--crate-type",
            "lib",
            "-A",
            "warnings",
            "-o",
            &out,
            &source,
        ],
    )?;
    stop_at(compiler.pid(), BUSY_BYTES)?;
    memory(compiler.pid())
}

/// Stops a process once it has so much memory of its own.
fn stop_at(pid: u32, bytes: u64) -> Result<(), String> {
    let process = i32::try_from(pid)
        .ok()
        .and_then(rustix::process::Pid::from_raw);
    let process = process.ok_or("it has no process id")?;
    let begun = Instant::now();
    while private_bytes(pid)? < bytes {
        if begun.elapsed() > READY_WAIT {
            return Err("it does not get busy".to_owned());
        }
        std::thread::sleep(LOOK);
    }
    rustix::process::kill_process(process, rustix::process::Signal::STOP)
        .map_err(|error| format!("it cannot be stopped: {error}"))
}

fn private_bytes(pid: u32) -> Result<u64, String> {
    let path = format!("/proc/{pid}/status");
    let status = std::fs::read_to_string(&path).map_err(|error| format!("{path}: {error}"))?;
    let line = status
        .lines()
        .find_map(|line| line.strip_prefix("RssAnon:")?.split_whitespace().next());
    line.and_then(|kib| kib.parse::<u64>().ok())
        .map(|kib| kib << 10)
        .ok_or_else(|| "it has ended".to_owned())
}
