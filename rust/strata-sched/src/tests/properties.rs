//! Random situations: the algorithm against its straight-line model, and what must hold of every policy.

use super::naive::{self, Rule};
use super::ranked::{ranked, By};
use super::*;
use proptest::prelude::*;
use std::cmp::Reverse;
use std::collections::BTreeSet;

/// A situation, owned.
#[derive(Clone, Debug)]
struct Situation {
    waiting: Vec<Waiting>,
    /// Which of them were deferred before, whatever they need now.
    deferred_before: Vec<bool>,
    prefilling: Vec<Prefilling>,
    decodable: Vec<RequestId>,
    available_pages: u32,
    batch_tokens: u32,
    max_running: u32,
    stall: Option<Duration>,
    gap: Duration,
}

const NOW: Time = Time(1_000_000_000);

fn any_waiting() -> impl Strategy<Value = Waiting> {
    let loads = prop::collection::vec((0u64..6, 1u32..6000), 0..3);
    // (transient, owner, overdue): few of them, of few owners.
    let follows = prop::option::weighted(0.3, (0u32..400, 900u64..903, any::<bool>()));
    (loads, 0u32..600, 0u32..200, -1i32..2, any::<[bool; 3]>(), follows).prop_map(
        |(mut loads, compute, pages, priority, [a, b, c], follows)| {
            // One tree: a first node leads to the second ones of its own, and a node has one length.
            if loads.len() > 1 {
                loads[1].0 += 10 * (loads[0].0 + 1);
            }
            loads.iter_mut().for_each(|run| run.1 = (run.0 as u32 * 37 % 60 + 1) * 100);
            // Half of them compute so little that their load sticks out.
            let mut new = waiting(0, &loads, if a { compute % 8 } else { compute % 80 });
            new.priority = priority;
            new.held = a && b && c;
            new.standing.pages = new.standing.need.host / 16 + pages;
            if let Some((transient, owner, overdue)) = follows {
                new.standing.need.transient = transient;
                new.standing.follows = Some(RequestId(owner));
                new.standing.defer_until = Some(if overdue { Time(5) } else { Time(NOW.0 * 2) });
            }
            new
        },
    )
}

fn situations() -> impl Strategy<Value = Situation> {
    let prefilling = prop::collection::vec((1u32..900, 0u32..4000, 0u32..9000, 0u64..1_000_000_000), 0..3);
    let stall = prop::option::of((1u64..200).prop_map(Duration::from_millis));
    (
        prop::collection::vec((any_waiting(), prop::bool::weighted(0.3)), 0..24),
        prefilling,
        0u64..4,
        0u32..4000,
        1u32..2000,
        1u32..40,
        stall,
        0u64..300,
    )
        .prop_map(|(mut waiting, prefilling, decodes, pages, batch_tokens, max_running, stall, gap)| {
            for (id, (waiting, _)) in (0..).zip(&mut waiting) {
                (waiting.id, waiting.arrived) = (RequestId(id), Time(id / 2 * 80_000_000));
            }
            let (waiting, deferred_before) = waiting.into_iter().unzip();
            let rows = (100..).map(RequestId).zip(prefilling);
            Situation {
                waiting,
                deferred_before,
                prefilling: rows
                    .map(|(id, (remaining, context, loading, since))| Prefilling {
                        id,
                        remaining,
                        context,
                        loading,
                        since: Time(since),
                    })
                    .collect(),
                decodable: (200..200 + decodes).map(RequestId).collect(),
                available_pages: pages,
                batch_tokens,
                max_running,
                stall,
                gap: Duration::from_millis(gap),
            }
        })
}

impl Situation {
    fn queue(&self) -> Queue {
        let mut queue = Queue::new(Some(100));
        for (waiting, deferred_before) in self.waiting.iter().zip(&self.deferred_before) {
            let mut first = waiting.clone();
            first.standing.need.transient += if *deferred_before { 500 } else { 0 };
            queue.push(Time(0), first);
            queue.update(waiting.id, Time(0), waiting.standing.clone());
        }
        queue
    }

    fn view<'a>(&'a self, queue: &'a Queue) -> View<'a> {
        let limits = Limits {
            batch_tokens: self.batch_tokens,
            max_running: self.max_running,
            max_decode_stall: self.stall,
        };
        View {
            now: NOW,
            prefilling: &self.prefilling,
            decodable: &self.decodable,
            running: (self.prefilling.len() + self.decodable.len()) as u32,
            available_pages: self.available_pages,
            early_pages: self.available_pages / 4,
            decode_gap: self.gap,
            limits,
            ..view(queue)
        }
    }
}

fn tokens(decision: &Decision) -> u32 {
    let chunks = match &decision.step {
        Step::Prefill(chunks) => chunks.iter().map(|chunk| chunk.tokens).sum(),
        _ => 0,
    };
    chunks + decision.admissions.iter().map(|admission| admission.tokens).sum::<u32>()
}

fn may_go(waiting: &Waiting, defers: bool) -> bool {
    let standing = &waiting.standing;
    let deferred = standing.need.transient > 100 && standing.defer_until.is_some_and(|until| NOW < until);
    !(waiting.held || defers && deferred)
}

/// Ids are unique, limits hold, and nobody who must not go does.
fn limits_hold(view: &View<'_>, decision: &Decision, defers: bool) -> Result<(), TestCaseError> {
    let ids: BTreeSet<RequestId> = decision.admissions.iter().map(|admission| admission.id).collect();
    prop_assert_eq!(ids.len(), decision.admissions.len());
    prop_assert!(tokens(decision) <= view.limits.batch_tokens);
    let admitted: Vec<&Waiting> = ids.iter().filter_map(|id| view.waiting.get(*id)).collect();
    prop_assert_eq!(admitted.len(), ids.len());
    prop_assert!(ids.is_empty() || view.running + ids.len() as u32 <= view.limits.max_running);
    prop_assert!(admitted.iter().all(|waiting| may_go(waiting, defers)));
    let mut nodes = BTreeSet::new();
    let mut pages = 0;
    for waiting in &admitted {
        let shared: u32 =
            waiting.standing.loads.iter().filter(|run| !nodes.insert(run.node)).map(|run| run.tokens).sum();
        pages += waiting.standing.pages.saturating_sub(shared.div_ceil(16));
    }
    prop_assert!(pages <= view.available_pages);
    for early in &decision.early {
        let waiting = view.waiting.get(*early);
        prop_assert!(!ids.contains(early) && waiting.is_some_and(|waiting| may_go(waiting, defers)));
    }
    Ok(())
}

/// Something is computed when something can be.
fn never_idle(view: &View<'_>, decision: &Decision, defers: bool) -> Result<(), TestCaseError> {
    match &decision.step {
        Step::Prefill(_) => prop_assert!(tokens(decision) > 0),
        Step::Decode(ids) => {
            prop_assert_eq!(ids.as_slice(), view.decodable);
            prop_assert!(!ids.is_empty());
        }
        Step::Idle => {
            prop_assert!(view.prefilling.is_empty() && view.decodable.is_empty());
            prop_assert!(decision.admissions.is_empty());
            // Whoever is first among those who may go has no room.
            let mut able = view.waiting.iter().filter(|waiting| may_go(waiting, defers)).peekable();
            let lacks_room = |waiting: &Waiting| waiting.standing.pages > view.available_pages;
            prop_assert!(able.peek().is_none() || able.any(lacks_room));
        }
    }
    Ok(())
}

/// Whoever goes beside the prompts that run leaves the first of them half of the batch, and with bounded streams a chunk.
fn prompts_get_on(view: &View<'_>, decision: &Decision) -> Result<(), TestCaseError> {
    let (Some(first), Step::Prefill(chunks)) = (view.prefilling.first(), &decision.step) else {
        return Ok(());
    };
    // One that loads may have to wait for it.
    if first.loading > 0 {
        return Ok(());
    }
    let chunk = chunks.iter().find(|chunk| chunk.id == first.id).map_or(0, |chunk| chunk.tokens);
    let half = view.limits.batch_tokens.div_ceil(2);
    let least = if view.limits.max_decode_stall.is_some() { 1 } else { half };
    prop_assert!(chunk >= least.min(first.remaining), "{chunk} of {half}");
    Ok(())
}

/// With a bound, a prefill step and the decode step after it end in time, or compute no more than they must.
fn gap_is_bounded(view: &View<'_>, decision: &Decision) -> Result<(), TestCaseError> {
    let (Some(most), Step::Prefill(_), false) =
        (view.limits.max_decode_stall, &decision.step, view.decodable.is_empty())
    else {
        return Ok(());
    };
    let prefill = f64::from(tokens(decision)) * 280e-6;
    let ends = view.decode_gap.as_secs_f64() + prefill + 1e-3;
    prop_assert!(ends <= most.as_secs_f64() + 1e-9 || tokens(decision) <= 16, "{ends} s of {most:?}");
    // A gap that a chunk has made already is not made longer than allowed.
    prop_assert!(ends <= most.as_secs_f64() + 1e-9 || view.decode_gap.as_secs_f64() < prefill);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1024, ..ProptestConfig::default() })]

    #[test]
    fn static_is_its_model_step_for_step(situation in situations()) {
        let situation = Situation { stall: None, ..situation };
        let queue = situation.queue();
        let view = situation.view(&queue);
        let decision = fixed().decide(&view);
        let own_step = f64::INFINITY;
        let rule = Rule {
            ratio: 100.0,
            helpers: false,
            hidden: 0.0,
            own_step,
            decode_step: 0.0,
            worth: false,
            passing: false,
        };
        let expected = naive::decision(&view, rule, 10e-6);
        prop_assert_eq!((decision.step, decision.admissions), expected);
    }

    #[test]
    fn adaptive_is_its_model_step_for_step(situation in situations(), ahead in 0u32..4, step in 0u32..4, decode in 0u32..3) {
        // Prices of powers of two, so that both reckon exactly.
        let (load, own_step) = (0.5f64.powi(15), f64::from(128 * step));
        let (hidden, decode_step) = (f64::from(1024 * ahead) + own_step, f64::from(512 * decode));
        let situation = Situation { stall: None, ..situation };
        let queue = situation.queue();
        let prices = Prices {
            load: Some(LoadPrice { latency: 0.0, per_token: load }),
            prefill: Some(StepCost { per_step: load * own_step, per_token: 0.5f64.powi(10), per_pair: 0.0 }),
            decode_step: Some(load * decode_step),
            head_start: load * f64::from(1024 * ahead),
        };
        let view = View { prices, ..situation.view(&queue) };
        let decision = adaptive().decide(&view);
        let rule =
            Rule { ratio: 32.0, helpers: true, hidden, own_step, decode_step, worth: true, passing: true };
        let expected = naive::decision(&view, rule, load);
        prop_assert_eq!((decision.step, decision.admissions), expected);
    }

    #[test]
    fn limits_hold_and_equal_views_give_equal_decisions(situation in situations()) {
        let queue = situation.queue();
        let view = situation.view(&queue);
        for policy in policies().iter_mut() {
            let decision = policy.decide(&view);
            prop_assert_eq!(&decision, &policy.decide(&view));
            let told = policy.explain(&view);
            prop_assert!(told.iter().map(|(id, _)| *id).eq(view.waiting.iter().map(|waiting| waiting.id)));
            let goes = |why: &Why| matches!(why, Why::Next { .. } | Why::Loads { .. });
            let going: BTreeSet<RequestId> = told.iter().filter(|(_, why)| goes(why)).map(|(id, _)| *id).collect();
            let admitted: BTreeSet<RequestId> = decision.admissions.iter().map(|admission| admission.id).collect();
            prop_assert_eq!(going, admitted);
            let defers = policy.deferral_threshold().is_some();
            limits_hold(&view, &decision, defers)?;
            never_idle(&view, &decision, defers)?;
            prompts_get_on(&view, &decision)?;
            gap_is_bounded(&view, &decision)?;
        }
    }

    #[test]
    fn the_known_orders_as_rankings_decide_as_they_do(situation in situations()) {
        let queue = situation.queue();
        let view = situation.view(&queue);
        let as_it_stands = ranked(By(|_: &Waiting| ())).decide(&view);
        prop_assert_eq!(as_it_stands, FirstComeFirstServed::default().decide(&view));
        let cached = |waiting: &Waiting| waiting.standing.need.context() + waiting.standing.need.disk;
        let by_prefix = |waiting: &Waiting| (Reverse(waiting.priority), Reverse(cached(waiting)));
        prop_assert_eq!(ranked(By(by_prefix)).decide(&view), LongestPrefixFirst::default().decide(&view));
    }

    #[test]
    fn the_head_goes_when_there_is_room(situation in situations()) {
        let situation = Situation { stall: None, prefilling: Vec::new(), ..situation };
        let queue = queue(situation.waiting.iter().cloned().map(|mut waiting| {
            waiting.standing.need.transient = 0;
            waiting
        }));
        let view = situation.view(&queue);
        let Some(head) = queue.iter().find(|waiting| !waiting.held) else { return Ok(()) };
        let fits = head.standing.pages + view.running <= view.available_pages
            && view.running < view.limits.max_running;
        let by_age = BalancedOptions { worth: false, passing: false, ..BalancedOptions::default() };
        let mut adaptive = Adaptive::new(Predicted, by_age);
        for policy in [&mut fixed() as &mut dyn Policy, &mut adaptive, &mut FirstComeFirstServed::default()] {
            let decision = policy.decide(&view);
            prop_assert_eq!(decision.admissions.first().map(|admission| admission.id), fits.then_some(head.id));
        }
    }
}
