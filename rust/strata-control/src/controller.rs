//! The controller's state and the small steps that all its operations share.

use crate::budget::WriteBudget;
use crate::config::ControlConfig;
use crate::moving::Relays;
use crate::recover::Recovery;
use crate::room::NoRoom;
use crate::saving::Saving;
use crate::settle::Effect;
use crate::stats::{ControlStats, TierStats};
use crate::transfer::{Leg, Transfer, TransferTable};
use crate::write::WritePolicy;
use crate::ControlError;
use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;
use strata_radix::{Evicted, Handle, HiRadixTree, Pin, RadixError, TreeConfig};
use strata_tier::{PagePool, PageState};
use strata_types::{
    LoadTicket, Namespace, PageId, PageMove, RequestId, TierId, Time, Token, TransferDescriptor, TransferId,
    TransferKind,
};

/// What the driver has to do for the controller.
#[derive(Debug)]
pub enum ControlAction {
    /// Hand this to the Mover of its edge.
    Submit(TransferDescriptor),
    /// Ask that Mover to end it early.
    Cancel(TransferKind, TransferId),
}

/// Tree, pools and transfers of one group.
pub struct CacheController {
    pub(crate) config: ControlConfig,
    pub(crate) tree: HiRadixTree,
    pub(crate) pools: [PagePool; 3],
    pub(crate) transfers: TransferTable,
    /// Loaded pages that lost the race to be the tree's copy, with the number of requests that still read them.
    pub(crate) shared_duplicates: HashMap<PageId, u32>,
    /// Slots that left the tree while a transfer or a request used them; in quarantine until none does.
    pub(crate) in_use: Vec<InUse>,
    /// Requests that hold device pages, numbered as they were admitted.
    pub(crate) holds: HashMap<RequestId, u64>,
    pub(crate) next_hold: u64,
    /// No new copies downward for now.
    pub(crate) copies_held: bool,
    pub(crate) now: Time,
    /// The waits of evictions from the device and from the host.
    pub(crate) saving: [Saving; 2],
    pub(crate) relays: Relays,
    pub(crate) budget: WriteBudget,
    pub(crate) recovery: Recovery,
    pub(crate) no_room: NoRoom,
    /// When a tier that is still too large was last looked at.
    pub(crate) shrunk: Time,
    /// The disk is being detached.
    pub(crate) disk_leaves: bool,
    /// What happened to requests and was not told yet.
    pub(crate) effects: VecDeque<Effect>,
    pub(crate) stats: ControlStats,
    pub(crate) outbox: Vec<ControlAction>,
}

/// A slot that left the tree while it was used.
pub(crate) struct InUse {
    pub tier: TierId,
    pub slot: PageId,
    /// The number of the first request that was admitted afterwards.
    pub holds_before: u64,
}

/// A run of pages to move, before it has a number.
pub(crate) struct Plan {
    pub kind: TransferKind,
    pub leg: Leg,
    /// The number that requests know it by already.
    pub origin: Option<TransferId>,
    pub namespace: Namespace,
    pub tokens: Arc<[Token]>,
    pub first_page: u32,
    pub moves: Vec<PageMove>,
    pub users: HashSet<RequestId>,
}

impl Plan {
    pub fn new(
        kind: TransferKind,
        namespace: Namespace,
        tokens: Arc<[Token]>,
        first_page: u32,
        moves: Vec<PageMove>,
    ) -> Plan {
        Plan {
            kind,
            leg: Leg::Whole,
            origin: None,
            namespace,
            tokens,
            first_page,
            moves,
            users: HashSet::new(),
        }
    }
}

impl CacheController {
    /// An empty cache.
    pub fn new(config: ControlConfig) -> Result<Self, ControlError> {
        let tree = HiRadixTree::new(TreeConfig {
            page_size: config.page_size,
            groups: config.group.0 + 1,
            tiers: 3,
            ghost_pages: config.ghost_pages,
        })?;
        let [device, host, disk] = config.pages;
        let host = if host == 0 { config.staging_pages } else { host };
        let pools =
            [PagePool::new("device", device), PagePool::new("host", host), PagePool::new("disk", disk)];
        let budget = WriteBudget::new(config.disk_bytes_per_day);
        Ok(CacheController {
            config,
            tree,
            pools,
            transfers: TransferTable::default(),
            shared_duplicates: HashMap::new(),
            in_use: Vec::new(),
            holds: HashMap::new(),
            next_hold: 0,
            copies_held: false,
            now: Time::default(),
            saving: Default::default(),
            relays: Relays::default(),
            budget,
            recovery: Recovery::default(),
            no_room: NoRoom::default(),
            shrunk: Time::default(),
            disk_leaves: false,
            effects: VecDeque::new(),
            stats: ControlStats::default(),
            outbox: Vec::new(),
        })
    }

    /// The sizes it was made with.
    pub fn config(&self) -> &ControlConfig {
        &self.config
    }

    /// Tells the time, before anything that depends on it.
    pub fn advance(&mut self, now: Time) {
        self.now = self.now.max(now);
        self.tree.set_clock(self.now.0);
        self.try_room_again();
    }

    /// Whether anything has happened to requests since the last call of `take_effects`.
    pub fn has_effects(&self) -> bool {
        !self.effects.is_empty()
    }

    /// What happened to requests since the last call, in order.
    pub fn take_effects(&mut self) -> VecDeque<Effect> {
        std::mem::take(&mut self.effects)
    }

    /// Whether a tier exists and has room for anything. Staging is no tier.
    pub fn has(&self, tier: TierId) -> bool {
        let staging = tier == TierId::HOST && self.config.pages[tier.index()] == 0;
        let leaves = tier == TierId::DISK && self.disk_leaves;
        !staging && !leaves && self.pools.get(tier.index()).is_some_and(|pool| pool.capacity() > 0)
    }

    /// The tier to which pages of this one are copied down, and the transfer that begins to move them.
    pub(crate) fn downward(&self, tier: TierId) -> Option<(TierId, TransferKind)> {
        match tier {
            TierId::DEVICE if self.has(TierId::HOST) => Some((TierId::HOST, TransferKind::Backup)),
            TierId::DEVICE if self.is_staged() => Some((TierId::DISK, TransferKind::Backup)),
            TierId::HOST if self.has(TierId::HOST) && self.has(TierId::DISK) => {
                Some((TierId::DISK, TransferKind::Spill))
            }
            _ => None,
        }
    }

    /// When pages of a tier are copied down.
    pub(crate) fn write_policy(&self, tier: TierId) -> &dyn WritePolicy {
        match tier {
            TierId::DEVICE if !self.is_staged() => self.config.backup.as_ref(),
            _ => self.config.spill.as_ref(),
        }
    }

    /// Stops and resumes copies downward. What is left out meanwhile is copied at its next access.
    pub fn hold_copies(&mut self, hold: bool) {
        self.copies_held = hold;
    }

    /// What has to be done outside since the last call, in order.
    pub fn take_actions(&mut self) -> Vec<ControlAction> {
        std::mem::take(&mut self.outbox)
    }

    /// The counters.
    pub fn stats(&self) -> &ControlStats {
        &self.stats
    }

    /// The gauges of one tier.
    pub fn tier_stats(&self, tier: TierId) -> TierStats {
        let pool = &self.pools[tier.index()];
        let places = self.tree.stats().places;
        let place = places.iter().find(|place| place.tier == tier && place.group == self.config.group);
        TierStats {
            capacity: pool.capacity(),
            used: [PageState::Reserved, PageState::Resident, PageState::Quarantined]
                .iter()
                .map(|state| pool.count(*state))
                .sum(),
            resident: place.map_or(0, |place| place.resident as u32),
            pinned: place.map_or(0, |place| place.pinned as u32),
            quarantined: pool.quarantined_pages(),
            evicted: self.stats.evicted[tier.index()],
        }
    }

    /// Pages of one tier.
    pub fn capacity(&self, tier: TierId) -> u32 {
        self.pools[tier.index()].capacity()
    }

    /// Transfers in flight, all kinds, and pages that wait for staging.
    pub fn transfers_in_flight(&self) -> usize {
        self.transfers.len() + usize::from(!self.relays.is_empty())
    }

    /// Transfers in flight of one kind.
    pub fn transfers_of(&self, kind: TransferKind) -> usize {
        self.transfers.count(kind)
    }

    /// Pages that could be reserved in a tier now, by evicting if need be.
    pub fn available(&self, tier: TierId) -> u32 {
        let evictable = self.tree.evictable_pages(self.config.group, tier);
        self.pools[tier.index()].free_pages() + evictable as u32
    }

    /// As `available`, once the copies of the tier that are under way have ended: until then they pin what they read.
    pub fn available_after_copies(&self, tier: TierId) -> Result<u32, ControlError> {
        let copies = self.transfers.sources();
        let evictable = self.tree.evictable_without(self.config.group, tier, copies)?;
        Ok(self.pools[tier.index()].free_pages() + evictable as u32)
    }

    /// Whole pages in this many tokens.
    pub(crate) fn whole_pages(&self, tokens: usize) -> u32 {
        (tokens / self.config.page_size as usize) as u32
    }

    /// The tokens of the first `pages` pages.
    pub(crate) fn head<'a>(&self, tokens: &'a [Token], pages: u32) -> &'a [Token] {
        &tokens[..pages as usize * self.config.page_size as usize]
    }

    /// Reserves pages in a tier, evicting others; all or none.
    pub(crate) fn reserve(
        &mut self,
        tier: TierId,
        count: u32,
        out: &mut Vec<PageId>,
    ) -> Result<bool, ControlError> {
        // More than one round where the tier is shrinking: a page beyond its size leaves no room behind.
        loop {
            let short = count.saturating_sub(self.pools[tier.index()].free_pages()) as usize;
            if short == 0 {
                break;
            }
            if count > self.available(tier) || self.save_before_eviction(tier, short)? {
                return Ok(false);
            }
            if self.evict(tier, short)? == 0 {
                break;
            }
        }
        Ok(self.pools[tier.index()].reserve(count, out))
    }

    /// Evicts pages of a tier; returns how many went.
    fn evict(&mut self, tier: TierId, count: usize) -> Result<usize, ControlError> {
        let evicted = self.tree.evict(self.config.group, tier, count)?;
        let gone = evicted.iter().filter(|gone| gone.tier == tier).count();
        self.stats.evicted[tier.index()] += gone as u64;
        self.take_back(&evicted)?;
        Ok(gone)
    }

    /// Reserves device pages for a request's own use.
    pub fn reserve_device(&mut self, count: u32, out: &mut Vec<PageId>) -> Result<bool, ControlError> {
        self.reserve(TierId::DEVICE, count, out)
    }

    /// Gives back device pages that never entered the tree. Pages shared with others go with their last user.
    pub fn free_device(&mut self, pages: &[PageId]) -> Result<(), ControlError> {
        for page in pages {
            if let Some(users) = self.shared_duplicates.get_mut(page) {
                *users -= 1;
                if *users > 0 {
                    continue;
                }
                self.shared_duplicates.remove(page);
            }
            self.pools[TierId::DEVICE.index()].abort(*page)?;
        }
        Ok(())
    }

    /// Frees the slots of copies that left the tree.
    pub(crate) fn take_back(&mut self, gone: &[Evicted]) -> Result<(), ControlError> {
        for copy in gone {
            let pool = &mut self.pools[copy.tier.index()];
            if copy.in_use {
                pool.quarantine(copy.slot)?;
                let holds_before = self.next_hold;
                self.in_use.push(InUse { tier: copy.tier, slot: copy.slot, holds_before });
            } else {
                pool.release(copy.slot)?;
            }
        }
        Ok(())
    }

    /// A handle to the first `pages` pages of a sequence that is known to hold them.
    pub(crate) fn path(
        &self,
        namespace: &Namespace,
        tokens: &[Token],
        pages: u32,
    ) -> Result<Handle, ControlError> {
        let found = self.tree.match_prefix(namespace, self.config.group, self.head(tokens, pages))?;
        if found.pages < pages {
            let held = found.pages;
            return Err(ControlError::Inconsistent(format!("a path of {pages} pages has only {held}")));
        }
        Ok(found.handle)
    }

    /// Makes pages `from..` of a sequence match in a tier. Returns the end of the path and the slots that the tree
    /// did not take: it has other copies, or the pages before them were removed as corrupt in the meantime.
    pub(crate) fn insert(
        &mut self,
        namespace: &Namespace,
        tokens: &[Token],
        tier: TierId,
        slots: &[PageId],
        from: u32,
    ) -> Result<(Option<Handle>, Vec<PageId>), ControlError> {
        let inserted = match self.tree.insert(namespace, self.config.group, tokens, tier, slots, from) {
            Err(RadixError::Gap { .. }) => return Ok((None, slots.to_vec())),
            inserted => inserted?,
        };
        let refused: HashSet<PageId> = inserted.duplicates.iter().map(|(_, slot)| *slot).collect();
        let (refused, taken): (Vec<PageId>, Vec<PageId>) =
            slots.iter().partition(|slot| refused.contains(slot));
        for slot in taken {
            self.pools[tier.index()].commit(slot)?;
        }
        Ok((Some(inserted.handle), refused))
    }

    /// Pins the first `pages` pages of a sequence in a tier.
    pub fn pin(
        &mut self,
        namespace: &Namespace,
        tokens: &[Token],
        pages: u32,
        tier: TierId,
    ) -> Result<Pin, ControlError> {
        let handle = self.path(namespace, tokens, pages)?;
        Ok(self.tree.pin(handle, tier)?)
    }

    /// Gives a pin back.
    pub fn unpin(&mut self, pin: Pin) -> Result<(), ControlError> {
        Ok(self.tree.unpin(pin)?)
    }

    /// Pins the source, numbers the transfer and sends it out.
    pub(crate) fn start(
        &mut self,
        plan: Plan,
    ) -> Result<(TransferId, Option<Arc<LoadTicket>>), ControlError> {
        let end = plan.first_page + plan.moves.len() as u32;
        let source = match (plan.kind, &plan.leg) {
            (TransferKind::Erase, _) | (_, Leg::Second) => None,
            (kind, _) => Some(self.pin(&plan.namespace, &plan.tokens, end, kind.source())?),
        };
        let records = match plan.kind {
            TransferKind::Spill | TransferKind::Prefetch => crate::keys::records(
                plan.namespace,
                self.config.group,
                &plan.tokens,
                self.config.page_size,
                plan.first_page,
                plan.moves.len(),
            ),
            _ => Vec::new(),
        };
        let shards_left = match plan.kind {
            TransferKind::Load | TransferKind::Backup => self.config.device_shards,
            _ => 1,
        };
        self.stats.edge_mut(plan.kind).started += 1;
        let pages = plan.moves.clone();
        let id = match (&plan.leg, plan.origin) {
            (Leg::First(_), Some(origin)) => origin,
            _ => self.transfers.next_id(),
        };
        let ticket =
            (plan.kind == TransferKind::Load).then(|| Arc::new(LoadTicket::new(id, self.config.layers)));
        let transfer = Transfer {
            kind: plan.kind,
            leg: plan.leg,
            origin: plan.origin.unwrap_or(id),
            namespace: plan.namespace,
            tokens: plan.tokens,
            first_page: plan.first_page,
            pages_whole: plan.moves.len(),
            moves: plan.moves,
            source,
            users: plan.users,
            ticket: ticket.clone(),
            shards_left,
            error: None,
            cancelled: false,
        };
        self.transfers.insert(id, transfer);
        self.outbox.push(ControlAction::Submit(TransferDescriptor {
            id,
            kind: plan.kind,
            group: self.config.group,
            pages,
            records,
            ticket: ticket.clone(),
        }));
        Ok((id, ticket))
    }

    /// Proves that tree and pools agree. With `idle`, also that nothing is pinned, reserved or in flight.
    pub fn check(&self, idle: bool) -> Result<(), ControlError> {
        self.tree.check().map_err(ControlError::Inconsistent)?;
        for tier in [TierId::DEVICE, TierId::HOST, TierId::DISK] {
            let pool = &self.pools[tier.index()];
            pool.check().map_err(ControlError::Inconsistent)?;
            let state = |wanted| pool.count(wanted);
            let stats = self.tier_stats(tier);
            if state(PageState::Resident) != stats.resident {
                return Err(ControlError::Inconsistent(format!(
                    "{tier}: the pool holds {} resident pages, the tree {}",
                    state(PageState::Resident),
                    stats.resident
                )));
            }
            let busy = stats.pinned + state(PageState::Reserved) + stats.quarantined;
            let transient = self.tree.stats().transient_pages;
            if idle && transient > 0 {
                let pages = format!("idle, yet {transient} pages are owned by requests that are gone");
                return Err(ControlError::Inconsistent(pages));
            }
            if idle && (busy > 0 || self.transfers.len() > 0 || !self.relays.is_empty()) {
                return Err(ControlError::Inconsistent(format!(
                    "{tier}: idle, yet {} pinned, {} reserved, {} in quarantine, {} transfers in flight",
                    stats.pinned,
                    state(PageState::Reserved),
                    stats.quarantined,
                    self.transfers.len()
                )));
            }
        }
        Ok(())
    }
}
