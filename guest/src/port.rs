// SPDX-License-Identifier: Apache-2.0
//! The second serial port, by which the guest and its host speak (see [`crate::wire`]).

use std::fs::{File, OpenOptions};
use std::io::{self, BufRead, BufReader};
use std::sync::mpsc::{Receiver, channel};
use std::thread;

use rustix::termios::{OptionalActions, tcgetattr, tcsetattr};

use crate::wire::Command;

const PORT: &str = "/dev/ttyS1";

/// Opens the port, for lines that nobody edits or echoes.
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

/// The commands that come from the host. It ends when the port is closed.
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
