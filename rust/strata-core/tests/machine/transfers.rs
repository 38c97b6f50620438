//! The machine's memory and disk: transfers move pages, fail, hang and are found again; none touches a page in use.

use super::Machine;
use crossbeam_channel::bounded;
use std::time::Duration;
use strata_core::Plan;
use strata_types::{PageId, ShardId, TransferCompletion, TransferDescriptor, TransferError, TransferKind};

/// Transfers that a disk which hangs has begun; after them it takes no more.
const MOST_HANGING: usize = 4;

impl Machine {
    /// Every page that a transfer under way reads or writes.
    fn under_way(&self) -> impl Iterator<Item = (usize, PageId)> + '_ {
        self.transfers.iter().chain(&self.hanging).flat_map(|other| {
            let (from, to) = (other.kind.source().index(), other.kind.destination().index());
            other.pages.iter().flat_map(move |step| [(from, step.from), (to, step.to)])
        })
    }

    /// A transfer writes no page that another one still reads or writes.
    pub(super) fn expect_untouched(&self, transfer: &TransferDescriptor) {
        let tier = transfer.kind.destination().index();
        for step in &transfer.pages {
            let touched = self.under_way().any(|page| page == (tier, step.to));
            assert!(!touched, "{transfer:?} writes page {} while it is in use", step.to);
        }
    }

    /// A plan writes no page that a transfer under way reads or writes.
    pub(super) fn expect_own_pages(&self, plan: &Plan) {
        let size = self.setup.page_size;
        for row in &plan.rows {
            let written = row.start / size..(row.start + row.length).div_ceil(size);
            for page in &row.pages[written] {
                let touched = self.under_way().any(|other| other == (0, *page));
                assert!(!touched, "request {} writes page {page} while it is in use", row.request);
            }
        }
    }

    /// The disk hangs, or answers again.
    pub fn hang_disk(&mut self, hangs: bool) {
        self.disk_hangs = hangs;
        self.ever_hung |= hangs;
        while let Some(transfer) = (!hangs).then(|| self.hanging.pop()).flatten() {
            let whole = self.random(transfer.pages.len() + 1);
            let late = || TransferError::Io { operation: transfer.kind.name().into(), reason: "late".into() };
            let error = (whole < transfer.pages.len()).then(late);
            self.finish(transfer, whole, error);
        }
    }

    /// The disk is to go, or is there again with what it held and a scan under way.
    pub fn plug_disk(&mut self, pages: u32) {
        if self.attached && self.core.stats().tiers[2].capacity > 0 {
            assert!(!self.core.attach_disk(pages).unwrap(), "there is a disk already");
        }
        if self.attached && self.detaching.is_none() {
            let (reply, answer) = bounded(1);
            self.core.detach_disk(self.now + Duration::from_millis(40), reply);
            self.detaching = Some(answer);
        } else if !self.attached {
            self.attached = true;
            assert!(self.core.attach_disk(pages).unwrap());
            self.records.retain(|page, _| page.0 < pages);
            let half = pages / 2;
            self.to_scan = vec![0..half, half..pages];
        }
    }

    /// The scan of the disk reports one stretch.
    pub fn scan_one(&mut self) {
        if self.to_scan.is_empty() || !self.attached || self.detaching.is_some() {
            return;
        }
        let index = self.random(self.to_scan.len());
        let pages = self.to_scan.remove(index);
        let inside = self.records.iter().filter(|(page, _)| pages.contains(&page.0));
        let found = inside.map(|(page, record)| (*page, record.clone())).collect();
        self.found_again += self.core.recovered(pages, found, self.to_scan.is_empty()).unwrap();
    }

    /// Headers are cleared before a payload and written after it.
    fn keep_records(&mut self, transfer: &TransferDescriptor, whole: usize) {
        for (index, step) in transfer.pages.iter().enumerate() {
            match transfer.kind {
                TransferKind::Spill if index < whole => {
                    drop(self.records.insert(step.to, transfer.records[index].clone()));
                }
                TransferKind::Spill => drop(self.records.remove(&step.to)),
                TransferKind::Erase if index < whole => drop(self.records.remove(&step.to)),
                _ => {}
            }
        }
    }

    /// A transfer ends, and Core hears of it.
    pub fn finish(&mut self, transfer: TransferDescriptor, whole: usize, error: Option<TransferError>) {
        let completion = self.end(transfer, whole, error);
        self.tell(completion);
    }

    fn end(
        &mut self,
        transfer: TransferDescriptor,
        whole: usize,
        error: Option<TransferError>,
    ) -> TransferCompletion {
        self.keep_records(&transfer, whole);
        let (from, to) = (transfer.kind.source().index(), transfer.kind.destination().index());
        for (index, step) in transfer.pages.iter().enumerate() {
            if transfer.kind == TransferKind::Erase {
                continue;
            }
            let bytes = self.memory[from][step.from.0 as usize].clone();
            // A transfer that fails may have scribbled over any part of its destination.
            let written = if index < whole { bytes } else { vec![0xdead; self.setup.page_size] };
            self.memory[to][step.to.0 as usize] = written;
        }
        if let Some(ticket) = &transfer.ticket {
            match error {
                None => ticket.advance(ticket.layers()),
                Some(_) => ticket.fail(),
            }
        }
        TransferCompletion {
            id: transfer.id,
            shard: ShardId(0),
            pages_whole: whole,
            error,
            bytes: whole as u64 * self.setup.page_bytes,
            busy_ns: 1,
        }
    }

    fn tell(&mut self, completion: TransferCompletion) {
        self.news = true;
        self.core.transfer_done(self.now, completion.clone()).unwrap();
        if self.random(10) == 0 {
            self.core.transfer_done(self.now, completion).unwrap();
        }
    }

    pub fn move_one(&mut self) -> bool {
        if !self.untold.is_empty() && (self.transfers.is_empty() || self.random(2) == 0) {
            let completion = self.untold.remove(0);
            self.tell(completion);
            return true;
        }
        if self.transfers.is_empty() {
            return false;
        }
        let index = self.random(self.transfers.len());
        let transfer = self.transfers.remove(index).unwrap();
        let pages = transfer.pages.len();
        let on_disk = !matches!(transfer.kind, TransferKind::Load | TransferKind::Backup);
        if on_disk && self.disk_hangs {
            if self.hanging.len() < MOST_HANGING {
                self.hanging.push(transfer);
            } else {
                let error = TransferError::Unavailable { tier: "disk", reason: "stalled".into() };
                self.finish(transfer, 0, Some(error));
            }
            return true;
        }
        // Few schedules read from disk at all.
        let twice = 1 + usize::from(transfer.kind == TransferKind::Prefetch);
        if self.random(100) < twice * usize::from(self.setup.fault_percent) {
            let whole = self.random(pages);
            let error = match transfer.kind {
                TransferKind::Prefetch => {
                    TransferError::Corrupt { record: transfer.pages[whole].from, reason: "checksum".into() }
                }
                TransferKind::Spill if self.random(2) == 0 => {
                    let pages = transfer.pages[whole..].iter().map(|step| step.to.0..step.to.0 + 1).collect();
                    TransferError::NoRoom { operation: "allocation".into(), reason: "ENOSPC".into(), pages }
                }
                kind => TransferError::Io { operation: kind.name().into(), reason: "EIO".into() },
            };
            self.finish(transfer, whole, Some(error));
        } else if transfer.kind == TransferKind::Load && self.random(3) == 0 {
            // Whoever waits for a load reads its ticket, and may be done before Core hears of the end.
            let completion = self.end(transfer, pages, None);
            self.untold.push(completion);
        } else {
            self.finish(transfer, pages, None);
        }
        true
    }
}
