//! The Python module `strata._core`: a thin binding over the core crates, and the only crate that knows PyO3.

use pyo3::prelude::*;

/// Version of the compiled module, equal to that of the distribution `strata-kv`.
#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// The compiled heart of Strata.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(version, module)?)
}
