//! Yardsticks for the benches: what a compare and a copy of the same bytes cost on this machine.

use crate::gate::released;
use numpy::{PyReadonlyArray1, PyReadwriteArray1};
use pyo3::prelude::*;
use strata_copy::{memcmp_baseline, memcpy_baseline, Stores};

/// Whether two arrays hold the same tokens: one memcmp, called as a match is called.
#[pyfunction]
pub fn same_bytes(one: PyReadonlyArray1<'_, u32>, two: PyReadonlyArray1<'_, u32>) -> PyResult<bool> {
    let (one, two) = (one.as_slice()?, two.as_slice()?);
    // A u32 slice is compared as bytes by the same memcmp that the tree's node compare compiles to.
    Ok(one.len() == two.len() && memcmp_baseline(bytes_of(one), bytes_of(two)))
}

/// Copies `source` to `destination`, bytes of equal number, with non-temporal stores if `streaming`. Lets go of the
/// lock, so that several threads can measure together.
#[pyfunction]
pub fn copy_bytes(
    py: Python<'_>,
    mut destination: PyReadwriteArray1<'_, u8>,
    source: PyReadonlyArray1<'_, u8>,
    streaming: bool,
) -> PyResult<()> {
    let stores = if streaming { Stores::Streaming } else { Stores::Cached };
    let (to, from) = (destination.as_slice_mut()?, source.as_slice()?);
    released(py, || memcpy_baseline(to, from, stores));
    Ok(())
}

fn bytes_of(words: &[u32]) -> &[u8] {
    // SAFETY: any u32 is four initialised bytes; the length is that of the same memory, and u8 needs no alignment.
    unsafe { std::slice::from_raw_parts(words.as_ptr().cast::<u8>(), std::mem::size_of_val(words)) }
}
