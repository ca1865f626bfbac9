// SPDX-License-Identifier: Apache-2.0
//! A server that answers as a test says.

use std::io::{BufRead, BufReader, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

/// What is sent for a command.
pub enum Reply {
    /// These bytes.
    Bytes(Vec<u8>),
    /// These, and then the end of the connection.
    Last(Vec<u8>),
    /// These over and over, until the other side has enough.
    Endless(Vec<u8>),
}

type Answer = dyn FnMut(&[String]) -> Option<Reply> + Send;

/// The fake; what it does not answer by the test's function, it answers like a server that works.
pub struct Fake {
    listener: TcpListener,
    answer: Arc<Mutex<Box<Answer>>>,
}

impl Fake {
    pub fn start(answer: impl FnMut(&[String]) -> Option<Reply> + Send + 'static) -> Self {
        let fake = Self {
            listener: TcpListener::bind("127.0.0.1:0").unwrap(),
            answer: Arc::new(Mutex::new(Box::new(answer))),
        };
        let listener = fake.listener.try_clone().unwrap();
        let answer = Arc::clone(&fake.answer);
        std::thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let answer = Arc::clone(&answer);
                std::thread::spawn(move || serve(&stream, &answer));
            }
        });
        fake
    }

    pub fn url(&self) -> String {
        format!("redis://{}", self.listener.local_addr().unwrap())
    }
}

impl Drop for Fake {
    fn drop(&mut self) {
        // Wakes its thread, which ends.
        if let Err(error) = rustix::net::shutdown(&self.listener, rustix::net::Shutdown::Both) {
            eprintln!("the fake server goes on: {error}");
        }
    }
}

/// Ends with the connection, however that ends.
fn serve(stream: &TcpStream, answer: &Mutex<Box<Answer>>) {
    let mut reader = BufReader::new(stream);
    let mut writer = stream;
    while let Some(words) = command(&mut reader) {
        let reply = answer.lock().unwrap()(&words);
        let sent = match reply.unwrap_or_else(|| Reply::Bytes(usual(&words))) {
            Reply::Bytes(bytes) => writer.write_all(&bytes),
            Reply::Last(bytes) => {
                let sent = writer.write_all(&bytes);
                sent.and_then(|()| stream.shutdown(Shutdown::Both))
            }
            Reply::Endless(bytes) => loop {
                if let Err(error) = writer.write_all(&bytes) {
                    break Err(error);
                }
            },
        };
        if sent.is_err() {
            return;
        }
    }
}

/// The words of a command; `None` at the end of the connection.
fn command(reader: &mut impl BufRead) -> Option<Vec<String>> {
    let mut words = Vec::new();
    for _ in 0..number('*', reader)? {
        let length = number('$', reader)?;
        let mut bytes = vec![0; length + 2];
        if reader.read_exact(&mut bytes).is_err() {
            return None;
        }
        bytes.truncate(length);
        words.push(String::from_utf8_lossy(&bytes).into_owned());
    }
    Some(words)
}

/// The number in a line that begins with `sign`.
fn number(sign: char, reader: &mut impl BufRead) -> Option<usize> {
    let mut line = String::new();
    match reader.read_line(&mut line) {
        Ok(_) => line
            .trim_end()
            .strip_prefix(sign)
            .map(|digits| digits.parse().unwrap()),
        Err(_) => None,
    }
}

fn bulk(text: &str) -> String {
    format!("${}\r\n{text}\r\n", text.len())
}

fn usual(words: &[String]) -> Vec<u8> {
    let words: Vec<_> = words.iter().map(String::as_str).collect();
    let text = match words.as_slice() {
        ["CONFIG", "GET", name] => {
            let value = match *name {
                "maxmemory-policy" => "noeviction",
                "appendonly" => "yes",
                _ => "always",
            };
            format!("*2\r\n{}{}", bulk(name), bulk(value))
        }
        ["GET", key] if key.starts_with("pagetide:marker:") => bulk("pagetide"),
        ["GET", _] => bulk("a page"),
        ["UNLINK", ..] => format!(":{}\r\n", words.len() - 1),
        _ => "+OK\r\n".to_owned(),
    };
    text.into_bytes()
}
