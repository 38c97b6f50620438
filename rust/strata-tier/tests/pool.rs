//! The page pool against a naive one, over random steps: legal and illegal, with pages withheld and offered and the
//! capacity changed under their owners.

use proptest::prelude::*;
use std::collections::BTreeMap;
use strata_tier::{Misuses, PagePool, PageState, PoolError};
use strata_types::PageId;
use PageState::{Free, Quarantined, Reserved, Resident, Withheld};

/// Pages by number; the obvious way to do everything.
#[derive(Default)]
struct NaivePool {
    capacity: u32,
    pages: BTreeMap<u32, PageState>,
    misuses: Misuses,
}

impl NaivePool {
    fn resize(&mut self, capacity: u32) -> usize {
        for page in self.capacity..capacity {
            self.pages.entry(page).or_insert(Free);
        }
        self.capacity = capacity;
        self.pages.retain(|page, state| *page < capacity || !matches!(state, Free | Withheld));
        self.beyond().len()
    }

    fn beyond(&self) -> Vec<(PageId, PageState)> {
        self.pages.range(self.capacity..).map(|(page, state)| (PageId(*page), *state)).collect()
    }

    fn free(&self) -> Vec<u32> {
        self.pages.iter().filter(|(_, state)| **state == Free).map(|(page, _)| *page).collect()
    }

    /// The lowest run of adjacent pages, or else the lowest pages.
    fn reserve(&mut self, count: usize) -> Option<Vec<u32>> {
        let free = self.free();
        let run = free.windows(count.max(1)).find(|run| run[run.len() - 1] - run[0] + 1 == run.len() as u32);
        let chosen = match run {
            Some(run) => run[..count].to_vec(),
            None => free.get(..count)?.to_vec(),
        };
        self.pages.extend(chosen.iter().map(|page| (*page, Reserved)));
        Some(chosen)
    }

    fn step(&mut self, page: u32, name: &str, from: &[PageState], to: PageState) -> bool {
        let state = self.pages.get(&page).copied();
        match state {
            Some(state) if from.contains(&state) => {
                match to == Free && page >= self.capacity {
                    true => self.pages.remove(&page),
                    false => self.pages.insert(page, to),
                };
                return true;
            }
            None => self.misuses.unknown_pages += 1,
            Some(Resident) if name == "commit" => self.misuses.double_commits += 1,
            Some(Free) if ["abort", "release", "settle"].contains(&name) => self.misuses.double_frees += 1,
            Some(_) => self.misuses.wrong_states += 1,
        }
        false
    }

    fn withhold(&mut self, first: u32, end: u32) -> bool {
        match (first..end).find(|page| self.pages.get(page) != Some(&Free)) {
            Some(other) => self.step(other, "withhold", &[Free], Withheld),
            None => {
                self.pages.extend((first..end).map(|page| (page, Withheld)));
                true
            }
        }
    }

    fn offer(&mut self, first: u32, end: u32) -> u32 {
        let withheld = self.pages.range_mut(first..end).filter(|(_, state)| **state == Withheld);
        withheld.map(|(_, state)| *state = Free).count() as u32
    }
}

#[derive(Clone, Debug)]
enum Step {
    Reserve(u32),
    Commit(u32),
    Abort(u32),
    Release(u32),
    Quarantine(u32),
    Settle(u32),
    Adopt(u32),
    Withhold(u32, u32),
    Offer(u32, u32),
    Resize(u32),
}

fn any_step() -> impl Strategy<Value = Step> {
    let page = || 0u32..210;
    prop_oneof![
        4 => (0u32..12).prop_map(Step::Reserve),
        1 => (0u32..150).prop_map(Step::Reserve),
        4 => page().prop_map(Step::Commit),
        2 => page().prop_map(Step::Abort),
        3 => page().prop_map(Step::Release),
        2 => page().prop_map(Step::Quarantine),
        3 => page().prop_map(Step::Settle),
        2 => page().prop_map(Step::Adopt),
        1 => (page(), 0u32..70).prop_map(|(first, count)| Step::Withhold(first, first + count)),
        1 => (page(), 0u32..70).prop_map(|(first, count)| Step::Offer(first, first + count)),
        1 => page().prop_map(Step::Resize),
    ]
}

/// Does one step to both and compares the answers.
fn apply(pool: &mut PagePool, naive: &mut NaivePool, step: &Step) -> Result<(), TestCaseError> {
    let (done, wanted) = match *step {
        Step::Reserve(count) => {
            let mut pages = vec![PageId(999)];
            let done = pool.reserve(count, &mut pages);
            let wanted = naive.reserve(count as usize);
            let given: Vec<u32> = pages[1..].iter().map(|page| page.0).collect();
            prop_assert_eq!(given, wanted.clone().unwrap_or_default());
            (done, wanted.is_some())
        }
        Step::Commit(page) => {
            (pool.commit(PageId(page)).is_ok(), naive.step(page, "commit", &[Reserved], Resident))
        }
        Step::Abort(page) => (pool.abort(PageId(page)).is_ok(), naive.step(page, "abort", &[Reserved], Free)),
        Step::Release(page) => {
            (pool.release(PageId(page)).is_ok(), naive.step(page, "release", &[Resident], Free))
        }
        Step::Quarantine(page) => {
            let wanted = naive.step(page, "quarantine", &[Reserved, Resident], Quarantined);
            (pool.quarantine(PageId(page)).is_ok(), wanted)
        }
        Step::Settle(page) => {
            (pool.settle(PageId(page)).is_ok(), naive.step(page, "settle", &[Quarantined], Free))
        }
        Step::Adopt(page) => {
            (pool.adopt(PageId(page)).is_ok(), naive.step(page, "adopt", &[Free, Withheld], Resident))
        }
        Step::Withhold(first, end) => (pool.withhold(first..end).is_ok(), naive.withhold(first, end)),
        Step::Offer(first, end) => {
            prop_assert_eq!(pool.offer(first..end), naive.offer(first, end));
            (true, true)
        }
        Step::Resize(capacity) => {
            prop_assert_eq!(pool.resize(capacity), naive.resize(capacity));
            (true, true)
        }
    };
    prop_assert_eq!(done, wanted);
    Ok(())
}

fn compare(pool: &PagePool, naive: &NaivePool) -> Result<(), TestCaseError> {
    prop_assert_eq!(pool.check(), Ok(()));
    prop_assert_eq!(pool.capacity(), naive.capacity);
    for page in 0..300 {
        prop_assert_eq!(pool.state(PageId(page)), naive.pages.get(&page).copied(), "page {}", page);
    }
    for state in [Free, Withheld, Reserved, Resident, Quarantined] {
        let wanted = naive.pages.values().filter(|other| **other == state).count();
        prop_assert_eq!(pool.count(state) as usize, wanted);
    }
    prop_assert_eq!(pool.pages_beyond().collect::<Vec<_>>(), naive.beyond());
    prop_assert_eq!(pool.is_settled(), naive.beyond().is_empty());
    prop_assert_eq!(pool.misuses(), naive.misuses);
    prop_assert_eq!(pool.refused_steps(), naive.misuses.total());
    Ok(())
}

proptest! {
    #[test]
    fn any_order_of_steps_equals_the_naive_pool(
        capacity in 0u32..200, steps in prop::collection::vec(any_step(), 1..300),
    ) {
        let mut pool = PagePool::new("test", capacity);
        let mut naive = NaivePool::default();
        naive.resize(capacity);
        for step in steps {
            apply(&mut pool, &mut naive, &step)?;
            compare(&pool, &naive)?;
        }
    }
}

#[test]
fn owned_pages_beyond_a_smaller_capacity_vanish_when_given_back() {
    let mut pool = PagePool::new("device", 100);
    let mut pages = Vec::new();
    assert!(pool.reserve(90, &mut pages));
    pages[80..].iter().for_each(|page| pool.commit(*page).unwrap());
    pages[..78].iter().for_each(|page| pool.abort(*page).unwrap());
    pool.quarantine(PageId(79)).unwrap();
    assert_eq!(
        pool.resize(50),
        12,
        "78 is reserved, 79 in quarantine, 80 to 89 are resident; 90 to 99 are gone"
    );
    assert_eq!((pool.capacity(), pool.free_pages(), pool.is_settled()), (50, 50, false));
    let mut more = Vec::new();
    assert!(!pool.reserve(51, &mut more), "no page beyond is given out");
    pool.commit(PageId(78)).unwrap();
    for page in [78].into_iter().chain(80..89) {
        pool.release(PageId(page)).unwrap();
    }
    pool.settle(PageId(79)).unwrap();
    assert_eq!(pool.pages_beyond().collect::<Vec<_>>(), [(PageId(89), Resident)]);
    assert!(matches!(pool.release(PageId(80)), Err(PoolError::Unknown { capacity: 50, .. })), "it vanished");
    assert_eq!(pool.resize(90), 0, "89 is inside again and keeps its owner");
    assert_eq!((pool.state(PageId(89)), pool.free_pages()), (Some(Resident), 89));
    assert!(pool.reserve(89, &mut more));
    assert_eq!((more.len(), pool.check()), (89, Ok(())));
}

#[test]
fn withheld_pages_are_adopted_or_offered_but_never_given_out() {
    let mut pool = PagePool::new("disk", 10);
    pool.withhold(2..8).unwrap();
    let mut pages = Vec::new();
    assert!(!pool.reserve(5, &mut pages));
    assert_eq!((pool.free_pages(), pool.withheld_pages()), (4, 6));
    pool.adopt(PageId(3)).unwrap();
    assert_eq!(pool.offer(2..5), 2, "3 has an owner by now");
    assert_eq!(
        pool.withhold(3..5).unwrap_err().to_string(),
        "page 3 of the disk pool is Resident: cannot withhold"
    );
    assert_eq!(pool.resize(6), 0, "withheld pages have no owner");
    assert_eq!(pool.offer(0..10), 1, "what is gone is not offered");
    assert_eq!((pool.free_pages(), pool.withheld_pages(), pool.check()), (5, 0, Ok(())));
}

#[test]
fn misuse_names_page_and_state_and_is_counted_by_kind() {
    let mut pool = PagePool::new("host", 4);
    pool.adopt(PageId(1)).unwrap();
    let commit = pool.commit(PageId(1)).unwrap_err();
    assert_eq!(commit.to_string(), "page 1 of the host pool is Resident: cannot commit");
    let free = pool.settle(PageId(0)).unwrap_err();
    assert_eq!(free.to_string(), "page 0 of the host pool is Free: cannot settle");
    let unknown = pool.release(PageId(9)).unwrap_err();
    assert_eq!(unknown.to_string(), "page 9 is outside the host pool of 4 pages: cannot release");
    assert!(pool.abort(PageId(1)).is_err());
    let wanted = Misuses { double_frees: 1, double_commits: 1, unknown_pages: 1, wrong_states: 1 };
    assert_eq!(pool.misuses(), wanted);
}
