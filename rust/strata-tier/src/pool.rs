//! The pages of one tier. Each page is in exactly one state, and only these steps exist:
//! `Free -> Reserved -> Resident -> Free`, `Reserved -> Free` (abort before any byte moved), and
//! `Reserved | Resident -> Quarantined -> Free` while a device may still touch the page. `Withheld` pages exist but
//! are not given out: they wait to be adopted or offered. Anything else is refused and counted, so a double free
//! can never hand one page to two owners.
//!
//! A pool can be resized under its users. Pages beyond a smaller capacity vanish at once if nobody owns them, and
//! otherwise when they are given back: they are never handed out again.

use std::ops::Range;
use strata_types::PageId;
use thiserror::Error;

/// What a page is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// Nobody's.
    Free,
    /// Nobody's, but not to be given out yet: what it holds has not been looked at.
    Withheld,
    /// Given out, not whole yet.
    Reserved,
    /// Whole and owned by the tree or a request.
    Resident,
    /// Let go of by its owner, possibly still touched by a transfer. Counts against the cap.
    Quarantined,
}

/// A step that does not exist.
#[derive(Debug, Error, PartialEq, Eq)]
pub enum PoolError {
    /// The page is not in the state that the step starts from.
    #[error("page {page} of the {pool} pool is {state:?}: cannot {step}")]
    WrongState {
        /// The pool's name.
        pool: &'static str,
        /// The page.
        page: PageId,
        /// The state it is in.
        state: PageState,
        /// The step that was asked for.
        step: &'static str,
    },
    /// The page does not exist, or not any more.
    #[error("page {page} is outside the {pool} pool of {capacity} pages: cannot {step}")]
    Unknown {
        /// The pool's name.
        pool: &'static str,
        /// The page.
        page: PageId,
        /// The pool's size.
        capacity: u32,
        /// The step that was asked for.
        step: &'static str,
    },
}

/// Steps that were refused, by what they would have done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Misuses {
    /// A page that nobody owned was given back.
    pub double_frees: u64,
    /// A whole page was committed again.
    pub double_commits: u64,
    /// The page does not exist.
    pub unknown_pages: u64,
    /// Any other step from a state that it does not start from.
    pub wrong_states: u64,
}

impl Misuses {
    /// All of them.
    pub fn total(&self) -> u64 {
        self.double_frees + self.double_commits + self.unknown_pages + self.wrong_states
    }
}

/// Bounds the search for a run of adjacent pages: 256k pages are looked at, a few microseconds' work.
const WORDS_SEARCHED: usize = 4096;

/// A number of pages and their states.
#[derive(Debug)]
pub struct PagePool {
    name: &'static str,
    capacity: u32,
    /// By page. Beyond the capacity only pages that still have an owner, and the last one does.
    states: Vec<Option<PageState>>,
    /// A bit per free page, so that neighbours are handed out together: gathers become slices, I/Os merge.
    free_bits: Vec<u64>,
    /// No word before this one has a free page. Low pages first: memory that was used before is mapped and warm.
    first_free: usize,
    /// Pages by state.
    counts: [u32; 5],
    misuses: Misuses,
}

impl PagePool {
    /// A pool of free pages.
    pub fn new(name: &'static str, capacity: u32) -> PagePool {
        let mut pool = PagePool {
            name,
            capacity: 0,
            states: Vec::new(),
            free_bits: Vec::new(),
            first_free: 0,
            counts: [0; 5],
            misuses: Misuses::default(),
        };
        pool.resize(capacity);
        pool
    }

    /// Pages that the pool may hold.
    pub fn capacity(&self) -> u32 {
        self.capacity
    }

    /// Pages in one state, those beyond the capacity included.
    pub fn count(&self, state: PageState) -> u32 {
        self.counts[state as usize]
    }

    /// Pages that can be reserved now.
    pub fn free_pages(&self) -> u32 {
        self.count(PageState::Free)
    }

    /// Pages that wait for a device to let go.
    pub fn quarantined_pages(&self) -> u32 {
        self.count(PageState::Quarantined)
    }

    /// Pages that wait to be adopted or offered.
    pub fn withheld_pages(&self) -> u32 {
        self.count(PageState::Withheld)
    }

    /// Steps that were refused because the page was in another state.
    pub fn refused_steps(&self) -> u64 {
        self.misuses.total()
    }

    /// Steps that were refused, by kind.
    pub fn misuses(&self) -> Misuses {
        self.misuses
    }

    /// The state of one page; none if it does not exist.
    pub fn state(&self, page: PageId) -> Option<PageState> {
        self.states.get(page.0 as usize).copied().flatten()
    }

    /// Changes the capacity and returns how many owned pages are left beyond it (`pages_beyond`). New pages are free.
    pub fn resize(&mut self, capacity: u32) -> usize {
        for index in capacity..self.capacity {
            if matches!(self.state(PageId(index)), Some(PageState::Free | PageState::Withheld)) {
                self.set(index as usize, None);
            }
        }
        let before = std::mem::replace(&mut self.capacity, capacity);
        self.free_bits.resize((capacity as usize).div_ceil(64), 0);
        self.states.resize(self.states.len().max(capacity as usize), None);
        for index in before..capacity {
            // A page that was still owned beyond the old capacity simply stays.
            if self.states[index as usize].is_none() {
                self.set(index as usize, Some(PageState::Free));
            }
        }
        self.forget_vanished();
        self.pages_beyond().count()
    }

    /// The pages beyond the capacity that somebody still owns, ascending. They vanish when they are given back.
    pub fn pages_beyond(&self) -> impl Iterator<Item = (PageId, PageState)> + '_ {
        let beyond = self.states.iter().enumerate().skip(self.capacity as usize);
        beyond.filter_map(|(index, state)| state.map(|state| (PageId(index as u32), state)))
    }

    /// Whether no page is left beyond the capacity.
    pub fn is_settled(&self) -> bool {
        self.states.len() == self.capacity as usize
    }

    /// `Free -> Withheld` for a range of pages, all or none.
    pub fn withhold(&mut self, pages: Range<u32>) -> Result<(), PoolError> {
        for page in pages.clone() {
            self.expect(PageId(page), "withhold", &[PageState::Free])?;
        }
        pages.for_each(|page| self.set(page as usize, Some(PageState::Withheld)));
        Ok(())
    }

    /// `Withheld -> Free` for those of a range that are still withheld; the others, and pages that do not exist any
    /// more, stay as they are. Returns how many became free.
    pub fn offer(&mut self, pages: Range<u32>) -> u32 {
        let before = self.free_pages();
        for page in pages.start..pages.end.min(self.capacity) {
            if self.state(PageId(page)) == Some(PageState::Withheld) {
                self.set(page as usize, Some(PageState::Free));
            }
        }
        self.free_pages() - before
    }

    /// Reserves `count` pages, appended to `out`; all of them or none. Adjacent ones if there is such a run, the
    /// lowest free ones otherwise; ascending either way.
    pub fn reserve(&mut self, count: u32, out: &mut Vec<PageId>) -> bool {
        if count > self.free_pages() {
            return false;
        }
        while self.free_bits.get(self.first_free) == Some(&0) {
            self.first_free += 1;
        }
        let mut index = match self.adjacent(count) {
            Some(start) => start,
            None => self.first_free * 64,
        };
        let mut left = count;
        while left > 0 {
            let (word, bit) = (index / 64, index % 64);
            let rest = self.free_bits[word] >> bit;
            if rest == 0 {
                index = (word + 1) * 64;
                continue;
            }
            index += rest.trailing_zeros() as usize;
            self.set(index, Some(PageState::Reserved));
            out.push(PageId(index as u32));
            (index, left) = (index + 1, left - 1);
        }
        true
    }

    /// The first free page that `count - 1` free pages follow, among the lowest words.
    fn adjacent(&self, count: u32) -> Option<usize> {
        let (mut start, mut length) = (self.first_free * 64, 0);
        let words = self.free_bits.iter().enumerate().skip(self.first_free).take(WORDS_SEARCHED);
        for (number, word) in words {
            if *word == u64::MAX {
                length += 64;
            } else if *word == 0 {
                length = 0;
            } else {
                for bit in 0..64 {
                    if word >> bit & 1 == 0 {
                        length = 0;
                        continue;
                    }
                    if length == 0 {
                        start = number * 64 + bit;
                    }
                    length += 1;
                    if length >= count {
                        return Some(start);
                    }
                }
            }
            if length >= count {
                return Some(start);
            }
            if length == 0 {
                start = (number + 1) * 64;
            }
        }
        None
    }

    /// `Reserved -> Resident`: all bytes are there.
    pub fn commit(&mut self, page: PageId) -> Result<(), PoolError> {
        self.step(page, "commit", &[PageState::Reserved], PageState::Resident)
    }

    /// `Reserved -> Free`: given back before any device was asked to write it.
    pub fn abort(&mut self, page: PageId) -> Result<(), PoolError> {
        self.step(page, "abort", &[PageState::Reserved], PageState::Free)
    }

    /// `Resident -> Free`.
    pub fn release(&mut self, page: PageId) -> Result<(), PoolError> {
        self.step(page, "release", &[PageState::Resident], PageState::Free)
    }

    /// `Reserved | Resident -> Quarantined`: its owner is gone, a device may still touch it.
    pub fn quarantine(&mut self, page: PageId) -> Result<(), PoolError> {
        self.step(page, "quarantine", &[PageState::Reserved, PageState::Resident], PageState::Quarantined)
    }

    /// `Quarantined -> Free`: the device has let go.
    pub fn settle(&mut self, page: PageId) -> Result<(), PoolError> {
        self.step(page, "settle", &[PageState::Quarantined], PageState::Free)
    }

    /// Takes one particular page as resident: recovery found it whole on disk.
    pub fn adopt(&mut self, page: PageId) -> Result<(), PoolError> {
        self.step(page, "adopt", &[PageState::Free, PageState::Withheld], PageState::Resident)
    }

    fn step(
        &mut self,
        page: PageId,
        step: &'static str,
        from: &[PageState],
        to: PageState,
    ) -> Result<(), PoolError> {
        self.expect(page, step, from)?;
        if to == PageState::Free && page.0 >= self.capacity {
            self.set(page.0 as usize, None);
            self.forget_vanished();
        } else {
            self.set(page.0 as usize, Some(to));
        }
        Ok(())
    }

    /// Refuses and counts a step from any other state.
    fn expect(&mut self, page: PageId, step: &'static str, from: &[PageState]) -> Result<(), PoolError> {
        let Some(state) = self.state(page) else {
            self.misuses.unknown_pages += 1;
            return Err(PoolError::Unknown { pool: self.name, page, capacity: self.capacity, step });
        };
        if from.contains(&state) {
            return Ok(());
        }
        match (step, state) {
            ("commit", PageState::Resident) => self.misuses.double_commits += 1,
            ("abort" | "release" | "settle", PageState::Free) => self.misuses.double_frees += 1,
            _ => self.misuses.wrong_states += 1,
        }
        Err(PoolError::WrongState { pool: self.name, page, state, step })
    }

    /// The one place where a state changes: counts and bits follow.
    fn set(&mut self, index: usize, to: Option<PageState>) {
        let from = std::mem::replace(&mut self.states[index], to);
        let (word, bit) = (index / 64, 1 << (index % 64));
        if let Some(from) = from {
            self.counts[from as usize] -= 1;
        }
        if let Some(to) = to {
            self.counts[to as usize] += 1;
        }
        if from == Some(PageState::Free) {
            self.free_bits[word] &= !bit;
        }
        if to == Some(PageState::Free) {
            self.free_bits[word] |= bit;
            self.first_free = self.first_free.min(word);
        }
    }

    fn forget_vanished(&mut self) {
        while self.states.len() > self.capacity as usize && self.states.last() == Some(&None) {
            self.states.pop();
        }
    }

    /// Proves that the counters, the bits and the capacity agree with the states.
    pub fn check(&self) -> Result<(), String> {
        let wrong = |what: String| Err(format!("{} pool: {what}", self.name));
        let mut counts = [0; 5];
        let mut bits = vec![0; (self.capacity as usize).div_ceil(64)];
        for (index, state) in self.states.iter().enumerate() {
            let inside = index < self.capacity as usize;
            match state {
                None if inside => return wrong(format!("page {index} vanished")),
                Some(PageState::Free | PageState::Withheld) if !inside => {
                    return wrong(format!("page {index} is nobody's beyond {}", self.capacity));
                }
                Some(PageState::Free) => bits[index / 64] |= 1 << (index % 64),
                _ => {}
            }
            if let Some(state) = state {
                counts[*state as usize] += 1;
            }
        }
        if counts != self.counts {
            return wrong(format!("counted {:?}, found {counts:?}", self.counts));
        }
        if bits != self.free_bits {
            return wrong("the bits of free pages are wrong".to_owned());
        }
        if bits.iter().take(self.first_free).any(|word| *word != 0) {
            return wrong(format!("a page is free before word {}", self.first_free));
        }
        if self.states.len() < self.capacity as usize
            || self.is_settled() != self.pages_beyond().next().is_none()
        {
            return wrong(format!("{} states for {} pages", self.states.len(), self.capacity));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_come_together_and_all_or_nothing() {
        let mut pool = PagePool::new("host", 70);
        let mut pages = Vec::new();
        assert!(pool.reserve(66, &mut pages));
        assert!(pages.windows(2).all(|pair| pair[1].0 == pair[0].0 + 1));
        assert!(!pool.reserve(5, &mut pages));
        assert_eq!((pages.len(), pool.free_pages()), (66, 4));
        for page in pages.drain(..4).chain([PageId(40)]) {
            pool.abort(page).unwrap();
        }
        let mut again = Vec::new();
        assert!(pool.reserve(3, &mut again));
        assert_eq!(again, [0, 1, 2].map(PageId), "low pages are warm");
        assert!(pool.reserve(4, &mut again));
        assert_eq!(again[3..], [66, 67, 68, 69].map(PageId), "a run before holes");
        assert!(pool.reserve(2, &mut again));
        assert_eq!(again[7..], [3, 40].map(PageId), "holes where there is no run");
        assert!(PagePool::new("none", 0).reserve(0, &mut pages));
        assert!(!PagePool::new("none", 0).reserve(1, &mut pages));
    }

    #[test]
    fn double_free_is_refused_and_counted() {
        let mut pool = PagePool::new("host", 2);
        let mut pages = Vec::new();
        assert!(pool.reserve(1, &mut pages));
        pool.commit(pages[0]).unwrap();
        assert!(pool.commit(pages[0]).is_err());
        pool.release(pages[0]).unwrap();
        assert!(matches!(pool.release(pages[0]), Err(PoolError::WrongState { .. })));
        assert!(matches!(pool.release(PageId(9)), Err(PoolError::Unknown { capacity: 2, .. })));
        assert_eq!((pool.refused_steps(), pool.free_pages()), (3, 2));
    }
}
