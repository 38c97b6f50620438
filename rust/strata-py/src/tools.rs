//! Functions of disk roots that need no running server: what lies in one, and deleting it.

use crate::error::Outcome;
use crate::gate::released;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::path::PathBuf;
use strata_disk::{inspect, purge, FolderInspection};

/// What lies in the disk root at `path`, as nested dictionaries; with `verify` every payload is read and compared with
/// its checksum. Reads only, also beside a server that uses the root. Raises StorageError.
#[pyfunction]
#[pyo3(signature = (path, *, verify = false))]
pub fn disk_inspect(py: Python<'_>, path: PathBuf, verify: bool) -> PyResult<Py<PyDict>> {
    let found = released(py, || -> Outcome<_> { Ok(inspect(&path, verify)?) })?;
    let folders = found.folders.iter().map(|folder| folder_dict(py, folder)).collect::<PyResult<Vec<_>>>()?;
    let all = PyDict::new(py);
    all.set_item("bytes", found.bytes)?;
    all.set_item("in_use", found.in_use)?;
    all.set_item("owner", found.owner)?;
    all.set_item("fingerprints", folders)?;
    all.set_item("foreign", found.foreign)?;
    Ok(all.unbind())
}

fn folder_dict<'py>(py: Python<'py>, folder: &FolderInspection) -> PyResult<Bound<'py, PyDict>> {
    let fields = PyDict::new(py);
    fields.set_item("fingerprint", &folder.fingerprint)?;
    let numbers = [
        ("bytes", folder.bytes),
        ("page_size", u64::from(folder.page_size)),
        ("page_bytes", u64::from(folder.page_bytes)),
        ("segments", u64::from(folder.segments)),
        ("damaged_segments", u64::from(folder.damaged_segments)),
        ("whole", folder.whole),
        ("damaged", folder.damaged),
        ("blank", folder.blank),
        ("newest_sequence", folder.newest_sequence),
        ("verified", folder.verified),
        ("corrupt", folder.corrupt),
    ];
    for (name, value) in numbers {
        fields.set_item(name, value)?;
    }
    Ok(fields)
}

/// Deletes what Strata wrote into the disk root at `path`, or into the one fingerprint that begins with these digits;
/// what is not Strata's is left and named. Raises StorageError if it is no root or in use.
#[pyfunction]
#[pyo3(signature = (path, *, fingerprint = None))]
pub fn disk_purge(py: Python<'_>, path: PathBuf, fingerprint: Option<&str>) -> PyResult<Py<PyDict>> {
    let purged = released(py, || -> Outcome<_> { Ok(purge(&path, fingerprint)?) })?;
    let fields = PyDict::new(py);
    fields.set_item("bytes", purged.bytes)?;
    fields.set_item("files", purged.files)?;
    fields.set_item("fingerprints", purged.fingerprints)?;
    fields.set_item("left", purged.left)?;
    Ok(fields.unbind())
}
