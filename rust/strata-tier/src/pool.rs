//! The pages of one tier. Each page is in exactly one state, and only these steps exist:
//! `Free -> Reserved -> Resident -> Free`, `Reserved -> Free` (abort before any byte moved), and
//! `Reserved | Resident -> Quarantined -> Free` while a device may still touch the page. Anything else is refused
//! and counted, so a double free can never hand one page to two owners.

use strata_types::PageId;
use thiserror::Error;

/// What a page is doing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PageState {
    /// Nobody's.
    Free,
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
    /// The page does not exist.
    #[error("page {page} is outside the {pool} pool of {capacity} pages")]
    Unknown {
        /// The pool's name.
        pool: &'static str,
        /// The page.
        page: PageId,
        /// The pool's size.
        capacity: u32,
    },
}

/// Bounds the search for a run of adjacent pages: 256k pages are looked at, a few microseconds' work.
const WORDS_SEARCHED: usize = 4096;

/// A fixed number of pages and their states.
#[derive(Debug)]
pub struct PagePool {
    name: &'static str,
    states: Vec<PageState>,
    /// A bit per free page, so that neighbours are handed out together: gathers become slices, I/Os merge.
    free_bits: Vec<u64>,
    /// No word before this one has a free page. Low pages first: memory that was used before is mapped and warm.
    first_free: usize,
    free: u32,
    quarantined: u32,
    refused_steps: u64,
}

impl PagePool {
    /// A pool of free pages.
    pub fn new(name: &'static str, capacity: u32) -> PagePool {
        let words = (capacity as usize).div_ceil(64);
        let mut free_bits = vec![u64::MAX; words];
        let used_in_last = capacity as usize % 64;
        if let (Some(last), true) = (free_bits.last_mut(), used_in_last != 0) {
            *last = (1 << used_in_last) - 1;
        }
        PagePool {
            name,
            states: vec![PageState::Free; capacity as usize],
            free_bits,
            first_free: 0,
            free: capacity,
            quarantined: 0,
            refused_steps: 0,
        }
    }

    /// All pages of the pool.
    pub fn capacity(&self) -> u32 {
        self.states.len() as u32
    }

    /// Pages that can be reserved now.
    pub fn free_pages(&self) -> u32 {
        self.free
    }

    /// Pages that wait for a device to let go.
    pub fn quarantined_pages(&self) -> u32 {
        self.quarantined
    }

    /// Steps that were refused because the page was in another state.
    pub fn refused_steps(&self) -> u64 {
        self.refused_steps
    }

    /// The state of one page.
    pub fn state(&self, page: PageId) -> Option<PageState> {
        self.states.get(page.0 as usize).copied()
    }

    /// Reserves `count` pages, appended to `out`; all of them or none. Adjacent ones if there is such a run, the
    /// lowest free ones otherwise; ascending either way.
    pub fn reserve(&mut self, count: u32, out: &mut Vec<PageId>) -> bool {
        if count > self.free {
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
            self.take(index);
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

    fn take(&mut self, index: usize) {
        self.states[index] = PageState::Reserved;
        self.free_bits[index / 64] &= !(1 << (index % 64));
        self.free -= 1;
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

    /// Takes one particular free page as resident: recovery found it whole on disk.
    pub fn adopt(&mut self, page: PageId) -> Result<(), PoolError> {
        self.step(page, "adopt", &[PageState::Free], PageState::Resident)?;
        self.free -= 1;
        self.free_bits[page.0 as usize / 64] &= !(1 << (page.0 % 64));
        Ok(())
    }

    fn step(
        &mut self,
        page: PageId,
        step: &'static str,
        from: &[PageState],
        to: PageState,
    ) -> Result<(), PoolError> {
        let capacity = self.capacity();
        let Some(state) = self.states.get_mut(page.0 as usize) else {
            self.refused_steps += 1;
            return Err(PoolError::Unknown { pool: self.name, page, capacity });
        };
        if !from.contains(state) {
            self.refused_steps += 1;
            return Err(PoolError::WrongState { pool: self.name, page, state: *state, step });
        }
        self.quarantined -= u32::from(*state == PageState::Quarantined);
        self.quarantined += u32::from(to == PageState::Quarantined);
        *state = to;
        if to == PageState::Free {
            self.free += 1;
            self.first_free = self.first_free.min(page.0 as usize / 64);
            self.free_bits[page.0 as usize / 64] |= 1 << (page.0 % 64);
        }
        Ok(())
    }

    /// Proves that the counters and the bitmap agree with the states.
    pub fn check(&self) -> Result<(), String> {
        let count = |wanted| self.states.iter().filter(|state| **state == wanted).count() as u32;
        let bits: u32 = self.free_bits.iter().map(|word| word.count_ones()).sum();
        if count(PageState::Free) != self.free || bits != self.free {
            return Err(format!("{} pool: free {} but {bits} bits", self.name, self.free));
        }
        if count(PageState::Quarantined) != self.quarantined {
            return Err(format!("{} pool: quarantined {} is wrong", self.name, self.quarantined));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

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

    proptest! {
        #[test]
        fn any_order_of_steps_keeps_the_books(steps in prop::collection::vec((0u8..7, 0u32..140), 1..300)) {
            let mut pool = PagePool::new("test", 130);
            let mut out = Vec::new();
            for (step, page) in steps {
                let id = PageId(page);
                let before = pool.state(id);
                let done = match step {
                    0 => pool.reserve(page % 9, &mut out) || pool.free_pages() < page % 9,
                    1 => pool.commit(id).is_ok() == (before == Some(PageState::Reserved)),
                    2 => pool.abort(id).is_ok() == (before == Some(PageState::Reserved)),
                    3 => pool.release(id).is_ok() == (before == Some(PageState::Resident)),
                    4 => pool.quarantine(id).is_ok()
                        == matches!(before, Some(PageState::Reserved | PageState::Resident)),
                    5 => pool.settle(id).is_ok() == (before == Some(PageState::Quarantined)),
                    _ => pool.adopt(id).is_ok() == (before == Some(PageState::Free)),
                };
                prop_assert!(done);
                prop_assert_eq!(pool.check(), Ok(()));
            }
        }
    }
}
