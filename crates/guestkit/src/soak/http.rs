// SPDX-License-Identifier: Apache-2.0
//! Raw HTTP to the API's socket, as none of our clients would send it.

use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(10);
/// Larger than any expected answer.
const ANSWER_MAX: u64 = 8 << 20;

/// Sends `words` and reads the answer until the daemon closes.
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

/// Sends `words` and disconnects without reading.
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
