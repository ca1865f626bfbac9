// SPDX-License-Identifier: Apache-2.0
//! The server behind TLS, with authorities made by the test.

use super::{
    PAGES, attach,
    daemon::{Daemon, command},
    far::{FarServer, Wire},
    filled, number, show, sink_all, tier, touch_half, until_working, vmm,
};
use std::{
    net::TcpListener,
    path::Path,
    process::{Command, Stdio},
};

/// How often another port is tried if somebody took the one that was free.
const TRIES: usize = 10;

/// Makes a key and a certificate `name.pem`, signed by `signer` or by itself; false without openssl.
fn certificate(folder: &Path, name: &str, signer: Option<&str>) -> bool {
    let mut command = Command::new("openssl");
    command
        .current_dir(folder)
        .args(["req", "-x509", "-nodes", "-days", "2", "-newkey", "ec"])
        .args(["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj"])
        .arg(format!("/CN={name}"))
        .args(["-keyout", &format!("{name}.key")])
        .args(["-out", &format!("{name}.pem")]);
    if let Some(signer) = signer {
        command
            .args(["-CA", &format!("{signer}.pem")])
            .args(["-CAkey", &format!("{signer}.key")])
            .args(["-addext", "subjectAltName=DNS:localhost"])
            .args(["-addext", "basicConstraints=critical,CA:FALSE"]);
    }
    match command.stderr(Stdio::null()).status() {
        Ok(status) => {
            assert!(status.success(), "{command:?}");
            true
        }
        Err(error) => {
            eprintln!("SKIPPED: no openssl: {error}");
            false
        }
    }
}

/// A server with a port for TLS, and one without for the test; `None` if it knows no TLS.
fn server(program: &'static str, folder: &Path) -> Option<(FarServer, u16)> {
    let file = |name: &str| folder.join(name).display().to_string();
    let (cert, key, authority) = (
        file("server.pem"),
        file("server.key"),
        file("authority.pem"),
    );
    let mut last = None;
    for _ in 0..TRIES {
        let free = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = free.local_addr().unwrap().port();
        drop(free);
        let text = port.to_string();
        let options = [
            ["--tls-port", &text],
            ["--tls-cert-file", &cert],
            ["--tls-key-file", &key],
            ["--tls-ca-cert-file", &authority],
            ["--appendonly", "yes"],
        ];
        match FarServer::start(program, &folder.join("server"), options.as_flattened()) {
            Ok(server) => return Some((server, port)),
            Err(error) => last = Some(error),
        }
    }
    eprintln!("SKIPPED: {program} has no TLS: {last:?}");
    None
}

#[test]
fn memory_goes_over_tls_to_a_server_of_the_named_authority_and_to_no_other() {
    let test = "far_tls::memory_goes_over_tls_to_a_server_of_the_named_authority_and_to_no_other";
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: take-over needs root");
        return;
    }
    let Some(program) = FarServer::program() else {
        return;
    };
    if !vmm::is_this(test) {
        return;
    }
    let (state, far) = (
        tempfile::tempdir_in("/dev/shm").unwrap(),
        tempfile::tempdir().unwrap(),
    );
    let folder = far.path();
    if !certificate(folder, "authority", None) {
        return;
    }
    certificate(folder, "stranger", None);
    certificate(folder, "server", Some("authority"));
    certificate(folder, "client", Some("authority"));
    let Some((_server, port)) = server(program, folder) else {
        return;
    };
    let wire = Wire::to(port).unwrap();
    let start = |authority: &str| {
        let file = |name: &str| folder.join(name).display().to_string();
        let tiers = format!(
            "lz4,remote:rediss://localhost:{}?ca={}&cert={}&key={}=512M",
            wire.port(),
            file(authority),
            file("client.pem"),
            file("client.key"),
        );
        let settings = ["--tiers", &tiers, "--sink-after", "100ms"];
        Daemon::start(state.path(), command(state.path(), &settings))
    };
    let ram = filled();
    let mut daemon = start("authority.pem");
    attach(&daemon);
    sink_all(&mut daemon);
    touch_half(&ram, 0, || {});
    // A bit that flips ends the connection, and no page is wrong.
    wire.flip(4);
    sink_all(&mut daemon);
    touch_half(&ram, 1, || {});
    assert!(wire.flipped() > 0);
    wire.flip(0);
    until_working(&mut daemon);
    sink_all(&mut daemon);
    drop(daemon);
    // The right server is none for who trusts somebody else: its VM waits.
    daemon = start("stranger.pem");
    daemon.until("a server that is not trusted", |daemon| {
        let tier = tier(daemon);
        let reason = tier["reason"].as_str().unwrap_or_default().to_owned();
        tier["standing"] == "gone" && reason.contains("certificate")
    });
    assert!(number(&show(&daemon), "remote_pages") > PAGES * 9 / 10);
    drop(daemon);
    daemon = start("authority.pem");
    ram.verify();
    assert_eq!(number(&show(&daemon), "poisoned_pages"), 0);
    daemon.json(&["vm", "detach", "a"]);
}
