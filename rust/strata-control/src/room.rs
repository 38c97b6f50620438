//! A disk whose file system is full: the pages that nothing can be written to are withheld for a while, so that what is
//! new takes the place of what was used longest ago, as in a full tier, instead of failing.

use crate::controller::CacheController;
use crate::ControlError;
use std::ops::Range;
use std::time::Duration;
use strata_tier::PageState;
use strata_types::{PageId, TierId, Time};

/// How long pages without room are left alone. Each try costs a transfer that fails and is repeated elsewhere.
const ROOM_AGAIN: Duration = Duration::from_secs(10);

/// Pages of the disk that are withheld because there was no room for them.
#[derive(Default)]
pub(crate) struct NoRoom {
    pages: Vec<Range<u32>>,
    until: Time,
}

impl CacheController {
    /// Withholds those of the pages that are free. Returns whether any was.
    pub(crate) fn withhold_roomless(&mut self, pages: &[Range<u32>]) -> Result<bool, ControlError> {
        let pool = &mut self.pools[TierId::DISK.index()];
        let before = pool.withheld_pages();
        for page in pages.iter().cloned().flatten() {
            if pool.state(PageId(page)) == Some(PageState::Free) && page < pool.capacity() {
                pool.withhold(page..page + 1)?;
                match self.no_room.pages.last_mut().filter(|last| last.end == page) {
                    Some(last) => last.end += 1,
                    None => self.no_room.pages.push(page..page + 1),
                }
            }
        }
        self.no_room.until = self.now + ROOM_AGAIN;
        Ok(pool.withheld_pages() > before)
    }

    /// Lets pages be tried again that were withheld long enough.
    pub(crate) fn try_room_again(&mut self) {
        if self.no_room.pages.is_empty() || self.now < self.no_room.until {
            return;
        }
        for pages in std::mem::take(&mut self.no_room).pages {
            self.pools[TierId::DISK.index()].offer(pages);
        }
    }
}
