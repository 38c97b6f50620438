//! How much of the running requests' loads is still on its way. Transfers are reported as a whole, so what has come
//! since is predicted.

use strata_sched::LoadPrice;
use strata_types::Time;

/// How far loads have come that one link carries one after another, if all goes as predicted.
pub(crate) struct LoadsInOrder {
    now: Time,
    price: Option<LoadPrice>,
    /// Seconds from now until the link has carried the loads before; negative: it was idle since.
    free_in: f64,
}

impl LoadsInOrder {
    pub fn new(now: Time, price: Option<LoadPrice>) -> LoadsInOrder {
        LoadsInOrder { now, price, free_in: f64::NEG_INFINITY }
    }

    /// Tokens of the next load that are still on their way: it was asked for at `since` and has `whole` tokens, of
    /// which transfers of all but `unreported` were reported whole. Until the last is, something is missing.
    pub fn rest(&mut self, since: Time, whole: u32, unreported: u32) -> u32 {
        if unreported == 0 {
            return 0;
        }
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
    use strata_types::Time;

    /// A second and a thousand tokens a second.
    const PRICE: LoadPrice = LoadPrice { latency: 1.0, per_token: 0.001 };

    fn at(seconds: u64) -> Time {
        Time(seconds * 1_000_000_000)
    }

    fn rest_after(seconds: u64, whole: u32, unreported: u32) -> u32 {
        LoadsInOrder::new(at(seconds), Some(PRICE)).rest(at(0), whole, unreported)
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
        let unknown = LoadsInOrder::new(at(3), None).rest(at(0), 4000, 3000);
        assert_eq!(unknown, 3000, "nothing is predicted, so only what was reported is there");
    }

    #[test]
    fn a_load_begins_when_the_link_has_carried_those_before() {
        let mut link = LoadsInOrder::new(at(6), Some(PRICE));
        assert_eq!(link.rest(at(0), 2000, 2000), 1, "not reported yet");
        // Asked for at 1, begun at 3.
        assert_eq!(link.rest(at(1), 4000, 4000), 2000);
        assert_eq!(link.rest(at(1), 500, 500), 500, "waits for its turn");
        let mut link = LoadsInOrder::new(at(6), Some(PRICE));
        assert_eq!(link.rest(at(0), 2000, 0), 0, "reported, so the link was free");
        assert_eq!(link.rest(at(1), 5000, 5000), 1000);
    }
}
