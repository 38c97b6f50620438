//! The Python module `strata._core`: a thin binding over the core crates, and the only crate that knows PyO3.
//! Errors cross in `error`, the interpreter's lock is let go in `gate`, and nowhere else.

mod cache;
mod copy_mover;
mod device_edge;
mod disk;
mod error;
mod gate;
mod host_arena;
mod keys;
mod lease;
mod link;
mod measure;
mod measure_disk;
mod measure_scheduler;
mod memory;
mod options;
mod plan;
mod pools;
mod probe;
mod python_order;
mod runtime;
mod simulate;
mod stats;
mod step_seconds;
mod tickets;
mod tools;
mod transfer_queue;

use pyo3::prelude::*;

/// Version of the compiled module, equal to that of the distribution `strata-kv`.
#[pyfunction]
fn version() -> &'static str {
    env!("CARGO_PKG_VERSION")
}

/// The compiled heart of Strata.
#[pymodule]
fn _core(module: &Bound<'_, PyModule>) -> PyResult<()> {
    module.add_function(wrap_pyfunction!(version, module)?)?;
    module.add_function(wrap_pyfunction!(keys::page_keys, module)?)?;
    module.add_function(wrap_pyfunction!(keys::disk_usage, module)?)?;
    module.add_function(wrap_pyfunction!(tools::disk_inspect, module)?)?;
    module.add_function(wrap_pyfunction!(tools::disk_purge, module)?)?;
    module.add_function(wrap_pyfunction!(measure::same_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(measure::copy_bytes, module)?)?;
    module.add_function(wrap_pyfunction!(measure_scheduler::measure_decisions, module)?)?;
    module.add_function(wrap_pyfunction!(probe::probe_io_uring, module)?)?;
    module.add_function(wrap_pyfunction!(simulate::simulate, module)?)?;
    module.add_function(wrap_pyfunction!(simulate::simulation_config, module)?)?;
    module.add_function(wrap_pyfunction!(step_seconds::step_seconds, module)?)?;
    module.add_class::<cache::PageCache>()?;
    module.add_class::<copy_mover::CopyMover>()?;
    module.add_class::<copy_mover::Movement>()?;
    module.add_class::<cache::PinnedPages>()?;
    module.add_class::<host_arena::HostArena>()?;
    module.add_class::<lease::Lease>()?;
    module.add_class::<measure::CopyYardstick>()?;
    module.add_class::<memory::LayerHold>()?;
    module.add_class::<measure_disk::DiskMeter>()?;
    module.add_class::<plan::Plan>()?;
    module.add_class::<plan::Refusal>()?;
    module.add_class::<runtime::Runtime>()?;
    module.add_class::<transfer_queue::TransferQueue>()
}
