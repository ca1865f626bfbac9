// SPDX-License-Identifier: Apache-2.0
//! Arrow by the PyCapsule interface: a capsule holds a C structure with a name, and whoever takes what is in it says
//! so in the structure itself.

#![expect(
    unsafe_code,
    reason = "the structure of somebody else's capsule is behind a pointer"
)]

use std::ffi::CStr;

use arrow_array::RecordBatchReader;
use arrow_array::ffi::FFI_ArrowSchema;
use arrow_array::ffi_stream::{FFI_ArrowArrayStream, RecordBatchStreamReader};
use arrow_schema::Schema;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::error::error;

const STREAM: &CStr = c"arrow_array_stream";
const SCHEMA: &CStr = c"arrow_schema";

/// `batches` as a capsule.
pub fn stream(
    py: Python<'_>,
    batches: Box<dyn RecordBatchReader + Send>,
) -> PyResult<Bound<'_, PyCapsule>> {
    PyCapsule::new_with_value(py, FFI_ArrowArrayStream::new(batches), STREAM)
}

/// A schema as a capsule.
pub fn schema<'py>(py: Python<'py>, schema: &Schema) -> PyResult<Bound<'py, PyCapsule>> {
    let schema = FFI_ArrowSchema::try_from(schema).map_err(error)?;
    PyCapsule::new_with_value(py, schema, SCHEMA)
}

/// The batches of any object that has them by the interface.
pub fn batches(object: &Bound<'_, PyAny>) -> PyResult<RecordBatchStreamReader> {
    let Ok(method) = object.getattr("__arrow_c_stream__") else {
        return Err(error(format!(
            "an object of type {} is no table: it has no __arrow_c_stream__, as tables of pyarrow, polars and \
             pandas have",
            object.get_type().name()?
        )));
    };
    let given = method.call0()?;
    let Ok(capsule) = given.cast::<PyCapsule>() else {
        return Err(error("__arrow_c_stream__ gave no capsule"));
    };
    let pointer = capsule
        .pointer_checked(Some(STREAM))
        .map_err(|reason| error(format!("__arrow_c_stream__ gave another capsule: {reason}")))?;
    let pointer = pointer.cast::<FFI_ArrowArrayStream>().as_ptr();
    // SAFETY: a capsule of this name has a valid `ArrowArrayStream` by the PyCapsule interface, which lives as long
    // as the capsule; the interpreter's lock is held, so nobody else takes it meanwhile. What is in it is moved out
    // and its `release` cleared, so the capsule will not release it again.
    unsafe { RecordBatchStreamReader::from_raw(pointer) }.map_err(error)
}
