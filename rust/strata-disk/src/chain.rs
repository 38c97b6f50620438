//! The chains of I/Os that carry out a run. What they guarantee:
//! - spill: the old header is cleared before the payload is touched, and the new one written after all of it;
//! - prefetch: a page counts only if the header names it and its payload has the header's checksum;
//! - erase: the header is zero.
//!
//! Each chain takes run after run of its transfer; the last chain to find none reports.

use crate::engine::{Buffer, Io, Lane, Operation, Part, SegmentFile, Started};
use crate::format::{identity, RecordHeader};
use crate::geometry::BLOCK;
use crate::health::is_full;
use crate::segments::{Entry, Slot};
use crate::store::Shared;
use crate::transfer::{Run, Transfer};
use std::io;
use std::ptr::NonNull;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::Arc;
use strata_types::{TransferError, TransferKind};
use xxhash_rust::xxh3::xxh3_128;

/// What fills a payload's slot up to whole blocks.
static PADDING: [u8; BLOCK as usize] = [0; BLOCK as usize];

/// A transfer as one of its chains sees it.
#[derive(Clone)]
pub(crate) struct Job {
    pub shared: Arc<Shared>,
    pub transfer: Arc<Transfer>,
    pub number: u64,
}

impl Job {
    /// Starts the chains of a transfer.
    pub fn start(self) {
        let chains = self.shared.engine.depth().clamp(1, self.transfer.len().max(1));
        self.transfer.enter(chains);
        for _ in 0..chains {
            let job = self.clone();
            self.shared.engine.submit(Io::hop(self.lane(), move || job.advance()));
        }
    }

    fn lane(&self) -> Lane {
        if self.transfer.kind() == TransferKind::Prefetch {
            Lane::Read
        } else {
            Lane::Write
        }
    }

    /// Begins the next run that needs I/O; reports the transfer if this was its last chain.
    fn advance(self) -> Option<Io> {
        let shared = &self.shared;
        let depth = shared.engine.depth();
        let interruption = || shared.interruption(&self.transfer);
        while let Some(run) = self.transfer.take_run(&shared.segments.geometry, depth, interruption) {
            let begun = match self.transfer.kind() {
                TransferKind::Spill => self.spill(run),
                TransferKind::Prefetch => self.prefetch(run),
                _ => self.erase(run),
            };
            if begun.is_some() {
                return begun;
            }
        }
        if self.transfer.leave() {
            shared.finish(self.number, &self.transfer);
        }
        None
    }

    /// A run has ended. Writes queue up again, so that reads can go between them.
    fn next(self) -> Option<Io> {
        if self.lane() == Lane::Read {
            return self.advance();
        }
        let shared = Arc::clone(&self.shared);
        shared.engine.submit(Io::hop(Lane::Write, move || self.advance()));
        None
    }

    fn spill(&self, run: Run) -> Option<Io> {
        let segments = &self.shared.segments;
        let file = match self.shared.create_segment(run.segment) {
            Ok(file) => file,
            Err(error) => {
                let operation = format!("allocation of {}", segments.path(run.segment).display());
                let reason = error.to_string();
                let failure = match is_full(&error) {
                    true => TransferError::NoRoom { operation, reason, pages: segments.missing() },
                    false => TransferError::Io { operation, reason },
                };
                self.transfer.fail(run.first, failure);
                return None;
            }
        };
        if segments.slots(run.segment, run.index, run.count).iter().all(|slot| *slot == Slot::Blank) {
            return self.write_payloads(run, file);
        }
        Some(self.clear(run, &file, move |job, file| job.write_payloads(run, file).or_else(|| job.next())))
    }

    fn erase(&self, run: Run) -> Option<Io> {
        let segments = &self.shared.segments;
        let file = segments.file(run.segment)?;
        if segments.slots(run.segment, run.index, run.count).iter().all(|slot| *slot == Slot::Blank) {
            return None;
        }
        Some(self.clear(run, &file, |job, _| job.next()))
    }

    /// Clears the headers of a run, then goes on with `and_then`.
    fn clear(
        &self,
        run: Run,
        file: &Arc<SegmentFile>,
        and_then: impl FnOnce(Job, Arc<SegmentFile>) -> Option<Io> + Send + 'static,
    ) -> Io {
        let zeros = vec![0; run.count * self.shared.segments.geometry.header_slot() as usize];
        self.mark(run, Slot::Stale);
        let held = Arc::clone(file);
        self.write_headers(run, file, zeros, move |job| {
            job.mark(run, Slot::Blank);
            and_then(job, held)
        })
    }

    fn mark(&self, run: Run, slot: Slot) {
        self.shared.segments.set_slots(run.segment, run.index, std::iter::repeat_n(slot, run.count));
    }

    fn write_payloads(&self, run: Run, file: Arc<SegmentFile>) -> Option<Io> {
        let padding = NonNull::from(&PADDING).cast();
        let buffers = self.payload_buffers(run, padding)?;
        let held = Arc::clone(&file);
        let offset = self.shared.segments.geometry.payload_offset(run.index);
        let operation = Operation::Write { file, part: Part::Payloads, offset };
        Some(self.write("write", run, operation, buffers, Vec::new(), move |job| {
            let Some((headers, slots)) = job.encode_headers(run) else { return job.next() };
            // Until it is known to be whole, whatever is there has to be cleared before the payload changes.
            job.mark(run, Slot::Stale);
            Some(job.write_headers(run, &held, headers, move |job| {
                job.shared.segments.set_slots(run.segment, run.index, slots);
                job.next()
            }))
        }))
    }

    /// The headers of pages whose payloads are on disk, and what the store remembers of them.
    fn encode_headers(&self, run: Run) -> Option<(Vec<u8>, Vec<Slot>)> {
        let shared = &self.shared;
        let slot_bytes = shared.segments.geometry.header_slot() as usize;
        let mut headers = vec![0; run.count * slot_bytes];
        let mut slots = Vec::with_capacity(run.count);
        let sequence = shared.sequence.fetch_add(run.count as u64, Relaxed);
        for (offset, index) in run.pages().enumerate() {
            let checksum = self.checksum(index)?;
            let record = self.transfer.record(index);
            let header = RecordHeader {
                sequence: sequence + offset as u64,
                payload_bytes: u64::from(shared.config.page_bytes),
                payload_checksum: checksum,
                group: shared.config.group,
                shard: shared.config.shard,
                fingerprint: shared.config.fingerprint,
                record: record.clone(),
            };
            header.encode(&mut headers[offset * slot_bytes..(offset + 1) * slot_bytes]);
            slots.push(Slot::Whole(Entry { identity: identity(record), checksum: checksum.to_le_bytes() }));
        }
        Some((headers, slots))
    }

    fn prefetch(&self, run: Run) -> Option<Io> {
        let segments = &self.shared.segments;
        let slots = segments.slots(run.segment, run.index, run.count);
        let mut entries = Vec::with_capacity(run.count);
        for (slot, index) in slots.into_iter().zip(run.pages()) {
            match slot {
                Slot::Whole(entry) if entry.identity == identity(self.transfer.record(index)) => {
                    entries.push(entry);
                    continue;
                }
                Slot::Whole(_) => self.corrupt(index, "its header names another page".into()),
                _ => self.corrupt(index, "it has no header".into()),
            }
            break;
        }
        let Some(file) = segments.file(run.segment) else {
            self.corrupt(run.first, format!("{} is missing", segments.path(run.segment).display()));
            return None;
        };
        let run = Run { count: entries.len(), ..run };
        if run.count == 0 {
            return None;
        }
        let mut sink = vec![0; BLOCK as usize];
        let buffers = self.payload_buffers(run, NonNull::new(sink.as_mut_ptr())?)?;
        let offset = segments.geometry.payload_offset(run.index);
        let operation = Operation::Read { file, part: Part::Payloads, offset };
        Some(self.io("read", operation, buffers, sink, move |job, result| {
            match result {
                Ok(bytes) => job.verify(run, &entries, bytes),
                Err(error) => job.failed("read", run, &error),
            }
            job.next()
        }))
    }

    /// Counts the pages that arrived as they were written.
    fn verify(&self, run: Run, entries: &[Entry], bytes: usize) {
        let shared = &self.shared;
        let (slot, page) =
            (shared.segments.geometry.payload_slot() as usize, shared.config.page_bytes as usize);
        for (offset, (entry, index)) in entries.iter().zip(run.pages()).enumerate() {
            if bytes < offset * slot + page {
                return self
                    .corrupt(index, format!("the read ended after {bytes} bytes: its segment is cut off"));
            }
            let Some(checksum) = self.checksum(index) else { return };
            if checksum.to_le_bytes() != entry.checksum {
                shared.monitor.counters.checksum_failures.fetch_add(1, Relaxed);
                return self.corrupt(index, "the checksum over its payload does not agree".into());
            }
            shared.monitor.counters.bytes_read.fetch_add(page as u64, Relaxed);
        }
    }

    fn corrupt(&self, index: usize, reason: String) {
        let record = self.transfer.disk_page(index);
        self.transfer.fail(index, TransferError::Corrupt { record, reason });
    }

    fn failed(&self, what: &str, run: Run, error: &io::Error) {
        let segment = self.shared.segments.path(run.segment);
        let record = self.transfer.disk_page(run.first);
        let operation = format!("{what} of record {record} in {}", segment.display());
        self.transfer.fail(run.first, TransferError::Io { operation, reason: error.to_string() });
    }

    fn host_pointer(&self, index: usize) -> Option<NonNull<u8>> {
        let page = self.transfer.host_page(index);
        let pointer = self.shared.memory.page_ptr(page);
        if pointer.is_none() {
            let operation = format!("{} with host page {page}", self.transfer.kind().name());
            self.transfer
                .fail(index, TransferError::Io { operation, reason: "there is no such page".into() });
        }
        pointer
    }

    fn checksum(&self, index: usize) -> Option<u128> {
        let pointer = self.host_pointer(index)?;
        let length = self.shared.config.page_bytes as usize;
        // SAFETY: PageMemory promises `length` readable bytes there for as long as `memory` lives, which `shared`
        // holds; the transfer's pages are ours until its completion, and the I/O on this page has answered.
        Some(xxh3_128(unsafe { std::slice::from_raw_parts(pointer.as_ptr(), length) }))
    }

    /// The host pages of a run as they lie on disk, with `filler` where slots are padded.
    fn payload_buffers(&self, run: Run, filler: NonNull<u8>) -> Option<Vec<Buffer>> {
        let page_bytes = self.shared.config.page_bytes as usize;
        let padding = self.shared.segments.geometry.payload_slot() as usize - page_bytes;
        let mut buffers = Vec::with_capacity(run.count * if padding == 0 { 1 } else { 2 });
        for index in run.pages() {
            let pointer = self.host_pointer(index)?;
            // SAFETY: see `checksum`; the Io's `then` holds `shared` and with it the memory.
            buffers.push(unsafe { Buffer::new(pointer, page_bytes) });
            if padding > 0 {
                // SAFETY: `filler` points to a block, more than any padding: for writes the static one, which is only
                // read; for reads one that the Io's `then` owns and nobody looks at.
                buffers.push(unsafe { Buffer::new(filler, padding) });
            }
        }
        Some(buffers)
    }

    fn write_headers(
        &self,
        run: Run,
        file: &Arc<SegmentFile>,
        mut bytes: Vec<u8>,
        and_then: impl FnOnce(Job) -> Option<Io> + Send + 'static,
    ) -> Io {
        let offset = self.shared.segments.geometry.header_offset(run.index);
        let operation = Operation::Write { file: Arc::clone(file), part: Part::Headers, offset };
        let pointer = NonNull::new(bytes.as_mut_ptr()).unwrap_or(NonNull::dangling());
        // SAFETY: `bytes` moves into the Io's `then` and its heap block stays where it is until that has run.
        let buffers = vec![unsafe { Buffer::new(pointer, bytes.len()) }];
        self.write("write of the header", run, operation, buffers, bytes, and_then)
    }

    /// A write that must be whole; otherwise the run fails and the chain goes on with the next.
    fn write(
        &self,
        what: &'static str,
        run: Run,
        operation: Operation,
        buffers: Vec<Buffer>,
        owned: Vec<u8>,
        and_then: impl FnOnce(Job) -> Option<Io> + Send + 'static,
    ) -> Io {
        self.io(what, operation, buffers, owned, move |job, result| match result {
            Ok(_) => and_then(job),
            Err(error) => {
                job.failed(what, run, &error);
                job.next()
            }
        })
    }

    /// An I/O that is watched and counted. `owned` lives until `then` has run. A short write is an error.
    fn io(
        &self,
        what: &'static str,
        operation: Operation,
        buffers: Vec<Buffer>,
        owned: Vec<u8>,
        then: impl FnOnce(Job, io::Result<usize>) -> Option<Io> + Send + 'static,
    ) -> Io {
        let (job, wanted) = (self.clone(), buffers.iter().map(Buffer::len).sum::<usize>());
        let flight = self.shared.monitor.number();
        let (flown, writes) = match &operation {
            Operation::Read { file, .. } => (Some(Arc::clone(file)), false),
            Operation::Write { file, .. } => (Some(Arc::clone(file)), true),
            Operation::Hop => (None, false),
        };
        let watched = Arc::clone(&self.shared);
        let started = flown
            .map(|file| -> Started { Box::new(move || watched.monitor.take_off(flight, what, &file.path)) });
        let then = Box::new(move |result: io::Result<usize>| {
            let result = job.shared.account(what, flight, writes, wanted, result);
            drop(owned);
            then(job, result)
        });
        Io { lane: self.lane(), operation, buffers, started, then }
    }
}
