// SPDX-License-Identifier: Apache-2.0
//! The simulator as a module of Python: what `pagetide` (python/pagetide) is made of.
//!
//! ```text
//!   python/pagetide        names, defaults, docstrings, types; Ray
//!        │  JSON for studies and outcomes, Arrow for tables
//!   this crate             objects that hold traces, studies, tables; no decision of its own
//!        │
//!   pagetide-sim, -trace, -arrow, -figures
//! ```
//! *Invariant:* whatever takes long runs without the interpreter's lock, and ends within a second of an interrupt
//! ([`interrupt`]). *Invariant:* nothing fails but by an exception: errors of the model are `pagetide.Error` with its
//! sentence, and so is a panic.

mod capsule;
mod chart;
mod error;
mod figures;
mod interrupt;
mod ledger;
mod policy;
mod study;
mod table;
mod trace;

use pyo3::prelude::*;

/// The native part of `pagetide`.
#[pymodule]
fn _pagetide(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add("__version__", env!("CARGO_PKG_VERSION"))?;
    module.add("Error", module.py().get_type::<error::Error>())?;
    module.add_class::<trace::Trace>()?;
    module.add_class::<table::Table>()?;
    module.add_class::<study::Study>()?;
    module.add_class::<ledger::Ledger>()?;
    module.add_class::<ledger::Jobs>()?;
    module.add_class::<policy::Entries>()?;
    module.add_class::<policy::Page>()?;
    module.add_function(wrap_pyfunction!(study::set_program, module)?)?;
    module.add_function(wrap_pyfunction!(study::build, module)?)?;
    module.add_function(wrap_pyfunction!(study::run, module)?)?;
    module.add_function(wrap_pyfunction!(study::sweep, module)?)?;
    module.add_function(wrap_pyfunction!(figures::figures, module)?)?;
    module.add_function(wrap_pyfunction!(figures::figure_names, module)?)?;
    module.add_function(wrap_pyfunction!(chart::chart, module)?)?;
    Ok(())
}
