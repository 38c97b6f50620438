//! How a request leaves: finished, aborted, put back, preempted. What no plan uses is given back at once.

use crate::core::Core;
use crate::plan::{Action, Refusal, RefusalKind};
use crate::request::{Ending, Phase, Running};
use crate::CoreError;
use strata_types::{PageId, RequestId, TierId};

/// Steps that may go wrong with a request on board before it is given up.
const MAX_STEP_FAILURES: u32 = 3;

impl Core {
    /// Carries out a request's ending once no outstanding plan holds it.
    pub(crate) fn end_if_free(&mut self, id: RequestId) -> Result<(), CoreError> {
        let Some(request) = self.requests.get_mut(&id) else { return Ok(()) };
        let Some(ending) = request.ending else { return Ok(()) };
        if request.running().is_some_and(|running| running.outstanding > 0) {
            return Ok(());
        }
        if ending == Ending::Requeue {
            request.ending = None;
            if request.step_failures >= MAX_STEP_FAILURES {
                let reason = format!("{MAX_STEP_FAILURES} steps in a row failed under this request");
                return self.give_up(id, RefusalKind::Failed, reason);
            }
            return self.put_back(id);
        }
        match ending {
            Ending::Finished => self.stats.finished += 1,
            _ => self.stats.aborted += 1,
        }
        self.forget(id)
    }

    /// Ends a request without an answer.
    pub(crate) fn give_up(
        &mut self,
        id: RequestId,
        kind: RefusalKind,
        reason: String,
    ) -> Result<(), CoreError> {
        self.outbox.push_back(Action::Refuse(Refusal { request: id, kind, reason }));
        self.stats.refused += 1;
        self.forget(id)
    }

    fn forget(&mut self, id: RequestId) -> Result<(), CoreError> {
        self.give_back(id)?;
        self.leave_queue(id);
        self.hand_over(id)?;
        self.requests.remove(&id);
        Ok(())
    }

    /// Back to the queue, where its arrival puts it.
    pub(crate) fn put_back(&mut self, id: RequestId) -> Result<(), CoreError> {
        self.give_back(id)?;
        // No heirs: it goes before whoever follows it, and claims again at once.
        self.control.give_up_claim(id, |_| None)?;
        self.to_prefetch.insert(id);
        self.enqueue(id)?;
        // The device may have shrunk while it ran.
        self.refuse_if_unfit(id)
    }

    /// Gives back everything that a request holds; it is waiting afterwards.
    fn give_back(&mut self, id: RequestId) -> Result<(), CoreError> {
        self.end_prefetch(id)?;
        let Some(request) = self.requests.get_mut(&id) else { return Ok(()) };
        if let Phase::Running(running) = std::mem::replace(&mut request.phase, Phase::Waiting) {
            let Running { pin, pages, published, mut duplicates, loads, .. } = *running;
            let private: &[PageId] = &pages[published as usize..];
            duplicates.extend(private);
            self.control.release(id, pin, &duplicates, &loads)?;
            self.gave_back = true;
            self.running.retain(|running| *running != id);
        }
        Ok(())
    }

    /// A running request could not grow and no plan is outstanding: the youngest gives up its pages, unless copies
    /// downward are about to free some. Its whole pages are backed up, stay in the tree, and are hit again. False if
    /// room has to be waited for.
    pub(crate) fn make_room(&mut self) -> Result<bool, CoreError> {
        let mut probe: Vec<PageId> = Vec::new();
        if self.control.reserve_device(1, &mut probe)? {
            // Pages came free meanwhile.
            self.control.free_device(&probe)?;
            return Ok(true);
        }
        if self.control.making_room(TierId::DEVICE) {
            return Ok(false);
        }
        // What those who wait have on the device goes before anybody who runs does.
        if self.control.is_staged() && self.end_prefetches(None, None)? {
            return Ok(true);
        }
        let youngest = self
            .running
            .iter()
            .filter_map(|id| self.requests.get(id))
            .filter(|request| request.running().is_some_and(|running| running.outstanding == 0))
            .max_by_key(|request| (request.arrived, request.id))
            .map(|request| request.id);
        let Some(id) = youngest else { return Ok(true) };
        self.stats.preemptions += 1;
        if let Some(request) = self.requests.get_mut(&id) {
            request.preemptions += 1;
            let published = request.running().map_or(0, |running| running.published) as usize;
            let whole = published * self.control.config().page_size as usize;
            self.control.save_path(&request.namespace, &request.tokens[..whole])?;
        }
        self.put_back(id)?;
        Ok(true)
    }
}
