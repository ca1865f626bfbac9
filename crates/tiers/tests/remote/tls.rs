// SPDX-License-Identifier: Apache-2.0
//! TLS, with an authority made by the test.

use std::path::Path;
use std::process::{Command, Stdio};

use pagetide_tiers::remote::{AccessError, FirstContact, RemoteTier, RemoteUrl, check_access};

use crate::server::{self, Server};
use crate::{STUCK, assert_pages, config, extent, pages, reason, until, working, write};

/// Makes a key and a certificate `name.pem`, signed by `signer` or by itself.
fn certificate(folder: &Path, name: &str, signer: Option<&str>) {
    let mut command = Command::new("openssl");
    command
        .current_dir(folder)
        .args(["req", "-x509", "-nodes", "-days", "2", "-newkey", "ec"])
        .args(["-pkeyopt", "ec_paramgen_curve:prime256v1", "-subj"])
        .arg(format!("/CN={name}"))
        .args([
            "-keyout",
            &format!("{name}.key"),
            "-out",
            &format!("{name}.pem"),
        ]);
    if let Some(signer) = signer {
        command
            .args([
                "-CA",
                &format!("{signer}.pem"),
                "-CAkey",
                &format!("{signer}.key"),
            ])
            .args(["-addext", "subjectAltName=DNS:localhost"])
            .args(["-addext", "basicConstraints=critical,CA:FALSE"]);
    }
    let status = command.stderr(Stdio::null()).status().unwrap();
    assert!(status.success(), "{command:?}");
}

#[test]
fn tls_trusts_the_named_authority_only_and_shows_our_certificate() {
    if server::program().is_none() {
        return;
    }
    if Command::new("openssl")
        .arg("version")
        .stdout(Stdio::null())
        .status()
        .is_err()
    {
        eprintln!("SKIPPED: there is no openssl");
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    certificate(folder.path(), "authority", None);
    certificate(folder.path(), "stranger", None);
    certificate(folder.path(), "server", Some("authority"));
    certificate(folder.path(), "client", Some("authority"));
    let files = [
        path("server.pem"),
        path("server.key"),
        path("authority.pem"),
    ];
    let options = [
        "--tls-cert-file",
        &files[0],
        "--tls-key-file",
        &files[1],
        "--tls-ca-cert-file",
        &files[2],
    ];
    let of_ports = |port: u16, _| {
        ["--port", "0", "--tls-port", &port.to_string()]
            .map(str::to_owned)
            .to_vec()
    };
    let server = Server::on_port(&options, of_ports).unwrap();
    let url = |host: &str, authority: &str, identity: &str| {
        format!(
            "rediss://{host}:{}?ca={}{identity}",
            server.port(),
            path(authority)
        )
    };
    let identity = format!("&cert={}&key={}", path("client.pem"), path("client.key"));

    let tier = working(config(&url("localhost", "authority.pem", &identity)));
    let contents = pages(20, 512);
    let places = write(&tier, extent(1), &contents).unwrap();
    assert_pages(&tier, &places, &contents);

    // Another authority, another name, no certificate of ours.
    for (url, expected) in [
        (url("localhost", "stranger.pem", &identity), "certificate"),
        (url("127.0.0.1", "authority.pem", &identity), "certificate"),
        (url("localhost", "authority.pem", ""), ""),
    ] {
        let tier = RemoteTier::start(config(&url)).unwrap();
        tier.first_contact(STUCK);
        assert!(reason(&tier).contains(expected), "{}", reason(&tier));
    }
}

#[test]
fn files_that_are_no_certificates_are_named() {
    let folder = tempfile::tempdir().unwrap();
    let empty = folder.path().join("empty.pem");
    std::fs::write(&empty, "nothing\n").unwrap();
    let missing = folder.path().join("missing.pem");
    for file in [empty, missing] {
        let url = format!("rediss://far?ca={}", file.display());
        let error = check_access(&RemoteUrl::parse(&url).unwrap()).unwrap_err();
        assert!(matches!(error, AccessError::Tls(_)));
        let tier = RemoteTier::start(config(&url)).unwrap();
        assert_eq!(tier.first_contact(STUCK).0, FirstContact::Refused);
        for told in [error.to_string(), reason(&tier)] {
            assert!(told.contains(file.to_str().unwrap()), "{told}");
        }
    }
}

#[test]
fn password_that_cannot_be_read_is_read_again_at_each_attempt() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("word");
    let url = format!("redis://127.0.0.1:1?password-file={}", file.display());
    let tier = RemoteTier::start(config(&url)).unwrap();
    assert_eq!(tier.first_contact(STUCK).0, FirstContact::Refused);
    assert!(
        reason(&tier).contains("cannot be read"),
        "{}",
        reason(&tier)
    );
    std::fs::write(&file, "a word\n").unwrap();
    // Nobody listens there.
    until("another reason", || {
        !reason(&tier).contains("cannot be read")
    });
}
