//! An order of somebody else's: it is followed, within the batch former's bounds, and cannot starve anybody.

use super::*;

/// Names these places, whatever is asked.
struct Names(Vec<usize>);

impl Ranking for Names {
    fn rank(&mut self, _: &View<'_>, _: &[Candidate<'_>]) -> Vec<usize> {
        self.0.clone()
    }
}

/// Sorts all by a key.
pub(super) struct By<F>(pub F);

impl<K: Ord, F: Fn(&Waiting) -> K + Send> Ranking for By<F> {
    fn rank(&mut self, _: &View<'_>, candidates: &[Candidate<'_>]) -> Vec<usize> {
        let mut places: Vec<usize> = (0..candidates.len()).collect();
        places.sort_by_key(|place| (self.0)(candidates[*place].waiting));
        places
    }
}

pub(super) fn ranked(ranking: impl Ranking) -> Ranked<impl Ranking> {
    Ranked::new(ranking, 100, DEFAULT_MAX_WAIT)
}

fn why_of(told: &[(RequestId, Why)], id: u64) -> Why {
    told.iter().find(|(told, _)| told.0 == id).unwrap().1
}

#[test]
fn the_order_is_followed_and_who_is_left_out_waits() {
    let queue = queue((1..=4).map(|id| waiting(id, &[], 100)));
    let mut policy = ranked(Names(vec![2, 0, 1]));
    assert_eq!(admitted(&policy.decide(&view(&queue))), [(3, 100), (1, 100), (2, 100)]);
    assert_eq!(why_of(&policy.explain(&view(&queue)), 4), Why::LeftOut);
    let limits = Limits { batch_tokens: 150, ..view(&queue).limits };
    assert_eq!(admitted(&policy.decide(&View { limits, ..view(&queue) })), [(3, 100), (1, 50)]);
}

#[test]
fn places_that_are_not_there_or_come_twice_count_once_at_most() {
    let queue = queue((1..=2).map(|id| waiting(id, &[], 10)));
    assert_eq!(ids(&ranked(Names(vec![7, 1, 1, 0, 1])).decide(&view(&queue))), [2, 1]);
    assert_eq!(ranked(Names(vec![])).decide(&view(&queue)).step, Step::Idle);
}

#[test]
fn who_has_no_room_ends_the_batch() {
    let mut large = waiting(2, &[], 10);
    large.standing.pages = 100;
    let queue = queue([waiting(1, &[], 10), large, waiting(3, &[], 10)]);
    let view = View { available_pages: 50, ..view(&queue) };
    let mut policy = ranked(Names(vec![2, 1, 0]));
    assert_eq!(ids(&policy.decide(&view)), [3]);
    assert_eq!(why_of(&policy.explain(&view), 1), Why::Behind { id: RequestId(2) });
}

#[test]
fn whoever_has_waited_for_too_long_goes_first_named_or_not() {
    let queue = queue((1..=3).map(|id| waiting(id, &[], 10)));
    let late = View { now: Time(2) + DEFAULT_MAX_WAIT, ..view(&queue) };
    // Request 1 is no candidate any more: place 1 is request 3.
    assert_eq!(ids(&ranked(Names(vec![1])).decide(&late)), [1, 3]);
    assert_eq!(ranked(Names(vec![])).decide(&late).counts.aged, 1);
}

#[test]
fn who_is_deferred_is_told_and_wakes_the_scheduler_when_left_out() {
    struct Undeferred;
    impl Ranking for Undeferred {
        fn rank(&mut self, _: &View<'_>, candidates: &[Candidate<'_>]) -> Vec<usize> {
            (0..candidates.len()).filter(|place| !candidates[*place].deferred).collect()
        }
    }
    let all =
        [waiting(1, &[], 10), follower(2, 1, 290, 5000), follower(3, 1, 100, 4000), follower(4, 1, 200, 900)];
    let queue = queue(all);
    let decision = ranked(Undeferred).decide(&view(&queue));
    assert_eq!(ids(&decision), [1, 3, 4], "few transient tokens, and a wait that is over, defer nobody");
    assert_eq!((decision.counts.deferred, decision.next_deadline), (1, Some(Time(5000))));
}
