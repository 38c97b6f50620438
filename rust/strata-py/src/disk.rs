//! The disk tier of a running engine: opened, watched and, when asked, attached and detached. A root that another
//! process owns or a disk that does not answer costs the tier and not the server: it is tried again. What the disk
//! holds comes back while the server serves.

use crate::error::{Failure, Outcome};
use crate::pools::Resized;
use crossbeam_channel::{bounded, Receiver, RecvTimeoutError, Sender};
use std::path::PathBuf;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use strata_core::{DriverError, DriverHandle};
use strata_disk::{DiskConfig, DiskError, DiskStats, DiskStore, Health, PageMemory, Recovery};
use strata_tier::CompletionSender;
use strata_types::TierId;

/// Waits between two attempts to open a root: the first, and the longest after doubling.
const RETRIES: (Duration, Duration) = (Duration::from_secs(1), Duration::from_secs(30));
/// The longest such wait for a root that another process owns: a lock is cheap to try, and who takes over is waited for.
const LOCKED_RETRY: Duration = Duration::from_secs(2);
/// How long a start waits for what lies on the disk before it serves without.
const RECOVERY_AT_START: Duration = Duration::from_secs(2);
/// How often a recovery that is waited for is looked at.
const RECOVERY_LOOK: Duration = Duration::from_millis(10);
/// How often a recovery from which nothing comes is asked whether its store still serves.
const GLANCE: Duration = Duration::from_millis(500);
/// How long each attempt to forget a disk whose root was taken away waits for what uses it.
const LOST_DETACH: Duration = Duration::from_secs(1);
/// How long a close waits for the disk's threads, each of which is in a call with a bound of its own unless the file
/// system hangs.
const THREAD_END: Duration = Duration::from_secs(12);

/// What is known of the disk now.
enum State {
    /// There is to be none.
    Off(String),
    /// It could not be opened and is tried again.
    Waiting { reason: String, config: Box<DiskConfig>, next: Instant, wait: Duration },
    /// It serves.
    Attached(Attached),
}

/// A store that serves, and its recovery.
struct Attached {
    store: Arc<DiskStore>,
    /// Ends with the thread that hands over what the disk holds.
    recovery: Receiver<()>,
}

impl State {
    /// Closes a store that Core has forgotten. What it still hands over must not reach Core once another disk is there.
    fn end(self) -> Outcome<()> {
        let State::Attached(Attached { store, recovery }) = self else { return Ok(()) };
        let closed = store.close();
        let _ended = recovery.recv_timeout(THREAD_END);
        Ok(closed?)
    }
}

struct Shared {
    handle: DriverHandle,
    memory: Arc<dyn PageMemory>,
    completions: CompletionSender,
    state: Mutex<State>,
    /// Held by whoever opens, closes or resizes a root, so that only one is attached, and the one that `state` names.
    /// Never by one who only looks.
    changing: Mutex<()>,
    /// Why the last root was lost that was opened again by itself.
    lost: Mutex<Option<String>>,
    recovered_pages: AtomicU32,
    damaged_records: AtomicU32,
    attempts: AtomicU64,
}

/// Keeps the disk tier.
pub struct DiskKeeper {
    shared: Arc<Shared>,
    /// Dropped to end the thread, and what ends with it.
    alive: Mutex<Option<(Sender<()>, Receiver<()>)>>,
}

/// Errors that may pass: another owner, a device that fails or hangs.
fn may_pass(error: &DiskError) -> bool {
    matches!(
        error,
        DiskError::Locked { .. }
            | DiskError::Io { .. }
            | DiskError::Deadline { .. }
            | DiskError::Unmounted { .. }
    )
}

impl DiskKeeper {
    /// Opens the root of `config`, if there is one. An error that no retry mends is the caller's.
    pub fn start(
        handle: DriverHandle,
        memory: Arc<dyn PageMemory>,
        completions: CompletionSender,
        config: Result<DiskConfig, String>,
    ) -> Outcome<DiskKeeper> {
        let shared = Arc::new(Shared {
            handle,
            memory,
            completions,
            state: Mutex::new(State::Off("it is being opened".into())),
            changing: Mutex::default(),
            lost: Mutex::default(),
            recovered_pages: AtomicU32::new(0),
            damaged_records: AtomicU32::new(0),
            attempts: AtomicU64::new(0),
        });
        match config {
            Ok(config) => {
                if let Some(done) = shared.open(config)? {
                    // The rest comes while the server serves.
                    let _later = done.recv_timeout(RECOVERY_AT_START);
                }
            }
            Err(reason) => *shared.state() = State::Off(reason),
        }
        let (alive, closed) = bounded(0);
        let watched = Arc::clone(&shared);
        let ended = start_thread("strata-disk-keeper", move || watched.keep_trying(&closed))?;
        Ok(DiskKeeper { shared, alive: Mutex::new(Some((alive, ended))) })
    }

    /// The store, while it serves.
    pub fn store(&self) -> Option<Arc<DiskStore>> {
        self.shared.store()
    }

    /// Opens a root while the engine serves. Waits for no recovery.
    pub fn attach(&self, config: DiskConfig) -> Outcome<()> {
        let _changing = self.shared.change();
        if let Some(store) = self.store() {
            let described = store.describe();
            return Err(Failure::Config(format!(
                "a disk is attached already ({described}): detach it first"
            )));
        }
        *self.shared.lost() = None;
        self.shared.open(config).map(|_recovery| ())
    }

    /// Forgets the disk and closes it; what it holds stays there. False if something still used it after `limit`.
    pub fn detach(&self, limit: Duration) -> Outcome<bool> {
        let _changing = self.shared.change();
        if self.store().is_some() && self.shared.handle.detach_disk(limit)?.timed_out {
            return Ok(false);
        }
        let before = std::mem::replace(&mut *self.shared.state(), State::Off("it was detached".into()));
        before.end()?;
        Ok(true)
    }

    /// Gives the disk tier another cap. The files shrink only once nothing uses what lies beyond.
    pub fn resize(&self, bytes: u64, limit: Duration) -> Outcome<Resized> {
        let _changing = self.shared.change();
        let Some(store) = self.store() else {
            return Err(Failure::Config("the disk tier is off: attach a disk first".into()));
        };
        let pages = store.capacity_under(bytes)?;
        if pages > store.capacity() {
            let pages = set_cap(&store, bytes, limit)?;
            let timed_out = self.shared.handle.resize(TierId::DISK, pages, limit)?.timed_out;
            return Ok((bytes, timed_out));
        }
        let timed_out = self.shared.handle.resize(TierId::DISK, pages, limit)?.timed_out;
        if !timed_out {
            set_cap(&store, bytes, limit)?;
        }
        Ok((bytes, timed_out))
    }

    /// In words: the engine, and what is wrong.
    pub fn describe(&self) -> (Option<String>, Option<String>) {
        match &*self.shared.state() {
            State::Off(reason) => (None, Some(reason.clone())),
            State::Waiting { reason, wait, .. } => {
                (None, Some(format!("{reason}; it is tried again every {} s", wait.as_secs())))
            }
            State::Attached(Attached { store, .. }) => (Some(self.shared.engine_of(store)), problem(store)),
        }
    }

    /// Counters of the store, while it serves.
    pub fn stats(&self) -> Option<DiskStats> {
        self.store().map(|store| store.stats())
    }

    /// Whether it serves, and how often it was tried to open it.
    pub fn availability(&self) -> (bool, u64) {
        let up = self.store().is_some_and(|store| store.health() == Health::Up);
        (up, self.shared.attempts.load(Relaxed))
    }

    /// Pages that came back from the disk, and records that were found damaged.
    pub fn recovered(&self) -> (u32, u32) {
        (self.shared.recovered_pages.load(Relaxed), self.shared.damaged_records.load(Relaxed))
    }

    /// Ends the thread and closes the store.
    pub fn close(&self) -> Outcome<()> {
        let alive = self.alive.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut hangs = false;
        if let Some((alive, ended)) = alive {
            drop(alive);
            hangs = matches!(ended.recv_timeout(THREAD_END), Err(RecvTimeoutError::Timeout));
        }
        if let Some(store) = self.store() {
            store.close()?;
        }
        if hangs {
            let waited = THREAD_END.as_secs();
            let text = format!(
                "opening the disk's root has not ended {waited} s after the close: its file system hangs"
            );
            return Err(Failure::Storage(text));
        }
        Ok(())
    }
}

/// Starts a thread; what is returned ends with it.
fn start_thread(name: &str, work: impl FnOnce() + Send + 'static) -> Outcome<Receiver<()>> {
    let (running, ended) = bounded(0);
    let work = move || {
        let _running: Sender<()> = running;
        work();
    };
    std::thread::Builder::new()
        .name(name.into())
        .spawn(work)
        .map_err(|error| Failure::Capacity(format!("cannot start the thread {name}: {error}")))?;
    Ok(ended)
}

/// Changes the store's cap, after its recovery if one is under way.
fn set_cap(store: &DiskStore, bytes: u64, limit: Duration) -> Outcome<u32> {
    let until = Instant::now() + limit;
    loop {
        match store.set_cap(bytes) {
            Err(DiskError::Recovering { .. }) if Instant::now() < until => std::thread::sleep(RECOVERY_LOOK),
            result => return Ok(result?),
        }
    }
}

fn problem(store: &DiskStore) -> Option<String> {
    match store.health() {
        Health::Up => store.full().map(|reason| {
            format!(
                "full: {reason}; new pages take the place of old ones there, or are not kept: make room in that file \
                 system, or give a lower --disk-capacity"
            )
        }),
        Health::Stalled { operation, elapsed } => {
            Some(format!("stalled: {operation} has not answered for {:.0} s", elapsed.as_secs_f64()))
        }
        Health::OutOfService { reason } => Some(format!("out of service: {reason}")),
        Health::Closed => Some("closed".into()),
    }
}

impl Shared {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn lost(&self) -> MutexGuard<'_, Option<String>> {
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self) -> MutexGuard<'_, ()> {
        self.changing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn store(&self) -> Option<Arc<DiskStore>> {
        match &*self.state() {
            State::Attached(Attached { store, .. }) => Some(Arc::clone(store)),
            _ => None,
        }
    }

    /// The engine in words, for logs: a loss may be over before anybody looks.
    fn engine_of(&self, store: &DiskStore) -> String {
        match &*self.lost() {
            Some(reason) => format!("{}, opened again: {reason}", store.describe()),
            None => store.describe(),
        }
    }

    /// Opens a root and hands it to Core. Returns what ends with its recovery; none if it has to be tried again.
    fn open(self: &Arc<Self>, config: DiskConfig) -> Outcome<Option<Receiver<()>>> {
        self.attempts.fetch_add(1, Relaxed);
        let opened = DiskStore::open(config.clone(), Arc::clone(&self.memory), self.completions.clone());
        let (store, recovery) = match opened {
            Ok(opened) => opened,
            Err(error) if may_pass(&error) => {
                let longest = match error {
                    DiskError::Locked { .. } => LOCKED_RETRY,
                    _ => RETRIES.1,
                };
                let _none = self.wait_and_retry(error.to_string(), config, longest);
                return Ok(None);
            }
            Err(error) => return Err(error.into()),
        };
        let store = Arc::new(store);
        self.handle.attach_disk(store.clone(), store.capacity())?;
        let (watched, serving) = (Arc::clone(self), Arc::clone(&store));
        let ended = start_thread("strata-recovery", move || watched.take_in(&recovery, &serving))?;
        *self.state() = State::Attached(Attached { store, recovery: ended.clone() });
        Ok(Some(ended))
    }

    /// Returns the state before.
    fn wait_and_retry(&self, reason: String, config: DiskConfig, longest: Duration) -> State {
        let mut state = self.state();
        let wait = match &*state {
            State::Waiting { wait, .. } => (*wait * 2).min(longest),
            _ => RETRIES.0,
        };
        let waiting = State::Waiting { reason, config: Box::new(config), next: Instant::now() + wait, wait };
        std::mem::replace(&mut *state, waiting)
    }

    /// Hands over what the disk holds, batch by batch, until the last, the store's end or Core's. A disk that hangs is
    /// waited for as long as its store serves: pages that no batch names stay unused.
    fn take_in(&self, recovery: &Recovery, store: &DiskStore) {
        while store.health() != Health::Closed {
            let batch = match recovery.batches().recv_timeout(GLANCE) {
                Ok(batch) => batch,
                Err(RecvTimeoutError::Timeout) => continue,
                Err(RecvTimeoutError::Disconnected) => return,
            };
            self.damaged_records.fetch_add(batch.damaged, Relaxed);
            let found: Vec<_> = batch.records.into_iter().map(|found| (found.page, found.record)).collect();
            while store.health() != Health::Closed {
                match self.handle.recovered(batch.pages.clone(), found.clone(), batch.last) {
                    Ok(pages) => drop(self.recovered_pages.fetch_add(pages, Relaxed)),
                    // Core is behind; to be told twice does no harm.
                    Err(DriverError::Busy | DriverError::NoAnswer(_)) => continue,
                    // Core has stopped: nobody is left to tell.
                    Err(_) => return,
                }
                break;
            }
            if batch.last {
                return;
            }
        }
    }

    /// Forgets a disk whose root was taken away: what may come back there is opened anew. To be called again until then.
    fn forget_lost(&self) {
        let Some(store) = self.store() else { return };
        let Some((reason, config)) = store.lost() else { return };
        // A disk that hangs as well keeps what it uses; Core that has stopped needs no disk.
        if !self.handle.detach_disk(LOST_DETACH).is_ok_and(|report| !report.timed_out) {
            return;
        }
        let before = self.wait_and_retry(reason.clone(), config, RETRIES.1);
        // Only now: it is told beside a store that serves, which this one does no longer.
        *self.lost() = Some(reason);
        // Nothing of it can be saved; its threads end with it.
        let _unsynced = before.end();
    }

    /// Tries again whenever it is time, until the engine closes.
    fn keep_trying(self: &Arc<Self>, closed: &Receiver<()>) {
        loop {
            match closed.recv_timeout(RETRIES.0 / 4) {
                Err(RecvTimeoutError::Timeout) => {}
                _ => return,
            }
            let _changing = self.change();
            self.forget_lost();
            let due: Option<(DiskConfig, PathBuf)> = match &*self.state() {
                State::Waiting { config, next, .. } if *next <= Instant::now() => {
                    Some(((**config).clone(), config.root.clone()))
                }
                _ => None,
            };
            let Some((config, root)) = due else { continue };
            if let Err(error) = self.open(config) {
                let reason = format!("{} cannot be used: {}", root.display(), crate::error::sentence(&error));
                *self.state() = State::Off(reason);
            }
        }
    }
}
