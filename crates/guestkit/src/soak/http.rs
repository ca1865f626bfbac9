// SPDX-License-Identifier: Apache-2.0
//! Raw words to the API's socket: what no client of ours would send.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(10);
/// More than any answer that is waited for.
const ANSWER_MAX: u64 = 8 << 20;

/// Sends `words` and reads what comes back until the daemon closes.
///
/// # Errors
/// It closed early, or does not answer in time.
pub fn exchange(api: &Path, words: &[u8]) -> io::Result<String> {
    let mut stream = connect(api)?;
    stream.write_all(words)?;
    let mut answer = Vec::new();
    stream.take(ANSWER_MAX).read_to_end(&mut answer)?;
    Ok(String::from_utf8_lossy(&answer).into_owned())
}

/// Sends `words`, leaves, and reads nothing.
///
/// # Errors
/// It closed early.
pub fn leave(api: &Path, words: &[u8]) -> io::Result<()> {
    connect(api)?.write_all(words)
}

fn connect(api: &Path) -> io::Result<UnixStream> {
    let stream = UnixStream::connect(api)?;
    stream.set_read_timeout(Some(PATIENCE))?;
    stream.set_write_timeout(Some(PATIENCE))?;
    Ok(stream)
}
