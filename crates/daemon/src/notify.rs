// SPDX-License-Identifier: Apache-2.0
//! What the service manager is told, as `sd_notify` does: that the daemon serves, and which process it is.
//!
//! A datagram to the socket that `NOTIFY_SOCKET` names. Without that variable nobody wants to know.

use pagetide_sys::clock::now_ns;
use std::{
    ffi::OsStr,
    io,
    os::{
        linux::net::SocketAddrExt,
        unix::{
            ffi::OsStrExt,
            net::{SocketAddr, UnixDatagram},
        },
    },
};

/// The program has begun to run. What its start has cost can be told from the time, which is that of
/// `CLOCK_MONOTONIC`.
pub(crate) fn started() {
    let us = now_ns() / 1000;
    tell(&format!("STATUS=starting\nMONOTONIC_USEC={us}"));
}

/// What a predecessor has left is being recovered: threads of its VMs wait.
pub(crate) fn recovering() {
    tell("STATUS=recovering what was left");
}

/// The daemon serves.
pub(crate) fn ready() {
    tell("READY=1\nSTATUS=serving");
}

/// The daemon is another process from now on.
pub(crate) fn main_process(pid: u32) {
    tell(&format!("MAINPID={pid}"));
}

fn tell(what: &str) {
    let Some(socket) = std::env::var_os("NOTIFY_SOCKET") else {
        return;
    };
    if let Err(error) = send(&socket, what) {
        tracing::warn!(%error, what, "the service manager cannot be told");
    }
}

fn send(socket: &OsStr, what: &str) -> io::Result<()> {
    let address = match socket.as_bytes() {
        [b'@', name @ ..] => SocketAddr::from_abstract_name(name)?,
        _ => SocketAddr::from_pathname(socket)?,
    };
    let sender = UnixDatagram::unbound()?;
    sender.set_nonblocking(true)?;
    sender.send_to_addr(what.as_bytes(), &address)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn manager_is_told_at_a_path_and_at_an_abstract_name() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("notify");
        let manager = UnixDatagram::bind(&path).unwrap();
        send(path.as_os_str(), "READY=1").unwrap();
        let mut told = [0; 64];
        let len = manager.recv(&mut told).unwrap();
        assert_eq!(&told[..len], b"READY=1");

        let name = format!("pagetide-notify-{}", std::process::id());
        let address = SocketAddr::from_abstract_name(&name).unwrap();
        let manager = UnixDatagram::bind_addr(&address).unwrap();
        send(OsStr::new(&format!("@{name}")), "MAINPID=7").unwrap();
        let len = manager.recv(&mut told).unwrap();
        assert_eq!(&told[..len], b"MAINPID=7");
        assert!(send(dir.path().join("nobody").as_os_str(), "READY=1").is_err());
    }
}
