//! The cost model against machines whose costs are known.

use super::*;
use proptest::prelude::*;

const LINK: TransferKind = TransferKind::Load;
const KIB: u64 = 1024;
const MIB: u64 = 1024 * KIB;

/// A repeatable source of sizes and disturbances.
struct Dice(u64);

impl Dice {
    fn unit(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }

    /// Around 1, at most `spread` away.
    fn noise(&mut self, spread: f64) -> f64 {
        1.0 + spread * (2.0 * self.unit() - 1.0)
    }

    /// Every order of magnitude as likely as any other.
    fn size(&mut self, least: u64, most: u64) -> u64 {
        (least as f64 * (most as f64 / least as f64).powf(self.unit())) as u64
    }
}

/// A link as it really is.
#[derive(Clone, Copy)]
struct TrueLink {
    latency: f64,
    bandwidth: f64,
}

const PCIE: TrueLink = TrueLink { latency: 20e-6, bandwidth: 20e9 };
const DISK: TrueLink = TrueLink { latency: 100e-6, bandwidth: 3e9 };
const SLOW: TrueLink = TrueLink { latency: 1e-3, bandwidth: 5e6 };

impl TrueLink {
    fn seconds(self, bytes: u64) -> f64 {
        self.latency + bytes as f64 / self.bandwidth
    }

    fn measure(self, model: &mut CostModel, bytes: u64, factor: f64) {
        model.observe_transfer(LINK, bytes, seconds(self.seconds(bytes) * factor));
    }

    /// How far the model's prediction is from the truth, relative to it.
    fn error(self, model: &CostModel, bytes: u64) -> f64 {
        let predicted = model.predict_transfer(LINK, bytes).unwrap().as_secs_f64();
        (predicted - self.seconds(bytes)).abs() / self.seconds(bytes)
    }
}

/// A machine that computes, as it really is.
#[derive(Clone, Copy)]
struct TrueSteps {
    prefill: StepCost,
    decode: StepCost,
}

/// About SmolLM2 on two cores, in float32.
const CPU: TrueSteps = TrueSteps {
    prefill: StepCost { per_step: 30e-3, per_token: 2e-3, per_pair: 6e-7 },
    decode: StepCost { per_step: 40e-3, per_token: 3e-3, per_pair: 4e-6 },
};
/// About an 8B model on a large GPU.
const GPU: TrueSteps = TrueSteps {
    prefill: StepCost { per_step: 6e-3, per_token: 40e-6, per_pair: 1.5e-9 },
    decode: StepCost { per_step: 7e-3, per_token: 20e-6, per_pair: 4e-8 },
};

impl TrueSteps {
    fn seconds(self, shape: &StepShape) -> f64 {
        let cost = if shape.new_tokens <= u64::from(shape.rows) { self.decode } else { self.prefill };
        cost.per_step + cost.per_token * shape.new_tokens as f64 + cost.per_pair * shape.attended as f64
    }

    fn measure(self, model: &mut CostModel, shape: &StepShape, factor: f64) {
        model.observe_step(shape, seconds(self.seconds(shape) * factor));
    }

    fn error(self, model: &CostModel, shape: &StepShape) -> f64 {
        let predicted = model.predict_step(shape).unwrap().as_secs_f64();
        (predicted - self.seconds(shape)).abs() / self.seconds(shape)
    }
}

fn batch(rows: u32, new_tokens: u64, context: u64) -> StepShape {
    let mut shape = StepShape::default();
    (0..rows).for_each(|_| shape.add(StepShape::row(new_tokens, context)));
    shape
}

fn near(actual: f64, wanted: f64, tolerance: f64, what: &str) {
    assert!((actual / wanted - 1.0).abs() <= tolerance, "{what}: {actual} instead of {wanted}");
}

#[test]
fn nothing_is_predicted_that_was_not_measured() {
    let mut model = CostModel::new(CostPrior::default());
    assert_eq!(model.predict_step(&batch(1, 100, 0)), None);
    assert_eq!(model.predict_prefill(100, 0, 0), None);
    assert_eq!((model.predict_transfer(LINK, MIB), model.bandwidth(LINK)), (None, None));
    model.observe_transfer(LINK, 0, Duration::from_secs(1));
    model.observe_step(&StepShape::default(), Duration::from_secs(1));
    assert_eq!(model.report(), CostModel::new(CostPrior::default()).report());
    PCIE.measure(&mut model, MIB, 1.0);
    near(model.predict_transfer(LINK, MIB).unwrap().as_secs_f64(), PCIE.seconds(MIB), 0.01, "the one seen");
    assert_eq!(model.predict_transfer(TransferKind::Backup, MIB), None, "each link for itself");
    CPU.measure(&mut model, &batch(4, 1, 100), 1.0);
    assert_eq!(model.predict_step(&batch(1, 100, 0)), None, "decode says nothing about prefill");
}

#[test]
fn a_links_latency_and_bandwidth_are_recovered_from_noise() {
    for (seed, link) in [PCIE, DISK, SLOW].into_iter().enumerate() {
        let (mut model, mut dice) = (CostModel::new(CostPrior::default()), Dice(seed as u64));
        for _ in 0..200 {
            link.measure(&mut model, dice.size(KIB, 256 * MIB), dice.noise(0.1));
        }
        let cost = model.report().links[0].1.cost.unwrap();
        near(cost.latency, link.latency, 0.05, "latency");
        near(model.bandwidth(LINK).unwrap(), link.bandwidth, 0.05, "bandwidth");
    }
}

#[test]
fn rare_sizes_are_not_drowned_by_common_ones() {
    // 15 of 16 are tiny, or huge; the others still tell the other coefficient.
    for (common, rare) in [(4 * KIB, 64 * MIB), (64 * MIB, 4 * KIB)] {
        let (mut model, mut dice) = (CostModel::new(CostPrior::default()), Dice(common));
        for number in 0..320 {
            let bytes = if number % 16 == 5 { rare } else { common };
            DISK.measure(&mut model, bytes, dice.noise(0.1));
        }
        for bytes in [common, rare] {
            assert!(DISK.error(&model, bytes) < 0.1, "{bytes}: {}", DISK.error(&model, bytes));
        }
    }
}

#[test]
fn the_costs_of_steps_are_recovered_from_noise() {
    for (seed, machine) in [CPU, GPU].into_iter().enumerate() {
        let (mut model, mut dice) = (CostModel::new(CostPrior::default()), Dice(seed as u64));
        for _ in 0..400 {
            let (rows, new_tokens) = (1 + dice.size(1, 4) as u32, dice.size(8, 2048));
            let context = dice.size(1, 32_768);
            machine.measure(&mut model, &batch(rows, new_tokens, context), dice.noise(0.1));
            machine.measure(&mut model, &batch(dice.size(1, 64) as u32, 1, context), dice.noise(0.1));
        }
        for new_tokens in [16, 128, 1024] {
            for context in [0, 1000, 16_000] {
                let error = machine.error(&model, &batch(1, new_tokens, context));
                assert!(error < 0.05, "{new_tokens} after {context}: {error}");
            }
        }
        for rows in [1, 8, 64] {
            let error = machine.error(&model, &batch(rows, 1, 4000));
            assert!(error < 0.05, "decode of {rows}: {error}");
        }
        let cost = model.report().prefill.cost.unwrap();
        near(cost.per_token, machine.prefill.per_token, 0.05, "per token");
        near(cost.per_pair, machine.prefill.per_pair, 0.05, "per pair");
        near(cost.per_step, machine.prefill.per_step, 0.05, "per step");
    }
}

#[test]
fn a_long_decode_does_not_displace_what_prefill_costs() {
    let (mut model, mut dice) = (CostModel::new(CostPrior::default()), Dice(1));
    for _ in 0..50 {
        CPU.measure(&mut model, &batch(1, dice.size(8, 512), dice.size(1, 4000)), dice.noise(0.05));
    }
    let before = model.predict_prefill(1000, 2000, 512);
    for step in 0..5000 {
        CPU.measure(&mut model, &batch(8, 1, 2000 + step), dice.noise(0.05));
    }
    assert_eq!(model.predict_prefill(1000, 2000, 512), before);
    assert!(CPU.error(&model, &batch(8, 1, 7000)) < 0.05);
}

#[test]
fn chunks_of_a_prompt_cost_what_their_steps_cost() {
    let model = CostModel::new(CostPrior { prefill: Some(CPU.prefill), ..CostPrior::default() });
    let whole = model.predict_prefill(1000, 3000, 0).unwrap().as_secs_f64();
    near(whole, CPU.seconds(&StepShape::row(1000, 3000)), 1e-6, "in one step");
    let parts = [(400, 3000), (400, 3400), (200, 3800)];
    let steps: f64 = parts.iter().map(|(new, context)| CPU.seconds(&StepShape::row(*new, *context))).sum();
    near(model.predict_prefill(1000, 3000, 400).unwrap().as_secs_f64(), steps, 1e-6, "in three");
    assert_eq!(model.predict_prefill(0, 3000, 400), Some(Duration::ZERO));
}

#[test]
fn one_measurement_far_off_hardly_matters() {
    for factor in [50.0, 0.02] {
        for place in [5, 12, 40, 100] {
            let (mut model, mut dice) = (CostModel::new(CostPrior::default()), Dice(place));
            for number in 0..place {
                DISK.measure(&mut model, dice.size(4 * KIB, 64 * MIB), dice.noise(0.05));
                CPU.measure(&mut model, &batch(1, 64 + 30 * (number % 8), 500), dice.noise(0.05));
            }
            let sizes = [4 * KIB, MIB, 64 * MIB];
            let shape = batch(1, 200, 500);
            let before = sizes.map(|bytes| model.predict_transfer(LINK, bytes).unwrap().as_secs_f64());
            let step = model.predict_step(&shape).unwrap().as_secs_f64();
            DISK.measure(&mut model, dice.size(4 * KIB, 64 * MIB), factor);
            CPU.measure(&mut model, &shape, factor);
            for (bytes, before) in sizes.into_iter().zip(before) {
                let after = model.predict_transfer(LINK, bytes).unwrap().as_secs_f64();
                near(
                    after,
                    before,
                    0.02 + 0.2 / place as f64,
                    &format!("{bytes} bytes, x{factor} after {place}"),
                );
            }
            let after = model.predict_step(&shape).unwrap().as_secs_f64();
            near(after, step, 0.02 + 0.2 / place as f64, &format!("step, x{factor} after {place}"));
        }
    }
}

#[test]
fn a_fifth_of_measurements_far_off_hardly_matters() {
    for seed in 0..10 {
        let (mut model, mut dice) = (CostModel::new(CostPrior::default()), Dice(seed));
        for number in 0..300 {
            let off = if dice.unit() < 0.2 { 2.0 + 30.0 * dice.unit() } else { dice.noise(0.1) };
            DISK.measure(&mut model, dice.size(4 * KIB, 64 * MIB), off);
            if number > 60 {
                for bytes in [4 * KIB, MIB, 64 * MIB] {
                    assert!(DISK.error(&model, bytes) < 0.1, "{number}: {}", DISK.error(&model, bytes));
                }
            }
        }
        assert_eq!(model.report().links[0].1.changes, 0, "bad luck is no change");
    }
}

/// Measurements after a lasting change until every later prediction is within a fifth of the truth.
fn followed_after(before: TrueLink, after: TrueLink, sizes: (u64, u64), seed: u64) -> usize {
    let (mut model, mut dice) = (CostModel::new(CostPrior::default()), Dice(seed));
    for _ in 0..300 {
        before.measure(&mut model, dice.size(sizes.0, sizes.1), dice.noise(0.1));
    }
    let mut last_wrong = 0;
    for number in 1..=100 {
        after.measure(&mut model, dice.size(sizes.0, sizes.1), dice.noise(0.1));
        let error = [sizes.0, (sizes.0 + sizes.1) / 2, sizes.1].map(|bytes| after.error(&model, bytes));
        if error.into_iter().any(|error| error > 0.2) {
            last_wrong = number;
        }
    }
    last_wrong
}

#[test]
fn a_lasting_change_of_a_link_is_followed() {
    for link in [PCIE, DISK, SLOW] {
        for factor in [4.0, 0.25] {
            let changed = TrueLink { latency: link.latency, bandwidth: link.bandwidth * factor };
            for seed in 0..20 {
                let alike = followed_after(link, changed, (16 * MIB, 16 * MIB), seed);
                assert!(alike <= 10, "transfers of one size, bandwidth x{factor}: {alike}");
                let mixed = followed_after(link, changed, (64 * KIB, 64 * MIB), seed);
                assert!(mixed <= 20, "of all sizes, bandwidth x{factor}: {mixed}");
            }
        }
    }
}

#[test]
fn a_lasting_change_of_the_machine_is_followed() {
    for factor in [4.0, 0.25] {
        let (mut model, mut dice) = (CostModel::new(CostPrior::default()), Dice(9));
        let mut step = |model: &mut CostModel, factor: f64| {
            let shape = batch(1, dice.size(16, 1024), dice.size(1, 8000));
            CPU.measure(model, &shape, factor * dice.noise(0.1));
        };
        (0..200).for_each(|_| step(&mut model, 1.0));
        (0..10).for_each(|_| step(&mut model, factor));
        for (new_tokens, context) in [(64, 0), (512, 2000), (1024, 8000)] {
            let shape = batch(1, new_tokens, context);
            let predicted = model.predict_step(&shape).unwrap().as_secs_f64();
            near(predicted, CPU.seconds(&shape) * factor, 0.2, "after ten steps");
        }
        assert_eq!(model.report().prefill.changes, 1);
    }
}

#[test]
fn the_error_is_reported_as_it_is() {
    let mut model = CostModel::new(CostPrior::default());
    DISK.measure(&mut model, MIB, 1.0);
    assert_eq!(model.report().links[0].1.relative_error, None, "nothing was predicted yet");
    let mut dice = Dice(5);
    let mut errors = Vec::new();
    for _ in 0..300 {
        let (bytes, factor) = (dice.size(4 * KIB, 64 * MIB), dice.noise(0.3));
        let predicted = model.predict_transfer(LINK, bytes).unwrap().as_secs_f64();
        let actual = seconds(DISK.seconds(bytes) * factor);
        model.observe_transfer(LINK, bytes, actual);
        errors.push((predicted - actual.as_secs_f64()).abs() / actual.as_secs_f64());
    }
    let mut latest = errors[errors.len() - 64..].to_vec();
    latest.sort_by(f64::total_cmp);
    let reported = model.report().links[0].1;
    let error = reported.relative_error.unwrap();
    near(error.median, latest[31], 1e-3, "the median of the latest");
    near(error.p90, latest[57], 1e-3, "58 of 64 are at most nine tenths of them");
    assert!((0.1..0.25).contains(&error.median), "noise of 30% is not hidden");
    assert_eq!((reported.observations, reported.changes), (301, 0));
}

#[test]
fn a_prior_holds_until_measurements_outnumber_it() {
    let cost = LinkCost { latency: 1e-4, per_byte: 1.0 / 3e9 };
    let mut model = CostModel::new(CostPrior::default().with_link(LINK, cost));
    for bytes in [1, MIB, 1000 * MIB] {
        assert!(DISK.error(&model, bytes) < 1e-3);
    }
    assert_eq!(model.report().links[0].1.observations, 0);
    DISK.measure(&mut model, MIB, 50.0);
    assert!(DISK.error(&model, 64 * MIB) < 0.1, "a first measurement far off");
    (0..10).for_each(|_| SLOW.measure(&mut model, MIB, 1.0));
    assert!(SLOW.error(&model, MIB) < 0.1, "a prior that was wrong");
}

#[test]
fn measurements_of_one_size_hold_for_other_sizes_in_reason() {
    let (mut model, mut dice) = (CostModel::new(CostPrior::default()), Dice(2));
    for _ in 0..200 {
        DISK.measure(&mut model, 16 * MIB, dice.noise(0.1));
    }
    assert!(DISK.error(&model, 16 * MIB) < 0.05);
    assert!(DISK.error(&model, 64 * MIB) < 0.1);
    let tiny = model.predict_transfer(LINK, 4 * KIB).unwrap().as_secs_f64();
    assert!(tiny < DISK.seconds(16 * MIB) / 10.0, "not all of it is latency: {tiny}");
}

fn any_size() -> impl Strategy<Value = u64> {
    prop_oneof![Just(0), Just(1), Just(u64::MAX), 0..10_000u64, any::<u64>()]
}

proptest! {
    #[test]
    fn no_input_breaks_the_model(
        transfers in prop::collection::vec((0usize..5, any_size(), any_size()), 0..200),
        steps in prop::collection::vec((any_size(), any_size(), any::<u32>(), any_size()), 0..200),
        asked in prop::collection::vec((any_size(), any_size(), any_size()), 1..20),
    ) {
        let mut model = CostModel::new(CostPrior::default());
        for (link, bytes, nanoseconds) in transfers {
            model.observe_transfer(LINKS[link], bytes, Duration::from_nanos(nanoseconds));
        }
        for (new_tokens, attended, rows, seconds) in steps {
            model.observe_step(&StepShape { new_tokens, attended, rows }, Duration::from_secs(seconds));
        }
        let report = model.report();
        for (_, link) in report.links {
            prop_assert!(link.cost.is_none_or(|c| c.latency.is_finite() && c.latency >= 0.0));
            prop_assert!(link.cost.is_none_or(|c| c.per_byte.is_finite() && c.per_byte >= 0.0));
            prop_assert!(link
                .relative_error
                .is_none_or(|error| error.p90.is_finite() && 0.0 <= error.median && error.median <= error.p90));
        }
        for step in [report.prefill, report.decode] {
            if let Some(StepCost { per_step, per_token, per_pair }) = step.cost {
                prop_assert!([per_step, per_token, per_pair].iter().all(|c| c.is_finite() && *c >= 0.0));
            }
        }
        for (new_tokens, context, chunk) in asked {
            // Never panics, and known once anything was measured.
            prop_assert_eq!(
                model.predict_prefill(new_tokens, context, chunk).is_some(),
                report.prefill.cost.is_some()
            );
            let shape = StepShape { new_tokens, attended: context, rows: chunk as u32 };
            prop_assert!(model.predict_step(&shape).is_some() || report.prefill.cost.is_none());
            prop_assert!(model.bandwidth(LINK).is_none_or(|bandwidth| bandwidth > 0.0));
        }
    }

    #[test]
    fn more_never_takes_less(
        transfers in prop::collection::vec((1u64..1 << 30, 1u64..1 << 32), 1..80),
        steps in prop::collection::vec((2u64..4096, 0u64..100_000, 1u64..1 << 33), 1..80),
        sizes in (0u64..1 << 32, 0u64..1 << 32), tokens in (0u64..9000, 0u64..9000),
        contexts in (0u64..200_000, 0u64..200_000), chunk in 1u64..2048,
    ) {
        let mut model = CostModel::new(CostPrior::default());
        for (bytes, nanoseconds) in &transfers {
            model.observe_transfer(LINK, *bytes, Duration::from_nanos(*nanoseconds));
        }
        for (new_tokens, context, nanoseconds) in &steps {
            model.observe_step(&StepShape::row(*new_tokens, *context), Duration::from_nanos(*nanoseconds));
        }
        let ordered = |(one, other): (u64, u64)| (one.min(other), one.max(other));
        let (fewer, more) = ordered(sizes);
        prop_assert!(model.predict_transfer(LINK, fewer) <= model.predict_transfer(LINK, more));
        let ((fewer, more), (shorter, longer)) = (ordered(tokens), ordered(contexts));
        let least = model.predict_prefill(fewer, shorter, chunk);
        prop_assert!(least <= model.predict_prefill(more, shorter, chunk));
        prop_assert!(least <= model.predict_prefill(fewer, longer, chunk));
        prop_assert!(model.predict_prefill(more, longer, chunk + 1) <= model.predict_prefill(more, longer, chunk));
    }

    /// Equal measurements, equal predictions.
    #[test]
    fn nothing_is_left_to_chance(transfers in prop::collection::vec((1u64..1 << 30, 1u64..1 << 32), 1..100)) {
        let mut models = [CostModel::new(CostPrior::default()), CostModel::new(CostPrior::default())];
        for (bytes, nanoseconds) in &transfers {
            for model in &mut models {
                model.observe_transfer(LINK, *bytes, Duration::from_nanos(*nanoseconds));
            }
        }
        prop_assert_eq!(models[0].report(), models[1].report());
    }
}
