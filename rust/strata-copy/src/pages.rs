//! The two ends of the edge. Both layouts are proved to fit their memory when the edge is made, and a transfer's
//! page ids are checked before its first byte moves; after that every address is inside its region.

use crate::kernel::{copy_pieces, Stores};
use crate::{CopyError, Region};
use std::ops::Range;
use strata_types::{KvLayout, KvShape, PageId, PageMove, TransferDescriptor, TransferError, TransferKind};

/// Memory and where the pieces lie in it.
#[derive(Debug)]
struct End {
    name: &'static str,
    region: Region,
    layout: KvLayout,
}

impl End {
    fn new(name: &'static str, region: Region, layout: KvLayout) -> Result<End, CopyError> {
        let shape = layout.shape;
        let mut dimensions = [
            (layout.layer_stride, shape.layers),
            (layout.part_stride, shape.parts),
            (layout.page_stride, layout.pages),
        ];
        dimensions.sort_unstable();
        let mut extent = shape.piece_bytes() as u128;
        for (stride, count) in dimensions.into_iter().filter(|(_, count)| *count > 1) {
            if u128::from(stride) < extent {
                return Err(CopyError::Overlap { end: name, stride, extent: extent as u64 });
            }
            extent += u128::from(stride) * u128::from(count - 1);
        }
        let needed = u128::from(layout.base) + extent;
        if layout.pages > 0 && needed > region.len() as u128 {
            return Err(CopyError::TooSmall { end: name, needed, available: region.len() });
        }
        Ok(End { name, region, layout })
    }

    fn check(&self, page: PageId) -> Result<(), String> {
        if page.0 < self.layout.pages {
            return Ok(());
        }
        Err(format!("{} page {page} does not exist: the pool has {} pages", self.name, self.layout.pages))
    }

    /// Whether the pieces of a page lie together, rather than those of a layer.
    fn is_page_first(&self) -> bool {
        self.layout.page_stride > self.layout.layer_stride
    }

    /// # Safety
    /// The indices are inside the layout.
    unsafe fn piece(&self, layer: u32, part: u32, page: PageId) -> *mut u8 {
        // SAFETY: `new` proved that the last piece ends inside the region, and this one is not after it.
        unsafe { self.region.start().add(self.layout.offset(layer, part, page.0) as usize) }
    }
}

/// Device and host.
#[derive(Debug)]
pub(crate) struct Edge {
    device: End,
    host: End,
    shape: KvShape,
    stores: Stores,
}

impl Edge {
    /// Proves that pages of both ends are the same pages, do not overlap and fit their memory.
    pub(crate) fn new(
        (device, device_layout): (Region, KvLayout),
        (host, host_layout): (Region, KvLayout),
    ) -> Result<Edge, CopyError> {
        if device_layout.shape != host_layout.shape {
            return Err(CopyError::Shapes { device: device_layout.shape, host: host_layout.shape });
        }
        if device.overlaps(&host) {
            return Err(CopyError::SharedMemory);
        }
        let shape = device_layout.shape;
        // The fields are public, so a shape may have come into being without this check.
        KvShape::new(shape.group, shape.layers, shape.parts, shape.page_size, shape.token_bytes)?;
        Ok(Edge {
            device: End::new("device", device, device_layout)?,
            host: End::new("host", host, host_layout)?,
            shape,
            stores: Stores::for_piece(shape.piece_bytes()),
        })
    }

    pub(crate) fn shape(&self) -> KvShape {
        self.shape
    }

    fn ends(&self, kind: TransferKind) -> Option<(&End, &End)> {
        match kind {
            TransferKind::Load => Some((&self.host, &self.device)),
            TransferKind::Backup => Some((&self.device, &self.host)),
            TransferKind::Spill | TransferKind::Prefetch | TransferKind::Erase => None,
        }
    }

    /// Whether this edge can execute the transfer: its kind, group, pages and ticket.
    pub(crate) fn check(&self, transfer: &TransferDescriptor) -> Result<(), TransferError> {
        self.find_fault(transfer).map_err(|reason| TransferError::Io {
            operation: format!("{} {} between device and host", transfer.kind.name(), transfer.id),
            reason,
        })
    }

    fn find_fault(&self, transfer: &TransferDescriptor) -> Result<(), String> {
        let Some((source, destination)) = self.ends(transfer.kind) else {
            return Err("copy threads only load and back up".into());
        };
        if transfer.group != self.shape.group {
            return Err(format!("group {} asked for, group {} here", transfer.group, self.shape.group));
        }
        for PageMove { from, to } in &transfer.pages {
            source.check(*from)?;
            destination.check(*to)?;
        }
        let mut written: Vec<PageId> = transfer.pages.iter().map(|page_move| page_move.to).collect();
        written.sort_unstable();
        if let Some(twice) = written.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(format!("{} page {} would be written twice", destination.name, twice[0]));
        }
        match &transfer.ticket {
            Some(ticket) if ticket.layers() != self.shape.layers => {
                Err(format!("the ticket counts {} layers, a page has {}", ticket.layers(), self.shape.layers))
            }
            _ => Ok(()),
        }
    }

    /// Copies these layers of these pages in the order in which they lie in the destination: stores that follow one
    /// another leave the processor in full bursts. `publish` must follow on this thread.
    ///
    /// # Safety
    /// `check` accepted the transfer that `kind` and `moves` belong to, and `layers` are the shape's. Until the
    /// transfer's completion nobody else touches its destination pages or writes its source pages.
    pub(crate) unsafe fn copy_step(&self, kind: TransferKind, layers: Range<u32>, moves: &[PageMove]) {
        let Some((source, destination)) = self.ends(kind) else { return };
        let parts = self.shape.parts;
        if destination.is_page_first() {
            let of_page = |page_move| {
                let layers = layers.clone();
                layers.flat_map(move |layer| (0..parts).map(move |part| (layer, part, page_move)))
            };
            // SAFETY: the caller's promise.
            unsafe { self.copy_each(source, destination, moves.iter().copied().flat_map(of_page)) };
        } else {
            let of_layer = |layer| {
                (0..parts).flat_map(move |part| moves.iter().map(move |page_move| (layer, part, *page_move)))
            };
            // SAFETY: the caller's promise.
            unsafe { self.copy_each(source, destination, layers.flat_map(of_layer)) };
        }
    }

    /// # Safety
    /// As `copy_step`, for every piece.
    unsafe fn copy_each(
        &self,
        source: &End,
        destination: &End,
        pieces: impl Iterator<Item = (u32, u32, PageMove)>,
    ) {
        let addresses = pieces.map(|(layer, part, PageMove { from, to })| {
            // SAFETY: the pages were checked, layer and part are the shape's.
            unsafe { (source.piece(layer, part, from).cast_const(), destination.piece(layer, part, to)) }
        });
        // SAFETY: as above; the regions do not overlap, and nobody else uses these pages.
        unsafe { copy_pieces(addresses, self.shape.piece_bytes(), self.stores) };
    }
}
