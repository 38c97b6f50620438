//! The machine with steps and loads that take time: one device and one link, each doing one thing after the other, on
//! the machine's own clock. All other transfers end at once.

use super::Machine;
use std::collections::HashMap;
use std::time::Duration;
use strata_core::PlanKind;
use strata_types::{PlanId, Time, TransferId, TransferKind};

/// A step that was carried out.
#[derive(Clone, Debug)]
pub struct Ran {
    pub kind: PlanKind,
    /// Who took part, with the tokens computed.
    pub rows: Vec<(u64, usize)>,
    pub from: Time,
    pub to: Time,
}

impl Ran {
    pub fn has(&self, id: u64) -> bool {
        self.rows.iter().any(|(other, _)| *other == id)
    }
}

pub struct Timed {
    pub machine: Machine,
    /// Milliseconds of a step, of each of its tokens, and of each page of a load.
    pub per_step: f64,
    pub per_token: f64,
    pub per_page: f64,
    pub ran: Vec<Ran>,
    /// When loads were handed over.
    pub loads: Vec<Time>,
    computing: Option<(PlanId, Time, Time)>,
    link_free: Time,
    due: HashMap<TransferId, Time>,
}

fn millis(count: f64) -> Duration {
    Duration::from_secs_f64(count / 1e3)
}

impl Timed {
    pub fn new(machine: Machine, per_step: f64, per_token: f64, per_page: f64) -> Timed {
        let (ran, loads, due) = (Vec::new(), Vec::new(), HashMap::new());
        let (computing, link_free) = (None, Time(0));
        Timed { machine, per_step, per_token, per_page, ran, loads, computing, link_free, due }
    }

    /// Until this is so, or nothing more happens.
    pub fn run(&mut self, until: impl Fn(&Timed) -> bool) {
        for _ in 0..10_000 {
            self.machine.settle();
            if until(self) {
                return;
            }
            let (moved, computed) = (self.carry(), self.compute());
            if moved || computed {
                continue;
            }
            let ends = self.due.values().copied().chain(self.computing.map(|(_, _, to)| to));
            match ends.min().or_else(|| self.machine.core.next_deadline()) {
                // Settling takes a millisecond of its own.
                Some(next) => {
                    let before = Time(next.0.saturating_sub(1_000_000));
                    self.machine.now = self.machine.now.max(before);
                }
                None if self.machine.plans.is_empty() && self.machine.transfers.is_empty() => return,
                None => {}
            }
        }
        panic!("it goes on for ever: {:?}", self.machine.core.stats());
    }

    fn carry(&mut self) -> bool {
        let now = self.machine.now;
        let before = self.machine.transfers.len();
        for transfer in &self.machine.transfers {
            self.due.entry(transfer.id).or_insert_with(|| {
                if transfer.kind != TransferKind::Load {
                    return now;
                }
                self.loads.push(now);
                self.link_free =
                    self.link_free.max(now) + millis(self.per_page * transfer.pages.len() as f64);
                self.link_free
            });
        }
        while let Some(index) =
            self.machine.transfers.iter().position(|transfer| self.due[&transfer.id] <= now)
        {
            let transfer = self.machine.transfers.remove(index).unwrap();
            self.due.remove(&transfer.id);
            let pages = transfer.pages.len();
            self.machine.finish(transfer, pages, None);
        }
        let transfers = &self.machine.transfers;
        self.due.retain(|id, _| transfers.iter().any(|transfer| transfer.id == *id));
        transfers.len() < before
    }

    fn compute(&mut self) -> bool {
        let now = self.machine.now;
        let Some(plan) = self.machine.plans.front() else { return false };
        let tokens: usize = plan.rows.iter().map(|row| row.length).sum();
        let takes = millis(self.per_step + self.per_token * tokens as f64);
        match self.computing {
            Some((id, from, to)) if id == plan.id => {
                if to > now {
                    return false;
                }
                let rows = plan.rows.iter().map(|row| (row.request.0, row.length)).collect();
                self.ran.push(Ran { kind: plan.kind, rows, from, to: now });
                self.machine.busy = takes;
                self.computing = None;
                assert!(self.machine.compute_one());
                return true;
            }
            _ if plan.tickets.iter().all(|ticket| ticket.is_complete()) => {
                self.computing = Some((plan.id, now, now + takes));
            }
            _ => {}
        }
        false
    }
}
