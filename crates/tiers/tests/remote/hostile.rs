// SPDX-License-Identifier: Apache-2.0
//! A server that is slow, talks nonsense, or sends without end.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use pagetide_tiers::remote::RemoteTier;
use pagetide_tiers::{Place, Position, SectorNo, SlowTier, Standing, TierError, TierKind};

use crate::fake::{Fake, Reply};
use crate::{STUCK, config, extent, pages, read, reason, until, working, write};

fn place() -> Place {
    Place {
        extent: extent(1),
        position: Position(0),
        start: SectorNo(0),
        sectors: 0,
    }
}

fn is_page(words: &[String]) -> bool {
    words[0] == "GET" && !words[1].starts_with("pagetide:marker:")
}

/// Behind it pages wait until it is opened.
#[derive(Clone)]
struct Gate(Arc<(Mutex<bool>, Condvar)>);

impl Gate {
    fn shut() -> Self {
        Self(Arc::new((Mutex::new(false), Condvar::new())))
    }

    fn open(&self) {
        *self.0.0.lock().unwrap() = true;
        self.0.1.notify_all();
    }

    fn pass(&self) {
        let (is_open, opened) = &*self.0;
        let waited = opened.wait_while(is_open.lock().unwrap(), |is_open| !*is_open);
        drop(waited.unwrap());
    }

    /// A server that answers no read of a page before.
    fn before_pages(&self) -> Fake {
        let gate = self.clone();
        Fake::start(move |words| {
            if is_page(words) {
                gate.pass();
            }
            None
        })
    }
}

#[test]
fn fake_that_behaves_is_a_working_server() {
    let fake = Fake::start(|_| None);
    let tier = working(config(&fake.url()));
    write(&tier, extent(1), &pages(40, 512)).unwrap();
    // Foreign content is for the sealer to find out.
    assert_eq!(read(&tier, place()), Ok(b"a page".to_vec()));
}

#[test]
fn reply_that_is_no_page_is_an_error_of_that_read() {
    let replies: [&[u8]; 10] = [
        b"+OK\r\n",
        b"+page\r\n",
        b":7\r\n",
        b"-ERR no\r\n",
        b"-WRONGTYPE no\r\n",
        b"*1\r\n$1\r\nx\r\n",
        b"%1\r\n+a\r\n+b\r\n",
        b"#t\r\n",
        b"*0\r\n",
        b"!3\r\nERR\r\n",
    ];
    let next = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&next);
    let fake = Fake::start(move |words| {
        is_page(words).then(|| {
            let index = counted.fetch_add(1, Ordering::SeqCst);
            Reply::Bytes(replies[index].to_vec())
        })
    });
    let tier = working(config(&fake.url()));
    for reply in replies {
        let result = read(&tier, place());
        let text = String::from_utf8_lossy(reply);
        assert!(
            matches!(result, Err(TierError::Io { .. })),
            "{text}: {result:?}"
        );
    }
    // None of them cost the connection.
    assert_eq!(next.load(Ordering::SeqCst), replies.len());
    assert_eq!(tier.health().standing, Standing::Working);
    assert_eq!(tier.figures().read_errors, replies.len() as u64);
}

#[test]
fn page_too_long_garbage_and_broken_replies_fail_and_the_tier_recovers() {
    let long = [b"$9000\r\n".as_slice(), &[7; 9000], b"\r\n"].concat();
    let replies = [
        long,
        b"hello\r\n".to_vec(),
        b"$5000000000000\r\n".to_vec(),
        b"$x\r\n".to_vec(),
        b"$-7x\r\n".to_vec(),
        b"*4294967296000\r\n:1\r\n".to_vec(),
        b"*-1\r\n*1\r\n".to_vec(),
        b"*1\r\n".repeat(5000),
        b"%1\r\n".repeat(5000),
        b"|1\r\n".repeat(5000),
        b"|9223372036854775807\r\n".to_vec(),
        b"%9223372036854775807\r\n".to_vec(),
        b"*9223372036854775807\r\n".to_vec(),
        b"=9223372036854775807\r\n".to_vec(),
        b"=-5\r\n".to_vec(),
        b"!-5\r\n".to_vec(),
        b">3\r\n:1\r\n:1\r\n:1\r\n".to_vec(),
        vec![0; 100],
        vec![0xff; 20_000],
        b"$6\r\na pag".to_vec(),
        Vec::new(),
    ];
    for reply in replies {
        let text = String::from_utf8_lossy(&reply[..reply.len().min(40)]).into_owned();
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let fake = Fake::start(move |words| {
            let hostile = is_page(words) && counted.fetch_add(1, Ordering::SeqCst) == 0;
            hostile.then(|| Reply::Last(reply.clone()))
        });
        let tier = working(config(&fake.url()));
        // A read is asked again by itself if it cost the connection, else it fails.
        until(&text, || read(&tier, place()) == Ok(b"a page".to_vec()));
        assert!(asked.load(Ordering::SeqCst) > 1, "{text}");
    }
}

#[test]
fn endless_replies_are_cut_off() {
    for (begin, more) in [
        ("$1000000000000\r\n", vec![7; 1 << 16]),
        ("*1000000000000\r\n", b":1\r\n".repeat(1 << 14)),
        ("", b"+OK\r\n".repeat(1 << 14)),
        ("+", vec![b'x'; 1 << 16]),
        ("*1000\r\n", b"*4096\r\n:1\r\n".repeat(1 << 12)),
    ] {
        let asked = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&asked);
        let bytes = [begin.as_bytes(), &more].concat();
        let fake = Fake::start(move |words| {
            let hostile = is_page(words) && counted.fetch_add(1, Ordering::SeqCst) < 3;
            hostile.then(|| Reply::Endless(bytes.clone()))
        });
        let tier = working(config(&fake.url()));
        // Only a server that is cut off stops sending and is asked again.
        until(begin, || read(&tier, place()) == Ok(b"a page".to_vec()));
        assert_eq!(asked.load(Ordering::SeqCst), 4);
    }
}

#[test]
fn strange_answers_to_a_batch_fail_it_and_delete_what_may_have_arrived() {
    for reply in [
        "+QUEUED\r\n",
        ":1\r\n",
        "$-1\r\n",
        "-ERR no\r\n",
        "-MISCONF no\r\n",
    ] {
        let deleted = Arc::new(AtomicUsize::new(0));
        let counted = Arc::clone(&deleted);
        let mut sets = 0;
        let fake = Fake::start(move |words| {
            let page = words.len() > 1 && words[1].starts_with("pagetide:{");
            match words[0].as_str() {
                "SET" if page => {
                    sets += 1;
                    // All are acknowledged but one in the middle.
                    (sets == 70).then(|| Reply::Bytes(reply.as_bytes().to_vec()))
                }
                "UNLINK" => {
                    counted.fetch_add(words.len() - 1, Ordering::SeqCst);
                    None
                }
                _ => None,
            }
        });
        let tier = working(config(&fake.url()));
        let result = write(&tier, extent(1), &pages(41, 100));
        assert!(
            matches!(result, Err(TierError::Io { .. })),
            "{reply}: {result:?}"
        );
        until("the deletion", || deleted.load(Ordering::SeqCst) == 100);
        assert_eq!(tier.figures().stored_bytes, 0);
        assert_eq!(tier.figures().write_errors, 1);
        write(&tier, extent(2), &pages(41, 100)).unwrap();
    }
}

#[test]
fn slow_server_is_sent_no_batches_until_it_has_recovered() {
    let gate = Gate::shut();
    let fake = gate.before_pages();
    let mut config = config(&fake.url());
    config.bounds.read = Duration::from_millis(100);
    let tier = working(config);
    let slow = TierError::Slow {
        kind: TierKind::Remote,
        bound_ms: 100,
    };
    assert_eq!(read(&tier, place()), Err(slow.clone()));
    assert_eq!(tier.health().standing, Standing::Slow { bound_ms: 100 });
    assert_eq!(write(&tier, extent(1), &pages(42, 1)), Err(slow));
    assert_eq!(tier.figures().overdue, 1);
    gate.open();
    until("recovery", || tier.health().standing == Standing::Working);
    write(&tier, extent(2), &pages(42, 1)).unwrap();
    assert_eq!(read(&tier, place()), Ok(b"a page".to_vec()));
}

#[test]
fn server_that_says_nothing_any_more_is_given_up() {
    let silent = Arc::new(AtomicBool::new(false));
    let mute = Arc::clone(&silent);
    let fake = Fake::start(move |_| {
        mute.load(Ordering::SeqCst)
            .then(|| Reply::Bytes(Vec::new()))
    });
    let mut config = config(&fake.url());
    config.bounds.read = Duration::from_millis(50);
    config.bounds.write = Duration::from_millis(50);
    config.bounds.connect = Duration::from_secs(5);
    let tier = working(config);
    silent.store(true, Ordering::SeqCst);
    let result = write(&tier, extent(1), &pages(43, 1));
    assert!(
        matches!(result, Err(TierError::Slow { .. } | TierError::Gone { .. })),
        "{result:?}"
    );
    until("giving up", || {
        matches!(tier.health().standing, Standing::Gone { .. })
    });
    silent.store(false, Ordering::SeqCst);
    until("recovery", || tier.health().standing == Standing::Working);
}

#[test]
fn server_that_repeats_the_password_does_not_make_us_print_it() {
    let fake = Fake::start(|words| match words[0].as_str() {
        "AUTH" => None,
        "CONFIG" => {
            let text = "*2\r\n$16\r\nmaxmemory-policy\r\n$12\r\nx hunter2\r\ny\r\n";
            Some(Reply::Bytes(text.as_bytes().to_vec()))
        }
        _ => None,
    });
    let url = fake.url().replace("//", "//:hunter2@");
    let tier = RemoteTier::start(config(&url)).unwrap();
    tier.first_contact(STUCK);
    let reason = reason(&tier);
    assert!(
        reason.contains("***") && !reason.contains("hunter2"),
        "{reason}"
    );
    assert!(!reason.contains('\n'));
}

#[test]
fn queue_that_is_full_refuses_and_every_duty_is_told_at_the_end() {
    let gate = Gate::shut();
    let fake = gate.before_pages();
    let tier = working(config(&fake.url()));
    let answers: Vec<_> = (0..5000)
        .map(|_| crate::begin_read(&tier, place()))
        .collect();
    until("the refusals", || tier.figures().refused == 5000 - 4096);
    drop(tier);
    let results: Vec<_> = answers
        .iter()
        .map(|answer| answer.recv_timeout(STUCK).unwrap())
        .collect();
    let busy =
        |result: &&Result<Vec<u8>, TierError>| **result == Err(TierError::Busy(TierKind::Remote));
    assert_eq!(results.iter().filter(busy).count(), 5000 - 4096);
    let gone = |result: &&Result<Vec<u8>, TierError>| matches!(result, Err(TierError::Gone { .. }));
    assert_eq!(results.iter().filter(gone).count(), 4096);
    gate.open();
}
