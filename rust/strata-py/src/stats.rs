//! Counters and gauges as one flat dictionary: names are the metrics' names without their prefix.

use std::collections::BTreeMap;
use strata_control::HIT_AGES_S;
use strata_core::CoreStats;
use strata_disk::DiskStats;
use strata_sched::cost::{CostReport, Measured};
use strata_types::{TierId, TransferKind};

/// Flattens everything that is counted. Values are exact up to 2^53.
pub fn flatten(core: &CoreStats, completions_lost: u64, disk: Option<&DiskStats>) -> BTreeMap<String, f64> {
    let mut flat = BTreeMap::new();
    let mut put = |name: String, value: u64| {
        flat.insert(name, value as f64);
    };
    let plain = [
        ("waiting", core.waiting as u64),
        ("held", core.held as u64),
        ("running", core.running as u64),
        ("admissions", core.admissions),
        ("finished", core.finished),
        ("aborted", core.aborted),
        ("refused", core.refused),
        ("preemptions", core.preemptions),
        ("deferrals", core.deferrals),
        ("deferred_ns", u64::try_from(core.deferral.as_nanos()).unwrap_or(u64::MAX)),
        ("deferred_rounds", core.rounds.deferred),
        ("set_aside_rounds", core.rounds.set_aside),
        ("aged_requests", core.rounds.aged),
        ("taken_over_requests", core.rounds.taken_over),
        ("early_loads", core.early_loads),
        ("plans", core.plans),
        ("plans_discarded", core.plans_discarded),
        ("prefetch_timeouts", core.prefetch_timeouts),
        ("recomputed_tokens_host", core.recomputed_tokens[TierId::HOST.index()]),
        ("recomputed_tokens_disk", core.recomputed_tokens[TierId::DISK.index()]),
        ("load_stall_ns", u64::try_from(core.load_stall.as_nanos()).unwrap_or(u64::MAX)),
        ("unsaved_pages_device", core.control.unsaved_pages[0]),
        ("unsaved_pages_host", core.control.unsaved_pages[1]),
        ("staged_pages", core.control.staged_pages),
        ("disk_over_budget_pages", core.control.over_budget_pages),
        ("generated_tokens", core.generated_tokens),
        ("transfers_in_flight", core.transfers_in_flight as u64),
        ("corrupt_records", core.control.corrupt_records),
        ("unknown_completions", core.control.unknown_completions),
        ("completions_lost", completions_lost),
    ];
    for (name, value) in plain {
        put(name.into(), value);
    }
    for (source, tokens) in ["device", "host", "disk", "computed"].iter().zip(core.prompt_tokens) {
        put(format!("prompt_tokens_{source}"), tokens);
    }
    for kind in [
        TransferKind::Load,
        TransferKind::Backup,
        TransferKind::Spill,
        TransferKind::Prefetch,
        TransferKind::Erase,
    ] {
        let edge = core.control.edge(kind);
        let fields = [
            ("started", edge.started),
            ("completed", edge.completed),
            ("failed", edge.failed),
            ("cancelled", edge.cancelled),
            ("pages", edge.pages),
            ("bytes", edge.bytes),
            ("busy_ns", edge.busy_ns),
            ("skipped_pages", edge.skipped_pages),
        ];
        for (field, value) in fields {
            put(format!("{}_{field}", kind.name()), value);
        }
    }
    for (index, tier) in core.tiers.iter().enumerate() {
        let name = TierId(index as u8).name();
        let fields = [
            ("capacity_pages", u64::from(tier.capacity)),
            ("used_pages", u64::from(tier.used)),
            ("resident_pages", u64::from(tier.resident)),
            ("pinned_pages", u64::from(tier.pinned)),
            ("quarantined_pages", u64::from(tier.quarantined)),
            ("evicted_pages", tier.evicted),
        ];
        for (field, value) in fields {
            put(format!("{name}_{field}"), value);
        }
    }
    // Cumulative, as Prometheus has them.
    let ages = &core.control.hit_ages;
    let mut hits = 0;
    for (end, count) in HIT_AGES_S.iter().zip(ages.hits) {
        hits += count;
        put(format!("hit_age_le_{end}"), hits);
    }
    put("hit_age_count".into(), ages.hits.iter().sum());
    put("hit_age_sum_s".into(), ages.total_ns / 1_000_000_000);
    if let Some(disk) = disk {
        let fields = [
            ("bytes_read", disk.bytes_read),
            ("bytes_written", disk.bytes_written),
            ("io_errors", disk.io_errors),
            ("checksum_failures", disk.checksum_failures),
            ("syncs", disk.syncs),
            ("usage_bytes", disk.disk_usage_bytes),
            ("segments", disk.segments),
            ("out_of_service", disk.out_of_service),
            ("returned_to_service", disk.returned_to_service),
            ("lost_completions", disk.lost_completions),
            ("unknown_completions", disk.unknown_completions),
        ];
        for (field, value) in fields {
            put(format!("disk_{field}"), value);
        }
    }
    flat.extend(core.costs.iter().flat_map(learnt));
    flat
}

/// What the cost model has learnt, and how far off its latest predictions were. What it does not know is left out.
fn learnt(costs: &CostReport) -> Vec<(String, f64)> {
    let mut flat = Vec::new();
    let mut put = |name: &str, field: &str, value: Option<f64>| {
        flat.extend(value.map(|value| (format!("cost_{name}_{field}"), value)));
    };
    for (kind, link) in &costs.links {
        put(kind.name(), "s_per_transfer", link.cost.map(|cost| cost.latency));
        put(kind.name(), "bytes_per_s", link.cost.and_then(|cost| cost.bandwidth()));
        quality(link, |field, value| put(kind.name(), field, value));
    }
    for (name, step) in [("prefill", &costs.prefill), ("decode", &costs.decode)] {
        put(name, "s_per_step", step.cost.map(|cost| cost.per_step));
        put(name, "s_per_token", step.cost.map(|cost| cost.per_token));
        put(name, "s_per_pair", step.cost.map(|cost| cost.per_pair));
        quality(step, |field, value| put(name, field, value));
    }
    flat
}

/// On how many measurements a prediction rests, and how good it was lately.
fn quality<Cost>(measured: &Measured<Cost>, mut put: impl FnMut(&str, Option<f64>)) {
    put("measurements", Some(measured.observations as f64));
    put("changes", Some(measured.changes as f64));
    put("error_median", measured.relative_error.map(|error| error.median));
    put("error_p90", measured.relative_error.map(|error| error.p90));
}
