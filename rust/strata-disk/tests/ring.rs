//! Every suite of the disk tier once more, over io_uring (see `common::engine`).
// Each suite brings the module `common` along, as a test binary of its own does.
#![allow(clippy::unwrap_used, clippy::duplicate_mod)]

#[path = "conformance.rs"]
mod conformance;
#[path = "crash.rs"]
mod crash;
#[path = "faults.rs"]
mod faults;
#[path = "matrix.rs"]
mod matrix;
#[path = "recovery.rs"]
mod recovery;
#[path = "store.rs"]
mod store;

mod common;

use common::{config, Rig};
use strata_disk::probe_io_uring;

#[test]
fn the_suites_ran_over_the_ring_unless_the_machine_refuses_it() {
    let root = tempfile::tempdir().unwrap();
    let rig = Rig::open(config(root.path(), 1 << 20, 16, 4096));
    let said = rig.store.describe();
    match probe_io_uring(&root.path().join(strata_disk::MARKER_FILE)) {
        Ok(()) => assert!(said.starts_with("io_uring, depth 32, O_DIRECT"), "{said}"),
        Err(error) => assert!(said.starts_with("threads x4") && said.contains(&error.to_string()), "{said}"),
    }
}
