//! The machine that Core drives: a device, a link each way and a disk, on a virtual clock. It decides nothing: it
//! carries out what Core asks for, in the time that this takes, and says when it is done.

use crate::device::{Device, Finished, Ready, Step};
use crate::error::SimulationError;
use crate::hardware::{CopyMethod, DiskOrder, Hardware, Operation};
use crate::link::{Link, Progress};
use crate::model::{Model, StepRow};
use crate::report::{Batch, Tally};
use crate::system::{Overlap, System};
use crate::timeline::{Timeline, Track};
use std::collections::HashMap;
use std::sync::Arc;
use strata_core::{Plan, PlanKind};
use strata_types::{
    LoadTicket, ShardId, Time, TransferCompletion, TransferDescriptor, TransferError, TransferId,
    TransferKind,
};

const TRACKS: [Track; 4] = [Track::LinkIn, Track::LinkOut, Track::DiskRead, Track::DiskWrite];

/// A load under way.
#[derive(Clone, Copy, Debug)]
struct Load {
    id: TransferId,
    pages: u64,
    /// Whether a plan was counted as having loaded it.
    counted: bool,
}

/// All that moves and computes.
pub(crate) struct Machine {
    model: Model,
    hardware: Hardware,
    copy: CopyMethod,
    page_size: u64,
    page_bytes: u64,
    disk_order: DiskOrder,
    overlap: Overlap,
    merges: bool,
    takes_no_time: bool,
    device: Device,
    /// To the device, to the host, disk read, disk written.
    links: [Link; 4],
    /// Loads under way by the address of their ticket.
    loads: HashMap<usize, Load>,
    pub tally: Tally,
    pub timeline: Timeline,
}

fn index(kind: TransferKind) -> usize {
    match kind {
        TransferKind::Load => 0,
        TransferKind::Backup => 1,
        TransferKind::Prefetch => 2,
        TransferKind::Spill | TransferKind::Erase => 3,
    }
}

/// A ticket lives as long as its load, so its address is its own until then.
fn address(ticket: &Arc<LoadTicket>) -> usize {
    Arc::as_ptr(ticket) as usize
}

fn kind_index(kind: PlanKind) -> usize {
    match kind {
        PlanKind::Prefill => 0,
        PlanKind::Decode => 1,
    }
}

impl Machine {
    pub fn new(
        hardware: &Hardware,
        model: &Model,
        system: &System,
        page_bytes: u64,
        timeline: Timeline,
    ) -> Result<Machine, SimulationError> {
        let mut copy = system.copy_method(hardware)?.clone();
        if system.infinite_bandwidth {
            (copy.prefill_share, copy.decode_share) = (0.0, 0.0);
        }
        Ok(Machine {
            model: model.clone(),
            hardware: hardware.clone(),
            device: Device::new(model.layers, copy.prefill_share, copy.decode_share),
            copy,
            page_size: u64::from(system.page_size),
            page_bytes,
            disk_order: system.disk_order,
            overlap: system.overlap,
            merges: system.merge_loads,
            takes_no_time: system.infinite_bandwidth,
            links: Default::default(),
            loads: HashMap::new(),
            tally: Tally::default(),
            timeline,
        })
    }

    /// Seconds of a transfer that nothing else delays.
    fn seconds(&self, transfer: &TransferDescriptor) -> f64 {
        let pages = transfer.pages.len() as f64;
        let bytes = pages * self.page_bytes as f64;
        let pieces = f64::from(self.model.layers * self.model.parts);
        let copied = |bandwidth: f64| {
            let operations = match self.copy.operation {
                Operation::Piece => pages * pieces,
                Operation::Page => pages,
                Operation::Layer => f64::from(self.model.layers),
            };
            operations * self.copy.per_operation_s + bytes / bandwidth
        };
        let operations = match self.disk_order {
            DiskOrder::PageFirst => pages,
            DiskOrder::LayerFirst => pages * pieces,
        };
        let stored = |bandwidth: fn(&crate::hardware::Disk) -> f64| {
            self.hardware
                .disk
                .as_ref()
                .map_or(0.0, |disk| operations * disk.per_operation_s + bytes / bandwidth(disk))
        };
        match transfer.kind {
            _ if self.takes_no_time => 0.0,
            TransferKind::Load => copied(self.copy.to_device),
            TransferKind::Backup => copied(self.copy.to_host),
            TransferKind::Prefetch => stored(|disk| disk.read),
            TransferKind::Spill => stored(|disk| disk.write),
            TransferKind::Erase => {
                pages * self.hardware.disk.as_ref().map_or(0.0, |disk| disk.per_operation_s)
            }
        }
    }

    /// Takes a transfer.
    pub fn submit(&mut self, now: Time, transfer: TransferDescriptor) {
        let nanoseconds = (self.seconds(&transfer) * 1e9).round() as u64;
        if let Some(ticket) = &transfer.ticket {
            let load = Load { id: transfer.id, pages: transfer.pages.len() as u64, counted: false };
            self.loads.insert(address(ticket), load);
        }
        let merge = self.merges && transfer.kind == TransferKind::Load;
        self.links[index(transfer.kind)].submit(now, transfer, nanoseconds, merge);
    }

    /// Ends a transfer early. None if it has ended already.
    pub fn cancel(&mut self, now: Time, kind: TransferKind, id: TransferId) -> Option<TransferCompletion> {
        let transfer = self.links[index(kind)].cancel(now, id)?;
        if let Some(ticket) = &transfer.ticket {
            self.loads.remove(&address(ticket));
            ticket.fail();
        }
        Some(completion(&transfer, 0, 0, 0, Some(TransferError::Cancelled)))
    }

    /// Takes a plan.
    pub fn compute(&mut self, plan: Plan) {
        let row = |row: &strata_core::PlanRow| StepRow {
            tokens: row.length as u64,
            context: row.start as u64,
            samples: row.sample,
        };
        let rows: Vec<StepRow> = plan.rows.iter().map(row).collect();
        let decode = plan.kind == PlanKind::Decode;
        let cost = self.model.step(&self.hardware, &rows, decode);
        let mut loads = Vec::new();
        let mut loaded = 0;
        for ticket in &plan.tickets {
            if let Some(load) = self.loads.get_mut(&address(ticket)) {
                if !loads.contains(&load.id) {
                    loads.push(load.id);
                }
                if !std::mem::replace(&mut load.counted, true) {
                    loaded += load.pages * self.page_size;
                }
            }
        }
        if !decode {
            let computed = rows.iter().map(|row| row.tokens).sum();
            self.tally.batches.push(Batch { loaded, computed });
        }
        self.device.submit(Step { plan, cost, loads });
    }

    /// Starts what can start.
    pub fn start(&mut self, now: Time) {
        for link in &mut self.links {
            link.start(now);
        }
        let copying = self.links[0].is_busy() || self.links[1].is_busy();
        self.device.set_copying(now, copying);
    }

    /// What has been moved by now.
    pub fn moved(&mut self, now: Time) -> Vec<TransferCompletion> {
        let mut done = Vec::new();
        for (link, track) in self.links.iter_mut().zip(TRACKS) {
            let Some(moved) = link.finish(now) else { continue };
            let pages: usize = moved.transfers.iter().map(|transfer| transfer.pages.len()).sum();
            self.timeline.add(track, moved.since, moved.until, || format!("{pages} pages"));
            for transfer in moved.transfers {
                if let Some(ticket) = &transfer.ticket {
                    self.loads.remove(&address(ticket));
                    ticket.advance(ticket.layers());
                }
                let whole = transfer.pages.len();
                let busy = moved.until.0 - moved.since.0;
                done.push(completion(&transfer, whole, whole as u64 * self.page_bytes, busy, None));
            }
        }
        done
    }

    /// A plan that is done by now.
    pub fn computed(&mut self, now: Time) -> Option<Finished> {
        let (links, overlap, layers) = (&self.links, self.overlap, self.model.layers);
        let ready = |id, layer| readiness(&links[0], overlap, layers, id, layer);
        let finished = self.device.go_on(now, ready, &mut self.timeline)?;
        let kind = kind_index(finished.plan.kind);
        self.tally.busy[kind] += finished.busy;
        self.tally.stalls[kind] += finished.stalled;
        self.tally.plans[kind] += 1;
        Some(finished)
    }

    /// When something will have ended.
    pub fn next(&self) -> Option<Time> {
        let (links, overlap, layers) = (&self.links, self.overlap, self.model.layers);
        let device = self.device.next(|id, layer| readiness(&links[0], overlap, layers, id, layer));
        links.iter().filter_map(Link::until).chain(device).min()
    }

    /// Whether no plan is to be computed.
    pub fn computes_nothing(&self) -> bool {
        self.device.is_idle()
    }

    /// Nanoseconds in which each link moved something.
    pub fn link_busy(&self) -> [u64; 4] {
        [0, 1, 2, 3].map(|link: usize| self.links[link].busy)
    }
}

fn readiness(link: &Link, overlap: Overlap, layers: u32, id: TransferId, layer: u32) -> Ready {
    match link.progress(id) {
        None => Ready::Whole,
        Some(Progress::Queued) => Ready::Later,
        Some(Progress::Moving(since, until)) => {
            let whole = u128::from(until.0 - since.0);
            let there = match overlap {
                Overlap::Layers => u128::from(layer) + 1,
                Overlap::None => u128::from(layers),
            };
            Ready::At(Time(since.0 + (whole * there).div_ceil(u128::from(layers)) as u64))
        }
    }
}

fn completion(
    transfer: &TransferDescriptor,
    pages_whole: usize,
    bytes: u64,
    busy_ns: u64,
    error: Option<TransferError>,
) -> TransferCompletion {
    TransferCompletion { id: transfer.id, shard: ShardId(0), pages_whole, error, bytes, busy_ns }
}
