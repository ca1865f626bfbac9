// SPDX-License-Identifier: Apache-2.0
//! Errors as Python sees them: one class, with the sentence that the command line would print.

use std::fmt::Display;

use pyo3::PyErr;
use pyo3::create_exception;
use pyo3::exceptions::PyException;
use serde::Serialize;
use serde::de::DeserializeOwned;

create_exception!(
    pagetide,
    Error,
    PyException,
    "What was asked for cannot be done; the message says what is wrong, and where."
);

/// `error` as an exception.
pub fn error(error: impl Display) -> PyErr {
    Error::new_err(error.to_string())
}

/// `value` as JSON.
pub fn to_json<T: Serialize>(value: &T) -> Result<String, PyErr> {
    serde_json::to_string(value).map_err(error)
}

/// What `text`, which is `what`, has as JSON.
pub fn of_json<T: DeserializeOwned>(what: &str, text: &str) -> Result<T, PyErr> {
    serde_json::from_str(text).map_err(|reason| error(format!("{what}: {reason}")))
}
