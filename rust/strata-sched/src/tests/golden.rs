//! The situations of the paper, one by one, and the bounds that must hold around them.

use super::*;

const RUNS: [RequestId; 1] = [RequestId(99)];

/// Both cache-aware policies in the same situation.
fn both(view: &View<'_>) -> [Decision; 2] {
    [fixed().decide(view), adaptive().decide(view)]
}

#[test]
fn of_two_misses_on_one_context_in_one_batch_the_second_waits() {
    let queue = queue([waiting(1, &[], 300), follower(2, 1, 290, 5000)]);
    for decision in both(&view(&queue)) {
        assert_eq!(admitted(&decision), [(1, 300)]);
        assert_eq!(decision.counts, Counts { deferred: 1, ..Counts::default() });
        assert_eq!(decision.next_deadline, Some(Time(5000)));
    }
}

#[test]
fn a_repeat_of_what_the_plan_before_computes_waits() {
    // Request 1 is in flight: not in the queue, but the owner of the run.
    let queue = queue([follower(2, 1, 4000, 5000), waiting(3, &[], 50)]);
    let view = View { decodable: &RUNS, running: 1, ..view(&queue) };
    for decision in both(&view) {
        assert_eq!(admitted(&decision), [(3, 50)]);
        assert_eq!(decision.counts.deferred, 1);
    }
}

#[test]
fn few_transient_tokens_and_tokens_on_the_device_defer_nobody() {
    let mut near = follower(2, 1, 100, 5000);
    near.standing.need.device = 4000;
    let queue = queue([waiting(1, &[], 100), near]);
    for decision in both(&view(&queue)) {
        assert_eq!(ids(&decision), [1, 2]);
    }
}

#[test]
fn the_batch_takes_those_that_balance() {
    // C0 and D0 both load; F computes. C0 goes with F before D0.
    let (c0, d0, f) = (waiting(1, &[(1, 8000)], 10), waiting(2, &[(2, 8000)], 10), waiting(3, &[], 400));
    let queue = queue([c0, d0, f]);
    let limited = Limits { batch_tokens: 410, ..view(&queue).limits };
    for decision in both(&View { limits: limited, ..view(&queue) }) {
        assert_eq!(admitted(&decision), [(1, 10), (3, 400)]);
        assert_eq!(decision.counts.set_aside, 1);
    }
    // With room left, the one set aside goes as well.
    assert_eq!(ids(&adaptive().decide(&view(&queue))), [1, 3, 2]);
    // First come, first served takes both loads.
    let limits = limited;
    assert_eq!(ids(&FirstComeFirstServed::default().decide(&View { limits, ..view(&queue) })), [1, 2, 3]);
    let off = BalancedOptions { balance: false, ..BalancedOptions::default() };
    assert_eq!(ids(&Adaptive::new(Predicted, off).decide(&View { limits, ..view(&queue) })), [1, 2, 3]);
}

#[test]
fn a_bundle_goes_together_and_its_load_counts_once() {
    // D0 and D1 share 4,000 tokens of load: together they compute enough to hide it, C does not fit with them.
    let (d0, c, d1) =
        (waiting(1, &[(7, 4000)], 100), waiting(2, &[(8, 9000)], 40), waiting(3, &[(7, 4000)], 100));
    let queue = queue([d0, c, d1]);
    let limits = Limits { batch_tokens: 200, ..view(&queue).limits };
    let running = View { limits, decodable: &RUNS, running: 1, ..view(&queue) };
    for decision in both(&running) {
        assert_eq!(admitted(&decision), [(1, 100), (3, 100)]);
        assert_eq!(decision.step, Step::Prefill(vec![]), "4,000 loads hide behind 200 computed tokens");
    }
    let off = BalancedOptions { bundles: false, ..BalancedOptions::default() };
    let without = Adaptive::new(Predicted, off).decide(&running);
    assert_eq!(ids(&without), [1, 3], "the shared load counts once without bundling too");
}

#[test]
fn the_load_that_is_worth_most_goes_first_and_alone() {
    // A waits for longest; B and C wait for one document; D asks for a short one.
    let all = || {
        [
            waiting(100, &[(1, 9000)], 10),
            waiting(200, &[(2, 9000)], 10),
            waiting(250, &[(2, 9000)], 10),
            waiting(300, &[(4, 9000)], 10),
        ]
    };
    let queue_of =
        |all: [Waiting; 4]| queue(all.map(|waiting| Waiting { arrived: Time(waiting.id.0), ..waiting }));
    let first = queue_of(all());
    assert_eq!(ids(&adaptive().decide(&view(&first))), [200, 250], "no load of another makes the two wait");
    // While the two have waited for 40 ns only, A has for 3.5 times that.
    let early = View { now: Time(240), ..view(&first) };
    assert_eq!(ids(&adaptive().decide(&early)), [100]);
    // Half of the load is worth twice as much.
    let mut shorter = all();
    shorter[3] = waiting(300, &[(4, 3500)], 10);
    assert_eq!(ids(&adaptive().decide(&view(&queue_of(shorter)))), [300]);
    // A higher priority, or too long a wait, is not passed.
    let mut urgent = all();
    urgent[0].priority = 1;
    assert_eq!(ids(&adaptive().decide(&view(&queue_of(urgent)))), [100]);
    let impatient = BalancedOptions { max_wait: Duration::from_nanos(850), ..BalancedOptions::default() };
    assert_eq!(ids(&Adaptive::new(Predicted, impatient).decide(&view(&first))), [100]);
    // By age with the part off, and as the paper has it: whatever fits.
    let off = BalancedOptions { worth: false, ..BalancedOptions::default() };
    assert_eq!(ids(&Adaptive::new(Predicted, off).decide(&view(&first))), [100]);
    assert_eq!(ids(&fixed().decide(&view(&first))), [100, 200, 250, 300]);
}

#[test]
fn a_short_load_joins_a_batch_that_waits_anyway() {
    let queue = queue([waiting(1, &[(1, 9000)], 10), waiting(2, &[(2, 320)], 10)]);
    let prefill = StepCost { per_step: 4e-3, per_token: 280e-6, per_pair: 0.0 };
    let costly = View { prices: Prices { prefill: Some(prefill), ..prices() }, ..view(&queue) };
    assert_eq!(ids(&adaptive().decide(&costly)), [1, 2], "3.2 ms of load for 4 ms of a step of its own");
    let cheap = StepCost { per_step: 3e-3, per_token: 31e-6, per_pair: 0.0 };
    let cheap = View { prices: Prices { prefill: Some(cheap), ..prices() }, ..view(&queue) };
    assert_eq!(ids(&adaptive().decide(&cheap)), [1], "3.2 ms of load for 3 ms");
}

#[test]
fn who_needs_next_to_no_room_passes_one_that_lacks_it() {
    let all =
        || [waiting(1, &[], 4800), waiting(2, &[], 470), waiting(3, &[], 480), waiting(4, &[(1, 160)], 10)];
    let first = queue(all());
    let full = View {
        available_pages: 60,
        limits: Limits { batch_tokens: 2000, ..view(&first).limits },
        ..view(&first)
    };
    // 1 needs 300 pages, 2 needs 30 (not less than a tenth), 3 as many, 4 loads.
    assert_eq!(ids(&adaptive().decide(&full)), [0u64; 0]);
    let mut small = all();
    small[2] = waiting(3, &[], 400);
    let second = queue(small.clone());
    let full = View { waiting: &second, ..full };
    assert_eq!(ids(&adaptive().decide(&full)), [3], "25 of 60 pages");
    assert_eq!(ids(&fixed().decide(&full)), [0u64; 0], "as the paper has it");
    let off = BalancedOptions { passing: false, ..BalancedOptions::default() };
    assert_eq!(ids(&Adaptive::new(Predicted, off).decide(&full)), [0u64; 0]);
    // Not once it has waited for half of what is too long, and nobody of less priority.
    let later = View { now: Time(1) + DEFAULT_MAX_WAIT / 2, ..full };
    assert_eq!(ids(&adaptive().decide(&later)), [0u64; 0]);
    small[0].priority = 1;
    let third = queue(small);
    assert_eq!(ids(&adaptive().decide(&View { waiting: &third, ..full })), [0u64; 0]);
}

#[test]
fn sharing_a_system_prompt_makes_no_bundle_when_adaptive() {
    let queue = queue([
        waiting(1, &[(7, 64), (1, 3000)], 10),
        waiting(2, &[(7, 64), (2, 3000)], 10),
        waiting(3, &[(7, 64)], 120),
    ]);
    let limits = Limits { batch_tokens: 130, ..view(&queue).limits };
    assert_eq!(ids(&adaptive().decide(&View { limits, ..view(&queue) })), [1, 3]);
}

#[test]
fn running_streams_decode_in_the_bubble_of_a_load() {
    let g0 = queue([waiting(1, &[(1, 20_000)], 50)]);
    let empty = queue([]);
    for policy in [&mut fixed() as &mut dyn Policy, &mut adaptive()] {
        // The load starts, running streams go on.
        let start = policy.decide(&View { decodable: &RUNS, running: 1, ..view(&g0) });
        assert_eq!(admitted(&start), [(1, 0)]);
        assert_eq!(start.step, Step::Decode(RUNS.to_vec()));
        // They go on until the rest of the load hides behind 50 tokens.
        let row = |loading| {
            [Prefilling { id: RequestId(1), remaining: 50, context: 20_000, loading, since: Time(0) }]
        };
        let rest = |rows: &[Prefilling], policy: &mut dyn Policy| {
            policy.decide(&View { prefilling: rows, decodable: &RUNS, running: 2, ..view(&empty) }).step
        };
        assert_eq!(rest(&row(10_000), policy), Step::Decode(RUNS.to_vec()));
        let hidden = Step::Prefill(vec![Chunk { id: RequestId(1), tokens: 50 }]);
        assert_eq!(rest(&row(1_000), policy), hidden);
        // Nothing decodable: nothing to wait for.
        let alone = policy.decide(&View { prefilling: &row(10_000), running: 1, ..view(&empty) });
        assert_eq!(alone.step, hidden);
        // Nor for ever: 10,000 tokens are predicted to take 0.1 s.
        let late = View {
            now: Time(400_000_000),
            prefilling: &row(10_000),
            decodable: &RUNS,
            running: 2,
            ..view(&empty)
        };
        assert_eq!(policy.decide(&late).step, hidden);
    }
    // Without anything that decodes, or with bubbles off, the head is prefilled at once.
    assert_eq!(admitted(&adaptive().decide(&view(&g0))), [(1, 50)]);
    let off = BalancedOptions { bubbles: false, ..BalancedOptions::default() };
    let view = View { decodable: &RUNS, running: 1, ..view(&g0) };
    assert_eq!(admitted(&Adaptive::new(Predicted, off).decide(&view)), [(1, 50)]);
}

#[test]
fn with_nobody_behind_it_a_bubble_saves_more_than_the_decode_step_that_it_costs() {
    // 50 tokens hide 1,400 loaded ones, a decode step 100.
    let steps = |loading: u32, behind: &Queue, policy: &mut dyn Policy| {
        let since = Time(0);
        let row = [Prefilling { id: RequestId(1), remaining: 50, context: 20_000, loading, since }];
        let limits = Limits { max_running: 2, ..view(behind).limits };
        let view = View { prefilling: &row, decodable: &RUNS, running: 2, limits, ..view(behind) };
        matches!(policy.decide(&view).step, Step::Decode(_))
    };
    let (nobody, somebody) = (queue([]), queue([waiting(2, &[], 100)]));
    assert_eq!([1_401, 1_499, 1_501].map(|load| steps(load, &nobody, &mut adaptive())), [false, false, true]);
    assert_eq!([1_399, 1_401].map(|load| steps(load, &somebody, &mut adaptive())), [false, true]);
    assert!(steps(5_001, &nobody, &mut fixed()), "the paper's rule knows no time");
}

#[test]
fn all_that_load_in_a_bubble_are_prefilled_in_one_step() {
    let row = |id, loading| Prefilling {
        id: RequestId(id),
        remaining: 50,
        context: 20_000,
        loading,
        since: Time(0),
    };
    let nobody = queue([]);
    let decide = |rows: &[Prefilling], now| {
        let seen = View { now: Time(now), prefilling: rows, decodable: &RUNS, running: 3, ..view(&nobody) };
        let decisions = both(&seen);
        assert_eq!(decisions[0].step, decisions[1].step);
        decisions[0].step.clone()
    };
    let chunk = |id| Chunk { id: RequestId(id), tokens: 50 };
    // The first hides behind its own 50 tokens, but waits for the second; what is there already does not wait.
    assert_eq!(decide(&[row(1, 1_000), row(2, 20_000)], 1000), Step::Decode(RUNS.to_vec()));
    assert_eq!(decide(&[row(1, 0), row(2, 20_000)], 1000), Step::Prefill(vec![chunk(1)]));
    assert_eq!(decide(&[row(1, 1_000), row(2, 1_000)], 1000), Step::Prefill(vec![chunk(1), chunk(2)]));
    // Nor does anybody for longer than twice what the batch still loads, and 0.1 s.
    assert_eq!(
        decide(&[row(1, 1_000), row(2, 20_000)], 600_000_000),
        Step::Prefill(vec![chunk(1), chunk(2)])
    );
}

#[test]
fn what_needs_no_load_is_prefilled_in_the_bubble() {
    let queue = queue([waiting(1, &[(1, 40_000)], 50), waiting(2, &[], 100)]);
    for decision in both(&View { decodable: &RUNS, running: 1, ..view(&queue) }) {
        assert_eq!(decision.step, Step::Prefill(vec![]));
        assert_eq!(admitted(&decision), [(1, 0), (2, 100)]);
    }
}

#[test]
fn of_overdue_followers_one_takes_over() {
    let queue = queue([follower(2, 1, 300, 900), follower(3, 1, 300, 900), follower(4, 9, 150, 900)]);
    for decision in both(&view(&queue)) {
        assert_eq!(ids(&decision), [2, 4]);
        assert_eq!(decision.counts, Counts { deferred: 1, taken_over: 2, ..Counts::default() });
    }
}

#[test]
fn who_was_deferred_goes_to_the_front_of_its_priority() {
    let mut urgent = waiting(4, &[], 10);
    urgent.priority = 1;
    let mut queue = queue([waiting(1, &[], 10), follower(2, 9, 300, 5000), waiting(3, &[], 10), urgent]);
    assert_eq!(ids(&adaptive().decide(&view(&queue))), [4, 1, 3]);
    let published =
        Standing { need: Need { device: 300, compute: 10, ..Need::default() }, ..Standing::default() };
    assert!(queue.update(RequestId(2), Time(700), published));
    assert_eq!(ids(&adaptive().decide(&view(&queue))), [4, 2, 1, 3]);
    assert_eq!((queue.deferrals, queue.deferral), (1, Duration::from_nanos(700)));
}

/// Requests that were deferred, and whose owner has published what they waited for; each computes so many tokens.
fn freed(computes: &[u32]) -> Queue {
    let mut queue = queue((2..).zip(computes).map(|(id, _)| follower(id, 1, 300, 5000)));
    for (id, compute) in (2..).zip(computes) {
        let need = Need { device: 300, compute: *compute, ..Need::default() };
        assert!(queue.update(RequestId(id), Time(700), Standing { need, ..Standing::default() }));
    }
    queue
}

#[test]
fn followers_whose_wait_is_over_go_beside_a_long_running_prompt() {
    let rows =
        |remaining| [Prefilling { id: RequestId(1), remaining, context: 300, ..Prefilling::default() }];
    let decide = |queue: &Queue, remaining: u32, stall: Option<Duration>| {
        let limits = Limits { max_decode_stall: stall, ..view(queue).limits };
        let view = View { prefilling: &rows(remaining), running: 2, decodable: &RUNS, limits, ..view(queue) };
        let decisions = both(&view);
        assert_eq!(decisions[0], decisions[1]);
        let [decision, _] = decisions;
        let Step::Prefill(chunks) = &decision.step else { panic!("{decision:?}") };
        (chunks[0].tokens, admitted(&decision))
    };
    // As many as fit into half of the 512 as a whole, in order.
    assert_eq!(decide(&freed(&[100, 100, 100]), 3000, None), (312, vec![(2, 100), (3, 100)]));
    assert_eq!(decide(&freed(&[256]), 513, None), (256, vec![(2, 256)]));
    // A longer one would stand behind the running prompt all the same.
    assert_eq!(decide(&freed(&[257, 10]), 3000, None), (512, vec![]));
    // A prompt that ends with this batch is not held up.
    assert_eq!(decide(&freed(&[100]), 512, None), (512, vec![]));
    assert_eq!(decide(&freed(&[100]), 450, None), (450, vec![(2, 62)]));
    // Running streams leave 100 tokens: half of these.
    let stall = Some(Duration::from_millis(29));
    assert_eq!(decide(&freed(&[40, 11]), 450, stall), (60, vec![(2, 40)]));
    // 20 tokens: half of these is no chunk.
    assert_eq!(decide(&freed(&[5]), 450, Some(Duration::from_micros(6_700))), (20, vec![]));
    // Who was never deferred does not pass a running prompt, nor does who still is.
    assert_eq!(decide(&queue([waiting(2, &[], 10)]), 3000, None), (512, vec![]));
    assert_eq!(decide(&queue([follower(2, 1, 300, 5000)]), 3000, None), (512, vec![]));
    // No pages for it: nothing is kept free for it.
    let mut large = freed(&[100]);
    let need = Need { device: 300, compute: 100, ..Need::default() };
    large.update(RequestId(2), Time(800), Standing { need, pages: 200_000, ..Standing::default() });
    assert_eq!(decide(&large, 3000, None), (512, vec![]));
    let queue = freed(&[100]);
    let view = View { prefilling: &rows(3000), running: 1, ..view(&queue) };
    for part in ["defer", "followers"] {
        let mut off = BalancedOptions::default();
        assert!(off.turn_off(part));
        assert_eq!(ids(&Adaptive::new(Predicted, off).decide(&view)), [], "{part} off");
    }
    assert_eq!(ids(&adaptive().decide(&view)), [2]);
}

#[test]
fn who_waited_for_too_long_goes_before_any_priority() {
    let mut urgent = waiting(50_000_000_000, &[], 10);
    urgent.priority = 9;
    let queue = queue([urgent, waiting(1, &[], 10)]);
    let view = View { now: Time(60_000_000_002), ..view(&queue) };
    for policy in policies().iter_mut() {
        let decision = policy.decide(&view);
        assert_eq!(ids(&decision), [1, 50_000_000_000], "{}", policy.name());
        assert_eq!(decision.counts.aged, 1);
    }
}

#[test]
fn the_longest_prefix_goes_first_under_lpm() {
    let mut on_device = waiting(3, &[], 40);
    on_device.standing.need.device = 900;
    let queue = queue([waiting(1, &[], 40), waiting(2, &[(1, 600)], 40), on_device]);
    assert_eq!(ids(&LongestPrefixFirst::default().decide(&view(&queue))), [3, 2, 1]);
}

#[test]
fn a_decision_begins_no_more_early_loads_than_it_can_reckon_with() {
    // A running prompt has the batch; 1,000 wait for one document, whose pages count once.
    let rows = [Prefilling { id: RequestId(1), remaining: 3000, ..Prefilling::default() }];
    let queue = queue((2..1002).map(|id| waiting(id, &[(1, 160)], 10)));
    let view = View { prefilling: &rows, running: 1, early_pages: 20, ..view(&queue) };
    let early = adaptive().decide(&view).early;
    assert_eq!(early, (2..34).map(RequestId).collect::<Vec<_>>());
}

#[test]
fn loads_begin_early_where_there_is_room() {
    let queue = queue([
        waiting(1, &[], 512),
        waiting(2, &[(1, 1600)], 10),
        waiting(3, &[(1, 1600)], 10),
        waiting(4, &[(2, 1600)], 10),
    ]);
    let view = View { early_pages: 150, ..view(&queue) };
    let decision = adaptive().decide(&view);
    assert_eq!(admitted(&decision), [(1, 512)]);
    assert_eq!(
        decision.early,
        [RequestId(2), RequestId(3)],
        "what they share takes 100 pages, the fourth 100 more"
    );
    assert!(fixed().decide(&view).early.is_empty());
    let off = BalancedOptions { early_loads: false, ..BalancedOptions::default() };
    assert!(Adaptive::new(Predicted, off).decide(&view).early.is_empty());
}

#[test]
fn a_chunk_is_cut_for_running_streams_and_decode_comes_first_when_time_is_up() {
    let queue = queue([waiting(1, &[], 400)]);
    let most = |millis| Some(Duration::from_millis(millis));
    for policy in policies().iter_mut() {
        let mut decide = |stall, gap| {
            let limits = Limits { max_decode_stall: stall, ..view(&queue).limits };
            let gap = Duration::from_millis(gap);
            policy.decide(&View { limits, decode_gap: gap, decodable: &RUNS, running: 1, ..view(&queue) })
        };
        // 29 ms less the decode step's 1 ms are 100 tokens at 280 us.
        assert_eq!(admitted(&decide(most(29), 0)), [(1, 100)]);
        assert_eq!(admitted(&decide(most(29), 14)), [(1, 50)]);
        assert_eq!(decide(most(29), 28).step, Step::Decode(RUNS.to_vec()));
        // Never below 16 tokens, and prefill has its turn even so.
        assert_eq!(admitted(&decide(most(2), 0)), [(1, 16)]);
        assert_eq!(decide(most(2), 5).step, Step::Decode(RUNS.to_vec()));
        assert_eq!(admitted(&decide(None, 28)), [(1, 400)]);
    }
}

#[test]
fn every_request_is_told_why_it_waits() {
    let mut held = waiting(3, &[], 10);
    held.held = true;
    let queue = queue([
        waiting(1, &[(1, 9000)], 10),
        follower(2, 1, 290, 5_000_000_000),
        held,
        waiting(4, &[(2, 9000)], 10),
        waiting(5, &[], 502),
        waiting(6, &[], 30),
    ]);
    let view = view(&queue);
    let why: Vec<(u64, String)> =
        adaptive().explain(&view).iter().map(|(id, why)| (id.0, why.to_string())).collect();
    let expected = [
        "goes now: 10 tokens in the batch being formed",
        "deferred: request 1 computes 290 of its tokens; it goes on its own in 4999 ms",
        "held back until its prefetch ends: 0 tokens are still on disk",
        "set aside: with it the batch would load 18000 tokens and compute 20, too few to hide the load behind",
        "goes now: 502 tokens in the batch being formed",
        "the batch is full: 512 tokens go before it",
    ];
    assert_eq!(why, (1..).zip(expected.map(String::from)).collect::<Vec<_>>());
    let small = View { available_pages: 5, ..view };
    let why: Vec<Why> = FirstComeFirstServed::default().explain(&small).iter().map(|(_, why)| *why).collect();
    assert_eq!(why[0], Why::NoRoom { pages: 564, available: 5 });
    assert_eq!(why[3], Why::Behind { id: RequestId(1) });
}
