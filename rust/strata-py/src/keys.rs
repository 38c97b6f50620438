//! Functions of tokens and folders that need no running cache.

use crate::error::{Failure, Outcome};
use numpy::PyReadonlyArray1;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use std::path::PathBuf;
use strata_types::{GroupId, Namespace};

/// The keys (64 hexadecimal digits each) of the whole pages of `tokens`, as disk records carry them.
#[pyfunction]
#[pyo3(signature = (tokens, page_size, *, salt = ""))]
pub fn page_keys(tokens: PyReadonlyArray1<'_, u32>, page_size: usize, salt: &str) -> PyResult<Vec<String>> {
    if page_size == 0 {
        return Err(PyValueError::new_err("page_size must be at least 1, got 0"));
    }
    let mut parent = Namespace::new(salt, "").root_key(GroupId(0));
    let pages = tokens.as_slice()?.chunks_exact(page_size);
    Ok(pages
        .map(|page| {
            parent = parent.child(page);
            parent.to_hex()
        })
        .collect())
}

/// Bytes that a folder occupies on disk, as `du` counts them.
#[pyfunction]
pub fn disk_usage(path: PathBuf) -> Outcome<u64> {
    strata_disk::disk_usage(&path)
        .map_err(|error| Failure::Storage(format!("cannot measure {}: {error}", path.display())))
}
