//! How much of the running requests' loads is still on its way. Transfers are reported as a whole, so what has come
//! since is predicted.

use std::collections::HashSet;
use strata_sched::LoadPrice;
use strata_types::{Time, TransferId};

/// How far loads have come that one link carries one after another, if all goes as predicted.
pub(crate) struct LoadsInOrder {
    now: Time,
    price: Option<LoadPrice>,
    /// Seconds from now until the link has carried the loads before; negative: it was idle since.
    free_in: f64,
    /// Transfers that were counted: one that several wait for is carried once.
    counted: HashSet<TransferId>,
}

impl LoadsInOrder {
    pub fn new(now: Time, price: Option<LoadPrice>) -> LoadsInOrder {
        LoadsInOrder { now, price, free_in: f64::NEG_INFINITY, counted: HashSet::new() }
    }

    /// Tokens of the next load that are still on their way: it was asked for at `since` and had `whole` tokens, of which
    /// the transfers `under_way` are not reported yet. Until they are, something is missing. What was counted for a load
    /// before is not counted again.
    pub fn rest(
        &mut self,
        since: Time,
        whole: u32,
        under_way: impl Iterator<Item = (TransferId, u32)>,
    ) -> u32 {
        let (mut shared, mut unreported) = (0, 0);
        for (transfer, tokens) in under_way {
            *if self.counted.insert(transfer) { &mut unreported } else { &mut shared } += tokens;
        }
        if unreported == 0 {
            return shared.min(1);
        }
        let whole = whole.saturating_sub(shared);
        let Some(price) = self.price else { return unreported };
        let begins_in = self.free_in.max(-self.now.since(since).as_secs_f64());
        self.free_in = begins_in + price.seconds(f64::from(whole));
        let there = price.tokens_within(-begins_in);
        whole.saturating_sub(there).min(unreported).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::LoadsInOrder;
    use strata_sched::LoadPrice;
    use strata_types::{Time, TransferId};

    /// A second and a thousand tokens a second.
    const PRICE: LoadPrice = LoadPrice { latency: 1.0, per_token: 0.001 };

    fn at(seconds: u64) -> Time {
        Time(seconds * 1_000_000_000)
    }

    fn rest_after(seconds: u64, whole: u32, unreported: u32) -> u32 {
        LoadsInOrder::new(at(seconds), Some(PRICE)).rest(at(0), whole, transfer(1, unreported))
    }

    fn transfer(number: u64, tokens: u32) -> impl Iterator<Item = (TransferId, u32)> {
        (tokens > 0).then_some((TransferId(number), tokens)).into_iter()
    }

    #[test]
    fn what_has_come_is_taken_from_the_whole_load_and_not_from_its_last_transfer() {
        // Of 4,000 tokens in four transfers, three are reported and 3,000 should be there.
        assert_eq!(rest_after(4, 4000, 1000), 1000);
        assert_eq!(rest_after(4, 4000, 4000), 1000);
        // Reports say more than the prediction, then less.
        assert_eq!(rest_after(2, 4000, 1000), 1000);
        assert_eq!(rest_after(9, 4000, 1000), 1);
        assert_eq!(rest_after(2, 4000, 0), 0);
    }

    #[test]
    fn the_latency_is_waited_for_once_and_not_for_every_token() {
        assert_eq!(rest_after(1, 4000, 4000), 4000);
        assert_eq!(rest_after(3, 4000, 4000), 2000);
        let unknown = LoadsInOrder::new(at(3), None).rest(at(0), 4000, transfer(1, 3000));
        assert_eq!(unknown, 3000, "nothing is predicted, so only what was reported is there");
    }

    #[test]
    fn a_load_begins_when_the_link_has_carried_those_before() {
        let mut link = LoadsInOrder::new(at(6), Some(PRICE));
        assert_eq!(link.rest(at(0), 2000, transfer(1, 2000)), 1, "not reported yet");
        // Asked for at 1, begun at 3.
        assert_eq!(link.rest(at(1), 4000, transfer(2, 4000)), 2000);
        assert_eq!(link.rest(at(1), 500, transfer(3, 500)), 500, "waits for its turn");
        let mut link = LoadsInOrder::new(at(6), Some(PRICE));
        assert_eq!(link.rest(at(0), 2000, transfer(1, 0)), 0, "reported, so the link was free");
        assert_eq!(link.rest(at(1), 5000, transfer(2, 5000)), 1000);
    }

    #[test]
    fn a_transfer_that_several_wait_for_is_carried_once() {
        let mut link = LoadsInOrder::new(at(3), Some(PRICE));
        assert_eq!(link.rest(at(0), 4000, transfer(1, 4000)), 2000);
        assert_eq!(link.rest(at(1), 4000, transfer(1, 4000)), 1, "it waits too, and brings nothing more");
        let both = transfer(1, 4000).chain(transfer(2, 1000));
        assert_eq!(link.rest(at(2), 5000, both), 1000, "its own 1,000 come after the shared");
        // The shared load is over at 5.
        let mut link = LoadsInOrder::new(at(6), Some(PRICE));
        link.rest(at(0), 4000, transfer(1, 4000));
        let both = transfer(1, 4000).chain(transfer(2, 1000));
        assert_eq!(link.rest(at(2), 5000, both), 1000, "its latency is just over");
        let mut link = LoadsInOrder::new(at(7), Some(PRICE));
        link.rest(at(0), 4000, transfer(1, 4000));
        let both = transfer(1, 4000).chain(transfer(2, 1000));
        assert_eq!(link.rest(at(2), 5000, both), 1, "there, and not reported");
    }
}
