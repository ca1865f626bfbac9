// SPDX-License-Identifier: Apache-2.0
//! Threads that do not stop on request, and what happens to them.
//!
//! ```text
//!   main thread    sleeps ─► go ─► starts the others ─► waits for its child, as after `vfork` ─► pause
//!                  (quiet)                              (never asked to stop)                (quiet)
//!   the others              read into a page that a userfaultfd of ours watches: in the kernel
//!                           until the page is filled, whatever they are asked
//! ```

use super::{Child, may_trace, shared_words};
use crate::ptrace::{PtraceError, run_inside};
use crate::uffd::{Features, FillOutcome, Userfaultfd, Watch};
use pagetide_addr::{Hva, PAGE_BYTES};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::{Duration, Instant};

/// More than were once kept at a time.
const DEAF: usize = 5;
const PAGE: usize = 4096;
const _: () = assert!(PAGE as u64 == PAGE_BYTES);
const WAIT: Duration = Duration::from_secs(10);

/// State shared by parent and child.
struct Shared {
    go: &'static AtomicI32,
    may_pause: &'static AtomicI32,
    /// For each thread that was deaf: it is in user code again.
    is_back: &'static [AtomicI32],
}

impl Shared {
    fn new() -> Self {
        let [go, may_pause, is_back @ ..] = shared_words();
        Self {
            go,
            may_pause,
            is_back: &is_back[..DEAF],
        }
    }

    fn count_back(&self) -> usize {
        let is_back = |word: &&AtomicI32| word.load(Ordering::SeqCst) != 0;
        self.is_back.iter().filter(is_back).count()
    }
}

/// Where a thread of the child reads to, and the flag it sets then.
struct Reader {
    page: *mut libc::c_void,
    is_back: &'static AtomicI32,
}

extern "C" fn read_into_page(reader: *mut libc::c_void) -> *mut libc::c_void {
    // SAFETY: a Reader that its creator leaks.
    let reader = unsafe { &*reader.cast::<Reader>() };
    // SAFETY: opens a file that is always there; reads one byte into a mapped page.
    let read = unsafe {
        let zeros = libc::open(c"/dev/zero".as_ptr(), libc::O_RDONLY);
        libc::read(zeros, reader.page, 1)
    };
    reader.is_back.store(i32::from(read == 1), Ordering::SeqCst);
    loop {
        // SAFETY: takes nothing.
        unsafe { libc::pause() };
    }
}

fn sleep_until(word: &AtomicI32) {
    while word.load(Ordering::SeqCst) == 0 {
        // SAFETY: takes a number.
        unsafe { libc::usleep(500) };
    }
}

fn in_child(shared: &Shared, readers: &'static [Reader]) -> i32 {
    sleep_until(shared.go);
    for reader in readers {
        let mut thread = 0;
        let argument = std::ptr::from_ref(reader).cast_mut().cast();
        // SAFETY: the function uses the argument passed here, which lives forever.
        let made = unsafe {
            libc::pthread_create(&raw mut thread, std::ptr::null(), read_into_page, argument)
        };
        if made != 0 {
            return 1;
        }
    }
    let flags = libc::CLONE_VFORK | libc::SIGCHLD;
    // SAFETY: as `fork`, with memory of its own, but for the wait; the child calls only what is bare.
    if unsafe { libc::syscall(libc::SYS_clone, flags, 0, 0, 0, 0) } == 0 {
        // SAFETY: takes numbers. The child ends with its parent, even if the test fails.
        unsafe { libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL) };
        sleep_until(shared.may_pause);
        // SAFETY: ends that process without running any code of its parent's.
        unsafe { libc::_exit(0) };
    }
    super::forever()
}

/// Memory that only children of this process use.
fn area() -> *mut libc::c_void {
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    let bytes = DEAF * PAGE;
    // SAFETY: a new mapping that replaces none; it lives until the process ends.
    let memory = unsafe { libc::mmap(std::ptr::null_mut(), bytes, protection, flags, -1, 0) };
    assert_ne!(memory, libc::MAP_FAILED);
    memory
}

/// A userfaultfd of the child that watches `area` in it.
fn watch(child: &Child, area: Hva) -> Userfaultfd {
    let process = child.process();
    let made = run_inside(&process, |thread| thread.make_userfaultfd()).unwrap();
    let userfaultfd = Userfaultfd::from(process.take_descriptor(made.value).unwrap());
    userfaultfd.api(Features::WANTED).unwrap();
    let bytes = DEAF as u64 * PAGE_BYTES;
    userfaultfd
        .register(area, bytes, Watch::MissingAndWriteProtected)
        .unwrap();
    userfaultfd
}

/// Number of the child's running threads: those that were asked to stop, and cannot sleep any more.
fn count_running(child: &Child) -> usize {
    let tasks = std::fs::read_dir(format!("/proc/{}/task", child.pid)).unwrap();
    let runs = |task: std::io::Result<std::fs::DirEntry>| {
        let stat = std::fs::read_to_string(task.unwrap().path().join("stat")).unwrap();
        stat.rsplit_once(") ").unwrap().1.starts_with('R')
    };
    tasks.map(runs).filter(|runs| *runs).count()
}

fn await_that(what: &str, mut is_so: impl FnMut() -> bool) {
    let begun = Instant::now();
    while !is_so() {
        assert!(begun.elapsed() < WAIT, "waited in vain: {what}");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn threads_that_stop_late_are_let_go_and_hide_no_thread_that_stops() {
    if !may_trace() {
        return;
    }
    let shared = Shared::new();
    let area = area();
    let start = Hva(area.addr() as u64);
    let page = |at: usize| area.cast::<u8>().wrapping_add(at * PAGE);
    let readers = shared.is_back.iter().enumerate();
    let readers: Vec<Reader> = readers
        .map(|(at, is_back)| Reader {
            page: page(at).cast(),
            is_back,
        })
        .collect();
    let readers: &'static [Reader] = readers.leak();
    let child = Child::new(|| in_child(&shared, readers));
    let userfaultfd = watch(&child, start);
    shared.go.store(1, Ordering::SeqCst);
    let (mut faults, mut count) = (Vec::new(), 0);
    await_that("all faults", || {
        count += userfaultfd.read_faults(&mut faults).unwrap();
        count == DEAF
    });
    let process = child.process();
    std::thread::scope(|scope| {
        let borrower = scope.spawn(|| {
            run_inside(&process, |_| {
                let filled = userfaultfd.zeropage(start, DEAF as u64 * PAGE_BYTES);
                assert!(
                    matches!(filled, Ok(FillOutcome::Filled { .. })),
                    "{filled:?}"
                );
                let begun = Instant::now();
                while shared.count_back() < DEAF && begun.elapsed() < WAIT {
                    std::thread::sleep(Duration::from_millis(1));
                }
                Ok::<_, PtraceError>(shared.count_back())
            })
        });
        await_that("all threads asked to stop, in turns", || {
            count_running(&child) == DEAF || borrower.is_finished()
        });
        shared.may_pause.store(1, Ordering::SeqCst);
        let ran = borrower.join().unwrap().unwrap();
        // While the stopped thread stood still, the others did not.
        assert_eq!(ran.value, DEAF);
        assert_eq!(ran.thread, child.pid.cast_unsigned());
    });
    child.kill();
}
