//! Which engine serves a root: io_uring where it and O_DIRECT work, threads elsewhere; `describe` says why.

use super::files::direct_refusal;
use super::{IoEngine, IoUringEngine, ThreadPoolEngine, ThrottledEngine};
use crate::config::{DiskConfig, DiskEngine};
use crate::error::at;
use crate::DiskError;
use std::io;
use std::path::Path;
use std::sync::Arc;

/// Says whether io_uring serves the file system of a file; `probe_io_uring`, except in tests.
pub type RingProbe = fn(&Path) -> io::Result<()>;

/// Starts the engine that a configuration asks for, or that suits the machine. `file` is any readable file of the
/// root's file system. An engine that was asked for by name and is refused is an error.
pub fn start_engine(
    config: &DiskConfig,
    file: &Path,
    probe: RingProbe,
) -> Result<Arc<dyn IoEngine>, DiskError> {
    let engine: Arc<dyn IoEngine> = match ring(config, file, probe) {
        Ok(ring) => Arc::new(ring),
        Err(reason) if config.engine == DiskEngine::IoUring => {
            return Err(DiskError::Engine { engine: "io_uring", root: config.root.clone(), reason })
        }
        Err(reason) => {
            let threads = ThreadPoolEngine::new(config.threads, config.direct, config.page_bytes, file)
                .map_err(at("start the I/O threads of", &config.root))?;
            Arc::new(threads.because(reason))
        }
    };
    if config.read_bandwidth.is_none() && config.write_bandwidth.is_none() {
        return Ok(engine);
    }
    let slowed = ThrottledEngine::new(engine, config.read_bandwidth, config.write_bandwidth)
        .map_err(at("start the I/O threads of", &config.root))?;
    Ok(Arc::new(slowed))
}

/// The ring, or why there is none.
fn ring(config: &DiskConfig, file: &Path, probe: RingProbe) -> Result<IoUringEngine, String> {
    if config.engine == DiskEngine::Threads {
        return Err("threads were asked for".into());
    }
    if let Some(reason) = direct_refusal(config.direct, config.page_bytes, file) {
        return Err(format!("io_uring serves only payloads past the page cache, and {reason}"));
    }
    probe(file)
        .and_then(|()| IoUringEngine::new(config, file))
        .map_err(|error| format!("io_uring is refused: {error}"))
}
