//! The engine that works everywhere: threads that call preadv and pwritev.

use super::files::Files;
use super::workers::{abandon, Workers};
use super::{Io, IoEngine, SegmentBytes, SegmentFile};
use crate::config::DirectIo;
use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// Threads that execute blocking I/O.
pub struct ThreadPoolEngine {
    threads: usize,
    files: Arc<Files>,
    workers: Workers<Io>,
    /// Why it was picked, for logs.
    reason: Option<String>,
}

impl ThreadPoolEngine {
    /// Starts the threads, for payloads of `page_bytes`. `probe` is any file of the file system in question.
    pub fn new(
        threads: usize,
        direct: DirectIo,
        page_bytes: u32,
        probe: &Path,
    ) -> io::Result<ThreadPoolEngine> {
        let files = Arc::new(Files::new(direct, page_bytes, probe));
        let used = Arc::clone(&files);
        let workers = Workers::start(threads, move |io: Io| {
            let mut next = Some(io);
            while let Some(mut io) = next {
                io.start();
                let result = used.execute(&io);
                next = (io.then)(result);
            }
        })?;
        Ok(ThreadPoolEngine { threads, files, workers, reason: None })
    }

    /// Lets `describe` say why this engine was picked.
    #[must_use]
    pub fn because(self, reason: String) -> ThreadPoolEngine {
        ThreadPoolEngine { reason: Some(reason), ..self }
    }
}

impl IoEngine for ThreadPoolEngine {
    fn create(&self, path: &Path, bytes: SegmentBytes, front: &[u8]) -> io::Result<SegmentFile> {
        self.files.create(path, bytes, front)
    }

    fn open(&self, path: &Path, bytes: SegmentBytes) -> io::Result<SegmentFile> {
        self.files.open(path, bytes)
    }

    fn remove(&self, path: &Path) -> io::Result<()> {
        self.files.remove(path)
    }

    fn sync(&self, file: &SegmentFile) -> io::Result<()> {
        self.files.sync(file)
    }

    fn submit(&self, io: Io) {
        if let Err(refused) = self.workers.put(io.lane, io) {
            abandon(refused);
        }
    }

    fn depth(&self) -> usize {
        self.threads
    }

    fn describe(&self) -> String {
        let reason = self.reason.as_ref().map(|reason| format!("; {reason}")).unwrap_or_default();
        format!("threads x{}, {}{reason}", self.threads, self.files.describe())
    }

    fn stop(&self, deadline: Duration) -> bool {
        self.workers.stop(deadline)
    }
}
