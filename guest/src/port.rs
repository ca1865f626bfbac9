// SPDX-License-Identifier: Apache-2.0
//! The second serial port, between guest and host (see [`crate::wire`]).

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

use crate::wire::Command;

const PORT: &str = "/dev/ttyS1";

/// Opens the port in raw mode, without line editing or echo.
///
/// # Errors
/// There is no such port.
pub fn open() -> io::Result<File> {
    let port = OpenOptions::new().read(true).write(true).open(PORT)?;
    let mut settings = tcgetattr(&port)?;
    settings.make_raw();
    tcsetattr(&port, OptionalActions::Now, &settings)?;
    Ok(port)
}

/// The commands of the host. The channel ends when the port is closed.
#[must_use]
pub fn listen(port: File) -> Receiver<Command> {
    let (send, receive) = channel();
    thread::spawn(move || {
        for line in BufReader::new(port).lines() {
            let command = match line {
                Ok(line) => Command::parse(&line),
                Err(error) => {
                    eprintln!("guest-work: reading the port: {error}");
                    return;
                }
            };
            if let Some(command) = command
                && send.send(command).is_err()
            {
                return;
            }
        }
    });
    receive
}
