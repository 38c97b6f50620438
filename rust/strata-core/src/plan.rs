//! What Core asks of the engine, and what the engine answers.

use crate::request::Admission;
use std::sync::Arc;
use std::time::Duration;
use strata_control::ControlAction;
use strata_types::{LoadTicket, PageId, PlanId, RequestId, Token};

/// Whether a plan computes prompts or next tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PlanKind {
    /// Parts of prompts.
    Prefill,
    /// One token of each row.
    Decode,
}

/// One request's share of a plan.
#[derive(Clone, Debug)]
pub struct PlanRow {
    /// The request.
    pub request: RequestId,
    /// The position of the first token to compute.
    pub start: usize,
    /// The tokens to compute. One shorter than `length` if the last is the token that the plan before samples.
    pub tokens: Vec<Token>,
    /// The number of tokens to compute.
    pub length: usize,
    /// The pages that hold positions `0..start + length`.
    pub pages: Vec<PageId>,
    /// Whether a token is to be sampled after the last position.
    pub sample: bool,
    /// Set on the first row after an admission.
    pub admitted: Option<Admission>,
}

/// A batch to compute. Plans are carried out in order of their ids.
#[derive(Clone, Debug)]
pub struct Plan {
    /// The number of this plan.
    pub id: PlanId,
    /// Plans of an older epoch than the engine's are stale: it skips them.
    pub epoch: u64,
    /// Prefill or decode.
    pub kind: PlanKind,
    /// The rows.
    pub rows: Vec<PlanRow>,
    /// Loads that must have brought a layer before that layer is read.
    pub tickets: Vec<Arc<LoadTicket>>,
}

/// The engine's answer for one row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RowResult {
    /// The sampled token, where one was asked for.
    pub token: Option<Token>,
    /// The engine saw an end: a stop token, a stop text.
    pub finished: bool,
}

/// Where the time of a step went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StepTime {
    /// Computing; zero if it was not measured.
    pub busy: Duration,
    /// Waiting for loads.
    pub stalled: Duration,
}

/// Why a plan was not carried out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StepFailure {
    /// The step itself went wrong: a request under which that happens again and again is given up.
    Step,
    /// A load under it failed; Core hears of that from the Mover too.
    Load,
    /// A load under it took too long: its requests are computed instead of loaded from now on.
    LateLoad,
}

/// Why a request is not answered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RefusalKind {
    /// It can never fit, or is malformed.
    Invalid,
    /// Too many wait already.
    Busy,
    /// Its steps failed again and again.
    Failed,
}

/// A request that Core gives up.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Refusal {
    /// The request.
    pub request: RequestId,
    /// The kind.
    pub kind: RefusalKind,
    /// A sentence with both numbers.
    pub reason: String,
}

/// What the driver has to do.
#[derive(Debug)]
pub enum Action {
    /// Give this to the engine, after the plans before it.
    Plan(Plan),
    /// Tell whoever waits for the request.
    Refuse(Refusal),
    /// Something for a Mover.
    Control(ControlAction),
}
