// SPDX-License-Identifier: Apache-2.0
//! Policies that are written in Python, behind the interfaces that those in Rust are behind.
//!
//! The run keeps the interpreter's lock, so a call costs what a call in Python costs; methods that a policy does not
//! have are not called. What one raises ends the run: the exception is kept, the run is told that the policy failed,
//! and nothing of it is called again.
//!
//! A view into the cache cannot outlive a call, and objects of Python may. So the entries that a policy sees are an
//! object of their own, which is told what enters and what moves.

use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use pagetide_sim::SimError;
use pagetide_sim::policy::{
    Entries as Cache, OwnPolicies, Page as SimPage, Prefetcher, ReplacementPolicy, SourcePredictor,
    Step,
};
use pyo3::exceptions::{PyException, PyIndexError};
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::error::error;

/// The entries of a cache: for each what it translates, and a number that is the policy's own.
#[pyclass(module = "pagetide._pagetide")]
#[derive(Default)]
pub struct Entries {
    ways: usize,
    marks: Vec<u64>,
    keys: Vec<(u32, u64)>,
}

impl Entries {
    fn enter(&mut self, at: usize, key: (u32, u64)) {
        if self.marks.len() <= at {
            self.marks.resize(at + 1, 0);
            self.keys.resize(at + 1, (0, 0));
        }
        self.marks[at] = 0;
        self.keys[at] = key;
    }

    fn shift(&mut self, from: usize, to: usize) {
        self.marks[to] = self.marks[from];
        self.keys[to] = self.keys[from];
    }
}

fn no_entry(at: usize) -> PyErr {
    PyIndexError::new_err(format!("there is no entry {at}"))
}

#[pymethods]
impl Entries {
    /// Entries of a set.
    #[getter]
    fn ways(&self) -> usize {
        self.ways
    }

    /// The set that an entry is in.
    fn set_of(&self, at: usize) -> usize {
        at / self.ways.max(1)
    }

    /// Its place in the set.
    fn way_of(&self, at: usize) -> usize {
        at % self.ways.max(1)
    }

    /// The entries of a set.
    fn of_set<'py>(&self, py: Python<'py>, set: usize) -> PyResult<Bound<'py, PyAny>> {
        let first = set.saturating_mul(self.ways);
        let range = py.import("builtins")?.getattr("range")?;
        range.call1((first, first.saturating_add(self.ways)))
    }

    /// The policy's number of an entry; 0 for a new one.
    fn mark(&self, at: usize) -> PyResult<u64> {
        self.marks.get(at).copied().ok_or_else(|| no_entry(at))
    }

    /// The numbers of a set's entries, in their order: one call instead of one an entry.
    fn marks(&self, set: usize) -> PyResult<Vec<u64>> {
        let first = set.saturating_mul(self.ways);
        let marks = self.marks.get(first..first.saturating_add(self.ways));
        Ok(marks.ok_or_else(|| no_entry(first))?.to_vec())
    }

    /// Changes it.
    fn set_mark(&mut self, at: usize, mark: u64) -> PyResult<()> {
        *self.marks.get_mut(at).ok_or_else(|| no_entry(at))? = mark;
        Ok(())
    }

    /// Domain and first address of what an entry translates.
    fn key(&self, at: usize) -> PyResult<(u32, u64)> {
        self.keys.get(at).copied().ok_or_else(|| no_entry(at))
    }
}

/// A page as a tenant asked for it.
#[pyclass(module = "pagetide._pagetide", frozen, eq, hash, get_all)]
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Page {
    /// The tenant, numbered in the order of first requests.
    tenant: u32,
    /// Its source id in the trace.
    source: u32,
    /// Its domain.
    domain: u32,
    /// The address.
    iova: u64,
    /// log2 of the page's size.
    shift: u8,
}

impl Page {
    fn of(page: &SimPage) -> Self {
        Self {
            tenant: page.tenant,
            source: page.source,
            domain: page.domain,
            iova: page.iova,
            shift: page.shift,
        }
    }
}

#[pymethods]
impl Page {
    #[new]
    fn new(tenant: u32, source: u32, domain: u32, iova: u64, shift: u8) -> Self {
        Self {
            tenant,
            source,
            domain,
            iova,
            shift,
        }
    }

    fn __repr__(&self) -> String {
        format!(
            "Page(tenant={}, source={}, domain={}, iova={:#x}, shift={})",
            self.tenant, self.source, self.domain, self.iova, self.shift
        )
    }
}

/// The first exception of any policy of a run.
#[derive(Clone, Default)]
pub struct Failures(Rc<RefCell<Option<PyErr>>>);

impl Failures {
    /// The error of a run with its cause, if a policy raised one. What is no `Exception`, as an interrupt, is raised
    /// as it is.
    pub fn exception(&self, reason: SimError) -> PyErr {
        let Some(cause) = self.0.borrow_mut().take() else {
            return error(reason);
        };
        Python::attach(|py| {
            if !cause.is_instance_of::<PyException>(py) {
                return cause;
            }
            let raised = error(reason);
            raised.set_cause(py, Some(cause));
            raised
        })
    }
}

/// What every policy has: the calls of it, until one fails.
struct Calls {
    failures: Failures,
    failed: Option<String>,
}

impl Calls {
    /// What `call` gives; `None` once something failed.
    fn call<T>(&mut self, call: impl FnOnce(Python<'_>) -> PyResult<T>) -> Option<T> {
        if self.failed.is_some() {
            return None;
        }
        Python::attach(|py| match call(py) {
            Ok(given) => Some(given),
            Err(exception) => {
                self.failed = Some(format!("it raised {exception}"));
                self.failures.0.borrow_mut().get_or_insert(exception);
                None
            }
        })
    }
}

/// A method that may be missing.
fn method(policy: &Bound<'_, PyAny>, name: &str) -> Option<Py<PyAny>> {
    policy.getattr(name).ok().map(Bound::unbind)
}

fn needed(part: &str, policy: &Bound<'_, PyAny>, name: &str) -> PyResult<Py<PyAny>> {
    method(policy, name).ok_or_else(|| {
        error(format!(
            "policy of {part}: {} has no method '{name}'",
            policy.get_type()
        ))
    })
}

/// Policies by the part that they are for.
pub struct Policies {
    own: OwnPolicies,
    failures: Failures,
}

impl Policies {
    /// Those that `given` has, by the names of parts.
    pub fn of(given: HashMap<String, Bound<'_, PyAny>>) -> PyResult<Self> {
        let failures = Failures::default();
        let mut own = OwnPolicies::default();
        for (part, policy) in given {
            let calls = Calls {
                failures: failures.clone(),
                failed: None,
            };
            let replacement = || Replacement::of(&part, &policy, &failures);
            match part.as_str() {
                "devtlb" => own.devtlb = Some(replacement()?),
                "iotlb" => own.iotlb = Some(replacement()?),
                "l1" => own.levels[0] = Some(replacement()?),
                "l2" => own.levels[1] = Some(replacement()?),
                "l3" => own.levels[2] = Some(replacement()?),
                "l4" => own.levels[3] = Some(replacement()?),
                "predictor" => {
                    own.predictor = Some(Box::new(Predictor {
                        calls,
                        observe: needed(&part, &policy, "observe")?,
                        set_length: method(&policy, "set_length"),
                    }));
                }
                "prefetcher" => {
                    own.prefetcher = Some(Box::new(Unit {
                        calls,
                        looked_up: needed(&part, &policy, "looked_up")?,
                        set_length: method(&policy, "set_length"),
                    }));
                }
                _ => {
                    return Err(error(format!(
                        "there is no policy of '{part}'; there are devtlb, iotlb, l1 to l4, predictor and prefetcher"
                    )));
                }
            }
        }
        Ok(Self { own, failures })
    }

    /// They, and what they will raise.
    pub fn own(self) -> (OwnPolicies, Failures) {
        (self.own, self.failures)
    }
}

struct Replacement {
    calls: Calls,
    entries: Py<Entries>,
    used: Option<Py<PyAny>>,
    inserted: Option<Py<PyAny>>,
    removed: Option<Py<PyAny>>,
    moved: Option<Py<PyAny>>,
    victim: Py<PyAny>,
}

impl Replacement {
    fn of(
        part: &str,
        policy: &Bound<'_, PyAny>,
        failures: &Failures,
    ) -> PyResult<Box<dyn ReplacementPolicy>> {
        Ok(Box::new(Self {
            calls: Calls {
                failures: failures.clone(),
                failed: None,
            },
            entries: Py::new(policy.py(), Entries::default())?,
            used: method(policy, "used"),
            inserted: method(policy, "inserted"),
            removed: method(policy, "removed"),
            moved: method(policy, "moved"),
            victim: needed(part, policy, "victim")?,
        }))
    }

    /// Calls a method about entry `at`, with its next use if that is known.
    fn about(
        calls: &mut Calls,
        entries: &Py<Entries>,
        method: Option<&Py<PyAny>>,
        at: usize,
        next_use: u64,
    ) {
        let Some(method) = method else { return };
        let next_use = (next_use != u64::MAX).then_some(next_use);
        calls.call(|py| method.call1(py, (entries, at, next_use)).map(drop));
    }
}

impl ReplacementPolicy for Replacement {
    fn used(&mut self, _cache: &mut Cache<'_>, at: usize, next_use: u64) {
        Self::about(
            &mut self.calls,
            &self.entries,
            self.used.as_ref(),
            at,
            next_use,
        );
    }

    fn inserted(&mut self, cache: &mut Cache<'_>, at: usize, next_use: u64) {
        let entries = &self.entries;
        self.calls.call(|py| {
            let mut entries = entries.try_borrow_mut(py)?;
            entries.ways = cache.ways();
            entries.enter(at, cache.key(at));
            Ok(())
        });
        Self::about(
            &mut self.calls,
            entries,
            self.inserted.as_ref(),
            at,
            next_use,
        );
    }

    fn removed(&mut self, _cache: &mut Cache<'_>, at: usize) {
        let (entries, removed) = (&self.entries, self.removed.as_ref());
        if let Some(removed) = removed {
            self.calls
                .call(|py| removed.call1(py, (entries, at)).map(drop));
        }
    }

    fn moved(&mut self, _cache: &mut Cache<'_>, from: usize, to: usize) {
        let (entries, moved) = (&self.entries, self.moved.as_ref());
        self.calls.call(|py| {
            entries.try_borrow_mut(py)?.shift(from, to);
            match moved {
                Some(moved) => moved.call1(py, (entries, from, to)).map(drop),
                None => Ok(()),
            }
        });
    }

    fn victim(&mut self, _cache: &mut Cache<'_>, set: usize) -> usize {
        let (entries, victim) = (&self.entries, &self.victim);
        let named = self
            .calls
            .call(|py| victim.call1(py, (entries, set))?.extract::<i128>(py));
        // No cache has an entry of this number, nor one below zero.
        named
            .and_then(|named| usize::try_from(named).ok())
            .unwrap_or(usize::MAX)
    }

    fn failure(&mut self) -> Option<String> {
        self.calls.failed.clone()
    }
}

struct Predictor {
    calls: Calls,
    observe: Py<PyAny>,
    set_length: Option<Py<PyAny>>,
}

impl SourcePredictor for Predictor {
    fn observe(&mut self, tenant: u32) -> Option<u32> {
        let observe = &self.observe;
        self.calls
            .call(|py| observe.call1(py, (tenant,))?.extract::<Option<u32>>(py))
            .flatten()
    }

    fn set_length(&mut self, length: u32) {
        if let Some(set_length) = &self.set_length {
            self.calls
                .call(|py| set_length.call1(py, (length,)).map(drop));
        }
    }

    fn failure(&mut self) -> Option<String> {
        self.calls.failed.clone()
    }
}

struct Unit {
    calls: Calls,
    looked_up: Py<PyAny>,
    set_length: Option<Py<PyAny>>,
}

impl Prefetcher for Unit {
    fn looked_up(&mut self, page: &SimPage, step: Step, guesses: &mut Vec<SimPage>) {
        let looked_up = &self.looked_up;
        let step = match step {
            Step::DevTlbHit => "devtlb-hit",
            Step::BufferHit => "buffer-hit",
            _ => "miss",
        };
        self.calls.call(|py| {
            let arguments = PyTuple::new(
                py,
                [
                    Py::new(py, Page::of(page))?.into_any(),
                    pyo3::types::PyString::intern(py, step).into_any().unbind(),
                ],
            )?;
            let given = looked_up.bind(py).call1(arguments)?;
            if given.is_none() {
                return Ok(());
            }
            for guess in given.try_iter()? {
                let guess = guess?;
                let guess = guess.cast::<Page>()?.get();
                guesses.push(SimPage {
                    iova: guess.iova,
                    domain: guess.domain,
                    tenant: guess.tenant,
                    source: guess.source,
                    shift: guess.shift,
                });
            }
            Ok(())
        });
    }

    fn set_length(&mut self, length: u32) {
        if let Some(set_length) = &self.set_length {
            self.calls
                .call(|py| set_length.call1(py, (length,)).map(drop));
        }
    }

    fn failure(&mut self) -> Option<String> {
        self.calls.failed.clone()
    }
}

impl std::fmt::Debug for Replacement {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Replacement")
    }
}

impl std::fmt::Debug for Predictor {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Predictor")
    }
}

impl std::fmt::Debug for Unit {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Unit")
    }
}
