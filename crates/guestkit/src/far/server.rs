// SPDX-License-Identifier: Apache-2.0
//! A Redis server of a test's own.

use std::fs;
use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{Ipv4Addr, TcpListener, TcpStream};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

/// Servers and checkers of redis' files are one program, which decides by its name; Debian's package
/// `redis-tools` has it as a checker.
const PROGRAMS: [&str; 3] = [
    "/usr/bin/redis-server",
    "/usr/bin/valkey-server",
    "/usr/bin/redis-check-rdb",
];
/// How often another port is tried if somebody took the one that was free.
const TRIES: usize = 10;
/// Options of a server that keeps each page that it has acknowledged.
const KEEPS_ALL: [&str; 4] = ["--appendonly", "yes", "--appendfsync", "always"];
const KEEPS_NOTHING: [&str; 2] = ["--appendonly", "no"];

/// A server on a port of this machine; killed on drop.
#[derive(Debug)]
pub struct FarServer {
    program: &'static str,
    folder: PathBuf,
    options: Vec<String>,
    port: u16,
    child: Option<Child>,
}

impl FarServer {
    /// The server's program; `None`, after saying so, if there is none.
    #[must_use]
    pub fn program() -> Option<&'static str> {
        let found = PROGRAMS.into_iter().find(|path| Path::new(path).exists());
        if found.is_none() {
            eprintln!("SKIPPED: there is no redis or valkey server (Debian's redis-tools)");
        }
        found
    }

    /// A server with its files in `folder` that keeps all that it has acknowledged.
    ///
    /// # Errors
    /// It does not start.
    pub fn that_keeps_all(program: &'static str, folder: &Path) -> io::Result<Self> {
        Self::start(program, folder, &KEEPS_ALL)
    }

    /// A server that keeps nothing when it ends.
    ///
    /// # Errors
    /// It does not start.
    pub fn that_keeps_nothing(program: &'static str, folder: &Path) -> io::Result<Self> {
        Self::start(program, folder, &KEEPS_NOTHING)
    }

    /// A server with these options.
    ///
    /// # Errors
    /// It does not start.
    pub fn start(program: &'static str, folder: &Path, options: &[&str]) -> io::Result<Self> {
        fs::create_dir_all(folder)?;
        let mut server = Self {
            program,
            folder: folder.to_owned(),
            options: options.iter().map(|&option| option.to_owned()).collect(),
            port: 0,
            child: None,
        };
        let mut last = io::Error::from(io::ErrorKind::AddrInUse);
        for _ in 0..TRIES {
            // Free a moment ago.
            server.port = TcpListener::bind((Ipv4Addr::LOCALHOST, 0))?
                .local_addr()?
                .port();
            match server.start_again() {
                Ok(()) => return Ok(server),
                Err(error) => last = error,
            }
        }
        Err(last)
    }

    /// The port that it listens on.
    #[must_use]
    pub const fn port(&self) -> u16 {
        self.port
    }

    /// As if its host had crashed.
    ///
    /// # Errors
    /// The kernel's error.
    pub fn kill(&mut self) -> io::Result<()> {
        let Some(mut child) = self.child.take() else {
            return Ok(());
        };
        child.kill()?;
        child.wait().map(drop)
    }

    /// Starts it with its files and its port of before, and waits until it serves.
    ///
    /// # Errors
    /// It ends instead.
    pub fn start_again(&mut self) -> io::Result<()> {
        let mut child = Command::new(self.program)
            .arg0("redis-server")
            .args(["--bind", "127.0.0.1", "--save", "", "--daemonize", "no"])
            .args(["--port", &self.port.to_string()])
            .arg("--dir")
            .arg(&self.folder)
            .args(&self.options)
            .stdin(Stdio::null())
            .stdout(Stdio::piped())
            .spawn()?;
        let out = child.stdout.take();
        self.child = Some(child);
        let mut lines = BufReader::new(out.ok_or(io::ErrorKind::BrokenPipe)?).lines();
        let is_ready = lines
            .by_ref()
            .map_while(Result::ok)
            .any(|line| line.contains("eady to accept connections"));
        if !is_ready {
            self.kill()?;
            return Err(io::Error::other("the redis server ended"));
        }
        // It must never wait for a reader of its log.
        std::thread::spawn(move || lines.count());
        Ok(())
    }

    /// Sends a command; returns the reply as the protocol has it, without its last line end.
    ///
    /// # Errors
    /// It does not answer.
    pub fn ask(&self, words: &[&str]) -> io::Result<String> {
        let mut stream = TcpStream::connect((Ipv4Addr::LOCALHOST, self.port))?;
        // The server ends the connection after the last reply.
        write!(stream, "{}\r\nQUIT\r\n", words.join(" "))?;
        let mut reply = String::new();
        stream.read_to_string(&mut reply)?;
        let reply = reply.trim_end().trim_end_matches("+OK");
        Ok(reply.trim_end().to_owned())
    }

    /// Keys that it has.
    ///
    /// # Errors
    /// It does not answer.
    pub fn keys(&self) -> io::Result<u64> {
        let reply = self.ask(&["DBSIZE"])?;
        let digits = reply.strip_prefix(':').unwrap_or(&reply);
        digits
            .parse()
            .map_err(|_| io::Error::other(format!("the server says '{reply}'")))
    }
}

impl Drop for FarServer {
    fn drop(&mut self) {
        if let Err(error) = self.kill() {
            eprintln!("the redis server stays: {error}");
        }
    }
}
