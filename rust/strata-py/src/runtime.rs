//! `Runtime`: Core on its thread, with the host arena, the copy threads and the disk store of one engine.

use crate::error::{Failure, Outcome};
use crate::gate::released;
use crate::memory::{device_region, HostPages, LayerHold};
use crate::options::Options;
use crate::plan::{Plan, Refusal};
use crate::stats::flatten;
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use strata_control::ControlConfig;
use strata_copy::{warm, Arena, CopyConfig, CopyEngine, Region};
use strata_core::{
    Core, CoreConfig, Driver, DriverHandle, MaintenanceReport, Movers, NewRequest, RowResult, StepFailure,
    Work,
};
use strata_disk::{DiskConfig, DiskError, DiskStore, Health};
use strata_sched::Limits;
use strata_tier::completion_queue;
use strata_types::{GroupId, KvLayout, KvShape, Namespace, PageId, PageRecord, PlanId, RequestId, TierId};

/// Completions that may wait for Core. Core drains them in microseconds; a Mover that finds no room waits.
const COMPLETIONS: usize = 4096;
/// Pages of one transfer: long enough to keep a disk busy, short enough to commit early and to cut.
const TRANSFER_PAGES: u32 = 32;
/// Memory of each pool that is mapped before it is needed: a few long documents, well under any pool's own cap.
const WARM_BYTES: u64 = 1 << 30;
/// Page alignment in the host arena and on disk: what O_DIRECT asks for.
const ALIGNMENT: u64 = 4096;

/// Core, its thread and its Movers. All methods may be called from any thread.
#[pyclass(frozen, module = "strata._core")]
pub struct Runtime {
    handle: DriverHandle,
    driver: Mutex<Option<Driver>>,
    copies: Arc<CopyEngine>,
    disk: Option<Arc<DiskStore>>,
    disk_off_reason: Option<String>,
    recovered_pages: u32,
    damaged_records: u32,
    page_size: usize,
}

/// The disk store, what it found, and why there is none.
#[derive(Default)]
struct Disk {
    store: Option<Arc<DiskStore>>,
    found: Vec<(PageId, PageRecord)>,
    damaged: u32,
    off_reason: Option<String>,
}

fn open_disk(
    options: &Options,
    shape: KvShape,
    host: Arc<HostPages>,
    completions: &strata_tier::CompletionSender,
) -> Outcome<Disk> {
    let off = |reason: &str| Ok(Disk { off_reason: Some(reason.into()), ..Disk::default() });
    let Some(root) = options.disk_path.clone().filter(|_| options.disk_capacity > 0) else {
        return off("--disk-capacity is 0");
    };
    if options.host_pages == 0 {
        return off("--host-memory is 0, and pages reach the disk through host memory");
    }
    let page_bytes = u32::try_from(shape.page_bytes()).map_err(|_| {
        let bytes = shape.page_bytes();
        Failure::Config(format!("a page of {bytes} bytes is too large for a record: lower --page-size"))
    })?;
    let mut config =
        DiskConfig::new(root, options.disk_capacity, options.fingerprint(), options.page_size, page_bytes);
    config.threads = options.disk_threads;
    match DiskStore::open(config, host, completions.clone()) {
        Ok((store, recovered)) => Ok(Disk {
            store: Some(Arc::new(store)),
            damaged: recovered.damaged,
            found: recovered.records.into_iter().map(|found| (found.page, found.record)).collect(),
            off_reason: None,
        }),
        // A root that another owns, or a disk that does not answer, costs the tier and not the server.
        Err(error @ (DiskError::Locked { .. } | DiskError::Io { .. } | DiskError::Deadline { .. })) => {
            off(&error.to_string())
        }
        Err(error) => Err(error.into()),
    }
}

impl Runtime {
    fn build(
        options: &Options,
        device: Region,
        throttle: Arc<dyn strata_copy::Throttle>,
    ) -> Outcome<Runtime> {
        let group = GroupId(0);
        let shape =
            KvShape::new(group, options.layers, options.parts, options.page_size, options.token_bytes)?;
        let device_layout = KvLayout::layer_first(shape, options.device_pages)?;
        // An engine without a host tier still has a copy engine; it is simply never asked.
        let host_layout = KvLayout::page_first(shape, options.host_pages.max(1), ALIGNMENT)?;
        let arena = Arc::new(Arena::new(host_layout.total_bytes().next_multiple_of(ALIGNMENT) as usize)?);
        let region = Region::from_arena(arena);
        let (sender, receiver) = completion_queue(COMPLETIONS);
        let warming = start_warming([(device.clone(), device_layout), (region.clone(), host_layout)]);
        let copies = Arc::new(CopyEngine::new(
            CopyConfig {
                device,
                device_layout,
                host: region.clone(),
                host_layout,
                threads: options.copy_threads,
                backup_niceness: 0,
                queue_capacity: 1024,
                throttle,
            },
            sender.clone(),
        )?);
        let host = Arc::new(HostPages { region, layout: host_layout });
        let disk = open_disk(options, shape, host, &sender)?;
        let disk_pages = disk.store.as_ref().map_or(0, |store| store.capacity());
        let mut core = Core::new(CoreConfig {
            control: ControlConfig {
                page_size: options.page_size,
                group,
                layers: options.layers,
                page_bytes: shape.page_bytes() as u64,
                pages: [options.device_pages, options.host_pages, disk_pages],
                device_shards: 1,
                backup: options.write_policy()?,
                spill: options.write_policy()?,
                transfer_pages: TRANSFER_PAGES,
                ghost_pages: 2 * options.device_pages as usize,
            },
            policy: options.policy()?,
            limits: Limits { batch_tokens: options.batch_tokens, max_running: options.max_running },
            outstanding_plans: options.outstanding_plans,
            max_waiting: options.max_waiting,
            prefetch_timeout: options.prefetch_timeout()?,
        })?;
        let recovered_pages = core.recover(disk.found)?;
        if let Some(warming) = warming {
            // Done before the first request: it would take a core from it. A panic there costs only warmth.
            let _panicked = warming.join();
        }
        let device_mover: Arc<dyn strata_tier::Mover> = copies.clone();
        let disk_mover = disk.store.clone().map(|store| -> Arc<dyn strata_tier::Mover> { store });
        let movers = Movers { device: device_mover, disk: disk_mover };
        let driver = Driver::start(core, movers, receiver, options.outstanding_plans)
            .map_err(|error| Failure::Capacity(format!("cannot start the core's thread: {error}")))?;
        Ok(Runtime {
            handle: driver.handle(),
            driver: Mutex::new(Some(driver)),
            copies,
            disk: disk.store,
            disk_off_reason: disk.off_reason,
            recovered_pages,
            damaged_records: disk.damaged,
            page_size: options.page_size as usize,
        })
    }
}

/// Maps the pages that will be used first, beside the scan of the disk. None if there is no thread to be had: then the
/// first copies map their own pages.
fn start_warming(pools: [(Region, KvLayout); 2]) -> Option<std::thread::JoinHandle<()>> {
    let work = move || {
        for (region, layout) in pools {
            let pages = WARM_BYTES / layout.shape.page_bytes() as u64;
            warm(&region, &layout, 0..u32::try_from(pages).unwrap_or(u32::MAX), || true);
        }
    };
    std::thread::Builder::new().name("strata-warm".into()).spawn(work).ok()
}

fn seconds(value: f64) -> Duration {
    Duration::from_secs_f64(value.clamp(0.0, 86_400.0))
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
    /// `strata._core`'s stub; `hold` stops transfers for tests. Raises ConfigError, CapacityError, StorageError.
    #[new]
    #[pyo3(signature = (options, device_address, device_bytes, device_owner, hold = None))]
    fn new(
        py: Python<'_>,
        options: Options,
        device_address: usize,
        device_bytes: usize,
        device_owner: Py<PyAny>,
        hold: Option<&Bound<'_, LayerHold>>,
    ) -> Outcome<Runtime> {
        let device = device_region(device_address, device_bytes, device_owner)?;
        let throttle = options.throttle(hold);
        released(py, || Runtime::build(&options, device, throttle))
    }

    /// Queues a request; a refusal comes back as work. Raises CapacityError if the queue of commands is full.
    fn submit(
        &self,
        request: u64,
        prompt: PyReadonlyArray1<'_, u32>,
        max_new_tokens: usize,
        salt: &str,
        priority: i32,
    ) -> PyResult<()> {
        let new = NewRequest {
            id: RequestId(request),
            namespace: Namespace::new(salt, ""),
            prompt: prompt.as_slice()?.to_vec(),
            max_new_tokens,
            priority,
        };
        Ok(self.handle.submit(new).map_err(Failure::from)?)
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
    /// the engine saw an end.
    fn plan_done(
        &self,
        py: Python<'_>,
        plan: u64,
        tokens: Vec<Option<u32>>,
        finished: Vec<bool>,
    ) -> Outcome<()> {
        let rows = tokens.into_iter().zip(finished);
        let results = rows.map(|(token, finished)| RowResult { token, finished }).collect();
        Ok(released(py, || self.handle.plan_done(PlanId(plan), results))?)
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

    /// Every counter and gauge, by flat name.
    fn stats(&self, py: Python<'_>) -> Outcome<BTreeMap<String, f64>> {
        let core = released(py, || self.handle.stats())?;
        let disk = self.disk.as_ref().map(|disk| disk.stats());
        Ok(flatten(&core, &self.copies.stats(), disk.as_ref()))
    }

    /// The disk tier in words: (engine, what is wrong). None for the engine if the tier is off.
    fn disk_state(&self) -> (Option<String>, Option<String>) {
        let Some(disk) = &self.disk else { return (None, self.disk_off_reason.clone()) };
        let problem = match disk.health() {
            Health::Up => None,
            Health::Stalled { operation, elapsed } => {
                Some(format!("stalled: {operation} has not answered for {:.0} s", elapsed.as_secs_f64()))
            }
            Health::OutOfService { reason } => Some(format!("out of service: {reason}")),
            Health::Closed => Some("closed".into()),
        };
        (Some(disk.describe()), problem)
    }

    /// Pages that a scan of the disk brought back at start, and records that it found damaged.
    #[getter]
    fn recovered(&self) -> (u32, u32) {
        (self.recovered_pages, self.damaged_records)
    }

    /// Stops the core, the copies and the disk store, each within a bound; what is on disk is synced. Idempotent.
    fn close(&self, py: Python<'_>) -> Outcome<()> {
        released(py, || {
            let driver = self.driver.lock().unwrap_or_else(PoisonError::into_inner).take();
            drop(driver);
            let copies = self.copies.close();
            let disk = self.disk.as_ref().map_or(Ok(()), |disk| disk.close());
            copies?;
            Ok(disk?)
        })
    }
}
