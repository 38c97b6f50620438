//! When a batch is loading-bound: when its load outlasts what its compute can hide.

use crate::{Prices, Work};

/// The weighing of load against compute.
pub trait Balance: Send {
    /// The name of the policy that weighs like this.
    fn name(&self) -> &'static str;

    /// Whether the load of this batch, or of this part of one, outlasts its compute.
    fn is_loading_bound(&self, work: &Work, prices: &Prices) -> bool;

    /// Whether a request may join a batch before the rest.
    fn welcomes(&self, batch: &Work, part: &Work, prices: &Prices) -> bool {
        !self.is_loading_bound(&batch.plus(*part), prices)
    }

    /// Whether a request that shares so many tokens of its load with a batch goes along with it.
    fn is_bundle(&self, shared: u32, _own: u64) -> bool {
        shared > 0
    }

    /// Whether loads may begin while their requests wait.
    fn loads_early(&self) -> bool {
        false
    }
}

/// The paper's: a fixed ratio of loaded to computed tokens.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Ratio {
    /// Tokens that load while one is computed.
    pub loaded_per_computed: f64,
}

impl Default for Ratio {
    fn default() -> Ratio {
        Ratio { loaded_per_computed: 100.0 }
    }
}

impl Balance for Ratio {
    fn name(&self) -> &'static str {
        "static"
    }

    #[inline]
    fn is_loading_bound(&self, work: &Work, _: &Prices) -> bool {
        work.load as f64 > self.loaded_per_computed * work.compute as f64
    }
}

/// Predicted time against predicted time. Without a prediction nothing is loading-bound.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Predicted;

impl Balance for Predicted {
    fn name(&self) -> &'static str {
        "adaptive"
    }

    #[inline]
    fn is_loading_bound(&self, work: &Work, prices: &Prices) -> bool {
        match (prices.load_seconds(work.load), prices.prefill_seconds(work)) {
            (Some(load), Some(compute)) => load > compute,
            _ => false,
        }
    }

    /// In a batch that is loading-bound anyway, whoever brings more compute than load helps to hide the load.
    #[inline]
    fn welcomes(&self, batch: &Work, part: &Work, prices: &Prices) -> bool {
        let (Some(load), Some(prefill)) = (prices.load, prices.prefill) else { return true };
        let brings = prefill.per_token * part.compute as f64 + prefill.per_pair * part.pairs;
        load.per_token * part.load as f64 <= brings || !self.is_loading_bound(&batch.plus(*part), prices)
    }

    /// A request that shares no more than a system prompt with the batch is not bundled with it for that.
    fn is_bundle(&self, shared: u32, own: u64) -> bool {
        shared > 0 && u64::from(shared) >= own
    }

    fn loads_early(&self) -> bool {
        true
    }
}
