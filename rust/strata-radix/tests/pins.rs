//! What eviction may take once some of the pins are given back is what it may take when they are.
#![allow(missing_docs, clippy::unwrap_used)]

use strata_radix::{HiRadixTree, Pin, TreeConfig};
use strata_types::{GroupId, Namespace, PageId, TierId, Token};

const GROUP: GroupId = GroupId(0);
const SEQUENCES: [[Token; 5]; 3] = [[1, 2, 3, 4, 5], [1, 2, 3, 9, 9], [7, 7, 7, 7, 7]];
/// Sequence, pages, tier.
const PINS: [(usize, usize, TierId); 6] = [
    (0, 5, TierId::DEVICE),
    (0, 2, TierId::DEVICE),
    (1, 4, TierId::DEVICE),
    (1, 4, TierId::HOST),
    (2, 5, TierId::DEVICE),
    (2, 0, TierId::DEVICE),
];

fn pinned() -> (HiRadixTree, Vec<Pin>) {
    let mut tree =
        HiRadixTree::new(TreeConfig { page_size: 1, groups: 1, tiers: 3, ghost_pages: 0 }).unwrap();
    let name = Namespace::new("tenant", "");
    let mut slot = 0;
    for tokens in SEQUENCES {
        let from = tree.match_prefix(&name, GROUP, &tokens).unwrap().pages;
        let slots: Vec<PageId> = (slot..slot + 5 - from).map(PageId).collect();
        tree.insert(&name, GROUP, &tokens, TierId::DEVICE, &slots, from).unwrap();
        slot += 5;
    }
    let mut pin = |(sequence, pages, tier): (usize, usize, TierId)| {
        let found = tree.match_prefix(&name, GROUP, &SEQUENCES[sequence][..pages]).unwrap();
        tree.pin(found.handle, tier).unwrap()
    };
    let pins = PINS.map(&mut pin).into();
    (tree, pins)
}

#[test]
fn what_would_be_evictable_is_what_is_evictable_then() {
    let mut answers = Vec::new();
    for subset in 0..1u32 << PINS.len() {
        let (mut tree, pins) = pinned();
        let (given, _kept): (Vec<_>, Vec<_>) =
            pins.into_iter().enumerate().partition(|(index, _)| subset & (1 << index) != 0);
        let foretold =
            tree.evictable_without(GROUP, TierId::DEVICE, given.iter().map(|(_, pin)| pin)).unwrap();
        for (_, pin) in given {
            tree.unpin(pin).unwrap();
        }
        assert_eq!(foretold, tree.evictable_pages(GROUP, TierId::DEVICE), "pins {subset:b}");
        answers.push(foretold);
    }
    assert_eq!((answers[0], answers.iter().max()), (1, Some(&12)), "all but one page are pinned");
}
