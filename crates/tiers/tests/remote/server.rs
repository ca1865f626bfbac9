// SPDX-License-Identifier: Apache-2.0
//! A server of this machine, in a folder of its own.

use std::io::{BufRead, BufReader};
use std::net::TcpListener;
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
/// How often other ports are tried if somebody took the ones that were free.
const TRIES: usize = 10;

/// A server on a socket, or on a port.
pub struct Server {
    program: &'static str,
    options: Vec<String>,
    folder: tempfile::TempDir,
    child: Option<Child>,
    port: u16,
}

/// The server's program; `None`, and a line that says so, if there is none.
pub fn program() -> Option<&'static str> {
    let found = PROGRAMS.into_iter().find(|path| Path::new(path).exists());
    if found.is_none() {
        eprintln!("SKIPPED: there is no redis or valkey server (Debian's redis-tools)");
    }
    found
}

/// A port that was free a moment ago.
fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap().port()
}

impl Server {
    /// On a socket, without anything on disk unless `options` say otherwise.
    pub fn start(options: &[&str]) -> Option<Self> {
        let mut server = Self::new(options)?;
        assert!(server.launch(&["--port".to_owned(), "0".to_owned()]));
        Some(server)
    }

    /// On a free port; `options` make theirs of it and of another free one.
    pub fn on_port(options: &[&str], of_ports: impl Fn(u16, u16) -> Vec<String>) -> Option<Self> {
        let mut server = Self::new(options)?;
        for _ in 0..TRIES {
            server.port = free_port();
            let of_ports = of_ports(server.port, free_port());
            if server.launch(&of_ports) {
                server.options.extend(of_ports);
                return Some(server);
            }
        }
        panic!("no server could be started on {TRIES} ports");
    }

    fn new(options: &[&str]) -> Option<Self> {
        Some(Self {
            program: program()?,
            options: options.iter().map(|&option| option.to_owned()).collect(),
            folder: tempfile::tempdir().unwrap(),
            child: None,
            port: 0,
        })
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// The URL of its socket.
    pub fn url(&self) -> String {
        format!("redis+unix://{}/socket", self.folder.path().display())
    }

    /// Starts the program and waits until it serves; false if it ended instead.
    fn launch(&mut self, more: &[String]) -> bool {
        let mut child = Command::new(self.program)
            .arg0("redis-server")
            .args(["--dir", self.folder.path().to_str().unwrap()])
            .args(["--unixsocket", "socket", "--save", "", "--daemonize", "no"])
            .args(["--bind", "127.0.0.1"])
            .args(&self.options)
            .args(more)
            .stdout(Stdio::piped())
            .stderr(Stdio::inherit())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let ready = lines
            .by_ref()
            .map_while(Result::ok)
            .any(|line| line.contains("eady to accept connections"));
        self.child = Some(child);
        if !ready {
            self.kill();
            return false;
        }
        // It must never wait for a reader of its log.
        std::thread::spawn(move || lines.count());
        true
    }

    /// As if its host had crashed.
    pub fn kill(&mut self) {
        if let Some(mut child) = self.child.take() {
            child.kill().unwrap();
            child.wait().unwrap();
        }
    }

    /// With the same folder.
    pub fn start_again(&mut self) {
        assert!(self.child.is_none());
        assert!(self.launch(&["--port".to_owned(), "0".to_owned()]));
    }

    /// As if it had lost all that it had written. It does not run.
    pub fn put_data_aside(&self) {
        std::fs::rename(self.data(), self.folder.path().join("aside")).unwrap();
    }

    /// Undoes [`Self::put_data_aside`], and drops what was written since.
    pub fn put_data_back(&self) {
        std::fs::remove_dir_all(self.data()).unwrap();
        std::fs::rename(self.folder.path().join("aside"), self.data()).unwrap();
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("appendonlydir")
    }

    /// A connection of the test's own.
    pub fn connection(&self) -> redis::Connection {
        let path = self.folder.path().join("socket");
        let address = redis::ConnectionAddr::Unix(path);
        redis::Client::open(address)
            .unwrap()
            .get_connection()
            .unwrap()
    }

    pub fn query<T: redis::FromRedisValue>(&self, words: &[&str]) -> T {
        let mut command = redis::cmd(words[0]);
        command.arg(&words[1..]);
        command.query(&mut self.connection()).unwrap()
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.kill();
    }
}
