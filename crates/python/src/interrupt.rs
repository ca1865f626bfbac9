// SPDX-License-Identifier: Apache-2.0
//! Long work without the interpreter's lock, which an interrupt ends.
//!
//! Python notes a signal at once, but runs its handler only in the main thread, and only when that runs Python. So
//! the work has a thread of its own; the calling one waits, and asks for signals between. An exception of a handler,
//! such as `KeyboardInterrupt`, sets the flag that the work looks at, and is raised when the work has ended.

use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::time::Duration;

use pagetide_access_log::TraceError;
use pagetide_sim::Stop;
use pagetide_trace::{Event, EventSource};
use pyo3::prelude::*;

use crate::error::error;

/// From one look for signals to the next.
const LOOK: Duration = Duration::from_millis(50);

/// What `work` gives. `between` is called with the interpreter from time to time.
pub fn interruptible<T: Send>(
    py: Python<'_>,
    stop: &Stop,
    mut between: impl FnMut(Python<'_>) -> PyResult<()> + Send,
    work: impl FnOnce() -> T + Send,
) -> PyResult<T> {
    let mut raised = None;
    let done = py.detach(|| {
        let (sender, receiver) = channel();
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let done = catch_unwind(AssertUnwindSafe(work));
                // The receiver waits until this is sent.
                drop(sender.send(done));
            });
            loop {
                match receiver.recv_timeout(LOOK) {
                    Ok(done) => return Some(done),
                    Err(RecvTimeoutError::Disconnected) => return None,
                    Err(RecvTimeoutError::Timeout) if raised.is_some() => {}
                    Err(RecvTimeoutError::Timeout) => {
                        let looked =
                            Python::attach(|py| py.check_signals().and_then(|()| between(py)));
                        if let Err(exception) = looked {
                            stop.set();
                            raised = Some(exception);
                        }
                    }
                }
            }
        })
    });
    if let Some(exception) = raised {
        return Err(exception);
    }
    between(py)?;
    match done {
        Some(Ok(done)) => Ok(done),
        Some(Err(panic)) => Err(of_panic(&*panic)),
        None => Err(of_panic(&"its thread ended")),
    }
}

/// What `work`, which keeps the interpreter's lock, gives.
pub fn contained<T>(work: impl FnOnce() -> T) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(work)).map_err(|panic| of_panic(&*panic))
}

fn of_panic(panic: &(dyn Any + Send)) -> PyErr {
    let text = panic.downcast_ref::<&str>().copied();
    let text = text.or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    error(format!(
        "the simulator has a defect, please report it: {}",
        text.unwrap_or("it panicked")
    ))
}

/// Events of a trace that is read with the interpreter's lock: signals are looked for at each batch.
pub struct UntilSignal<'a> {
    pub source: Box<dyn EventSource + 'a>,
    /// The exception of a signal's handler.
    pub raised: &'a std::sync::Mutex<Option<PyErr>>,
}

impl EventSource for UntilSignal<'_> {
    fn next_batch(&mut self, batch: &mut Vec<Event>) -> Result<usize, TraceError> {
        if let Err(exception) = Python::attach(|py| py.check_signals()) {
            let mut raised = self
                .raised
                .lock()
                .unwrap_or_else(std::sync::PoisonError::into_inner);
            *raised = Some(exception);
            return Err(TraceError::Asked("the run was interrupted".to_owned()));
        }
        self.source.next_batch(batch)
    }
}
