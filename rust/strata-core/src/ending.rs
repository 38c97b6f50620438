//! How a request leaves: finished, aborted, put back, preempted. What no plan uses is given back at once.

use crate::core::Core;
use crate::plan::{Action, Refusal, RefusalKind};
use crate::request::{Ending, Phase, Running};
use crate::CoreError;
use strata_types::{PageId, RequestId};

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
                let refusal = Refusal { request: id, kind: RefusalKind::Failed, reason };
                self.outbox.push_back(Action::Refuse(refusal));
                self.stats.refused += 1;
                return self.forget(id);
            }
            return self.put_back(id);
        }
        match ending {
            Ending::Finished => self.stats.finished += 1,
            _ => self.stats.aborted += 1,
        }
        self.forget(id)
    }

    fn forget(&mut self, id: RequestId) -> Result<(), CoreError> {
        self.give_back(id)?;
        self.control.give_up_claim(id)?;
        self.requests.remove(&id);
        self.queue.retain(|queued| *queued != id);
        Ok(())
    }

    /// Back to the queue, where its arrival puts it.
    pub(crate) fn put_back(&mut self, id: RequestId) -> Result<(), CoreError> {
        self.give_back(id)?;
        self.control.give_up_claim(id)?;
        if let Some(request) = self.requests.get(&id) {
            self.control.claim(id, &request.namespace, &request.tokens)?;
        }
        self.to_prefetch.push(id);
        self.enqueue(id);
        Ok(())
    }

    /// Gives back everything that a request holds; it is waiting afterwards.
    fn give_back(&mut self, id: RequestId) -> Result<(), CoreError> {
        let Some(request) = self.requests.get_mut(&id) else { return Ok(()) };
        let held = request.held.take();
        if let Some(pin) = request.host_pin.take() {
            self.control.unpin(pin)?;
        }
        for transfer in held.map(|held| held.waits).unwrap_or_default() {
            self.control.leave(id, transfer)?;
        }
        if let Phase::Running(running) = std::mem::replace(&mut request.phase, Phase::Waiting) {
            let Running { pin, pages, published, mut duplicates, loads, .. } = *running;
            let private: &[PageId] = &pages[published as usize..];
            duplicates.extend(private);
            self.control.release(id, pin, &duplicates, &loads)?;
            self.running.retain(|running| *running != id);
        }
        Ok(())
    }

    /// A running request could not grow and no plan is outstanding: the youngest gives up its pages. Its whole
    /// pages stay in the tree, on their way down by policy, and are hit again if nobody needs the room.
    pub(crate) fn make_room(&mut self) -> Result<(), CoreError> {
        let mut probe: Vec<PageId> = Vec::new();
        if self.control.reserve_device(1, &mut probe)? {
            // Pages came free meanwhile.
            return Ok(self.control.free_device(&probe)?);
        }
        let youngest = self
            .running
            .iter()
            .filter_map(|id| self.requests.get(id))
            .filter(|request| request.running().is_some_and(|running| running.outstanding == 0))
            .max_by_key(|request| (request.arrived, request.id))
            .map(|request| request.id);
        let Some(id) = youngest else { return Ok(()) };
        self.stats.preemptions += 1;
        if let Some(request) = self.requests.get_mut(&id) {
            request.preemptions += 1;
        }
        self.put_back(id)
    }
}
