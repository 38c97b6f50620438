//! `Runtime`: Core on its thread, with the host arena, the device's Mover and the disk store of one engine.

use crate::device_edge::DeviceEdge;
use crate::disk::DiskKeeper;
use crate::error::{Failure, Outcome};
use crate::gate::released;
use crate::host_arena::{shape_of, HostArena, HostMemory};
use crate::lease::Lease;
use crate::link::LinkState;
use crate::memory::{device_region, HostPages, LayerHold};
use crate::options::Options;
use crate::plan::{Plan, Refusal};
use crate::pools::Pools;
use crate::stats::flatten;
use crate::transfer_queue::TransferQueue;
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use strata_control::ControlConfig;
use strata_copy::{Region, Throttle};
use strata_core::{
    Core, CoreConfig, Driver, DriverError, DriverHandle, MaintenanceReport, Movers, NewRequest, RowResult,
    StepFailure, StepTime, WaitingReport, Work,
};
use strata_disk::{DiskConfig, Geometry};
use strata_tier::completion_queue;
use strata_types::{KvLayout, KvShape, Namespace, PlanId, RequestId, TierId};

/// Completions that may wait for Core. Core drains them in microseconds; a Mover that finds no room waits.
const COMPLETIONS: usize = 4096;
/// Bytes and pages of one transfer.
const TRANSFER_BYTES: u64 = 24 << 20;
const MOST_TRANSFER_PAGES: u32 = 256;
/// How long an eviction waits for write-back at most.
const SAVE_PATIENCE: Duration = Duration::from_secs(2);
/// Memory of each pool that is mapped before it is needed: a few long documents, well under any pool's own cap.
pub const WARM_BYTES: u64 = 1 << 30;

/// Core, its thread and its Movers. All methods may be called from any thread.
#[pyclass(frozen, module = "strata._core")]
pub struct Runtime {
    handle: DriverHandle,
    driver: Mutex<Option<Driver>>,
    edge: DeviceEdge,
    disk: DiskKeeper,
    pools: Pools,
    link: LinkState,
    options: Options,
    shape: KvShape,
    page_size: usize,
}

/// Pages of one transfer: enough bytes to keep a disk busy, few enough to commit early, to cut, and to tell how it
/// goes.
pub fn transfer_pages(shape: KvShape) -> u32 {
    u32::try_from(TRANSFER_BYTES / shape.page_bytes() as u64)
        .unwrap_or(u32::MAX)
        .clamp(1, MOST_TRANSFER_PAGES)
}

/// What a page's write to disk takes: its payload, its header, and the header that had to be cleared before.
fn record_bytes(shape: KvShape) -> u64 {
    let page_bytes = u32::try_from(shape.page_bytes()).unwrap_or(u32::MAX);
    let geometry = Geometry { page_size: shape.page_size, page_bytes, records_per_segment: 1 };
    geometry.payload_slot() + 2 * geometry.header_slot()
}

/// The disk store's settings, or why there is to be none.
fn disk_config(options: &Options, shape: KvShape) -> Outcome<Result<DiskConfig, String>> {
    let Some(root) = options.disk_path.clone().filter(|_| options.disk_capacity > 0) else {
        return Ok(Err("--disk-capacity is 0".into()));
    };
    Ok(Ok(disk_config_at(options, shape, root, options.disk_capacity)?))
}

fn disk_config_at(options: &Options, shape: KvShape, root: PathBuf, capacity: u64) -> Outcome<DiskConfig> {
    let page_bytes = u32::try_from(shape.page_bytes()).map_err(|_| {
        let bytes = shape.page_bytes();
        Failure::Config(format!("a page of {bytes} bytes is too large for a record: lower --page-size"))
    })?;
    let mut config = DiskConfig::new(root, capacity, options.fingerprint(), options.page_size, page_bytes);
    options.apply_to_disk(&mut config)?;
    Ok(config)
}

/// Who moves pages on the device's edge, before it is started.
enum Carrier {
    /// Copy threads over the device pool, slowed down by this. What a test slows down is no link to be measured.
    Threads { device: Region, throttle: Arc<dyn Throttle>, measured: bool },
    /// An executor in Python that knows where the device pool is.
    Executor { queue: Arc<strata_tier::TransferQueue> },
}

impl Runtime {
    fn build(options: &Options, carrier: Carrier, host: Option<HostMemory>) -> Outcome<Runtime> {
        let shape = shape_of(options)?;
        let group = shape.group;
        let device_layout = KvLayout::layer_first(shape, options.device_pages)?;
        let host = host.map_or_else(|| HostMemory::map(options, false), Ok)?;
        let (sender, receiver) = completion_queue(COMPLETIONS);
        let (edge, device, measured) = match carrier {
            Carrier::Threads { device, throttle, measured } => {
                let pool = (device.clone(), device_layout);
                let edge = DeviceEdge::threads(options, pool, &host, throttle, sender.clone())?;
                (edge, Some(device), measured)
            }
            Carrier::Executor { queue } => (DeviceEdge::executor(queue, sender.clone())?, None, true),
        };
        // An emulated link is found out like any other: by what it does.
        let link = match measured && options.host_pages > 0 {
            true => LinkState::measure(
                &*edge.mover(),
                &receiver,
                shape,
                [options.host_pages, options.device_pages],
            )?,
            false => LinkState::default(),
        };
        let core = Core::new(CoreConfig {
            control: ControlConfig {
                page_size: options.page_size,
                group,
                layers: options.layers,
                page_bytes: shape.page_bytes() as u64,
                record_bytes: record_bytes(shape),
                pages: [options.device_pages, options.host_pages, 0],
                staging_pages: host.staging_pages,
                device_shards: 1,
                backup: options.write_policy("--write-policy", &options.write_policy)?,
                spill: options.write_policy("--disk-write-policy", &options.disk_write_policy)?,
                save_patience: SAVE_PATIENCE,
                disk_bytes_per_day: Some(options.disk_bytes_per_day).filter(|limit| *limit > 0),
                transfer_pages: transfer_pages(shape),
                ghost_pages: 2 * options.device_pages as usize,
            },
            policy: options.policy()?,
            limits: options.limits(),
            early_share: options.early_share,
            deferral_factor: options.deferral_factor,
            outstanding_plans: options.outstanding_plans,
            max_waiting: options.max_waiting,
            prefetch_policy: options.prefetch_policy()?,
            prefetch_share: options.prefetch_share,
            costs: link.prior(),
            always_loads: options.always_loads()?,
        })?;
        let movers = Movers { device: edge.mover(), disk: None };
        let driver = Driver::start(core, movers, receiver, options.outstanding_plans)
            .map_err(|error| Failure::Capacity(format!("cannot start the core's thread: {error}")))?;
        let disk_pages = Arc::new(HostPages { region: host.region(), layout: host.layout });
        let disk = DiskKeeper::start(driver.handle(), disk_pages, sender, disk_config(options, shape)?)?;
        Ok(Runtime {
            handle: driver.handle(),
            driver: Mutex::new(Some(driver)),
            edge,
            disk,
            pools: Pools::new(device, device_layout, host),
            link,
            options: options.clone(),
            shape,
            page_size: options.page_size as usize,
        })
    }
}

pub fn seconds(value: f64) -> Duration {
    // The second bound is for what is not a number.
    Duration::from_secs_f64(value.clamp(0.0, 86_400.0).max(0.0))
}

fn tiers(names: &[String]) -> Outcome<Vec<TierId>> {
    let tier = |name: &String| match name.as_str() {
        "device" => Ok(TierId::DEVICE),
        "host" => Ok(TierId::HOST),
        "disk" => Ok(TierId::DISK),
        other => Err(Failure::Request(format!("there is no tier {other:?}: name device, host or disk"))),
    };
    names.iter().map(tier).collect()
}

fn report(done: MaintenanceReport) -> BTreeMap<String, u64> {
    let mut flat = BTreeMap::from([
        ("timed_out".to_string(), u64::from(done.timed_out)),
        ("not_erased".to_string(), done.not_erased),
    ]);
    for (index, emptied) in done.emptied.iter().enumerate() {
        let name = TierId(index as u8).name();
        flat.insert(format!("{name}_moved"), done.moved[index] as u64);
        flat.insert(format!("{name}_dropped"), u64::from(emptied.pages));
        flat.insert(format!("{name}_kept"), u64::from(emptied.kept));
    }
    flat
}

#[pymethods]
impl Runtime {
    /// Starts Core over a device pool at `device_address`, memory of `device_owner`. `options` has every field of
    /// `strata._core`'s stub; `hold` stops transfers for tests. With `mover` its executor carries pages between the pool
    /// and `arena`, which was made with the same options, instead of copy threads: it must be taking transfers by now,
    /// and neither pool gives memory back when it shrinks. Raises ConfigError, CapacityError, StorageError.
    #[new]
    #[pyo3(signature = (options, device_address, device_bytes, device_owner, hold = None, mover = None, arena = None))]
    #[allow(clippy::too_many_arguments)]
    fn new(
        py: Python<'_>,
        options: Options,
        device_address: usize,
        device_bytes: usize,
        device_owner: Py<PyAny>,
        hold: Option<&Bound<'_, LayerHold>>,
        mover: Option<&Bound<'_, TransferQueue>>,
        arena: Option<&Bound<'_, HostArena>>,
    ) -> Outcome<Runtime> {
        let host = arena.map(|arena| arena.get().memory.clone());
        if host.as_ref().is_some_and(|host| !host.is_for(&options)) {
            let text = "the arena was made for other pages: make it with the options of the Runtime";
            return Err(Failure::Config(text.into()));
        }
        let carrier = match mover {
            None => Carrier::Threads {
                device: device_region(device_address, device_bytes, device_owner)?,
                throttle: options.throttle(hold),
                measured: hold.is_none(),
            },
            Some(_) if host.is_none() || hold.is_some() => {
                let text = "a mover needs the arena that its executor knows, and has no layer to hold";
                return Err(Failure::Config(text.into()));
            }
            Some(mover) => Carrier::Executor { queue: Arc::clone(&mover.get().queue) },
        };
        released(py, || Runtime::build(&options, carrier, host))
    }

    /// Queues a request; a refusal comes back as work. Raises CapacityError if the queue of commands is full.
    fn submit(
        &self,
        request: u64,
        prompt: PyReadonlyArray1<'_, u32>,
        max_new_tokens: usize,
        salt: &str,
        priority: i32,
        keep: bool,
    ) -> PyResult<()> {
        let new = NewRequest {
            id: RequestId(request),
            namespace: Namespace::new(salt, ""),
            prompt: prompt.as_slice()?.to_vec(),
            max_new_tokens,
            priority,
            keep,
        };
        Ok(self.handle.submit(new).map_err(Failure::from)?)
    }

    /// Looks `tokens` (uint32, contiguous) up for an engine that schedules for itself, and keeps what is found where it
    /// is until the Lease is released. Raises StrataError once the core has stopped.
    fn lease(&self, py: Python<'_>, tokens: PyReadonlyArray1<'_, u32>, salt: &str) -> PyResult<Lease> {
        let (tokens, namespace) = (tokens.as_slice()?.to_vec(), Namespace::new(salt, ""));
        let open = || Lease::open(self.handle.clone(), self.page_size, namespace, tokens);
        Ok(released(py, open)?)
    }

    /// Tells whoever waits for a lease's load or reservation, and whoever will, that the cache is closed: they get a
    /// StrataError. For `close`, which may take a while before it stops the core.
    fn refuse_waiting_leases(&self, py: Python<'_>) -> Outcome<()> {
        match released(py, || self.handle.refuse_waiting_leases()) {
            // Whoever waited has heard of that.
            Err(DriverError::Stopped(_)) => Ok(()),
            done => Ok(done?),
        }
    }

    /// Gives a request up. Unknown and finished requests are ignored.
    fn abort(&self, py: Python<'_>, request: u64) -> Outcome<()> {
        Ok(released(py, || self.handle.abort(RequestId(request)))?)
    }

    /// The next Plan or Refusal, or None within `timeout_s` seconds. Raises StrataError once the core has stopped.
    fn next_work(&self, py: Python<'_>, timeout_s: f64) -> PyResult<Option<Py<PyAny>>> {
        let limit = seconds(timeout_s);
        let page_size = self.page_size;
        match released(py, || self.handle.next_work(limit)).map_err(Failure::from)? {
            None => Ok(None),
            Some(Work::Plan(plan)) => Ok(Some(Py::new(py, Plan { plan, page_size })?.into_any())),
            Some(Work::Refused(refusal)) => Ok(Some(Py::new(py, Refusal::from(refusal))?.into_any())),
        }
    }

    /// Reports a plan as carried out: for each row the sampled token (None where none was asked for), and whether
    /// the engine saw an end; `busy_s` seconds went to computing, `stalled_s` to waiting for loads.
    fn plan_done(
        &self,
        py: Python<'_>,
        plan: u64,
        tokens: Vec<Option<u32>>,
        finished: Vec<bool>,
        busy_s: f64,
        stalled_s: f64,
    ) -> Outcome<()> {
        let time = StepTime { busy: seconds(busy_s), stalled: seconds(stalled_s) };
        let rows = tokens.into_iter().zip(finished);
        let results = rows.map(|(token, finished)| RowResult { token, finished }).collect();
        Ok(released(py, || self.handle.plan_done(PlanId(plan), results, time))?)
    }

    /// Reports a plan as failed: `why` is `step` (it went wrong itself), `load` (a load under it failed) or
    /// `late load` (a load took too long; its requests are computed instead).
    fn plan_failed(&self, py: Python<'_>, plan: u64, why: &str) -> Outcome<()> {
        let why = match why {
            "step" => StepFailure::Step,
            "load" => StepFailure::Load,
            "late load" => StepFailure::LateLoad,
            other => return Err(Failure::Request(format!("there is no step failure {other:?}"))),
        };
        Ok(released(py, || self.handle.plan_failed(PlanId(plan), why))?)
    }

    /// Forgets every page that nothing uses in these tiers. Returns pages dropped by tier.
    fn flush(&self, py: Python<'_>, names: Vec<String>, timeout_s: f64) -> Outcome<BTreeMap<String, u64>> {
        let (tiers, limit) = (tiers(&names)?, seconds(timeout_s));
        Ok(report(released(py, || self.handle.flush(tiers, limit))?))
    }

    /// Empties these tiers downward. Returns pages moved and dropped by tier.
    fn demote(&self, py: Python<'_>, names: Vec<String>, timeout_s: f64) -> Outcome<BTreeMap<String, u64>> {
        let (tiers, limit) = (tiers(&names)?, seconds(timeout_s));
        Ok(report(released(py, || self.handle.demote(tiers, limit))?))
    }

    /// Proves that tree, pools and pins agree; True if Core was idle, when nothing may be pinned or reserved.
    /// Raises StorageError with what does not agree.
    fn check(&self, py: Python<'_>) -> Outcome<bool> {
        released(py, || self.handle.check())?.map_err(Failure::Storage)
    }

    /// Why each waiting request waits: (request, seconds since it was submitted, a sentence, its kind in one word), in
    /// the order in which they would go.
    fn explain(&self, py: Python<'_>) -> Outcome<Vec<(u64, f64, String, &'static str)>> {
        let waiting = released(py, || self.handle.explain())?;
        let line = |one: WaitingReport| {
            (one.request.0, one.waited.as_secs_f64(), one.why.to_string(), one.why.kind())
        };
        Ok(waiting.into_iter().map(line).collect())
    }

    /// Every counter and gauge, by flat name.
    fn stats(&self, py: Python<'_>) -> Outcome<BTreeMap<String, f64>> {
        let core = released(py, || self.handle.stats())?;
        let (disk, (up, attempts)) = (self.disk.stats(), self.disk.availability());
        let mut flat = flatten(&core, self.edge.completions_lost(), disk.as_ref());
        flat.insert("disk_up".into(), f64::from(u8::from(up)));
        flat.insert("disk_open_attempts".into(), attempts as f64);
        Ok(flat)
    }

    /// The disk tier in words: (engine, what is wrong). None for the engine if the tier is off.
    fn disk_state(&self) -> (Option<String>, Option<String>) {
        self.disk.describe()
    }

    /// Gives a tier another size while the engine serves: {"bytes": what it has now, "timed_out": 1 if pages beyond it
    /// were still used after `timeout_s`}. Raises CapacityError beyond what was reserved at start, ConfigError for a
    /// size that holds nothing, StorageError if the disk refuses.
    fn resize(
        &self,
        py: Python<'_>,
        name: &str,
        size_bytes: u64,
        timeout_s: f64,
    ) -> Outcome<BTreeMap<String, u64>> {
        let tier = tiers(&[name.to_string()])?[0];
        let limit = seconds(timeout_s);
        let (bytes, timed_out) = released(py, || match tier {
            TierId::DEVICE => self.pools.resize_device(&self.handle, size_bytes, limit),
            TierId::HOST => self.pools.resize_host(&self.handle, size_bytes, limit),
            _ => self.disk.resize(size_bytes, limit),
        })?;
        let flat = [("bytes", bytes), ("timed_out", u64::from(timed_out))];
        Ok(flat.map(|(name, value)| (name.to_string(), value)).into())
    }

    /// Tells what a step of `tokens` tokens after `context` others took, so that loading and computing can be compared
    /// from the start.
    fn measured(&self, py: Python<'_>, tokens: usize, context: usize, busy_s: f64) -> Outcome<()> {
        Ok(released(py, || self.handle.measured(tokens, context, seconds(busy_s)))?)
    }

    /// What loads were measured to cost before serving, (seconds a transfer, seconds a byte), and why they were not.
    /// Both None where there was nothing to measure.
    #[getter]
    fn measured_link(&self) -> (Option<(f64, f64)>, Option<String>) {
        self.link.describe()
    }

    /// Opens a disk root of at most `capacity` bytes while the engine serves. Raises ConfigError if one is attached,
    /// StorageError if the root cannot be used.
    fn attach_disk(&self, py: Python<'_>, path: PathBuf, capacity: u64) -> Outcome<()> {
        let config = disk_config_at(&self.options, self.shape, path, capacity)?;
        released(py, || self.disk.attach(config))
    }

    /// Forgets the disk and closes it; what it holds stays there. False if something still used it in the end.
    fn detach_disk(&self, py: Python<'_>, timeout_s: f64) -> Outcome<bool> {
        released(py, || self.disk.detach(seconds(timeout_s)))
    }

    /// Pages that came back from the disk so far, and records that it found damaged.
    #[getter]
    fn recovered(&self) -> (u32, u32) {
        self.disk.recovered()
    }

    /// Stops the core, the copies and the disk store, each within a bound; what is on disk is synced. Idempotent.
    fn close(&self, py: Python<'_>) -> Outcome<()> {
        released(py, || {
            let driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(driver);
            let edge = self.edge.close();
            let disk = self.disk.close();
            edge?;
            disk
        })
    }
}
