//! The end of a transfer: commit what is whole, give back the rest, let the sources go.

use crate::controller::CacheController;
use crate::transfer::{Leg, Transfer};
use crate::ControlError;
use std::collections::HashSet;
use strata_types::{PageId, RequestId, TierId, TransferCompletion, TransferError, TransferId, TransferKind};

/// What the end of a transfer means to requests.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Effect {
    /// A load is over and all its pages are whole.
    Loaded {
        /// The transfer.
        transfer: TransferId,
        /// Those who read its pages.
        users: HashSet<RequestId>,
        /// Its pages that are not the tree's: each user gives them back with its own.
        duplicates: Vec<PageId>,
    },
    /// A load is over and its pages are not to be read.
    LoadFailed {
        /// The transfer.
        transfer: TransferId,
        /// Those who counted on it.
        users: HashSet<RequestId>,
    },
    /// A prefetch is over, for better or worse: what it brought matches now.
    Prefetched {
        /// The transfer.
        transfer: TransferId,
        /// Those who waited for it.
        users: HashSet<RequestId>,
    },
}

impl CacheController {
    /// Takes a completion. Unknown ones are counted and change nothing.
    pub fn completed(&mut self, completion: TransferCompletion) -> Result<(), ControlError> {
        let Some(transfer) =
            self.transfers.get_mut(completion.id).filter(|transfer| transfer.shards_left > 0)
        else {
            self.stats.unknown_completions += 1;
            return Ok(());
        };
        transfer.pages_whole = transfer.pages_whole.min(completion.pages_whole);
        if transfer.error.is_none() {
            transfer.error = completion.error;
        }
        transfer.shards_left -= 1;
        let (kind, shards_left) = (transfer.kind, transfer.shards_left);
        let edge = self.stats.edge_mut(kind);
        edge.bytes += completion.bytes;
        edge.busy_ns += completion.busy_ns;
        if shards_left > 0 {
            return Ok(());
        }
        match self.transfers.remove(completion.id) {
            Some(transfer) => self.settle(completion.id, transfer),
            None => Ok(()),
        }
    }

    /// Takes a transfer that no Mover accepted as failed.
    pub fn rejected(&mut self, id: TransferId, error: TransferError) -> Result<(), ControlError> {
        let Some(mut transfer) = self.transfers.remove(id) else { return Ok(()) };
        transfer.pages_whole = 0;
        transfer.error = Some(error);
        if let Some(ticket) = &transfer.ticket {
            ticket.fail();
        }
        self.settle(id, transfer)
    }

    fn settle(&mut self, id: TransferId, mut transfer: Transfer) -> Result<(), ControlError> {
        self.count(&transfer);
        if let Some(pin) = transfer.source.take() {
            // The pages just moved are committed before their source may go, so the path stays whole.
            let settled = self.settle_moved(id, transfer);
            self.unpin(pin)?;
            settled?;
        } else if transfer.kind == TransferKind::Erase {
            for step in &transfer.moves {
                self.pools[TierId::DISK.index()].settle(step.to)?;
            }
        } else {
            self.settle_moved(id, transfer)?;
        }
        self.settle_in_use()?;
        self.pump_relays()
    }

    fn settle_moved(&mut self, id: TransferId, mut transfer: Transfer) -> Result<(), ControlError> {
        match std::mem::replace(&mut transfer.leg, Leg::Whole) {
            Leg::First(far) => {
                self.drop_corrupt(&transfer)?;
                self.go_on(transfer, far)
            }
            Leg::Second => {
                let duplicates = self.commit(&transfer)?;
                if !transfer.cancelled {
                    self.stats.staged_pages += transfer.pages_whole as u64;
                }
                for page in &duplicates {
                    self.pools[transfer.kind.destination().index()].abort(*page)?;
                }
                for step in &transfer.moves {
                    self.pools[TierId::HOST.index()].abort(step.from)?;
                }
                let users = std::mem::take(&mut transfer.users);
                self.relay_over(transfer.kind, transfer.origin, users);
                self.find_other_room(&transfer, TierId::DEVICE)
            }
            Leg::Whole => {
                let duplicates = self.commit(&transfer)?;
                self.drop_corrupt(&transfer)?;
                self.find_other_room(&transfer, TierId::HOST)?;
                self.after(id, transfer, duplicates)
            }
        }
    }

    fn count(&mut self, transfer: &Transfer) {
        let edge = self.stats.edge_mut(transfer.kind);
        match &transfer.error {
            None => edge.completed += 1,
            Some(TransferError::Cancelled) => edge.cancelled += 1,
            Some(_) => edge.failed += 1,
        }
        self.saved(transfer);
        if matches!(transfer.error, Some(TransferError::Corrupt { .. })) {
            self.stats.corrupt_records += 1;
        }
    }

    /// Frees slots that left the tree while something used them, as soon as nothing does.
    pub(crate) fn settle_in_use(&mut self) -> Result<(), ControlError> {
        if self.in_use.is_empty() {
            return Ok(());
        }
        let oldest = self.holds.values().min().copied().unwrap_or(u64::MAX);
        for gone in std::mem::take(&mut self.in_use) {
            // Whoever was admitted later has never seen the page.
            let held = gone.tier == TierId::DEVICE && oldest < gone.holds_before;
            if held || self.transfers.reads(gone.tier, gone.slot) {
                self.in_use.push(gone);
            } else {
                self.pools[gone.tier.index()].settle(gone.slot)?;
            }
        }
        Ok(())
    }

    /// Makes the whole pages match at the destination and frees the others. Returns what the tree had already.
    fn commit(&mut self, transfer: &Transfer) -> Result<Vec<PageId>, ControlError> {
        let tier = transfer.kind.destination();
        let pool = &mut self.pools[tier.index()];
        if transfer.cancelled && transfer.kind != TransferKind::Prefetch {
            for step in &transfer.moves {
                pool.settle(step.to)?;
            }
            return Ok(Vec::new());
        }
        let whole = match transfer.kind {
            // A load that failed has failed for every layer: its users threw their step away.
            TransferKind::Load if transfer.error.is_some() => 0,
            _ => transfer.pages_whole.min(transfer.moves.len()),
        };
        for step in &transfer.moves[whole..] {
            pool.abort(step.to)?;
        }
        if whole == 0 {
            return Ok(Vec::new());
        }
        let slots: Vec<PageId> = transfer.moves[..whole].iter().map(|step| step.to).collect();
        let end = transfer.first_page + whole as u32;
        let tokens = self.head(&transfer.tokens, end);
        let (_, refused) = self.insert(&transfer.namespace, tokens, tier, &slots, transfer.first_page)?;
        self.stats.edge_mut(transfer.kind).pages += whole as u64;
        Ok(refused)
    }

    /// Forgets a record that did not hold its page, so that nobody asks for it again.
    fn drop_corrupt(&mut self, transfer: &Transfer) -> Result<(), ControlError> {
        if !matches!(transfer.error, Some(TransferError::Corrupt { .. })) {
            return Ok(());
        }
        let bad = transfer.first_page + transfer.pages_whole as u32;
        let group = self.config.group;
        let tokens = &transfer.tokens;
        let gone = self.tree.remove(&transfer.namespace, group, tokens, TierId::DISK, bad..bad + 1)?;
        self.take_back(&gone)?;
        self.settle_in_use()
    }

    /// What found no room on the disk goes where something else was, if the write policy still wants it there.
    fn find_other_room(&mut self, transfer: &Transfer, source: TierId) -> Result<(), ControlError> {
        let Some(TransferError::NoRoom { pages, .. }) = &transfer.error else { return Ok(()) };
        if self.withhold_roomless(pages)? && !transfer.cancelled {
            self.copy_down(source, &transfer.namespace, &transfer.tokens)?;
        }
        Ok(())
    }

    fn after(
        &mut self,
        id: TransferId,
        transfer: Transfer,
        duplicates: Vec<PageId>,
    ) -> Result<(), ControlError> {
        let Transfer { kind, users, .. } = transfer;
        if kind == TransferKind::Load {
            if transfer.error.is_some() || transfer.cancelled {
                self.effects.push_back(Effect::LoadFailed { transfer: id, users });
                return Ok(());
            }
            for page in &duplicates {
                if users.is_empty() {
                    self.pools[TierId::DEVICE.index()].abort(*page)?;
                } else {
                    self.shared_duplicates.insert(*page, users.len() as u32);
                }
            }
            self.effects.push_back(Effect::Loaded { transfer: id, users, duplicates });
            return Ok(());
        }
        for page in &duplicates {
            self.pools[kind.destination().index()].abort(*page)?;
        }
        match kind {
            TransferKind::Backup if transfer.pages_whole > 0 && !transfer.cancelled => {
                let end = transfer.first_page + transfer.pages_whole as u32;
                let tokens = transfer.tokens.clone();
                self.copy_down(TierId::HOST, &transfer.namespace, self.head(&tokens, end))
            }
            TransferKind::Prefetch => {
                self.effects.push_back(Effect::Prefetched { transfer: id, users });
                Ok(())
            }
            _ => Ok(()),
        }
    }
}
