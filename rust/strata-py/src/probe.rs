//! What the system allows, found out by trying it.

use pyo3::prelude::*;

/// Bytes of `struct io_uring_params`, which the kernel fills in.
#[cfg(target_os = "linux")]
const PARAMETER_BYTES: usize = 120;

/// Why this process gets no io_uring, in the system's words; None if it gets one. The ring is closed at once.
#[pyfunction]
pub fn probe_io_uring() -> Option<String> {
    #[cfg(target_os = "linux")]
    {
        let mut parameters = [0_u64; PARAMETER_BYTES / 8];
        // SAFETY: the kernel reads and writes at most `PARAMETER_BYTES` bytes at this address during the call; an
        // all-zero structure asks for a plain ring.
        let ring = unsafe { libc::syscall(libc::SYS_io_uring_setup, 1, parameters.as_mut_ptr()) };
        if ring < 0 {
            return Some(std::io::Error::last_os_error().to_string());
        }
        // SAFETY: the descriptor was just made and belongs to nobody else. There is nothing to lose by closing it.
        unsafe { libc::close(ring as libc::c_int) };
        None
    }
    #[cfg(not(target_os = "linux"))]
    Some("io_uring is a Linux interface".into())
}
