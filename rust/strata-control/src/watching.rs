//! Waiting requests and their paths: who will compute what, who waits for whom, and where the pages are now. The tree
//! tells which requests a change concerns, so nobody who waits is ever matched again.

use crate::controller::{CacheController, Plan};
use crate::ControlError;
use std::ops::Range;
use std::sync::Arc;
use strata_radix::Standing;
use strata_types::{Namespace, PageMove, RequestId, TierId, Token, TransferId, TransferKind};

impl CacheController {
    /// A request waits that will compute these tokens: whole pages that no tier holds and nobody else owns are known by
    /// its name from now on, so that others can see what is coming. One that does not `publish` claims nothing.
    pub fn watch(
        &mut self,
        request: RequestId,
        namespace: &Namespace,
        tokens: &[Token],
        publish: bool,
    ) -> Result<(), ControlError> {
        if publish {
            self.tree.watch(namespace, tokens, request)?;
        } else {
            self.tree.watch_only(namespace, tokens, request)?;
        }
        Ok(())
    }

    /// The request does not wait any more. What it claimed stays its own.
    pub fn unwatch(&mut self, request: RequestId) {
        self.tree.unwatch(request);
    }

    /// Requests that wait.
    pub fn watchers(&self) -> usize {
        self.tree.stats().watchers
    }

    /// The waiting requests that something has changed for since the last call, each once.
    pub fn take_changed(&mut self) -> Vec<RequestId> {
        self.tree.take_changed()
    }

    /// Where the first `usable` pages of a waiting request are.
    pub fn standing(&self, request: RequestId, usable: u32) -> Result<Standing, ControlError> {
        Ok(self.tree.standing(request, self.config.group, usable)?)
    }

    /// A waiting request claims what has become nobody's meanwhile.
    pub fn claim_again(&mut self, request: RequestId) -> Result<(), ControlError> {
        self.tree.claim_again(request)?;
        Ok(())
    }

    /// A waiting request will compute what others were to compute on its path.
    pub fn take_over(&mut self, request: RequestId) -> Result<(), ControlError> {
        self.tree.take_over(request, true)?;
        Ok(())
    }

    /// The request has begun to compute what it claimed.
    pub fn begin_claimed(&mut self, request: RequestId) {
        self.tree.start(request);
    }

    /// The request will not publish the rest of what it claimed: `heir` chooses among those who wait for it.
    pub fn give_up_claim(
        &mut self,
        request: RequestId,
        heir: impl FnMut(&[RequestId]) -> Option<RequestId>,
    ) -> Result<(), ControlError> {
        self.tree.release(request, heir)?;
        Ok(())
    }

    /// Starts to load what only the host holds of the first `usable` pages, for a request that waits. What arrives is
    /// cached like anything else, pinned by nobody. Returns the pages under way, counted from the start of the sequence;
    /// none where the device has no room.
    pub fn load_early(
        &mut self,
        namespace: &Namespace,
        tokens: &[Token],
        usable: u32,
    ) -> Result<Vec<Range<u32>>, ControlError> {
        let found = self.lookup(namespace, self.head(tokens, usable))?;
        let (pages, _, runs, _) = self.cut(&found, true);
        let wanted: u32 = runs.iter().map(|run| run.host.len() as u32).sum();
        // The hit itself must not be evicted for its own rest, on either side.
        let hit = pages.len() as u32;
        let pins = [
            self.pin(namespace, tokens, hit, TierId::DEVICE)?,
            self.pin(namespace, tokens, hit, TierId::HOST)?,
        ];
        let mut slots = Vec::new();
        let begins = wanted > 0 && self.reserve(TierId::DEVICE, wanted, &mut slots)?;
        let mut slots = slots.into_iter();
        let mut under_way = Vec::new();
        for run in runs.into_iter().filter(|_| begins) {
            let moves: Vec<PageMove> =
                run.host.iter().zip(slots.by_ref()).map(|(from, to)| PageMove { from: *from, to }).collect();
            let end = run.first_page + moves.len() as u32;
            let path = Arc::from(self.head(tokens, end));
            under_way.push(run.first_page..end);
            self.start(Plan::new(TransferKind::Load, *namespace, path, run.first_page, moves))?;
        }
        for pin in pins {
            self.unpin(pin)?;
        }
        Ok(under_way)
    }

    /// Pages that these loads still bring.
    pub fn pages_loading(&self, loads: &[TransferId]) -> u32 {
        loads.iter().map(|id| self.pages_of(*id) as u32).sum()
    }
}
