// SPDX-License-Identifier: Apache-2.0
//! A small search server: an inverted index in memory, asked over TCP. It stands for an index node of a web search:
//! short questions in, a few kilobytes of results out.
//!
//! ```text
//!   client: WORD WORD …              numbers, by rank: word 1 is the most frequent
//!   server: DOCUMENT SCORE TEXT      ten lines at most, the best first
//!           (an empty line)
//! ```
//! The collection is made: a document has words by Zipf's law, the same on every machine. A document's score is
//! how many of the words it has, weighted by how rare they are.

use std::collections::BTreeMap;
use std::io::{self, BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::Arc;
use std::thread;

/// Documents of the collection.
const DOCUMENTS: u32 = 4000;
/// Different words.
pub const WORDS: u32 = 4000;
const WORDS_OF_A_DOCUMENT: u32 = 40;
/// Results of a question.
const RESULTS: usize = 10;
/// Bytes of a result's text.
const TEXT_BYTES: usize = 300;

/// Documents of each word, in order.
#[derive(Debug)]
struct Index(Vec<Vec<u32>>);

/// Serves on `port` of every address, until the process is ended.
///
/// # Errors
/// The port cannot be had.
pub fn serve(port: u16) -> io::Result<()> {
    let index = Arc::new(Index::make());
    for client in TcpListener::bind(("0.0.0.0", port))?.incoming() {
        let (client, index) = (client?, Arc::clone(&index));
        // A client that leaves ends only its own thread.
        thread::spawn(move || index.answer(&client));
    }
    Ok(())
}

impl Index {
    fn make() -> Self {
        let mut documents = vec![Vec::new(); WORDS as usize];
        let mut random = 1u64;
        for document in 0..DOCUMENTS {
            for _ in 0..WORDS_OF_A_DOCUMENT {
                let of: &mut Vec<u32> = &mut documents[word(&mut random) as usize];
                if of.last() != Some(&document) {
                    of.push(document);
                }
            }
        }
        Self(documents)
    }

    fn answer(&self, client: &TcpStream) -> io::Result<()> {
        let mut to = client;
        for question in BufReader::new(client).lines() {
            let mut answer = String::new();
            for (document, score) in self.best(&question?) {
                answer += &format!("{document} {score} {}\n", "x".repeat(TEXT_BYTES));
            }
            answer.push('\n');
            to.write_all(answer.as_bytes())?;
        }
        Ok(())
    }

    /// The best documents for a question, and their scores.
    fn best(&self, question: &str) -> Vec<(u32, u64)> {
        let mut scores: BTreeMap<u32, u64> = BTreeMap::new();
        for word in question.split_whitespace() {
            let Ok(word) = word.parse::<usize>() else {
                continue;
            };
            let Some(documents) = self.0.get(word) else {
                continue;
            };
            let rarity = u64::from(DOCUMENTS) / (documents.len() as u64).max(1);
            for document in documents {
                *scores.entry(*document).or_default() += rarity.max(1);
            }
        }
        let mut best: Vec<(u32, u64)> = scores.into_iter().collect();
        best.sort_by_key(|(document, score)| (std::cmp::Reverse(*score), *document));
        best.truncate(RESULTS);
        best
    }
}

/// A word by Zipf's law: the uniform choice of a logarithm.
fn word(random: &mut u64) -> u32 {
    // Knuth's constants; the upper bits are the better ones.
    *random = random
        .wrapping_mul(6_364_136_223_846_793_005)
        .wrapping_add(1_442_695_040_888_963_407);
    let share = f64::from(u32::try_from(*random >> 32).unwrap_or(u32::MAX)) / f64::from(u32::MAX);
    let rank = f64::from(WORDS).powf(share);
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a rank from 1 to the number of words"
    )]
    let rank = rank as u32;
    rank.clamp(1, WORDS) - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_documents_have_the_words_and_rare_ones_count_more() {
        let index = Index::make();
        let most = index.0.iter().map(Vec::len).max();
        assert_eq!(most, Some(index.0[0].len()));
        let rare = index
            .0
            .iter()
            .position(|documents| documents.len() == 1)
            .expect("a rare word");
        let best = index.best(&format!("0 {rare}"));
        assert_eq!(best.len(), RESULTS);
        assert_eq!(best[0].0, index.0[rare][0]);
        assert!(best[0].1 > best[1].1);
        assert!(index.best("").is_empty());
        assert!(index.best("99999 x").is_empty());
    }

    #[test]
    fn client_gets_an_answer_for_each_question() {
        let index = Index::make();
        let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
        let address = listener.local_addr().expect("its address");
        thread::scope(|scope| {
            scope.spawn(|| {
                let (client, _) = listener.accept().expect("a client");
                index.answer(&client)
            });
            let mut client = TcpStream::connect(address).expect("the server");
            client.write_all(b"0 1\n77777\n").expect("questions");
            let mut lines = BufReader::new(client.try_clone().expect("a copy")).lines();
            let first: Vec<String> = lines
                .by_ref()
                .map(|line| line.expect("a line"))
                .take_while(|line| !line.is_empty())
                .collect();
            assert_eq!(first.len(), RESULTS);
            assert_eq!(lines.next().expect("an answer").expect("a line"), "");
            client
                .shutdown(std::net::Shutdown::Both)
                .expect("the end of it");
        });
    }
}
