//! `PageCache`: the device tier alone, for engines that own their pages and their loop.

use crate::error::{Failure, Outcome};
use crate::gate::released_if_many;
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use strata_control::LocalCache;
use strata_radix::Pin;
use strata_types::{Namespace, PageId};

type Shared = Arc<Mutex<LocalCache>>;

fn locked(cache: &Shared) -> MutexGuard<'_, LocalCache> {
    // Every step of the cache leaves it whole or says so in `check`, so a panic elsewhere is no reason to stop.
    cache.lock().unwrap_or_else(PoisonError::into_inner)
}

fn to_pages(slots: &[u32]) -> Vec<PageId> {
    slots.iter().map(|slot| PageId(*slot)).collect()
}

/// In place: a page id is a u32, so the vector is not copied.
fn to_numbers(pages: Vec<PageId>) -> Vec<u32> {
    pages.into_iter().map(|page| page.0).collect()
}

/// A prefix cache over `pages` pages of `page_size` tokens that the caller owns. Safe to share between threads.
#[pyclass(frozen, module = "strata._core")]
pub struct PageCache {
    cache: Shared,
    page_size: u32,
}

/// The cached prefix of a sequence. Its pages stay where they are until `release`.
#[pyclass(frozen, module = "strata._core")]
pub struct PinnedPages {
    cache: Shared,
    pin: Mutex<Option<Pin>>,
    pages: Vec<u32>,
    page_size: u32,
}

#[pymethods]
impl PageCache {
    /// An empty cache. Raises RequestError for a size of zero.
    #[new]
    fn new(page_size: u32, pages: u32) -> Outcome<PageCache> {
        let cache = Arc::new(Mutex::new(LocalCache::new(page_size, pages)?));
        Ok(PageCache { cache, page_size })
    }

    /// Finds and pins the longest cached prefix of whole pages of `tokens` (uint32, contiguous).
    #[pyo3(signature = (tokens, *, salt = ""))]
    fn pin(&self, py: Python<'_>, tokens: PyReadonlyArray1<'_, u32>, salt: &str) -> PyResult<PinnedPages> {
        let tokens = tokens.as_slice()?;
        let mut pages = Vec::new();
        let namespace = Namespace::new(salt, "");
        let pin = released_if_many(py, tokens.len(), || {
            locked(&self.cache).match_into(&namespace, tokens, &mut pages)
        });
        let pin = Mutex::new(Some(pin.map_err(Failure::from)?));
        let pages = to_numbers(pages);
        Ok(PinnedPages { cache: Arc::clone(&self.cache), pin, pages, page_size: self.page_size })
    }

    /// The page table (uint32) of the longest cached prefix: found, touched, pinned and let go again in one call.
    #[pyo3(signature = (tokens, *, salt = ""))]
    fn lookup<'py>(
        &self,
        py: Python<'py>,
        tokens: PyReadonlyArray1<'py, u32>,
        salt: &str,
    ) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let tokens = tokens.as_slice()?;
        let mut pages = Vec::with_capacity(tokens.len() / self.page_size as usize);
        let namespace = if salt.is_empty() { *default_namespace() } else { Namespace::new(salt, "") };
        released_if_many(py, tokens.len(), || {
            let mut cache = locked(&self.cache);
            let pin = cache.match_into(&namespace, tokens, &mut pages)?;
            cache.unpin(pin)
        })
        .map_err(Failure::from)?;
        Ok(PyArray1::from_vec(py, to_numbers(pages)))
    }

    /// Reserves `count` pages to compute into, evicting the least recently used. Raises CapacityError if pinned and
    /// reserved pages leave too few.
    fn reserve<'py>(&self, py: Python<'py>, count: u32) -> Outcome<Bound<'py, PyArray1<u32>>> {
        let mut pages = Vec::new();
        let mut cache = locked(&self.cache);
        if !cache.reserve(count, &mut pages)? {
            let (capacity, free, _, pinned) = cache.pages();
            return Err(Failure::Capacity(format!(
                "{count} pages were asked for; of {capacity}, {free} are free and {pinned} pinned: \
                 release matches first, or make the cache larger"
            )));
        }
        Ok(PyArray1::from_vec(py, to_numbers(pages)))
    }

    /// Makes reserved pages match as pages `from_page..` of `tokens`. Returns those that were cached already: they
    /// are free again, and the next match gives the cache's own.
    #[pyo3(signature = (tokens, pages, from_page = 0, *, salt = ""))]
    fn commit(
        &self,
        py: Python<'_>,
        tokens: PyReadonlyArray1<'_, u32>,
        pages: PyReadonlyArray1<'_, u32>,
        from_page: u32,
        salt: &str,
    ) -> PyResult<Vec<u32>> {
        let namespace = Namespace::new(salt, "");
        let slots = to_pages(pages.as_slice()?);
        let tokens = tokens.as_slice()?;
        let refused = released_if_many(py, tokens.len(), || {
            locked(&self.cache).commit(&namespace, tokens, &slots, from_page)
        });
        Ok(to_numbers(refused.map_err(Failure::from)?))
    }

    /// Gives reserved pages back unused.
    fn abort(&self, pages: PyReadonlyArray1<'_, u32>) -> PyResult<()> {
        let slots = to_pages(pages.as_slice()?);
        Ok(locked(&self.cache).abort(&slots).map_err(Failure::from)?)
    }

    /// (capacity, free, cached, pinned) pages.
    fn pages(&self) -> (u32, u32, u32, u32) {
        locked(&self.cache).pages()
    }

    /// Proves that the books agree. Raises StorageError with what does not.
    fn check(&self) -> Outcome<()> {
        Ok(locked(&self.cache).check()?)
    }

    /// Tokens of a page.
    #[getter]
    fn page_size(&self) -> u32 {
        self.page_size
    }
}

fn default_namespace() -> &'static Namespace {
    static DEFAULT: std::sync::OnceLock<Namespace> = std::sync::OnceLock::new();
    DEFAULT.get_or_init(|| Namespace::new("", ""))
}

#[pymethods]
impl PinnedPages {
    /// The page table (uint32), first page first.
    #[getter]
    fn pages<'py>(&self, py: Python<'py>) -> Bound<'py, PyArray1<u32>> {
        PyArray1::from_slice(py, &self.pages)
    }

    /// Cached tokens.
    #[getter]
    fn tokens(&self) -> usize {
        self.pages.len() * self.page_size as usize
    }

    /// Lets the pages go. Calling it again does nothing.
    fn release(&self) -> Outcome<()> {
        let pin = self.pin.lock().unwrap_or_else(PoisonError::into_inner).take();
        match pin {
            Some(pin) => Ok(locked(&self.cache).unpin(pin)?),
            None => Ok(()),
        }
    }

    fn __enter__(slf: Py<Self>) -> Py<Self> {
        slf
    }

    #[pyo3(signature = (*_exception))]
    fn __exit__(&self, _exception: &Bound<'_, pyo3::types::PyTuple>) -> Outcome<()> {
        self.release()
    }
}

impl Drop for PinnedPages {
    fn drop(&mut self) {
        // A match that was never released would keep its pages for ever; the tree refuses only foreign pins.
        let _foreign = self.release();
    }
}
