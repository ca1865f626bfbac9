// SPDX-License-Identifier: Apache-2.0
//! The hostile front end as a process: attacks a vhost-user device, and holds what it has.

use std::io::Write;
use std::path::PathBuf;
use std::process::ExitCode;

use clap::Parser;
use pagetide_guestkit::hostile;

/// Attacks a vhost-user-blk device: for each attack a line says what the device did.
///
/// With --hold, the last attack goes on until standard input ends.
#[derive(Parser)]
struct Arguments {
    /// Print the names of all attacks, and end
    #[arg(long)]
    list: bool,
    /// Socket of the device
    #[arg(long, required_unless_present = "list")]
    socket: Option<PathBuf>,
    /// Folder on tmpfs for files of attacks
    #[arg(long, default_value = "/dev/shm")]
    folder: PathBuf,
    /// Hold what the last attack has until standard input ends
    #[arg(long)]
    hold: bool,
    /// Attacks, one after another
    names: Vec<String>,
}

fn main() -> ExitCode {
    match run(&Arguments::parse()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("hostile: {error}");
            ExitCode::FAILURE
        }
    }
}

fn run(arguments: &Arguments) -> Result<(), Box<dyn std::error::Error>> {
    let mut out = std::io::stdout().lock();
    if arguments.list {
        for attack in hostile::attacks() {
            writeln!(out, "{}", attack.name)?;
        }
        return Ok(());
    }
    let socket = arguments.socket.as_deref().unwrap_or("".as_ref());
    let mut held = None;
    for name in &arguments.names {
        // Releases the previous attack's resources first: the device takes one front end at a time.
        drop(held.take());
        let came = hostile::attack(name, socket, &arguments.folder)?;
        writeln!(out, "{name}: {:?}", came.seen)?;
        out.flush()?;
        held = Some(came);
    }
    if arguments.hold {
        std::io::copy(&mut std::io::stdin(), &mut std::io::sink())?;
    }
    drop(held);
    Ok(())
}
