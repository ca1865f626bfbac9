// SPDX-License-Identifier: Apache-2.0
//! Results as a table.

use std::collections::HashMap;

use arrow_array::{RecordBatch, RecordBatchIterator};
use pagetide_arrow::table;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;
use serde_json::{Map, Value};

use crate::capsule;
use crate::error::{of_json, to_json};

/// A table of results, as Arrow.
#[pyclass(module = "pagetide._pagetide", frozen)]
pub struct Table {
    rows: Vec<Vec<(String, Value)>>,
    batch: RecordBatch,
}

impl Table {
    /// Rows of named values, with `study`, what they are of, in the metadata.
    pub fn new(rows: Vec<Vec<(String, Value)>>, study: Option<&Value>) -> Self {
        let metadata: HashMap<String, String> = study
            .map(|study| ("pagetide.study".to_owned(), study.to_string()))
            .into_iter()
            .collect();
        let batch = table(&rows, metadata);
        Self { rows, batch }
    }
}

#[pymethods]
impl Table {
    /// A table of rows that are a JSON list of objects.
    #[staticmethod]
    fn of_json(text: &str) -> PyResult<Self> {
        let rows: Vec<Map<String, Value>> = of_json("the rows", text)?;
        let rows = rows.into_iter().map(|row| row.into_iter().collect());
        Ok(Self::new(rows.collect(), None))
    }

    /// The rows as a JSON list of objects.
    fn to_json(&self) -> PyResult<String> {
        let rows = self.rows.iter().cloned();
        let rows: Vec<Map<String, Value>> = rows.map(|row| row.into_iter().collect()).collect();
        to_json(&rows)
    }

    /// Rows.
    #[getter]
    fn num_rows(&self) -> usize {
        self.batch.num_rows()
    }

    /// Names of the columns.
    #[getter]
    fn column_names(&self) -> Vec<String> {
        let schema = self.batch.schema();
        schema.fields().iter().map(|f| f.name().clone()).collect()
    }

    /// The table by the Arrow PyCapsule interface.
    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_stream__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        // The interface allows to leave a request for other types unheeded.
        drop(requested_schema);
        let batches = [Ok(self.batch.clone())];
        let reader = RecordBatchIterator::new(batches, self.batch.schema());
        capsule::stream(py, Box::new(reader))
    }

    /// Its schema.
    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        capsule::schema(py, &self.batch.schema())
    }
}
